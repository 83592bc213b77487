"""Tiny models of the families whose attention differs, and the batches they are fed.

TINY: Llama-style, 2 layers, hidden 64, 4 query / 2 KV heads, head size 16, vocab 128. The models run in float64: what
remains between a sharded and a plain run is the float32 that modelling files insist on (norms, rotary tables, softmax),
where a different order of additions elsewhere can flip a last bit.
"""

import inspect

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    attention_dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

# What is special about each one is in its name's comment; sliding windows and chunks are shorter than the rows.
FAMILIES = {
    "llama": {},
    "mistral": dict(sliding_window=8),
    "qwen3": dict(use_sliding_window=True, sliding_window=8, layer_types=LAYERS),  # norms on query and key
    "gemma2": dict(sliding_window=8, layer_types=LAYERS, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "gemma3_text": dict(sliding_window=8, layer_types=LAYERS, query_pre_attn_scalar=16),  # two rotary embeddings
    "gpt_oss": dict(sliding_window=8, layer_types=LAYERS, rope_parameters=ROPE, **EXPERTS),  # sinks
    "mixtral": EXPERTS,
    "deepseek_v3": dict(  # MLA: query and key of size 24, value of size 16
        head_dim=8,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        rope_parameters=ROPE,
    ),
    "llama4_text": dict(  # chunks
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_temperature_tuning=False,
    ),
    "gemma4_text": dict(  # head size 16 in sliding layers, 32 in the others
        sliding_window=8,
        layer_types=LAYERS,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
    ),
}


def config_of(family, attn="sdpa", **changes):
    config = CONFIG_MAPPING[family](**{**TINY, **FAMILIES[family], **changes})
    config._attn_implementation = attn
    config._experts_implementation = "eager"  # The grouped matrix product has no float64.
    return config


def build(family="llama", attn="sdpa", dtype=torch.float64, **changes):
    """A tiny model in training mode, with the same random parameters on every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, "eager", **changes)).to(dtype).train()
    # Set afterwards: loading checks that kernels are installed, and some tests bring their own.
    model.config._attn_implementation = attn
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than a real initialisation, so that attention is far from uniform and biases and sinks matter.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def build_mask(build, config, inputs_embeds, attention_mask, position_ids, cache=None, **more):
    """Call a `create_*_mask` function of transformers, whatever this version calls its arguments."""
    names = inspect.signature(build).parameters
    places = torch.arange(inputs_embeds.shape[1])
    given = dict(inputs_embeds=inputs_embeds, input_embeds=inputs_embeds, position_ids=position_ids)
    given.update(cache=cache, past_key_values=cache, cache_position=places)
    given = {name: value for name, value in given.items() if name in names}
    if "cache" in given:
        # transformers 5.25 shows the old name in its signature, and warns who uses both.
        given.pop("past_key_values", None)
    return build(config=config, attention_mask=attention_mask, **given, **more)


def checkpoint(model, reentrant=False):
    """Recompute every layer's activations in backward, whatever this version of transformers calls it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def batch_of(batch_size=1, length=33, seed=1, **more):
    """Full rows, every token a target."""
    tokens = torch.randint(3, 128, (batch_size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def padded(batch, *, real, side):
    """Hide tokens at one side of each row: a mask, no targets and padding tokens there. `real`: real tokens per row."""
    length = batch["input_ids"].shape[1]
    index = torch.arange(length)
    keep = torch.stack([index < n if side == "right" else index >= length - n for n in real])
    return {
        **batch,
        "input_ids": batch["input_ids"].where(keep, 0),
        "labels": batch["labels"].where(keep, -100),
        "attention_mask": keep.long(),
    }
