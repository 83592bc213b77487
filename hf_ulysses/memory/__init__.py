"""Longer rows on the same GPUs: each switch takes one thing that does not shrink with sp_size, or not enough.

    tiled_loss           logits and loss a few tokens at a time                              loss.py
    tiled_mlp            the MLP's intermediate values a few tokens at a time                 per_position.py, tiles.py
    tiled_norms          the float32 copies of eager norms a few tokens at a time             per_position.py, tiles.py
    offload_checkpoints  the inputs of checkpointed layers in CPU memory                      offload.py
    head_chunks          the full row's query, key, value of a few heads at a time            core/attention.py

Every switch acts on modules that it finds by structure, is exact up to the order of sums, and is undone by the handles
that it returns. docs/memory.md says what each is worth and what it costs.
"""

import logging
import os

import torch

from .settings import Settings

logger = logging.getLogger(__name__)
__all__ = ["Settings", "switch_on"]


def switch_on(model, settings: Settings | dict | str, attachment=None) -> list:
    """Switch on what `settings` asks for. No communication; every rank must do it, with the same settings.

    Args:
        model (`torch.nn.Module`): the model that is trained, before or after an engine took it; any sp_size.
        settings (`Settings`, `dict` or `"max"`): see there; a dict has its fields.
        attachment (`Attachment`, *optional*): the model's; without one `head_chunks` has nothing to do, because nothing is
            exchanged.

    Returns:
        `list`: handles, whose `remove()` undoes it.

    Raises:
        ValueError: a switch that finds no module of the structure that it needs.
    """
    from . import heads, loss, offload, per_position

    if not isinstance(settings, Settings):
        settings = Settings(**(settings if isinstance(settings, dict) else {"memory": settings}))
    settings = settings.resolved()
    handles = []
    if settings.tiled_mlp:
        handles += per_position.tile_mlps(model, settings.tiled_mlp)
    if settings.tiled_norms:
        handles += per_position.tile_norms(model, settings.tiled_norms)
    if settings.offload_checkpoints:
        handles += offload.offload_checkpoints(model)
    if settings.head_chunks != 1 and attachment is not None:
        handles += heads.chunk_heads(model, attachment, settings.head_chunks)
    if settings.tiled_loss:
        handles += loss.tile_loss(model, settings.tiled_loss, attachment)
    if handles and torch.cuda.is_available() and not _expandable():
        logger.warning(
            "The CUDA allocator's expandable_segments are off; long rows fragment its memory. Set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts, or launch it with -m hf_ulysses."
        )
    return handles


def _expandable() -> bool:
    conf = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    return any("expandable_segments:true" in text.lower().replace(" ", "") for text in conf)
