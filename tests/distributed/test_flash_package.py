"""Flash attention as on a GPU, from transformers' dispatch down to flash-attn's own autograd; kernels computed in torch.

The extension asserts what kernels assert of their arguments (tests/kernels), so that an exact step also proves dtypes, strides,
alignment, boundaries and head counts. Eager attention in one process is the reference; test_flash.py looks at arguments.
"""

import os

import pytest
import torch

import hf_ulysses

from ..kernels import without_gpu
from ..kernels.flash import HUB, KEYS, flash
from ..models import batch_of, build, checkpoint, packed_positions, padded
from .steps import FLOAT32, TOLERANCE, assert_same, on_whole_rows, residual, sharded, whole_step

pytestmark = without_gpu

KEY = "flash_attention_2"
LENGTH = 33
POSITIONS = packed_positions(11, 2, 20)
# Over two and four ranks query heads straddle KV heads.
UNEVEN = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
# Its size is no multiple of 8: flash-attn pads it.
SMALL_HEADS = dict(head_dim=12)


def flash_steps(key, batch, model, checkpointed=False, exact=True):
    """The step in shards and on whole rows, with the extension's functions that were called for the second."""
    with flash(key, exact) as calls:
        model = build(attn=key, **model)
        if checkpointed:
            checkpoint(model)
        with hf_ulysses.attach(model) as sp:
            first = sharded(model, batch, sp)
            calls.clear()
            second = on_whole_rows(model, batch, sp)
            return [first, second], list(calls)


def compare(ranks, size, batch, expected_calls, key=KEY, checkpointed=False, tolerance=TOLERANCE, **model):
    reference = ranks(1).run(whole_step, batch, attn="eager", **model)[0]
    for steps, calls in ranks(size).run(flash_steps, key, batch, model, checkpointed):
        assert_same(steps, reference, tolerance=tolerance, exchanges=4 if checkpointed else 2)
        assert calls == expected_calls


PLAIN = ["fwd"] * 2 + ["bwd"] * 2
VARLEN = ["varlen_fwd"] * 2 + ["varlen_bwd"] * 2
MODELS = {
    "llama": {},
    "uneven heads": UNEVEN,
    "small heads": SMALL_HEADS,
    "one KV head": dict(num_key_value_heads=1),
    "window": dict(family="mistral"),
    "window and softcap": dict(family="gemma2"),
    "MLA": dict(family="deepseek_v3"),
}
FEW = ("llama", "uneven heads", "window and softcap")
ALL = bool(os.environ.get("HF_ULYSSES_TEST_ALL"))
# Every model over one number of ranks, those of which there are few over both.
SIZES = [(model, size) for model in MODELS for size in (2, 4) if ALL or model in FEW or size == 4]
# (model, side, ranks): every pair.
PADDED = [
    (model, side, size)
    for i, model in enumerate(FEW)
    for side in ("left", "right")
    for size in (2, 4)
    if ALL or (i + (side == "left") + size // 2) % 2
]


@pytest.mark.parametrize("model,size", SIZES)
def test_plain_rows(ranks, model, size):
    compare(ranks, size, batch_of(2, LENGTH), PLAIN, **MODELS[model])


@pytest.mark.parametrize("model,size", SIZES)
def test_packed_rows(ranks, model, size):
    compare(ranks, size, batch_of(1, LENGTH, position_ids=POSITIONS), VARLEN, **MODELS[model])


@pytest.mark.parametrize("model,side,size", PADDED)
def test_padded_rows(ranks, model, side, size):
    batch = padded(batch_of(2, LENGTH), real=[20, LENGTH], side=side)
    # A query without keys gives zero here and an average in eager attention: the last token of padding on the left.
    batch["labels"][0, LENGTH - 20] = -100
    # In float64 eager attention makes NaN of such a query.
    compare(ranks, size, batch, VARLEN, tolerance=FLOAT32, dtype=torch.float32, **MODELS[model])


@pytest.mark.parametrize("packed,size", [(False, 2), (True, 4)], ids=["plain", "packed"])
def test_checkpointing(ranks, packed, size):
    batch = batch_of(1, LENGTH, **({"position_ids": POSITIONS} if packed else {}))
    forward, backward = (VARLEN if packed else PLAIN)[::2]
    compare(ranks, size, batch, [forward] * 2 + [forward, backward] * 2, checkpointed=True, **UNEVEN)


def test_a_mask_of_ones_keeps_packed_rows_apart(ranks):
    """As flash attention in one process does: such a mask is none, whether or not the row is padded to the ranks."""
    batch = batch_of(1, LENGTH, position_ids=POSITIONS)
    reference = ranks(1).run(whole_step, batch, attn="eager")[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for steps, calls in ranks(2).run(flash_steps, KEY, batch, {}):
        assert_same(steps, reference)
        assert calls == VARLEN


@pytest.mark.parametrize("given", ["numbers", "tensors"])
def test_boundaries_that_the_collator_gives(ranks, given):
    """Some collators give the longest length as a tensor: kernels want a number."""
    ends = torch.tensor([0, 11, 13, LENGTH], dtype=torch.int32)
    longest = 20 if given == "numbers" else torch.tensor(20)
    batch = batch_of(1, LENGTH, position_ids=POSITIONS)
    reference = ranks(1).run(whole_step, batch, attn="eager")[0]
    batch.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)
    for steps, calls in ranks(2).run(flash_steps, KEY, batch, {}):
        assert_same(steps, reference)
        assert calls == VARLEN


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("key", KEYS[1:], ids=["3", "4", "hub"])
def test_other_versions_get_arguments_that_they_take(ranks, key, packed):
    """Their signatures are the real ones; what they compute is version 2's."""
    batch = batch_of(1, LENGTH, **({"position_ids": POSITIONS} if packed else {}))
    for model in ({}, dict(family="gemma2")):
        compare(ranks, 2, batch, VARLEN if packed else PLAIN, key=key, **model)


def half(key, batch, dtype, autocast):
    with flash(key) as calls:
        model = build(attn=key, dtype=torch.float32 if autocast else dtype, **UNEVEN)
        with hf_ulysses.attach(model) as sp, torch.autocast("cpu", dtype, enabled=autocast):
            step = on_whole_rows(model, batch, sp)
        return step, list(calls)


def half_in_one(key, batch, dtype, autocast):
    with flash(key), torch.autocast("cpu", dtype, enabled=autocast):
        return whole_step(batch, attn=key, dtype=torch.float32 if autocast else dtype, **UNEVEN)


@pytest.mark.parametrize("autocast", [False, True], ids=["pure", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(ranks, dtype, autocast):
    """The dtypes that kernels take, asserted. bf16 has 8 bits: 4e-3 per sum, several of them one after the other."""
    batch = batch_of(1, LENGTH, position_ids=POSITIONS)
    reference = ranks(1).run(half_in_one, KEY, batch, dtype, autocast)[0]
    for step, calls in ranks(2).run(half, KEY, batch, dtype, autocast):
        assert calls[-4:] == VARLEN and abs(step.loss - reference.loss) < 1e-2
        for name, theirs in reference.gradients.items():
            assert residual(step.gradients[name].float(), theirs.float()) < 0.1, name


def refused(change):
    from ..kernels import flash_attn_2_cuda as extension

    def tensors(tokens=8, heads=4, kv_heads=2, size=16, dtype=torch.bfloat16):
        return [torch.zeros(tokens, n, size, dtype=dtype) for n in (heads, kv_heads, kv_heads)]

    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v = tensors(**change.get("sizes", {}))
    q = change.get("query", lambda q: q)(q)
    arguments = [None, *[change.get("ends", ends)] * 2, None, None, None, None, *[change.get("longest", 5)] * 2]
    try:
        extension.varlen_fwd(q, k, v, *arguments, 0.0, 0.25, False, True, -1, -1, 0.0, False, None)
    except AssertionError as error:
        return str(error) or "an assertion"
    return None


@pytest.mark.parametrize("change", [
    dict(sizes=dict(dtype=torch.float32)), dict(sizes=dict(size=12)), dict(sizes=dict(heads=3)), dict(longest=4),
    dict(longest=torch.tensor(5)), dict(ends=torch.tensor([0, 3, 8])), dict(ends=torch.tensor([0, 3, 7], dtype=torch.int32)),
    dict(query=lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)),
    dict(query=lambda q: torch.zeros(8 * 4 * 16 + 1, dtype=q.dtype)[1:].view(8, 4, 16)),
], ids=str)  # fmt: skip
def test_the_extension_refuses_what_kernels_refuse(change):
    assert refused(change) and refused({}) is None
