"""Counting what goes over the wire: every collective that torch dispatches while a `with Collectives()` block runs."""

from collections import Counter

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Records this rank's collectives, forward and backward alike.

    Attributes:
        names (`list[str]`): in order, as torch names the operations, such as `"alltoall_base_"`.
        sent (`list[int]`): bytes that leave this rank, for all-to-alls; what stays on the rank does not count.
    """

    def __init__(self):
        super().__init__()
        self.names, self.sent = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.names.append(name)
            if name == "alltoall_base_":
                self.sent.append(_sent(*args))
        return func(*args, **(kwargs or {}))

    @property
    def counts(self):
        return Counter(self.names)


def _sent(output, input, group, output_sizes, input_sizes, *_):
    group = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    sizes = list(input_sizes) or [input.shape[0] // group.size()] * group.size()
    del sizes[group.rank()]
    return sum(sizes) * input[:1].numel() * input.element_size()
