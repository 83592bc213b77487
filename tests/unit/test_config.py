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
