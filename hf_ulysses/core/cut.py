"""Whole rows -> shards: pad, positions, boundaries, slice. Pure functions of (arguments, rank, size).

1. The row's length is that of `input_ids` (or `inputs_embeds`); it is padded on the right to a multiple of `size`.
2. Every tensor of shape `(B, S, ...)` is cut into contiguous shards along S; masks of keys by queries stay whole; of what
   belongs to the positions that a boolean mask marks (embeddings that layers add where there are images), each shard gets
   its own; what has no dimension of length S is passed on; anything else is an error by name. No list of keys decides what
   is cut, and what is nested in lists, tuples and dictionaries goes the same ways.
3. The full row's facts ride along as a `Row` (sequence.py).
4. In a batch that is sharded explicitly labels are shifted on the whole row first, so that the target behind a cut is
   scored by the shard in front of it.
"""

from collections.abc import Mapping

import torch

from .sequence import ROW_KEY, Row
from .trees import tree_map

IGNORE_INDEX = -100
BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
_OTHER_MODALITIES = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values", "images", "videos")


def cut(arguments: Mapping, rank: int, size: int, seq_length: int | None = None, by_mask=False) -> tuple[dict, Row]:
    """Cut whole rows and return the part of sequence rank `rank` of `size`, and what every rank knows of the row.

    No communication. The same function cuts what enters a decoder (entrance.py) and a batch that is sharded explicitly.

    Args:
        arguments (`Mapping`): by name, what a model is given for whole rows. Not modified.
        rank (`int`): this rank within the sequence-parallel group.
        size (`int`): number of ranks of the group.
        seq_length (`int`, *optional*): the only row length allowed (`sp_seq_length_is_variable=False`).
        by_mask (`bool`): whether positions that the user has not given are counted where the 2-D mask is one.

    Returns:
        `dict` with every per-token tensor as `(B, padded / size, ...)`, `position_ids` added, masks of keys by queries
        whole and padded; and the `Row`.

    Raises:
        ValueError: a tensor as long as the row that cannot be cut, or a row of another length than `seq_length`.
    """
    tokens = _tokens(arguments)
    batch_size, length = tokens.shape[:2]
    if seq_length is not None and length != seq_length:
        raise ValueError(
            f"sp_seq_length={seq_length} with sp_seq_length_is_variable=False, but this row has {length} tokens. "
            "Pad the rows to that length in the collator or set sp_seq_length_is_variable=True."
        )
    padding = -length % size
    part_length = (length + padding) // size
    mine = slice(rank * part_length, (rank + 1) * part_length)

    full = {key: value for key, value in arguments.items() if key not in BOUNDARY_KEYS}
    positions = full.pop("position_ids", None)
    attention_mask = full.get("attention_mask")
    attention_mask = attention_mask if torch.is_tensor(attention_mask) and attention_mask.dim() == 2 else None
    if attention_mask is not None and attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} for rows of {length} tokens: key/value caches and "
            "prefixes are not supported with sequence parallelism."
        )
    given = positions is not None
    if not given:
        positions = torch.arange(length, device=tokens.device).expand(batch_size, length)
        if by_mask and attention_mask is not None:
            positions = attention_mask.long().cumsum(-1) * attention_mask.long() - 1
    position_ids = _pad_positions(positions, padding)
    if position_ids.shape[-2] != batch_size:
        position_ids = position_ids.expand(*position_ids.shape[:-2], batch_size, -1)
    row = Row(
        length=length,
        padded=length + padding,
        position_ids=position_ids,
        attention_mask=None if attention_mask is None else pad(attention_mask, padding, 0),
        boundaries=_boundaries(arguments, batch_size, length, padding),
        checksum=checksum(tokens),
        positions_given=given,
    )

    part = {"position_ids": position_ids[..., mine].contiguous()}
    marked = _Marked(full, tokens, mine)

    def cut_leaf(path, leaf):
        if not torch.is_tensor(leaf):
            return leaf
        if leaf.dim() >= 2 and leaf.shape[:2] == (batch_size, length):
            return cut_tensor(leaf, rank, size, _PADDING.get(path, 0))
        if path.partition(".")[0].endswith("mask") and leaf.dim() in (2, 4) and leaf.shape[-1] == length:
            # Of keys by queries, alone or by kind of layer, which the model built before its decoder.
            return _pad_mask(leaf, length, padding)
        if marked.by(leaf):
            return marked.in_shard(path, leaf)
        if length in leaf.shape and tuple(leaf.shape) != (batch_size,):
            raise ValueError(
                f"{path!r} of shape {tuple(leaf.shape)} has a dimension as long as the row ({length}) but is not of shape "
                f"({batch_size}, {length}, ...), so it cannot be cut over {size} sequence ranks. Reshape it to (batch, "
                "sequence, ...), drop it, or train without sequence parallelism."
            )
        return leaf

    part.update((key, tree_map(cut_leaf, value, key)) for key, value in full.items())
    return part, row


class _Marked:
    """What belongs to the positions that a boolean mask `(B, S)` or `(B, S, 1)` among the arguments marks: `(n, H)`, one
    of `n` marked positions after the other, row by row, each as wide as an embedding."""

    def __init__(self, arguments, tokens, mine):
        shape, embeddings = tuple(tokens.shape[:2]), arguments.get("inputs_embeds")
        self._width = embeddings.shape[-1] if torch.is_tensor(embeddings) else None
        # Number of marked positions -> name -> mask.
        self._masks, self._mine = {}, mine
        for key, mask in arguments.items():
            marks = key != "attention_mask" and torch.is_tensor(mask) and mask.dtype == torch.bool
            if marks and tuple(mask.shape) in (shape, (*shape, 1)):
                self._masks.setdefault(int(mask.sum()), {})[key] = mask.reshape(shape)

    def by(self, value) -> bool:
        return value.dim() == 2 and len(value) in self._masks and self._width in (None, value.shape[1])

    def in_shard(self, name, value):
        masks = self._masks[len(value)]
        mask, *others = masks.values()
        if not all(torch.equal(mask, other) for other in others):
            raise ValueError(
                f"{name!r} of shape {tuple(value.shape)} could belong to the positions that any of {sorted(masks)} marks, so "
                "there is no telling which shard needs what of it. Train without sequence parallelism."
            )
        inside = torch.zeros_like(mask)
        inside[:, self._mine] = True
        return value[inside[mask]]


def cut_tensor(tensor, rank: int, size: int, padding_value=0, dim=1):
    """`(B, S, ...)` -> this rank's `(B, s, ...)`, padded to a multiple of `size`. Differentiable on this rank alone."""
    padding = -tensor.shape[dim] % size
    length = (tensor.shape[dim] + padding) // size
    return pad(tensor, padding, padding_value, dim).narrow(dim, rank * length, length).contiguous()


def shard_batch(batch: Mapping, rank: int, size: int, seq_length: int | None = None, by_mask=False) -> Mapping:
    """Cut a batch of full rows, as a stock collator makes them, explicitly. No communication.

    Returns:
        `Mapping` of the batch's own type: what `cut` returns, `shift_labels` (when there are labels) and, when rows were
        padded here, `attention_mask` added; plus the `Row` under `ROW_KEY`.

    Raises:
        ValueError: as `cut`; images, audio, labels that are not one per token.
    """
    tokens = _tokens(batch)
    _refuse(batch, tokens.shape[1])
    full, labels = dict(batch), batch.get("labels")
    if labels is not None and full.get("shift_labels") is None:
        full["shift_labels"] = shifted(labels)
    part, row = cut(full, rank, size, seq_length, by_mask)
    row.shift_labels = part.get("shift_labels")
    if torch.is_tensor(labels):
        row.checksum = checksum(labels, row.checksum)
    if row.padding and row.attention_mask is None:
        # Consumers that count tokens must not count our padding. The model does not see it (entrance.py).
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        part["attention_mask"] = cut_tensor(mask, rank, size)
    part[ROW_KEY] = row
    return part if type(batch) is dict else type(batch)(part)


def shifted(labels):
    """Next-token targets of whole rows: `shift_labels[i] = labels[i + 1]`, nothing to score at the end."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def _pad_mask(value, length, padding):
    """Hide the padding behind the row, which attends to what it likes: nobody reads it."""
    # A query that sees only padding averages over every key of an additive mask: over the row's own, not over ours.
    hidden = float("-inf") if value.is_floating_point() else 0
    value = pad(value, padding, hidden, dim=-1)
    if padding and value.dim() == 4 and value.shape[-2] == length:
        value = torch.cat([value, value[..., -1:, :].expand(*value.shape[:-2], padding, -1)], dim=-2)
    return value


def is_sharded(batch) -> bool:
    """Whether `batch` is the result of `shard_batch`."""
    return isinstance(batch, Mapping) and isinstance(batch.get(ROW_KEY), Row)


def _tokens(batch):
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"Sequence parallelism shards batches that are mappings of tensors, not {type(batch).__name__}. "
            "Return a dict from the collator."
        )
    for key in ("input_ids", "inputs_embeds"):
        if torch.is_tensor(batch.get(key)) and batch[key].dim() >= 2:
            return batch[key]
    raise ValueError(
        f"Sequence parallelism found neither `input_ids` nor `inputs_embeds` of shape (batch, sequence) in a batch with "
        f"the keys {sorted(map(str, batch))}, so that there is no telling how long its rows are. Rename one, or give an attached "
        "model the whole batch, model(**batch), whose decoder knows."
    )


def _refuse(batch, length):
    for key, value in batch.items():
        if value is not None and str(key).startswith(_OTHER_MODALITIES):
            raise ValueError(
                f"Batch entry {key!r} holds images or audio, which are merged with the text inside of the model: give the "
                "attached model the whole batch, model(**batch), instead of shards. Accelerate's loaders yield whole batches "
                "when they are prepared in a call of their own, without a model: accelerator.prepare(dataloader)."
            )
    attention_mask = batch.get("attention_mask")
    if torch.is_tensor(attention_mask) and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: sequence parallelism needs the 2-D padding mask "
            "(batch, sequence); the model builds the rest from it. Use position_ids that restart for packed documents."
        )
    labels = batch.get("labels")
    if torch.is_tensor(labels) and (labels.dim() < 2 or labels.shape[1] != length):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} are not one per token of a row of {length} tokens. For a loss that needs the "
            "whole row (sequence classification, reward models) give the attached model the whole batch, model(**batch)."
        )


def pad(tensor, padding, value, dim=1):
    if not padding:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = padding
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def _pad_positions(position_ids, padding):
    """Number the padding on; behind packed documents restart at zero: one dummy document, which no other one sees."""
    if not padding:
        return position_ids
    count = torch.arange(padding, device=position_ids.device, dtype=position_ids.dtype)
    tail = position_ids[..., -1:] + 1 + count
    if position_ids.dim() == 2 and position_ids.shape[1] > 1:
        packed = (position_ids.diff(dim=-1) != 1).any(dim=-1, keepdim=True)
        tail = torch.where(packed, count, tail)
    return torch.cat([position_ids, tail], dim=-1)


def _boundaries(batch, batch_size, length, padding):
    """The full row's `cu_seq_lens_*` and `max_length_*`, with the padding as one more document."""
    given = {key: batch[key] for key in BOUNDARY_KEYS if batch.get(key) is not None}
    # A longest length that is a tensor would be read by the host in every layer.
    longest = {key: int(value) for key, value in given.items() if key.startswith("max_length") and torch.is_tensor(value)}
    given.update(longest)
    if not padding or not given:
        return given
    if batch_size > 1:
        raise ValueError(
            f"cu_seq_lens with {batch_size} rows of {length} tokens: padding every row by {padding} would move their "
            "boundaries. Flatten the batch into one row, or pad the rows to a multiple of sp_size in the collator."
        )
    for key, value in given.items():
        if key.startswith("cu_seq_lens"):
            given[key] = torch.cat([value, value.new_full((1,), length + padding)])
        else:
            given[key] = max(value, padding)
    return given


def checksum(tokens, before=0):
    """Shape and content of token ids, or labels, as one integer below 2 ** 24, `()` int64; integer arithmetic, equal on every device.

    Of embeddings the shape alone: two devices need not compute them alike to the last bit.
    """
    content = torch.zeros((), dtype=torch.long, device=tokens.device)
    if not tokens.is_floating_point():
        flat = tokens.reshape(-1).long()
        # Weights that do not repeat within 65521 tokens: swapping two tokens changes the sum.
        content = (flat * (torch.arange(flat.numel(), device=flat.device) % 65521 + 1)).sum()
    rows = tokens.shape[0] if tokens.dim() else 1
    # Its square, summed over the ranks of a group, is exact in float64 (peers.py).
    return (content + 31 * rows + 1009 * (tokens.numel() // max(rows, 1)) + 7919 * before) % (1 << 24)
