"""Flash attention cannot run here: a fake that takes its arguments at their word stands in for it and records them.

The fake is registered under `flash_attention_2`. It derives what may be seen from exactly what flash attention reads:
document boundaries, else positions that restart (batch size one), a 2-D mask, the window, sinks, softcap. So an exact
loss also proves the arguments; eager attention in one process is the reference.
"""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ulysses
from hf_ulysses.core.heads import share_heads

from ..models import batch_of, build, packed_positions, padded
from .steps import FLOAT32, TOLERANCE, assert_same, sharded, whole_step

KEY = "flash_attention_2"
NUM_HEADS, NUM_KV_HEADS, LAYERS = 4, 2, 2
LENGTH, SIZE = 33, 4
PADDED = 36


class FakeFlash:
    """Keeps the arguments of every call."""

    def __init__(self):
        self.calls = []

    def __call__(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=None,
        sliding_window=None,
        softcap=None,
        **kwargs,
    ):
        self.calls.append(
            dict(kwargs, shape=query.shape, kv=key.shape, mask=attention_mask, window=sliding_window, softcap=softcap)
        )
        groups = module.num_key_value_groups
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        visible = self._visible(query.shape[2], attention_mask, sliding_window, **kwargs)
        scores = scores.masked_fill(~visible, -1e9)
        if kwargs.get("s_aux") is not None:
            scores = torch.cat([scores, kwargs["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
        return (weights @ value).transpose(1, 2), None

    def _visible(self, S, mask_BS, window, cu_seq_lens_q=None, cu_seq_lens_k=None, position_ids=None, **kwargs):
        index = torch.arange(S)
        visible = (index[:, None] >= index)[None]
        if window is not None:
            visible = visible & (index[:, None] - index < window)
        if mask_BS is not None:
            visible = visible & mask_BS[:, None].bool()
        elif cu_seq_lens_q is not None:
            assert torch.equal(cu_seq_lens_q, cu_seq_lens_k) and cu_seq_lens_q[-1] == S
            document = torch.bucketize(index, cu_seq_lens_q[1:].long(), right=True)
            visible = visible & (document[:, None] == document)
        elif position_ids is not None and len(position_ids) == 1:
            document = (position_ids[0] == 0).cumsum(0)
            visible = visible & (document[:, None] == document)
        return visible[:, None]


def flash_step(batch, model):
    fake = FakeFlash()
    ALL_ATTENTION_FUNCTIONS[KEY] = fake
    try:
        model = build(attn=KEY, **model)
        with hf_ulysses.attach(model) as sp:
            sp.shard(batch)  # Checks that come with the first batch are not what is recorded here.
            fake.calls.clear()
            return sharded(model, batch, sp), fake.calls
    finally:
        del ALL_ATTENTION_FUNCTIONS[KEY]


def compare(ranks, batch, tolerance=TOLERANCE, **model):
    """The step with the fake on four ranks against eager attention in one process; returns what the fake was given."""
    batch_size = len(batch["input_ids"])
    reference_batch = {key: value for key, value in batch.items() if not key.startswith(("cu_seq", "max_length"))}
    reference = ranks(1).run(whole_step, reference_batch, attn="eager", **model)[0]
    results = ranks(SIZE).run(flash_step, batch, model)
    shares = share_heads(NUM_HEADS, NUM_KV_HEADS, SIZE)
    for share, (step, calls) in zip(shares, results):
        assert_same(step, reference, tolerance=tolerance, exchanges=LAYERS)
        assert len(calls) == LAYERS
        for call in calls:
            assert call["shape"][:3] == (batch_size, share.num_query, PADDED)
            assert call["kv"][:3] == (batch_size, share.num_kv, PADDED)
    return [calls for _, calls in results]


def test_a_plain_row_has_neither_mask_nor_boundaries(ranks):
    for calls in compare(ranks, batch_of(2, LENGTH)):
        assert all(call["mask"] is None and call.get("cu_seq_lens_q") is None for call in calls)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mask_is_the_full_rows(ranks, side):
    batch = padded(batch_of(2, LENGTH), real=[20, LENGTH], side=side)
    # Kernels and eager attention make different things of a query without keys: the last token of padding on the left.
    batch["labels"][0, LENGTH - 20] = -100
    full = torch.nn.functional.pad(batch["attention_mask"], (0, PADDED - LENGTH)).tolist()
    # In float64 eager attention makes NaN of such a query.
    for calls in compare(ranks, batch, dtype=torch.float32, tolerance=FLOAT32):
        assert all(call["mask"].tolist() == full for call in calls)


POSITIONS = packed_positions(11, 2, 20)
BOUNDARIES = [0, 11, 13, LENGTH, PADDED]


@pytest.mark.parametrize("given", [False, True], ids=["by positions", "by boundaries"])
def test_documents_are_the_full_rows(ranks, given):
    """Kernels get the boundaries of the full row, our padding being one more document, given by the user or not."""
    batch = batch_of(1, LENGTH, position_ids=POSITIONS)
    if given:
        ends = torch.tensor(BOUNDARIES[:-1], dtype=torch.int32)
        batch.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=20, max_length_k=20)
    for calls in compare(ranks, batch):
        for call in calls:
            assert call["mask"] is None
            assert call["cu_seq_lens_q"].tolist() == call["cu_seq_lens_k"].tolist() == BOUNDARIES
            assert call["cu_seq_lens_q"].dtype == torch.int32
            assert call["max_length_q"] == call["max_length_k"] == 20
            if "position_ids" in call:
                assert (
                    torch.equal(call["position_ids"][:, :LENGTH], POSITIONS) and call["position_ids"].shape[1] == PADDED
                )


def test_the_window_and_the_softcap_arrive(ranks):
    for calls in compare(ranks, batch_of(1, LENGTH), family="gemma2"):
        assert [call["window"] for call in calls] == [8, None]
        assert [call["softcap"] for call in calls] == [2.0, 2.0]


def test_a_window_over_documents(ranks):
    for calls in compare(ranks, batch_of(1, LENGTH, position_ids=POSITIONS), family="mistral"):
        assert all(call["window"] == 8 and call["cu_seq_lens_q"].tolist() == BOUNDARIES for call in calls)


def test_sinks_are_this_ranks(ranks):
    """The value is cut to the heads; the gradient of all sinks is compared in `assert_same`."""
    for share, calls in zip(
        share_heads(NUM_HEADS, NUM_KV_HEADS, SIZE), compare(ranks, batch_of(1, LENGTH), family="gpt_oss")
    ):
        assert all(call["s_aux"].shape == (share.num_query,) for call in calls)
