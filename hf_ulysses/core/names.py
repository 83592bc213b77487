"""Names in modelling files that are replaced while models are attached."""

from collections.abc import Callable
from typing import Any


class Names:
    """Names in module namespaces, replaced while someone holds them: counted, restored by identity by the last one."""

    def __init__(self):
        self._held: dict[tuple[Any, str], list] = {}

    def hold(self, owner, name: str, wrap: Callable) -> "Hold":
        """Replace `owner.name` by `wrap(original)`, unless it is held already. Returns a handle with `remove()`."""
        held = self._held.setdefault((owner, name), [0, None, None])
        # Or somebody has replaced it since.
        if not held[0] or vars(owner).get(name) is not held[2]:
            original, replacement = vars(owner).get(name, _ABSENT), wrap(getattr(owner, name))
            setattr(owner, name, replacement)
            held[1:] = original, replacement
        held[0] += 1
        return Hold(self._held, (owner, name))


_ABSENT = object()


class Hold:
    def __init__(self, held, key):
        self._held, self._key = held, key

    def remove(self) -> None:
        key, self._key = self._key, None
        if key is None:
            return
        held, (owner, name) = self._held[key], key
        held[0] -= 1
        if held[0]:
            return
        del self._held[key]
        if vars(owner).get(name) is held[2]:
            delattr(owner, name) if held[1] is _ABSENT else setattr(owner, name, held[1])
