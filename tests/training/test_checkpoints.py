"""Checkpoints do not depend on sequence parallelism: save under one layout, resume under another, same trajectory."""

import copy
from pathlib import Path

import pytest
import torch

from .trajectory import rows, tiny_llama, train

RELATIVE = 2e-5


def read_rows(trainer):
    """Log the first token ids of every row that this process reads for training."""
    seen = []
    original = trainer.get_train_dataloader

    def get_train_dataloader():
        loader = original()
        collate = loader.base_dataloader.collate_fn

        def log(features):
            seen.extend(int(f["input_ids"][0]) * 1000 + int(f["input_ids"][1]) for f in features)
            return collate(features)

        loader.base_dataloader.collate_fn = log
        return loader

    trainer.get_train_dataloader = get_train_dataloader
    trainer.rows_read = seen


def rows_read(trainer):
    return list(trainer.rows_read)


def run(folder, stop=None, resume=None, **settings):
    """8 steps over 2 epochs; with `stop`, save after that step and end there; with `resume`, go on from that checkpoint."""
    settings = dict(
        output_dir=folder, steps=8, data=settings.pop("data", None) or rows(8), before=read_rows, after=rows_read, **settings
    )
    if stop is not None:
        settings.update(save_strategy="steps", save_steps=stop, steps=stop)
    return train(resume=resume, **settings)


# (engine, sp, dp, accumulation) that saves, the same that resumes
SAME = ("zero3", 2, 2, 1), ("zero3", 2, 2, 1)
PAIRS = {
    "zero3 sp2 dp2": SAME,
    "fsdp2 sp2 dp2": (("fsdp2", 2, 2, 1), ("fsdp2", 2, 2, 1)),
    "fsdp2 sp2 dp2 to dp2": (("fsdp2", 2, 2, 1), ("fsdp2", 1, 2, 1)),
    "ddp sp2 dp2 to dp2": (("ddp", 2, 2, 1), ("ddp", 1, 2, 1)),
    "ddp dp2 to sp2 dp2": (("ddp", 1, 2, 1), ("ddp", 2, 2, 1)),
    "zero3 sp2 dp2 accumulation 2 to dp4": (("zero3", 2, 2, 2), ("zero3", 1, 4, 1)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_resume(ranks, tmp_path, pair):
    saves, resumes = PAIRS[pair]
    batch = saves[2] * saves[3]
    data = rows(4 * batch)
    # torch's loader of sharded optimizer states fails on an optimizer without any, as SGD is.
    optimizer = "adamw" if saves[0] == "fsdp2" else "sgd"
    expected = ranks(1).run(run, str(tmp_path / "whole"), data=data, batch=batch, optimizer=optimizer)[0]

    def layout(engine, sp, dp, accumulation):
        return sp * dp, dict(engine=engine, sp=sp, dp=dp, accumulation=accumulation, optimizer=optimizer)

    size, settings = layout(*saves)
    first = ranks(size).run(run, str(tmp_path / "run"), stop=3, data=data, **settings)
    assert first[0]["loss"] == pytest.approx(expected["loss"][:3], rel=RELATIVE)
    size, settings = layout(*resumes)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    second = ranks(size).run(run, str(tmp_path / "run"), resume=checkpoint, data=data, **settings)
    for result in second:
        assert result["loss"][-5:] == pytest.approx(expected["loss"][3:], rel=RELATIVE)
        assert result["grad_norm"][-5:] == pytest.approx(expected["grad_norm"][3:], rel=RELATIVE)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5
        assert result["state"] == expected["state"]
    # One rank of every sequence-parallel group: together they read exactly the rows that were not read.
    sp = settings["sp"]
    read = sorted(row for result in second[::sp] for row in result["after"])
    assert read == sorted(expected["after"][3 * batch :])
    assert all(result["after"] == second[i - i % sp]["after"] for i, result in enumerate(second))


def save_model(folder, how, **settings):
    def save(trainer):
        if how == "save_model":
            return trainer.save_model(folder)
        # As Accelerate's documentation has it.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        model.save_pretrained(folder, is_main_process=trainer.accelerator.is_main_process, state_dict=state)
        if trainer.accelerator.is_main_process:
            torch.save(trainer.args, folder + "/training_args.bin")

    return train(after=save, steps=2, **settings)


LOAD = """
import sys, torch, accelerate, transformers
sys.modules["hf_ulysses"] = None  # importing it is an error
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
arguments = torch.load(sys.argv[1] + "/training_args.bin", weights_only=False)
assert type(arguments.parallelism_config) is accelerate.parallelism_config.ParallelismConfig
assert arguments.parallelism_config.sp_size == 2
torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), sys.argv[2])
"""


@pytest.mark.half("engine", "how")
@pytest.mark.parametrize("how", ["save_model", "save_pretrained"])
@pytest.mark.parametrize("engine", ["zero3", "fsdp2", "ddp"])
def test_saved_model_loads_without_hf_ulysses(ranks, tmp_path, engine, how):
    import subprocess
    import sys

    folder = str(tmp_path / "model")
    settings = {}
    if engine == "zero3":
        from .trajectory import deepspeed_config

        config = deepspeed_config(3)
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        settings["deepspeed"] = config
    if engine == "fsdp2":
        from .trajectory import ENGINES

        settings["fsdp_config"] = {**ENGINES["fsdp2"]["fsdp_config"], "state_dict_type": "FULL_STATE_DICT"}
    trained = ranks(2).run(save_model, folder, how, engine=engine, sp=2, **settings)[0]
    subprocess.run([sys.executable, "-c", LOAD, folder, str(tmp_path / "flat.pt")], check=True)
    assert torch.equal(torch.load(tmp_path / "flat.pt"), trained["parameters"])


def checkpointed(reentrant, **settings):
    return train(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}, **settings)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2", "ddp"])
def test_gradient_checkpointing(ranks, engine, reentrant):
    expected = ranks(1).run(train, steps=4)[0]
    for result in ranks(2).run(checkpointed, reentrant, engine=engine, sp=2, steps=4):
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5


def best_model(folder, **settings):
    def best(trainer):
        return Path(trainer.state.best_model_checkpoint).name

    return train(
        output_dir=folder, after=best, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        prediction_loss_only=True, steps=6, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["zero2", "ddp"])
def test_load_best_model_at_end(ranks, tmp_path, engine):
    expected = ranks(1).run(best_model, str(tmp_path / "one"))[0]
    for result in ranks(2).run(best_model, str(tmp_path / "two"), engine=engine, sp=2):
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=RELATIVE)
        assert result["after"] == expected["after"]
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5


def twice(**settings):
    """Two trainers with models of other head counts, then a plain one, in one process; train() called again, too."""
    first = train(steps=3, **settings)
    second = train(steps=3, model=tiny_llama(num_attention_heads=8, num_key_value_heads=4), **settings)

    def again(trainer):
        if settings.get("engine") == "zero3":
            # The Trainer cannot train() twice under DeepSpeed, with sequence parallelism or without.
            return None, None
        reference = copy.deepcopy(trainer.model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        # A reference model that nobody attached attends to whole rows.
        ids = rows(1)[0]["input_ids"][None]
        with torch.no_grad():
            return losses, reference(input_ids=ids, labels=ids).loss.item()

    third = train(steps=3, after=again, **settings)
    return first["loss"], second["loss"], third["after"]


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_several_trainers_in_one_process(ranks, engine):
    first, second, (third, reference) = ranks(1).run(twice)[0]
    for result in ranks(2).run(train_several, engine):
        assert result[0] == pytest.approx(first, rel=RELATIVE)
        assert result[1] == pytest.approx(second, rel=RELATIVE)
        if engine == "ddp":
            assert result[2][0] == pytest.approx(third, rel=RELATIVE)
            assert result[2][1] == pytest.approx(reference, rel=1e-5)


def train_several(engine):
    return twice(engine=engine, sp=2)
