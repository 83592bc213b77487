"""Trainers that compute their loss from whole logits: TRL's CPO, ORPO, TPO, GKD and OnlineDPO."""

import pytest

from .test_preferences import assert_exact, exchanges_of_reference, other_llama
from .trajectory import VOCAB, tiny_llama
from .trl_trajectory import preferences, run

ENGINES = ["ddp", "zero3", "fsdp2"]


@pytest.mark.parametrize("engine", ENGINES)
def test_cpo(ranks, engine):
    assert_exact(ranks, "CPO", preferences(6), engine, eval_data=preferences(3, seed=2), beta=0.5)


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


def test_orpo(ranks):
    assert_exact(ranks, "ORPO", preferences(12), "fsdp2", dp=2, beta=0.5)


def test_tpo(ranks):
    rows = [{**row, "reference": row["rejected"]} for row in preferences(6)]
    assert_exact(ranks, "TPO", rows, "zero3", beta=0.5)


def messages(count):
    rows = preferences(count)
    return [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
        for row in rows
    ]


def with_teacher():
    return dict(teacher_model=other_llama())


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


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_online_dpo(ranks, engine):
    rows = [{"prompt": row["prompt"]} for row in preferences(6)]
    settings = dict(trainer_arguments=dict(reward_funcs=small_numbers), max_new_tokens=6, max_length=64, beta=0.5)
    assert_exact(ranks, "OnlineDPO", rows, engine, reference=other_llama, **settings)
