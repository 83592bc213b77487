"""The decoder's entrance and exit: whole rows become shards here, and whole rows again when they leave.

    whole rows -> model -> [ decoder: shards -> layers, attention exchanged (attention.py) -> shards ] -> whole rows

1. On the way in, arguments are padded to a multiple of sp_size and cut (cut.py); the row's facts are held for as long as
   the decoder runs, and travel in its keyword arguments where it hands them on.
2. On the way out hidden states are gathered, unless the head in front works on shards (exits.py) or the batch was sharded
   by the user.
3. A call with a key/value cache (`generate`) goes straight through.

A forward that the user began is a `Forward`; it knows what the head decided and what the decoder found.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from .cut import BOUNDARY_KEYS, checksum, cut
from .gather import gather_sequence, with_whole_gradient
from .randomness import OwnStreams, draws
from .sequence import ROW_KEY, Row, hold, on_whole_row, release
from .trees import leaves, tree_map

# What a head passes on to its decoder without meaning it.
_OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch")
# The last is of older versions, whose `generate` leaves it to the decoder to make a cache.
_CACHES = ("past_key_values", "cache", "cache_params", "cache_position")


@dataclass
class Forward:
    """One forward of an attached model.

    Args:
        exit (`str`): "loss", "tokens" or "shards": the head works on shards; "hidden": the decoder's output is gathered.
        given (`Row`, *optional*): of a batch that came in shards.
        row (`Row`, *optional*): of the decoder's call, once it has run in shards.
        count (`torch.Tensor`, *optional*), counted (`bool`): targets of this shard; whether `num_items_in_batch` counts them.
        length (`int`, *optional*), fields (`int`, *optional*): tokens that there are labels for; per-token results.
        opened (`bool`): whether the batch came in shards for a head that needs whole rows.
        tokens (`list`): token ids and labels as the user gave them: peers have to have the same.
        bytes (`int`): of what the decoder's exit has gathered.
        held, outer: give the row back that is current while the head runs, while a model runs on shards.
    """

    exit: str = "hidden"
    given: Row | None = None
    row: Row | None = None
    count: Any = None
    counted: bool = False
    length: int | None = None
    fields: int | None = None
    opened: bool = False
    bytes: int = 0
    tokens: list = field(default_factory=list)
    held: Any = None
    outer: Any = None

    @property
    def in_shards(self) -> bool:
        return self.exit != "hidden" or self.given is not None and not self.opened


class Entrance:
    """The hooks around one attachment's decoder."""

    def __init__(self, attachment, decoder):
        self.attachment = attachment
        parameters = inspect.signature(type(decoder).forward).parameters
        self.names = list(parameters)[1:]
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.running = []
        self.streams, self._noise = OwnStreams(attachment), None

    def enter(self, module, args, kwargs):
        attachment = self.attachment
        if not attachment.owns(module) or attachment.is_plain or on_whole_row():
            self.running.append(None)
            return None
        arguments = {**dict(zip(self.names, args)), **kwargs}
        forward = attachment.forward or Forward(given=arguments.pop(ROW_KEY, None))
        if any(arguments.get(name) is not None for name in _CACHES):
            if forward.given is not None:
                raise ValueError(
                    f"{type(module).__name__} got a key/value cache with a sharded batch: set use_cache=False with sequence "
                    "parallelism, or generate from whole rows."
                )
            self.running.append(None)
            return None
        arguments.pop(ROW_KEY, None)
        for name in _OF_THE_HEAD:
            arguments.pop(name, None)
        if forward.given is None:
            if torch.is_grad_enabled():
                arguments = {name: tree_map(self._with_whole_gradient, value) for name, value in arguments.items()}
            part, row = cut(arguments, attachment.rank, attachment.size, attachment.seq_length, attachment.counts_by_mask)
            for of_the_user in forward.tokens:
                row.checksum = checksum(of_the_user, row.checksum)
        else:
            part, row = arguments, forward.given
            if row.attention_mask is None and "attention_mask" in part:
                part["attention_mask"] = None  # `shard` added it for those who count tokens.
        row.attachment, row.share = attachment, attachment.share_of_auxiliary(forward)
        if forward.length not in (None, row.length) and forward.exit != "hidden":
            raise ValueError(
                f"{type(module).__name__} was given rows of {row.length} tokens for labels of {forward.length}: virtual "
                "tokens (prompt tuning) are not supported with sequence parallelism."
            )
        if not self.takes_any:
            # What cutting added and the decoder has no use for.
            part = {name: value for name, value in part.items() if name in self.names or name in arguments}
        else:
            part = {**part, **{key: arguments[key] for key in BOUNDARY_KEYS if key in arguments}, ROW_KEY: row}
        if "use_cache" in self.names or "use_cache" in part:
            part["use_cache"] = False
        attachment.carry_row(module)
        forward.row = row
        self._noise = _noise_of_the_row(module, row)
        if module.training and self.streams.needed is None:
            self.streams.needed = draws(module)
        self.running.append((forward, hold(row)))
        return (), part

    def _with_whole_gradient(self, path, value):
        needs = torch.is_tensor(value) and value.requires_grad
        return with_whole_gradient(value, self.attachment.group) if needs else value

    def leave(self, module, args, kwargs, output):
        if not self.running or (entered := self.running.pop()) is None:
            return None
        forward, token = entered
        release(token)
        self._give_back()
        if output is None:  # It raised.
            return None
        if forward.in_shards:
            if self.attachment.forward is forward:
                forward.held = hold(forward.row)  # The experts' balance needs it (balance.py), until the head is done.
            return None
        self.attachment.compare_rows(forward.row)
        output = whole(output, forward.row, self.attachment)
        forward.bytes = sum(leaf.nbytes for leaf in leaves(output) if torch.is_tensor(leaf))
        return output

    def _give_back(self):
        if self._noise is not None:
            embeddings, self._noise = self._noise, None
            embeddings[0].neftune_noise_alpha = embeddings[1]

    def reset(self):
        """Forget forwards that were interrupted."""
        self.running.clear()
        self.streams.reset()
        self._give_back()


def _noise_of_the_row(decoder, row):
    """NEFTune scales its noise with alpha / sqrt(tokens * size) of what it sees, a shard: alpha such that it is the row's.

    Returns the embedding and its alpha, to be given back; `None` where there is no noise.
    """
    embeddings = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    if alpha is None:
        return None
    shard = row.padded // row.attachment.size
    embeddings.neftune_noise_alpha = alpha * (shard / row.length) ** 0.5
    return embeddings, alpha


def whole(value, row, attachment):
    """Every shard `(B, s, ...)` in a nested value gathered to `(B, S, ...)`; routers' `(B * s, experts)` too. Collective.

    Raises:
        ValueError: a tensor `(B, s)` where `s` is the size of hidden states, too: it may be one pooled state for each row.
    """
    shard, batch_size = row.padded // attachment.size, row.position_ids.shape[-2]
    tensors = [leaf for leaf in leaves(value) if torch.is_tensor(leaf)]
    widths = {leaf.shape[2] for leaf in tensors if leaf.dim() == 3 and leaf.shape[:2] == (batch_size, shard)}

    def gather(path, leaf):
        if not torch.is_tensor(leaf):
            return leaf
        if leaf.dim() == 2 and leaf.shape == (batch_size, shard) and shard in widths:
            raise ValueError(
                f"What leaves the decoder holds a tensor of shape {tuple(leaf.shape)} ({path[1:]}): with {shard} tokens on each rank and "
                f"hidden states of size {shard} there is no telling one number per token from one state per row. Pad rows to "
                "another length."
            )
        if leaf.dim() >= 2 and leaf.shape[:2] == (batch_size, shard):
            # Heads take views of it.
            return gather_sequence(leaf, attachment.group, 1, row.length).contiguous()
        # A tuple has no names: of what it holds nothing else has this shape.
        if ("router" in path or path.startswith("[")) and leaf.dim() == 2 and leaf.shape[0] == batch_size * shard:
            leaf = leaf.unflatten(0, (batch_size, shard))
            return gather_sequence(leaf, attachment.group, 1, row.length).flatten(0, 1)
        return leaf

    return tree_map(gather, value)


def decoder_of(model):
    """The module that holds the layers: what is cut on the way in and gathered on the way out.

    `get_decoder()` where the model knows; else its base model, which for an encoder is all but its head; else whatever
    directly owns the largest list of modules.
    """
    base = next((module for module in model.modules() if hasattr(module, "get_decoder")), model)
    for found in (base.get_decoder() if hasattr(base, "get_decoder") else None, getattr(base, "base_model", base)):
        # A head may be called `decoder`, too.
        has_layers = isinstance(found, torch.nn.Module) and any(_size_of_layers(module) for module in found.modules())
        if has_layers and found is not base and _has_head(found):
            return decoder_of(found)  # A language model within one of images and language.
        if has_layers and (found is not base or not _has_head(base)):
            return found
    return max(base.modules(), key=_size_of_layers)


def towers_of(model, decoder):
    """Name -> module of what has layers but lies outside of the decoder: image towers, which run on whole rows."""
    inside, around = set(decoder.modules()), [m for m in model.modules() if decoder in set(m.modules())]
    children = [(name, child) for name, child in model.named_modules() if child not in inside and child not in around]
    outer = [(name, child) for name, child in children if model.get_submodule(name.rpartition(".")[0]) in around]
    return {name: child for name, child in outer if any(isinstance(m, torch.nn.ModuleList) for m in child.modules())}


def _has_head(model):
    return hasattr(model, "get_output_embeddings") and isinstance(model.get_output_embeddings(), torch.nn.Module)


def _size_of_layers(module):
    lists = [child for child in module.children() if isinstance(child, torch.nn.ModuleList)]
    # Of what it has partitioned ZeRO-3 leaves no element, but a note of how many there are.
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for layers in lists for parameter in layers.parameters())
