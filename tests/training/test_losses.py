"""Losses of every kind, in the model or outside of it, give what one process gives."""

import math

import pytest
import torch

from .test_trajectories import assert_same
from .trajectory import rows, train


def per_token(outputs, labels, num_items_in_batch=None):
    """A `compute_loss_func` as the documentation writes them: shifts by itself, a sum over the count."""
    logits = outputs["logits"][:, :-1].flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.05)
    return loss / num_items_in_batch


def mean_of_its_own(outputs, labels, num_items_in_batch=None):
    """The same without a look at the count: a mean over this batch's targets."""
    logits = outputs["logits"][:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def with_func(function, **settings):
    def give(trainer):
        trainer.compute_loss_func = function

    return train(before=give, **settings)


def overriding(kind, **settings):
    """Train with a Trainer whose `compute_loss` is overridden in the documented way."""
    from unittest import mock

    import transformers

    class Overriding(transformers.Trainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, return_outputs=False):
            if kind == "super":
                loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                return 2 * loss
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")[:, :-1].flatten(0, 1).float()
            if kind == "mean":
                loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
            else:
                loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
                loss = (-loss if kind == "negative" else loss) / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    with mock.patch.object(transformers, "Trainer", Overriding):
        return train(**settings)


# (runner, its first argument, settings)
CASES = {
    "label smoothing": (train, None, dict(label_smoothing_factor=0.1)),
    "label smoothing, sft nll": (train, None, dict(kind="sft", bf16=False, loss_type="nll", label_smoothing_factor=0.1)),
    "compute_loss_func": (with_func, per_token, {}),
    "compute_loss_func, mean": (with_func, mean_of_its_own, {}),
    "override, super": (overriding, "super", {}),
    "override, sum": (overriding, "sum", {}),
    "override, negative": (overriding, "negative", {}),
    "override, mean": (overriding, "mean", {}),
    "sft nll": (train, None, dict(kind="sft", bf16=False, loss_type="nll")),
    "sft dft": (train, None, dict(kind="sft", bf16=False, loss_type="dft")),
    "sft chunked_nll": (train, None, dict(kind="sft", bf16=False, loss_type="chunked_nll")),
}


def run(ranks, case, size, **more):
    runner, first, settings = CASES[case]
    args = () if first is None else (first,)
    return ranks(size).run(runner, *args, steps=4, **settings, **more)


LAYOUTS = [("zero3", 1, 2), ("ddp", 2, 1), ("fsdp2", 2, 2)]
# Refused: test_label_smoothing_under_fsdp2.
REFUSED = ("label smoothing", "fsdp2")


@pytest.mark.half("layout", "case")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_loss(ranks, case, layout):
    engine, dp, accumulation = layout
    if (case, engine) == REFUSED:
        pytest.skip("test_label_smoothing_under_fsdp2")
    # Losses that take the number of processes into account are compared at the same data-parallel size.
    expected = run(ranks, case, dp, engine="plain" if dp == 1 else "ddp", dp=dp, accumulation=accumulation)[0]
    results = run(ranks, case, 2 * dp, engine=engine, sp=2, dp=dp, accumulation=accumulation)
    assert_same(results, expected)


@pytest.mark.parametrize("case", ["label smoothing", "compute_loss_func", "override, super", "override, sum", "override, mean"])
def test_loss_without_averaging_over_devices(ranks, case):
    settings = dict(average_tokens_across_devices=False, accumulation=2)
    expected = run(ranks, case, 2, engine="ddp", dp=2, **settings)[0]
    assert_same(run(ranks, case, 4, engine="ddp", sp=2, dp=2, **settings), expected)


@pytest.mark.half("engine", "case")
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
@pytest.mark.parametrize("case", ["label smoothing, sft nll", "override, mean", "compute_loss_func", "sft dft"])
def test_evaluation_loss(ranks, case, engine):
    settings = dict(eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1)
    settings["eval_on_start"] = True
    expected = run(ranks, case, 1, **settings)[0]
    for result in run(ranks, case, 2, engine=engine, sp=2, **settings):
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)


def test_label_smoothing_under_fsdp2(ranks):
    """The Trainer itself does not shift the labels there, because FSDP2 renames the class; so it is refused."""
    from ..ranks import RankFailed

    one = run(ranks, "label smoothing", 1, batch=2)[0]
    upstream = run(ranks, "label smoothing", 2, engine="fsdp2", dp=2)[0]
    assert upstream["loss"][0] != pytest.approx(one["loss"][0], rel=1e-2)
    with pytest.raises(RankFailed, match="label_smoothing_factor under FSDP2"):
        run(ranks, "label smoothing", 2, engine="fsdp2", sp=2)


def noise_scale(sp=1):
    """The largest absolute noise that NEFTune adds to a row of zeros' embeddings."""
    seen = []

    def watch(trainer):
        def hook(module, args, output):
            if module.training:
                seen.append((module.neftune_noise_alpha, output.shape[1]))

        trainer.model.get_input_embeddings().register_forward_hook(hook)

    train(engine="plain" if sp == 1 else "ddp", sp=sp, steps=2, before=watch, neftune_noise_alpha=5.0)
    return [alpha / length**0.5 for alpha, length in seen]


def test_neftune_scales_its_noise_with_the_row(ranks):
    expected = ranks(1).run(noise_scale)[0]
    for result in ranks(2).run(noise_scale, sp=2):
        assert result == pytest.approx(expected)


def tokens_seen(**settings):
    """Input tokens that were seen; rows and tokens that the rates stand for."""

    def numbers(trainer):
        last = trainer.state.log_history[-1]
        rates = [entry for entry in trainer.state.log_history if "train_tokens_per_second" in entry]
        tokens = rates[-1]["train_tokens_per_second"] * rates[-1]["train_runtime"]
        return trainer.state.num_input_tokens_seen, last["train_samples_per_second"] * last["train_runtime"], tokens

    return train(include_num_input_tokens_seen="all", after=numbers, **settings)


def test_num_input_tokens_seen_and_rates(ranks):
    expected = ranks(1).run(tokens_seen, batch=2, steps=3)[0]["after"]
    assert expected == pytest.approx((3 * 2 * 66, 3 * 2, 3 * 2 * 66), rel=1e-2)
    for result in ranks(4).run(tokens_seen, engine="ddp", sp=2, dp=2, steps=3):
        assert result["after"] == pytest.approx(expected, rel=1e-2) and result["after"][0] == expected[0]


def batch_without_targets(**settings):
    data = [dict(row, labels=torch.full_like(row["labels"], -100)) for row in rows(2)]
    return train(data=data, steps=2, **settings)


@pytest.mark.parametrize("engine", ["zero3", "ddp", "fsdp2"])
def test_a_step_without_any_target(ranks, engine):
    """Case 35: 0 / 0, as in one process, and no gradient."""
    for result in ranks(2).run(batch_without_targets, engine=engine, sp=2):
        assert all(math.isnan(loss) for loss in result["loss"])
        assert torch.isfinite(result["parameters"]).all()


def evaluate_first(function, **settings):
    """The loss of an evaluation before any training, with a loss of one's own."""

    def evaluate(trainer):
        trainer.compute_loss_func = function
        evaluate.loss = trainer.evaluate()["eval_loss"]
        # Under DeepSpeed, evaluate() before train() leaves an engine that cannot train, with SP or without.
        trainer.train = lambda **kwargs: None
        trainer.accelerator.unwrap_model = lambda *args, **kwargs: trainer.model

    train(before=evaluate, steps=1, eval_data=rows(3, seed=9), per_device_eval_batch_size=1, **settings)
    return evaluate.loss


# DeepSpeed evaluates before training at ZeRO-3 only, FSDP2 not at all, with SP or without.
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
@pytest.mark.parametrize("function", [per_token, mean_of_its_own])
def test_evaluation_before_training(ranks, engine, function):
    expected = ranks(1).run(evaluate_first, function)[0]
    for loss in ranks(2).run(evaluate_first, function, engine=engine, sp=2):
        assert loss == pytest.approx(expected, rel=2e-5)
