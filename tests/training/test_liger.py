"""Triton kernels that the Trainer and TRL bring in, real ones, in Triton's interpreter: Liger's fused loss gets the shard's
targets and the step's count, TRL's fused head gives per-token results of the row.

Not covered: Liger's RMSNorm, which stores to a pointer that is `None` in the interpreter.
"""

import pytest

from ..kernels.triton_kernels import interpreted, trl_kernels
from .test_trajectories import assert_engine, assert_same
from .trajectory import rows, train


def with_kernels(around, **settings):
    with around() as calls:
        return train(after=lambda trainer: dict(calls), **settings)


LOSS = {"liger_cross_entropy_kernel"}
PATCHES = {"_triton_rope", "_swiglu_forward_kernel", "_swiglu_backward_kernel"}


# Interpreting takes its time: the layers' kernels under one engine.
@pytest.mark.parametrize("engine,dp,accumulation,layers", [("zero3", 1, 2, False), ("fsdp2", 1, 1, True), ("ddp", 2, 1, False)])
def test_liger(ranks, engine, dp, accumulation, layers):
    settings = dict(steps=2, accumulation=accumulation)
    if not layers:
        settings.update(eval_data=rows(2, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
                        per_device_eval_batch_size=1)  # fmt: skip
    expected = ranks(1).run(train, batch=dp, **settings)[0]
    patches = dict(rms_norm=False, rope=layers, swiglu=layers)
    settings.update(use_liger_kernel=True, liger_kernel_config=patches)
    results = ranks(2 * dp).run(with_kernels, interpreted, engine=engine, sp=2, dp=dp, **settings)
    assert_engine(results[0], engine)
    assert_same(results, expected)
    for result in results:
        if dp == 1:
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
        assert result["after"].keys() >= LOSS | (PATCHES if layers else set()), result["after"]


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_trls_fused_head(ranks, engine):
    settings = dict(kind="sft", bf16=False, loss_type="chunked_nll", steps=2)
    expected = ranks(1).run(train, **settings)[0]
    results = ranks(2).run(with_kernels, trl_kernels, engine=engine, sp=2, **settings)
    assert_same(results, expected)
    for result in results:
        assert result["after"].keys() >= {"_forward_kernel", "_backward_kernel"}, result["after"]
        for name in ("mean_token_accuracy", "entropy", "num_tokens"):
            values, wanted = ([entry[name] for entry in log["log"]] for log in (result, expected))
            assert values == pytest.approx(wanted, rel=1e-5), name
