"""Mixtures of experts through the trainers: the load-balancing loss of the whole row, and the routers' gradients."""

import pytest
import torch

from .test_trajectories import assert_same
from .trajectory import VOCAB, train


def mixture(**settings):
    """Train a tiny Mixtral whose auxiliary loss weighs as much as its cross entropy."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=VOCAB, output_router_logits=True, router_aux_loss_coef=1.0, initializer_range=0.1,
        sliding_window=None, attn_implementation="sdpa",
    )  # fmt: skip
    return train(model=MixtralForCausalLM(config), **settings)


@pytest.mark.parametrize("kind", ["trainer", "sft"])
@pytest.mark.parametrize("engine,dp,accumulation", [("zero3", 1, 2), ("fsdp2", 1, 1), ("ddp", 2, 2), ("zero2", 2, 1)])
def test_auxiliary_loss(ranks, engine, dp, accumulation, kind):
    settings = dict(kind=kind, accumulation=accumulation, steps=4, **({"bf16": False} if kind == "sft" else {}))
    if engine == "fsdp2":
        from .trajectory import ENGINES

        settings["fsdp_config"] = {**ENGINES["fsdp2"]["fsdp_config"], "transformer_layer_cls_to_wrap": ["MixtralDecoderLayer"]}
    # The auxiliary loss is a mean per batch, so it depends on the number of data-parallel ranks: compared at the same one.
    reference = {k: v for k, v in settings.items() if k != "fsdp_config"}
    expected = ranks(dp).run(mixture, engine="plain" if dp == 1 else "ddp", dp=dp, **reference)[0]
    results = ranks(2 * dp).run(mixture, engine=engine, sp=2, dp=dp, **settings)
    assert_same(results, expected)
    if kind == "sft":
        for entry, wanted in zip(results[0]["log"], expected["log"]):
            assert entry["aux_loss"] == pytest.approx(wanted["aux_loss"], rel=1e-5)
