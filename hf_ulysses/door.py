"""enable() and disable(): the patch table on and off, after a look at the installed versions."""

import functools
import importlib.metadata
import os
import sys
import warnings
from contextlib import contextmanager

from packaging.requirements import Requirement

# Whose versions matter when they are installed, beside the package's own dependencies.
_ENGINES = ("", "deepspeed", "trl")


def check_versions() -> None:
    """Refuse what is too old or known not to work, by name; warn once, on rank 0, of what is newer than tested.

    pyproject.toml is the one place that says which: the requirements, and the extra `tested`. Raises `ImportError`.
    """
    newer = []
    for requirement in _requirements():
        name, installed = requirement.name, _installed(requirement.name)
        if _belongs_to(requirement, "tested"):
            if installed and not requirement.specifier.contains(installed, prereleases=True):
                newer.append(f"{name} {installed} (tested: {requirement.specifier})")
        elif installed is None:
            if _belongs_to(requirement, ""):
                raise ImportError(f"hf_ulysses needs {name}{requirement.specifier}: pip install -U {name}")
        elif any(_belongs_to(requirement, extra) for extra in _ENGINES):
            if not requirement.specifier.contains(installed, prereleases=True):
                wanted = f"{name}{requirement.specifier}"
                raise ImportError(
                    f"hf_ulysses needs {wanted}, but {installed} is installed: pip install -U '{wanted}'"
                )
    if newer and os.environ.get("RANK", "0") == "0":
        tested = "Pin the tested ones with: pip install 'hf_ulysses[tested]'"
        _warn_once(f"hf_ulysses has not been tested with {', '.join(newer)}. {tested}")


def _requirements():
    try:
        return [Requirement(line) for line in importlib.metadata.requires("hf_ulysses") or ()]
    except importlib.metadata.PackageNotFoundError:
        _warn_once("hf_ulysses is imported from a folder, not installed, so that no version is checked")
        return []


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _belongs_to(requirement, extra):
    """Whether it is asked for by this extra and not by the package alone; `""`: by the package alone."""
    alone = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return alone if not extra else not alone and requirement.marker.evaluate({"extra": extra})


@functools.cache
def _warn_once(message):
    warnings.warn(message, stacklevel=4)


def enable() -> None:
    """Switch hf_ulysses on for this process. Call it before an `Accelerator` or a `Trainer` is built. Idempotent.

    Raises:
        ImportError: a library is missing, too old or known not to work.
        RuntimeError: an `Accelerator` exists already, or an upstream symbol that hf_ulysses wraps has changed; nothing has
            been replaced then.
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
    patches.TABLE.restore()
    from .adapters.accelerate import forget_memory
    from .core.attachment import detach_all

    detach_all()
    forget_memory()


@contextmanager
def enabled():
    """`with hf_ulysses.enabled():` - `enable()` inside, `disable()` after it."""
    enable()
    try:
        yield
    finally:
        disable()
