"""Functions that mix positions, split over ranks as their specs say (specs.py).

A delta net, a state space layer or a short convolution is projections, which know one position each, around one or two
functions that mix. The module keeps its shard, and only those functions see more:

    a causal convolution   the positions before the shard, as many as it reaches back
    a scan over heads      all-to-all -> the whole row, this rank's heads -> all-to-all     as attention, see attention.py

`attach` finds them where a module's class finds them: globals of its modelling file, attributes, kernels that `kernels`
made modules of, and causal `Conv1d` children. What stands there acts in a sharded forward only, and not inside of itself or
of a module on the whole row. Gradients are the exchanges'; a parameter's are its heads', of the whole row, and add up
over ranks.
"""

import functools
import inspect
import sys
import weakref

import torch

from ..core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_all
from ..core.cut import cut_tensor, pad
from ..core.gather import gather_sequence
from ..core.heads import share_heads
from ..core.hooks import around
from ..core.names import Names
from ..core.sequence import ROW_KEY, current_row, holding
from . import inline
from .specs import named, spec_of

# What `shard` adds, and models hand on to whoever takes keyword arguments.
_OURS = (ROW_KEY, "shift_labels")
_BOUNDARIES = ("seq_idx", "cu_seqlens")
_names = Names()


def attach(modules) -> list:
    """Stand in front of every function with a spec that `modules` call.

    Args:
        modules (`list[torch.nn.Module]`): what lies inside of the decoder, itself first.

    Returns:
        `list` of handles, each with `remove()`.
    """
    found = {(owner, name): spec for owner, name, spec in _functions(modules)}
    handles = [_names.hold(owner, name, functools.partial(_wrapper, spec)) for (owner, name), spec in found.items()]
    for handle in handles:
        # Names in modelling files are given back when a model is dropped.
        weakref.finalize(modules[0], handle.remove).atexit = False
    for module in modules:
        handles += _around(module)
        for spec in inline.INLINE:
            if spec.fits(module):
                handles += inline.attach(module, spec, _sharded_call)
    return handles


def _functions(modules):
    """(owner, name, spec) of all functions with a spec that the code of `modules` can reach."""
    classes = {cls.__module__ for module in modules for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")}
    for owner in [*filter(None, map(sys.modules.get, sorted(classes))), *modules]:
        for name, value in list(vars(owner).items()):
            if not name.startswith("__") and (spec := _spec(name, value)) is not None:
                yield owner, name, spec
    for module in modules:
        for name, child in module.named_children():
            if (spec := _spec(name, child)) is not None:
                # Its forward, for it may be replaced by another kernel, but not by a function.
                yield child, "forward", spec


def _spec(name, value):
    if not callable(value) or isinstance(value, type):
        return None
    names = {name, getattr(value, "__name__", name), type(value).__name__}
    # Thousands are looked at, and a signature takes a while.
    return spec_of(names, _parameters(value)) if any(map(named, names)) else None


def _parameters(function):
    """Names of the parameters by which a function can be told; none for one that takes `*args`."""
    while getattr(function, "_ulysses_scan", False):
        function = function.__wrapped__
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):
        return ()
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


def _wrapper(spec, function):
    def scan(*args, **kwargs):
        call = _sharded_call()
        return function(*args, **kwargs) if call is None else call.run(function, spec, args, kwargs)

    # A module's attributes are not a function's.
    functools.update_wrapper(scan, function, updated=())
    scan._ulysses_scan = True
    return scan


def _sharded_call():
    row = current_row()
    return None if row is None or row.attachment is None else _Call(row.attachment, row)


class _Call:
    """One call of such a function in a sharded forward."""

    def __init__(self, attachment, row):
        self.attachment, self.row, self.shard = attachment, row, row.padded // attachment.size
        # What the padding behind the row computes is nobody's business, unless the user's boundaries include it.
        self.length = row.padded if row.boundaries else row.length

    def run(self, function, spec, args, kwargs):
        if spec.kind == "decline":
            return None
        names = [*_parameters(function)] or spec.order
        names = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]
        named = {**dict(zip(names, args)), **{name: value for name, value in kwargs.items() if name not in _OURS}}
        # By the names that the spec has for them.
        given = {spec.parameter(name): value for name, value in named.items()}
        if self.row.boundaries and "cu_seqlens" in given:
            given["cu_seqlens"] = self.row.boundaries["cu_seq_lens_q"]
        places = self._places(function, spec, given)
        self.attachment.scans += 1

        def call(changed):
            values = {name: {**given, **changed}[spec.parameter(name)] for name in named}
            in_order = [values.pop(name) for name in names[: len(args)]]
            with holding(None):
                return function(*in_order, **values)

        parted = any(torch.is_tensor(given.get(boundary)) for boundary in _BOUNDARIES)
        if spec.kind == "halo" and not parted:
            return self._with_halo(spec, given, call)
        if spec.kind == "heads" and given[spec.heads_of].shape[spec.places[spec.heads_of].heads] >= self.attachment.size:
            return self._by_heads(spec, given, places, call)
        # Boundaries of documents count from the row's start; fewer heads than ranks cannot be dealt: the row on every rank.
        output = call({name: self._whole(given[name], place.sequence) for name, place in places.items()})
        rank, size, dim = self.attachment.rank, self.attachment.size, spec.output.sequence
        return _first(lambda out: cut_tensor(out, rank, size, dim=dim), output)

    def _places(self, function, spec, given):
        """Name -> place of all tensors that must change; raises for what is not known."""
        found, called = {}, getattr(function, "__name__", type(function).__name__)
        for name, tensor in given.items():
            if not torch.is_tensor(tensor):
                continue
            place = spec.places.get(name)
            if place is None:
                if tensor.is_floating_point() and (self.shard in tensor.shape or "initial" in name or "state" in name):
                    raise ValueError(
                        f"{called} got {name} of shape {tuple(tensor.shape)}: what it means for a row in shards of "
                        f"{self.shard} is not known. Train without caches and states, or without sequence parallelism."
                    )
                continue
            there = (self.shard,) if name not in _BOUNDARIES else (self.shard, self.row.padded, self.row.length)
            if place.sequence is not None and tensor.shape[place.sequence] not in there:
                raise ValueError(
                    f"{called} got {name} of shape {tuple(tensor.shape)} where this shard of a row of {self.row.padded} "
                    f"tokens over sp_size={self.attachment.size} has {self.shard} in dimension {place.sequence}. "
                    "Caches are not supported with sequence parallelism: set use_cache=False."
                )
            found[name] = place
        return found

    def _whole(self, tensor, dim):
        if dim is None:
            return tensor
        if tensor.shape[dim] == self.shard:
            tensor = gather_sequence(tensor, self.attachment.group, dim)
        return tensor.narrow(dim, 0, self.length).contiguous()

    # -- the positions before the shard -------------------------------------------------------------------------------

    def _with_halo(self, spec, given, call):
        name, weight = spec.order[:2]
        width, dim = given[weight].shape[-1] - 1, spec.places[name].sequence
        output = call({name: self.before(given[name], width, dim)})
        return _first(lambda out: out.narrow(spec.output.sequence, width, self.shard), output)

    def before(self, tensor, width, dim):
        """`tensor` with the `width` positions before this shard in front, zeros before the row's first."""
        rank, tail = self.attachment.rank, min(width, self.shard)
        # The ends of all shards: of shards no longer than what is wanted, that is all of the row.
        ends = gather_sequence(tensor.narrow(dim, tensor.shape[dim] - tail, tail), self.attachment.group, dim)
        behind = [0, 0] * (tensor.dim() - 1 - dim)
        before = torch.nn.functional.pad(ends, [*behind, width, 0]).narrow(dim, rank * tail, width)
        # Kernels that want channels last get them so if they were.
        inner = 1 if tensor.stride(dim) != 1 else dim
        return torch.cat([before.movedim(dim, inner), tensor.movedim(dim, inner)], inner).movedim(inner, dim)

    # -- the heads of this rank ---------------------------------------------------------------------------------------

    def _by_heads(self, spec, given, places, call):
        attachment, row = self.attachment, self.row
        num_heads = given[spec.heads_of].shape[places[spec.heads_of].heads]
        travel = [name for name, place in places.items() if place.sequence is not None and place.heads is not None]
        counts = {given[name].shape[places[name].heads] for name in travel} | {num_heads}
        if len(counts) > 2:
            raise ValueError(f"Arguments {travel} have {sorted(counts)} heads: at most two numbers can be split.")
        num_kv = min(counts)
        shares = share_heads(num_heads, num_kv, attachment.size)
        share, changed = shares[attachment.rank], {}
        for dtype in dict.fromkeys(given[name].dtype for name in travel):
            names = [name for name in travel if given[name].dtype == dtype]
            query = tuple(given[name].shape[places[name].heads] == num_heads for name in names)
            exchange = Exchange(attachment.group, attachment.rank, shares, query)
            rows = gather_seq_scatter_all([_canonical(given[name], places[name]) for name in names], exchange)
            for name, tensor, all_heads in zip(names, rows, query):
                place = places[name]
                tensor = _restored(tensor, place, given[name].shape).narrow(place.sequence, 0, self.length)
                if not all_heads and share.kv_index is not None:
                    tensor = tensor.index_select(place.heads, torch.tensor(share.kv_index, device=tensor.device))
                changed[name] = tensor.contiguous()
        for name, place in places.items():
            if name not in changed:
                tensor = _own(given[name], place, share, num_heads)
                changed[name] = self._whole(tensor, place.sequence)
        exchange = Exchange(attachment.group, attachment.rank, shares)

        def back(out):
            dim = spec.output.sequence
            out_BhSE = _canonical(pad(out, row.padded - out.shape[dim], 0, dim), spec.output)
            out_BHsE = gather_heads_scatter_seq(out_BhSE.transpose(1, 2), exchange).transpose(1, 2)
            return _restored(out_BHsE, spec.output, out.shape)

        return _first(back, call(changed))


def _first(function, output):
    """`function` of the first tensor that comes out. Final states, of this rank's heads, are nobody's: `None`."""
    if torch.is_tensor(output):
        return function(output)
    return type(output)([function(output[0]), *(None for _ in output[1:])])


def _own(tensor, place, share, num_heads):
    """This rank's part of a tensor with one entry, or as many for each, per head."""
    if place.heads is None:
        return tensor
    each = tensor.shape[place.heads] // num_heads
    return tensor.narrow(place.heads, share.query.start * each, share.num_query * each)


def _canonical(tensor, place):
    """`[B, heads, sequence, the rest]`, as the exchange wants it."""
    tensor = tensor.movedim((place.heads, place.sequence), (1, 2))
    return tensor.flatten(3) if tensor.dim() > 3 else tensor[..., None]


def _restored(tensor, place, shape):
    rest = [n for dim, n in enumerate(shape) if dim not in (0, place.heads, place.sequence)]
    tensor = tensor.unflatten(3, rest) if rest else tensor[..., 0]
    return tensor.movedim((1, 2), (place.heads, place.sequence))


# -- modules without a function ---------------------------------------------------------------------------------------


def _around(module) -> list:
    """Handles of hooks around a module that gives each position something of the `width` positions before it."""
    if isinstance(module, torch.nn.Conv1d) and module.stride == (1,) and module.padding_mode == "zeros":
        # It pads both ends and leaves cutting the second to its caller.
        dim, width = -1, module.dilation[0] * (module.kernel_size[0] - 1)
        width = width if module.padding == (width,) else 0
    else:
        dim, width = -2, int(isinstance(module, torch.nn.ZeroPad2d) and tuple(module.padding) == (0, 0, 1, -1))
    if not width:
        return []

    def enter(module, args, kwargs):
        call = _sharded_call()
        return None if call is None else ((call.before(args[0], width, dim % args[0].dim()), *args[1:]), kwargs)

    def leave(module, args, kwargs, output):
        call = _sharded_call()
        if call is None:
            return None
        call.attachment.scans += 1
        return output.narrow(dim, width, output.shape[dim] - width)

    return around(module, enter, leave)
