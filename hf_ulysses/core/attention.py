"""The hook around a core attention function: exchange, attend over the whole row with some heads, exchange back.

    query, key, value        [B, H|G, s, D|E]   this shard's tokens, all heads
      gather_seq_scatter_heads
    core attention           any implementation the model has: eager, sdpa, flash, flex, hub kernels
      gather_heads_scatter_seq
    output                   [B, s, H, E]

With `attachment.head_chunks` this is done for a few heads after the others, so that the whole row of only those is alive.

The core sees what it would see without sequence parallelism, with fewer heads: the full row's mask (masks.py),
positions and document boundaries, and a view of its module in which head counts and per-head parameters (sinks) are
this rank's. Acts only for modules of an attached model in a sharded forward; everything else goes straight through.

Not covered, refused: key/value caches and cross-attention (key length differs from query length), returned attention
weights, additive biases that were built for the shard.
"""

import functools

import torch

from . import packed
from .all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_heads
from .cut import BOUNDARY_KEYS
from .heads import chunk_heads, share_heads
from .pieces import again_in_backward, collected
from .sequence import ROW_KEY


class HeadView:
    """An attention module as its core function may see it: with this rank's heads. Everything else is the module's."""

    def __init__(self, module, share, num_heads):
        self.__dict__.update(_module=module, _share=share, _num_heads=num_heads)

    def __getattr__(self, name):
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return self._share.groups
        if torch.is_tensor(value):
            return _own_heads(value, self._share, self._num_heads, dim=0)
        return value

    def __setattr__(self, name, value):
        setattr(self._module, name, value)


def exchanging(core, attachment_of):
    """Wrap a core attention function of the `AttentionInterface` signature. Returns the same wrapper for the same core.

    Args:
        core (`Callable`): `core(module, query, key, value, attention_mask, **kwargs) -> (out_BSHE, weights)`.
        attachment_of (`Callable`): module -> its `Attachment`, or `None`.
    """
    if getattr(core, "_exchanges", False):
        return core
    return _exchanging(core, attachment_of)


@functools.lru_cache(maxsize=64)
def _exchanging(core, attachment_of):
    @functools.wraps(core)
    def exchanging_core(module, query, key, value, attention_mask=None, *args, **kwargs):
        attachment = attachment_of(module)
        row = attachment.row_of(module, kwargs) if attachment is not None else kwargs.get(ROW_KEY)
        kwargs.pop(ROW_KEY, None)
        if attachment is None and row is not None:
            raise ValueError(
                f"{type(module).__name__} got a sharded batch but belongs to a model that is not attached (a copy of an "
                "attached one?): it would attend within the shard. Give it the full rows, or attach() it, too."
            )
        if attachment is None or row is None:
            return core(module, query, key, value, attention_mask, *args, **kwargs)
        return _attend(core, attachment, row, module, query, key, value, attention_mask, args, kwargs)

    exchanging_core._exchanges = True
    return exchanging_core


def _attend(core, attachment, row, module, query_BHsD, key_BGsD, value_BGsE, attention_mask, args, kwargs):
    num_heads, num_kv_heads = query_BHsD.shape[1], key_BGsD.shape[1]
    _check(attachment, row, module, query_BHsD, key_BGsD, value_BGsE, kwargs)
    query_BHsD, key_BGsD, value_BGsE = _one_dtype(query_BHsD, key_BGsD, value_BGsE)
    if not torch.compiler.is_compiling():
        # Counted by what is compiled, each step would be compiled anew.
        attachment.exchanges += 1

    def attend_with(chunk, query_BHsD, key_BGsD, value_BGsE):
        """Exchange, attend and exchange back the heads of `chunk`, which the three tensors hold."""
        shares = share_heads(query_BHsD.shape[1], key_BGsD.shape[1], attachment.size)
        exchange = Exchange(attachment.group, attachment.rank, shares)
        share = exchange.mine.among(chunk)
        query_BhSD, key_BgSD, value_BgSE = gather_seq_scatter_heads(query_BHsD, key_BGsD, value_BGsE, exchange)
        if share.kv_index is not None:
            key_BgSD, value_BgSE = (_pick(tensor, share.kv_index) for tensor in (key_BgSD, value_BgSE))

        view = HeadView(module, share, num_heads)
        full = _full_row_kwargs(kwargs, row, module, share, num_heads)

        def attend(query, key, value, mask, kwargs):
            # Left as it is by an error, which is the attention function's then (mixing/locate.py).
            attachment.attending = True
            out = core(view, query, key, value, mask, *args, **kwargs)[0]
            attachment.attending = False
            return out

        mask, causal = attention_mask, _is_causal(module, kwargs)
        apart = mask is None and row.build_mask is not None and causal
        if apart and any(torch.is_tensor(v) and v.dim() == 4 and v.shape[-2] == row.padded for v in full.values()):
            mask, apart = row.build_mask(), False  # A bias of queries by keys is as large.
        if apart:
            out_BShE = packed.attend(attend, query_BhSD, key_BgSD, value_BgSE, row.bundles, full)
        else:
            mask = _full_row_mask(mask, row, module, share, num_heads)
            if mask is None and row.padding and not causal:
                # Nothing else hides the padding behind the row.
                key_BgSD, value_BgSE = key_BgSD[:, :, : row.length], value_BgSE[:, :, : row.length]
            out_BShE = attend(query_BhSD, key_BgSD, value_BgSE, mask, full)
        # Where nothing is saved for backward (evaluation, checkpointing) these are not needed while the output travels.
        del query_BhSD, key_BgSD, value_BgSE
        return gather_heads_scatter_seq(out_BShE, exchange)

    chunks = chunk_heads(num_heads, num_kv_heads, attachment.size, getattr(attachment, "head_chunks", 1))
    if len(chunks) == 1:
        return attend_with(chunks[0], query_BHsD, key_BGsD, value_BGsE), None
    out_BsHE = None
    for chunk in chunks:
        parts = query_BHsD[:, chunk.query], key_BGsD[:, chunk.kv], value_BGsE[:, chunk.kv]
        # Backward exchanges again, from the local tensors: else the whole row of every chunk would be kept for it.
        out_BshE = again_in_backward(attend_with, chunk, *parts, random=kwargs.get("dropout", 0.0) > 0)
        if out_BsHE is None:
            out_BsHE = out_BshE.new_empty(*out_BshE.shape[:2], num_heads, out_BshE.shape[-1])
        out_BsHE = collected(out_BsHE, out_BshE, 2, chunk.query)
    return out_BsHE, None


def _pick(tensor_BgSD, heads):
    """A key/value head for each of `heads`. Not by an index tensor: the host would wait for its copy in every layer."""
    parts = tensor_BgSD.unbind(1)
    return torch.stack([parts[head] for head in heads], dim=1)


def _check(attachment, row, module, query, key, value, kwargs):
    shard = row.padded // attachment.size
    if not query.shape[2] == key.shape[2] == value.shape[2] == shard:
        raise ValueError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions where this shard of a "
            f"row of {row.padded} tokens over sp_size={attachment.size} has {shard}. Key/value caches, prefixes and "
            "cross-attention are not supported with sequence parallelism: set use_cache=False."
        )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"{type(module).__name__} has {key.shape[1]} key heads but {value.shape[1]} value heads.")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True is not supported: with sequence parallelism no rank has all weights.")


def _one_dtype(*tensors):
    """The three travel in one buffer. They differ under autocast only, which casts them to one dtype in the core."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return tensors
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        raise ValueError(f"query, key and value have different dtypes: {sorted(map(str, dtypes))}.")
    return [tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors]


def _is_causal(module, kwargs):
    given = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if given is None else given


def _own_heads(tensor, share, num_heads, dim):
    """The rows of this rank's query heads, if `tensor` has one row per query head in dimension `dim`."""
    if tensor.dim() <= dim or tensor.shape[dim] != num_heads or num_heads == 1:
        return tensor
    if dim == 0 and tensor.dim() > 1 and any(n != 1 for n in tensor.shape[1:]):
        return tensor
    return tensor.narrow(dim, share.query.start, share.num_query)


def _full_row_mask(mask, row, module, share, num_heads):
    if not torch.is_tensor(mask):
        return mask
    lengths = mask.shape[-2:] if mask.dim() == 4 else mask.shape[-1:]
    if any(n != row.padded for n in lengths):
        raise ValueError(
            f"{type(module).__name__} got an attention mask of shape {tuple(mask.shape)} for a row of {row.padded} "
            "tokens: the model builds it from this rank's shard by itself instead of calling "
            "transformers.masking_utils. Such models are not supported with sequence parallelism."
        )
    return _own_heads(mask, share, num_heads, dim=1) if mask.dim() == 4 else mask


def _full_row_kwargs(kwargs, row, module, share, num_heads):
    full = {**kwargs, **row.boundaries}
    if torch.is_tensor(kwargs.get("position_ids")):
        full["position_ids"] = row.position_ids if kwargs["position_ids"].dim() > 2 else row.text_positions
    if not row.boundaries and "flash" in (getattr(getattr(module, "config", None), "_attn_implementation", None) or ""):
        full.update(row.flash_arguments())
    for name, value in kwargs.items():
        if not torch.is_tensor(value) or name == "position_ids" or name in BOUNDARY_KEYS:
            continue
        if value.dim() == 4:
            full[name] = _full_row_mask(value, row, module, share, num_heads)
        else:
            full[name] = _own_heads(value, share, num_heads, dim=0)
    return full
