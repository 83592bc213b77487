"""`hf-ulysses check`: every planted mistake is found, with its mend; a right configuration has no error."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from hf_ulysses.planner.check import ERROR, WARNING, Case, Machine, check
from hf_ulysses.planner.plan import Setup
from hf_ulysses.planner.step import Step
from hf_ulysses.planner.yaml_file import document_of, read, with_sp, write
from hf_ulysses.memory import Settings

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = Machine(8, (9, 0), frozenset({"deepspeed", "kernels"}), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "GPU0 NV18")
MODEL = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)


def setup(sp_size, engine="zero3", memory=Settings(), **more):
    return Setup(8, Step(0, sp_size, memory=memory), engine=engine, **more)


def zero3(**block):
    document = document_of(setup(8))
    return {**document, "parallelism_config": {**document["parallelism_config"], **{f"parallelism_config_{k}": v for k, v in block.items()}}}


def fsdp(**more):
    return {**document_of(setup(8, "fsdp2")), **more}


def backend(document, name):
    return {**document, "parallelism_config": {**document["parallelism_config"], "parallelism_config_sp_backend": name}}


PLANTED = {
    "mesh": (zero3(dp_shard_size=2), {}, "dp_shard_size=2 x sp_size=8 = 16, but there are 8 processes", "dp_shard_size=1"),
    "sp does not divide": (zero3(sp_size=3), {}, "there are 8 processes", "choose it from [1, 2, 4, 8]"),
    "more ranks than heads": (zero3(), dict(config=LlamaConfig(num_attention_heads=4)), "exceeds the 4 query heads", "[1, 2, 4]"),
    "backend": (backend(fsdp(), "deepspeed"), {}, "sp_backend='deepspeed' was asked for, but the engine is FSDP", "sp_backend='torch'"),
    "FSDP 1": (fsdp(fsdp_config={"fsdp_version": 1}), {}, "needs FSDP2", "fsdp_version: 2"),
    "misspelt key": (zero3(sp_tiled_mpl=True), {}, "sp_tiled_mpl is not known", "docs/memory.md"),
    "tensor parallelism": (zero3(tp_size=2), {}, "sp_size=8 together with tp_size=2", "tp_size=1"),
    "parameters offloaded under ZeRO-2": (
        {**zero3(), "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}}, {}, "needs ZeRO-3", "zero_stage 3",
    ),
    "head chunks": (zero3(sp_head_chunks=7), dict(config=MODEL), "head_chunks=7", ""),
    "kernel that is not installed": (zero3(), dict(attention="flash_attention_2", machine=Machine(8, (9, 0), frozenset({"deepspeed"}))), "flash_attention_2 is asked for", "sdpa"),
    "kernel of another GPU": (zero3(), dict(attention="flash_attention_4"), "capability (9, 0)", "flash_attention_3"),
    "too many processes": (zero3(), dict(machine=Machine(4, (9, 0), H100.packages)), "but 4 GPUs", "num_processes: 4"),
    "fixed length without one": (zero3(sp_seq_length_is_variable=False), {}, "`sp_seq_length` must be provided", ""),
    "no DeepSpeed": (zero3(), dict(machine=Machine(8, (9, 0))), "not installed", "pip install"),
}  # fmt: skip
NOTED = {
    "allocator": (zero3(), dict(machine=Machine(8, (9, 0), H100.packages, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})), "expandable_segments off", "expandable_segments:True"),
    "rows longer than the model": (zero3(), dict(config=MODEL, length=100_000), "made for 8192", "rope"),
    "eager": (zero3(), dict(attention="eager"), "square", "sdpa"),
    "groups span machines": ({**zero3(), "num_machines": 2}, {}, "spans machines of 4", "[1, 2, 4]"),
    "no NVLink": (zero3(), dict(machine=Machine(8, (9, 0), H100.packages, {}, "NVIDIA GPU0 PHB SYS")), "NVLink", "fewer"),
    "uneven heads": (zero3(), dict(config=LlamaConfig(num_attention_heads=12, hidden_size=768)), "12 query heads", "[1, 2, 4]"),
    "no SP": (with_sp(zero3(), 1), {}, "no sequence parallelism", "sp_size"),
}  # fmt: skip


def lines(document, machine=H100, **more):
    return check(Case(document, machine, **more))


@pytest.mark.parametrize("name", [*PLANTED, *NOTED])
def test_planted_mistakes_are_found_with_their_mend(name):
    document, more, what, mend = (PLANTED | NOTED)[name]
    level = ERROR if name in PLANTED else WARNING
    found = [line for line in lines(document, **more) if line.level == level and what in line.what + line.mend]
    assert len(found) == 1 and mend in found[0].what + found[0].mend


JSONS = {
    "precision": ({"fp16": {"enabled": True}}, "fp16", 'or "auto"'),
    "batch size": (dict(train_batch_size=8, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1), "train_batch_size 8", '"auto"'),
    "DeepSpeed's own": ({"sequence_parallel_size": 8}, "sequence_parallel_size", "Remove it"),
}


@pytest.mark.parametrize("name", JSONS)
def test_mistakes_in_a_deepspeed_json(tmp_path, name):
    options, what, mend = JSONS[name]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **options}))
    document = {**zero3(), "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    found = [line for line in lines(document, folder=tmp_path) if line.level == ERROR]
    assert len(found) == 1 and what in found[0].what and mend in found[0].mend


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_our_own_configurations_have_no_error(file):
    assert not [line for line in lines(read(file), config=MODEL, attention="flash_attention_3") if line.level == ERROR]


WRITTEN = {
    "zero3": setup(8),
    "zero3_2d": setup(4),
    "zero2_offload": setup(8, "zero2", offload_optimizer=True),
    "zero3_offload": setup(8, offload_optimizer=True, offload_params=True),
    "fsdp2": setup(8, "fsdp2"),
    "fsdp2_offload": setup(8, "fsdp2", offload_params=True),
    "ddp": setup(4, "ddp"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_we_ship(tmp_path, name):
    write(document_of(WRITTEN[name]), tmp_path / "c.yaml", "why")
    assert read(tmp_path / "c.yaml") == yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def test_switches_are_written():
    block = document_of(setup(8, memory=Settings(memory="max", head_chunks=4)))["parallelism_config"]
    assert block["parallelism_config_sp_memory"] == "max" and block["parallelism_config_sp_head_chunks"] == 4
