import os

import pytest

from .ranks import Pools
from .upstream_warnings import warnings_are_errors


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size).run(function, *args)`: a pool of rank processes; `ranks(1)` is one plain process. See ranks.py."""
    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def single(ranks):
    """`single(function, *args)`: the function's result in one plain process, the reference."""
    return lambda function, *args, **kwargs: ranks(1).run(function, *args, **kwargs)[0]


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings_are_errors():
        yield


def pytest_configure(config):
    config.addinivalue_line("markers", 'half("a", "b"): every second case of a product, in turns over a and b; all with --all')


def pytest_collection_modifyitems(config, items):
    """Of a marked product every value stays, and about every pair of values of three axes and more."""
    if os.environ.get("HF_ULYSSES_TEST_ALL"):
        return
    left_out, numbers = set(), {}
    for item in items:
        for mark in item.iter_markers("half"):
            place = 0
            for axis in mark.args:
                seen = numbers.setdefault((item.path, item.originalname, axis), {})
                place += seen.setdefault(repr(item.callspec.params[axis]), len(seen))
            if place % 2 and item.nodeid not in config.args:
                left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
