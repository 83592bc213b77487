"""Flex attention has no backward on a CPU: a fake that evaluates its block mask densely stands in for the kernel.

What is tested is what the kernel is given: a block mask over the full row, made by the model's own builder.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ulysses

from ..models import batch_of, build, packed_positions, padded
from .steps import FLOAT32, assert_same, sharded, whole_step

KEY = "flex_attention"
LENGTH, SIZE = 33, 2


def fake_flex(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **kwargs):
    assert isinstance(attention_mask, BlockMask) and attention_mask.seq_lengths == (query.shape[2],) * 2
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    visible = create_mask(attention_mask.mask_mod, len(query), 1, query.shape[2], key.shape[2], device="cpu")
    scores = scores.masked_fill(~visible, -1e9)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


def flex_step(batch, model):
    ALL_ATTENTION_FUNCTIONS[KEY] = fake_flex
    # Transformers compiles the making of block masks.
    with torch._dynamo.config.patch(disable=True):
        try:
            model = build(attn=KEY, **model)
            with hf_ulysses.attach(model) as sp:
                return sharded(model, batch, sp)
        finally:
            del ALL_ATTENTION_FUNCTIONS[KEY]


BATCHES = {
    "plain": batch_of(2, LENGTH),
    "packed": batch_of(1, LENGTH, position_ids=packed_positions(11, 2, 20)),
    "padded": padded(batch_of(2, LENGTH), real=[20, LENGTH], side="right"),
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("batch", BATCHES)
def test_block_masks_are_the_full_rows(ranks, family, batch):
    # In float64, eager attention makes NaN of a query without keys: gemma2's windows have such among the padding.
    kind = dict(family=family, dtype=torch.float32 if batch == "padded" else torch.float64)
    reference = ranks(1).run(whole_step, BATCHES[batch], attn="eager", **kind)[0]
    assert_same(ranks(SIZE).run(flex_step, BATCHES[batch], kind), reference, tolerance=FLOAT32, exchanges=2)
