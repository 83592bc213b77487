"""Trainers that generate what they train on: GRPO, RLOO and GMPO. Prompts in order, every metric, every reward asked for once
per group; the reference is the same data-parallel processes without sequence parallelism."""

import random

import pytest
import torch

from .test_preferences import assert_exact, assert_same
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


def test_generations_of_a_prompt_on_both_data_parallel_ranks(ranks):
    expected, results = generate_exactly(ranks, dp=2, batch=2, steps_per_generation=2, num_iterations=2, steps=5)
    assert results[0]["after"] == expected["after"]
    assert results[1]["after"] == results[3]["after"] == [] and results[2]["after"]


def drawn(prompts, **kwargs):
    """Random, from generators that the trainer draws from, too."""
    return [random.random() + torch.rand(()).item() for _ in prompts]


async def drawn_later(prompts, **kwargs):
    return [random.random() for _ in prompts]


VARIANTS = {
    "random": dict(rewards=(drawn, drawn_later), steps_per_generation=2, loss_type="bnpo", eval_data=prompts(4)),
    "masked": dict(mask_truncated_completions=True, max_completion_length=2, loss_type="grpo"),
    "batch": dict(scale_rewards="batch", top_entropy_quantile=0.2, loss_type="dapo", gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_grpo_counts_and_compares(ranks, variant):
    generate_exactly(ranks, **VARIANTS[variant])


def test_kl_of_equal_policies_is_zero(ranks):
    adapter = dict(peft_config=lora_config())
    settings = dict(batch=4, num_generations=4, max_completion_length=8, beta=0.04, engine="ddp", sp=2)
    trainer_arguments = dict(reward_funcs=[by_tokens], **adapter)
    for result in ranks(2).run(run, "GRPO", prompts(8), trainer_arguments=trainer_arguments, **settings):
        assert result["log"][0]["kl"] == 0
        assert result["log"][2]["kl"] > 0


@pytest.mark.parametrize("name", ["RLOO", "GMPO"])
def test_its_kin(ranks, name):
    adapter = dict(trainer_arguments=dict(peft_config=lora_config(), reward_funcs=[by_tokens]))
    assert_exact(
        ranks, name, prompts(8), batch=4, num_generations=4, max_completion_length=8, temperature=1.0, beta=0.04, **adapter
    )


def answers(prompts, trainer):
    """Other answers on every rank, as of a server that is asked anew."""
    import os

    rank = int(os.environ.get("RANK", "0"))
    ids = [[9 + rank, 3 + index, 40 + rank * index] for index in range(len(prompts))]
    return {"prompt_ids": [[5, 6, 7]] * len(prompts), "completion_ids": ids, "logprobs": [[0.0] * 3] * len(prompts)}


def test_a_rollout_that_differs_on_every_rank(ranks):
    settings = dict(batch=4, num_generations=4, max_completion_length=8, loss_type="dapo")
    more = dict(trainer_arguments=dict(reward_funcs=[by_tokens], rollout_func=answers))
    assert_exact(ranks, "GRPO", prompts(8), **settings, **more)


def raises(prompts, **kwargs):
    raise KeyError("no reward")


def told(**settings):
    try:
        run("GRPO", prompts(8), batch=4, num_generations=4, max_completion_length=4, **settings)
    except (KeyError, RuntimeError) as error:
        return str(error)


def test_a_reward_function_that_raises_on_one_rank_ends_all(ranks):
    settings = dict(engine="ddp", sp=2, dp=2, trainer_arguments=dict(reward_funcs=[raises]))
    messages = ranks(4).run(told, **settings)
    assert all("no reward" in message for message in messages), messages


LAYOUT = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2", "PARALLELISM_CONFIG_SP_BACKEND": "torch"}


def test_the_layout_of_a_launcher(ranks):
    settings = dict(batch=4, num_generations=4, max_completion_length=8, trainer_arguments=dict(reward_funcs=[by_tokens]))
    expected = ranks(1).run(run, "GRPO", prompts(8), **settings)[0]
    for result in ranks(2).run(run, "GRPO", prompts(8), environment=LAYOUT, **settings):
        assert_same(result, expected)


REFUSED = {
    "vllm_mode": dict(use_vllm=True, vllm_mode="colocate"),
    "use_transformers_continuous_batching": dict(use_transformers_continuous_batching=True),
}


def refusal(**settings):
    try:
        told(**settings)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("option", REFUSED)
def test_generation_that_is_refused(ranks, option):
    settings = dict(engine="ddp", sp=2, trainer_arguments=dict(reward_funcs=[by_tokens]), **REFUSED[option])
    for message in ranks(2).run(refusal, **settings):
        assert message is not None and option in message and "sequence parallelism" in message
