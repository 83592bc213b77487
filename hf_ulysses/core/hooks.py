"""What we do around a module's forward, one pair around the other: the last to enter is the first to leave.

PyTorch runs a module's forward hooks in the order of their registration, so that of two that set and restore something
the first would restore before the second. All of ours around a module therefore share one pair of hooks. Hooks that were
there before lie inside: they are part of what the module computes.
"""

import weakref

_around: "weakref.WeakKeyDictionary[torch.nn.Module, _Pairs]" = weakref.WeakKeyDictionary()


def around(module, enter, leave) -> list:
    """Call `enter` before and `leave` after each forward of `module`, also after one that raises.

    Args:
        enter (`Callable`): `(module, args, kwargs) -> (args, kwargs)`, or `None` to leave them as they are.
        leave (`Callable`): `(module, args, kwargs, output) -> output`, or `None` to leave it as it is.

    Returns:
        `list` with one handle, whose `remove()` undoes it.
    """
    if module not in _around:
        _around[module] = found = _Pairs()
        found.handles = found.put_around(module)
    _around[module].pairs.append(pair := (enter, leave))
    return [_Handle(module, pair)]


class _Pairs:
    """The pairs around one module. A deepcopy of the module shares them; one that is saved and loaded has none."""

    def __init__(self):
        self.pairs, self.handles = [], []

    def put_around(self, module) -> list:
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _Pairs, ()

    def enter(self, module, args, kwargs):
        for enter, _ in list(self.pairs):
            changed = enter(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def leave(self, module, args, kwargs, output):
        error = None
        for _, leave in reversed(self.pairs):
            # One that raises keeps none of the others from giving back what they hold.
            try:
                changed = leave(module, args, kwargs, output)
            except BaseException as raised:
                error, output, changed = error or raised, None, None
            if changed is not None:
                output = changed
        if error is not None:
            raise error
        return output


class _Handle:
    def __init__(self, module, pair):
        self._module, self._pair = weakref.ref(module), pair

    def remove(self):
        module = self._module()
        if module is None or module not in _around:
            return
        found = _around[module]
        if self._pair in found.pairs:
            found.pairs.remove(self._pair)
        if not found.pairs:
            for handle in found.handles:
                handle.remove()
            del _around[module]
