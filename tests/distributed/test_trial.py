"""Ranks that go different ways in the trial run: found out within seconds, nobody waits for a rank that has given up."""

import pytest
import torch
import torch.distributed as dist

import hf_ulysses

from ..models import batch_of, build
from .steps import assert_same, sharded, whole_step


class RaisesOnOneRank(torch.nn.Module):
    """Does not know what to do with rank 1's shard, while rank 0 is on its way to the next layer's exchange."""

    def __init__(self, inner, length):
        super().__init__()
        self.inner, self.length = inner, length

    def forward(self, hidden_states):
        if hidden_states.shape[1] < self.length and dist.get_rank() == 1:
            raise RuntimeError("only here")
        return self.inner(hidden_states)


def parted(kind, batch):
    model = build()
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp, 20)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        step.gradients = {name.replace("mlp.inner", "mlp"): g for name, g in step.gradients.items()}
        return step, sp.gathered


@pytest.mark.parametrize("kind", [RaisesOnOneRank])
def test_nobody_waits_for_a_rank_that_goes_another_way(ranks, kind):
    reference = ranks(1).run(whole_step, batch_of(1, 33))[0]
    for step, gathered in ranks(2).run(parted, kind, batch_of(1, 33), timeout=30):
        assert_same(step, reference)
        assert gathered == ["model.layers.0.mlp"]
