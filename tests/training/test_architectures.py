"""Models with modules that run on the whole row, and checkpointed ones, through the Trainer: the start-up check lets them
pass, and what they train is what one process trains."""

import pytest

from .trajectory import train


def trained(model_type, **settings):
    from transformers import AutoModelForCausalLM

    from ..tiny_models import tiny_config, tiny_model

    config = tiny_config(model_type)
    assert type(config) in AutoModelForCausalLM._model_mapping
    return train(steps=2, model=tiny_model(config), **settings)


# No attention interface; gated delta net; state space layers between attention; one attention module in many layers.
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
@pytest.mark.parametrize("model_type", ["bloom", "qwen3_next", "nemotron_h", "zamba2"])
def test_modules_on_the_whole_row(ranks, model_type, engine):
    assert_same(ranks, model_type, engine)


# Case 7: the experts' balance is part of the loss. The Trainer multiplies it by the number of processes, or not; TRL does
# not, and takes the function that computes it from one modelling file for all models.
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulation": 2}, {"average_tokens_across_devices": False}, {"kind": "sft", "bf16": False}],
    ids=["averaged", "accumulated", "not averaged", "sft"],
)
def test_experts(ranks, model_type, settings):
    assert_same(ranks, model_type, "ddp", **settings)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_checkpointed(ranks, model_type):
    assert_same(ranks, model_type, "ddp", gradient_checkpointing=True)


def assert_same(ranks, model_type, engine, **arguments):
    expected = ranks(1).run(trained, model_type, engine="plain", **arguments)[0]
    for result in ranks(2).run(trained, model_type, engine=engine, sp=2, **arguments):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
