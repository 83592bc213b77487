"""Modules that mix positions with functions that can be split over ranks: an exchange around each of them.

A delta net, a state space layer or a short convolution is projections, which know one position each, around one or two
functions that mix. Running the module on the whole row (whole.py) costs every rank the row's work. Here the module keeps
its shard, and only those functions see more:

    a causal convolution   the positions before the shard, as many as it reaches back
    a scan over heads      all-to-all -> the whole row, this rank's heads -> all-to-all     as attention, see attention.py

1. `study` stands between the module and the functions that it calls (seams.py) and asks on a whole row what each of them
   depends on (dependence.py), in training mode and not. A function that cannot be split is declined: it returns `None`,
   as kernels that are not installed do. A module that does not go on to compute the same without it is not split.
2. `study` then runs the module with a NaN at one position, which the seams keep there. A NaN anywhere else in what comes
   out says that the module mixes elsewhere, too: not split.
3. What was split is checked like everything else, by its numbers on a short row sharded and whole (discovery.py).

Gradients are those of the exchanges. A parameter's are its heads', of the whole row, and add up over ranks.
"""

import torch

from ..core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_all
from ..core.hooks import around
from .dependence import ALONE, ByHeads, Halo, Place, own_heads, repeated, sequence_dim, split_of, tensors_of
from ..core.gather import gather_sequence
from ..core.heads import share_heads
from ..core.sequence import ROW_KEY, current_row, hold, release
from .seams import at_seams, stand, standing, step_aside
from ..core.trees import tree_map
from .whole import map_arguments, takes

# What `shard` adds, and models hand on to whoever takes keyword arguments.
_OURS = (ROW_KEY, "shift_labels")


class Mixers:
    """The hooks of one attachment's exchanging modules."""

    def __init__(self, attachment):
        self._attachment = attachment
        self._entered = []

    def study(self, modules, run, length) -> dict:
        """Module -> how its functions are split; without those that cannot be.

        Args:
            modules (`list[torch.nn.Module]`): candidates.
            run (`Callable`): runs the model on a whole row of `length` positions.
        """
        plans, known = {}, {}

        def look(module, args, kwargs):
            if module not in plans:
                plans[module] = None
                with torch.no_grad():
                    plans[module] = _study(module, args, kwargs, length, self._attachment, known)

        handles = [handle for module in modules for handle in at_seams(module)]
        handles += [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
        try:
            run()
        except Exception:
            return {}  # A model that does not run twice alike: discovery says so.
        finally:
            for handle in handles:
                handle.remove()
        return {module: plan for module, plan in plans.items() if plan}

    def exchange(self, module, plan):
        """Returns the handles: `module` runs on its shard, its functions as `plan` says."""

        def enter(module, args, kwargs):
            row = self._attachment.row_of(module, kwargs) if self._attachment.owns(module) else None
            if row is not None and takes(module, "cu_seq_lens_q"):
                kwargs = {**kwargs, **row.boundaries}
            exchanging = None if row is None else _Exchanging(self._attachment, row, plan, kwargs)
            self._entered.append((module, stand(exchanging), hold(row if row is not None else current_row())))
            return args, kwargs

        def leave(module, args, kwargs, output):
            if self._entered and self._entered[-1][0] is module:
                _, token, held = self._entered.pop()
                release(held)
                step_aside(token)

        return around(module, enter, leave) + at_seams(module)


class _Exchanging:
    """The seams of a module in a sharded forward."""

    def __init__(self, attachment, row, plan, passing):
        self.attachment, self.row, self.plan, self.passing = attachment, row, plan, passing
        self.shard = row.padded // attachment.size

    def call(self, name, function, args, kwargs):
        how = self.plan.get(name)
        if how == ALONE:
            return function(*args, **kwargs)
        if how is None and name in self.plan:
            return None  # Declined, see above.
        given = (args, {key: value for key, value in kwargs.items() if key not in _OURS})
        places, bounded = dict(how.places) if how is not None else {}, False
        for path, tensor in tensors_of(given).items():
            known, dim = path in places, places[path].sequence if path in places else None
            if known and (dim is None or tensor.shape[dim] == self.shard):
                continue
            places.setdefault(path, Place(sequence_dim(tensor, self.shard)))
            # What the module was handed for others, and hands on with everything else.
            passed = path.startswith("[1].") and self.passing.get(path[4:]) is tensor
            news = tensor.is_floating_point() and not passed and (how is not None or self.shard in tensor.shape)
            if known or news:
                raise ValueError(
                    f"{name} was called with a tensor of shape {tuple(tensor.shape)} as it was not when the model was "
                    "tried before the first step: what it does with a row in shards is not known. Please report "
                    "the model, or train it without sequence parallelism."
                )
            bounded = bounded or not passed and places[path].sequence is None
        if how is None:
            return function(*args, **kwargs)
        if isinstance(how, ByHeads):
            return self.by_heads(how, function, given, places)
        return self.with_halo(how, function, given, places, bounded)

    def with_halo(self, how, function, given, places, bounded):
        """`bounded`: it was handed boundaries of documents, which count from the row's start: then it needs the row."""

        def widen(path, leaf):
            dim = places[path].sequence if path in places else None
            if dim is None:
                return leaf
            return self.whole(path, leaf, dim) if bounded else self.before_conv(leaf, how.width, dim)

        def cut(_, leaf):
            start = self.attachment.rank * self.shard if bounded else how.width
            return leaf.narrow(how.output.sequence, start, self.shard) if torch.is_tensor(leaf) else leaf

        args, kwargs = tree_map(widen, given)
        return tree_map(cut, function(*args, **kwargs))

    def whole(self, path, tensor, dim):
        if path == "[1].position_ids" and tensor.dim() == self.row.position_ids.dim():
            return self.row.position_ids
        return gather_sequence(tensor, self.attachment.group, dim)

    def by_heads(self, how, function, given, places):
        attachment, row = self.attachment, self.row
        shares = share_heads(how.num_heads, how.num_kv, attachment.size)
        share, tensors = shares[attachment.rank], tensors_of(given)
        # What the padding behind the row computes is nobody's business, unless the user's boundaries include it.
        length = row.padded if row.boundaries else row.length
        travel = [path for path in tensors if places[path].sequence is not None and places[path].heads is not None]
        changed = {}
        for dtype in dict.fromkeys(tensors[path].dtype for path in travel):
            paths = [path for path in travel if tensors[path].dtype == dtype]
            exchange = Exchange(attachment.group, attachment.rank, shares, tuple(not places[p].shared for p in paths))
            rows = gather_seq_scatter_all([_canonical(tensors[p], places[p]) for p in paths], exchange)
            for path, tensor in zip(paths, rows):
                changed[path] = repeated(_restored(tensor, places[path], tensors[path].shape), places[path], share)
        for path, place in places.items():
            if path in tensors and path not in changed:
                tensor = own_heads(tensors[path], place, share)
                changed[path] = tensor if place.sequence is None else self.whole(path, tensor, place.sequence)
        for path, tensor in changed.items():
            if places[path].sequence is not None:
                changed[path] = tensor.narrow(places[path].sequence, 0, length).contiguous()
        args, kwargs = tree_map(lambda path, leaf: changed.get(path, leaf), given)
        result = function(*args, **kwargs)
        exchange = Exchange(attachment.group, attachment.rank, shares)

        def back(_, leaf):
            if not torch.is_tensor(leaf):
                return leaf
            out_BhSE = _canonical(_padded(leaf, how.output.sequence, row.padded), how.output)
            out_BHsE = gather_heads_scatter_seq(out_BhSE.transpose(1, 2), exchange).transpose(1, 2)
            return _restored(out_BHsE, how.output, leaf.shape)

        return tree_map(back, result)

    def before_conv(self, tensor, width, dim=-1):
        """`tensor` with the `width` positions before this shard in front, zeros before the row's first."""
        rank, tail = self.attachment.rank, min(width, self.shard)
        # The ends of all shards: of shards no longer than what is wanted, that is all of the row.
        ends = gather_sequence(tensor.narrow(dim, tensor.shape[dim] - tail, tail), self.attachment.group, dim)
        there = min(rank * tail, width)
        before = _padded(ends.narrow(dim, rank * tail - there, there), dim, width, front=True)
        # Kernels that want channels last get them so if they were.
        inner = 1 if tensor.stride(dim) != 1 else dim
        return torch.cat([before.movedim(dim, inner), tensor.movedim(dim, inner)], inner).movedim(inner, dim)

    def after_conv(self, tensor, width):
        return tensor.narrow(-1, width, tensor.shape[-1] - width)


def _canonical(tensor, place):
    """`[B, heads, sequence, the rest]`, as the exchange wants it."""
    tensor = tensor.movedim((place.heads, place.sequence), (1, 2))
    return tensor.flatten(3) if tensor.dim() > 3 else tensor[..., None]


def _restored(tensor, place, shape):
    rest = [n for dim, n in enumerate(shape) if dim not in (0, place.heads, place.sequence)]
    tensor = tensor.unflatten(3, rest) if rest else tensor[..., 0]
    return tensor.movedim((1, 2), (place.heads, place.sequence))


def _padded(tensor, dim, length, front=False):
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    if not shape[dim]:
        return tensor
    parts = [tensor, tensor.new_zeros(shape)]
    return torch.cat(parts[::-1] if front else parts, dim)


# -- what a module does, asked on a whole row -----------------------------------------------------------------------


class _Learning:
    """Asks each function that is called how it can be split; declines what cannot."""

    def __init__(self, plan, length, attachment, known):
        self.plan, self.length, self.attachment, self.known = plan, length, attachment, known

    def call(self, name, function, args, kwargs):
        # Layers call the same functions with the same shapes: one answer for all.
        described = []
        tree_map(lambda path, leaf: described.append((path, _described(leaf))), (args, kwargs))
        key = (function, tuple(described))
        if key not in self.known:
            self.known[key] = split_of(function, args, kwargs, self.length, self.attachment.size)
        how = self.known[key]
        if self.plan.setdefault(name, how) != how:
            self.plan[name] = None
        return function(*args, **kwargs) if self.plan[name] is not None else None

    def before_conv(self, tensor, width):
        self.plan["a Conv1d"] = Halo(width, (), Place(-1))
        return tensor

    def after_conv(self, tensor, width):
        return tensor


class _Poisoned:
    """Every split function leaves a NaN at the position where it came in."""

    def __init__(self, plan, length):
        self.plan, self.length, self.at = plan, length, length // 2

    def call(self, name, function, args, kwargs):
        how = self.plan.get(name)
        if how == ALONE:
            return function(*args, **kwargs)
        if how is None:
            return None
        args, kwargs = tree_map(self._clean, (args, kwargs))
        return tree_map(lambda _, leaf: self.poisoned(leaf, how.output.sequence), function(*args, **kwargs))

    def before_conv(self, tensor, width):
        return self._clean("", tensor)

    def after_conv(self, tensor, width):
        return self.poisoned(tensor, -1)

    def _clean(self, path, leaf):
        return leaf.nan_to_num(0.0) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf

    def poisoned(self, leaf, dim=None):
        if not torch.is_tensor(leaf) or not leaf.is_floating_point():
            return leaf
        dim = sequence_dim(leaf, self.length) if dim is None else dim
        return leaf if dim is None else leaf.index_fill(dim, torch.tensor([self.at], device=leaf.device), float("nan"))


def _study(module, args, kwargs, length, attachment, known):
    """How the functions of `module` are split, by name; `None` if they cannot be, or are not all that mixes."""
    plan, training = {}, module.training
    try:
        expected = tensors_of(module.forward(*args, **kwargs))
        for module.training in (False, True):
            with standing(_Learning(plan, length, attachment, known)):
                found = tensors_of(module.forward(*args, **kwargs))
            if not any(isinstance(how, (ByHeads, Halo)) for how in plan.values()) or not _close(found, expected):
                return None
            poison = _Poisoned(plan, length)
            with standing(poison):
                bad_args, bad_kwargs = map_arguments(lambda _, leaf: poison.poisoned(leaf), module, args, kwargs)
                found = tensors_of(module.forward(*bad_args, **bad_kwargs))
            for tensor in found.values():
                dim = sequence_dim(tensor, length)
                bad = tensor.isnan() if dim is None else tensor.isnan().movedim(dim, 0).flatten(1).any(1)
                if dim is None or bad.nonzero().flatten().tolist() not in ([], [poison.at]):
                    return None
    except Exception:
        return None  # It cannot do without a function that was declined, or not with what a function was given.
    finally:
        module.training = training
    return plan


def _described(leaf):
    return (tuple(leaf.shape), leaf.dtype) if torch.is_tensor(leaf) else repr(leaf)


def _close(found, expected):
    def close(a, b):
        half = a.dtype in (torch.bfloat16, torch.float16)
        return a.shape == b.shape and torch.allclose(
            a.float(), b.float(), rtol=0.05 if half else 1e-3, atol=1e-2 if half else 1e-5
        )

    return found.keys() == expected.keys() and all(close(found[path], expected[path]) for path in found)
