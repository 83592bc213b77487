"""Trainers that compute their loss from whole logits: TRL's CPO, ORPO, TPO, GKD and OnlineDPO."""

import os

import pytest

from .test_preferences import assert_exact, exchanges_of_reference, layouts, other_llama
from .trajectory import VOCAB, tiny_llama
from .trl_trajectory import preferences, run

@layouts(("ddp", 1), versions=("ddp", 1))
def test_cpo(ranks, engine, dp):
    assert_exact(ranks, "CPO", preferences(6 * dp), engine, dp=dp, eval_data=preferences(3, seed=2), beta=0.5)


def said(**settings):
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as log:
        run("CPO", preferences(2), engine="ddp", sp=2, steps=1)
        run("DPO", preferences(2), engine="ddp", sp=2, steps=1, reference=tiny_llama)
    return log.getvalue()


def test_the_log_says_that_the_head_is_whole(ranks):
    log, _ = ranks(2).run(said)
    assert "CPOTrainer reads whole logits: its output head is not sharded" in log and "DPOTrainer reads" not in log


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
