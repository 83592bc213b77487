"""Matrix products and attention: held in part by a batch dimension of both operands, heads most often, or by the rows of
one while every rank has the other."""

import math

import torch
import torch.nn.functional as F

from .alike import as_factors, common, held_alike, is_one, ones, widened
from .layout import CannotSplit, Factor
from .tensor import Spread, moved_together


def matmul(function, a, b):
    if b.dim() == 2 and not isinstance(b, Spread):
        return _per_position(torch.matmul, a, b, columns=b.shape[1])
    if a.dim() < 2 or b.dim() < 2:
        raise CannotSplit("a product with a vector")
    return _product(a, b)


def rmatmul(function, a, b):
    return matmul(None, b, a)


def linear(function, tensor, weight, bias=None):
    if not isinstance(tensor, Spread) or isinstance(weight, Spread):
        raise CannotSplit("weights that are held in part")
    return _per_position(F.linear, tensor, weight, bias, columns=weight.shape[0])


def _per_position(function, tensor, *weights, columns):
    tensor = tensor.clear_of(-1)
    tensor = tensor.merged(*range(tensor.dim() - 1))
    return Spread(function(tensor.local, *weights), [*tensor.dims[:-1], [Factor(columns)]], tensor.at, tensor.ranks)


def addmm(function, bias, *factors, beta=1, alpha=1, **named):
    """addmm, baddbmm: by their operands' two sets of names."""
    a, b = [*factors, *(named[name] for name in ("mat1", "batch1", "mat2", "batch2") if name in named)]
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _product(a, b, merge=False):
    """`a [..., m, k] @ b [..., k, n]`."""
    given, rank = (a, b), max(a.dim(), b.dim())
    a, b = _columns_merged(a, merge), _columns_merged(b, merge)
    batch = [common((a, b), d) for d in range(-rank, -2)]
    a, b = _with_batch(a, batch), _with_batch(b, batch)
    factors, m = [factor for group in batch for factor in group], sum(map(len, batch))
    at = [t.at if isinstance(t, Spread) else None for t in (a, b)]
    ranks = next(t.ranks for t in (a, b) if isinstance(t, Spread))
    # What both are held by, or can be: a dimension in which they are independent.
    held = [t.at for t in (a, b) if isinstance(t, Spread) and t.at < m]
    held.sort(key=lambda place: ranks.is_row(factors[place]))
    shared = [p for p in range(m) if _sizes(a)[p] == _sizes(b)[p] >= ranks.size and not factors[p].row]
    if not held and at not in ([m, None], [None, m + 1]):
        if not shared and not merge and m > rank - 2:
            return _product(*given, merge=True)
        # By heads, if that moves no more than all of the second to every rank.
        cheap = None in at or math.prod(_sizes(a)) + math.prod(_sizes(b)) <= ranks.size * math.prod(_sizes(b))
        if shared and (cheap or at[0] != m):
            held = shared[-1:]
            if None not in at:
                a, b = moved_together([a, b], held * 2)
    if held:
        place = held[0]
        local = torch.matmul(_held_at(a, place, factors[place], ranks), _held_at(b, place, factors[place], ranks))
    elif at[0] == m:
        place, local = m, torch.matmul(a.local, _everywhere(b))
    elif at[1] == m + 1:
        place, local = m + 1, torch.matmul(_everywhere(a), b.local)
    else:
        raise CannotSplit("a sum over what is held in part")
    columns = [_last_factor(a, -2), _last_factor(b, -1)]
    return Spread(local, [*batch, *([factor] for factor in columns)], place, ranks)


def _columns_merged(tensor, merge):
    if not isinstance(tensor, Spread):
        return tensor
    for d in (-2, -1):
        if tensor.held_dim == d % tensor.dim() and len(tensor.dims[d]) > 1:
            tensor = tensor.clear_of(d)
    return tensor.merged() if merge else tensor.merged(*range(tensor.dim() - 2))


def _with_batch(tensor, batch):
    """`tensor` with `batch`'s factors, or ones, before its last two dimensions."""
    missing = len(batch) + 2 - tensor.dim()
    if not isinstance(tensor, Spread):
        shape = [n for n, group in zip((1,) * missing + tuple(tensor.shape[:-2]), batch) for n in as_factors(n, group)]
        return tensor.reshape(*shape, *tensor.shape[-2:])
    wide = widened(tensor, missing)
    groups = [ones(new) if is_one(old) else new for old, new in zip(wide.dims, batch)]
    return wide.refactored([*groups, *wide.dims[-2:]])


def _held_at(tensor, place, factor, ranks):
    if not isinstance(tensor, Spread):
        return tensor if tensor.shape[place] == 1 else ranks.held(tensor, place, factor)
    if tensor.at == place:
        return tensor.local
    return _everywhere(tensor) if tensor.factors[place].size == 1 else tensor.moved(place).local


def _everywhere(tensor):
    return tensor.whole().reshape(_sizes(tensor)) if isinstance(tensor, Spread) else tensor


def _sizes(tensor):
    return [factor.size for factor in tensor.factors] if isinstance(tensor, Spread) else list(tensor.shape)


def _last_factor(tensor, dim):
    return tensor.dims[dim][0] if isinstance(tensor, Spread) else Factor(tensor.shape[dim])


def attention(
    function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """scaled_dot_product_attention, held by heads."""
    heads = query.shape[1]
    if enable_gqa:
        key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    if not all(isinstance(t, Spread) and t.dim() == 4 for t in (query, key, value)):
        raise CannotSplit("operands of another kind")
    operands = [query, key, value, *([attn_mask] if attn_mask is not None else [])]
    lead = next((t for t in operands if isinstance(t, Spread) and t.held_dim == t.dim() - 3), None)
    if lead is None:
        if heads < query.ranks.size:
            raise CannotSplit(f"{heads} heads over {query.ranks.size} ranks")
        several = [i for i, t in enumerate(operands[:3]) if t.shape[1] == heads and t.by_row]
        merged = [operands[i].merged(0) for i in several]
        for i, moved in zip(several, moved_together(merged, [t.first(1) for t in merged])):
            operands[i] = moved
        lead = operands[0]
    dims, at, ranks, parts = held_alike(operands, lead, keep=(-2, -1))
    batch, count = len(dims[0]), sum(map(len, dims[:2]))
    parts = [part.flatten(batch, count - 1).flatten(0, batch - 1) for part in parts]
    mask = parts[3] if attn_mask is not None else None
    local = function(*parts[:3], attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    shape = [f.size for group in dims[:2] for f in group]
    shape[at] = -1
    local = local.reshape(*shape, *local.shape[-2:])
    return Spread(local, [*dims[:2], query.dims[2], (Factor(local.shape[-1]),)], at, ranks)
