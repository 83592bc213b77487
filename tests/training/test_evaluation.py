"""Evaluation and prediction go through shards and give what they give without sequence parallelism.

Plain data parallelism with the same number of data-parallel ranks is the reference: the Trainer's own evaluation averages
over global batches, so its value depends on that number, with or without sequence parallelism.
"""

import copy
import tempfile

import pytest
import torch

from .trajectory import ENGINES, _dataset, _parallelism, _tokenizer, rows, tiny_llama, train


def evaluate(engine="plain", sp=1, dp=1, count=3, eval_batch=2, kind="trainer", lengths=(66, 40, 51), **arguments):
    """Evaluate and predict without training; `{"metrics", "predictions", "labels", "seen", "local_lengths"}`."""
    from transformers import Trainer, TrainingArguments

    import hf_ulysses

    if sp > 1:
        hf_ulysses.enable()
    data = [rows(1, lengths[i % len(lengths)], seed=i)[0] for i in range(count)]
    model = tiny_llama()
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=eval_batch,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        parallelism_config=_parallelism(engine, sp, dp),
        **copy.deepcopy(ENGINES[engine]),
    )
    settings.update(arguments)
    seen, local_lengths = [], []

    def compute_metrics(prediction):
        seen.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {"first": float(prediction.predictions[..., 0].mean())}

    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**settings, bf16=False, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(
            model, config, train_dataset=_dataset(data), eval_dataset=_dataset(data), processing_class=_tokenizer()
        )
        model.register_forward_pre_hook(
            lambda m, a, k: local_lengths.append(k["input_ids"].shape[1]), with_kwargs=True
        )
        return {"metrics": trainer.evaluate(), "local_lengths": local_lengths}

    trainer = Trainer(
        model, TrainingArguments(**settings), train_dataset=data, data_collator=collate, compute_metrics=compute_metrics
    )
    model.register_forward_pre_hook(lambda m, a, k: local_lengths.append(k["input_ids"].shape[1]), with_kwargs=True)
    metrics = trainer.evaluate(data)
    prediction = trainer.predict(data)
    return {
        "metrics": {**metrics, **prediction.metrics},
        "predictions": torch.tensor(prediction.predictions),
        "labels": torch.tensor(prediction.label_ids),
        "seen": seen,
        "local_lengths": local_lengths,
    }


def collate(features):
    """Pad on the right, with an attention mask, like the stock collators."""
    longest = max(len(f["input_ids"]) for f in features)

    def pad(name, value):
        tensors = [f[name] for f in features]
        return torch.stack([torch.nn.functional.pad(t, (0, longest - len(t)), value=value) for t in tensors])

    mask = [torch.ones(len(f["input_ids"]), dtype=torch.long) for f in features]
    mask = torch.stack([torch.nn.functional.pad(t, (0, longest - len(t))) for t in mask])
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


def losses(metrics):
    kept = ("eval_loss", "test_loss", "eval_first", "test_first", "eval_entropy", "eval_mean_token_accuracy")
    return {k: v for k, v in metrics.items() if k in kept}


CASES = [
    ("ddp", 1, 3),
    ("zero3", 1, 3),
    ("ddp", 2, 3),
    ("zero3", 2, 5),
]


@pytest.mark.floor
@pytest.mark.parametrize("engine,dp,count", CASES)
def test_evaluate_and_predict(ranks, engine, dp, count):
    expected = ranks(dp).run(evaluate, engine="plain" if dp == 1 else "ddp", dp=dp, count=count)[0]
    for result in ranks(2 * dp).run(evaluate, engine=engine, sp=2, dp=dp, count=count):
        assert losses(result["metrics"]) == pytest.approx(losses(expected["metrics"]), rel=2e-5)
        assert result["predictions"].shape == expected["predictions"].shape
        # Logits of padding are nobody's; the labels' shape says where rows end.
        assert (result["predictions"] - expected["predictions"]).abs().max() < 1e-5
        assert torch.equal(result["labels"], expected["labels"])
        assert result["seen"] == expected["seen"]
        assert all(length <= 33 for length in result["local_lengths"]), "evaluated on more than row / sp"


def test_sft_metrics(ranks):
    expected = ranks(1).run(evaluate, kind="sft", eval_batch=1)[0]
    for result in ranks(2).run(evaluate, engine="ddp", sp=2, kind="sft", eval_batch=1):
        assert losses(result["metrics"]) == pytest.approx(losses(expected["metrics"]), rel=2e-5)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_evaluation_during_training(ranks, engine):
    settings = dict(
        steps=4, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    expected = ranks(1).run(train, **settings)[0]
    for result in ranks(2).run(train, engine=engine, sp=2, **settings):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert len(result["eval_loss"]) == 2
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
