"""Models that cannot be exact and are therefore refused, with the reason and the way out. By structure where possible."""

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
