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
from types import SimpleNamespace

import torch
from accelerate.utils import DistributedType

from ..adapters.accelerate import check_deepspeed_config
from ..adapters.config import ParallelismConfig, SequenceParallelConfig, StateView
from ..core.heads import chunk_heads
from ..door import check_versions
from ..memory import Settings
from .yaml_file import PREFIX

OK, WARNING, ERROR = "ok", "warning", "error"
_SIZES = {"sp_size", "sp_backend", "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy"}
_SWITCHES = {f"sp_{setting.name}" for setting in fields(Settings)}
_HANDLERS = {"sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"} | _SWITCHES


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
        self.document, self.machine = document, machine
        self.length, self.folder = length, Path(folder)
        block = document.get("parallelism_config") or {}
        self.block = {key.removeprefix(PREFIX): value for key, value in block.items() if value is not None}
        self.attention = attention or self.block.get("sp_attn_implementation")
        self.sp, self.ranks = int(self.block.get("sp_size", 1)), int(document.get("num_processes") or 1)
        self.engine = str(document.get("distributed_type", "NO"))
        self.text = config.get_text_config() if config is not None else None
        # Heads may differ from layer to layer; then there is no such number.
        heads = (getattr(self.text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        self.heads, self.kv_heads = (number if isinstance(number, int) else None for number in heads)


def check(case: Case) -> list[Line]:
    """All lines, in the order of `CHECKS`."""
    return [line for look in CHECKS for line in look(case)]


def _refused(error):
    """A refusal as the launched processes would make it: what, and in the sentence after it what to do."""
    what, _, mend = " ".join(str(error).split()).partition(". ")
    return Line(ERROR, what, mend)


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
    if case.engine == "DEEPSPEED" and "deepspeed" not in case.machine.packages:
        yield Line(ERROR, "DeepSpeed is configured and not installed", "pip install 'hf_ulysses[deepspeed]'")


def _asked(case):
    if case.sp > 1:
        yield Line(OK, f"sp_size={case.sp} on {case.ranks} processes, {case.engine}")
    else:
        yield Line(WARNING, "no sequence parallelism is asked for", f"set {PREFIX}sp_size in a parallelism_config block")
    for name in sorted(set(case.block) - _SIZES - _HANDLERS):
        known = ", ".join(PREFIX + name for name in sorted(_SIZES | _HANDLERS))
        yield Line(ERROR, f"{PREFIX}{name} is not known and would be ignored", f"known: {known} (docs/memory.md)")


def _configuration(case):
    """By the classes that read it in the launched processes: sizes, backend, engine, switches, lengths."""
    if case.sp == 1:
        return
    given = {name: value for name, value in case.block.items() if name in _SIZES | _HANDLERS}
    handler = {name: given.pop(name) for name in set(given) & _HANDLERS}
    for name in _SWITCHES & set(handler):
        handler[name.removeprefix("sp_")] = handler.pop(name)
    version = int((case.document.get("fsdp_config") or {}).get("fsdp_version", 1))
    try:
        config = StateView.of(ParallelismConfig(sp_handler=SequenceParallelConfig(**handler), **given))
        engine = DistributedType(case.engine)
        config._validate_accelerator(SimpleNamespace(num_processes=case.ranks, distributed_type=engine, is_fsdp2=version == 2))
        chunks = config.memory_settings.resolved().head_chunks
        if case.heads and chunks not in (1, "auto"):
            chunk_heads(case.heads, case.kv_heads or case.heads, case.sp, chunks)
    except (TypeError, ValueError) as error:
        yield _refused(error)
    if _SWITCHES & set(case.block):
        on = sorted(_SWITCHES & set(case.block))
        yield Line(OK, f"memory switches {on}; launch with -m hf_ulysses --config_file THIS_FILE, or they are not exported")


def _machines(case):
    gpus, per_machine = case.machine.gpus, case.ranks // int(case.document.get("num_machines") or 1)
    if gpus and per_machine > gpus:
        yield Line(ERROR, f"{per_machine} processes per machine, but {gpus} GPUs", f"set num_processes: {gpus}")
    if case.sp > 1 and per_machine % case.sp:
        valid = [n for n in range(1, per_machine + 1) if per_machine % n == 0]
        yield Line(WARNING, f"sp_size={case.sp} spans machines of {per_machine} GPUs: every exchange crosses the network", f"choose it from {valid}")
    elif case.sp > 1 and case.machine.topology and "NV" not in case.machine.topology.replace("NVIDIA", ""):
        yield Line(WARNING, "the GPUs of a sequence-parallel group are not joined by NVLink: exchanges cross PCIe", "use fewer ranks per row")


def _deepspeed(case):
    block = case.document.get("deepspeed_config") or {}
    file, options = block.get("deepspeed_config_file"), {}
    if file is not None:
        try:
            options = json.loads((case.folder / file).read_text())
        except (OSError, ValueError) as error:
            yield Line(ERROR, f"deepspeed_config_file {file} cannot be read", str(error))
            return
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"):
            if name in block:
                yield Line(ERROR, f"{name} stands beside deepspeed_config_file, which accelerate refuses", f"say it in {file} only")
    elif block:
        offload = {"device": block.get("offload_param_device", "none")}
        options = {"zero_optimization": {"stage": int(block.get("zero_stage", 2)), "offload_param": offload}}
    try:
        check_deepspeed_config(SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=options)))
    except ValueError as error:
        yield _refused(error)
    for name in ("fp16", "bf16"):
        wanted = str(case.document.get("mixed_precision", "no"))
        if options.get(name, {}).get("enabled") is True and wanted != name:
            yield Line(ERROR, f"{file} enables {name}, mixed_precision is {wanted}", f'set mixed_precision: {name}, or "auto" in {file}')
    numbers = [options.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    rows = case.ranks // case.sp
    if all(isinstance(number, int) for number in numbers) and numbers[0] != numbers[1] * numbers[2] * rows:
        yield Line(ERROR, f"{file}: train_batch_size {numbers[0]} is not {numbers[1]} x {numbers[2]} x {rows} rows at a time", 'set "auto"')


def _heads(case):
    if not case.heads or case.sp == 1:
        return
    even = [n for n in range(1, case.heads + 1) if case.heads % n == 0 and case.ranks % n == 0]
    if case.sp > case.heads:
        yield Line(ERROR, f"sp_size={case.sp} exceeds the {case.heads} query heads", f"choose it from {even}")
    elif case.heads % case.sp:
        yield Line(WARNING, f"{case.heads} query heads over sp_size={case.sp}: some ranks attend with one more", f"even: {even}")
    else:
        yield Line(OK, f"{case.heads} query heads over sp_size={case.sp}")


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
    variable = str(case.block.get("sp_seq_length_is_variable", True)).lower() == "true"
    fixed = None if variable else case.block.get("sp_seq_length")
    limit, length = getattr(case.text, "max_position_embeddings", None), case.length or fixed
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


CHECKS = (_versions, _asked, _configuration, _machines, _deepspeed, _heads, _attention, _length, _allocator)
