"""The model's own masks, built for the full row.

Models call `transformers.masking_utils.create_*_mask(config, inputs_embeds, attention_mask, ..., position_ids)`. The
wrapper changes what goes in: a full-length stand-in for the embeddings (only shape, dtype and device are read), the full
row's 2-D mask and positions. What comes out is the mask the model would have built without sequence parallelism, in
the form its attention implementation wants: a boolean or float tensor, a flex block mask, a 2-D mask, or `None`.

Not covered, refused: custom `or_mask_function` / `and_mask_function` (they close over this shard's tensors).
"""

import functools
import inspect

import torch

from .row import current_row

BUILDERS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
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
        bound = signature.bind(*args, **kwargs)
        _widen(bound.arguments, row, build.__name__)
        return build(*bound.args, **bound.kwargs)

    return build_for_full_row


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
            raise ValueError(f"{name} was called with a key/value cache: set use_cache=False with sequence parallelism.")

    embeds = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"
    local = arguments[embeds]
    arguments[embeds] = local.new_empty(1).expand(local.shape[0], row.padded, 1)
    given = arguments.get("attention_mask")
    if not (torch.is_tensor(given) and given.dim() == 4):
        causal = "bidirectional" not in name and getattr(arguments["config"], "is_causal", True) is not False
        arguments["attention_mask"] = row.attention_mask if causal else row.padding_mask
    if torch.is_tensor(arguments.get("position_ids")):
        # mrope models pass the text positions, the first of several rows of positions.
        extra_dims = row.position_ids.dim() - arguments["position_ids"].dim()
        arguments["position_ids"] = row.position_ids[(0,) * extra_dims] if extra_dims > 0 else row.position_ids
    if torch.is_tensor(arguments.get("cache_position")):
        arguments["cache_position"] = torch.arange(row.padded, device=arguments["cache_position"].device)
