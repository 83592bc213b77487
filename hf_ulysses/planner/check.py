"""The machine and the configuration before launch: one line per thing looked at, with the mend where it is wrong.

Every function of `CHECKS` looks at one thing and yields lines; nothing is launched and no weights are read.
"""

import importlib.util
import json
import os
import subprocess
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from ..door import check_versions
from ..memory import Settings
from .yaml_file import PREFIX

OK, WARNING, ERROR = "ok", "warning", "error"
_ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP2", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "NO": "DDP"}
_ACCELERATES = {"sp_size", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"}
_ACCELERATES |= {"dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy"}


@dataclass(frozen=True)
class Line:
    level: str
    what: str
    mend: str = ""


@dataclass(frozen=True)
class Machine:
    """What there is: made by `this_machine`, or by hand to check for another one."""

    gpus: int = 0
    capability: tuple | None = None
    packages: frozenset = frozenset()
    environment: dict = field(default_factory=dict)
    topology: str = ""


def this_machine() -> Machine:
    gpus = torch.cuda.device_count()
    known = ("flash_attn", "flash_attn_3", "flash_attn_interface", "flash_attn_4", "kernels", "deepspeed", "trl", "liger_kernel")
    packages = frozenset(name for name in known if importlib.util.find_spec(name))
    topology = ""
    if gpus > 1:
        try:
            topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            topology = ""
    return Machine(gpus, torch.cuda.get_device_capability() if gpus else None, packages, dict(os.environ), topology)


class Case:
    """One configuration on one machine. `config`: the model's, if it is known."""

    def __init__(self, document, machine, config=None, attention=None, length=None, folder="."):
        self.document, self.machine, self.config = document, machine, config
        self.length, self.folder = length, Path(folder)
        block = document.get("parallelism_config") or {}
        self.block = {key.removeprefix(PREFIX): value for key, value in block.items() if value is not None}
        self.attention = attention or self.block.get("sp_attn_implementation")
        self.sp = int(self.block.get("sp_size", 1))
        self.ranks = int(document.get("num_processes") or 1)
        self.engine = _ENGINES.get(str(document.get("distributed_type", "NO")))
        self.text = config.get_text_config() if config is not None else None


def check(case: Case) -> list[Line]:
    """All lines, in the order of `CHECKS`."""
    return [line for look in CHECKS for line in look(case)]


def _versions(case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_versions()
        except ImportError as error:
            yield Line(ERROR, "versions", str(error))
            return
    for warning in caught:
        yield Line(WARNING, "versions", str(warning.message))
    if not caught:
        yield Line(OK, "versions are among the tested ones")
    if case.engine == "DeepSpeed" and "deepspeed" not in case.machine.packages:
        yield Line(ERROR, "DeepSpeed is configured and not installed", "pip install 'hf_ulysses[deepspeed]'")


def _asked(case):
    if case.sp > 1:
        yield Line(OK, f"sp_size={case.sp} on {case.ranks} processes, {case.engine}")
    else:
        yield Line(WARNING, "no sequence parallelism is asked for", f"set {PREFIX}sp_size in a parallelism_config block")
    unknown = sorted(set(case.block) - _ACCELERATES - {f"sp_{setting.name}" for setting in fields(Settings)})
    for name in unknown:
        yield Line(ERROR, f"{PREFIX}{name} is not known and would be ignored", f"known: {', '.join(PREFIX + n for n in sorted(_ACCELERATES))}, and the switches of docs/memory.md")


def _mesh(case):
    shard, replicate = int(case.block.get("dp_shard_size", 1)), int(case.block.get("dp_replicate_size", 1))
    sizes = f"dp_replicate {replicate} x dp_shard {shard} x sp {case.sp} = {replicate * shard * case.sp}"
    if case.sp > 1 and replicate * shard * case.sp != case.ranks:
        if case.ranks % case.sp:
            mend = f"choose sp_size from {[n for n in range(1, case.ranks + 1) if case.ranks % n == 0]}"
        else:
            mend = f"set {PREFIX}dp_shard_size: {case.ranks // case.sp // (replicate if case.ranks // case.sp % replicate == 0 else 1)}"
        yield Line(ERROR, f"{sizes}, but num_processes is {case.ranks}", mend)
    for name in ("tp_size", "cp_size"):
        if case.sp > 1 and int(case.block.get(name, 1)) > 1:
            yield Line(ERROR, f"{name}={case.block[name]} together with sp_size={case.sp}", f"set {PREFIX}{name}: 1")
    per_machine = case.ranks // int(case.document.get("num_machines") or 1)
    if case.machine.gpus and per_machine > case.machine.gpus:
        yield Line(ERROR, f"{per_machine} processes per machine, but {case.machine.gpus} GPUs", f"set num_processes: {case.machine.gpus}")
    if case.sp > 1 and per_machine % case.sp:
        valid = [n for n in range(1, per_machine + 1) if per_machine % n == 0]
        yield Line(WARNING, f"sp_size={case.sp} spans machines of {per_machine} GPUs: every exchange crosses the network", f"choose it from {valid}")
    elif case.sp > 1 and case.machine.topology and "NV" not in case.machine.topology.replace("NVIDIA", ""):
        yield Line(WARNING, "the GPUs of a sequence-parallel group are not joined by NVLink: exchanges cross PCIe", "use fewer ranks per row")


def _engine(case):
    backend = case.block.get("sp_backend", "deepspeed")
    if case.sp > 1 and case.engine is None:
        yield Line(ERROR, f"distributed_type {case.document.get('distributed_type')} is not supported", "DEEPSPEED, FSDP or MULTI_GPU")
    if case.sp > 1 and backend not in ("deepspeed", "torch"):
        yield Line(ERROR, f"sp_backend {backend!r} is not known", "deepspeed under DeepSpeed, torch under FSDP2 and DDP")
    if case.sp > 1 and backend == "deepspeed" and case.engine in ("FSDP2", "DDP"):
        yield Line(ERROR, f"sp_backend deepspeed under {case.engine}", f"set {PREFIX}sp_backend: torch")
    if case.engine == "FSDP2" and int((case.document.get("fsdp_config") or {}).get("fsdp_version", 1)) != 2:
        yield Line(ERROR, "FSDP of version 1 has no sequence parallelism", "set fsdp_version: 2")


def _deepspeed(case):
    block = case.document.get("deepspeed_config") or {}
    stage = int(block.get("zero_stage", 3)) if block else None
    if block.get("offload_param_device", "none") != "none" and stage != 3:
        yield Line(ERROR, f"offload_param_device under ZeRO-{stage}", "only ZeRO-3 offloads parameters: zero_stage: 3, or remove it")
    file = block.get("deepspeed_config_file")
    if file is None:
        return
    path = case.folder / file
    try:
        options = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield Line(ERROR, f"deepspeed_config_file {file} cannot be read", str(error))
        return
    for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"):
        if name in block:
            yield Line(ERROR, f"{name} stands beside deepspeed_config_file, which accelerate refuses", f"say it in {file} only")
    for name in ("sequence_parallel_size", "data_parallel_size"):
        if name in options:
            yield Line(ERROR, f"{file}: {name} switches on DeepSpeed's own sequence parallelism", f"remove it; {PREFIX}sp_size says it")
    for name in ("fp16", "bf16"):
        wanted = str(case.document.get("mixed_precision", "no"))
        if options.get(name, {}).get("enabled") is True and wanted != name:
            yield Line(ERROR, f"{file} enables {name}, mixed_precision is {wanted}", f'set mixed_precision: {name}, or "auto" in {file}')
    numbers = [options.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    rows = case.ranks // case.sp
    if all(isinstance(number, int) for number in numbers) and numbers[0] != numbers[1] * numbers[2] * rows:
        yield Line(ERROR, f"{file}: train_batch_size {numbers[0]} is not {numbers[1]} x {numbers[2]} x {rows} rows at a time", 'set "auto"')


def _heads(case):
    heads = getattr(case.text, "num_attention_heads", None)
    if not isinstance(heads, int) or case.sp == 1:
        return
    even = [n for n in range(1, heads + 1) if heads % n == 0 and case.ranks % n == 0]
    if case.sp > heads:
        yield Line(ERROR, f"sp_size={case.sp} exceeds the {heads} query heads", f"choose it from {even}")
    elif heads % case.sp:
        yield Line(WARNING, f"{heads} query heads over sp_size={case.sp}: some ranks attend with one more", f"even: {even}")
    else:
        yield Line(OK, f"{heads} query heads over sp_size={case.sp}")


def _memory(case):
    names = {setting.name for setting in fields(Settings)}
    given = {name.removeprefix("sp_"): value for name, value in case.block.items() if name.removeprefix("sp_") in names}
    try:
        settings = Settings(**given)
        if case.text is not None and settings.resolved().head_chunks not in (1, "auto"):
            from ..core.heads import chunk_heads

            heads = case.text.num_attention_heads
            chunk_heads(heads, getattr(case.text, "num_key_value_heads", None) or heads, case.sp, settings.head_chunks)
    except (TypeError, ValueError) as error:
        yield Line(ERROR, "memory switches", str(error))
        return
    if given:
        yield Line(OK, f"memory switches {given}; launch with -m hf_ulysses --config_file THIS_FILE, or they are not exported")


def _attention(case):
    if case.attention is None:
        return
    # What the installed GPU is made for.
    best = {8: "flash_attention_2", 9: "flash_attention_3", 10: "flash_attention_4", 12: "flash_attention_4"}
    best = best.get((case.machine.capability or (0,))[0])
    needs = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn_4"}
    package = needs.get(case.attention)
    if package and not {package, "kernels"} & case.machine.packages:
        yield Line(ERROR, f"{case.attention} is asked for, and neither {package} nor kernels is installed", "pip install 'hf_ulysses[flash]', or use sdpa")
    elif case.attention == "eager":
        yield Line(WARNING, "eager attention takes memory with the square of the row", "use flash_attention_2 or sdpa")
    elif best and case.attention != best and "flash" in case.attention:
        level = ERROR if case.attention > best else WARNING
        yield Line(level, f"{case.attention} on a GPU of capability {case.machine.capability}", f"use {best}")
    else:
        yield Line(OK, f"attention {case.attention}")


def _length(case):
    variable = case.block.get("sp_seq_length_is_variable", True)
    fixed = case.block.get("sp_seq_length") if variable in (False, "false", "False") else None
    limit = getattr(case.text, "max_position_embeddings", None)
    length = case.length or fixed
    if variable in (False, "false", "False") and fixed is None:
        yield Line(ERROR, "sp_seq_length_is_variable is false without a length", f"set {PREFIX}sp_seq_length, or {PREFIX}sp_seq_length_is_variable: true")
    if fixed and case.length and fixed != case.length:
        yield Line(ERROR, f"rows of {case.length} tokens, but sp_seq_length is {fixed}", f"set {PREFIX}sp_seq_length_is_variable: true")
    if length and limit and length > limit:
        yield Line(WARNING, f"rows of {length} tokens for a model made for {limit}", "set rope scaling in the model's configuration, or shorter rows")


def _allocator(case):
    conf = " ".join(case.machine.environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    said = conf.replace(" ", "").lower()
    if "expandable_segments:false" in said or said and "expandable_segments" not in said:
        yield Line(WARNING, f"the allocator's setting {conf.strip()!r} leaves expandable_segments off: long rows fragment memory", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    else:
        yield Line(OK, "the allocator's expandable_segments are on under -m hf_ulysses")


CHECKS = (_versions, _asked, _mesh, _engine, _deepspeed, _heads, _memory, _attention, _length, _allocator)
