"""Tiled loss: the head's own code, a few tokens at a time, so that logits exist for one tile only.

Nothing of a head is written again here. Its `forward` runs with the decoder in it replaced by one that hands out hidden states,
and with its loss function replaced by one that fills in the tile's targets and the whole row's count:

1. The head runs once, with the real decoder. When it comes to its output embedding, that makes the loss instead of logits, so
   that whatever an engine does around it (gathers) is done once. What the head adds to its loss function's value (a
   router's balance) it adds by itself, once.
2. The loss is a sum over tiles: for each the head runs again under `torch.utils.checkpoint`. Softcaps, scales, biases, tied or
   adapted output embeddings are the model's own. A tile is a sum over the row's count, so that one without targets adds
   zero, and no mean is weighted.
3. Logits are computed when somebody reads them.

That tiles add up is tried once per head and loss function, on eight positions. Steps aside where the loss is fused with
the head already (Liger, TRL's `fused_lm_head`).
"""

import copy
import dataclasses
import functools
import inspect
import logging
import math
import weakref
from collections import OrderedDict
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..core.cut import IGNORE_INDEX
from ..core.entrance import decoder_of, whole
from ..core.pieces import again_in_backward
from .tiles import cut

logger = logging.getLogger(__name__)
# Bytes of float32 logits: of a tile, and of a row that "auto" tiles.
_TILE, _AUTO = 2**27, 2**30
# What asks for logits of some positions, or for a loss that is fused with the head.
_OF_PART = ("logits_to_keep", "fused_lm_head")
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 3e-2


def tile_loss(model, tiles, attachment=None) -> list:
    """Compute the loss of `model`'s head in tiles. Returns a handle. Under ZeRO-3 one small all-reduce per forward.

    Args:
        tiles (`int`, `True` or `"auto"`): see `Settings.tiled_loss`.
        attachment (`Attachment`, *optional*): the model's; its head then scores shards, and logits are whole when read.

    Raises:
        ValueError: no head that takes labels and calls a loss function, or in its first forward one whose tiles do not
            add up; "auto" leaves such heads alone.
    """
    head = next((module for module in model.modules() if _is_head(module)), None)
    if head is None:
        if tiles == "auto":
            logger.info("tiled_loss: no language model head in %s; nothing is tiled.", type(model).__name__)
            return []
        raise ValueError(
            f"tiled_loss found no language model head in {type(model).__name__}: a module with output embeddings that takes "
            "labels and has a loss function. Set tiled_loss=False."
        )
    if str(getattr(vars(head).get("forward", type(head).forward), "__module__", "")).startswith("liger_kernel"):
        logger.info("tiled_loss: the loss of %s is Liger's, which is fused with the head, and stays as it is.", type(head).__name__)
        return []
    return [_TiledHead(head, tiles, model, attachment)]


def _is_head(module):
    cls = type(module)
    if not hasattr(cls, "get_output_embeddings") or not hasattr(cls, "loss_function"):
        return False
    takes_labels = "labels" in inspect.signature(cls.forward).parameters
    return takes_labels and isinstance(module.get_output_embeddings(), nn.Module) and _child(module) is not None


def _child(head):
    """The name of the head's child that the decoder is, or lies in."""
    decoder = decoder_of(head)
    if decoder is head:
        # Some heads call themselves the decoder: then what has layers, and most modules.
        return max(head.named_children(), key=lambda named: len(list(named[1].modules())), default=(None,))[0]
    return next((name for name, child in head.named_children() if any(m is decoder for m in child.modules())), None)


class _TiledHead:
    """In the place of a head's `forward`. An object, so that a deepcopy of the head gets one of its own."""

    def __init__(self, head, tiles, root, attachment):
        self.head, self.tiles, self.root = head, tiles, root
        # A copy is not attached.
        self._attachment = (lambda: None) if attachment is None else weakref.ref(attachment)
        # Inside of a forward of `root`: the function that computes the logits of its output, once there is one.
        self.running, self.compute = False, None
        self.handles = [root.register_forward_pre_hook(self._enter)]
        self.inner = vars(head).get("forward")
        # By that name Trainers find out what a model takes.
        self.__signature__ = inspect.signature(head.forward)
        self.tried = {}
        head.forward = self

    def _enter(self, root, args):
        self.running, self.compute = True, None
        # The last of all hooks: engines look at every field of an output, which must not count as reading its logits.
        self.handles[1:] = [root.register_forward_hook(self._leave, always_call=True)]

    def _leave(self, root, args, output):
        self.running, compute, self.compute = False, self.compute, None
        self.handles.pop().remove()
        return output if compute is None or not isinstance(output, OrderedDict) else _later(output, compute, self._loss_only)

    def _whole_row(self, logits):
        attachment = self._attachment()
        forward = None if attachment is None else attachment.forward
        # Who gave shards gets shards.
        if forward is None or forward.row is None or forward.given is not None:
            return logits
        return lambda: whole(logits(), forward.row, attachment)

    def _loss_only(self):
        return getattr(self._attachment(), "loss_only", False)

    def remove(self):
        for handle in self.handles:
            handle.remove()
        if vars(self.head).get("forward") is self:
            del self.head.forward
            if self.inner is not None:
                self.head.forward = self.inner

    def whole(self, *args, **kwargs):
        return type(self.head).forward(self.head, *args, **kwargs) if self.inner is None else self.inner(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        given = self._by_name(args, kwargs)
        of_part = any(not isinstance(given.get(name), (bool, int, type(None))) or given.get(name) for name in _OF_PART)
        if given.get("labels") is None or of_part or given.get("return_dict") is False:
            return self.whole(*args, **kwargs)
        return self._tiled(given)

    def _by_name(self, args, kwargs):
        given = dict(self.__signature__.bind_partial(*args, **kwargs).arguments)
        for name, parameter in self.__signature__.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return given

    def _tiled(self, given):
        row = _Row(self, given)
        with _instead(self.head, row.name, row.decoder, row.loss), row.in_output_embedding():
            output = self.whole(**given)
        if row.total is None and self.tiles != "auto":
            raise ValueError(
                f"tiled_loss={self.tiles}: {type(self.head).__name__} has computed its loss without giving all of its hidden states "
                "to its output embedding, so that there is nothing to cut into tiles. Set tiled_loss=False."
            )
        if row.total is not None and row.read:
            output.logits = None
            OrderedDict.pop(output, "logits", None)
            self.compute = self._whole_row(row.logits)
            return output if self.running else _later(output, self.compute, self._loss_only)
        return output

    def can(self, row, hidden) -> bool:
        """Whether the loss is a sum over tiles. Tried once per loss function and kind of call, on every rank alike."""
        name = getattr(row.function, "__qualname__", type(row.function).__name__)
        key = row.function, *(row.given.get(said) is not None for said in ("shift_labels", "num_items_in_batch"))
        if key not in self.tried:
            self.tried[key] = row.adds_up(hidden)
            if not self.tried[key] and self.tiles != "auto":
                raise ValueError(
                    f"tiled_loss={self.tiles}: the loss of {type(self.head).__name__} ({name}) is not the sum of the losses of "
                    "its tokens over a count, so that tiles of it do not add up to the row's. Set tiled_loss=False."
                )
            logger.info("tiled_loss: %s in tiles: %s.", type(self.head).__name__, self.tried[key])
        return self.tried[key]


class _Row:
    """One forward of a head with labels."""

    def __init__(self, tiled, given):
        self.tiled, self.head, self.given = tiled, tiled.head, given
        self.output_embedding = tiled.head.get_output_embeddings()
        self.name = _child(tiled.head)
        self.decoder = _Decoder(tiled.head._modules[self.name])
        self.function = tiled.head.loss_function
        self.takes_shifted = "shift_labels" in inspect.signature(self.function).parameters
        self.ignored = given.get("ignore_index", IGNORE_INDEX)
        shift_labels = given.get("shift_labels")
        self.targets = self.targets_of(given["labels"]) if shift_labels is None else shift_labels
        self.total, self.read = None, False

    def targets_of(self, labels):
        return F.pad(labels, (0, 1), value=self.ignored)[:, 1:].contiguous() if self.takes_shifted else labels

    def loss(self, logits, *args, **kwargs):
        """In the place of the loss function."""
        if self.total is None:
            return self.function(logits, *args, **kwargs)
        self.read = True
        return _After.apply(self.total, self.placeholder)

    @contextmanager
    def in_output_embedding(self):
        """Inside, the output embedding's `forward` makes the loss, so that what engines do around it is done once."""
        module, inner = self.output_embedding, vars(self.output_embedding).get("forward")
        plain = module.forward

        def forward(hidden, *args, **kwargs):
            tiles = self.number_of_tiles(hidden)
            if tiles == 0 or not self.tiled.can(self, hidden):
                return plain(hidden, *args, **kwargs)
            self.total = self.in_tiles(hidden, self.targets, tiles)
            width = getattr(module, "out_features", hidden.shape[-1])
            return _Placeholder.apply(self.total, (hidden.shape[0], 1, width))

        def keep(module, args, output):
            self.placeholder = output

        module.forward, self.plain = forward, plain
        # After all that engines have hooked.
        handle = module.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
            del module.forward
            if inner is not None:
                module.forward = inner

    def number_of_tiles(self, hidden):
        """0: no tiles."""
        tokens, tiles = hidden.shape[0] * hidden.shape[1], self.tiled.tiles
        if hidden.shape[:2] != self.targets.shape:
            return 0
        if tiles is not True and tiles != "auto":
            return tiles
        if self.gathers_per_tile():
            tokens = _most(tokens, hidden.device)
        width = 4 * tokens * self.output_embedding.out_features
        return 0 if tiles == "auto" and width <= _AUTO else math.ceil(width / _TILE)

    def gathers_per_tile(self):
        """Whether ZeRO-3 gathers something inside of the output embedding (adapters): then as often on every rank."""
        inside = [p for child in self.output_embedding.children() for p in child.parameters()]
        return any(hasattr(parameter, "ds_id") for parameter in inside)

    def in_tiles(self, hidden, targets, tiles):
        """The sum over tiles of the loss function's values, each over the count of all `targets`."""
        count = self.given.get("num_items_in_batch")
        if count is None:
            count = (targets != self.ignored).sum()
        length, total = hidden.shape[1], 0.0
        for piece in cut(length, tiles if self.gathers_per_tile() else min(tiles, length)):
            part = targets[:, piece].contiguous()
            if piece.start == piece.stop:
                piece, part = slice(length - 1, length), torch.full_like(targets[:, -1:], self.ignored)
            total = total + again_in_backward(self.of_tile, hidden[:, piece], part, count)
        return total

    def of_tile(self, hidden, targets, count):
        def loss(logits, labels, *args, **kwargs):
            shifted = {"shift_labels": targets} if self.takes_shifted else {}
            kwargs = {**kwargs, **shifted, "num_items_in_batch": count}
            values.append(self.function(logits, targets, *args, **kwargs))
            return values[-1]

        values = []
        self.run(hidden, loss, labels=targets)
        return values[0] if len(values) == 1 else None

    def run(self, hidden, loss, **given):
        """The head on a tile: on `hidden`, what its output embedding shall be given."""
        given = {**{name: value for name, value in self.given.items() if name != "shift_labels"}, **given}
        if "output_router_logits" in self.tiled.__signature__.parameters:
            given["output_router_logits"] = False  # Their loss is counted once, outside.
        module, outside = self.output_embedding, self.output_embedding.forward
        bare = _Bare(lambda _: self.plain(hidden))
        parent, name = next(
            (parent, name) for parent in self.head.modules() for name, child in parent._modules.items() if child is module
        )
        with _instead(self.head, self.name, self.decoder.giving(hidden.shape[1]), loss):
            parent._modules[name] = bare
            module.forward = self.plain
            try:
                return self.tiled.whole(**given)
            finally:
                parent._modules[name] = module
                module.forward = outside

    def logits(self):
        """Of the whole row, now with all that engines do around the output embedding."""
        given = {name: value for name, value in self.given.items() if name not in ("labels", "shift_labels")}
        with _instead(self.head, self.name, self.decoder.giving(self.targets.shape[1]), None):
            return self.tiled.whole(**given).logits

    @torch.no_grad()
    def adds_up(self, hidden):
        """Whether two tiles of eight positions, with one target masked, give what the head gives for them by itself."""
        hidden = hidden[:, :8]
        labels = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2]).clone()
        labels[:, 2:3] = self.ignored
        targets, values = self.targets_of(labels), []

        def loss(*args, **kwargs):
            values.append(self.function(*args, **kwargs))
            return values[-1]

        # As it is called: a head may hand on some of what it is given.
        blank = torch.full_like(labels, self.ignored)
        given = {} if self.given.get("shift_labels") is None else dict(labels=blank, shift_labels=targets)
        self.run(hidden, loss, **{"labels": labels, **given})
        if len(values) != 1:
            return False
        whole, ours = values[0], self.in_tiles(hidden, targets, 2)
        if type(hidden) is not torch.Tensor or hidden.is_meta:
            return True
        half = hidden.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(hidden.device.type)
        tolerance = _TOLERANCE_HALF if half else _TOLERANCE
        return bool((whole - ours).abs() <= tolerance * whole.abs()) or bool(whole.isnan() and ours.isnan())


class _Decoder(nn.Module):
    """In the place of the decoder: runs it and keeps what it gives, or gives as many positions of that as a tile has."""

    def __init__(self, child, output=None, length=None):
        super().__init__()
        # Not as a child: nobody shall find the decoder twice.
        self.__dict__.update(child=child, output=output, length=length)

    def __getattr__(self, name):
        return getattr(self.__dict__["child"], name)

    def giving(self, length):
        return _Decoder(self.child, self.output, length)

    def forward(self, *args, **kwargs):
        if self.length is None:
            self.__dict__["output"] = self.child(*args, **kwargs)
            return self.output
        # Which ones does not matter to a tile, whose output embedding has its own.
        tile = self.output[0][:, : self.length]
        if isinstance(self.output, tuple):
            return (tile, *self.output[1:])
        output = copy.copy(self.output)
        output[next(iter(output))] = tile
        return output


class _Bare(nn.Module):
    """In the place of the output embedding: its `forward` alone, without what engines do around it."""

    def __init__(self, function):
        super().__init__()
        self.__dict__["function"] = function

    def forward(self, hidden):
        return self.function(hidden)


class _Placeholder(torch.autograd.Function):
    """Logits that nobody reads, of one position; for engines, which hook what comes out of a module."""

    @staticmethod
    def forward(ctx, total, shape):
        return total.new_zeros(shape)

    @staticmethod
    def backward(ctx, grad):
        return None, None


class _After(torch.autograd.Function):
    """`total`, whose backward comes after what hooks of the placeholder do (it was made last: autograd takes it first)."""

    @staticmethod
    def forward(ctx, total, placeholder):
        ctx.like = placeholder.shape, dict(dtype=placeholder.dtype, device=placeholder.device)
        return total.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.zeros((), **ctx.like[1]).expand(ctx.like[0])


@contextmanager
def _instead(head, name, child, loss_function):
    """Inside, the head's child `name` is `child`, and its loss function `loss_function`, if one is given."""
    kept, own = head._modules[name], vars(head).get("_loss_function")
    head._modules[name] = child
    if loss_function is not None:
        head.loss_function = loss_function
    try:
        yield
    finally:
        head._modules[name] = kept
        if loss_function is not None and own is None:
            del head._loss_function
        elif loss_function is not None:
            head._loss_function = own


def _most(tokens, device):
    """The most tokens of any rank, where ranks have to make the same number of tiles."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tokens
    most = torch.tensor(tokens, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _later(output, compute, loss_only):
    """`output`, whose logits are computed when they are read: by name, and if not `loss_only()` by place or among all."""
    object.__setattr__(output, "__class__", _later_class(type(output)))
    vars(output)["compute_logits"], vars(output)["_loss_only"] = compute, loss_only
    return output


@functools.lru_cache(maxsize=64)
def _later_class(cls):
    def read(self):
        compute = vars(self).pop("compute_logits", None)
        if compute is not None:
            self.logits = compute()
            for field in dataclasses.fields(self):
                if field.name in self.keys():
                    OrderedDict.move_to_end(self, field.name)

    class Later(cls):
        def __getattribute__(self, name):
            if name == "logits" or name in ("to_tuple", "items") and not vars(self)["_loss_only"]():
                read(self)
            return super().__getattribute__(name)

        def __getitem__(self, key):
            if key == "logits":
                read(self)
            return super().__getitem__(key)

    Later.__name__ = Later.__qualname__ = cls.__name__
    return Later
