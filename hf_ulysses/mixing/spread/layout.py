"""How a dimension is shared out among the ranks: as the row is, in shards, or as heads are."""

from dataclasses import dataclass, field

import torch

from ...core.heads import share_heads


class CannotSplit(Exception):
    """An operation on a `Spread` that no rule knows."""


@dataclass
class Ranks:
    """Who shares a row of `length` tokens, in shards of `shard`.

    `undone`: operations that ran on whole tensors, noted once these are more than the largest that came in, all together.
    """

    group: object
    rank: int
    size: int
    length: int
    shard: int
    undone: list = field(default_factory=list)
    allowed: int = 0

    def undo(self, what, numel):
        self.allowed -= numel
        if self.allowed < 0 and what not in self.undone and len(self.undone) < 20:
            self.undone.append(what)

    def is_row(self, factor):
        """Whether a dimension is shared out as the row is: whatever is as long, so that equal sizes are held alike."""
        return factor.size == self.length

    def share(self, factor, rank=None):
        """The range of a factor's indices that a rank holds."""
        rank = self.rank if rank is None else rank
        if self.is_row(factor):
            return slice(min(rank * self.shard, self.length), min((rank + 1) * self.shard, self.length))
        return share_heads(factor.size, factor.size, self.size)[rank].query

    def held(self, tensor, dim, factor):
        """This rank's part of a tensor that every rank has whole; rows behind the row's end repeat its last."""
        share = self.share(factor)
        if self.is_row(factor) and share.stop - share.start < self.shard:
            tensor = padded(tensor, dim, self.size * self.shard)
            share = slice(self.rank * self.shard, (self.rank + 1) * self.shard)
        return tensor.narrow(dim, share.start, share.stop - share.start)


@dataclass(frozen=True)
class Factor:
    """`row`: made of the row's positions, all of them or some: not what to hold by where there are heads."""

    size: int
    row: bool = False


ONE = (Factor(1),)


def padded(tensor, dim, length):
    """`length` long, by repeating what is last: numbers that whatever follows can stand, with a gradient of zero."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [-1] * tensor.dim()
    shape[dim] = missing
    return torch.cat([tensor, tensor.narrow(dim, tensor.shape[dim] - 1, 1).expand(shape)], dim)
