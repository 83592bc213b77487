"""The Accelerate YAML: written for a layout, read with errors of one line. `plan`, `config`, `check`, `verify`, `bench` share it."""

from dataclasses import fields
from pathlib import Path

import yaml

from ..memory import Settings

PREFIX = "parallelism_config_"


def document_of(setup, mixed_precision="bf16") -> dict:
    """What `configs/*.yaml` have, for a `Setup` (plan.py)."""
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(setup.engine, "DEEPSPEED"),
        "num_machines": -(-setup.num_gpus // setup.gpus_per_node),
        "num_processes": setup.num_gpus,
        "mixed_precision": mixed_precision,
    }
    if setup.engine == "fsdp2":
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": setup.offload_params or setup.offload_optimizer,
        }
    elif setup.engine != "ddp":
        block = document["deepspeed_config"] = {"zero_stage": int(setup.engine[-1])}
        if setup.offload_optimizer:
            block["offload_optimizer_device"] = "cpu"
        if setup.offload_params:
            block["offload_param_device"] = "cpu"
        if setup.engine == "zero3":
            block |= {"zero3_init_flag": True, "zero3_save_16bit_model": True}
    return with_sp(document, setup.step.sp_size, setup.step.memory)


def with_sp(document, sp_size, memory=None) -> dict:
    """A copy of an Accelerate YAML's content for another sp_size, 1 for none: all other ranks are data-parallel."""
    copy = {key: value for key, value in document.items() if key != "parallelism_config"}
    if sp_size == 1 and memory in (None, Settings()):
        return copy
    engine, ranks = document.get("distributed_type"), document.get("num_processes", 1)
    before = document.get("parallelism_config") or {}
    block = {key: value for key, value in before.items() if not key.startswith(PREFIX + "dp_") and value is not None}
    block |= {PREFIX + "sp_size": sp_size, PREFIX + "sp_backend": "deepspeed" if engine == "DEEPSPEED" else "torch"}
    if ranks // sp_size > 1:
        block[PREFIX + ("dp_replicate_size" if engine == "MULTI_GPU" else "dp_shard_size")] = ranks // sp_size
    for setting in fields(Settings):
        value = getattr(memory, setting.name, setting.default)
        if value != setting.default:
            block[f"{PREFIX}sp_{setting.name}"] = value
    return {**copy, "parallelism_config": block}


def write(document, path, why):
    header = "".join(f"# {line}\n" for line in why.splitlines())
    Path(path).write_text(header + yaml.safe_dump(document, sort_keys=False))


def read(path) -> dict:
    """Raises `ValueError` for what is no Accelerate YAML."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not an Accelerate YAML: it has no keys.")
    return document
