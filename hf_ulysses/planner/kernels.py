"""Flash attention without a GPU: nothing is computed, but the memory is what flash-attn 2 asks for.

Forward saves query, key, value, the output and the log-sum-exp (float32, one per query and head). Backward makes the three
gradients, a float32 accumulator as large as the query, one float32 per query and head, and, with fewer key heads than query
heads, gradients of key and value with all heads, which are summed afterwards (flash_attn's flash_api.cpp, `mha_bwd`).
"""

from contextlib import contextmanager

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_BSHD, key_BSGD, value_BSGE):
        batch, length, heads, _ = query_BSHD.shape
        out = query_BSHD.new_empty(batch, length, heads, value_BSGE.shape[-1])
        lse = query_BSHD.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query_BSHD, key_BSGD, value_BSGE, out, lse)
        return out

    @staticmethod
    def backward(ctx, _):
        query, key, value, _out, lse = ctx.saved_tensors
        heads = query.shape[2]
        scratch = [query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(lse)]
        if key.shape[2] != heads:
            scratch += [x.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (key, value)]
        gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
        del scratch
        return gradients


def _core(module, query, key, value, attention_mask, **kwargs):
    return _Flash.apply(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


@contextmanager
def stand_in(attention):
    """Inside, the attention key `attention` computes nothing and takes flash's memory."""
    ALL_ATTENTION_FUNCTIONS[attention] = _core
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[attention]
