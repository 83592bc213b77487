"""Whether the ranks of a group read the same rows, asked with every batch and without waiting for the answer.

Each rank has a checksum `c` of its rows (cut.py). `sum(c)` and `sum(c * c)` over the group ride in a collective that is
there anyway; `size * sum(c * c) == sum(c) ** 2` exactly if all are equal, so that every rank comes to the same verdict.
The first batch is judged at once, every later one when the next begins: by then the numbers have arrived.
"""

import torch
import torch.distributed as dist

from .control import Control

_MESSAGE = (
    "The ranks of a sequence-parallel group read different rows{when}; (batch, length, checksum of tokens and labels) per rank: "
    "{rows}. All of them must read the same batch: split the data over data-parallel ranks only, seed shuffling and random "
    "collators alike, and check that `group` is not the data-parallel group."
)


class Peers:
    """What one attachment remembers of its last batch."""

    def __init__(self, group):
        self._group, self._size = group, dist.get_world_size(group)
        self._pending = None
        self.judged = False  # Whether the first batch has been.

    def payload(self, row):
        """`[c, c * c]`, float64: to be summed over the group, and handed to `judge` with the row."""
        checksum = row.checksum.double()
        return torch.stack([checksum, checksum * checksum])

    def judge(self, row, sums) -> None:
        """Raise `ValueError`, on all ranks alike, if rows differ: of the first batch now, of others in `judge_last`."""
        self._pending = (*row.position_ids.shape[-2:-1], row.length, row.checksum), _to_host(sums)
        if not self.judged:
            self.judge_last(when="")
            self.judged = True

    def judge_last(self, when=" in the last batch") -> None:
        if self._pending is None:
            return
        (*shape, checksum), (sums, arrived) = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()
        total, squares = sums.tolist()
        if self._size * squares != total * total:
            rows = Control(self._group).from_all((*shape, int(checksum)))
            raise ValueError(_MESSAGE.format(when=when, rows=rows))


def _to_host(sums):
    """A copy on its way to the host, and the event that says that it has arrived (`None` on a CPU)."""
    if sums.device.type == "cpu":
        return sums, None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.Event(sums.device.type)
    event.record()
    return host, event
