"""Tiled loss: the head's own code, a few tokens at a time, so that logits exist for one tile only.

Nothing of a head is written again here. Its `forward` runs with the decoder in it replaced by one that hands out hidden states,
and with its loss function replaced by one that fills in the tile's targets and the whole row's count:

1. once with the real decoder, one position and a loss of zero: what comes out holds all but the logits, and as loss
   what the head adds to its loss function's (a router's balance), counted once;
2. once per tile under `torch.utils.checkpoint`: softcaps, scales, biases, tied or adapted output embeddings are the
   model's own. Each tile is a sum over the row's count, so a tile without targets adds zero, and no mean is weighted;
3. logits are computed when somebody reads them.

That tiles add up is tried once per head and loss function, on eight positions. Steps aside where the loss is fused with
the head already (Liger, TRL's `fused_lm_head`).
"""

import copy
import dataclasses
import functools
import inspect
import logging
import math
from collections import OrderedDict
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..core.labels import IGNORE_INDEX
from ..core.pieces import again_in_backward
from .per_position import decoder_of
from .tiles import cut

logger = logging.getLogger(__name__)
# Bytes of float32 logits: of a tile, and of a row that "auto" tiles.
_TILE, _AUTO = 2**27, 2**30
# What asks for logits of some positions, or for a loss that is fused with the head.
_OF_PART = ("logits_to_keep", "fused_lm_head")
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 3e-2


def tile_loss(model, tiles) -> list:
    """Compute the loss of `model`'s head in tiles. Returns a handle. Under ZeRO-3 one small all-reduce per forward.

    Args:
        tiles (`int`, `True` or `"auto"`): see `Settings.tiled_loss`.

    Raises:
        ValueError: no head that takes labels and calls a loss function, or in its first forward one whose tiles do not
            add up; "auto" leaves such heads alone.
    """
    head = next((module for module in model.modules() if _is_head(module)), None)
    if head is None:
        if tiles == "auto":
            return []
        raise ValueError(
            f"tiled_loss found no language model head in {type(model).__name__}: a module with output embeddings that takes "
            "labels and has a loss function. Set tiled_loss=False."
        )
    return [_TiledHead(head, tiles)]


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

    def __init__(self, head, tiles):
        self.head, self.tiles = head, tiles
        self.inner = vars(head).get("forward")
        # By that name Trainers find out what a model takes.
        self.__signature__ = inspect.signature(head.forward)
        self.tried = set()
        head.forward = self

    def remove(self):
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
        name, loss_function = _child(self.head), self.head.loss_function
        recorder = _Recorder(self.head._modules[name])
        count = _Calls()
        with _instead(self.head, name, recorder, count):
            output = self.whole(**{**given, "labels": given["labels"][:, :1]})
        hidden = recorder.hidden
        row = _Row(self, name, recorder, loss_function, given)
        tokens = _agreed(hidden.shape[0] * hidden.shape[1], self.head)
        width = 4 * tokens * self.head.get_output_embeddings().out_features
        if self.tiles == "auto" and width <= _AUTO or not self._can(row, count.calls, output):
            # The decoder has run; the head goes on as it would have.
            return row.whole(hidden, given["labels"], given.get("shift_labels"))
        tiles = math.ceil(width / _TILE) if self.tiles in ("auto", True) and not _is_number(self.tiles) else self.tiles
        output.loss = output.loss + row.loss(hidden, row.targets, tiles)
        return _later(output, functools.partial(row.logits, hidden))

    def _can(self, row, calls, output):
        """Whether the head's loss is a sum over tiles. Known after the first time, from what all ranks know alike."""
        key = getattr(row.loss_function, "__qualname__", None) or id(row.loss_function)
        if key in self.tried:
            return True
        if not calls:
            fused = getattr(output, "logits", None) is None
            if fused or self.tiles == "auto":
                logger.info("tiled_loss steps aside: %s computes its loss without a loss function.", type(self.head).__name__)
                return False
        if not calls or not row.adds_up():
            if self.tiles == "auto":
                return False
            raise ValueError(
                f"tiled_loss={self.tiles}: the loss of {type(self.head).__name__} ({key}) is not the sum of the losses of "
                "its tokens over a count, so that tiles of it do not add up to the row's. Set tiled_loss=False."
            )
        self.tried.add(key)
        logger.info("tiled_loss: the loss of %s in tiles.", type(self.head).__name__)
        return True


class _Row:
    """One forward's hidden states, with what the head needs to go on from them."""

    def __init__(self, tiled, name, recorder, loss_function, given):
        self.tiled, self.name, self.recorder, self.loss_function, self.given = tiled, name, recorder, loss_function, given
        takes_shifted = "shift_labels" in inspect.signature(loss_function).parameters
        self.takes_shifted, self.ignored = takes_shifted, given.get("ignore_index", IGNORE_INDEX)
        shift_labels = given.get("shift_labels")
        self.targets = self.targets_of(given["labels"]) if shift_labels is None else shift_labels

    def targets_of(self, labels):
        return F.pad(labels, (0, 1), value=self.ignored)[:, 1:].contiguous() if self.takes_shifted else labels

    def whole(self, hidden, labels, shift_labels):
        """What the head gives for `hidden` by itself."""
        given = {**self.given, "labels": labels}
        if shift_labels is not None:
            given["shift_labels"] = shift_labels
        with _instead(self.tiled.head, self.name, self.recorder.giving(hidden), None):
            return self.tiled.whole(**given)

    def logits(self, hidden):
        given = {name: value for name, value in self.given.items() if name not in ("labels", "shift_labels")}
        with _instead(self.tiled.head, self.name, self.recorder.giving(hidden), None):
            return self.tiled.whole(**given).logits

    def loss(self, hidden, targets, tiles):
        """The sum over tiles of the loss function's values, each over the count of all `targets`."""
        count = self.given.get("num_items_in_batch")
        if count is None:
            count = (targets != self.ignored).sum()
        partitioned = any(hasattr(parameter, "ds_id") for parameter in self.tiled.head.parameters())
        length, total = hidden.shape[1], 0.0
        # Under ZeRO-3 all ranks gather the output embeddings equally often.
        for piece in cut(length, tiles if partitioned else min(tiles, length)):
            part = targets[:, piece].contiguous()
            if piece.start == piece.stop:
                piece, part = slice(length - 1, length), torch.full_like(targets[:, -1:], self.ignored)
            total = total + again_in_backward(self._of_tile, hidden[:, piece], part, count)
        return total

    def _of_tile(self, hidden, targets, count):
        calls = _Calls(self.loss_function, targets, count, self.takes_shifted)
        given = {name: value for name, value in self.given.items() if name != "shift_labels"}
        if "output_router_logits" in self.tiled.__signature__.parameters:
            given["output_router_logits"] = False  # Their loss has been counted.
        with _instead(self.tiled.head, self.name, self.recorder.giving(hidden), calls):
            self.tiled.whole(**{**given, "labels": targets})
        return calls.value

    @torch.no_grad()
    def adds_up(self):
        """Whether two tiles of eight positions, with one target masked, give what the head gives for them by itself."""
        hidden = self.recorder.hidden[:, :8]
        if type(hidden) is not torch.Tensor or hidden.is_meta:
            return True
        labels = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2]).clone()
        labels[:, 2:3] = self.ignored
        targets = self.targets_of(labels)
        whole = self.whole(hidden, labels, targets if self.given.get("shift_labels") is not None else None).loss
        with _instead(self.tiled.head, self.name, self.recorder.giving(hidden), _Calls()):
            rest = self.tiled.whole(**{**self.given, "labels": labels}).loss
        ours = rest + self.loss(hidden, targets, 2)
        half = hidden.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(hidden.device.type)
        tolerance = _TOLERANCE_HALF if half else _TOLERANCE
        return bool((whole - ours).abs() <= tolerance * whole.abs()) or bool(whole.isnan() and ours.isnan())


class _Calls:
    """In the place of a loss function: gives zero, or the share of a tile, and remembers."""

    def __init__(self, function=None, targets=None, count=None, takes_shifted=False):
        self.function, self.targets, self.count, self.takes_shifted = function, targets, count, takes_shifted
        self.calls, self.value = 0, None

    def __call__(self, logits, labels, *args, **kwargs):
        self.calls += 1
        if self.function is None:
            return logits.new_zeros((), dtype=torch.float32 if logits.dtype.itemsize < 4 else logits.dtype)
        kwargs["num_items_in_batch"] = self.count
        if self.takes_shifted:
            kwargs["shift_labels"] = self.targets
        self.value = self.function(logits, self.targets, *args, **kwargs)
        return self.value


class _Recorder(nn.Module):
    """In the place of the decoder: runs it, keeps what it gives, and hands on its first position; or gives a tile."""

    def __init__(self, child, output=None, tile=None):
        super().__init__()
        # Not as a child: nobody shall find the decoder twice.
        self.__dict__.update(child=child, output=output, tile=tile)

    def __getattr__(self, name):
        return getattr(self.__dict__["child"], name)

    @property
    def hidden(self):
        return self.output[0]

    def giving(self, tile):
        return _Recorder(self.child, self.output, tile)

    def forward(self, *args, **kwargs):
        if self.tile is None:
            self.__dict__["output"] = self.child(*args, **kwargs)
        tile = self.hidden[:, :1] if self.tile is None else self.tile
        if isinstance(self.output, tuple):
            return (tile, *self.output[1:])
        output = copy.copy(self.output)
        output[next(iter(output))] = tile
        return output


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


def _agreed(tokens, head):
    """The most tokens of any rank, where ranks have to make the same number of tiles."""
    partitioned = any(hasattr(parameter, "ds_id") for parameter in head.parameters())
    if not partitioned or not dist.is_initialized() or dist.get_world_size() == 1:
        return tokens
    most = torch.tensor(tokens, device=head.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _is_number(tiles):
    return isinstance(tiles, int) and not isinstance(tiles, bool)


def _later(output, compute):
    """`output`, whose logits are computed when they are read: as attribute, by key, by place or among all items."""
    object.__setattr__(output, "__class__", _later_class(type(output)))
    OrderedDict.pop(output, "logits", None)
    vars(output)["logits"], vars(output)["_compute_logits"] = None, compute
    return output


@functools.lru_cache(maxsize=64)
def _later_class(cls):
    def read(self):
        compute = vars(self).pop("_compute_logits", None)
        if compute is not None:
            self.logits = compute()
            for field in dataclasses.fields(self):
                if field.name in self.keys():
                    OrderedDict.move_to_end(self, field.name)

    class Later(cls):
        def __getattribute__(self, name):
            if name in ("logits", "to_tuple", "items"):
                read(self)
            return super().__getattribute__(name)

        def __getitem__(self, key):
            read(self) if key != "loss" and key != 0 else None
            return super().__getitem__(key)

    Later.__name__ = Later.__qualname__ = cls.__name__
    return Later
