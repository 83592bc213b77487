"""The mechanism of patches: all or none, undone by identity, and never over someone else's work."""

import sys
import types

import pytest

from hf_ulysses.adapters.patching import Patch, Patches
from hf_ulysses.core.names import Names

MODULE = "some_library"


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType(MODULE)
    module.__version__ = "3.2.1"

    class Base:
        def inherited(self):
            return "inherited"

    class Owner(Base):
        def method(self, x):
            return ("method", x)

    def function(x, flag=False):
        return ("function", x, flag)

    module.Owner, module.function = Owner, function
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def patch(path, parameters=(), tag="patched"):
    def wrap(original):
        return lambda *args, **kwargs: (tag, original(*args, **kwargs))

    return Patch(f"{MODULE}:{path}", wrap, why="a test", until="the test ends", parameters=parameters)


def test_apply_and_undo_by_identity(library):
    function, method = library.function, vars(library.Owner)["method"]
    patches = Patches([patch("function", ("x", "flag")), patch("Owner.method", ("self", "x"))])
    for _ in range(2):
        patches.apply()
        patches.apply()
        assert library.function(1) == ("patched", ("function", 1, False))
        assert library.Owner().method(2) == ("patched", ("method", 2))
        patches.restore()
        patches.restore()
        assert library.function is function and vars(library.Owner)["method"] is method


@pytest.mark.parametrize(
    "broken, message",
    [
        (patch("gone"), "some_library:gone does not exist in some_library 3.2.1"),
        (patch("Owner.inherited"), "some_library:Owner.inherited does not exist in some_library 3.2.1"),
        (
            patch("Owner.method", ("x", "y")),
            r"some_library:Owner.method in some_library 3.2.1 lacks the parameters \['y'\]",
        ),
    ],
)
def test_nothing_is_applied_unless_all_can_be(library, broken, message):
    original = library.function
    patches = Patches([patch("function"), broken])
    with pytest.raises(RuntimeError, match=message):
        patches.apply()
    assert library.function is original and not patches.applied


def test_someone_patched_on_top(library):
    function, method = library.function, vars(library.Owner)["method"]
    patches = Patches([patch("function"), patch("Owner.method")])
    patches.apply()
    ours = library.function
    library.function = theirs = lambda x: ours(x)
    with pytest.raises(RuntimeError, match="some_library:function was replaced again after enable"):
        patches.restore()
    assert library.function is theirs and vars(library.Owner)["method"] is not method, "nothing is half undone"
    library.function = ours
    patches.restore()
    assert library.function is function and vars(library.Owner)["method"] is method


def test_names_are_counted(library):
    names, function = Names(), library.function
    first = names.hold(library, "function", lambda f: lambda x: ("held", f(x)))
    held = library.function
    second = names.hold(library, "function", lambda f: pytest.fail("wrapped twice"))
    assert library.function is held
    first.remove()
    assert library.function is held
    second.remove()
    assert library.function is function


def test_names_leave_someone_elses_patch_alone(library):
    names = Names()
    held = names.hold(library, "function", lambda f: lambda x: f(x))
    library.function = theirs = lambda x: None
    held.remove()
    assert library.function is theirs
