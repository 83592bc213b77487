"""PEFT adapters: trained as one process trains them, identical on all ranks, and what is saved is what was trained."""

import pytest
import torch

from .test_trajectories import RELATIVE
from .trajectory import ENGINES, tiny_llama, train


def lora(**settings):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    # A zero B would hide A's gradient in the first step.
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return train(model=model, **settings)


def saved_adapter(folder, **settings):
    return lora(after=lambda trainer: trainer.save_model(folder), **settings)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2", "ddp"])
def test_lora(ranks, tmp_path, engine):
    from safetensors.torch import load_file

    expected = ranks(1).run(saved_adapter, str(tmp_path / "one"))[0]
    settings = {}
    if engine == "fsdp2":
        settings["fsdp_config"] = {**ENGINES["fsdp2"]["fsdp_config"], "state_dict_type": "FULL_STATE_DICT"}
    results = ranks(2).run(saved_adapter, str(tmp_path / "two"), engine=engine, sp=2, **settings)
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert torch.equal(result["parameters"], results[0]["parameters"])
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all((one[key] - two[key]).abs().max() < 1e-5 for key in one)
