"""A planned peak beside the peak of a real step, by live storage, on every kind of step."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ulysses.core.attachment import attach
from hf_ulysses.memory import Settings, switch_on
from hf_ulysses.planner.live import LiveStorage
from hf_ulysses.planner.step import Step, build, measure, run

SIZES = dict(hidden_size=128, intermediate_size=384, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
CONFIG = dict(**SIZES, vocab_size=2048, num_hidden_layers=6, max_position_embeddings=4096)
LENGTH = 2048
STEPS = {
    "plain": dict(checkpointing=False),
    "checkpointed": dict(),
    "tiled loss": dict(memory=Settings(tiled_loss=8)),
    "tiled": dict(memory=Settings(tiled_loss=8, tiled_mlp=4, tiled_norms=4)),
    "head chunks": dict(memory=Settings(tiled_loss=8, tiled_mlp=4, head_chunks=2)),
    "two rows": dict(batch=2),
    "TRL's head": dict(trainer="sft"),
}


def causal(module, query, key, value, attention_mask, **kwargs):
    """No key that a mask builder knows: torch's own kernel without a mask, in the plan as in the real run."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None


def plan(step, whole=False):
    ALL_ATTENTION_FUNCTIONS["causal"] = causal
    return measure(*build(LlamaConfig(**CONFIG), step), step, whole)


def real_peak(step):
    ALL_ATTENTION_FUNCTIONS["causal"] = causal
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="causal")).train()
    if step.trainer == "sft":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if step.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    switch_on(model, step.memory, attach(model, trial=False) if step.sp_size > 1 else None)
    tokens = torch.randint(CONFIG["vocab_size"], (step.batch, step.length))
    # The first step tries out what it tiles.
    run(model, tokens, step)
    with LiveStorage() as storage:
        storage.ignore([*model.parameters(), *model.buffers(), tokens])
        run(model, tokens, step)
    return storage.peak


@pytest.mark.parametrize("sp_size", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_planned_peak_is_the_real_one(ranks, single, name, sp_size):
    step = Step(LENGTH, sp_size, dtype="float32", attention="causal", **STEPS[name])
    planned = single(plan, step).peak
    assert planned == pytest.approx(ranks(sp_size).run(real_peak, step)[0], rel=0.03)


@pytest.mark.parametrize("name", ["plain", "checkpointed", "tiled", "head chunks"])
def test_what_is_alike_need_not_be_run(single, name):
    step = Step(LENGTH, 2, attention="causal", **STEPS[name])
    few, whole = single(plan, step), single(plan, step, True)
    for quantity in ("peak", "sent", "flops", "logits"):
        assert getattr(few, quantity) == pytest.approx(getattr(whole, quantity), rel=0.01)


def test_a_planner_that_forgets_checkpoints_is_seen(single):
    """The comparison above can fail: the peak of another step is not within its tolerance."""
    kept, dropped = (single(plan, Step(LENGTH, 2, dtype="float32", attention="causal", checkpointing=c)).peak for c in (False, True))
    assert kept > 1.03 * dropped
