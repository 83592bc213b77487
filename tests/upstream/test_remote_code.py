"""A model that no library has seen: its code lies beside its weights and is loaded with trust_remote_code=True."""

import json
import os
from pathlib import Path

import pytest

from ..one_architecture import CASES, try_model

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class RemoteConfig(PreTrainedConfig):
    model_type = "remote"

    def __init__(self, vocab_size=128, width=64, depth=2, heads=12, **variant):
        self.vocab_size, self.width, self.depth, self.heads = vocab_size, heads * 8, depth, heads
        self.mixer, self.attention, self.head = (variant.pop(name, "") for name in ("mixer", "attention", "head"))
        super().__init__(**variant)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


class RemoteAttention(nn.Module):
    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.projections = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, hidden, mask, **kwargs):
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in self.projections[:3]
        )
        if self.config.attention == "own":
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            out, _ = attend(self, query, key, value, mask, scaling=8**-0.5, **kwargs)
        return self.projections[3](out.flatten(2))


class RemoteMixer(nn.Conv1d):
    def forward(self, hidden):
        return super().forward(nn.functional.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)


class RemoteLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(config.width), RemoteAttention(config)
        mixer = RemoteMixer if config.mixer == "module" else nn.Conv1d
        self.mixer = mixer(config.width, config.width, 3, groups=config.width) if config.mixer else None
        self.mlp = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), nn.Linear(config.width, config.width))

    def forward(self, hidden, mask, **kwargs):
        hidden = hidden + self.attention(self.norm(hidden), mask, **kwargs)
        if isinstance(self.mixer, RemoteMixer):
            hidden = hidden + self.mixer(hidden)
        elif self.mixer is not None:
            hidden = hidden + self.mixer(nn.functional.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)
        return hidden + self.mlp(hidden)


class RemotePreTrainedModel(PreTrainedModel):
    config_class = RemoteConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_attention_backend = True


class RemoteModel(RemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tokens, self.places = nn.Embedding(config.vocab_size, config.width), nn.Embedding(256, config.width)
        self.layers = nn.ModuleList(RemoteLayer(config) for _ in range(config.depth))
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids=position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, position_ids=position_ids, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden)


class RemoteForCausalLM(RemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.lm_head = RemoteModel(config), nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, attention_mask, position_ids, **kwargs).last_hidden_state)
        if labels is None:
            return CausalLMOutput(logits=logits)
        if self.config.head == "shifts":
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
"""
AUTO = {"AutoConfig": "modeling_remote.RemoteConfig", "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM"}


def load(folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

    # Each rank copies the code to a place of its own.
    dynamic_module_utils.HF_MODULES_CACHE = f"{Path(folder).parent}/modules{os.environ.get('RANK', '')}"
    if not (Path(folder) / "model.safetensors").exists():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).train()


def try_remote(folder):
    return try_model(load(folder))


# Configuration -> what mixes by itself, `None` where it is refused.
VARIANTS = {
    "interface": ({}, []),
    "convolution": (dict(mixer="module"), ["mixer"]),
    # Its input has been padded by the code around it, which knows of no shards.
    "bare convolution": (dict(mixer="bare"), ["model"]),
    "own attention": (dict(attention="own"), ["attention"]),
    "shifts again": (dict(head="shifts"), []),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_remote_code(ranks, single, tmp_path, variant, size):
    configuration, mixing = VARIANTS[variant]
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_remote.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "remote", "auto_map": AUTO, **configuration}))
    single(save, str(folder))
    for found in ranks(size).run(try_remote, str(folder)):
        for case in CASES:
            assert found[case]["status"] == ("refused" if mixing is None else "exact"), found
        if mixing is not None:
            found = found["unpacked"]
            assert sorted({name.rpartition(".")[2] for name in found["gathered"]}) == mixing


def save(folder):
    load(folder)
