"""Trainers and training arguments that cannot be exact and are therefore refused, with the reason and the way out."""

import torch

# TRL's trainers that make their own batches, by loaders, packers or calls of the backbone that nothing here knows, and those
# that generate through other processes. By name: their batches are only known when they train. All others are given whole
# rows and are what they are without sequence parallelism. The last five are of older versions only.
_OWN_BATCHES = ("Distillation", "ServerDistillation", "GOLD", "SDPO", "SDFT", "A2PO", "IWOPD")
_OWN_BATCHES += ("PPO", "PRM", "BCO", "NashMD", "XPO")


def _refused_by_name(cls) -> str | None:
    """The name of the trainer of TRL that `cls`, it or its configuration, belongs to, if it is refused."""
    for base in cls.__mro__:
        name = base.__name__.removesuffix("Config").removesuffix("Trainer")
        if base.__module__.partition(".")[0] == "trl" and (name in _OWN_BATCHES or name.startswith("Async")):
            return f"{name}Trainer"
    return None


def check_arguments(args, cls=None) -> None:
    """Refuse, before a model is loaded, what the training arguments already say. Raises `ValueError`; no communication.

    Args:
        cls (`type`, *optional*): the trainer's class, once there is one; defaults to that of the arguments.
    """
    name = _refused_by_name(cls or type(args))
    if name is not None:
        raise ValueError(
            f"{name} is not supported with sequence parallelism: it makes its batches by itself, and each rank of a "
            "sequence-parallel group would make others. Set sp_size=1, or remove the parallelism config."
        )
    if getattr(args, "use_vllm", False) and (args.vllm_mode != "server" or not hasattr(args, "steps_per_generation")):
        raise ValueError(
            f"{type(args).__name__}(use_vllm=True, vllm_mode={args.vllm_mode!r}) is not supported with sequence parallelism: "
            "each rank would ask for other completions. GRPO, RLOO and GMPO can ask a server (vllm_mode='server'); all can "
            "generate with transformers (use_vllm=False)."
        )
    if "lomo" in str(getattr(args, "optim", "")):
        raise ValueError(
            f"optim={str(args.optim)!r} changes weights within backward, before the gradients of a row's shards are averaged. Choose "
            "another optimizer, or set sp_size=1."
        )
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        if getattr(args, name, False):
            raise ValueError(f"{name}=True is not supported with sequence parallelism: set it to False.")


def check_evaluation(trainer, loader) -> None:
    """Refuse to evaluate a stream over several replicas, which fill its last batch with rows that they count twice."""
    view = trainer.accelerator.state.parallelism_config
    replicas = view.dp_replicate_size * view.dp_shard_size
    streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if streams and replicas > 1 and not trainer.args.dataloader_drop_last:
        raise ValueError(
            f"Evaluating an iterable dataset over {replicas} data-parallel ranks counts the rows twice that fill its last batch. Set "
            "dataloader_drop_last=True, or give it a length (a dataset that is read by index)."
        )


def check_trainer(trainer) -> None:
    """Refuse a trainer that cannot be exact. Raises `ValueError`; no communication."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    check_arguments(trainer.args, type(trainer))
    if getattr(trainer.args, "use_vllm", False) and is_deepspeed_zero3_enabled():
        raise ValueError(
            "use_vllm under ZeRO-3 is not supported with sequence parallelism: DeepSpeed loses track of the weights that are "
            "sent to the server. Use FSDP2, ZeRO-2 or DDP, or generate with transformers (use_vllm=False)."
        )
    for name in ("tools", "environment_factories"):
        if getattr(trainer, name, None):
            raise ValueError(
                f"{type(trainer).__name__} with {name} is not supported with sequence parallelism: every rank of a group would "
                "act on them. Use a rollout_func, whose result on the group's first rank is taken, or set sp_size=1."
            )
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            f"{type(trainer.model).__name__} was sharded while it was loaded (distributed_config): transformers then reduces "
            "gradients by itself, over a mesh without sequence ranks. Load it without, and let FSDP2 or ZeRO-3 shard it."
        )
    shifts_by_name = type(trainer).compute_loss.__module__.partition(".")[0] == "transformers"
    if getattr(trainer, "label_smoother", None) is not None and shifts_by_name and trainer.is_fsdp_enabled:
        raise ValueError(
            "label_smoothing_factor under FSDP2: the Trainer knows by the name of the model's class whether to shift the "
            "labels, FSDP2 changes that name, and so they stay unshifted, with sequence parallelism or without. Use "
            "SFTTrainer with loss_type='nll', a compute_loss_func, DDP or DeepSpeed."
        )
    # Since transformers 5.2 they are counted in a method of their own, which sees replicas.
    counts = getattr(trainer.args, "include_num_input_tokens_seen", "no") not in ("no", False)
    if counts and not hasattr(trainer, "_track_num_input_tokens"):
        raise ValueError(
            "include_num_input_tokens_seen with this version of transformers counts every row once per sequence rank. "
            "Set it to 'no', or upgrade transformers."
        )
