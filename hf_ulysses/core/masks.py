"""The model's own masks, built for the full row.

Models call `transformers.masking_utils.create_*_mask(config, inputs_embeds, attention_mask, ..., position_ids)`. The
wrapper changes what goes in: a full-length stand-in for the embeddings (only shape, dtype and device are read), the full
row's 2-D mask and positions. What comes out is the mask the model would have built without sequence parallelism, in
the form its attention implementation wants: a boolean or float tensor, a flex block mask, a 2-D mask, or `None`. Under
sdpa, a row that is made of documents and padding gets a `DocumentMask` instead of S x S elements (documents.py).

Not covered, refused: custom `or_mask_function` / `and_mask_function` (they close over this shard's tensors).
"""

import functools
import inspect

import torch

from . import packed as documents_module
from .sequence import current_row

CAUSAL_BUILDERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
BUILDERS = (
    *CAUSAL_BUILDERS,
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
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
        bound = signature.bind(*args, **kwargs)
        _widen(bound.arguments, row, build.__name__)
        if _is_flash(bound.arguments) and _is_rows(bound.arguments["attention_mask"], row) and not row.facts.hides:
            # What one process would see: no padding, so that documents are told apart by positions.
            bound.arguments["attention_mask"] = None
        mask = _by_documents(build, bound.arguments, row)
        return _hide_padding(build(*bound.args, **bound.kwargs), row) if mask is None else mask

    return build_for_full_row


def _is_flash(arguments):
    causal = getattr(arguments["config"], "is_causal", True) is not False
    return causal and "flash" in (arguments["config"]._attn_implementation or "")


def _is_rows(mask, row):
    return mask is not None and mask is row.attention_mask


def _hide_padding(mask, row):
    """A query that sees only padding averages over every key of an additive mask: over the row's own, not over ours."""
    if not row.padding or row.attention_mask is None or not torch.is_tensor(mask) or not mask.is_floating_point():
        return mask
    return mask.index_fill(-1, torch.arange(row.length, row.padded, device=mask.device), float("-inf"))


def _by_documents(build, arguments, row):
    """The row's mask as a `DocumentMask`, `None` where the whole mask is wanted (see documents.py)."""
    # Flash attention gets the boundaries themselves, flex makes a sparse mask, and eager's scores are S x S anyway.
    name, config = build.__name__, arguments["config"]
    if (
        _is_made(arguments.get("attention_mask"))
        or name not in CAUSAL_BUILDERS
        or config._attn_implementation != "sdpa"
        or getattr(config, "is_causal", True) is False
    ):
        return None
    documents = documents_module.split(row, arguments.get("position_ids"))
    if documents is None:
        return None
    padded_right = any(document[-1].stop < row.padded for document in documents)
    padded_left = any(document[0].start > 0 for document in documents)
    if padded_right and name != "create_causal_mask" or padded_left and "chunked" in name:
        return None
    if "chunked" in name and "remap_positions_for_packed_sequence" not in inspect.unwrap(build).__globals__:
        return None  # Older versions of transformers count chunks from the row's start, not the document's.

    given = dict(arguments)
    embeds = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"

    def build_whole():
        return build(**given)

    @functools.cache
    def build_one(length):
        one = dict(given, attention_mask=None)
        one[embeds] = given[embeds][:1, :length]
        # Builders look for documents in positions, and the host would wait for the answer.
        one.pop("position_ids", None)
        if torch.is_tensor(given.get("cache_position")):
            one["cache_position"] = torch.arange(length, device=given["cache_position"].device)
        return build(**one)

    blocks = [[_block(document, build_one) for document in of_row] for of_row in documents]
    if padded_right:
        for of_row in blocks:
            # Padding behind a document sees all of it, and nothing of the padding. Nobody reads its outputs but
            # whoever compares logits of padding.
            seen = of_row[-1].key
            of_row.append(documents_module.Block(slice(seen.stop, row.padded), seen, None, causal=False))
        blocks = [[block for block in of_row if block.query.start < block.query.stop] for of_row in blocks]
    return documents_module.document_mask(blocks, row.padded, given[embeds].device, build_whole)


def _is_made(mask):
    """Whether the model made the mask of keys by queries before its decoder, where images see each other both ways, say."""
    return torch.is_tensor(mask) and mask.dim() == 4


def _block(document, build_one):
    here = slice(document.start, document.stop)
    return documents_module.Block(here, here, build_one(document.stop - document.start), causal=True)


def _widen(arguments, row, name):
    extra = arguments.get("kwargs", {})
    for key in ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states"):
        if arguments.get(key, extra.get(key)) is not None:
            raise ValueError(
                f"{name} was called with {key}, which describes this rank's shard, not the full row. Models that overlay "
                "their masks like this are not supported with sequence parallelism."
            )
    for key in ("cache", "past_key_values"):
        if arguments.get(key, extra.get(key)) is not None:
            raise ValueError(
                f"{name} was called with a key/value cache: set use_cache=False with sequence parallelism."
            )

    embeds = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"
    local = arguments[embeds]
    arguments[embeds] = local.new_empty(1).expand(local.shape[0], row.padded, 1)
    if not _is_made(arguments.get("attention_mask")):
        causal = "bidirectional" not in name and getattr(arguments["config"], "is_causal", True) is not False
        arguments["attention_mask"] = row.attention_mask if causal else row.padding_mask
    if torch.is_tensor(arguments.get("position_ids")):
        # mrope models pass the text positions, the first of several rows of positions.
        arguments["position_ids"] = row.position_ids if arguments["position_ids"].dim() > 2 else row.text_positions
    if torch.is_tensor(arguments.get("cache_position")):
        arguments["cache_position"] = torch.arange(row.padded, device=arguments["cache_position"].device)
