"""Trainers that generate what they train on: GRPO, RLOO and GMPO. Prompts in order, every metric, every reward asked for once
per group; the reference is the same data-parallel processes without sequence parallelism."""

import os
import random
from contextvars import ContextVar

import pytest
import torch

from .test_preferences import ALL, assert_exact, assert_same
from .trl_trajectory import lora_config, preferences, run, scores, tokenizer

# Of this run alone: a rank forgets what a run has set (see ranks.py).
SEEN = ContextVar("SEEN", default=())


def by_tokens(prompts, completion_ids, log_metric=None, log_extra=None, **kwargs):
    """Differs from completion to completion; None for some. Remembers what it was asked, and logs on its own, too."""
    SEEN.set((*SEEN.get(), (list(prompts), [list(ids) for ids in completion_ids])))
    if log_metric is not None:
        log_metric("first token", float(completion_ids[0][0]))
        log_extra("length", [len(ids) for ids in completion_ids])
    return [None if ids[0] % 7 == 0 else float(sum(ids) % 11) for ids in completion_ids]


def asked(trainer):
    """What this rank's reward function was asked, and the table of completions, which all ranks have."""
    table = {name: list(column) for name, column in trainer._logs.items() if not isinstance(column, dict)}
    return SEEN.get(), table, {name: list(column) for name, column in trainer._logs.get("extra", {}).items()}


def prompts(count):
    return [{"prompt": row["prompt"]} for row in preferences(count)]


def generate_exactly(ranks, name="GRPO", engine="ddp", dp=1, rewards=(by_tokens,), **settings):
    settings = dict(dict(batch=4, num_generations=4, max_completion_length=8, temperature=1.0), **settings)
    expected, results = assert_exact(
        ranks, name, prompts(8), engine, dp=dp, after=asked, trainer_arguments=dict(reward_funcs=list(rewards)), **settings
    )
    return expected, results


def assert_asked_alike(expected, results, sp=2):
    """The same completions of the same prompts in the same order, of each data-parallel rank; peers are not asked again."""
    (seen, *tables) = expected["after"]
    assert results[0]["after"][0] == seen and seen and tables[0]["completion"]
    for rank, result in enumerate(results):
        assert bool(result["after"][0]) == (rank % sp == 0)
        assert result["after"][1]["completion"] == tables[0]["completion"] and result["after"][2] == tables[1]


@pytest.mark.versions
@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"] if ALL else ["ddp"])
def test_grpo(ranks, engine):
    assert_asked_alike(*generate_exactly(ranks, engine=engine))


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"] if ALL else ["zero3", "fsdp2"])
def test_generations_of_a_prompt_on_both_data_parallel_ranks(ranks, engine):
    """Kept for more steps than are accumulated, and used twice. One of two functions has nothing to say on one of the ranks."""
    kept = dict(steps_per_generation=2, num_iterations=2, steps=5)
    expected, results = generate_exactly(ranks, engine=engine, dp=2, batch=2, rewards=(by_tokens, silent_on_one_rank), **kept)
    assert_asked_alike(expected, results)
    assert expected["log"][0]["num_tokens"] > 0


def replica():
    """The index of this data-parallel rank, one of two."""
    return int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])


def silent_on_one_rank(completion_ids, **kwargs):
    return [None if replica() else float(len(ids)) for ids in completion_ids]


def drawn(prompts, **kwargs):
    """Random, from generators that the trainer draws from, too."""
    return [random.random() + torch.rand(()).item() for _ in prompts]


async def drawn_later(prompts, **kwargs):
    return [random.random() for _ in prompts]


VARIANTS = {
    "random": dict(rewards=(drawn, drawn_later), steps_per_generation=2, loss_type="bnpo", eval_data=prompts(4)),
    "masked": dict(mask_truncated_completions=True, loss_type="grpo", generation_kwargs=dict(suppress_tokens=[0, 1, 2])),
    "batch": dict(scale_rewards="batch", top_entropy_quantile=0.2, loss_type="dapo", gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_grpo_counts_and_compares(ranks, variant):
    expected, _ = generate_exactly(ranks, **VARIANTS[variant])
    if variant == "masked":
        assert all(entry["completions/clipped_ratio"] == 1 and entry["grad_norm"] == 0 for entry in expected["log"][:3])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"] if ALL else ["dapo"])
def test_kl_of_equal_policies_is_zero(ranks, loss_type):
    adapter = dict(peft_config=lora_config(), reward_funcs=[by_tokens])
    settings = dict(batch=4, num_generations=4, max_completion_length=8, beta=0.04, loss_type=loss_type)
    expected, results = assert_exact(ranks, "GRPO", prompts(8), trainer_arguments=adapter, **settings)
    assert expected["log"][0]["kl"] == 0 and expected["log"][2]["kl"] > 0
    assert all(result["log"][0]["kl"] == 0 for result in results)


def with_reward_model():
    return dict(reward_funcs=[by_tokens, scores()], reward_processing_classes=[None, tokenizer()])


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"] if ALL else ["zero3"])
def test_a_reward_model_beside_a_function(ranks, engine):
    settings = dict(batch=4, num_generations=4, max_completion_length=8, models=with_reward_model, after=asked)
    assert_asked_alike(*assert_exact(ranks, "GRPO", prompts(8), engine, **settings))


@pytest.mark.parametrize("name", [pytest.param("RLOO", marks=pytest.mark.versions), "GMPO"])
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


class Server:
    """In the place of TRL's client of a vLLM server: remembers what is asked, and never answers the same twice."""

    asked = []

    def __init__(self, **address):
        pass

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, parameters):
        self.asked.append(sum(parameter.double().abs().sum().item() for _, parameter in parameters))

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, n, **settings):
        self.asked.append(prompts)
        ids = [[2 + (7 * len(self.asked) + 5 * i + k) % 120 for k in range(3 + i % 3)] for i in range(n * len(prompts))]
        logprobs = [[[-4.0 - 0.1 * k] for k in range(len(row))] for row in ids]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logprobs}


def asked_server(trainer):
    return list(Server.asked)


def run_with_server(*args, **settings):
    from unittest import mock

    Server.asked.clear()
    with mock.patch.multiple("trl.generation.vllm_generation", VLLMClient=Server, is_vllm_available=lambda: True):
        return run(*args, use_vllm=True, vllm_mode="server", after=asked_server, **settings)


@pytest.mark.parametrize("engine,name", [("ddp", "GRPO"), ("fsdp2", "RLOO")] if ALL else [("fsdp2", "GRPO")])
def test_a_server_is_asked_once_per_group(ranks, engine, name):
    """And is given the weights of each step."""
    settings = dict(batch=2, num_generations=4, max_completion_length=8, trainer_arguments=dict(reward_funcs=[by_tokens]))
    settings["beta"], data = 0.0, prompts(8)
    expected = ranks(2).run(run_with_server, name, data, engine=engine, dp=2, **settings)[0]
    results = ranks(4).run(run_with_server, name, data, engine=engine, sp=2, dp=2, **settings)
    for result in results:
        assert_same(result, expected)
    # Three steps, of one prompt each: weights, then a question.
    weights, questions = expected["after"][::2], expected["after"][1::2]
    assert len(questions) == 3 and all(len(asked) == 1 for asked in questions)
    assert results[0]["after"][1::2] == questions and results[0]["after"][::2] == pytest.approx(weights, rel=1e-6)
    assert all(result["after"] == [] for result in results[1:])


def raises_on_one_rank(prompts, **kwargs):
    if replica():
        raise KeyError("no reward")
    return [0.0] * len(prompts)


def rollout_that_raises_on_one_rank(prompts, trainer):
    if replica():
        raise KeyError("no rollout")
    return answers(prompts, trainer)


def told(**settings):
    try:
        run("GRPO", prompts(8), batch=4, num_generations=4, max_completion_length=4, **settings)
    except (KeyError, RuntimeError) as error:
        return str(error)


# What raises on one data-parallel rank, and on nobody else.
RAISING = {
    "no reward": dict(reward_funcs=[raises_on_one_rank]),
    "no rollout": dict(reward_funcs=[by_tokens], rollout_func=rollout_that_raises_on_one_rank),
}


@pytest.mark.parametrize("what", RAISING)
def test_what_raises_on_one_rank_ends_all(ranks, what):
    messages = ranks(4).run(told, engine="ddp", sp=2, dp=2, trainer_arguments=RAISING[what], timeout=60)
    assert all(what in message for message in messages), messages


LAYOUT = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2", "PARALLELISM_CONFIG_SP_BACKEND": "torch"}


def test_the_layout_of_a_launcher(ranks):
    settings = dict(batch=4, num_generations=4, max_completion_length=8, trainer_arguments=dict(reward_funcs=[by_tokens]))
    expected = ranks(1).run(run, "GRPO", prompts(8), **settings)[0]
    for result in ranks(2).run(run, "GRPO", prompts(8), environment=LAYOUT, **settings):
        assert_same(result, expected)


REFUSED = {
    "vllm_mode": dict(use_vllm=True, vllm_mode="colocate"),
    "ZeRO-3": dict(use_vllm=True, vllm_mode="server", engine="zero3"),
    "use_transformers_continuous_batching": dict(use_transformers_continuous_batching=True),
}


def refusal(**settings):
    try:
        told(**settings)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("option", REFUSED)
def test_generation_that_is_refused(ranks, option):
    settings = {"engine": "ddp", "sp": 2, "trainer_arguments": dict(reward_funcs=[by_tokens]), **REFUSED[option]}
    for message in ranks(2).run(refusal, **settings):
        assert message is not None and option in message and "sequence parallelism" in message
