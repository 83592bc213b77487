"""The model's own masks, built for the full row.

Models call `transformers.masking_utils.create_*_mask(config, inputs_embeds, attention_mask, ..., position_ids)`. The
wrapper changes what goes in: a full-length stand-in for the embeddings (only shape, dtype and device are read), the full
row's 2-D mask and positions. What comes out is the mask the model would have built without sequence parallelism, in
the form its attention implementation wants: a boolean or float tensor, a flex block mask, a 2-D mask, or `None`. Under
sdpa, a row that is made of documents and padding gets none either where no document alone needs one (packed.py).

Not covered, refused: custom `or_mask_function` / `and_mask_function` (they close over this shard's tensors).
"""

import functools
import inspect
import logging

import torch

from .sequence import current_row, holding

logger = logging.getLogger(__name__)

CAUSAL_BUILDERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
BUILDERS = (
    *CAUSAL_BUILDERS,
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
    "create_reference_sliding_window_causal_mask",
    "create_masks_for_generate",
)


@functools.lru_cache(maxsize=64)
def for_full_row(build):
    """Wrap a mask builder so that it sees the full row while a sharded forward runs."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def build_for_full_row(*args, **kwargs):
        row = current_row()
        if row is None:
            return build(*args, **kwargs)
        if "past_key_values" in kwargs and "cache" in signature.parameters:
            # Renamed in transformers 5.24, whose own wrapper translates; models outside of it still use the old name.
            kwargs["cache"] = kwargs.pop("past_key_values")
        bound = signature.bind(*args, **kwargs).arguments
        given = {**bound.pop("kwargs", {}), **bound}
        _widen(given, row, build.__name__)
        if _is_causal(given) and "flash" in (given["config"]._attn_implementation or "") and not row.facts.hides:
            # What one process would see: no padding, so that documents are told apart by positions.
            given["attention_mask"] = None if given["attention_mask"] is row.attention_mask else given["attention_mask"]
        if (documents := _apart(build, given, row)) is not None:
            row.documents, row.build_mask = documents, functools.partial(build, **given)
            return None
        with holding(None):  # One may call another.
            return _hide_padding(build(**given), row)

    return build_for_full_row


def _is_causal(given):
    return getattr(given["config"], "is_causal", True) is not False


def _hide_padding(mask, row):
    """A query that sees only padding averages over every key of an additive mask: over the row's own, not over ours."""
    if not row.padding or row.attention_mask is None or not torch.is_tensor(mask) or not mask.is_floating_point():
        return mask
    return mask.index_fill(-1, torch.arange(row.length, row.padded, device=mask.device), float("-inf"))


def _apart(build, given, row):
    """The documents of a row of which none would get a mask by itself; `None` where the whole mask is wanted."""
    # Flash attention gets the boundaries themselves, flex makes a sparse mask, and eager's scores are S x S anyway.
    name = build.__name__
    sdpa = name in CAUSAL_BUILDERS and given["config"]._attn_implementation == "sdpa" and _is_causal(given)
    if not sdpa or _is_made(given.get("attention_mask")):
        return None
    if row.attention_mask is not None:
        documents = row.facts.visible
    else:
        documents = row.facts.documents if given.get("position_ids") is not None else None
    if documents is None:
        return None
    # Where chunks are counted from differs between versions, and padding on the right sees all of its row: no limits at all.
    everything = "chunked" in name or any(of_row[-1].stop < row.padded for of_row in documents)
    length = row.padded if everything else max(document.length for of_row in documents for document in of_row)
    embeds = _embeds(given)
    alone = {**given, "attention_mask": None, embeds: given[embeds][:1, :length]}
    # Builders look for documents in positions, and the host would wait for the answer.
    alone.pop("position_ids", None)
    if torch.is_tensor(given.get("cache_position")):
        alone["cache_position"] = given["cache_position"][:length]
    if build(**alone) is None:
        return documents
    _report(name)
    return None


@functools.cache
def _report(name):
    logger.info("%s masks within documents: rows that are packed or padded get their whole mask, length x length", name)


def _is_made(mask):
    """Whether the model made the mask of keys by queries before its decoder, where images see each other both ways, say."""
    return torch.is_tensor(mask) and mask.dim() == 4


def _embeds(given):
    return "inputs_embeds" if "inputs_embeds" in given else "input_embeds"


def _widen(given, row, name):
    for key in ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states"):
        if given.get(key) is not None:
            raise ValueError(
                f"{name} was called with {key}, which describes this rank's shard, not the full row. Models that overlay "
                "their masks like this are not supported with sequence parallelism."
            )
    if given.get("cache") is not None or given.get("past_key_values") is not None:
        raise ValueError(f"{name} was called with a key/value cache: set use_cache=False with sequence parallelism.")
    local = given[_embeds(given)]
    given[_embeds(given)] = local.new_empty(1).expand(local.shape[0], row.padded, 1)
    if not _is_made(given.get("attention_mask")):
        causal = "bidirectional" not in name and _is_causal(given)
        given["attention_mask"] = row.attention_mask if causal else row.padding_mask
    if torch.is_tensor(given.get("position_ids")):
        # mrope models pass the text positions, the first of several rows of positions.
        given["position_ids"] = row.position_ids if given["position_ids"].dim() > 2 else row.text_positions
    if torch.is_tensor(given.get("cache_position")):
        given["cache_position"] = torch.arange(row.padded, device=given["cache_position"].device)
