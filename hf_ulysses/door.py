"""enable() and disable(): the patch table on and off, after a look at the installed versions."""

import importlib.metadata
import sys
from contextlib import contextmanager

from packaging.version import Version

# Older ones lack a symbol that the patch table needs. Tested: pyproject.toml and constraints/ say with what.
_MINIMUM = {"accelerate": "1.12.0", "transformers": "5.0.0", "trl": "0.18.0", "deepspeed": "0.18.1"}
_REQUIRED = ("accelerate", "transformers")


def check_versions() -> None:
    """Refuse versions that are too old, by name. Raises `ImportError`."""
    for name, minimum in _MINIMUM.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _REQUIRED:
                raise ImportError(f"hf_ulysses needs {name}>={minimum}: pip install -U {name}") from None
            continue
        if Version(installed) < Version(minimum):
            raise ImportError(
                f"hf_ulysses needs {name}>={minimum}, but {installed} is installed: pip install -U {name}"
            )


def enable() -> None:
    """Switch hf_ulysses on for this process. Call it before an `Accelerator` or a `Trainer` is built. Idempotent.

    Raises:
        ImportError: a library is too old. RuntimeError: an `Accelerator` exists already, or an upstream symbol that
            hf_ulysses wraps has changed; nothing has been replaced then.
    """
    check_versions()
    from .adapters.patches import TABLE

    if TABLE.applied:
        return
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state:
        raise RuntimeError(
            "hf_ulysses.enable() was called after an Accelerator had been built, which therefore runs without it. "
            "Call enable() first, at the top of the script."
        )
    TABLE.apply()


def disable() -> None:
    """Undo `enable()`: every replaced attribute is restored by identity, every model detached. Idempotent."""
    patches = sys.modules.get("hf_ulysses.adapters.patches")
    if patches is None or not patches.TABLE.applied:
        return
    patches.TABLE.undo()
    from .core.attachment import detach_all

    detach_all()


@contextmanager
def enabled():
    """`with hf_ulysses.enabled():` - `enable()` inside, `disable()` after it."""
    enable()
    try:
        yield
    finally:
        disable()
