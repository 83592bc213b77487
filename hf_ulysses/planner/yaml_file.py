"""The Accelerate YAML: written for a layout, read with errors of one line. `plan --write`, `config`, `verify` and `bench` share it."""

from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from ..memory import Settings
from .states import ENGINES

PREFIX = "parallelism_config_"


@dataclass(frozen=True)
class Layout:
    """What the file says.

    Raises:
        ValueError: an unknown engine, or an sp_size that does not divide the GPUs.
    """

    num_gpus: int
    sp_size: int
    engine: str = "zero3"
    offload_optimizer: bool = False
    offload_params: bool = False
    gpus_per_node: int = 8
    mixed_precision: str = "bf16"
    memory: Settings = field(default_factory=Settings)

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"The engine must be one of {', '.join(ENGINES)}, not {self.engine!r}.")
        if self.sp_size < 1 or self.num_gpus % self.sp_size:
            valid = [n for n in range(1, self.num_gpus + 1) if self.num_gpus % n == 0]
            raise ValueError(f"sp_size={self.sp_size} does not divide {self.num_gpus} GPUs. Choose it from {valid}.")

    def document(self) -> dict:
        """As `configs/*.yaml` have it."""
        kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}
        document = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": kinds.get(self.engine, "DEEPSPEED"),
            "num_machines": -(-self.num_gpus // self.gpus_per_node),
            "num_processes": self.num_gpus,
            "mixed_precision": self.mixed_precision,
        }
        if self.engine == "fsdp2":
            document["fsdp_config"] = {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_offload_params": self.offload_params or self.offload_optimizer,
            }
        elif self.engine != "ddp":
            document["deepspeed_config"] = self._deepspeed()
        return with_sp(document, self.sp_size, self.memory)

    def _deepspeed(self):
        stage = int(self.engine[-1])
        document = {"zero_stage": stage}
        if self.offload_optimizer:
            document["offload_optimizer_device"] = "cpu"
        if self.offload_params:
            document["offload_param_device"] = "cpu"
        return document | ({"zero3_init_flag": True, "zero3_save_16bit_model": True} if stage == 3 else {})

    def write(self, path, why: str) -> None:
        write(self.document(), path, why)


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
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not an Accelerate YAML: it has no keys.")
    return document
