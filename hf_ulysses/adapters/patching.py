"""The mechanism of replacing an attribute and putting it back. Knows no library.

A `Patch` says which attribute of which owner is replaced by what its `wrap` makes of the original. `Patches` checks all,
applies all, and undoes in reverse. Guards are structural: the symbol exists in the owner's own `vars()` and has the
parameters that the wrapper uses. Undo restores the raw attribute; if someone patched on top, it says so.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Patch:
    """One replaced attribute.

    Args:
        target (`str`): `"package.module:Owner.name"` or `"package.module:name"`.
        wrap (`Callable`): original function -> replacement; plain functions and methods only.
        why (`str`): what goes wrong without it.
        until (`str`): when it can go.
        parameters (`tuple[str, ...]`): parameter names that the wrapper relies on.
    """

    target: str
    wrap: Callable
    why: str
    until: str
    parameters: tuple[str, ...] = ()
    owner: Any = field(default=None, repr=False)
    original: Any = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def check(self) -> None:
        """Find the owner and the original. Raises `RuntimeError` naming the full path when upstream has changed."""
        module_name, _, path = self.target.partition(":")
        owner = importlib.import_module(module_name)
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part)
        if self.name not in vars(owner):
            raise RuntimeError(f"hf_ulysses: {self.target} does not exist in {_version(module_name)}.")
        original = vars(owner)[self.name]
        missing = set(self.parameters) - set(inspect.signature(original).parameters)
        if missing:
            raise RuntimeError(
                f"hf_ulysses: {self.target} in {_version(module_name)} lacks the parameters {sorted(missing)}."
            )
        self.owner, self.original = owner, original

    def apply(self) -> None:
        self.replacement = self.wrap(self.original)
        setattr(self.owner, self.name, self.replacement)

    def restore(self) -> None:
        if vars(self.owner)[self.name] is not self.replacement:
            raise RuntimeError(
                f"hf_ulysses: {self.target} was replaced again after enable(); undo that first, then disable()."
            )
        setattr(self.owner, self.name, self.original)
        self.owner = self.original = self.replacement = None


def _version(module_name: str) -> str:
    package = importlib.import_module(module_name.partition(".")[0])
    return f"{package.__name__} {getattr(package, '__version__', '(unknown version)')}"


class Patches:
    """All or none: a table of patches that are applied together and undone together."""

    def __init__(self, table: list[Patch]):
        self.table = table
        self.applied = False

    def apply(self) -> None:
        if self.applied:
            return
        assert len({patch.target for patch in self.table}) == len(self.table), "two patches of one symbol"
        for patch in self.table:
            patch.check()
        done = []
        try:
            for patch in self.table:
                patch.apply()
                done.append(patch)
        except BaseException:
            for patch in reversed(done):
                patch.restore()
            raise
        self.applied = True

    def restore(self) -> None:
        if not self.applied:
            return
        for patch in self.table:
            if vars(patch.owner)[patch.name] is not patch.replacement:
                patch.restore()  # Raises before anything has been undone.
        for patch in reversed(self.table):
            patch.restore()
        self.applied = False
