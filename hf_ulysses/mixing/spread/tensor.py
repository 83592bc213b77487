"""A tensor of the whole row of which every rank holds a part: what a module that was written for one process computes with.

Attention that calls no interface is projections, which know one position each, then matrix products over positions, one
head at a time. A module that is handed a `Spread` instead of a tensor does its share of that: it sees the whole row's
shapes, and each operation (rules.py) runs on what this rank holds, after an exchange where it must.

    held by rows     this rank's shard of the sequence, as everywhere else       projections, rotary embeddings, norms
    held by heads    the whole sequence of this rank's share of another          scores, softmax, masks
                     dimension, in which what follows is independent

1. A dimension is made of factors, and the local tensor has a dimension for each: of `[batch * heads, S, D]` the heads can
   be held although they have been merged into the batch.
2. Moving from rows to heads or back is the all-to-all of attention (all_to_all.py).
3. What no rule knows runs on the whole row, on every rank: exact, no faster (`Ranks.undone` counts it). What cannot be
   seen, kernels and autograd functions, refuses a `Spread` as an argument: it is no `torch.Tensor`.

Gradients are those of the operations on local tensors and of the exchanges.
"""

import bisect
import itertools
import math

import torch

from ...core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_all
from ...core.gather import gather_sequence
from ...core.heads import share_heads
from .layout import CannotSplit, Factor, padded


class Memory:
    """Shared by `Spread`s that are views of each other, as the whole tensors would be. `viewed`: there is more than one.
    `writable`: nothing else is a view of it, and the whole tensors would not be views of more. `wholes`: copies that every
    rank has, of which a view was handed out, and their versions then."""

    def __init__(self):
        self.writable, self.viewed, self.wholes = True, False, []

    def check(self):
        if any(whole._version != version for whole, version in self.wholes):
            raise TypeError("what an operation on the whole row returned was written to: it may be a view")


# What hands out memory: it would be that of a copy of the whole, which is gone by then.
_MEMORY = ("data_ptr", "untyped_storage", "storage", "numpy", "set_")


class Spread:
    """See above.

    Args:
        local (`torch.Tensor`): what this rank holds, one dimension per factor.
        dims (`tuple[tuple[Factor, ...], ...]`): the factors of each dimension of the whole tensor.
        at (`int`): which factor, counted over all dimensions, is held in part.
        ranks (`Ranks`): who holds the other parts.
    """

    def __init__(self, local, dims, at, ranks):
        self.local, self.dims, self.at, self.ranks = local, tuple(map(tuple, dims)), at, ranks
        self.factors = [factor for group in self.dims for factor in group]
        self._firsts = [0, *itertools.accumulate(map(len, self.dims))]
        self.fresh = False  # Just filled with one value, and nobody has a view of it: see `refill`.
        self.outside = False  # Handed to whoever called the module, who may pass it on or gather it.
        self.memory = Memory()
        self._moved = {}
        share = ranks.share(self.factor)
        here = ranks.shard if self.by_row else share.stop - share.start
        if list(local.shape) != [here if i == at else factor.size for i, factor in enumerate(self.factors)]:
            raise CannotSplit(f"{tuple(local.shape)} is not this rank's part of {tuple(self.shape)}")

    @classmethod
    def of_shard(cls, tensor, dim, ranks):
        ranks.allowed = max(ranks.allowed, tensor.numel() * ranks.size)
        dims = [[Factor(n)] for n in tensor.shape]
        dims[dim] = [Factor(ranks.length, row=True)]
        return cls(tensor, dims, dim, ranks).handed_out()  # By whoever passed it.

    def handed_out(self):
        """Somebody else may look at this memory from now on."""
        self.fresh, self.memory.viewed = False, True
        return self

    # -- what modules ask of a tensor ---------------------------------------------------------------------------------

    @property
    def shape(self):
        return torch.Size(math.prod(factor.size for factor in group) for group in self.dims)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return len(self.dims)

    def numel(self):
        return self.shape.numel()

    ndim = property(dim)
    dtype = property(lambda self: self.local.dtype)
    device = property(lambda self: self.local.device)
    requires_grad = property(lambda self: self.local.requires_grad)
    is_cuda = property(lambda self: self.local.is_cuda)
    mT = property(lambda self: self.transpose(-2, -1))

    def is_floating_point(self):
        return self.local.is_floating_point()

    def is_contiguous(self):
        return False  # Alike on all ranks: whether a part is depends on how many heads it has.

    def __bool__(self):
        return bool(self.whole())

    def __float__(self):
        return float(self.whole())

    def __int__(self):
        return int(self.whole())

    def __contains__(self, value):
        return value in self.whole()

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return iter(self.unbind(0))

    def __repr__(self):
        return f"Spread({tuple(self.shape)}, {self.dtype}, by {'rows' if self.by_row else 'heads'})"

    def __getattr__(self, name):
        attribute = getattr(torch.Tensor, name, None)
        if name.startswith("_") or name in _MEMORY or not callable(attribute):
            raise AttributeError(f"a Spread has no {name}")
        return lambda *args, **kwargs: self.__torch_function__(attribute, (), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        from .rules import run

        return run(function, args, kwargs or {})

    # -- layouts ------------------------------------------------------------------------------------------------------

    @property
    def factor(self):
        return self.factors[self.at]

    @property
    def by_row(self):
        return self.ranks.is_row(self.factor)

    def first(self, dim):
        """The place of a dimension's first factor among all factors."""
        return self._firsts[dim]

    @property
    def held_dim(self):
        """The dimension that holds the factor that is held in part."""
        return bisect.bisect_right(self._firsts, self.at) - 1

    def refactored(self, groups):
        """The same tensor with other factors of the same dimensions; what is held in part cannot be cut or merged."""
        local, dims, at = self.local, [], self.at
        for dim, (old, new) in enumerate(zip(self.dims, groups, strict=True)):
            first, sizes = sum(map(len, dims)), [factor.size for factor in new]
            if sizes != [factor.size for factor in old]:
                if dim == self.held_dim:
                    raise CannotSplit("a merged dimension that is held in part")
                local = local.flatten(first, first + len(old) - 1).unflatten(first, sizes)
                at += (len(new) - len(old)) * (self.at >= self.first(dim))
                dims.append([Factor(n, any(factor.row for factor in old)) for n in sizes])
            else:
                dims.append(old)
        return Spread(local, dims, at, self.ranks)

    def merged(self, *keep):
        """Every dimension as one factor, but for those in `keep` and the one that is held in part."""
        keep = (*keep, self.held_dim)
        groups = [g if d in keep else _merged(g) for d, g in enumerate(self.dims)]
        return self.refactored(groups)

    def moved(self, to):
        """Held in part at factor `to` instead: by an exchange, or once gathered."""
        # Loops over blocks of the row ask again and again; writing to the tensor changes its version.
        if self.local.is_inference():
            return moved_together([self], [to])[0]  # No version.
        key = to, self.local._version, torch.is_grad_enabled()
        if key not in self._moved:
            self._moved = {key: moved_together([self], [to])[0]}
        return self._moved[key]

    def refill(self, to):
        """Hold a tensor that was just filled with one value in part at factor `to` instead, before it is written to."""
        shape, ranks = [factor.size for factor in self.factors], self.ranks
        value = self.local.flatten()[:1].reshape([1] * len(shape)).expand(shape)
        self.local, self.at, self._moved = ranks.held(value, to, self.factors[to]).contiguous(), to, {}

    def take(self, spread):
        """Become `spread`, the same tensor held elsewhere, before it is written to; nobody has a view of this one."""
        self.local, self.at, self._moved = spread.local.clone(), spread.at, {}

    def clear_of(self, *dims):
        """The same tensor, held in part in none of `dims`."""
        dims = [dim % self.dim() for dim in dims]
        if self.held_dim not in dims:
            return self
        factors, size = self.factors, self.ranks.size
        free = [p for d in range(self.dim()) if d not in dims for p in range(self.first(d), self.first(d + 1))]
        rows = [p for p in free if self.ranks.is_row(factors[p])]
        # The batch last: heads are what is independent.
        others = [p for p in sorted(free, key=lambda p: p == 0) if factors[p].size >= size and p not in rows]
        heads = [p for p in others if not factors[p].row]
        # From rows to heads and back is an exchange; anything else costs a gather.
        places = [*heads, *others, *rows] if self.by_row else [*rows, *others]
        if not places:
            raise CannotSplit(f"dimensions {dims} of {self} are needed whole")
        return self.moved(places[0])

    def flattened(self):
        """What this rank holds, in as many dimensions as the whole tensor has: for what knows one position each."""
        if self.held_dim == self.dim() - 1:
            raise CannotSplit(f"{self} is held in part in its last dimension")
        return self.local.reshape(
            [math.prod(self.local.shape[self.first(d) : self.first(d + 1)]) for d in range(self.dim())]
        )

    def like(self, tensor):
        """`tensor`, which came of `flattened()` where only the last dimension could change, as a `Spread`."""
        if not torch.is_tensor(tensor):
            return tensor
        if tensor.dim() != self.dim() or tensor.shape[:-1] != self.flattened().shape[:-1]:
            raise TypeError(f"{tuple(tensor.shape)} came of {self}")
        groups = [*self.dims[:-1], (Factor(tensor.shape[-1]),)]
        local = tensor.reshape(*self.local.shape[: self.first(self.dim() - 1)], -1)
        return Spread(local, groups, self.at, self.ranks).handed_out()

    def whole(self):
        """The tensor itself, on every rank. Collective, like every move."""
        self.memory.check()
        local, at, ranks, factor = self.local, self.at, self.ranks, self.factor
        if self.by_row:
            return gather_sequence(local, ranks.group, at, ranks.length).reshape(self.shape)
        shares = [ranks.share(factor, rank) for rank in range(ranks.size)]
        longest = max(share.stop - share.start for share in shares)
        parts = gather_sequence(padded(local, at, longest), ranks.group, at).split(longest, at)
        parts = [part.narrow(at, 0, share.stop - share.start) for part, share in zip(parts, shares)]
        return torch.cat(parts, at).reshape(self.shape)

    def to_shard(self, dim):
        """This rank's shard of dimension `dim`, which is the row's."""
        self.memory.check()
        spread = self
        if self.held_dim != dim:
            spread = self.merged()
            spread = spread.moved(spread.first(dim))
        if len(spread.dims[dim]) > 1 or not spread.by_row:
            raise CannotSplit(f"dimension {dim} of {self} is not the row")
        shape = list(self.shape)
        shape[dim] = self.ranks.shard
        return spread.local.reshape(shape)


def moved_together(spreads, to):
    """Hold each of `spreads` in part at factor `to[i]` instead; those that move alike travel in one collective."""
    for spread, place in zip(spreads, to):
        factor, size = spread.factors[place], spread.ranks.size
        if factor.size < size and not spread.ranks.is_row(factor):
            raise CannotSplit(f"{factor.size} heads over {size} ranks")
    moved = [s if place == s.at else None for s, place in zip(spreads, to)]
    waiting = [i for i, done in enumerate(moved) if done is None]
    while waiting:
        alike = [i for i in waiting if _travels(spreads[i], to[i]) == _travels(spreads[waiting[0]], to[waiting[0]])]
        for i, result in zip(alike, _exchanged([spreads[i] for i in alike], [to[i] for i in alike])):
            moved[i] = result
        waiting = [i for i in waiting if i not in alike]
    return moved


def _travels(spread, to):
    factor = spread.factors[to]
    return (
        spread.dtype,
        spread.by_row,
        spread.ranks.is_row(factor),
        factor.size if spread.by_row else spread.factor.size,
    )


def _exchanged(spreads, to):
    ranks, by_row = spreads[0].ranks, spreads[0].by_row
    if by_row == ranks.is_row(spreads[0].factors[to[0]]):
        return [_regathered(spread, place) for spread, place in zip(spreads, to)]
    heads = spreads[0].factors[to[0]] if by_row else spreads[0].factor
    exchange = Exchange(
        ranks.group, ranks.rank, share_heads(heads.size, heads.size, ranks.size), (True,) * len(spreads)
    )
    ends = [(place, spread.at) if by_row else (spread.at, place) for spread, place in zip(spreads, to)]
    canonical = [_canonical(spread.local, *end) for spread, end in zip(spreads, ends)]
    if by_row:
        arrived = [t.narrow(2, 0, ranks.length) for t in gather_seq_scatter_all(canonical, exchange)]
    else:
        longer = [padded(t, 2, ranks.size * ranks.shard).transpose(1, 2) for t in canonical]
        arrived = [gather_heads_scatter_seq(t, exchange).transpose(1, 2) for t in longer]
    return [
        Spread(_restored(tensor, spread.local, *end), spread.dims, place, ranks)
        for tensor, spread, end, place in zip(arrived, spreads, ends, to)
    ]


def _regathered(spread, to):
    whole = spread.whole().reshape([factor.size for factor in spread.factors])
    return Spread(spread.ranks.held(whole, to, spread.factors[to]), spread.dims, to, spread.ranks)


def _canonical(local, heads, row):
    """`[1, heads, row, the rest]`, as the exchange wants it; bytes for booleans, which not every backend carries."""
    local = local.view(torch.uint8) if local.dtype == torch.bool else local
    local = local.movedim((heads, row), (0, 1))
    return local.flatten(2)[None] if local.dim() > 2 else local[None, ..., None]


def _restored(tensor, like, heads, row):
    rest = [n for dim, n in enumerate(like.shape) if dim not in (heads, row)]
    tensor = tensor[0].unflatten(2, rest) if rest else tensor[0, ..., 0]
    tensor = tensor.movedim((0, 1), (heads, row))
    return tensor.contiguous().view(torch.bool) if like.dtype == torch.bool else tensor


def _merged(group):
    return group if len(group) == 1 else (Factor(math.prod(f.size for f in group), any(f.row for f in group)),)


def _operator(name):
    function = getattr(torch.Tensor, name)
    return lambda self, *others: self.__torch_function__(function, (), (self, *others))


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul and or xor invert neg abs"
)
for _name in [f"__{name}__" for name in f"{_OPERATORS} eq ne lt le gt ge getitem setitem".split()]:
    setattr(Spread, _name, _operator(_name))
_IN_PLACE = dict(
    add="add_", sub="sub_", mul="mul_", truediv="div_", floordiv="floor_divide_", mod="remainder_", pow="pow_"
)
_IN_PLACE |= {"and": "bitwise_and_", "or": "bitwise_or_", "xor": "bitwise_xor_"}
for _name, _function in _IN_PLACE.items():
    setattr(Spread, f"__i{_name}__", _operator(_function))
Spread.__hash__ = object.__hash__
