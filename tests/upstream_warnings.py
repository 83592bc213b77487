"""Deprecation warnings of the libraries below us are errors in our tests; each exception is named with its reason."""

import warnings
from contextlib import contextmanager

# (message pattern, category, reason)
EXCEPTIONS = []


@contextmanager
def warnings_are_errors():
    """Make deprecation warnings errors, but for `EXCEPTIONS`, inside the `with` block."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("error", category=category)
        for message, category, _ in EXCEPTIONS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield
