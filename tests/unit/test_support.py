"""Models that are refused, each by what it is, with the way out."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, T5Config

from hf_ulysses.adapters.support import check_trainer
from hf_ulysses.core.models import check_model

from ..models import config_of


def model(config=None, **attributes):
    return SimpleNamespace(config=config or config_of("llama"), **attributes)


PROMPT = SimpleNamespace(is_prompt_learning=True)
LORA = SimpleNamespace(is_prompt_learning=False)

REFUSED = {
    "more ranks than heads": (model(), 8, r"sp_size=8 exceeds num_attention_heads=4.*from 1 to 4.*\[1, 2, 4\]"),
    "encoder-decoder": (model(T5Config()), 2, "encoder-decoder"),
    "two devices": (model(hf_device_map={"a": 0, "b": 1}), 2, r"device_map over \['0', '1'\].*without device_map"),
    "another splitter": (model(LlamaConfig(attn_implementation="ulysses")), 2, "already split.*UlyssesSPAttentionHF"),
    "prompt tuning": (model(peft_config={"default": PROMPT}), 2, "'default'.*virtual tokens.*LoRA"),
}
ACCEPTED = {
    "heads that sp does not divide": (model(), 3),
    "as many ranks as heads": (model(), 4),
    "one device": (model(hf_device_map={"": "cpu"}), 2),
    "LoRA": (model(peft_config={"default": LORA}), 2),
    "no config": (SimpleNamespace(), 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    refused, size, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_model(refused, size)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    check_model(*ACCEPTED[name])


@pytest.mark.parametrize("gpu", [False, True])
def test_quantized_weights_need_a_gpu(monkeypatch, gpu):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: gpu)
    quantized = model(quantization_method="bitsandbytes")
    if gpu:
        return check_model(quantized, 2)
    with pytest.raises(ValueError, match="bitsandbytes.*Train it on a GPU"):
        check_model(quantized, 2)


@pytest.mark.parametrize("name", ["tools", "environment_factories"])
def test_trainers_whose_rollouts_act_on_something(name):
    with pytest.raises(ValueError, match=f"{name}.*rollout_func"):
        check_trainer(SimpleNamespace(args=SimpleNamespace(), **{name: [len]}))
