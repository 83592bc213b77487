"""Triton kernels that the Trainer and TRL bring in, real ones, in Triton's interpreter: Liger's fused loss gets the shard's
targets and the step's count, its kernels of the layers a shard, TRL's fused head gives per-token results of the row.
"""

import pytest

from ..kernels import without_gpu
from ..kernels.triton_kernels import interpreted, trl_kernels
from .test_trajectories import assert_engine, assert_same
from .trajectory import rows, tiny_llama, train


def with_kernels(around, **settings):
    with around() as calls:
        return small(after=lambda trainer: dict(calls), **settings)


def small(**settings):
    """Interpreting takes its time."""
    return train(model=tiny_llama(num_hidden_layers=1), **settings)


pytestmark = without_gpu

# Odd, so that shards are padded. A machine that is busy interprets slowly.
LENGTH, PATIENCE = 25, 300
LOSS = {"liger_cross_entropy_kernel"}
PATCHES = {
    "_triton_rope", "_swiglu_forward_kernel", "_swiglu_backward_kernel", "_rms_norm_forward_kernel", "_rms_norm_backward_kernel",
}  # fmt: skip


# The layers' kernels under one engine.
@pytest.mark.parametrize("engine,dp,accumulation,layers", [("zero3", 1, 2, False), ("fsdp2", 1, 1, True), ("ddp", 2, 1, False)])
def test_liger(ranks, engine, dp, accumulation, layers):
    settings = dict(steps=2, accumulation=accumulation, data=rows(2 * accumulation * dp, length=LENGTH))
    if not layers:
        settings.update(eval_data=rows(2, LENGTH, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
                        per_device_eval_batch_size=1)  # fmt: skip
    expected = ranks(1).run(small, batch=dp, **settings)[0]
    patches = dict(rms_norm=layers, rope=layers, swiglu=layers)
    settings.update(use_liger_kernel=True, liger_kernel_config=patches)
    results = ranks(2 * dp).run(with_kernels, interpreted, engine=engine, sp=2, dp=dp, timeout=PATIENCE, **settings)
    assert_engine(results[0], engine)
    assert_same(results, expected)
    for result in results:
        if dp == 1:
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
        assert result["after"].keys() >= LOSS | (PATCHES if layers else set()), result["after"]


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_trls_fused_head(ranks, engine):
    settings = dict(kind="sft", bf16=False, loss_type="chunked_nll", steps=2, data=rows(2, length=LENGTH))
    expected = ranks(1).run(small, **settings)[0]
    results = ranks(2).run(with_kernels, trl_kernels, engine=engine, sp=2, timeout=PATIENCE, **settings)
    assert_same(results, expected)
    for result in results:
        assert result["after"].keys() >= {"_forward_kernel", "_backward_kernel"}, result["after"]
        for name in ("mean_token_accuracy", "entropy", "num_tokens"):
            values, wanted = ([entry[name] for entry in log["log"]] for log in (result, expected))
            assert values == pytest.approx(wanted, rel=1e-5), name
