"""Live storage: how many bytes of tensors exist at once while some code runs, real or fake tensors alike."""

import math
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes inside, from its making to its end.

    Views and in-place results are storages known already. What existed before is not counted, unless it is passed to `ignore`.

    Args:
        width (`int`, *optional*): tensors of this last dimension (the vocabulary's) are counted as logits, too.
        repeat (`float`): how often what has this width runs for each time that it does here.

    Attributes:
        live, peak (`int`): bytes now and at most; logits, logits_at_peak (`int`): those of them that are logits.
        sent (`int`): bytes handed to all-to-alls; flops (`float`): of the operators that torch's own counter knows.
    """

    def __init__(self, width=None, repeat=1.0):
        super().__init__()
        self.width, self.repeat = width, repeat
        self.live = self.peak = self.logits = self.logits_at_peak = self.sent = 0
        self.flops = 0.0
        self._known, self._elsewhere = {}, False

    def ignore(self, tensors):
        """Do not count these (parameters, inputs), although operators return views of them."""
        for tensor in tensors:
            self._hold(tensor, counted=False)

    @contextmanager
    def elsewhere(self):
        """What is made inside lives in another memory."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def _hold(self, tensor, counted=True):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted and not self._elsewhere else 0
        logits = size if tensor.dim() and tensor.shape[-1] == self.width else 0

        def gone(_):
            self.live -= size
            self.logits -= logits
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.logits += logits
        if self.live > self.peak:
            self.peak, self.logits_at_peak = self.live, self.logits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf):
                self._hold(leaf)
        if func.name() == "c10d::alltoall_base_":
            self.sent += args[1].nbytes
        elif func.overloadpacket in flop_registry:
            shapes = [tensor.shape for tensor in (*args, out) if torch.is_tensor(tensor)]
            repeat = self.repeat if any(self.width in shape for shape in shapes) else 1
            self.flops += repeat * flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        return out

    def attended(self, shape_BSHD, products):
        """Count the matrix products of causal attention, whose stand-in has none."""
        self.flops += products * math.prod(shape_BSHD) * shape_BSHD[1]
