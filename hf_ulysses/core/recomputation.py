"""Layers that run a second time in backward (checkpointing) have the row of the first time, whatever the model hands on.

The current row (sequence.py) is gone when backward recomputes a layer; models that pass keyword arguments on bring it along,
others do not. Checkpoint functions are therefore wrapped where transformers' layers and torch's wrappers keep them.
A layer that runs again in another way (code of one's own, reversible layers) has the row in its keyword arguments, or is
refused there and then (attachment.py).
"""

import functools

from .sequence import current_row, holding

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


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
