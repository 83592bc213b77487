"""Live storage: how many bytes of tensors exist at once while some code runs, real or fake tensors alike."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes inside, from its making to its end.

    Views and in-place results are storages known already. What existed before is not counted, unless it is passed to `ignore`.

    Attributes:
        live, peak (`int`): bytes now and at most.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}

    def ignore(self, tensors):
        """Do not count these (parameters, inputs), although operators return views of them."""
        for tensor in tensors:
            self._hold(tensor, counted=False)

    def _hold(self, tensor, counted=True):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0

        def gone(_):
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf):
                self._hold(leaf)
        return out
