"""Case 22: rotary embeddings that choose their frequencies from the largest position get the full row's."""

import pytest
import torch

import hf_ulysses

from ..models import batch_of, build, packed_positions, padded
from .steps import assert_same, sharded, whole

DYNAMIC = dict(
    max_position_embeddings=16,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
LONGROPE = dict(
    max_position_embeddings=64,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 16,
    },
)
# Each kind of layer remembers the longest row for itself.
BY_LAYER = dict(
    family="gemma3_text",
    max_position_embeddings=16,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
)
KINDS = {"dynamic": DYNAMIC, "longrope": LONGROPE, "dynamic by layer": BY_LAYER}
# A tail of padding must not make a row of 16 tokens a long one; 33 tokens are long, but a quarter of them is not.
BATCHES = {
    "short, long, short": [batch_of(1, 15), batch_of(1, 33), batch_of(1, 13)],
    "growing": [batch_of(2, 21), batch_of(2, 33), batch_of(2, 61)],
    "packed": [
        batch_of(1, 33, position_ids=packed_positions(13, 20)),
        batch_of(1, 33, position_ids=packed_positions(18, 15)),
    ],
    "padded": [padded(batch_of(2, 33), real=[9, 33], side="right")],
}


def steps(kind, batches, attached, before=0):
    """One step after the other on the same model: the embedding remembers the longest row it has seen."""
    model = build(**kind)
    if before:
        model(**batch_of(1, before))
    if not attached:
        return [whole(model, batch) for batch in batches]
    with hf_ulysses.attach(model) as sp:
        return [sharded(model, batch, sp) for batch in batches]


@pytest.mark.half("size", "kind", "batches")
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_frequencies_of_the_full_row(ranks, kind, batches, size):
    same_steps(ranks, size, KINDS[kind], BATCHES[batches])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_has_seen_a_row_before_it_is_attached(ranks, kind):
    """The trial rows of `shard` are longer than this one, which the model must remember all the same."""
    same_steps(ranks, 2, KINDS[kind], BATCHES["growing"], before=18)


def same_steps(ranks, size, *args, **kwargs):
    reference = ranks(1).run(steps, *args, False, **kwargs)[0]
    for result in ranks(size).run(steps, *args, True, **kwargs):
        for ours, theirs in zip(result, reference, strict=True):
            assert_same(ours, theirs)


def frequencies(kind):
    """The rotary table's frequencies before and after a long row: the tests above are about something."""
    model = build(**kind)
    before = model.model.rotary_emb.inv_freq.clone()
    model(**batch_of(1, 33))
    return torch.equal(before, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_row_changes_them(single, kind):
    assert single(frequencies, KINDS[kind]) is False
