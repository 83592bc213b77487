"""TRL's trainers: more models than the one they train, and those that generate what they train on.

1. References and teachers are attached before they are used. TRL prepares them in its own ways (`prepare_deepspeed`,
   `prepare_fsdp`, `Accelerator.prepare_model`), or does not, as when log-probabilities are computed ahead while the trainer
   is built; what they have in common is that the trainer holds them.
2. Trainers that generate (GRPO, RLOO and their kin) see data-parallel ranks only (replicas.py). What is generated comes
   from the group's first rank; rewards are asked for once per group; then its ranks draw alike again.
"""

import functools
import inspect

import torch

from ..core.attachment import attachment_of
from .accelerate import attach_prepared, share_randomness, shared_sp_group, sp_group
from .config import requested
from .replicas import Replicas, among_replicas, end_together, share_result

# The methods in which a trainer runs models; those that it has.
_RUN_MODELS = ("training_step", "prediction_step", "compute_loss", "compute_ref_log_probs")


def adopt(trainer) -> None:
    """Shadow methods of one trainer, if it is one of TRL's. No communication."""
    if not any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        return
    for name in _RUN_MODELS:
        if hasattr(trainer, name):
            setattr(trainer, name, _attached(trainer, among_replicas(trainer, getattr(trainer, name))))
    if hasattr(trainer, "_calculate_rewards"):
        _generate_once(trainer)


def _attached(trainer, method):
    @functools.wraps(method)
    def with_attached_models(*args, **kwargs):
        for held in list(vars(trainer).values()):
            if isinstance(held, torch.nn.Module):
                model = trainer.accelerator.unwrap_model(held, keep_torch_compile=False)
                # A head of one's own, a loss: they are given whole rows.
                if hasattr(model, "get_input_embeddings") and attachment_of(model) is None:
                    attach_prepared(trainer.accelerator, model, held)
        return method(*args, **kwargs)

    return with_attached_models


# -- trainers that generate -----------------------------------------------------------------------------------------------


def _generate_once(trainer):
    accelerator = trainer.accelerator
    for name in ("_generate_single_turn", "rollout_func"):
        if getattr(trainer, name, None) is not None:
            setattr(trainer, name, share_result(accelerator, getattr(trainer, name)))
    errors = []
    trainer.reward_funcs = [_asked_once(accelerator, function, errors) for function in trainer.reward_funcs]
    calculate, generate = trainer._calculate_rewards, trainer._generate

    @functools.wraps(calculate)
    def calculate_rewards(*args, **kwargs):
        errors.clear()
        rewards = calculate(*args, **kwargs)
        end_together(errors[0] if errors else None)
        # Functions that draw have drawn on one rank of the group.
        share_randomness(sp_group(accelerator))
        return rewards

    @functools.wraps(generate)
    def generate_alike(*args, **kwargs):
        if getattr(trainer, "vllm_generation", None) is not None:
            # Made with the accelerator itself: it slices what the server has answered.
            trainer.vllm_generation.accelerator = Replicas(accelerator)
        generated = generate(*args, **kwargs)
        share_randomness(sp_group(accelerator))
        return generated

    trainer._calculate_rewards, trainer._generate = calculate_rewards, generate_alike


def _asked_once(accelerator, function, errors):
    """A reward function that the group's first rank asks alone: the others' zeros are dropped where rewards are gathered.

    A reward model runs on all ranks, for its engine may gather it from them. An error waits until all ranks can raise it.
    """
    if isinstance(function, torch.nn.Module):
        return function
    asks = torch.distributed.get_rank(sp_group(accelerator)) == 0

    def checked(rewards, prompts):
        if len(rewards) != len(prompts):
            raise ValueError(f"{function} returned {len(rewards)} rewards for {len(prompts)} completions.")
        return rewards

    def failed(error, prompts):
        errors.append(error)
        return [0.0] * len(prompts)

    def ask(*args, prompts, **kwargs):
        try:
            return checked(function(*args, prompts=prompts, **kwargs), prompts) if asks else [0.0] * len(prompts)
        # Whatever it is: it is raised again, on all ranks.
        except Exception as error:
            return failed(error, prompts)

    async def ask_later(*args, prompts, **kwargs):
        try:
            return checked(await function(*args, prompts=prompts, **kwargs), prompts) if asks else [0.0] * len(prompts)
        except Exception as error:
            return failed(error, prompts)

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return ask_later if is_async else ask


def wrap_config(original):
    """Their configurations refuse sequence parallelism, and count processes where they mean data-parallel ranks."""

    @functools.wraps(original)
    def __post_init__(self, *args, **kwargs):
        given = self.parallelism_config
        view = requested(given)
        if view is None:
            return original(self, *args, **kwargs)
        cls = type(self)
        # A property cannot be shadowed on an instance.
        counted = property(lambda self: cls.world_size.fget(self) // view.sp_size)
        self.parallelism_config, self.__class__ = None, type(cls.__name__, (cls,), {"world_size": counted})
        try:
            original(self, *args, **kwargs)
        finally:
            self.parallelism_config, self.__class__ = given, cls

    return __post_init__


def wrap_set_seed(original):
    @functools.wraps(original)
    def set_seed(seed, device_specific=False, **kwargs):
        group = shared_sp_group()
        if group is None or not device_specific:
            return original(seed, device_specific, **kwargs)
        original(seed + torch.distributed.get_rank() // torch.distributed.get_world_size(group), **kwargs)

    return set_seed


def wrap_gather(original):
    @functools.wraps(original)
    def gather(tensor):
        group, gathered = shared_sp_group(), original(tensor)
        if group is None:
            return gathered
        size = torch.distributed.get_world_size(group)
        return gathered.unflatten(0, (-1, size, len(gathered) // torch.distributed.get_world_size()))[:, 0].flatten(0, 1)

    return gather


def wrap_gather_object(original):
    @functools.wraps(original)
    def gather_object(object):
        group = shared_sp_group()
        # Lists, which are joined: those of a group's other ranks are empty.
        return original(object if group is None or torch.distributed.get_rank(group) == 0 else object[:0])

    return gather_object
