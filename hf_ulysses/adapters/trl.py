"""TRL's trainers: more models than the one they train, and those that generate what they train on.

1. References and teachers are attached before they are used. TRL prepares them in its own ways (`prepare_deepspeed`,
   `prepare_fsdp`, `Accelerator.prepare_model`), or does not, as when log-probabilities are computed ahead while the trainer
   is built; what they have in common is that the trainer holds them.
2. What is generated, and what judges it, comes from the group's first rank; then its ranks draw alike again. GRPO and its kin
   ask for rewards once per group. They see data-parallel ranks only (replicas.py), in names of their modules, too.
"""

import functools
import inspect

import torch

from ..core.attachment import attachment_of
from .accelerate import attach_prepared, shared_sp_group
from .config import requested
from .replicas import counting_replicas, end_together, of_each_group, replicas_of, share_randomness, share_result, sp_group

# The methods in which a trainer runs models; those that it has.
_RUN_MODELS = ("training_step", "prediction_step", "compute_loss", "compute_ref_log_probs")
# What draws: completions, of GRPO's kin, of GKD and OnlineDPO; rewards of OnlineDPO.
_DRAW = ("_generate_single_turn", "rollout_func", "generate_on_policy_outputs", "_calculate_rewards_from_functions")


def adopt(trainer) -> None:
    """Shadow methods of one trainer, if it is one of TRL's. No communication."""
    if not any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        return
    for name in _RUN_MODELS:
        if hasattr(trainer, name):
            setattr(trainer, name, _attached(trainer, getattr(trainer, name)))
    # That of GRPO and its kin gathers from all ranks in the end: an error on one of them could not end the others there.
    around = () if hasattr(trainer, "_generate_single_turn") else ("_generate",)
    for name in (*_DRAW, *around):
        if getattr(trainer, name, None) is not None:
            setattr(trainer, name, share_result(trainer.accelerator, getattr(trainer, name)))
    if hasattr(trainer, "_calculate_rewards"):
        _ask_once(trainer)


def _attached(trainer, method):
    @functools.wraps(method)
    def with_attached_models(*args, **kwargs):
        for held in list(vars(trainer).values()):
            if isinstance(held, torch.nn.Module):
                model = trainer.accelerator.unwrap_model(held, keep_torch_compile=False)
                # A head of one's own, a loss: they are given whole rows.
                if hasattr(model, "get_input_embeddings") and attachment_of(model) is None:
                    attach_prepared(trainer.accelerator, model, held)
        if getattr(trainer, "vllm_generation", None) is not None:
            # Made with the accelerator itself: it slices what the server has answered.
            trainer.vllm_generation.accelerator = replicas_of(trainer.accelerator)
        return method(*args, **kwargs)

    return with_attached_models


def _ask_once(trainer):
    """Have the group's first rank ask its reward functions alone: others' zeros are dropped where rewards are gathered.

    A reward model runs on all ranks, for its engine may gather it from them. An error waits until all ranks can raise it.
    """
    group, errors = sp_group(trainer.accelerator), []
    asks = torch.distributed.get_rank(group) == 0

    def checked(function, rewards, prompts):
        if len(rewards) != len(prompts):
            raise ValueError(f"{function} returned {len(rewards)} rewards for {len(prompts)} completions.")
        return rewards

    def asked_once(function):
        def ask(*args, prompts, **kwargs):
            try:
                return checked(function, function(*args, prompts=prompts, **kwargs), prompts)
            # Whatever it is: it is raised again, on all ranks.
            except Exception as error:
                errors.append(error)
            return [0.0] * len(prompts)

        async def ask_later(*args, prompts, **kwargs):
            try:
                return checked(function, await function(*args, prompts=prompts, **kwargs), prompts)
            except Exception as error:
                errors.append(error)
            return [0.0] * len(prompts)

        if isinstance(function, torch.nn.Module):
            return function
        if not asks:
            return lambda *args, prompts, **kwargs: [0.0] * len(prompts)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return ask_later if is_async else ask

    trainer.reward_funcs = [asked_once(function) for function in trainer.reward_funcs]
    calculate = trainer._calculate_rewards

    @functools.wraps(calculate)
    def calculate_rewards(*args, **kwargs):
        errors.clear()
        rewards = calculate(*args, **kwargs)
        end_together(errors[0] if errors else None)
        # Functions that draw have drawn on one rank of the group.
        share_randomness(group)
        return rewards

    trainer._calculate_rewards = calculate_rewards


def wrap_config(original):
    """Their configurations refuse sequence parallelism, and count processes where they mean data-parallel ranks."""

    @functools.wraps(original)
    def __post_init__(self, *args, **kwargs):
        given = self.parallelism_config
        view = requested(given)
        if view is None:
            return original(self, *args, **kwargs)
        self.parallelism_config = None
        try:
            with counting_replicas(self, view.sp_size, "world_size"):
                original(self, *args, **kwargs)
        finally:
            self.parallelism_config = given

    return __post_init__


# -- names in the modules of GRPO's kin -----------------------------------------------------------------------------------


def wrap_gather(original):
    @functools.wraps(original)
    def gather(tensor):
        group = shared_sp_group()
        gathered = original(tensor)
        return gathered if group is None else of_each_group(gathered, torch.distributed.get_world_size(group))

    return gather


def wrap_gather_object(original):
    @functools.wraps(original)
    def gather_object(object):
        group = shared_sp_group()
        # They are joined: those of a group's other ranks are empty.
        return original(object if group is None or torch.distributed.get_rank(group) == 0 else [])

    return gather_object
