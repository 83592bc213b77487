"""Where a module's own code calls functions, so that something may stand in between while that module runs.

Seams are found by structure: the functions of modelling files that the code of the module's class names, functions that
the module holds as attributes, and its causal `Conv1d` children, which pad both ends and leave cutting to their caller.
Outside of `standing(...)`, and for everyone else who calls the same functions, they do nothing.

What stands there has three methods: `call(name, function, args, kwargs)`, which calls the function or does not, and
`before_conv(tensor, width)` and `after_conv(tensor, width)` around a convolution that reaches `width` positions back.
"""

import functools
import inspect
import sys
import weakref
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..adapters.patching import Names

_standing: ContextVar = ContextVar("ulysses_seams", default=None)
_names = Names()


def stand(what):
    """Let `what` stand at the seams until `step_aside(token)`; for hooks, which cannot be a `with` block."""
    return _standing.set(what)


def step_aside(token) -> None:
    _standing.reset(token)


@contextmanager
def standing(what):
    token = _standing.set(what)
    try:
        yield
    finally:
        _standing.reset(token)


def _seam(name):
    def wrap(function):
        @functools.wraps(function)
        def seam(*args, **kwargs):
            what = _standing.get()
            if what is None:
                return function(*args, **kwargs)
            with standing(None):  # What it calls itself is its own business.
                return what.call(name, function, args, kwargs)

        return seam

    return wrap


class _Held:
    """A handle that gives a name back, when it is removed or the module is gone."""

    def __init__(self, module, source, name):
        self.remove = weakref.finalize(
            module, _names.release, _names.hold(source, name, _seam(f"{source.__name__}.{name}"))
        )
        self.remove.atexit = False


class _HeldAttribute:
    """The same for a function that the module holds."""

    def __init__(self, module, name):
        seam = _seam(name)(vars(module)[name])
        # Weakly, for a method of the module would keep it alive.
        self._module, self._name, self._seam = weakref.ref(module), name, weakref.ref(seam)
        setattr(module, name, seam)

    def remove(self):
        module, seam = self._module(), self._seam()
        if module is not None and seam is not None and vars(module).get(self._name) is seam:
            setattr(module, self._name, seam.__wrapped__)


def at_seams(module):
    """Handles of what stands between `module` and the functions it calls."""
    handles = [_HeldAttribute(module, name) for name in _own_functions(module)]
    handles += [_Held(module, source, name) for source, name in _global_functions(module)]
    for child in module.children():
        if (width := _causal_width(child)) is not None:
            handles += _around_conv(child, width)
    return handles


def _own_functions(module):
    return [n for n, value in vars(module).items() if _is_function(value) and n != "forward" and not n.startswith("_")]


def _global_functions(module):
    """Names in modelling files by which the module's own code finds functions."""
    found = set()
    for cls in type(module).__mro__:
        for method in vars(cls).values() if not cls.__module__.startswith("torch.") else ():
            method = inspect.unwrap(method) if callable(method) else None
            code, source = getattr(method, "__code__", None), sys.modules.get(getattr(method, "__module__", None))
            if code is not None and source is not None and vars(source) is method.__globals__:
                found |= {(source, name) for name in _names_in(code) if _is_function(vars(source).get(name))}
    return sorted(found, key=lambda place: (place[0].__name__, place[1]))


def _names_in(code):
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names_in(constant)


def _is_function(value):
    """Not classes; not modules, which discovery judges for themselves; not what exchanges already (attention.py)."""
    if not callable(value) or isinstance(value, (type, torch.nn.Module)) or hasattr(value, "_exchanges"):
        return False
    # Kernels that are launched by subscript, as Triton's, are more than functions.
    return not hasattr(type(value), "__getitem__")


def _causal_width(child):
    """How far a causal convolution reaches back: it pads both ends and leaves cutting the second to its caller."""
    if not isinstance(child, torch.nn.Conv1d) or child.stride != (1,) or child.padding_mode != "zeros":
        return None
    width = child.dilation[0] * (child.kernel_size[0] - 1)
    return width if width and child.padding == (width,) else None


def _around_conv(conv, width):
    def before(conv, args):
        what = _standing.get()
        return None if what is None else (what.before_conv(args[0], width), *args[1:])

    def after(conv, args, output):
        what = _standing.get()
        return None if what is None else what.after_conv(output, width)

    return [conv.register_forward_pre_hook(before), conv.register_forward_hook(after)]
