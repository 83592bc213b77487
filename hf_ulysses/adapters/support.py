"""What cannot be exact and is therefore refused, with the reason and the way out. Structural where possible."""

import torch


# Of PEFT's adapters those that compute something per token outside of the decoder, and add it in its layers. What others
# do in a layer depends on each position alone, or on the row's number in the batch (`adapter_names`, `task_ids`).
_OF_THE_WHOLE_ROW = ("XLoraConfig", "ShadowConfig")


def check_model(model, sp_size: int) -> None:
    """Refuse a model that cannot be trained exactly over `sp_size` sequence ranks. Raises `ValueError`; no communication."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model: sequence parallelism supports decoder-only models. Train it without."
        )
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Configurations whose layers differ have no such number, and say so; then each layer's exchange checks its own.
    try:
        num_heads = getattr(text_config, "num_attention_heads", None)
    except RuntimeError:
        num_heads = None
    if isinstance(num_heads, int) and sp_size > num_heads:
        raise ValueError(
            f"sp_size={sp_size} exceeds num_attention_heads={num_heads} ({name}): some ranks would have no head to "
            f"compute. Choose sp_size from 1 to {num_heads} "
            f"(even loads: {[n for n in range(1, num_heads + 1) if num_heads % n == 0]})."
        )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"{name} was loaded with a device_map over {sorted(devices)}: one rank must hold its layers on one device. "
            "Load it without device_map; ZeRO-3 or FSDP2 shard the parameters."
        )
    if getattr(text_config, "_attn_implementation", None) == "ulysses":
        raise ValueError(
            f"{name} is already split along the sequence by DeepSpeed's UlyssesSPAttentionHF. Use one of the two: do "
            "not call UlyssesSPAttentionHF.register_with_transformers with hf_ulysses."
        )
    if getattr(model, "quantization_method", None) == "bitsandbytes" and not torch.accelerator.is_available():
        raise ValueError(
            f"{name} is quantized by bitsandbytes, which on CPU packs the weights anew whenever the model is evaluated, and "
            "rounds them each time: the start-up check alone would change the model. Train it on a GPU, or unquantized."
        )
    for adapter, peft_config in (getattr(model, "peft_config", None) or {}).items():
        kind, why = type(peft_config).__name__, None
        if getattr(peft_config, "is_prompt_learning", False):
            why = "puts virtual tokens in front of every row, which would land in front of every shard"
        elif getattr(peft_config, "alora_invocation_tokens", None) or kind in _OF_THE_WHOLE_ROW:
            why = "hands its layers what it has computed from the whole row's tokens, of which each of them has a shard"
        if why is not None:
            raise ValueError(f"PEFT adapter {adapter!r} ({kind}) {why}. Use LoRA, or train without sequence parallelism.")


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
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        if getattr(args, name, False):
            raise ValueError(f"{name}=True is not supported with sequence parallelism: set it to False.")


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
