"""Gradient checkpointing of models whose layers hand no keyword arguments on to what needs the row: both kinds."""

import pytest
import torch

import hf_ulysses

from ..distributed.steps import assert_same, sharded, whole
from ..models import batch_of, checkpoint
from ..ranks import RankFailed
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


def checkpointed_by_its_own_code(model_type, attached, drops):
    """As in code that comes with weights: layers are called through torch's function; `drops`: without the row."""
    model = tiny_model(tiny_config(model_type))
    batch = batch_of(2, 45)
    batch["labels"] = batch["input_ids"] = batch["input_ids"] % 96

    def call(layer, *args, **kwargs):
        again = []

        def run(*args):
            given = {} if drops and again else kwargs
            again.append(True)
            return torch.nn.Module.__call__(layer, *args, **given)

        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)

    for layer in model.model.layers:
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"__call__": call})
    if not attached:
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        assert sp.scans
    return step


def test_layers_that_are_checkpointed_by_their_own_code(ranks):
    reference = ranks(1).run(checkpointed_by_its_own_code, "lfm2", False, False)[0]
    assert_same(ranks(2).run(checkpointed_by_its_own_code, "lfm2", True, False), reference, tolerance=5e-5)


def test_a_layer_that_runs_again_without_its_row_is_refused(ranks):
    with pytest.raises(RankFailed, match="runs outside of its decoder's forward, where the row's facts are lost"):
        ranks(2).run(checkpointed_by_its_own_code, "lfm2", True, True)
