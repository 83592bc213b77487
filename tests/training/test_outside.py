"""What stands outside of the model sees whole rows: methods overridden for one process give what one process gives.

Each is a fault that strangers found while the batch was cut before the model (cases 26 to 33, 41), and is compared with one
process: SGD, uneven targets, rows of an odd length.
"""

import pytest
import torch

from .trajectory import ENGINES, rows, train

LENGTH = 33


def mean_of_rows(trainer, model, inputs, num_items_in_batch=None):
    """Case 26: each row's own token mean."""
    labels = inputs["labels"]
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    valid = labels[:, 1:] != -100
    return ((losses * valid).sum(1) / valid.sum(1)).mean()


def class_weights(trainer, model, inputs, num_items_in_batch=None):
    """Case 27: a weight for a token that few rows contain."""
    logits = model(input_ids=inputs["input_ids"]).logits
    weight = torch.arange(1.0, logits.shape[-1] + 1)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), weight=weight)


def later_term(trainer, model, inputs, num_items_in_batch=None):
    """Case 28: from the second step on a mean over all positions of a row of odd length, and the last token's state."""
    outputs = model(**inputs, output_hidden_states=True)
    if trainer.state.global_step < 1:
        return outputs.loss
    return outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean() + outputs.hidden_states[-1][:, -1].square().mean()


def sum_over_count(trainer, model, inputs, num_items_in_batch=None):
    """Case 41."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), reduction="sum") / num_items_in_batch


def explicit_call(trainer, model, inputs, num_items_in_batch=None):
    """Case 32."""
    return model(input_ids=inputs["input_ids"], labels=inputs["labels"], num_items_in_batch=num_items_in_batch).loss


def weighted(trainer, model, inputs, num_items_in_batch=None):
    """Cases 31 and 33: entries of any shape that the model does not take; (B, S) that is no token tensor."""
    weights, per_token = inputs.pop("row_weights"), inputs.pop("per_token")
    assert per_token.shape == inputs["input_ids"].shape and weights.shape == (len(per_token), 3)
    logits = model(input_ids=inputs["input_ids"]).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
    return (losses * per_token[:, 1:]).sum(1).mul(weights[:, 0]).mean() / 10


LOSSES = [mean_of_rows, class_weights, later_term, sum_over_count, explicit_call, weighted]


def with_loss(function, step=None, **settings):
    """Train with a Trainer whose `compute_loss`, or `training_step`, is overridden."""
    import transformers

    class Overridden(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return function(self, model, inputs, num_items_in_batch)

    class Adversarial(transformers.Trainer):
        """Case 29: a second forward on perturbed embeddings, its own backward, no `super()`."""

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            unwrapped = self.accelerator.unwrap_model(model)
            embeddings = unwrapped.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
            clean = model(inputs_embeds=embeddings, labels=inputs["labels"]).loss
            (gradient,) = torch.autograd.grad(clean, embeddings)
            worse = embeddings.detach() + 0.1 * gradient / gradient.norm()
            loss = model(inputs_embeds=worse, labels=inputs["labels"]).loss
            self.accelerator.backward(loss)
            return loss.detach()

    original, transformers.Trainer = transformers.Trainer, Adversarial if function is None else Overridden
    try:
        data = rows(8, LENGTH)
        if function is weighted:
            generator = torch.Generator().manual_seed(3)
            for row in data:
                row.update(row_weights=torch.rand(3, generator=generator), per_token=torch.rand(LENGTH, generator=generator))
        return train(batch=2, steps=4, data=data, **settings)
    finally:
        transformers.Trainer = original


_references = {}


def assert_same(ranks, function, engine):
    if function not in _references:
        _references[function] = ranks(1).run(with_loss, function)[0]
    expected = _references[function]
    for result in ranks(2).run(with_loss, function, engine=engine, sp=2):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5
        assert result["exchanges"]


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
@pytest.mark.parametrize("function", LOSSES, ids=lambda function: function.__name__)
def test_a_loss_of_ones_own(ranks, function, engine):
    assert_same(ranks, function, engine)


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_a_step_of_ones_own(ranks, engine):
    """Gradients with respect to embeddings that come from outside are one process's."""
    assert_same(ranks, None, engine)


def ignored_positions(**settings):
    """Case 34: BART takes no positions, and numbers the row itself; those of the batch restart."""
    import copy

    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(0)
    config = dict(d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4, vocab_size=128, dropout=0.0, attention_dropout=0.0)
    model = BartForCausalLM(BartConfig(**config, is_decoder=True, is_encoder_decoder=False, init_std=0.2, use_cache=False))
    data = [dict(row, position_ids=torch.arange(LENGTH) % 20) for row in rows(8, LENGTH)]
    if settings.get("engine") == "fsdp2":
        settings["fsdp_config"] = copy.deepcopy(ENGINES["fsdp2"]["fsdp_config"])
        settings["fsdp_config"]["transformer_layer_cls_to_wrap"] = ["BartDecoderLayer"]
    return train(model=model, batch=2, steps=4, data=data, **settings)


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_positions_that_the_model_ignores(ranks, engine):
    if "positions" not in _references:
        _references["positions"] = ranks(1).run(ignored_positions)[0]
    expected = _references["positions"]
    for result in ranks(2).run(ignored_positions, engine=engine, sp=2):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5
