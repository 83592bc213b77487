"""Other shapes of the same tensor: its factors are regrouped, and cut where a shape needs it."""

import math

import torch

from .dimensions import getitem
from .layout import CannotSplit, Factor
from .tensor import Spread


def view(function, tensor, *shape):
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


def permute(function, tensor, *order):
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    return _permuted(tensor, [d % tensor.dim() for d in order])


def transpose(function, tensor, dim0=-1, dim1=-2):
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(tensor, order)


def movedim(function, tensor, source, destination):
    # Sizes that tell dimensions apart.
    order = torch.empty([1 + d for d in range(tensor.dim())], device="meta").movedim(source, destination).shape
    return _permuted(tensor, [n - 1 for n in order])


def flatten(function, tensor, start_dim=0, end_dim=-1):
    start, end, shape = start_dim % tensor.dim(), end_dim % tensor.dim(), list(tensor.shape)
    return _regrouped(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(function, tensor, dim, sizes):
    dim, shape, sizes = dim % tensor.dim(), list(tensor.shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return _regrouped(tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def unsqueeze(function, tensor, dim):
    dim %= tensor.dim() + 1
    return getitem(None, tensor, (*[slice(None)] * dim, None))


def squeeze(function, tensor, dim=None):
    wanted = range(tensor.dim()) if dim is None else [dim % tensor.dim()]
    shape = [n for d, n in enumerate(tensor.shape) if n != 1 or d not in wanted]
    return _regrouped(tensor, shape)


def expand(function, tensor, *shape):
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


def new_filled(function, tensor, *size, **kwargs):
    """new_zeros and the like: held by the row if the shape has it, else by the longest dimension; see `Spread.refill`."""
    filled = function.__name__ == "new_full"
    shape, value = (size[0], size[1:]) if filled else (size[0] if not isinstance(size[0], int) else size, ())
    ranks = tensor.ranks
    dim = max(range(len(shape)), key=lambda d: (shape[d] == ranks.length, shape[d]), default=None)
    if dim is None or shape[dim] < ranks.size:
        return function(tensor.local, shape, *value, **kwargs)
    groups = [[Factor(n, row=d == dim and n == ranks.length)] for d, n in enumerate(shape)]
    local = ranks.held(function(tensor.local, [1] * len(shape), *value, **kwargs).expand(shape), dim, groups[dim][0])
    result = Spread(local.contiguous(), groups, dim, ranks)
    result.fresh = True
    return result
