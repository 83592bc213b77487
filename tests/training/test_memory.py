"""Training with the memory switches: the trajectory of one process without any of them."""

import pytest
import torch

from .test_trajectories import assert_engine, assert_same, reference
from .trajectory import VOCAB, rows, tiny_llama, train

SWITCHES = dict(tiled_loss=3, tiled_mlp=4, tiled_norms=2, offload_checkpoints=True, head_chunks=2)
CHECKPOINTING = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
HEADS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8)


def run(settings, **more):
    environment = {f"PARALLELISM_CONFIG_SP_{name.upper()}": str(value) for name, value in settings.items()}
    return train(model=tiny_llama(**HEADS), environment=environment, **CHECKPOINTING, **more)


def plain(**more):
    return train(model=tiny_llama(**HEADS), **more)


_plain = {}


def expected(ranks, **settings):
    key = repr(sorted(settings.items()))
    if key not in _plain:
        _plain[key] = ranks(1).run(plain, **settings)[0]
    return _plain[key]


@pytest.mark.parametrize("engine", ["zero3", "fsdp2", "ddp"])
@pytest.mark.parametrize("settings", [SWITCHES, *({k: v} for k, v in SWITCHES.items())], ids=lambda s: "+".join(s))
def test_each_switch_alone_and_all_together(ranks, engine, settings):
    results = ranks(2).run(run, settings, engine=engine, sp=2, accumulation=2)
    assert_engine(results[0], engine)
    assert_same(results, expected(ranks, accumulation=2))


def tiled(trainer):
    """Whether the switches have acted on the model that was trained."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return ["forward" in vars(module) for module in (model, model.model.norm, model.model.layers[0].mlp)]


@pytest.mark.parametrize("engine", ["plain", "zero3", "fsdp2"])
def test_without_sequence_parallelism(ranks, engine):
    data = dict(data=rows(8), steps=4)
    dp = 1 if engine == "plain" else 2
    results = ranks(dp).run(run, SWITCHES, engine=engine, dp=dp, after=tiled, **data)
    wanted = ranks(dp).run(plain, engine="plain" if dp == 1 else "ddp", dp=dp, **data)[0]
    assert_same(results, wanted, counted=False)
    assert all(results[0]["after"])


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_rows_of_other_lengths_on_other_ranks(ranks, engine):
    """Under ZeRO-3 every tile is a gather: 5 tokens in 4 tiles on one rank, 2 in 4 on the other, 33 on both."""
    data = [row for length in (10, 4, 66, 66, 3, 40) for row in rows(1, length=length, seed=length)]
    settings = dict(steps=3, data=data)
    results = ranks(4).run(run, SWITCHES, engine=engine, sp=2, dp=2, **settings)
    wanted = ranks(2).run(plain, engine="ddp", dp=2, **settings)[0]
    assert_same(results, wanted)


def test_evaluation(ranks):
    more = dict(eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=1)
    wanted = expected(ranks, **more)
    results = ranks(2).run(run, SWITCHES, engine="zero3", sp=2, **more)
    assert_same(results, wanted)
    assert results[0]["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=2e-5)


def overfit(settings):
    data = [{"input_ids": torch.arange(66) * 7 % VOCAB, "labels": torch.arange(66) * 7 % VOCAB}] * 50
    return run(settings, engine="zero3", sp=2, steps=50, data=data, optimizer="adamw", learning_rate=5e-3)["loss"]


def test_one_row_is_overfitted_with_everything_on(ranks):
    assert ranks(2).run(overfit, SWITCHES)[0][-1] < 0.1


def collectives(settings, engine):
    """Of the last of four steps: ZeRO-3 knows only from the second on what it will need again."""
    from ..collectives import Collectives

    counts = []

    def watch(trainer):
        original = trainer.training_step

        def step(*args, **kwargs):
            with Collectives() as collectives:
                result = original(*args, **kwargs)
            counts.append(collectives.counts)
            return result

        trainer.training_step = step

    run(settings, before=watch, engine=engine, sp=2, steps=4)
    return dict(counts[-1])


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_tiles_gather_and_reduce_no_more_often(ranks, engine):
    """Gradients are reduced once per step, and parameters gathered as often as without tiles - but for the output
    embedding, once more: what runs in backward right after forward is kept, which a tile's head does not."""
    tiles = dict(tiled_loss=16, tiled_mlp=16, tiled_norms=16)
    for ours, theirs in zip(ranks(2).run(collectives, tiles, engine), ranks(2).run(collectives, {}, engine)):
        more = ours.pop("_allgather_base_") - theirs.pop("_allgather_base_")
        assert ours == theirs and more == 1
