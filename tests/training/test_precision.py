"""bf16 and torch.compile: the trajectory of the same run without sequence parallelism, as far as rounding lets one see.

bf16 keeps 8 bits: one rounding is 2^-9 relative, and sums in another order differ by a few of them. Losses are means over
up to 64 targets in float32, so that they agree to one unit in the last place, 2^-8; the norm of the gradient, the root of a
sum over all parameters, to two. What the tests of the float32 trajectories look for is larger: a mean of means is off by
more than 10 % on these rows, a lost target by 1 / 9 of a row's loss.
"""

import pytest
import torch

from .test_trajectories import assert_engine, assert_same
from .trajectory import train

ULP = 2**-8


@pytest.mark.parametrize("engine,kind", [("ddp", "trainer"), ("fsdp2", "sft"), ("zero2", "sft"), ("zero3", "trainer")])
def test_bf16(ranks, engine, kind):
    settings = dict(kind=kind, bf16=True, steps=6)
    if "zero" in engine:
        from .trajectory import deepspeed_config

        settings["deepspeed"] = deepspeed_config(int(engine[-1]), bf16={"enabled": "auto"})
    # The same engine without sequence parallelism: each casts in its own places.
    expected = ranks(2).run(train, engine=engine, dp=2, **settings)[0]
    results = ranks(2).run(train, engine=engine, sp=2, accumulation=2, **settings)
    assert_engine(results[0], engine)
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=ULP)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2 * ULP)
        difference = (result["parameters"] - expected["parameters"]).abs().max()
        assert difference <= ULP * expected["parameters"].abs().max()
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert result["exchanges"] > 0


@pytest.mark.half("engine")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_torch_compile(ranks, engine):
    """What is computed is the same; its graphs are counted in tests/unit/test_compile.py."""
    settings = dict(steps=4, torch_compile=True, torch_compile_backend="aot_eager")
    expected = ranks(1).run(train, steps=4)[0]
    assert_same(ranks(2).run(train, engine=engine, sp=2, **settings), expected, counted=False)
