"""Kernels without a GPU: nothing is computed, but the memory is what they ask for.

Flash attention: forward saves query, key, value, the output and the log-sum-exp (float32, one per query and head). Backward
makes the three gradients, a float32 accumulator as large as the query, one float32 per query and head, and, with fewer key
heads than query heads, gradients of key and value with all heads, which are summed afterwards (flash_attn's flash_api.cpp,
`mha_bwd`). Other memory-efficient kernels (sdpa's on a GPU, flex) save the same.

TRL's fused head: its Triton kernels fold a tile of logits where it lies; its torch ones, for CPUs, make copies. In front of
the former TRL picks the positions with a label, a copy of hidden states forward and backward: here of all positions.

Liger's norm: saves its input and one float32 per position; backward writes into the incoming gradient (rms_norm.py there).
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# No mask builder knows it, so that no mask is made, as for flash.
KEY = "planned"


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, storage, query_BSHD, key_BSGD, value_BSGE):
        batch, length, heads, _ = query_BSHD.shape
        out = query_BSHD.new_empty(batch, length, heads, value_BSGE.shape[-1])
        lse = query_BSHD.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query_BSHD, key_BSGD, value_BSGE, out, lse)
        ctx.storage = storage
        # Half of 2 x 2 x S x S x D each: causal.
        storage.attended(query_BSHD.shape, 2)
        return out

    @staticmethod
    def backward(ctx, _):
        query, key, value, _out, lse = ctx.saved_tensors
        heads = query.shape[2]
        scratch = [query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(lse)]
        if key.shape[2] != heads:
            scratch += [x.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (key, value)]
        gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
        ctx.storage.attended(query.shape, 5)
        del scratch
        return None, *gradients


def _core(storage, module, query, key, value, attention_mask, **kwargs):
    return _Flash.apply(storage, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


def has_stand_in(attention) -> bool:
    return any(name in attention for name in ("flash", "sdpa", "flex"))


@contextmanager
def attention_stand_in(storage):
    """Inside, the attention key `KEY` computes nothing and takes flash's memory; products are counted in `storage`."""
    ALL_ATTENTION_FUNCTIONS[KEY] = partial(_core, storage)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[KEY]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.saved_tensors[1])


def stand_ins(storage, attention, norms, fused_head):
    """The contexts of a step. With an attention that is no fused kernel nothing is replaced but `norms`, by Liger's."""
    for norm in norms:
        yield mock.patch.object(norm, "forward", lambda hidden, norm=norm: _Norm.apply(hidden, norm.weight))
    if has_stand_in(attention):
        yield attention_stand_in(storage)
        if fused_head:
            from trl.trainer import utils

            function = utils._ChunkedLogProbFunction
            picking = SimpleNamespace(apply=lambda hidden, *more: function.apply(hidden * 1, *more))
            yield mock.patch.object(utils, "_ChunkedLogProbFunction", picking)
            folds = {name: lambda *_, **__: None for name in ("_forward_tile", "_backward_tile")}
            yield mock.patch.multiple("trl.kernels.chunked_logprob", **folds)
