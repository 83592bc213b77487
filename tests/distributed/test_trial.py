"""The trial: how many forwards it takes, what it explains by shards and what it does not, and that nobody waits for a rank
that has failed."""

import pytest
import torch
import torch.distributed as dist

import hf_ulysses
from hf_ulysses.mixing import locate

from ..models import batch_of, build, packed_positions, padded
from ..tiny_models import tiny_config, tiny_model
from .steps import assert_same, sharded, whole, whole_step


class RaisesOnOneRank(torch.nn.Module):
    """Does not know what to do with rank 1's shard, while rank 0 is on its way to the next layer's exchange."""

    def __init__(self, inner, length, error=RuntimeError):
        super().__init__()
        self.inner, self.length, self.error = inner, length, error

    def forward(self, hidden_states):
        if hidden_states.shape[1] < self.length and dist.get_rank() == 1:
            raise self.error("only here")
        return self.inner(hidden_states)


def parted(batch):
    model = build()
    model.model.layers[0].mlp = RaisesOnOneRank(model.model.layers[0].mlp, 20)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        step.gradients = {name.replace("mlp.inner", "mlp"): g for name, g in step.gradients.items()}
        return step, sp.gathered


def test_nobody_waits_for_a_rank_that_goes_another_way(ranks):
    reference = ranks(1).run(whole_step, batch_of(1, 33))[0]
    for step, gathered in ranks(2).run(parted, batch_of(1, 33), timeout=30):
        assert_same(step, reference)
        assert gathered == ["model.layers.0.mlp"]


class Maskless(torch.nn.Module):
    """An attention layer that sees padding and other documents on purpose, beside layers that do not."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.inner(hidden_states, attention_mask=None, **kwargs)


def maskless(batch, attached):
    model = build()
    model.model.layers[0].self_attn = Maskless(model.model.layers[0].self_attn)
    if not attached:
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        assert "model.layers.0.self_attn.inner" in sp.gathered
    return step


@pytest.mark.parametrize("batch", [padded(batch_of(2, 34), real=[20, 34], side="left"), batch_of(1, 41, position_ids=packed_positions(13, 9, 19))], ids=["padded", "packed"])
def test_a_layer_without_a_mask_among_others(ranks, batch):
    """Under sdpa documents have no masks, so that attention cannot tell; the padded row of the trial does."""
    reference = ranks(1).run(maskless, batch, False)[0]
    assert_same(ranks(2).run(maskless, batch, True), reference)


# -- errors that are nobody's doing -----------------------------------------------------------------------------------


def out_of_memory(whole):
    """On one rank only, on the whole row or on a shard."""
    model = build()
    model.model.layers[0].mlp = RaisesOnOneRank(model.model.layers[0].mlp, 10**9 if whole else 20, torch.OutOfMemoryError)
    with hf_ulysses.attach(model) as sp:
        with pytest.raises((torch.OutOfMemoryError, locate._PeerFailed), match="only here"):
            model(**batch_of(1, 33))
        return sp.gathered


@pytest.mark.parametrize("whole", [True, False])
def test_a_device_that_is_out_of_memory_is_said_on_all_ranks(ranks, whole):
    assert ranks(2).run(out_of_memory, whole, timeout=30) == [[], []]


def broken_kernel(message):
    """An attention function that raises with the heads of one rank, in words that a shape could cause, too."""
    from transformers import AttentionInterface

    def core(module, query, key, value, attention_mask, **kwargs):
        if query.shape[1] < 4:
            raise RuntimeError(message)
        return torch.nn.functional.scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True).transpose(1, 2), None

    AttentionInterface.register("broken", core)
    model = build(attn="broken")
    with hf_ulysses.attach(model) as sp:
        with pytest.raises(RuntimeError, match=message):
            model(**batch_of(1, 33))
        return sp.gathered


@pytest.mark.parametrize("message", ["shape mismatch", "no kernel image is available for execution on the device"])
def test_an_attention_function_that_raises_is_not_sent_another_way(ranks, message):
    assert ranks(2).run(broken_kernel, message, timeout=30) == [[], []]


# -- what it costs ----------------------------------------------------------------------------------------------------


def forwards(model_type):
    model = tiny_model(tiny_config(model_type))
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    with hf_ulysses.attach(model) as sp:
        sp.locate()
        return len(calls), sp.gathered


@pytest.mark.parametrize(
    "model_type, most",
    [("llama", 4), ("gemma2", 4), ("qwen3_moe", 4), ("gpt2", 4), ("qwen3_next", 8), ("nemotron_h", 8), ("bloom", 8), ("opt", 8), ("deepseek_v32", 8)],
)
def test_how_often_the_model_runs(ranks, model_type, most):
    for count, gathered in ranks(2).run(forwards, model_type):
        assert count <= most, (count, gathered)
