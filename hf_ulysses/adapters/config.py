"""The configurations: accelerate's own `ParallelismConfig`, plus what it refuses or does not say.

    ParallelismConfig        what a user writes: accelerate's class, `sp_backend` "deepspeed" or "torch"
    SequenceParallelConfig   its `sp_handler`: accelerate's class, every attention implementation, the trial
    StateView                what an Accelerator holds while sequence parallelism is on: true in every size and name, but
                             `sp_enabled` is False, so that no sequence-parallel branch of Accelerate, Trainer or TRL
                             recognises it - they ask nothing else - and hf_ulysses does the work alone

Pickled, all of them are accelerate's own classes: a saved training_args.bin loads without hf_ulysses.
"""

import copyreg
import os
import warnings
from dataclasses import dataclass, field, fields

import yaml
from accelerate.parallelism_config import ParallelismConfig as _AccelerateConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, DistributedType

from ..memory import Settings

BACKENDS = ("deepspeed", "torch")
_SP_PREFIX = "PARALLELISM_CONFIG_SP_"
_ATTENTION_VARIABLE = "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"
# What an environment variable may say. "1" and "0" are on and off; one tile or one chunk is off, too.
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": None}
_SWITCH_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
_SIZE_VARIABLE = "PARALLELISM_CONFIG_SP_SIZE"


class _PicklesAsUpstream:
    """Mixin: pickle as accelerate's class, copy as our own."""

    _upstream: type

    def __reduce_ex__(self, protocol):
        state = {k: v for k, v in vars(self).items() if k not in ("device_mesh", "explicit_attention")}
        # Python's own reconstructor: unpickling needs nothing of ours.
        return copyreg._reconstructor, (self._upstream, object, None), state

    def __deepcopy__(self, memo):
        copy = object.__new__(type(self))
        copy.__dict__.update(vars(self))
        return copy


@dataclass
class SequenceParallelConfig(_PicklesAsUpstream, DeepSpeedSequenceParallelConfig):
    """accelerate's `DeepSpeedSequenceParallelConfig` with two differences.

    Two fields that it has since 1.16 are accepted and change nothing: evaluation is sharded and exact (`sp_disable_in_eval`),
    and so are recurrent layers (`sp_allow_recurrent_layers`), or the model is refused.

    Args:
        sp_seq_length (`int`, *optional*): the only row length, with `sp_seq_length_is_variable=False`.
        sp_seq_length_is_variable (`bool`, *optional*): whether rows may have any length; the default.
        sp_attn_implementation (`str`, *optional*): sets the model's attention implementation; any that the model has,
            "eager" and "flex_attention" too. `None` keeps what the model was loaded with; so does "sdpa" from the
            environment, which `accelerate launch` always exports.
        trial (`bool`, *optional*, defaults to `True`): run a short row whole and in shards before the first step, to find
            modules that need the whole row. The environment variable `HF_ULYSSES_TRIAL=0` switches it off too.
        tiled_loss, tiled_mlp, tiled_norms, offload_checkpoints, head_chunks, memory (*optional*): the memory switches, see
            `hf_ulysses.memory.Settings`. `None` takes the environment's `PARALLELISM_CONFIG_SP_<NAME>`, or leaves it off.
    """

    trial: bool = field(default=True)
    tiled_loss: bool | int | str | None = None
    tiled_mlp: bool | int | None = None
    tiled_norms: bool | int | None = None
    offload_checkpoints: bool | None = None
    head_chunks: int | str | None = None
    memory: str | None = None
    _upstream = DeepSpeedSequenceParallelConfig

    def __post_init__(self):
        given = self.sp_attn_implementation
        from_environment = os.environ.get(_ATTENTION_VARIABLE)
        # accelerate's check knows three names; the model itself refuses what it does not have.
        self.sp_attn_implementation = "sdpa"
        super().__post_init__()
        self.sp_attn_implementation = given if given is not None else from_environment
        self.explicit_attention = given is not None
        memory_settings(self)


def memory_settings(handler) -> Settings:
    """The memory switches of a `sp_handler`, which may be accelerate's own or `None`. Raises `ValueError`."""
    given = {field.name: getattr(handler, field.name, None) for field in fields(Settings)}
    for name, value in given.items():
        text = os.environ.get(f"{_SP_PREFIX}{name.upper()}")
        if value is None and text is not None:
            words = {} if name == "head_chunks" else _WORDS
            given[name] = words.get(text.lower(), int(text) if text.isdecimal() else text)
    return Settings(**{name: value for name, value in given.items() if value is not None})


def export_yaml(path: str) -> None:
    """Export the memory switches of an Accelerate YAML, of which `accelerate launch` exports what it knows only.

    They stand beside accelerate's own keys: `parallelism_config: {parallelism_config_sp_tiled_mlp: true}`. What the
    environment has already stays.

    Raises:
        ValueError: a key with this prefix that nobody knows.
    """
    with open(path, encoding="utf-8") as file:
        block = (yaml.safe_load(file) or {}).get("parallelism_config") or {}
    switches = [field.name for field in fields(Settings)]
    accelerates = ["size", "backend", "seq_length", "seq_length_is_variable", "attn_implementation"]
    for key, value in block.items():
        name = key.removeprefix("parallelism_config_sp_")
        if name != key and name not in switches + accelerates:
            raise ValueError(f"{path}: {key} is not known. The memory switches are parallelism_config_sp_... {switches}.")
        if name in switches and value is not None:
            os.environ.setdefault(f"{_SP_PREFIX}{name.upper()}", str(value))


class ParallelismConfig(_PicklesAsUpstream, _AccelerateConfig):
    """accelerate's `ParallelismConfig` with `sp_backend` "deepspeed" (under DeepSpeed) or "torch" (any engine).

    Raises:
        ValueError: an unknown backend, or `tp_size` / `cp_size` greater than one together with `sp_size`.
    """

    _upstream = _AccelerateConfig

    def __post_init__(self):
        backend = self.sp_backend or os.environ.get("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
        if backend not in BACKENDS:
            raise ValueError(f"sp_backend must be one of {list(BACKENDS)}, but got {backend!r}.")
        sp_size = self.sp_size if self.sp_size is not None else int(os.environ.get(_SIZE_VARIABLE, "1"))
        if sp_size > 1 and self.sp_handler is None:
            self.sp_handler = SequenceParallelConfig()
        # accelerate accepts one name only; lend it for its other checks.
        self.sp_backend = "deepspeed"
        super().__post_init__()
        self.sp_backend = backend
        for name in ("tp_size", "cp_size"):
            if self.sp_size > 1 and getattr(self, name) > 1:
                raise ValueError(
                    f"sp_size={self.sp_size} together with {name}={getattr(self, name)} is not supported: sequence "
                    f"parallelism combines with data parallelism only. Set {name}=1."
                )

    @property
    def trial(self) -> bool:
        asked = getattr(self.sp_handler, "trial", True)
        return asked and os.environ.get("HF_ULYSSES_TRIAL", "1").lower() not in ("0", "false", "no")

    @property
    def memory_settings(self) -> Settings:
        """The memory switches that were asked for, by the handler or by the environment."""
        return memory_settings(self.sp_handler)

    @property
    def attention_to_set(self) -> str | None:
        """The attention implementation that the user asked for, `None` to keep the model's."""
        value = getattr(self.sp_handler, "sp_attn_implementation", None)
        if getattr(self.sp_handler, "explicit_attention", False):
            return value
        return None if value == os.environ.get(_ATTENTION_VARIABLE) == "sdpa" else value

    @property
    def seq_length(self) -> int | None:
        """The only row length allowed, `None` for any."""
        handler = self.sp_handler
        return None if handler is None or handler.sp_seq_length_is_variable else handler.sp_seq_length


class StateView(ParallelismConfig):
    """The configuration as an `Accelerator` holds it while sequence parallelism is on. See the module's docstring."""

    @classmethod
    def of(cls, config: _AccelerateConfig) -> "StateView":
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")
        names += ("tp_handler", "cp_handler", "sp_handler")
        return cls(**{name: getattr(config, name) for name in names})

    @property
    def sp_enabled(self):
        return False

    @property
    def non_dp_dim_names(self):
        return [*super().non_dp_dim_names, "sp"]

    # FSDP2 shards parameters over all ranks that work on different tokens: data shards and sequence shards.
    @property
    def dp_shard_cp_dim_names(self):
        return [*super().dp_shard_cp_dim_names, "sp"]

    @property
    def dp_cp_dim_names(self):
        return [*super().dp_cp_dim_names, "sp"]

    @property
    def non_data_parallel_size(self):
        return self.tp_size * self.cp_size

    def build_device_mesh(self, device_type: str):
        from accelerate.state import PartialState

        # Before the mesh: torch's own error for sizes that do not fit says neither why nor what to do.
        self._check_sizes(PartialState().num_processes)
        # accelerate leaves the mesh of its own backend to DeepSpeed; ours exists on every engine.
        backend, self.sp_backend = self.sp_backend, "torch"
        try:
            return super().build_device_mesh(device_type)
        finally:
            self.sp_backend = backend

    def _check_sizes(self, ranks: int):
        sizes = (
            f"dp_replicate_size={self.dp_replicate_size} x dp_shard_size={self.dp_shard_size} x sp_size={self.sp_size}"
        )
        total = self.dp_replicate_size * self.dp_shard_size * self.sp_size
        if total != ranks:
            raise ValueError(f"{sizes} = {total}, but there are {ranks} processes. {self._proposal(ranks)}")

    def _warn_across_machines(self):
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if per_machine and per_machine % self.sp_size and self.sp_size > 1:
            warnings.warn(
                f"sp_size={self.sp_size} does not divide the {per_machine} processes of a machine, so sequence-parallel "
                "groups span machines and every attention layer's exchange crosses the network. Choose sp_size from "
                f"{[n for n in range(1, per_machine + 1) if per_machine % n == 0]} to keep it inside.",
                stacklevel=2,
            )

    def _validate_accelerator(self, accelerator):
        self._check_sizes(accelerator.num_processes)
        self._warn_across_machines()
        engine = accelerator.distributed_type
        torch_engines = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP)
        if engine == DistributedType.DEEPSPEED:
            return
        if engine not in torch_engines:
            raise ValueError(f"Sequence parallelism runs under DeepSpeed, FSDP2 and DDP, not under {engine}.")
        if self.sp_backend == "deepspeed":
            name = "FSDP" if engine == DistributedType.FSDP else "DDP"
            raise ValueError(
                f"sp_backend='deepspeed' was asked for, but the engine is {name}: DeepSpeed is not configured. Use "
                "sp_backend='torch' for DDP and FSDP2, or configure DeepSpeed (an Accelerate YAML with "
                "`distributed_type: DEEPSPEED`, or TrainingArguments(deepspeed=...))."
            )
        if engine == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise ValueError("Sequence parallelism needs FSDP2: set `fsdp_version: 2`.")

    def _proposal(self, ranks: int) -> str:
        if ranks % self.sp_size:
            sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
            return f"sp_size must divide the number of processes: choose it from {sizes}, or launch a multiple of {self.sp_size}."
        groups = ranks // self.sp_size
        replicate = self.dp_replicate_size if groups % self.dp_replicate_size == 0 else 1
        return (
            f"With sp_size={self.sp_size} on {ranks} processes, set dp_replicate_size={replicate} and "
            f"dp_shard_size={groups // replicate}."
        )


def upstream_backends() -> tuple[str, ...]:
    """Those of `BACKENDS` that the installed accelerate accepts, and so might act on by itself."""

    def accepts(backend):
        try:
            _AccelerateConfig(sp_backend=backend)
        except ValueError:
            return False
        return True

    return tuple(backend for backend in BACKENDS if accepts(backend))


def requested(config: _AccelerateConfig | None) -> StateView | None:
    """The view of the configuration that an `Accelerator` was asked for, `None` without sequence parallelism.

    Args:
        config (`ParallelismConfig`, *optional*): the constructor's argument; `None` reads the environment.

    Raises:
        ValueError: a configuration that contradicts itself, or an environment that asks for sequence parallelism
            without switching it on.
    """
    if isinstance(config, dict):
        raise ValueError(
            f"parallelism_config={config} is a dict. Pass an object: hf_ulysses.ParallelismConfig(**{config}), or write its keys "
            "into the `parallelism_config:` block of an Accelerate YAML."
        )
    if config is None:
        sp_size = int(os.environ.get(_SIZE_VARIABLE, "1"))
        if sp_size <= 1:
            return None
        if os.environ.get(_SWITCH_VARIABLE, "false").lower() != "true":
            raise ValueError(
                f"{_SIZE_VARIABLE}={sp_size} is set, but {_SWITCH_VARIABLE}=true is not, so accelerate ignores it and "
                f"every process would train on whole rows. Set {_SWITCH_VARIABLE}=true, or unset {_SIZE_VARIABLE}."
            )
        config = ParallelismConfig()
    return StateView.of(config) if config.sp_size > 1 else None
