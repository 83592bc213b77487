"""Operations along dimensions: on the parts, once these dimensions are held whole by every rank."""

import torch

from .alike import has_dims, held_alike
from .layout import ONE, CannotSplit, Factor
from .tensor import Spread


def along(position=1, keyword="dim", default=None):
    """A rule for functions that work along the dimensions that an argument names."""

    def rule(function, tensor, *args, **kwargs):
        if not isinstance(tensor, Spread) or any(isinstance(a, (Spread, torch.Tensor)) for a in args):
            raise CannotSplit("operands of another kind")
        args, given = list(args), kwargs.get(keyword, default)
        by_position = len(args) >= position
        given = args[position - 1] if by_position else given
        dims = list(given) if isinstance(given, (tuple, list)) else [given]
        if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims) or not dims:
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

    return rule


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


_along_one = along()


def flip(function, tensor, *dims):
    return _along_one(function, tensor, dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)


def pieces(function, tensor, *args, **kwargs):
    """chunk, split, tensor_split: like the above, with the dimension behind."""
    dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
    if kwargs or not args:
        raise CannotSplit("arguments by other names")
    return _along_one(lambda local, d: function(local, args[0], d), tensor, dim)


def unbind(function, tensor, dim=0):
    return tuple(tensor.select(dim, i) for i in range(tensor.shape[dim]))


def getitem(function, tensor, index):
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


def setitem(function, tensor, index, value):
    spelled, cut = _spelled_out(tensor, index)
    if tensor.fresh:
        _refill_for(tensor, spelled, cut, value)
        tensor.fresh = False
    if tensor.held_dim in cut and not tensor.memory.viewed:
        tensor.take(tensor.clear_of(*cut))
    target = getitem(None, tensor, index)
    if target.local.untyped_storage().data_ptr() != tensor.local.untyped_storage().data_ptr():
        raise CannotSplit("what is written to is held in part")
    if has_dims(value):
        target.copy_(value)
    else:
        target.local[...] = value


def _refill_for(tensor, index, cut, value):
    """Hold a tensor that was just filled as what is written to it is held, if that is not where it is written to."""
    alike = isinstance(value, Spread) and value.dim() == tensor.dim() == sum(isinstance(i, slice) for i in index)
    dim = value.held_dim if alike else tensor.held_dim
    single = len(tensor.dims[dim]) == 1 and (not alike or value.dims[dim] == tensor.dims[dim])
    if single and dim not in cut:
        tensor.refill(tensor.first(dim))
    elif tensor.held_dim in cut:
        tensor.refill(tensor.clear_of(*cut).at)  # Without sending what every rank knows.


def select(function, tensor, dim, index):
    dim %= tensor.dim()
    return getitem(None, tensor, (*[slice(None)] * dim, int(index)))


def narrow(function, tensor, dim, start, length):
    dim %= tensor.dim()
    return getitem(None, tensor, (*[slice(None)] * dim, slice(start, start + length)))


def cat(function, tensors, dim=0, **kwargs):
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
    dims, at, ranks, parts = held_alike([lead, *merged], lead, keep=(dim - rank,))
    row = all(s.dims[dim][0].row for s in merged if isinstance(s, Spread)) and len(spreads) == len(tensors)
    dims[dim] = (Factor(sum(t.shape[dim] for t in tensors), row),)
    return Spread(torch.cat(parts[1:], sum(map(len, dims[:dim]))), dims, at, ranks)


def stack(function, tensors, dim=0):
    dim %= tensors[0].dim() + 1
    return cat(None, [t.unsqueeze(dim) for t in tensors], dim)


def by_index(function, tensor, dim, index, *args, **kwargs):
    """gather and scatter: operands of one rank, alike but for the dimension that is indexed."""
    if "src" in kwargs:
        args, kwargs = (kwargs["src"], *args), {key: value for key, value in kwargs.items() if key != "src"}
    source = [a for a in args if has_dims(a)]
    if any(has_dims(value) for value in kwargs.values()):
        raise CannotSplit("operands by other names")
    rank = tensor.dim()
    dim %= rank
    operands = [tensor, index, *source]
    if any(o.dim() != rank for o in operands):
        raise CannotSplit("an index of another shape")
    if function.__name__.endswith("_"):
        return _written(tensor, by_index(getattr(torch, function.__name__[:-1]), tensor, dim, index, *args, **kwargs))
    free = [d for d in range(rank) if d != dim]
    operands = [o.clear_of(dim).merged(*free) if isinstance(o, Spread) else o for o in operands]
    if any(o.shape[d] != operands[0].shape[d] for o in operands for d in free):
        raise CannotSplit("an index of another shape")
    lead = next(o for o in operands if isinstance(o, Spread))
    dims, at, ranks, parts = held_alike(operands, lead, keep=(dim - rank,))
    others = iter(parts[2:])
    place = sum(map(len, dims[:dim]))
    local = function(parts[0], place, parts[1], *(next(others) if has_dims(a) else a for a in args), **kwargs)
    dims[dim] = (Factor(local.shape[place]),)
    return Spread(local, dims, at, ranks)


def _written(tensor, result):
    """`tensor`, after `result` has been written to it."""
    if not isinstance(tensor, Spread):
        raise CannotSplit("a tensor that is not held in part")
    result = result.refactored(tensor.dims) if result.dims != tensor.dims else result
    if tensor.fresh and tensor.at != result.at:
        tensor.refill(result.at)
    tensor.fresh = False
    if tensor.at != result.at:
        raise CannotSplit("what is written to is held in part")
    tensor.local.copy_(result.local)
    return tensor


def normalised(function, tensor, shape, *args, **kwargs):
    """layer_norm, rms_norm: along the last dimensions."""
    dims = range(tensor.dim() - len(shape), tensor.dim())
    tensor = tensor.clear_of(*dims)
    tensor = tensor.merged(*range(tensor.dim() - len(shape)))
    return Spread(function(tensor.local, shape, *args, **kwargs), tensor.dims, tensor.at, tensor.ranks)


def conv1d(function, tensor, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A convolution of each channel by itself, held by channels."""
    held = [isinstance(t, Spread) for t in (tensor, weight, bias)]
    if held != [True, False, False] or tensor.dim() != 3 or not groups == tensor.shape[1] == weight.shape[0]:
        raise CannotSplit("a convolution over channels")
    tensor = tensor.clear_of(-1).merged()
    if tensor.at == 1:
        weight, bias = (None if t is None else tensor.ranks.held(t, 0, tensor.factor) for t in (weight, bias))
        groups = tensor.local.shape[1]
    return _wrapped(function(tensor.local, weight, bias, stride, padding, dilation, groups), tensor, [2])


def pad(function, tensor, pad, mode="constant", value=None):
    dims = [tensor.dim() - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    if mode != "constant" or not dims:
        raise CannotSplit(f"padding of mode {mode}")
    tensor = tensor.clear_of(*dims)
    tensor = tensor.merged(*(d for d in range(tensor.dim()) if d not in dims))
    amounts = {tensor.first(d): pad[2 * (tensor.dim() - 1 - d) :][:2] for d in dims}
    spelled = [n for place in reversed(range(tensor.local.dim())) for n in amounts.get(place, (0, 0))]
    return _wrapped(function(tensor.local, spelled, mode, value), tensor, dims)


def index_select(function, tensor, dim, index):
    if not isinstance(tensor, Spread) or isinstance(index, Spread):
        raise CannotSplit("an index that is held in part")
    return _along_one(lambda local, place: local.index_select(place, index), tensor, dim)
