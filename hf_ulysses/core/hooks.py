"""What we do around a module's forward, like the skins of an onion: the last to enter is the first to leave.

PyTorch runs a module's forward hooks in the order of their registration, so that of two that set and restore something
the first would restore before the second. All of ours around a module therefore share one pair of hooks. Hooks that were
there before lie inside: they are part of what the module computes.
"""

import weakref

# Module -> its pairs, and the handles of the two hooks that run them.
_skins: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def around(module, enter, leave) -> list:
    """Call `enter` before and `leave` after each forward of `module`, also after one that raises.

    Args:
        enter (`Callable`): `(module, args, kwargs) -> (args, kwargs)`, or `None` to leave them as they are.
        leave (`Callable`): `(module, args, kwargs, output) -> output`, or `None` to leave it as it is.

    Returns:
        `list` with one handle, whose `remove()` undoes it.
    """
    if module not in _skins:
        pairs = []
        _skins[module] = pairs, _hook(module, pairs)
    _skins[module][0].append(pair := (enter, leave))
    return [_Handle(module, pair)]


def _hook(module, pairs):
    def enter_all(module, args, kwargs):
        for enter, _ in list(pairs):
            changed = enter(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def leave_all(module, args, kwargs, output):
        error = None
        for _, leave in reversed(pairs):
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

    return [
        module.register_forward_pre_hook(enter_all, with_kwargs=True),
        module.register_forward_hook(leave_all, with_kwargs=True, always_call=True),
    ]


class _Handle:
    def __init__(self, module, pair):
        self._module, self._pair = weakref.ref(module), pair

    def remove(self):
        module = self._module()
        if module is None or module not in _skins:
            return
        pairs, handles = _skins[module]
        if self._pair in pairs:
            pairs.remove(self._pair)
        if not pairs:
            for handle in handles:
                handle.remove()
            del _skins[module]
