"""Which rule an operation on `Spread`s follows: one for each kind of operation.

    elementwise       alike.py         on the parts, once all operands are held alike
    along dimensions  dimensions.py    softmax, sums, sorting, slices, concatenation: on the parts, held by another dimension
    reshaping         shapes.py        factors are regrouped
    products          products.py      held by a batch dimension of both, or by a row of one, the other being whole
    everything else                    on the whole tensors

A rule decides by shapes of whole tensors alone, so that all ranks exchange alike. What would write to memory that others
may or may not see, is refused.
"""

import sys

import torch

from ..trial import on_trial
from . import alike, dimensions, products, shapes
from .layout import CannotSplit
from .tensor import Spread

# What is a view of its first operand, and what may be: whether the whole tensor's would be one, a part does not show.
_VIEWS = set(
    "getitem select narrow view view_as transpose swapaxes swapdims t permute movedim unsqueeze squeeze expand expand_as "
    "broadcast_to split split_with_sizes chunk tensor_split unbind unflatten detach".split()
)
_PERHAPS_VIEWS = set(
    "reshape reshape_as flatten ravel contiguous dropout to type type_as float half bfloat16 double bool int long".split()
)
# Python's operators.
_SAME = {"truediv": "div", "rtruediv": "div", "radd": "add", "rmul": "mul", "rpow": "pow", "floordiv": "floor_divide"}
_SAME |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "mod": "remainder"}


def run(function, args, kwargs):
    """`function(*args, **kwargs)` with `Spread` operands: the `__torch_function__` of them all."""
    name = getattr(function, "__name__", "")
    name = _SAME.get(name.strip("_"), name.strip("_")) if name.startswith("__") else name
    args, kwargs = _by_position(name, args, kwargs)
    operands = list(_operands(args, kwargs))
    _refuse_autograd_functions(operands)
    writes = name == "setitem" or name.endswith("_") or kwargs.get("inplace", False)
    if writes and isinstance(args[0], Spread) and not args[0].memory.writable:
        raise TypeError(f"{name} writes to a tensor of which something may or may not be a view")
    for operand in operands:
        if operand.outside:
            # Others there are held as shards, and a checkpoint may not know that it has a gradient.
            raise TypeError(f"{name} of attention weights outside of the module that made them")
        operand.memory.check()
        operand.fresh = operand.fresh and writes and operand is args[0]
    rule = _RULES.get(name) or (alike.elementwise if alike.is_elementwise(name) else None)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], (Spread, torch.Tensor)):
        rule = alike.elementwise
    try:
        if rule is None:
            raise CannotSplit(f"no rule for {name}")
        result = rule(function, *args, **kwargs)
    except CannotSplit as error:
        if writes and isinstance(args[0], Spread) or list(_operands((kwargs.get("out"),), {})):
            raise TypeError(f"{name} writes to a tensor that is held in part: {error}") from error
        for operand in operands:
            operand.ranks.undo(f"{name}: {error}", operand.numel())
        return _on_whole(name, function, args, kwargs)
    if name in _VIEWS or name in _PERHAPS_VIEWS:
        _share_memory(name, args[0], result)
    return result


def _by_position(name, args, kwargs):
    """The usual spelling of arguments that have other names, too."""
    kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    if "input" in kwargs:
        args = (kwargs.pop("input"), *args)
    for key in ("dims", "size"):
        if key in kwargs and name in ("flip", "permute", "expand", "broadcast_to"):
            args = (*args, kwargs.pop(key))
    return args, kwargs


def _share_memory(name, base, result):
    for view in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(base, Spread) and isinstance(view, Spread):
            same = view.local.untyped_storage().data_ptr() == base.local.untyped_storage().data_ptr()
            base.memory.writable &= name in _VIEWS and same
            base.handed_out()
            view.memory = base.memory


def _on_whole(name, function, args, kwargs):
    """On copies of the whole operands. Writing to what may be a view of one is noticed when the operand is used again."""
    wholes = {}
    result = function(*_map(args, wholes), **{key: _map(value, wholes) for key, value in kwargs.items()})
    tensors = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(t)]
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    for operand, whole in wholes.values():
        named = operand is args[0] and name in _VIEWS | _PERHAPS_VIEWS if args else False
        if named or whole.untyped_storage().data_ptr() in storages:
            operand.memory.writable, operand.memory.viewed = False, True
            operand.memory.wholes += [(t.detach(), t._version) for t in (whole, *tensors) if not t.is_inference()]
    return result


def _map(value, wholes):
    if isinstance(value, Spread):
        if id(value) not in wholes:
            wholes[id(value)] = value, value.whole()
        return wholes[id(value)][1]
    return type(value)([_map(v, wholes) for v in value]) if type(value) in (tuple, list) else value


def _operands(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, Spread):
            yield value
        elif type(value) in (tuple, list):
            yield from _operands(value, {})


def _refuse_autograd_functions(operands):
    """What an autograd function computes from a `Spread` would have no gradient. In a trial nothing has one."""
    hidden = not torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if not hidden and not on_trial():
        return
    # A builtin from torch 2.14 on, which has no frame.
    frame, apply = sys._getframe(2), getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
    while frame is not None and frame.f_code is not torch.nn.Module._call_impl.__code__:
        if frame.f_code is apply:
            raise TypeError("an autograd function was given a tensor that is held in part")
        frame = frame.f_back


_ALONG = (
    "softmax log_softmax sum mean amax amin max min argmax cumsum logsumexp glu var std all any prod cumprod sort argsort "
    "logcumsumexp"
)
_RULES = {
    **dict.fromkeys(_ALONG.split(), dimensions.along()),
    **dict.fromkeys(("topk", "repeat_interleave"), dimensions.along(position=2)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), dimensions.pieces),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), dimensions.by_index),
    **dict.fromkeys(("view", "reshape"), shapes.view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), shapes.transpose),
    **dict.fromkeys(("expand", "broadcast_to"), shapes.expand),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), shapes.new_filled),
    **dict.fromkeys(("matmul", "bmm"), products.matmul),
    **dict.fromkeys(("addmm", "baddbmm"), products.addmm),
    **dict.fromkeys(("cat", "concat", "concatenate"), dimensions.cat),
    **dict.fromkeys(("layer_norm", "rms_norm"), dimensions.normalised),
    "flip": dimensions.flip,
    "unbind": dimensions.unbind,
    "getitem": dimensions.getitem,
    "setitem": dimensions.setitem,
    "select": dimensions.select,
    "narrow": dimensions.narrow,
    "stack": dimensions.stack,
    "permute": shapes.permute,
    "t": shapes.transpose,
    "movedim": shapes.movedim,
    "flatten": shapes.flatten,
    "unflatten": shapes.unflatten,
    "unsqueeze": shapes.unsqueeze,
    "squeeze": shapes.squeeze,
    "rmatmul": products.rmatmul,
    "linear": products.linear,
    "scaled_dot_product_attention": products.attention,
    "conv1d": dimensions.conv1d,
    "pad": dimensions.pad,
    "index_select": dimensions.index_select,
    "view_as": lambda function, tensor, other: tensor.view(other.shape),
    "reshape_as": lambda function, tensor, other: tensor.reshape(other.shape),
    "expand_as": lambda function, tensor, other: tensor.expand(other.shape),
}
