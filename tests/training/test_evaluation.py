"""Evaluation and prediction go through shards and give what they give without sequence parallelism.

Plain data parallelism with the same number of data-parallel ranks is the reference: the Trainer's own evaluation averages
over global batches, so its value depends on that number, with or without sequence parallelism.
"""

import copy
import tempfile

import pytest
import torch

from .trajectory import ENGINES, _dataset, _parallelism, _tokenizer, fsdp_on_cpu, rows, tiny_llama, train


def evaluate(engine="plain", sp=1, dp=1, count=3, eval_batch=2, kind="trainer", lengths=(66, 40, 51), metrics=None,
             first=False, **arguments):  # fmt: skip
    """Evaluate and predict; `{"metrics", "predictions", "labels", "seen", "local_lengths"}`.

    Args:
        first (`bool`): whether to train a step before; FSDP2 cannot evaluate an untrained model, with SP or without.
        metrics (`Callable`, *optional*): a `compute_metrics`; defaults to one that looks at the logits.
        argmax (`bool`): whether logits are reduced to token ids before they are gathered.
    """
    from transformers import Trainer, TrainingArguments

    import hf_ulysses

    if sp > 1:
        hf_ulysses.enable()
    data = [rows(1, lengths[i % len(lengths)], seed=i)[0] for i in range(count)]
    model = tiny_llama()
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
        per_device_eval_batch_size=eval_batch,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        parallelism_config=_parallelism(engine, sp, dp),
        **copy.deepcopy(ENGINES[engine]),
    )
    settings.update(arguments)
    preprocess = (lambda logits, labels: logits.argmax(-1)) if settings.pop("argmax", False) else None
    seen, local_lengths = [], []

    def compute_metrics(prediction):
        seen.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {"first": float(prediction.predictions[..., 0].mean())}

    options = dict(compute_metrics=metrics or compute_metrics, preprocess_logits_for_metrics=preprocess)
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**settings, bf16=False, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        fsdp_on_cpu(config)
        options = {} if metrics is None else options
        trainer = SFTTrainer(
            model, config, train_dataset=_dataset(data), eval_dataset=_dataset(data), processing_class=_tokenizer(), **options
        )
        if first:
            trainer.train()
        model.model.layers[0].register_forward_pre_hook(lambda m, args: local_lengths.append(args[0].shape[1]))
        return {"metrics": trainer.evaluate(), "local_lengths": local_lengths}

    config = TrainingArguments(**settings)
    fsdp_on_cpu(config)
    trainer = Trainer(model, config, train_dataset=data, data_collator=collate, **options)
    if first:
        # In order, so that both layouts train on the same row.
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.train()
    model.model.layers[0].register_forward_pre_hook(lambda m, args: local_lengths.append(args[0].shape[1]))
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
    ("fsdp2", 1, 3),
    ("fsdp2", 2, 5),
]


@pytest.mark.versions
@pytest.mark.parametrize("engine,dp,count", CASES)
def test_evaluate_and_predict(ranks, engine, dp, count):
    settings = dict(dp=dp, count=count, first=engine == "fsdp2")
    expected = ranks(dp).run(evaluate, engine="plain" if dp == 1 else "ddp", **settings)[0]
    for result in ranks(2 * dp).run(evaluate, engine=engine, sp=2, **settings):
        assert losses(result["metrics"]) == pytest.approx(losses(expected["metrics"]), rel=2e-5)
        assert result["predictions"].shape == expected["predictions"].shape
        # Logits of padding are nobody's; the labels' shape says where rows end.
        assert (result["predictions"] - expected["predictions"]).abs().max() < 1e-5
        assert torch.equal(result["labels"], expected["labels"])
        assert result["seen"] == expected["seen"]
        assert all(length <= 33 for length in result["local_lengths"]), "evaluated on more than row / sp"


def accuracy(prediction):
    """A `compute_metrics` over whole rows: shifts by itself; `predictions` are token ids."""
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    valid = prediction.label_ids[:, 1:] != -100
    return {"accuracy": float((right & valid).sum()) / float(valid.sum()), "rows": len(prediction.label_ids)}


def with_inputs_and_losses(prediction):
    """Sees the inputs and each row's loss, too."""
    assert prediction.inputs.shape == prediction.label_ids.shape
    assert (prediction.inputs == prediction.label_ids)[prediction.label_ids != -100].all()
    return {**accuracy(prediction), "mean_loss": float(prediction.losses.mean())}


class ByBatches:
    """With `batch_eval_metrics` called once per batch, with tensors, and once more for the result."""

    def __init__(self):
        self.right = self.valid = self.rows = 0

    def __call__(self, prediction, compute_result):
        labels, predictions = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
        self.right += int(((predictions == labels) & (labels != -100)).sum())
        self.valid += int((labels != -100).sum())
        self.rows += len(labels)
        return {"accuracy": self.right / self.valid, "rows": self.rows} if compute_result else {}


WAYS = {
    "preprocess": (accuracy, {}),
    "accumulated": (accuracy, dict(eval_accumulation_steps=1)),
    "batch_eval_metrics": (ByBatches, dict(batch_eval_metrics=True)),
    "include_for_metrics": (with_inputs_and_losses, dict(include_for_metrics=["inputs", "loss"])),
}


def evaluate_way(way, **settings):
    metrics, arguments = WAYS[way]
    metrics = metrics() if isinstance(metrics, type) else metrics
    found = evaluate(metrics=metrics, argmax=True, lengths=(66,), **arguments, **settings)["metrics"]
    names = ("accuracy", "rows", "loss", "mean_loss", "mean_token_accuracy")
    return {key: value for key, value in found.items() if key.removeprefix("eval_").removeprefix("test_") in names}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine,dp,count", [("zero3", 1, 3), ("ddp", 2, 5)])
def test_ways_to_compute_metrics(ranks, engine, dp, count, way):
    expected = ranks(dp).run(evaluate_way, way, engine="plain" if dp == 1 else "ddp", dp=dp, count=count)[0]
    for result in ranks(2 * dp).run(evaluate_way, way, engine=engine, sp=2, dp=dp, count=count):
        assert result == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("engine,dp", [("zero3", 1), ("fsdp2", 2)])
def test_sft_compute_metrics(ranks, engine, dp):
    settings = dict(kind="sft", eval_batch=1, count=4, first=engine == "fsdp2", seed=0)
    expected = ranks(dp).run(evaluate_way, "preprocess", engine="plain" if dp == 1 else "ddp", dp=dp, **settings)[0]
    assert expected["eval_rows"] == 4
    for result in ranks(2 * dp).run(evaluate_way, "preprocess", engine=engine, sp=2, dp=dp, **settings):
        assert result == pytest.approx(expected, rel=2e-5)


def generate_in_between(**settings):
    """Generate after each evaluation, while training goes on."""
    from transformers import TrainerCallback

    generated = []

    class Generate(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            prompt = rows(1, 12, seed=5)[0]["input_ids"][None]
            model.eval()
            tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, synced_gpus=False)
            generated.append(tokens[0].tolist())
            model.train()

    return train(
        steps=4, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
        per_device_eval_batch_size=1, before=lambda trainer: trainer.add_callback(Generate()),
        after=lambda trainer: generated, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["zero2", "zero3", "ddp"])
def test_generation_in_between_is_plain_attention(ranks, engine):
    expected = ranks(1).run(generate_in_between)[0]
    for result in ranks(2).run(generate_in_between, engine=engine, sp=2):
        assert result["after"] == expected["after"] and len(result["after"][0]) > 12
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)


def test_sft_metrics(ranks):
    expected = ranks(1).run(evaluate, kind="sft", eval_batch=1)[0]
    for result in ranks(2).run(evaluate, engine="ddp", sp=2, kind="sft", eval_batch=1):
        assert losses(result["metrics"]) == pytest.approx(losses(expected["metrics"]), rel=2e-5)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_evaluation_during_training(ranks, engine):
    settings = dict(
        steps=4, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
        per_device_eval_batch_size=1, eval_on_start=True,
    )  # fmt: skip
    expected = ranks(1).run(train, **settings)[0]
    for result in ranks(2).run(train, engine=engine, sp=2, **settings):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert len(result["eval_loss"]) == 3
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)


def peaks(**settings):
    """The peak of live storage in training steps and in evaluation, and what floating-point tensors are as long as the row."""
    import sys
    from pathlib import Path

    from torch.utils._python_dispatch import TorchDispatchMode

    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from bench_exchange import LiveStorage

    found, long = {"training": [], "evaluation": []}, set()

    class LongTensors(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(tensor) and tensor.is_floating_point() and LONG in tensor.shape:
                    # Attention sees the row with the heads of this rank, one of query, key and value each.
                    if tensor.numel() > LONG * 3 * 16:
                        long.add((str(func), tuple(tensor.shape)))
            return result

    def watch(trainer):
        def measured(original, name):
            def step(*args, **kwargs):
                with LiveStorage() as storage, LongTensors() if name == "evaluation" else torch.enable_grad():
                    result = original(*args, **kwargs)
                found[name].append(storage.peak)
                return result

            return step

        trainer.training_step = measured(trainer.training_step, "training")
        trainer.evaluation_loop = measured(trainer.evaluation_loop, "evaluation")

    train(
        data=rows(4, length=LONG), eval_data=rows(3, length=LONG, seed=9), eval_strategy="steps", eval_steps=2, steps=4,
        per_device_eval_batch_size=1, before=watch, **settings,
    )  # fmt: skip
    # Not the first step, which holds the start-up check.
    return max(found["training"][1:]), max(found["evaluation"]), sorted(long)


LONG = 1028


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_evaluation_takes_no_more_memory_than_training(ranks, kind):
    settings = {"bf16": False} if kind == "sft" else {}
    for training, evaluation, long in ranks(4).run(peaks, engine="ddp", sp=4, kind=kind, **settings):
        assert 0 < evaluation <= training
        assert not long, "a rank holds the whole row"
