"""What stands outside of the model sees whole rows: methods overridden for one process give what one process gives.

Each is a fault that strangers found while the batch was cut before the model (cases 26 to 33, 41), and is compared with one
process: SGD, uneven targets, rows of an odd length.
"""

import pytest
import torch

from .trajectory import ENGINES, rows, tiny_llama, train

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


def distilled(trainer, model, inputs, num_items_in_batch=None):
    """From a teacher that is not attached; where the student's label is its own."""
    if not hasattr(distilled, "teacher"):
        torch.manual_seed(5)
        distilled.teacher = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        wanted = distilled.teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
    logits = model(input_ids=inputs["input_ids"]).logits
    return torch.nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean") / LENGTH


def r_drop(trainer, model, inputs, num_items_in_batch=None):
    """Two forwards of one step, and how far their results are apart; the second sees other tokens, for want of dropout."""
    first = model(**inputs)
    second = model(input_ids=inputs["input_ids"].roll(1, 0), labels=inputs["labels"])
    apart = torch.nn.functional.kl_div(first.logits.log_softmax(-1), second.logits.softmax(-1), reduction="batchmean") / LENGTH
    return (first.loss + second.loss) / 2 + apart


LOSSES = [mean_of_rows, class_weights, later_term, sum_over_count, explicit_call, weighted]
# One engine each: they are as the others to it.
MORE = [(distilled, "zero3"), (r_drop, "fsdp2")]


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
            # ZeRO-3 without sequence parallelism, too, reduces other gradients after an autograd.grad.
            (gradient,) = torch.autograd.grad(clean, embeddings) if function is None else (embeddings.detach().cos(),)
            worse = embeddings.detach() + 0.1 * gradient / gradient.norm()
            loss = model(inputs_embeds=worse, labels=inputs["labels"]).loss
            self.accelerator.backward(loss)
            return loss.detach()

    original, transformers.Trainer = transformers.Trainer, Overridden if callable(function) else Adversarial
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


@pytest.mark.parametrize(
    "function,engine", [*((function, engine) for function in LOSSES for engine in ("ddp", "zero3", "fsdp2")), *MORE]
)
def test_a_loss_of_ones_own(ranks, function, engine):
    assert_same(ranks, function, engine)


@pytest.mark.parametrize("engine,direction", [("ddp", None), ("fsdp2", None), ("zero3", "another")])
def test_a_step_of_ones_own(ranks, engine, direction):
    """Gradients with respect to embeddings that come from outside are one process's."""
    assert_same(ranks, direction, engine)


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


def evaluated(step, **settings):
    """Evaluation written for one process: `prediction_step`, or `evaluate` itself, without `super()`; accuracies of tokens."""
    import transformers

    class Predicting(transformers.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                outputs = model(**inputs)
            labels = inputs["labels"]
            right = (outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]) & (labels[:, 1:] != -100)
            return outputs.loss, right.sum(1), (labels[:, 1:] != -100).sum(1)

    class Evaluating(transformers.Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            self.model.eval()
            losses, right = [], 0
            for row in self.eval_dataset:
                with torch.no_grad():
                    logits = self.model(input_ids=row["input_ids"][None]).logits[0]
                losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], row["labels"][1:])))
                right += int((logits[:-1].argmax(-1) == row["input_ids"][1:]).sum())
            metrics = {"eval_loss": sum(losses) / len(losses), "eval_accuracy": right / (len(losses) * (LENGTH - 1))}
            self.log(metrics)
            return metrics

    def accuracy(prediction):
        return {"accuracy": float(prediction.predictions.sum() / prediction.label_ids.sum()), "rows": len(prediction.label_ids)}

    def set_metrics(trainer):
        trainer.compute_metrics = accuracy

    def found(trainer):
        kept = ("eval_loss", "eval_accuracy", "eval_rows")
        return [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history if "eval_accuracy" in entry]

    original, transformers.Trainer = transformers.Trainer, {"prediction_step": Predicting, "evaluate": Evaluating}[step]
    try:
        more = dict(eval_data=rows(5, LENGTH, seed=9), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1)
        return train(batch=2, steps=4, data=rows(8, LENGTH), before=set_metrics, after=found, **more, **settings)
    finally:
        transformers.Trainer = original


@pytest.mark.parametrize("step,engine", [("prediction_step", "zero3"), ("evaluate", "ddp"), ("evaluate", "fsdp2")])
def test_an_evaluation_of_ones_own(ranks, step, engine):
    expected = ranks(1).run(evaluated, step)[0]["after"]
    assert len(expected) > 1 and expected[0]["eval_loss"] != expected[-1]["eval_loss"]
    for result in ranks(2).run(evaluated, step, engine=engine, sp=2):
        assert result["after"] == [pytest.approx(entry, rel=2e-5) for entry in expected]
