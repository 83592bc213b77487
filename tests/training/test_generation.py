"""Trainers that generate what they train on: GRPO, RLOO and GMPO. Prompts in order, every metric, every reward asked for once
per group; the reference is the same data-parallel processes without sequence parallelism."""

import random

import pytest
import torch

from .test_preferences import ALL, assert_exact
from .trajectory import tiny_llama
from .trl_trajectory import lora_config, preferences, run

SEEN = []


def by_tokens(prompts, completion_ids, **kwargs):
    """Differs from completion to completion; None for some. Remembers what it was asked."""
    SEEN.append((list(prompts), [list(ids) for ids in completion_ids]))
    return [None if ids[0] % 7 == 0 else float(sum(ids) % 11) for ids in completion_ids]


def asked(trainer):
    seen = list(SEEN)
    SEEN.clear()
    return seen


def prompts(count):
    return [{"prompt": row["prompt"]} for row in preferences(count)]


def generate_exactly(ranks, name="GRPO", engine="ddp", dp=1, rewards=(by_tokens,), **settings):
    settings = dict(dict(batch=4, num_generations=4, max_completion_length=8, temperature=1.0), **settings)
    expected, results = assert_exact(
        ranks, name, prompts(8), engine, dp=dp, after=asked, trainer_arguments=dict(reward_funcs=list(rewards)), **settings
    )
    return expected, results


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_grpo(ranks, engine):
    expected, results = generate_exactly(ranks, engine=engine)
    # The same completions of the same prompts in the same order; peers are not asked again.
    assert results[0]["after"] == expected["after"] and expected["after"]
    assert all(result["after"] == [] for result in results[1:])
