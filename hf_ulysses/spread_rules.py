"""How operations run on tensors that are held in part (spread.py): one rule for each kind of operation.

    elementwise       on the parts, once all operands are held alike; found by PyTorch's own tags
    along dimensions  softmax, sums, sorting, slices, concatenation: held in part elsewhere, then on the parts
    reshaping         factors are regrouped
    products          held in part by a batch dimension of both (heads), or by a row of one, the other being whole
    everything else   on the whole tensors

A rule decides by shapes of whole tensors alone, so that all ranks exchange alike.
"""

import functools
import math
import sys

import torch
import torch.nn.functional as F

from .spread import ONE, CannotSplit, Factor, Spread, moved_together
from .trial import on_trial

_ALSO_ELEMENTWISE = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "int", "long", "copy_"}
_ALSO_ELEMENTWISE |= {"contiguous", "detach", "dropout", "clone", "logsigmoid"}
_FILLED = {"zeros_like", "ones_like", "full_like", "empty_like"}
_SAME = {"truediv": "div", "rtruediv": "div", "rsub": "sub", "radd": "add", "rmul": "mul", "rpow": "pow", "rand": "and"}
_SAME |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "mod": "remainder"}
_SAME |= {"floordiv": "floor_divide", "rmatmul": "rmatmul"}


def run(function, args, kwargs):
    """`function(*args, **kwargs)` with `Spread` operands: the `__torch_function__` of them all."""
    _refuse_autograd_functions()
    name = getattr(function, "__name__", "")
    name = _SAME.get(name.strip("_"), name.strip("_")) if name.startswith("__") else name
    rule = _RULES.get(name) or (_elementwise if _is_elementwise(name) else None)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], (Spread, torch.Tensor)):
        rule = _elementwise
    for operand in _operands(args, kwargs):
        operand.fresh = operand.fresh and name in ("setitem", "scatter_", "scatter_add_") and operand is args[0]
    try:
        if rule is None:
            raise CannotSplit(f"no rule for {name}")
        return rule(function, *args, **kwargs)
    except CannotSplit as error:
        return _on_whole(function, name, args, kwargs, error)


def _on_whole(function, name, args, kwargs, error):
    if isinstance(args[0], Spread) and (name in ("setitem", "resize") or name.endswith("_")):
        raise TypeError(f"{name} writes to a tensor that is held in part: {error}") from error
    for operand in _operands(args, kwargs):
        operand.ranks.undo(f"{name}: {error}", operand.numel())
    return function(*_map(args), **{key: _map(value) for key, value in kwargs.items()})


def _map(value):
    if isinstance(value, Spread):
        return value.whole()
    return type(value)(map(_map, value)) if type(value) in (tuple, list) else value


def _operands(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, Spread):
            yield value
        elif type(value) in (tuple, list):
            yield from _operands(value, {})


def _refuse_autograd_functions():
    """In a trial: what an autograd function computes from a `Spread` would have no gradient."""
    if not on_trial():
        return
    frame, apply = sys._getframe(2), torch.autograd.Function.apply.__func__.__code__
    while frame is not None and frame.f_code is not torch.nn.Module._call_impl.__code__:
        if frame.f_code is apply:
            raise TypeError("an autograd function was given a tensor that is held in part")
        frame = frame.f_back


@functools.lru_cache(maxsize=None)
def _is_elementwise(name):
    if name in _ALSO_ELEMENTWISE | _FILLED:
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name else None
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


# -- elementwise --------------------------------------------------------------------------------------------------------


def _elementwise(function, *args, **kwargs):
    name = function.__name__
    if "out" in kwargs:
        raise CannotSplit("out=")
    if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], (Spread, torch.Tensor)):
        return args[0].to(args[1].dtype) if isinstance(args[0], Spread) else args[0].to(args[1].local)
    operands = [a for a in (*args, *kwargs.values()) if _has_dims(a)]
    writes = name.endswith("_") and not name.endswith("__")
    if writes and not isinstance(args[0], Spread):
        raise CannotSplit(f"{name} on a tensor that is not held in part")
    lead = args[0] if writes else None
    dims, at, ranks, parts = _alike(operands, lead)
    part_of = {id(operand): part for operand, part in zip(operands, parts)}
    local = function(
        *(part_of.get(id(a), a) if _has_dims(a) else a for a in args),
        **{key: part_of.get(id(a), a) if _has_dims(a) else a for key, a in kwargs.items()},
    )
    if writes:
        return args[0]
    result = Spread(local, dims, at, ranks)
    result.fresh = name in _FILLED
    return result


def _has_dims(value):
    return isinstance(value, Spread) or torch.is_tensor(value) and value.dim() > 0


def _alike(operands, lead=None, keep=()):
    """All operands with one number of dimensions, the same factors, and held in part alike (or not at all, where one has
    size 1). `keep`: dimensions, from the right, whose sizes differ. Returns `dims, at, ranks, local tensors`."""
    spreads = [operand for operand in operands if isinstance(operand, Spread)]
    if lead is None:
        # Who is held by heads stays so.
        lead = next((spread for spread in spreads if not spread.by_row), spreads[0])
    rank = max(operand.dim() for operand in operands)
    dims = [lead.dims[d] if d in keep else _common([lead, *operands], d) for d in range(-rank, 0)]
    at = sum(map(len, dims[: lead.held_dim + rank - lead.dim()])) + lead.at - lead.first(lead.held_dim)
    factor = [f for group in dims for f in group][at]
    if factor != lead.factor:
        raise CannotSplit("factors that differ")
    parts = []
    for operand in operands:
        if isinstance(operand, Spread):
            parts.append(_part_of_spread(operand, dims, at, keep))
        else:
            parts.append(_part_of_whole(operand, dims, at, lead.ranks, keep))
    return dims, at, lead.ranks, parts


def _common(operands, d):
    """Factors of dimension `d`, counted from the right, that fit all operands."""
    spreads = [o for o in operands if isinstance(o, Spread) and o.dim() >= -d and not _is_one(o.dims[d])]
    if not spreads:
        sizes = [o.shape[d] for o in operands if not isinstance(o, Spread) and o.dim() >= -d]
        return (Factor(max(sizes, default=1)),)
    # What is held in part stays as it is; else the finest.
    group = max((s.dims[d] for s in spreads), key=len)
    group = next((s.dims[d] for s in spreads if s.held_dim == s.dim() + d), group)
    row = len(group) == 1 and any(f.row for s in spreads for f in s.dims[d])
    return tuple(Factor(f.size, f.row or row) for f in group)


def _part_of_spread(spread, dims, at, keep):
    wide, keep = _widened(spread, len(dims) - spread.dim()), [d % len(dims) for d in keep]
    groups = [_ones(new) if _is_one(old) else new for old, new in zip(wide.dims, dims)]
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
        shape += [n] if d in keep else _as_factors(n, group)
    factor = [f for group in dims for f in group][at]
    tensor = tensor.reshape(shape)
    return tensor if tensor.shape[at] == 1 and factor.size > 1 else ranks.held(tensor, at, factor)


def _widened(spread, missing):
    local = spread.local.reshape((1,) * missing + tuple(spread.local.shape))
    return Spread(local, (ONE,) * missing + spread.dims, spread.at + missing, spread.ranks)


def _as_factors(n, group):
    return [f.size for f in (_ones(group) if n == 1 else group)]


def _is_one(group):
    return math.prod(f.size for f in group) == 1


def _ones(group):
    return ONE * len(group)


# -- along dimensions ---------------------------------------------------------------------------------------------------


def _along(*names, position=1, keyword="dim", default=None):
    """A rule for functions that work along the dimensions that an argument names."""

    def rule(function, tensor, *args, **kwargs):
        if not isinstance(tensor, Spread) or any(isinstance(a, (Spread, torch.Tensor)) for a in args):
            raise CannotSplit("operands of another kind")
        args, given = list(args), kwargs.get(keyword, default)
        by_position = len(args) >= position
        given = args[position - 1] if by_position else given
        dims = list(given) if isinstance(given, (tuple, list)) else [given]
        if not all(isinstance(d, int) for d in dims) or not dims:
            raise CannotSplit("no dimension is named")
        dims = [d % tensor.dim() for d in dims]
        tensor = tensor.clear_of(*dims)
        tensor = tensor.merged(*(d for d in range(tensor.dim()) if d not in dims))
        places = [tensor.first(d) for d in dims]
        places = places if isinstance(given, (tuple, list)) else places[0]
        if by_position:
            args[position - 1] = places
        else:
            kwargs = {**kwargs, keyword: places}
        return _wrapped(function(tensor.local, *args, **kwargs), tensor, dims)

    return dict.fromkeys(names, rule)


def _wrapped(result, tensor, dims):
    """What came out of a function along `dims` of `tensor`, all else being as it was."""
    if isinstance(result, (tuple, list)):
        return type(result)([_wrapped(item, tensor, dims) for item in result])
    kept = result.dim() == tensor.local.dim()
    if not kept and result.dim() != tensor.local.dim() - len(dims):
        raise CannotSplit("a result of another shape")
    groups = []
    for d, group in enumerate(tensor.dims):
        if d not in dims:
            groups.append(group)
        elif kept:
            groups.append((Factor(result.shape[tensor.first(d)], group[0].row),))
    at = tensor.at if kept else tensor.at - sum(tensor.first(d) < tensor.at for d in dims)
    return Spread(result, groups, at, tensor.ranks)


def _pieces(function, tensor, *args, **kwargs):
    """chunk, split, tensor_split: like the above, with the dimension behind."""
    dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
    return _RULES["softmax"](lambda local, d: function(local, args[0], d), tensor, dim)


def _unbind(function, tensor, dim=0):
    return tuple(tensor.select(dim, i) for i in range(tensor.shape[dim]))


def _getitem(function, tensor, index):
    index, cut = _spelled_out(tensor, index)
    tensor = tensor.clear_of(*cut)
    tensor = tensor.merged(*(d for d in range(tensor.dim()) if d not in cut))
    local_index, groups, at, d = [], [], None, 0
    for i in index:
        if i is None:
            groups.append(ONE)
            local_index.append(None)
            continue
        if d not in cut:
            if tensor.held_dim == d:
                at = sum(map(len, groups)) + tensor.at - tensor.first(d)
            groups.append(tensor.dims[d])
            local_index += [slice(None)] * len(tensor.dims[d])
        else:
            local_index.append(i)
            if not isinstance(i, int):
                n = len(i) if isinstance(i, list) else len(range(*i.indices(tensor.shape[d])))
                groups.append((Factor(n, tensor.dims[d][0].row),))
        d += 1
    return Spread(tensor.local[tuple(local_index)], groups, at, tensor.ranks)


def _spelled_out(tensor, index):
    """An index for every dimension (or `None` for a new one), and the dimensions of which it takes a part."""
    if not isinstance(tensor, Spread):
        raise CannotSplit("an index that is held in part")
    index = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(i, (int, slice, list, type(None), type(...))) or isinstance(i, bool) for i in index):
        raise CannotSplit("indices that are tensors")
    if sum(isinstance(i, list) for i in index) > 1:
        raise CannotSplit("more than one list of indices")
    rest = [slice(None)] * (tensor.dim() - sum(i is not None and i is not ... for i in index))
    dots = next((n for n, i in enumerate(index) if i is ...), len(index))
    index = [*index[:dots], *rest, *index[dots + 1 :]]
    taken = [i for i in index if i is not None]
    whole = [isinstance(i, slice) and i.indices(n) == (0, n, 1) for i, n in zip(taken, tensor.shape)]
    return index, [d for d, all_of_it in enumerate(whole) if not all_of_it]


def _setitem(function, tensor, index, value):
    spelled, cut = _spelled_out(tensor, index)
    if tensor.held_dim in cut and tensor.fresh:
        tensor.refill(tensor.clear_of(*cut).at)
    target = _getitem(None, tensor, index)
    if target.local.untyped_storage().data_ptr() != tensor.local.untyped_storage().data_ptr():
        raise CannotSplit("what is written to is held in part")
    if _has_dims(value):
        target.copy_(value)
    else:
        target.local[...] = value


def _select(function, tensor, dim, index):
    dim %= tensor.dim()
    return _getitem(None, tensor, (*[slice(None)] * dim, int(index)))


def _narrow(function, tensor, dim, start, length):
    dim %= tensor.dim()
    return _getitem(None, tensor, (*[slice(None)] * dim, slice(start, start + length)))


def _cat(function, tensors, dim=0, **kwargs):
    dim = kwargs.pop("axis", dim)
    spreads = [t for t in tensors if isinstance(t, Spread)]
    rank = spreads[0].dim()
    dim %= rank
    if kwargs or any(t.dim() != rank for t in tensors):
        raise CannotSplit("tensors of different dimensions")
    lead = next((s for s in spreads if not s.by_row and s.held_dim != dim), spreads[0]).clear_of(dim)
    free = [d for d in range(rank) if d != dim]
    merged = [s.clear_of(dim).merged(*free) if isinstance(s, Spread) else s for s in tensors]
    lead = lead.merged(*free)
    dims, at, ranks, parts = _alike([lead, *merged], lead, keep=(dim - rank,))
    row = all(s.dims[dim][0].row for s in merged if isinstance(s, Spread)) and len(spreads) == len(tensors)
    dims[dim] = (Factor(sum(t.shape[dim] for t in tensors), row),)
    return Spread(torch.cat(parts[1:], sum(map(len, dims[:dim]))), dims, at, ranks)


def _stack(function, tensors, dim=0):
    dim %= tensors[0].dim() + 1
    return _cat(None, [t.unsqueeze(dim) for t in tensors], dim)


def _by_index(function, tensor, dim, index, *args, **kwargs):
    """gather and scatter: operands of one rank, alike but for the dimension that is indexed."""
    source = [a for a in args if _has_dims(a)]
    rank = tensor.dim()
    dim %= rank
    operands = [tensor, index, *source]
    if any(o.dim() != rank for o in operands):
        raise CannotSplit("an index of another shape")
    if function.__name__.endswith("_"):
        return _written(tensor, _by_index(getattr(torch, function.__name__[:-1]), tensor, dim, index, *args, **kwargs))
    free = [d for d in range(rank) if d != dim]
    operands = [o.clear_of(dim).merged(*free) if isinstance(o, Spread) else o for o in operands]
    if any(o.shape[d] != operands[0].shape[d] for o in operands for d in free):
        raise CannotSplit("an index of another shape")
    lead = next(o for o in operands if isinstance(o, Spread))
    dims, at, ranks, parts = _alike(operands, lead, keep=(dim - rank,))
    others = iter(parts[2:])
    place = sum(map(len, dims[:dim]))
    local = function(parts[0], place, parts[1], *(next(others) if _has_dims(a) else a for a in args), **kwargs)
    dims[dim] = (Factor(local.shape[place]),)
    return Spread(local, dims, at, ranks)


def _written(tensor, result):
    """`tensor`, after `result` has been written to it."""
    if not isinstance(tensor, Spread):
        raise CannotSplit("a tensor that is not held in part")
    result = result.refactored(tensor.dims) if result.dims != tensor.dims else result
    if tensor.fresh and tensor.at != result.at:
        tensor.refill(result.at)
    if tensor.at != result.at:
        raise CannotSplit("what is written to is held in part")
    tensor.local.copy_(result.local)
    return tensor


def _normalised(function, tensor, shape, *args, **kwargs):
    """layer_norm, rms_norm: along the last dimensions."""
    dims = range(tensor.dim() - len(shape), tensor.dim())
    tensor = tensor.clear_of(*dims)
    tensor = tensor.merged(*range(tensor.dim() - len(shape)))
    return Spread(function(tensor.local, shape, *args, **kwargs), tensor.dims, tensor.at, tensor.ranks)


# -- reshaping ----------------------------------------------------------------------------------------------------------


def _view(function, tensor, *shape):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(shape, torch.dtype) or not isinstance(tensor, Spread):
        raise CannotSplit("a view of another kind")
    return _regrouped(tensor, list(shape))


def _regrouped(tensor, shape):
    total = tensor.numel()
    if -1 in shape:
        shape[shape.index(-1)] = total // -math.prod(shape)
    if math.prod(shape) != total or not total:
        raise CannotSplit("an empty tensor")
    try:
        return _with_factors(tensor, shape)
    except CannotSplit:
        return _with_factors(tensor.clear_of(tensor.held_dim).merged(), shape)


def _with_factors(tensor, shape):
    """`tensor` in another shape: factors are cut where `shape` needs it, and grouped."""
    factors = [(f, i == tensor.at) for i, f in enumerate(tensor.factors) if f.size > 1]
    groups, local_shape, at, place = [], [], None, 0
    for n in shape:
        group, have = [], 1
        while have < n:
            factor, held = factors.pop(0)
            if n % (have * factor.size):
                want = n // have
                if held or n % have or factor.size % want:
                    raise CannotSplit(f"{tensor} in the shape {shape}")
                factors.insert(0, (Factor(factor.size // want, factor.row), False))
                factor = Factor(want, factor.row)
            group.append(factor)
            have *= factor.size
            at = place + len(group) - 1 if held else at
            local_shape.append(tensor.local.shape[tensor.at] if held else factor.size)
        if not group:
            group = [Factor(1)]
            local_shape.append(1)
        groups.append(tuple(group))
        place += len(group)
    return Spread(tensor.local.reshape(local_shape), groups, at, tensor.ranks)


def _permuted(tensor, order):
    places = [p for d in order for p in range(tensor.first(d), tensor.first(d) + len(tensor.dims[d]))]
    return Spread(tensor.local.permute(places), [tensor.dims[d] for d in order], places.index(tensor.at), tensor.ranks)


def _permute(function, tensor, *order):
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    return _permuted(tensor, [d % tensor.dim() for d in order])


def _transpose(function, tensor, first=-1, second=-2):
    order = list(range(tensor.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


def _movedim(function, tensor, source, destination):
    # Sizes that tell dimensions apart.
    order = torch.empty([1 + d for d in range(tensor.dim())], device="meta").movedim(source, destination).shape
    return _permuted(tensor, [n - 1 for n in order])


def _flatten(function, tensor, start_dim=0, end_dim=-1):
    start, end, shape = start_dim % tensor.dim(), end_dim % tensor.dim(), list(tensor.shape)
    return _regrouped(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(function, tensor, dim, sizes):
    dim, shape, sizes = dim % tensor.dim(), list(tensor.shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return _regrouped(tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _unsqueeze(function, tensor, dim):
    dim %= tensor.dim() + 1
    return _getitem(None, tensor, (*[slice(None)] * dim, None))


def _squeeze(function, tensor, dim=None):
    wanted = range(tensor.dim()) if dim is None else [dim % tensor.dim()]
    shape = [n for d, n in enumerate(tensor.shape) if n != 1 or d not in wanted]
    return _regrouped(tensor, shape)


def _expand(function, tensor, *shape):
    shape = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    missing, groups, local_shape, old = len(shape) - tensor.dim(), [], [], iter(tensor.local.shape)
    for n, group in zip(shape, [None] * missing + list(tensor.dims)):
        if group is None:
            groups.append((Factor(n),))
            local_shape.append(n)
        elif n in (-1, math.prod(f.size for f in group)):
            groups.append(group)
            local_shape += [next(old) for _ in group]
        else:
            groups.append((*group[:-1], Factor(n)))
            local_shape += [next(old) for _ in group[:-1]] + [n]
            next(old)
    return Spread(tensor.local.expand(local_shape), groups, tensor.at + missing, tensor.ranks)


def _new(function, tensor, *size, **kwargs):
    """new_zeros and the like: held as `tensor` is where the shape allows."""
    filled = function.__name__ == "new_full"
    shape, value = (size[0], size[1:]) if filled else (size[0] if not isinstance(size[0], int) else size, ())
    if len(shape) != tensor.dim() or shape[tensor.held_dim] != tensor.shape[tensor.held_dim]:
        return function(tensor.local, shape, *value, **kwargs)
    groups = [group if d == tensor.held_dim else (Factor(n),) for d, (n, group) in enumerate(zip(shape, tensor.dims))]
    at = tensor.held_dim + tensor.at - tensor.first(tensor.held_dim)
    local_shape = [f.size for group in groups for f in group]
    local_shape[at] = tensor.local.shape[tensor.at]
    result = Spread(function(tensor.local, local_shape, *value, **kwargs), groups, at, tensor.ranks)
    result.fresh = True
    return result


# -- products -----------------------------------------------------------------------------------------------------------


def _matmul(function, a, b):
    if b.dim() == 2 and not isinstance(b, Spread):
        return _per_position(torch.matmul, a, b, columns=b.shape[1])
    if a.dim() < 2 or b.dim() < 2:
        raise CannotSplit("a product with a vector")
    return _product(a, b)


def _rmatmul(function, a, b):
    return _matmul(None, b, a)


def _linear(function, tensor, weight, bias=None):
    if not isinstance(tensor, Spread) or isinstance(weight, Spread):
        raise CannotSplit("weights that are held in part")
    return _per_position(F.linear, tensor, weight, bias, columns=weight.shape[0])


def _per_position(function, tensor, *weights, columns):
    tensor = tensor.clear_of(-1)
    tensor = tensor.merged(*range(tensor.dim() - 1))
    return Spread(function(tensor.local, *weights), [*tensor.dims[:-1], [Factor(columns)]], tensor.at, tensor.ranks)


def _addmm(function, bias, *factors, beta=1, alpha=1, **named):
    """addmm, baddbmm: by their operands' two sets of names."""
    a, b = [*factors, *(named[name] for name in ("mat1", "batch1", "mat2", "batch2") if name in named)]
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _product(a, b, merge=False):
    """`a [..., m, k] @ b [..., k, n]`."""
    given, rank = (a, b), max(a.dim(), b.dim())
    a, b = _columns_merged(a, merge), _columns_merged(b, merge)
    batch = [_common((a, b), d) for d in range(-rank, -2)]
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
        shape = [n for n, group in zip((1,) * missing + tuple(tensor.shape[:-2]), batch) for n in _as_factors(n, group)]
        return tensor.reshape(*shape, *tensor.shape[-2:])
    wide = _widened(tensor, missing)
    groups = [_ones(new) if _is_one(old) else new for old, new in zip(wide.dims, batch)]
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


def _attention(
    function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """scaled_dot_product_attention, held by heads."""
    if not all(isinstance(t, Spread) and t.dim() == 4 for t in (query, key, value)):
        raise CannotSplit("operands of another kind")
    heads = query.shape[1]
    if enable_gqa:
        key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
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
    dims, at, ranks, parts = _alike(operands, lead, keep=(-2, -1))
    batch, count = len(dims[0]), sum(map(len, dims[:2]))
    parts = [part.flatten(batch, count - 1).flatten(0, batch - 1) for part in parts]
    mask = parts[3] if attn_mask is not None else None
    local = function(*parts[:3], attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    shape = [f.size for group in dims[:2] for f in group]
    shape[at] = -1
    local = local.reshape(*shape, *local.shape[-2:])
    return Spread(local, [*dims[:2], query.dims[2], (Factor(local.shape[-1]),)], at, ranks)


def _conv1d(function, tensor, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A convolution of each channel by itself, held by channels."""
    if not isinstance(tensor, Spread) or tensor.dim() != 3 or not groups == tensor.shape[1] == weight.shape[0]:
        raise CannotSplit("a convolution over channels")
    tensor = tensor.clear_of(-1).merged()
    if tensor.at == 1:
        weight, bias = (None if t is None else tensor.ranks.held(t, 0, tensor.factor) for t in (weight, bias))
        groups = tensor.local.shape[1]
    return _wrapped(function(tensor.local, weight, bias, stride, padding, dilation, groups), tensor, [2])


def _pad(function, tensor, pad, mode="constant", value=None):
    dims = [tensor.dim() - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    if mode != "constant" or not dims:
        raise CannotSplit(f"padding of mode {mode}")
    tensor = tensor.clear_of(*dims)
    tensor = tensor.merged(*(d for d in range(tensor.dim()) if d not in dims))
    amounts = {tensor.first(d): pad[2 * (tensor.dim() - 1 - d) :][:2] for d in dims}
    spelled = [n for place in reversed(range(tensor.local.dim())) for n in amounts.get(place, (0, 0))]
    return _wrapped(function(tensor.local, spelled, mode, value), tensor, dims)


def _index_select(function, tensor, dim, index):
    if not isinstance(tensor, Spread) or isinstance(index, Spread):
        raise CannotSplit("an index that is held in part")
    return _RULES["softmax"](lambda local, place: local.index_select(place, index), tensor, dim)


# -- the table ----------------------------------------------------------------------------------------------------------

_RULES = {
    **_along("softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min", "argmax", "cumsum", "logsumexp"),
    **_along("var", "std", "flip", "all", "any", "prod", "cumprod", "sort", "argsort", "logcumsumexp", "glu"),
    **_along("topk", "repeat_interleave", position=2),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), _pieces),
    **dict.fromkeys(("gather", "scatter", "scatter_", "take_along_dim", "scatter_add", "scatter_add_"), _by_index),
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _new),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    "unbind": _unbind,
    "getitem": _getitem,
    "setitem": _setitem,
    "select": _select,
    "narrow": _narrow,
    "stack": _stack,
    "permute": _permute,
    "t": _transpose,
    "movedim": _movedim,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "rmatmul": _rmatmul,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "conv1d": _conv1d,
    "pad": _pad,
    "index_select": _index_select,
    "view_as": lambda function, tensor, other: _view(None, tensor, other.shape),
    "reshape_as": lambda function, tensor, other: _view(None, tensor, other.shape),
    "expand_as": lambda function, tensor, other: _expand(None, tensor, other.shape),
}
