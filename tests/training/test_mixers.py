"""Models that mix positions by themselves in the Trainer: hybrids, which exchange around their scans and convolutions, and
attention that calls no interface, which runs on the whole row; in engines that gather parameters."""

import pytest

from ..tiny_models import tiny_config, tiny_model
from .trajectory import ENGINES, train


def trained(model_type, **settings):
    found = []
    model = tiny_model(tiny_config(model_type))

    def after(trainer):
        from hf_ulysses.core.attachment import attachment_of

        attachment = attachment_of(trainer.model)
        found.extend([] if attachment is None else [attachment.scans, attachment.gathered])

    result = train(model=model, steps=4, after=after, **settings)
    return {"loss": result["loss"], "grad_norm": result["grad_norm"], "found": found}


LAYERS = {"gpt_neo": "GPTNeoBlock", "deepseek_v32": "DeepseekV32DecoderLayer", "inkling_text": "InklingDecoderLayer"}
EXCHANGE = ["olmo_hybrid", "lfm2"]
MODELS = [*EXCHANGE, "bloom", *LAYERS]
RUNS = [(model, engine) for model in MODELS for engine in ("ddp", "zero2", "zero3")]


@pytest.mark.half("model_type", "engine", "checkpointing")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("model_type, engine", [*RUNS, *((model, "fsdp2") for model in LAYERS)])
def test_trainer(ranks, single, model_type, engine, checkpointing):
    if (model_type, engine, checkpointing) == ("deepseek_v32", "ddp", True):
        pytest.skip("An indexer's parameters have no gradient, which DDP wants to be told; the Trainer does not then.")
    settings = dict(engine=engine, sp=2, gradient_checkpointing=checkpointing)
    if engine == "fsdp2":
        config = ENGINES["fsdp2"]["fsdp_config"]
        settings["fsdp_config"] = {**config, "transformer_layer_cls_to_wrap": [LAYERS[model_type]]}
    reference = single(trained, model_type)
    for result in ranks(2).run(trained, model_type, **settings):
        scans, gathered = result["found"]
        assert scans and not gathered if model_type in EXCHANGE else gathered
        assert result["loss"] == pytest.approx(reference["loss"], rel=2e-4)
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-3)
