"""The configurations: what they accept, what they read from the environment, how they pickle."""

import copy
import pickle

import pytest
from accelerate.parallelism_config import ParallelismConfig as AccelerateConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig

from hf_ulysses import ParallelismConfig
from hf_ulysses import SequenceParallelConfig
from hf_ulysses.adapters.config import StateView, requested

ATTENTION = "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"


@pytest.mark.parametrize("backend", ["deepspeed", "torch"])
def test_backends(backend):
    config = ParallelismConfig(sp_backend=backend, sp_size=4, dp_shard_size=2)
    assert (config.sp_backend, config.sp_size, config.sp_enabled) == (backend, 4, True)
    assert isinstance(config.sp_handler, SequenceParallelConfig)


def test_backends_that_accelerate_has_itself(monkeypatch):
    from hf_ulysses.adapters import config

    assert config.upstream_backends() == ("deepspeed",)
    monkeypatch.setattr(config._AccelerateConfig, "__post_init__", lambda self: None)
    assert config.upstream_backends() == ("deepspeed", "torch")


def test_unknown_backend():
    with pytest.raises(ValueError, match="sp_backend must be one of"):
        ParallelismConfig(sp_backend="ring", sp_size=2)


def test_the_view_tells_the_truth_but_for_one_property():
    config = AccelerateConfig(sp_backend="deepspeed", sp_size=4, dp_shard_size=2)
    view = StateView.of(config)
    assert (view.sp_size, view.dp_shard_size, view.sp_backend, view.sp_enabled) == (4, 2, "deepspeed", False)
    assert view.total_size == 8 and view.data_parallel_size == 2
    assert config.sp_enabled and type(config) is AccelerateConfig


def test_nothing_is_requested_without_sp(monkeypatch):
    assert requested(None) is None
    assert requested(AccelerateConfig(dp_shard_size=2)) is None
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "1")
    assert requested(None) is None


def test_requested_by_the_environment(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_BACKEND", "torch")
    with pytest.raises(ValueError, match="ACCELERATE_USE_PARALLELISM_CONFIG=true"):
        requested(None)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    view = requested(None)
    assert (view.sp_size, view.sp_backend) == (2, "torch")


# (handler, environment) -> the implementation that the model is set to
ATTENTIONS = [
    (SequenceParallelConfig, None, None, None),
    (SequenceParallelConfig, None, "sdpa", None),
    (SequenceParallelConfig, None, "eager", "eager"),
    (SequenceParallelConfig, "sdpa", "sdpa", "sdpa"),
    (SequenceParallelConfig, "flex_attention", None, "flex_attention"),
    (DeepSpeedSequenceParallelConfig, "sdpa", None, "sdpa"),
    (DeepSpeedSequenceParallelConfig, None, "sdpa", None),
    (DeepSpeedSequenceParallelConfig, "flash_attention_2", "sdpa", "flash_attention_2"),
]


@pytest.mark.parametrize("handler,value,variable,expected", ATTENTIONS)
def test_attention_implementation(monkeypatch, handler, value, variable, expected):
    """The launcher always exports "sdpa": from there it never overrides what the model was loaded with."""
    if variable is not None:
        monkeypatch.setenv(ATTENTION, variable)
    config = AccelerateConfig(sp_size=2, sp_handler=handler(sp_attn_implementation=value))
    assert StateView.of(config).attention_to_set == expected


def test_row_length():
    fixed = SequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False)
    assert ParallelismConfig(sp_size=2, sp_handler=fixed).seq_length == 64
    assert ParallelismConfig(sp_size=2).seq_length is None


def test_fields_that_accelerate_has_since_1_16():
    """They say how its own backend evaluates, and what it refuses: here both are exact."""
    handler = DeepSpeedSequenceParallelConfig()
    handler.sp_disable_in_eval = handler.sp_allow_recurrent_layers = True
    view = StateView.of(AccelerateConfig(sp_size=2, sp_handler=handler))
    assert view.sp_handler is handler and view.sp_size == 2


def test_trial(monkeypatch):
    assert ParallelismConfig(sp_size=2).trial
    assert not ParallelismConfig(sp_size=2, sp_handler=SequenceParallelConfig(trial=False)).trial
    monkeypatch.setenv("HF_ULYSSES_TRIAL", "0")
    assert not ParallelismConfig(sp_size=2).trial


def test_pickles_as_accelerates_classes():
    config = ParallelismConfig(sp_backend="torch", sp_size=2)
    data = pickle.dumps(config)
    assert b"hf_ulysses" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is AccelerateConfig and loaded.sp_size == 2
    assert type(loaded.sp_handler) is DeepSpeedSequenceParallelConfig
    copied = copy.deepcopy(config)
    assert type(copied) is ParallelismConfig and copied.sp_backend == "torch"


def test_memory_switches_from_the_handler_and_from_the_environment(monkeypatch):
    from hf_ulysses.memory import Settings

    def asked(**given):
        return ParallelismConfig(sp_backend="torch", sp_size=2, sp_handler=SequenceParallelConfig(**given)).memory_settings

    assert asked() == Settings()
    assert asked(tiled_mlp=4, head_chunks="auto") == Settings(tiled_mlp=4, head_chunks="auto")
    for name, text in dict(TILED_MLP="16", TILED_NORMS="true", TILED_LOSS="auto", OFFLOAD_CHECKPOINTS="1", HEAD_CHUNKS="4").items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_SP_{name}", text)
    everything = Settings(tiled_loss="auto", tiled_mlp=16, tiled_norms=True, offload_checkpoints=True, head_chunks=4)
    assert asked() == everything
    # accelerate's own handler has no such fields.
    plain = ParallelismConfig(sp_backend="torch", sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig())
    assert plain.memory_settings == StateView.of(plain).memory_settings == everything
    # What is said in Python is said.
    assert asked(tiled_mlp=False, head_chunks=1).tiled_mlp is False and asked(head_chunks=1).head_chunks == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_MEMORY", "max")
    assert asked().memory == "max"
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_MEMORY", "most")
    with pytest.raises(ValueError, match="memory must be None or 'max', but got 'most'"):
        asked()


@pytest.mark.parametrize(
    "given,message",
    [
        (dict(tiled_mlp=0), "tiled_mlp must be True, False or a number of at least 1, but got 0"),
        (dict(tiled_mlp="auto"), "tiled_mlp must be True, False or a number"),
        (dict(tiled_loss="yes"), "tiled_loss must be True, False, 'auto' or a number"),
        (dict(head_chunks=True), "head_chunks must be 'auto' or a number of at least 1, but got True"),
        (dict(offload_checkpoints=2), "offload_checkpoints must be True or False, but got 2"),
        (dict(memory="min"), "memory must be None or 'max'"),
    ],
)
def test_memory_switches_of_another_kind(given, message):
    with pytest.raises(ValueError, match=message):
        SequenceParallelConfig(**given)


def test_max_switches_on_what_nothing_is_said_of():
    from hf_ulysses.memory import Settings

    assert Settings(memory="max", tiled_mlp=2, head_chunks=4).resolved() == Settings(True, 2, 8, True, 4)
    assert Settings(memory="max", tiled_norms=False, head_chunks=1).resolved() == Settings(True, 8, False, True, 1)
    assert Settings().resolved() == Settings(False, False, False, False, 1)


def test_memory_switches_in_the_yaml(monkeypatch, tmp_path):
    from hf_ulysses.adapters.config import export_yaml

    monkeypatch.setenv("PARALLELISM_CONFIG_SP_TILED_NORMS", "false")
    for name in ("TILED_MLP", "OFFLOAD_CHECKPOINTS", "HEAD_CHUNKS"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_SP_{name}", "")  # So that it is taken back.
        monkeypatch.delenv(f"PARALLELISM_CONFIG_SP_{name}")
    file = tmp_path / "config.yaml"
    keys = dict(size=2, tiled_mlp=4, tiled_norms="true", offload_checkpoints="true", head_chunks=2)
    file.write_text("parallelism_config:\n" + "".join(f"  parallelism_config_sp_{k}: {v}\n" for k, v in keys.items()))
    export_yaml(str(file))
    asked = SequenceParallelConfig()
    config = ParallelismConfig(sp_backend="torch", sp_size=2, sp_handler=asked).memory_settings
    assert (config.tiled_mlp, config.tiled_norms, config.offload_checkpoints, config.head_chunks) == (4, False, True, 2)
    file.write_text("parallelism_config:\n  parallelism_config_sp_tiled_mpl: 4\n")
    with pytest.raises(ValueError, match="parallelism_config_sp_tiled_mpl is not known.*tiled_mlp"):
        export_yaml(str(file))
