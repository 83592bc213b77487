"""Elementwise operations: on the parts, once all operands are held in part alike. Found by PyTorch's own tags."""

import functools
import math

import torch

from .layout import ONE, CannotSplit, Factor
from .tensor import Spread

# What has no tag of PyTorch's.
_ALSO_ELEMENTWISE = set(
    "to type type_as float half bfloat16 double bool int long copy_ contiguous detach dropout clone logsigmoid".split()
)
_FILLED = {"zeros_like", "ones_like", "full_like", "empty_like"}


@functools.lru_cache(maxsize=None)
def is_elementwise(name):
    if name in _ALSO_ELEMENTWISE | _FILLED:
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name else None
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def elementwise(function, *args, **kwargs):
    name = function.__name__
    if "out" in kwargs:
        raise CannotSplit("out=")
    if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], (Spread, torch.Tensor)):
        return args[0].to(args[1].dtype) if isinstance(args[0], Spread) else args[0].to(args[1].local)
    operands = [a for a in (*args, *kwargs.values()) if has_dims(a)]
    writes = name.endswith("_") and not name.endswith("__") or kwargs.get("inplace", False)
    if writes and not isinstance(args[0], Spread):
        raise CannotSplit(f"{name} on a tensor that is not held in part")
    lead = args[0] if writes else None
    dims, at, ranks, parts = held_alike(operands, lead)
    if writes and parts[0].untyped_storage().data_ptr() != args[0].local.untyped_storage().data_ptr():
        raise CannotSplit("factors that differ")
    part_of = {id(operand): part for operand, part in zip(operands, parts)}
    local = function(
        *(part_of.get(id(a), a) if has_dims(a) else a for a in args),
        **{key: part_of.get(id(a), a) if has_dims(a) else a for key, a in kwargs.items()},
    )
    if writes:
        args[0].fresh = False
        return args[0]
    if not torch.is_tensor(local):
        raise CannotSplit("one answer for the whole tensor")
    result = Spread(local, dims, at, ranks)
    result.fresh = name in _FILLED
    return result


def has_dims(value):
    return isinstance(value, Spread) or torch.is_tensor(value) and value.dim() > 0


def held_alike(operands, lead=None, keep=()):
    """All operands with one number of dimensions, the same factors, and held in part alike (or not at all, where one has
    size 1). `keep`: dimensions, from the right, whose sizes differ. Returns `dims, at, ranks, local tensors`."""
    spreads = [operand for operand in operands if isinstance(operand, Spread)]
    if lead is None:
        # Who is held by heads stays so.
        lead = next((spread for spread in spreads if not spread.by_row), spreads[0])
    rank = max(operand.dim() for operand in operands)
    dims = [lead.dims[d] if d in keep else common([lead, *operands], d) for d in range(-rank, 0)]
    at = sum(map(len, dims[: lead.held_dim + rank - lead.dim()])) + lead.at - lead.first(lead.held_dim)
    ranks = lead.ranks
    if [factor for group in dims for factor in group][at].size != lead.factor.size:
        raise CannotSplit("factors that differ")
    parts = []
    for operand in operands:
        if isinstance(operand, Spread):
            parts.append(_part_of_spread(operand, dims, at, keep))
        else:
            parts.append(_part_of_whole(operand, dims, at, ranks, keep))
    return dims, at, ranks, parts


def common(operands, d):
    """Factors of dimension `d`, counted from the right, that fit all operands."""
    spreads = [o for o in operands if isinstance(o, Spread) and o.dim() >= -d and not is_one(o.dims[d])]
    if not spreads:
        sizes = [o.shape[d] for o in operands if not isinstance(o, Spread) and o.dim() >= -d]
        return (Factor(max(sizes, default=1)),)
    # What is held in part stays as it is; else the finest.
    group = max((s.dims[d] for s in spreads), key=len)
    group = next((s.dims[d] for s in spreads if s.held_dim == s.dim() + d), group)
    row = len(group) == 1 and any(f.row for s in spreads for f in s.dims[d])
    return tuple(Factor(f.size, f.row or row) for f in group)


def _part_of_spread(spread, dims, at, keep):
    wide, keep = widened(spread, len(dims) - spread.dim()), [d % len(dims) for d in keep]
    groups = [ones(new) if is_one(old) else new for old, new in zip(wide.dims, dims)]
    wide = wide.refactored([old if d in keep else new for d, (old, new) in enumerate(zip(wide.dims, groups))])
    if wide.at == at:
        return wide.local
    if wide.factors[at].size == 1:
        # The same for all heads, say: needed whole.
        return wide.whole().reshape([factor.size for factor in wide.factors])
    return wide.moved(at).local


def _part_of_whole(tensor, dims, at, ranks, keep):
    tensor = tensor.reshape((1,) * (len(dims) - tensor.dim()) + tuple(tensor.shape))
    keep, shape = [d % len(dims) for d in keep], []
    for d, (n, group) in enumerate(zip(tensor.shape, dims)):
        shape += [n] if d in keep else as_factors(n, group)
    factor = [f for group in dims for f in group][at]
    tensor = tensor.reshape(shape)
    return tensor if tensor.shape[at] == 1 and factor.size > 1 else ranks.held(tensor, at, factor)


def widened(spread, missing):
    local = spread.local.reshape((1,) * missing + tuple(spread.local.shape))
    return Spread(local, (ONE,) * missing + spread.dims, spread.at + missing, spread.ranks)


def as_factors(n, group):
    return [f.size for f in (ones(group) if n == 1 else group)]


def is_one(group):
    return math.prod(f.size for f in group) == 1


def ones(group):
    return ONE * len(group)
