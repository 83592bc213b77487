"""Layers that run a second time in backward (checkpointing) have the row of the first time, whatever the model hands on.

The current row (row.py) is gone when backward recomputes a layer; models that pass keyword arguments on bring it along,
others do not. Checkpoint functions are therefore wrapped where transformers' layers and torch's wrappers keep them.
Layers that run again in another way (reversible ones) are told by the stack and refused, if they need a row.
"""

import functools
import inspect
import sys

import torch
import torch.utils.checkpoint

from .sequence import current_row, holding

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
# Whoever has one of these above it on the stack is run again in backward, after the model's forward is over.
_RUN_AGAIN = {inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__}
# A builtin from torch 2.14 on: it has no frame, and reversible layers are not told apart there.
if hasattr(torch.autograd.Function.apply, "__func__"):
    _RUN_AGAIN.add(inspect.unwrap(torch.autograd.Function.apply.__func__).__code__)


class _Carrying:
    """A checkpoint function, `function(run, *args, **kwargs)`, whose second `run` has the first one's row."""

    def __init__(self, function):
        self.function = function

    def __call__(self, run, *args, **kwargs):
        row = current_row()
        return self.function(run if row is None else functools.partial(_run_with, row, run), *args, **kwargs)


def _run_with(row, run, *args, **kwargs):
    with holding(row):
        return run(*args, **kwargs)


def carry_row(module) -> None:
    """Wrap the function that checkpoints `module`, if it has one. Idempotent."""
    for name in _ATTRIBUTES:
        function = vars(module).get(name)
        if function is not None and not isinstance(function, _Carrying):
            setattr(module, name, _Carrying(function))


def forget_row(module) -> None:
    """Undo `carry_row`."""
    for name in _ATTRIBUTES:
        if isinstance(vars(module).get(name), _Carrying):
            setattr(module, name, vars(module)[name].function)


def loses_row() -> bool:
    """Whether the caller will run again in backward without the row that is current now."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _RUN_AGAIN:
        if frame.f_code is _run_with.__code__:
            return False
        frame = frame.f_back
    return frame is not None
