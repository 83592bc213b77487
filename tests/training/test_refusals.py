"""Wrong configurations fail on every rank, before training, with what, why and what to do."""

import contextvars

import pytest
import torch

from ..ranks import RankFailed
from .trajectory import deepspeed_config, tiny_llama, train


def refusal(settings, model=None, environment=None):
    """The message of the ValueError that a run ends with; `None` when it trains."""
    import os

    os.environ.update(environment or {})
    if model is not None:
        settings = {**settings, "model": model()}
    try:
        train(steps=1, **settings)
    except ValueError as error:
        return str(error)
    return None


def refuse(ranks, match, size=2, **kwargs):
    messages = ranks(size).run(refusal, kwargs.pop("settings", {}), **kwargs)
    for message in messages:
        assert message is not None, "was trained"
        for part in match if isinstance(match, tuple) else (match,):
            assert part in message, message


def test_sizes_that_do_not_multiply_to_the_ranks(ranks):
    wanted = ("dp_shard_size=2 x sp_size=2 = 4, but there are 2 processes", "dp_shard_size=1")
    refuse(ranks, wanted, settings=dict(engine="zero2", sp=2, dp=2))


def test_more_ranks_than_heads(ranks):
    refuse(ranks, ("sp_size=4", "num_attention_heads=2", "[1, 2]"), 4, settings=dict(engine="ddp", sp=4), model=few_heads)


def few_heads():
    return tiny_llama(num_attention_heads=2, num_key_value_heads=1)


def missing_engine():
    from accelerate.utils import ParallelismConfig

    return dict(engine="ddp", sp=1, parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2))


def configured(make, environment=None):
    import hf_ulysses

    hf_ulysses.enable()
    return refusal(make(), environment=environment)


def test_deepspeed_backend_without_deepspeed(ranks):
    for message in ranks(2).run(configured, missing_engine):
        assert "sp_backend='torch'" in message and "DDP" in message


def tp_and_sp():
    from hf_ulysses import ParallelismConfig

    return dict(parallelism_config=ParallelismConfig(sp_size=2, tp_size=2))


def cp_and_sp():
    from accelerate.utils import ParallelismConfig

    return dict(parallelism_config=ParallelismConfig(sp_size=2, cp_size=2))


@pytest.mark.parametrize("make,match", [(tp_and_sp, "tp_size=2"), (cp_and_sp, "cp_size=2")])
def test_other_parallelism_together_with_sp(ranks, make, match):
    with pytest.raises(RankFailed, match=f"ValueError: .*{match}"):
        ranks(1).run(configured, make)


def given_a_dict():
    from hf_ulysses.adapters.config import requested

    return requested({"sp_size": 2})


def test_a_dict_for_a_configuration(ranks):
    """Case 37."""
    with pytest.raises(RankFailed, match="is a dict. Pass an object: hf_ulysses.ParallelismConfig"):
        ranks(1).run(given_a_dict)


def test_environment_without_its_switch(ranks):
    for message in ranks(2).run(configured, dict, environment={"PARALLELISM_CONFIG_SP_SIZE": "2"}):
        assert "ACCELERATE_USE_PARALLELISM_CONFIG=true" in message


DEEPSPEED = [
    (deepspeed_config(2, offload_param=True), "offload_param"),
    (deepspeed_config(2, sequence_parallel={"enabled": True}), "sequence_parallel"),
    (deepspeed_config(2, tensor_parallel={"autotp_size": 2}), "tensor_parallel"),
]


@pytest.mark.parametrize("config,match", DEEPSPEED, ids=[match for _, match in DEEPSPEED])
def test_deepspeed_config(ranks, config, match):
    refuse(ranks, match, settings=dict(engine="ddp", sp=2, deepspeed=config))


TRAINER_ARGUMENTS = [
    (dict(accelerator_config={"dispatch_batches": True}), "dispatch_batches"),
    (dict(accelerator_config={"split_batches": True}), "split_batches"),
]


@pytest.mark.parametrize("arguments,match", TRAINER_ARGUMENTS, ids=[match for _, match in TRAINER_ARGUMENTS])
def test_trainer_arguments(ranks, arguments, match):
    refuse(ranks, match, settings=dict(engine="ddp", sp=2, **arguments))


def prompt_tuning():
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def two_devices():
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    return model


def bidirectional_splitter():
    model = tiny_llama()
    model.config._attn_implementation_internal = "ulysses"
    return model


def sharded_while_loading():
    model = tiny_llama()
    model.__class__ = type(
        "ShardedLlama", (type(model),), {"is_distributed_loading_by_transformers": True, "__module__": "__main__"}
    )
    return model


MODELS = [(prompt_tuning, "virtual tokens"), (two_devices, "device_map"), (bidirectional_splitter, "UlyssesSPAttentionHF"), (sharded_while_loading, "distributed_config")]


@pytest.mark.parametrize("model,match", MODELS, ids=[match for _, match in MODELS])
def test_models(ranks, model, match):
    refuse(ranks, match, settings=dict(engine="ddp", sp=2), model=model)


def trainers_of_trl():
    """Every trainer class that TRL's sources define, by the module that it is imported from: `{(module, name)}`."""
    import ast
    import importlib.util
    from pathlib import Path

    root = Path(importlib.util.find_spec("trl").origin).parent
    return {
        (".".join(("trl", *file.relative_to(root).with_suffix("").parts)), node.name)
        for file in root.rglob("*.py")
        if file.stem != "__init__"  # Names that have moved.
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer") and not node.name.startswith("_")
    }


REFUSED = [
    "DistillationTrainer", "ServerDistillationTrainer", "GOLDTrainer", "SDPOTrainer", "SDFTTrainer", "A2POTrainer",
    "IWOPDTrainer", "AsyncGRPOTrainer", "AsyncDistillationTrainer",
]  # fmt: skip
# Where each of the others is compared with data-parallel processes without sequence parallelism.
EXACT = {
    "SFTTrainer": "test_trajectories", "DPOTrainer": "test_preferences", "KTOTrainer": "test_preferences",
    "RewardTrainer": "test_preferences", "CPOTrainer": "test_whole_logits", "ORPOTrainer": "test_whole_logits",
    "TPOTrainer": "test_whole_logits", "GKDTrainer": "test_whole_logits", "OnlineDPOTrainer": "test_whole_logits",
    "GRPOTrainer": "test_generation", "RLOOTrainer": "test_generation", "GMPOTrainer": "test_generation",
}  # fmt: skip


def test_every_trainer_of_trl_is_exact_or_refused():
    from pathlib import Path

    assert {name for _, name in trainers_of_trl()} == {*REFUSED, *EXACT}
    for name, where in EXACT.items():
        source = (Path(__file__).parent / f"{where}.py").read_text()
        assert f'"{name.removesuffix("Trainer")}"' in source or where == "test_trajectories", name


def configured_for(module, name, yaml):
    """What the arguments of one of TRL's trainers say to sequence parallelism, given in Python or by a launcher."""
    import importlib
    import os
    import tempfile

    import hf_ulysses

    from .trajectory import _parallelism

    hf_ulysses.enable()
    if yaml:
        os.environ.update(ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_SP_SIZE="2")
    source = importlib.import_module(module.replace("_trainer", "_config"))
    arguments = {} if yaml else dict(parallelism_config=_parallelism("ddp", 2, 1))
    try:
        getattr(source, name.replace("Trainer", "Config"))(tempfile.mkdtemp(), use_cpu=True, bf16=False, **arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("yaml", [False, True], ids=["python", "yaml"])
def test_trainers_of_trl_that_are_refused_before_anything_is_loaded(ranks, yaml):
    for module, name in trainers_of_trl():
        if name in REFUSED:
            for message in ranks(2).run(configured_for, module, name, yaml):
                assert message is not None and f"{name} is not supported with sequence parallelism" in message


def planted(kind):
    """A model with one fault that nobody has heard of, trained under sequence parallelism."""
    model = tiny_llama()
    if kind == "mixes positions":
        # A causal convolution over positions in a layer that nobody knows.
        kernel = torch.nn.Conv1d(64, 64, 3, padding=2, groups=64)
        model.model.layers[0].mlp.mixer = kernel

        def mix(module, args, output):
            return output + kernel(output.transpose(1, 2))[..., : output.shape[1]].transpose(1, 2)

        model.model.layers[0].mlp.register_forward_hook(mix)
    if kind == "bypasses the interface":

        def attend(module, args, kwargs, output):
            states = kwargs["hidden_states"]
            heads = states.unflatten(-1, (4, 16)).transpose(1, 2)
            out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return out.transpose(1, 2).flatten(2), None

        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(attend, with_kwargs=True)
    if kind == "shifts again":

        def loss_function(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
            reduction = "sum" if num_items_in_batch is not None else "mean"
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction=reduction)
            return loss if num_items_in_batch is None else loss / num_items_in_batch

        model.loss_function = loss_function
    if kind == "loses the row":
        attention = model.model.layers[1].self_attn
        attention.forward = forgetful(attention.forward)
    return model


def forgetful(forward):
    def attend(*args, ulysses_row=None, **kwargs):
        return contextvars.Context().run(forward, *args, **kwargs)

    return attend


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", ["mixes positions", "bypasses the interface", "shifts again", "loses the row"])
def test_planted_faults_are_found_and_made_exact(ranks, kind, engine):
    expected = ranks(1).run(train_planted, kind, engine="plain", sp=1)[0]
    for result in ranks(2).run(train_planted, kind, engine=engine, sp=2):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)


def train_planted(kind, **settings):
    return train(steps=2, model=planted(kind), **settings)


def without_trial():
    from hf_ulysses import ParallelismConfig, SequenceParallelConfig
    from hf_ulysses.mixing import locate

    def fail(*args):
        raise AssertionError("tried")

    locate.locate = fail
    handler = SequenceParallelConfig(trial=False)
    config = ParallelismConfig(sp_backend="torch", sp_size=2, sp_handler=handler)
    return train(engine="ddp", sp=2, parallelism_config=config)["loss"]


def test_the_trial_can_be_switched_off_and_decides_nothing_for_attention(ranks):
    """Case 41."""
    expected = ranks(1).run(train)[0]["loss"]
    for loss in ranks(2).run(without_trial):
        assert loss == pytest.approx(expected, rel=2e-5)
    ranks(2).stop()  # Its ranks have no trial.


def test_fixed_row_length(ranks):
    for message in ranks(2).run(fixed_length):
        assert "sp_seq_length=64" in message and "66 tokens" in message


def fixed_length():
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False)
    config = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    return refusal(dict(engine="zero2", sp=2, parallelism_config=config))
