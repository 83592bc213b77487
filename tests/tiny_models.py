"""Any architecture that transformers can build, tiny: one set of rules over the names that configurations use.

    config = tiny_config("mixtral", heads=4, kv_heads=2)
    model = tiny_model(config)

1. A configuration's defaults say which names it has. Sizes, counts and token ids are replaced by the rules below, in
   sub-configurations too; whatever is drawn at random in a forward (dropout, jitter, layer drop) is switched off.
2. Lists with one entry per layer (`layer_types` and the like) are reduced to one layer of every combination of kinds.
3. What a model treats specially lies inside a row of `LENGTH` tokens: windows and chunks are 8. "llama+longrope" or
   "llama+dynamic" is a model whose rotary embeddings take other frequencies for rows beyond `ORIGINAL` positions, of which
   only the last shard has some.
4. `SPECIAL` holds what the rules cannot know, one line per model type.
"""

import re

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.configuration_utils import PreTrainedConfig

# Not divisible by 2 or 4, so that the last shard has padding.
LENGTH = 45
VOCAB = 128
HEAD_SIZE = 16
WINDOW = 8
# Only the last of four shards lies beyond; the last document of a packed row does not.
ORIGINAL = 40

# (pattern of names, value); the first that matches wins. `h` and `g` are the query and key/value heads.
RULES = [
    (r"(pad|bos|eos|decoder_start|sep|cls|mask|unk|eod|forced_\w+)_token_id", {"pad": 0, "bos": 1, "eos": 2}),
    (r"(vocab_size|encoder_vocab_size|decoder_vocab_size|unpadded_vocab_size|vocab_size_per_layer_input|"
     r"encoder_hash_byte_group_vocab)", VOCAB),
    (r"(output_vocab_size|audio_vocab_size|embedding_size)", None),
    (r"\w*(dropout|dropout_prob|_drop|pdrop|dropout_p|layerdrop|jitter_noise|jitter|drop_rate)", 0.0),
    (r"(num_attention_heads|n_heads?|num_heads|attention_heads|(en|de)coder_attention_heads|"
     r"num_(en|de)coder_attention_heads|swa_num_attention_heads)", lambda h, g: h),
    (r"(num_key_value_heads|num_kv_heads|swa_num_key_value_heads)", lambda h, g: g),
    (r"(hidden_size|n_embd|d_model|dim|emb_dim|word_embed_proj_dim|lru_width|attention_hidden_size|model_dim|"
     r"hidden_size_global)",
     lambda h, g: h * HEAD_SIZE),
    (r"(head_dim|d_head|swa_head_dim|attention_head_size|dim_head|kv_channels|v_head_dim|qk_nope_head_dim|d_kv)", HEAD_SIZE),
    (r"(rotary_dim|qk_rope_head_dim)", 8),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 32),
    (r"(index_n_heads|indexer_n_heads)", 4),
    (r"(index_head_dim|indexer_head_dim)", 32),
    (r"index_topk", 12),
    (r"(intermediate_size|ffn_dim|n_inner|d_inner|dff|dim_ff|(en|de)coder_ffn_dim|feed_forward_size|ffn_hidden_size|"
     r"expert_ffn_hidden_size|\w*_intermediate_size|intermediate_size_mlp|ffn_intermediate_size)", 64),
    (r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers)", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts)", 2),
    (r"(n_group|topk_group|num_expert_group)", 1),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", 1),
    (r"mamba_n_heads", lambda h, g: 2 * h),
    (r"mamba_d_ssm", lambda h, g: 2 * h * HEAD_SIZE),
    (r"output_router_logits", True),
    (r"(router_)?aux_loss_coef", 0.1),
    (r"adapter_(in_dim|input_size|out_dim)", lambda h, g: h * HEAD_SIZE),
    (r"(num_mtp_layers|num_nextn_predict_layers|num_kv_shared_layers|hidden_size_per_layer_input)", 0),
    (r"(sliding_window|attention_chunk_size|window_size|local_attention|sliding_window_size|attention_window_size|"
     r"keep_window_size|local_attention_window_len|block_size|index_block_size)", WINDOW),
    (r"(chunk_size|mamba_chunk_size)", 16),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_target_positions|model_max_length)", 256),
    (r"(mamba_d_state|ssm_state_size|state_size)", 16),
    (r"(mamba_dt_rank|time_step_rank)", 8),
    (r"(linear_key_head_dim|linear_value_head_dim|linear_head_dim|mamba_head_dim|mamba_d_head)", HEAD_SIZE),
    (r"(linear_num_key_heads)", lambda h, g: g),
    (r"(linear_num_value_heads|linear_num_heads)", lambda h, g: h),
    (r"(mamba_n_groups|n_groups)", 1),
    (r"(out_hidden_size|text_hidden_size)", lambda h, g: h * HEAD_SIZE),  # Of a vision tower.
    (r"use_cache", False),
    (r"(image_size)", 32),
    (r"depth", 2),
    (r"codebook_size", 8),
    (r"embed_dim", lambda h, g: h * HEAD_SIZE),
    (r"(patch_size)", 8),
]
_PER_LAYER = re.compile(r"(layer_types|layers_block_type|mlp_layer_types|\w*_layer_types|indexer_types|no_rope_layers|"
                        r"layer_rope_theta|num_attention_heads_per_layer)")
# Positions along time, height and width, which default configurations leave to their checkpoints.
_MROPE = r"(qwen2_vl|qwen2_5_vl|qwen2_5_omni|glm4v|glm46v|glm_ocr|glmga|paddleocr_vl|ernie4_5_vl|hunyuan_vl)\w*text"
# What the rules cannot know: sizes that must fit each other, features that are off by default.
SPECIAL = {
    "apertus1p5": dict(image_token_offset=100, audio_token_offset=108),
    "chameleon": dict(vocabulary_map={"<image>": VOCAB - 1}),
    "deepseek_ocr2_text": dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "diffusion_gemma_text": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "glm5_next_text": dict(index_topk=16, qk_rope_head_dim=0),
    "granite4_vision": dict(deepstack_layer_map=[], downsample_rate="1/2"),
    "molmo2_adapter": dict(vision_feature_layer=[1, 0]),
    "muse_spark_audio": dict(num_hidden_layers=4, hidden_sizes=(64,) * 4, depths=(1,) * 4),
    "radio": dict(video_temporal_patch_size=2),
    "udop": dict(decoder_start_token_id=0),
    "wavtokenizer_encoder": lambda h, g: dict(codebook_dim=h * HEAD_SIZE),
    "bamba": dict(attn_layer_indices=[1]),
    "bailing_hybrid": dict(layer_group_size=2),
    "dory": dict(num_hidden_layers=4, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1,
                 layer_types=["full_attention", "sliding_attention"] * 2),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
                         for kind in ("sliding_attention", "full_attention")}),
    "dbrx": lambda h, g: dict(attn_config={"kv_n_heads": g, "clip_qkv": 8.0, "rope_theta": 10000.0},
                              ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2,
                                          "hidden_size": h * HEAD_SIZE}),
    "deepseek_v2": dict(topk_group=1, n_group=1, num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
                  first_k_dense_replace=1, layer_types=["sliding_attention", "full_attention"]),
    "gemma4_assistant": lambda h, g: dict(text_config=dict(
        model_type="gemma4_text", vocab_size=VOCAB, hidden_size=h * HEAD_SIZE, intermediate_size=64, num_attention_heads=h,
        num_key_value_heads=g, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2)),
    "flint": dict(mlp_only_layers=[0]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "jetmoe": dict(num_experts_per_tok=2),
    "mamba2": lambda h, g: dict(num_heads=2 * h, head_dim=HEAD_SIZE),
    "mpt": dict(max_seq_len=256),
    "qwen4_exp_text": dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=16,
                           indexer_compress_ratio=4),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(is_decoder=True, axial_pos_embds=False),
    "xlstm": lambda h, g: dict(num_heads=h, qk_dim_factor=1.0),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
    "zamba": lambda h, g: dict(attention_hidden_size=2 * h * HEAD_SIZE, attention_head_dim=2 * HEAD_SIZE,
                               layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
                               num_hidden_layers=4),
    "zamba2": lambda h, g: dict(attention_hidden_size=2 * h * HEAD_SIZE, attention_head_dim=2 * HEAD_SIZE,
                                layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
                                num_hidden_layers=4, n_mamba_heads=2 * h, mamba_headdim=HEAD_SIZE, mamba_ngroups=1),
}



def tiny_config(model_type: str, heads: int = 4, kv_heads: int = 2):
    """The tiny configuration of a model type of transformers' auto mapping, with other rotary embeddings after a "+"."""
    model_type, _, rope_type = model_type.partition("+")
    config = _shrink(CONFIG_MAPPING[model_type], heads, kv_heads)
    if rope_type:
        set_rope(config.get_text_config(), rope_type)
    return config


def set_rope(config, rope_type, original=ORIGINAL):
    """Give a configuration rotary embeddings that depend on the longest row: "dynamic" or "longrope"."""
    ropes = config.rope_parameters
    by_layer = {kind: rope for kind, rope in ropes.items() if isinstance(rope, dict)}
    for kind, rope in (by_layer or {None: ropes}).items():
        names = ("global_head_dim",) if kind == "full_attention" else ()
        sizes = (_size(config, name) for name in (*names, "qk_rope_head_dim", "head_dim"))
        size = next((size for size in sizes if size), HEAD_SIZE)
        pairs = int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2
        rope.update(rope_type=rope_type, factor=4.0, original_max_position_embeddings=original)
        rope.update(short_mscale=1.0, long_mscale=1.2)  # One modelling file scales by the longest position itself.
        if rope_type == "longrope":
            rope.update(short_factor=[1.0] * pairs, long_factor=[1.0 + 0.5 * i for i in range(pairs)])
    # Dynamic embeddings are stretched beyond this many, longrope's attention is scaled by what it exceeds.
    config.max_position_embeddings = original if rope_type == "dynamic" else 4 * original


def _size(config, name):
    try:
        return getattr(config, name, None)
    except RuntimeError:  # Layers differ in it.
        return None


def _shrink(cls, heads, kv_heads, given=None):
    try:
        default = given if given is not None else cls()
    except Exception:
        default = cls(**_special(cls.model_type, heads, kv_heads))
    values = dict(vars(default))
    changes = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrink(type(value), heads, kv_heads, value)
        elif (rule := _rule(name, value, heads, kv_heads)) is not _KEEP:
            changes[name] = rule
    if values.get("kv_lora_rank") is not None:
        for name in ("num_key_value_heads", "swa_num_key_value_heads"):
            if name in changes:
                changes[name] = heads
    if "qk_rope_head_dim" in changes and "head_dim" in changes:
        changes["head_dim"] = changes["qk_rope_head_dim"]
    _reduce_layers(values, changes)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and (rope.get("mrope_section") or re.fullmatch(_MROPE, cls.model_type)):
        size = changes.get("qk_rope_head_dim") or changes.get("head_dim") or HEAD_SIZE
        pairs = int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2
        changes["rope_parameters"] = {**rope, "mrope_section": [pairs // 3, pairs // 3, pairs - 2 * (pairs // 3)]}
    changes.update(_special(cls.model_type, heads, kv_heads))
    _fix_tokens(values, changes)
    return cls(**changes)


_KEEP = object()
# `None` here means "derived from others" or "none in this checkpoint": set all the same.
_ABSENT = ("head_dim", "sliding_window", "n_routed_experts", "num_key_value_heads", "num_kv_heads")


def _rule(name, value, heads, kv_heads):
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            if isinstance(value, (list, tuple, dict, str)) or value is None and name not in _ABSENT:
                return _KEEP
            if isinstance(rule, dict):
                return rule.get(name.partition("_")[0], 2) if isinstance(value, int) else _KEEP
            if rule is None:
                return _KEEP if value is None else heads * HEAD_SIZE
            if rule == 0.0 and type(value) in (int, bool):
                return type(value)(0)
            return rule(heads, kv_heads) if callable(rule) else rule
    return _KEEP


def _reduce_layers(values, changes):
    """One layer of every combination of kinds, at least two."""
    lists = {name: list(value) for name, value in values.items()
             if isinstance(value, (list, tuple)) and _PER_LAYER.fullmatch(name) and len(value) > 1}
    if not lists:
        return
    length = max(len(value) for value in lists.values())
    lists = {name: value for name, value in lists.items() if len(value) == length}
    kinds = dict.fromkeys(zip(*lists.values()))
    kinds = list(kinds)[:6]
    if len(kinds) == 1:
        kinds = kinds * 2
    for index, name in enumerate(lists):
        changes[name] = [kind[index] for kind in kinds]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if name in values:
            changes[name] = len(kinds)


def _fix_tokens(values, changes):
    """Special tokens of other kinds (images, ...) lie at the end of the vocabulary, which no row uses."""
    last = VOCAB - 1
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool) and name not in changes:
            if re.search(r"_token_(id|index)$", name) and value >= VOCAB:
                changes[name] = last
                last -= 1


def _special(model_type, heads, kv_heads):
    special = SPECIAL.get(model_type, {})
    return special(heads, kv_heads) if callable(special) else special


def tiny_model(config, seed: int = 0, images: bool = False):
    """The model, float32, in training mode, with the same random parameters on every call; with its tower for `images`."""
    torch.manual_seed(seed)
    text = not images and type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
    cls = auto._model_mapping[type(config)]
    if hasattr(cls, "config_class") and not isinstance(config, cls.config_class):
        # Auto's mapping names the whole model's configuration for its decoder.
        parts = [part for part in vars(config).values() if isinstance(part, cls.config_class)]
        model = cls._from_config(*parts) if parts else auto.from_config(config)
    else:
        model = auto.from_config(config, attn_implementation=None)
    model = model.float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than a real initialisation, so that attention is far from uniform and biases and sinks matter.
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
