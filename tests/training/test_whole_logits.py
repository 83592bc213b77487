"""Trainers that compute their loss from whole logits: TRL's CPO, ORPO, TPO, GKD and OnlineDPO."""

import os
import re

import pytest

from .test_preferences import assert_exact, exchanges_of_reference, layouts, other_llama
from .trajectory import VOCAB, _parallelism, tiny_llama, train
from .trl_trajectory import preferences, run

@layouts(("ddp", 1), versions=("ddp", 1))
def test_cpo(ranks, engine, dp):
    assert_exact(ranks, "CPO", preferences(6 * dp), engine, dp=dp, eval_data=preferences(3, seed=2), beta=0.5)


def said(**settings):
    """What runs by each exit say on standard error, and what there is to say of the last."""
    import contextlib
    import io

    said = []
    for start in (
        lambda: run("CPO", preferences(2), engine="ddp", sp=2, steps=1),
        lambda: run("DPO", preferences(2), engine="ddp", sp=2, steps=1, reference=tiny_llama),
        lambda: train(engine="ddp", sp=2, steps=2, parallelism_config=_evaluated_whole_by_accelerate()),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as log:
            start()
        said.append(log.getvalue())
    return said


def _evaluated_whole_by_accelerate():
    """As accelerate 1.16 has it by default."""
    config = _parallelism("ddp", 2, 1)
    config.sp_handler.sp_disable_in_eval = True
    return config


def test_the_exit_and_what_it_costs_are_said_once(ranks):
    (cpo, dpo, trained), others = ranks(2).run(said)
    assert not any("exit" in other for other in others), "on one rank"
    assert [log.count(" exit, ") for log in (cpo, dpo, trained)] == [1, 1, 1], "once per model that is trained"
    whole = re.search(r"(\d+) x (\d+) tokens \| hidden exit, .*: hidden states (\S+) GiB and logits (\S+) GiB per rank; a compute_", cpo)
    rows, length, hidden, logits = map(float, whole.groups())
    assert rows == 4 and hidden == pytest.approx(rows * length * 64 * 4 / 2**30, rel=1e-2) and logits == pytest.approx(2 * hidden, rel=1e-2)
    assert "tokens exit, the head computes shards" in dpo
    shards = re.search(r"1 x 66 tokens \| loss exit, .*: logits (\S+) GiB per rank, (\S+) GiB where they are read", trained)
    assert [float(size) for size in shards.groups()] == pytest.approx([33 * 128 * 4 / 2**30, 66 * 128 * 4 / 2**30], rel=1e-2)
    assert "evaluation is sharded, too" in trained and "evaluation is sharded" not in dpo


@layouts(("fsdp2", 2))
def test_orpo(ranks, engine, dp):
    assert_exact(ranks, "ORPO", preferences(6 * dp), engine, dp=dp, beta=0.5)


@layouts(("zero3", 1))
def test_tpo(ranks, engine, dp):
    rows = [{**row, "reference": row["rejected"]} for row in preferences(6 * dp)]
    assert_exact(ranks, "TPO", rows, engine, dp=dp, beta=0.5)


def messages(count):
    rows = preferences(count)
    return [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
        for row in rows
    ]


def with_teacher():
    return dict(teacher_model=other_llama())


@pytest.mark.versions
@pytest.mark.parametrize("lmbda", [0.0, 0.7])
def test_gkd(ranks, lmbda):
    """With rows of its own and with rows that the student generates; the teacher is attached, too."""
    settings = dict(models=with_teacher, lmbda=lmbda, max_new_tokens=5, max_length=64, after=exchanges_of_teacher)
    _, results = assert_exact(ranks, "GKD", messages(6), **settings)
    assert all(result["after"] > 0 for result in results)


def exchanges_of_teacher(trainer):
    return exchanges_of_reference(trainer, "teacher_model")


def small_numbers(completion_ids, **kwargs):
    """A reward that differs from row to row."""
    return [sum(ids) / VOCAB for ids in completion_ids]


@layouts(("zero3", 1))
def test_online_dpo(ranks, engine, dp):
    rows = [{"prompt": row["prompt"]} for row in preferences(6 * dp)]
    settings = dict(trainer_arguments=dict(reward_funcs=small_numbers), max_new_tokens=6, max_length=64, beta=0.5)
    assert_exact(ranks, "OnlineDPO", rows, engine, dp=dp, reference=other_llama, **settings)


class Moody:
    """A judge whose answers nobody can foresee: those of the group's first rank count."""

    def __call__(self, completion_ids, **kwargs):
        rank = int(os.environ.get("RANK", "0"))
        return [(7 * sum(ids) + 5 * rank * index) % 11 for index, ids in enumerate(completion_ids)]


def test_rewards_of_online_dpo_that_differ_on_every_rank(ranks):
    rows = [{"prompt": row["prompt"]} for row in preferences(6)]
    settings = dict(trainer_arguments=dict(reward_funcs=Moody()), max_new_tokens=6, max_length=64, beta=0.5)
    assert_exact(ranks, "OnlineDPO", rows, reference=other_llama, **settings)
