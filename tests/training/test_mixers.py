"""Hybrid models in the Trainer: what exchanges around its scans and convolutions, in engines that gather parameters."""

import pytest

from ..tiny_models import tiny_config, tiny_model
from .trajectory import train


def trained(model_type, **settings):
    found = []
    model = tiny_model(tiny_config(model_type))

    def after(trainer):
        from hf_ulysses.attachment import attachment_of

        attachment = attachment_of(trainer.model)
        found.extend([] if attachment is None else [attachment.split, attachment.gathered])

    result = train(model=model, steps=4, after=after, **settings)
    return {"loss": result["loss"], "grad_norm": result["grad_norm"], "found": found}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("model_type", ["olmo_hybrid", "lfm2"])
def test_trainer(ranks, single, model_type, engine, checkpointing):
    reference = single(trained, model_type)
    for result in ranks(2).run(trained, model_type, engine=engine, sp=2, gradient_checkpointing=checkpointing):
        split, gathered = result["found"]
        assert split and not gathered
        assert result["loss"] == pytest.approx(reference["loss"], rel=2e-4)
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-3)
