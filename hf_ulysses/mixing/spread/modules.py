"""What runs inside of a module that computes with `Spread`s (tensor.py): its children, and the engine's hooks around them.

A child with parameters is taken to know one position each, as a projection, a norm or an adapter does (a trial asks it,
with NaN): it runs on the shard, like any module outside. One that knows more is handed the `Spread`s: one that discovery has found to mix, that
gets the row's positions or masks as well, or whose input is not held by rows.

Engines hang hooks on modules with parameters: they gather parameters, and free them after backward. These are to see tensors.

    ours: Spread -> tensor | the engine's hooks | ours: tensor -> Spread, if that is what the child gets | forward
"""

import torch

from ...core.sequence import hold, release
from ...core.trees import leaves, tree_map
from ..trial import asking, on_trial
from .layout import CannotSplit
from .tensor import Spread

# What knows one position each.
_KNOWN = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm)


def inside(module, dims, mixing, row_of) -> list:
    """Returns the handles.

    Args:
        module (`torch.nn.Module`): what is handed `Spread`s.
        dims (`dict`): path of a result -> its sequence dimension.
        mixing (`list[torch.nn.Module]`): the modules that discovery has found to mix, as they are at the time.
        row_of (`Callable`): the row that `module` runs on, if nothing inside of it does; without an argument, that of the
            innermost that runs on one.
    """

    def leave_module(module, args, output):
        if row_of(module) is None:
            return output  # Inside of another.

        def shard(path, value):
            if not isinstance(value, Spread):
                return value
            if dims.get(path) is None and sum(n == value.ranks.length for n in value.shape) > 1:
                value.outside = True
                return value  # Attention weights: few look at them, and they are large.
            dim = dims.get(path, 1)
            return value.whole() if dim is None else value.to_shard(dim)

        return tree_map(shard, output, "out")

    handles = [module.register_forward_hook(leave_module, prepend=True)]
    for child in module.modules():
        if child is not module and any(True for _ in child.parameters()):
            handles += _Child(mixing, row_of).around(child)
    return handles


class _Child:
    """The hooks of one child; `calls`: what is running, the innermost last."""

    def __init__(self, mixing, row_of):
        self.mixing, self.row_of, self.calls = mixing, row_of, []

    def __deepcopy__(self, memo):
        return self  # A copy of the model takes its hooks along; without `Spread`s they do nothing.

    def around(self, child):
        return [
            child.register_forward_pre_hook(self.before_engine, with_kwargs=True, prepend=True),
            child.register_forward_pre_hook(self.after_engine, with_kwargs=True),
            child.register_forward_hook(self.before_engine_leaves, prepend=True),
            child.register_forward_hook(self.after_engine_left, always_call=True),
        ]

    def before_engine(self, child, args, kwargs):
        given = [value for value in leaves((args, kwargs)) if isinstance(value, Spread)]
        call = _Call() if given else None
        self.calls.append(call)
        if call is None:
            return None
        if not self._knows_the_row(child, given, leaves((args, kwargs))):
            try:
                rows = [_by_rows(spread) for spread in given]
                shards = [spread.flattened() for spread in rows]
            except CannotSplit:
                pass
            else:
                call.like, call.token = rows[0], hold(self.row_of())
                call.given = [(spread.handed_out(), shard, _version(shard)) for spread, shard in zip(given, shards)]
                shards = iter(shards)
                return tree_map(lambda _, v: next(shards) if isinstance(v, Spread) else v, (tuple(args), kwargs))
        return tree_map(call.take_apart, (tuple(args), kwargs))

    def _knows_the_row(self, child, given, values):
        length = given[0].ranks.length
        return any(torch.is_tensor(value) and length in value.shape for value in values) or any(
            inner in self.mixing for inner in child.modules()
        )

    def after_engine(self, child, args, kwargs):
        call = self.calls[-1]
        if call is None:
            return None
        if call.like is not None and on_trial() and type(child) not in _KNOWN:
            self._refuse_mixing(child, args, kwargs, call.like)
        return tree_map(call.put_together, (tuple(args), kwargs)) if call.apart else None

    def _refuse_mixing(self, child, args, kwargs, like):
        """A NaN at one position stays there, whatever the weights are today. In a trial; an error blames the child."""
        dim, shape = like.held_dim, like.flattened().shape
        at = shape[dim] // 2

        def poisoned(path, value):
            if (
                not torch.is_tensor(value)
                or value.shape[: dim + 1] != shape[: dim + 1]
                or not value.is_floating_point()
            ):
                return value
            return value.index_fill(dim, torch.tensor([at], device=value.device), float("nan"))

        with asking():
            answer = child.forward(*tree_map(poisoned, args), **tree_map(poisoned, kwargs))
        for value in leaves(answer):
            if torch.is_tensor(value) and value.dim() > dim and value.is_floating_point():
                bad = value.isnan().movedim(dim, 0).flatten(1).any(1)
                if bad.nonzero().flatten().tolist() not in ([], [at]):
                    raise TypeError(f"{type(child).__name__} mixes positions")

    def before_engine_leaves(self, child, args, output):
        call = self.calls[-1]
        if call is None or call.like is not None:
            return output
        call.apart.clear()
        return tree_map(call.take_apart, output)

    def after_engine_left(self, child, args, output):
        call = self.calls.pop() if self.calls else None
        if call is None:
            return output
        if call.like is None:
            return tree_map(call.put_together, output)
        release(call.token)
        for spread, shard, version in call.given:
            if _version(shard) != version:
                raise TypeError(f"{type(child).__name__} writes to what it is given")
            if any(torch.is_tensor(v) and _storage(v) == _storage(shard) for v in leaves(output)):
                # It gives back what it got: two `Spread`s of what would be one tensor.
                spread.memory.writable = False
        return tree_map(lambda _, value: call.like.like(value), output)


class _Call:
    """`like`: the first of the `Spread`s of which the child gets the shards, `given` all of them, with the shards' versions;
    else `apart` is what its tensors are parts of."""

    def __init__(self):
        self.like, self.token, self.given, self.apart = None, None, [], {}

    def take_apart(self, path, value):
        if not isinstance(value, Spread):
            return value
        self.apart[path] = value.handed_out()
        return value.local

    def put_together(self, path, value):
        spread = self.apart.get(path)
        if spread is None:
            return value
        again = Spread(value, spread.dims, spread.at, spread.ranks)
        again.memory = spread.memory
        return again


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


def _by_rows(spread):
    return spread if spread.by_row else spread.clear_of(spread.held_dim)
