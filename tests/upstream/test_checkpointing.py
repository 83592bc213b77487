"""Gradient checkpointing of models whose layers hand no keyword arguments on to what needs the row: both kinds."""

import pytest

import hf_ulysses

from ..distributed.steps import assert_same, sharded, whole
from ..models import batch_of, checkpoint
from ..tiny_models import tiny_config, tiny_model


def checkpointed(model_type, attached, reentrant):
    model = tiny_model(tiny_config(model_type))
    batch = batch_of(2, 45)
    batch["labels"] = batch["input_ids"] = batch["input_ids"] % 96
    # The reference does the same: with True, router logits have no gradient.
    checkpoint(model, reentrant=reentrant)
    if not attached:
        return whole(model, batch)
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        # Falcon calls the attention interface since transformers 5.25, so that none of it needs either.
        assert sp.gathered or sp.scans or model_type == "falcon"
    assert all(vars(m).get("_gradient_checkpointing_func") is f for m, f in zip(model.modules(), functions))
    return step


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("model_type", ["gpt_neo", "falcon", "deepseek_v32", "jamba", "nemotron_h"])
def test_recomputation_has_its_row(ranks, model_type, reentrant):
    reference = ranks(1).run(checkpointed, model_type, False, reentrant)[0]
    assert_same(ranks(2).run(checkpointed, model_type, True, reentrant), reference, tolerance=5e-5)
