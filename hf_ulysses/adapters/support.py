"""What cannot be exact and is therefore refused, with the reason and the way out. Structural where possible."""

import torch


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
        if getattr(peft_config, "is_prompt_learning", False):
            raise ValueError(
                f"PEFT adapter {adapter!r} ({type(peft_config).__name__}) puts virtual tokens in front of every row, "
                "which would land in front of every shard. Use LoRA, or train without sequence parallelism."
            )


# Of TRL's trainers, those whose loss splits over shards; the others need whole rows, or build their model inputs from
# other keys. By name, because their batches are only known when training starts; everybody's own trainers meet the
# start-up check and `shard`'s refusals. BaseTrainer is the common base class, which computes no loss.
_TRL_TRAINERS = ("SFTTrainer", "BaseTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")


def check_trainer(trainer, counts_input_tokens: bool) -> None:
    """Refuse a trainer whose loss cannot be computed from shards. Raises `ValueError`; no communication."""
    for cls in type(trainer).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "trl" and cls.__name__.endswith("Trainer") and not cls.__name__.startswith("_"):
            if cls.__name__ not in _TRL_TRAINERS:
                raise ValueError(
                    f"{cls.__name__} is not supported with sequence parallelism: its loss needs whole rows. Supported of "
                    "TRL: SFTTrainer. Set sp_size=1, or remove the parallelism config."
                )
        if cls.__name__ == "Seq2SeqTrainer" and package == "transformers":
            raise ValueError(
                "Seq2SeqTrainer is not supported with sequence parallelism: it generates from whole rows in evaluation."
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
    if not counts_input_tokens and getattr(trainer.args, "include_num_input_tokens_seen", "no") not in ("no", False):
        raise ValueError(
            "include_num_input_tokens_seen with this version of transformers counts every row once per sequence rank. "
            "Set it to 'no', or upgrade transformers."
        )
