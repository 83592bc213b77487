"""Which positions and which heads a function's output depends on, found by running it with NaN in its arguments.

NaN spreads along every path of a computation, also where weights are zero today, so this is a question of structure and
not of what the current weights show. A function that mixes positions can be split over ranks in two ways:

    Halo      a causal convolution: a rank needs the `width` positions before its shard, and nothing else
    ByHeads   heads (or channels) that know nothing of each other: a rank runs the whole row for some of them

An argument is told apart by what it does, not by its name: along its sequence, along its heads (as many as the output
has, or fewer that several of those share), both (queries), one (a convolution's weight; what all heads read), or none.

Not covered: functions without a batch dimension, with several outputs, with three numbers of heads.
"""

from dataclasses import dataclass

import torch

from ..core.heads import share_heads
from ..core.trees import tree_map


@dataclass(frozen=True)
class Place:
    """Where a tensor has the sequence and the heads: dimensions, or `None`. `shared`: fewer heads than the output."""

    sequence: int | None
    heads: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class Halo:
    width: int
    places: tuple[tuple[str, Place], ...]
    output: Place


@dataclass(frozen=True)
class ByHeads:
    """`places`: of every tensor among the arguments, by path. `num_heads`, `num_kv`: of the output, of what is shared."""

    num_heads: int
    num_kv: int
    places: tuple[tuple[str, Place], ...]
    output: Place


ALONE = "every position for itself"


def split_of(function, args, kwargs, length, size):
    """How `function` can be split over `size` ranks.

    Args:
        function (`Callable`): called with `*args, **kwargs`, which hold whole rows of `length` positions.

    Returns:
        `ALONE`, `Halo`, `ByHeads`, or `None`: not at all.
    """
    call = _Call(function, args, kwargs, length)
    if not any(sequence is not None and t.is_floating_point() for t, sequence in call.tensors.values()):
        return ALONE
    outputs = tensors_of(call())
    if not outputs:
        return ALONE  # A kernel that is not there.
    if call.ambiguous or len(outputs) != 1:
        return None
    (output,) = outputs.values()
    call.output = sequence_dim(output, length)
    if call.output is None:
        return None
    width = call.reach()
    if width == 0:
        return ALONE
    if width is not None and any(
        t.dim() and t.shape[-1] == width + 1 for t, dim in call.tensors.values() if dim is None
    ):
        places = tuple((path, Place(sequence)) for path, (_, sequence) in call.tensors.items())
        return Halo(width, places, Place(call.output))
    return _by_heads(call, output, size)


def _by_heads(call, output, size):
    """The first dimension of the output along which most of what goes in can be split, and works when it is."""
    for heads in range(1, output.dim()):
        num_heads = output.shape[heads]
        if heads == call.output or num_heads < size:
            continue
        places = {path: call.place(path, heads, num_heads) for path in call.tensors}
        counts = {call.tensors[path][0].shape[p.heads] for path, p in places.items() if p.shared}
        weight = {True: 0, False: 0}
        for path, place in places.items():
            weight[place.heads is not None] += call.tensors[path][0].numel()
        if len(counts) > 1 or weight[True] <= weight[False]:
            continue
        num_kv = counts.pop() if counts else num_heads
        split = ByHeads(num_heads, num_kv, tuple(places.items()), Place(call.output, heads))
        # Of every rank, or ranks would call a different number of times what an engine gathers parameters for.
        shares = {(s.num_query, s.num_kv, s.kv_index): s for s in share_heads(num_heads, num_kv, size)}.values()
        if all(_works(call, split, s, output.narrow(heads, s.query.start, s.num_query)) for s in shares):
            return split
    return None


def _works(call, split, share, expected):
    """Whether the heads of `share` do not hear of the others, and come out the same without them."""
    places, alone, strangers = dict(split.places), {}, {}
    for path, (tensor, _) in call.tensors.items():
        alone[path] = own_heads(tensor, places[path], share)
        if places[path].heads is not None:
            mine, strange = share.kv if places[path].shared else share.query, torch.full_like(tensor, float("nan"))
            part = (places[path].heads, mine.start, mine.stop - mine.start)
            strange.narrow(*part).copy_(tensor.narrow(*part))
            strangers[path] = strange
    (among,) = tensors_of(call(strangers)).values()
    if among.narrow(split.output.heads, share.query.start, share.num_query).isnan().any():
        return False
    try:
        return _same(next(iter(tensors_of(call(alone)).values()), None), expected)
    except Exception:
        return False  # It insists on the number of heads that it was made for.


def own_heads(tensor, place, share):
    """The heads of `share`, of a tensor that has all of them."""
    if place.heads is None:
        return tensor
    mine = share.kv if place.shared else share.query
    return repeated(tensor.narrow(place.heads, mine.start, mine.stop - mine.start), place, share)


def repeated(tensor, place, share):
    """A share's key/value heads, repeated where its query heads straddle them unevenly (see heads.py)."""
    if not place.shared or share.kv_index is None:
        return tensor
    return tensor.index_select(place.heads, torch.tensor(share.kv_index, device=tensor.device))


def tensors_of(value) -> dict:
    """The tensors in nested arguments or results, by path."""
    found = {}
    tree_map(lambda path, leaf: found.update({path: leaf}) if torch.is_tensor(leaf) else None, value)
    return found


def sequence_dim(tensor, length):
    """The only dimension that is as long as the row, `None` without one or with several."""
    dims = [d for d, n in enumerate(tensor.shape) if n == length]
    return dims[0] if len(dims) == 1 else None


class _Call:
    def __init__(self, function, args, kwargs, length):
        self.function, self.given, self.length = function, (args, kwargs), length
        self.tensors = {path: (t, sequence_dim(t, length)) for path, t in tensors_of(self.given).items()}
        # The batch is dimension 0; two dimensions as long as the row (a mask) cannot be told apart.
        self.ambiguous = any(
            sequence == 0 or sequence is None and length in t.shape or t.is_complex()
            for t, sequence in self.tensors.values()
        )

    def __call__(self, changed=()):
        changed = dict(changed)
        args, kwargs = tree_map(lambda path, leaf: changed.get(path, leaf), self.given)
        return self.function(*args, **kwargs)

    def spread(self, where, along):
        """Where, along dimension `along`, the output is NaN if what `where` names (path: (dim, slice)) is."""
        changed = {}
        for path, (dim, part) in where.items():
            changed[path] = self.tensors[path][0].clone()
            changed[path][(slice(None),) * dim + (part,)] = float("nan")
        (output,) = tensors_of(self(changed)).values()
        bad = output.isnan().movedim(along, 0).flatten(1).any(1)
        return bad.nonzero().flatten().tolist()

    def reach(self):
        """How many later positions one of them reaches; `None` where it is more than those, or earlier ones."""
        sequences = {path: dim for path, (t, dim) in self.tensors.items() if dim is not None and t.is_floating_point()}

        def spread(part):
            return self.spread({path: (dim, part) for path, dim in sequences.items()}, self.output)

        middle = self.length // 2
        here = spread(slice(middle, middle + 1))
        width = max(here, default=middle) - middle
        later, earlier = spread(slice(middle, None)), spread(slice(0, middle))
        local = min(here + later, default=middle) >= middle and max(earlier, default=0) < middle + width
        return width if local and 0 <= width < self.length - middle - 1 else None

    def place(self, path, heads, num_heads):
        """Where argument `path` has its heads, if those of the output lie in dimension `heads`."""
        tensor, sequence = self.tensors[path]
        for dim, n in enumerate(tensor.shape):
            if not tensor.is_floating_point() or dim == sequence or n < 2 or num_heads % n:
                continue
            if dim == 0 and sequence is not None:
                continue
            first, border = n // 2, n // 2 * (num_heads // n)
            low = self.spread({path: (dim, slice(0, first))}, heads)
            high = self.spread({path: (dim, slice(first, None))}, heads)
            if low and high and max(low) < border <= min(high):
                return Place(sequence, dim, n < num_heads)
        return Place(sequence)


def _same(tensor, expected):
    if tensor is None or tensor.shape != expected.shape:
        return False
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    scale = expected.float().abs().max().clamp(min=1e-20)
    return bool(((tensor.float() - expected.float()).abs().max() / scale) <= tolerance)
