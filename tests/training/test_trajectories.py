"""Exact training: every engine and mesh gives the trajectory of one process without sequence parallelism.

SGD, because Adam hides constant factors in the gradients; clipping active in every step; 1, 5, 64, 3 valid targets per
row, so that a mean of means shows. With CPU offload Accelerate swaps any optimizer for DeepSpeedCPUAdam: AdamW there.
"""

import os

import pytest
import torch

from .trajectory import train

# float32 sums in another order: 1e-7 per step, growing over 8 steps to about 1e-6; a wrong weight shows at 1e-3.
RELATIVE = 2e-5
PARAMETERS = 1e-5

_references = {}


def reference(ranks, **settings):
    key = repr(sorted(settings.items()))
    if key not in _references:
        _references[key] = ranks(1).run(train, **settings)[0]
    return _references[key]


def assert_engine(result, engine):
    kind = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(engine, "DEEPSPEED")
    assert result["engine"].endswith(kind), result["engine"]


def assert_same(results, expected, norms=True, counted=True):
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        if norms:
            assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=RELATIVE)
        assert (result["parameters"] - expected["parameters"]).abs().max() < PARAMETERS
        assert torch.equal(result["parameters"], results[0]["parameters"]), "parameters differ between ranks"
        assert result["state"] == expected["state"]
        # What torch.compile has traced is not.
        assert result["exchanges"] > 0 or not counted


# (engine, sp, dp, accumulation, kind): every value of each, and every pair of engine with mesh and accumulation that
# goes a different way through the stack. `scripts/test.sh --all` runs the full product.
ENGINES = ["zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2"]
VERSIONS = pytest.mark.versions
PAIRWISE = [
    # DDP and FSDP2, as ZeRO-3: each mesh with and without accumulation.
    *[(engine, 2, dp, accumulation, "trainer") for engine in ("ddp", "fsdp2") for dp in (1, 2) for accumulation in (1, 4)],
    ("zero3", 2, 1, 1, "trainer"),
    ("zero3", 2, 2, 4, "trainer"),
    ("zero0", 2, 1, 1, "trainer"),
    pytest.param("zero1", 2, 1, 4, "trainer", marks=VERSIONS),
    pytest.param("zero2", 2, 1, 1, "sft", marks=VERSIONS),
    ("zero3", 2, 1, 4, "sft"),
    pytest.param("fsdp2", 2, 1, 1, "sft", marks=VERSIONS),
    ("zero0", 2, 2, 4, "trainer"),
    # Not on these: on the oldest, ZeRO-2 with accumulation differs from one process without sequence parallelism, too.
    ("zero2", 2, 2, 4, "trainer"),
    pytest.param("zero3", 2, 2, 1, "trainer", marks=VERSIONS),
    pytest.param("ddp", 2, 2, 1, "sft", marks=VERSIONS),
    ("fsdp2", 2, 2, 4, "sft"),
    ("zero1", 4, 1, 1, "sft"),
    ("zero3", 4, 1, 4, "trainer"),
    ("fsdp2", 4, 1, 1, "trainer"),
]
PRODUCT = [
    (engine, sp, dp, accumulation, kind)
    for engine in ENGINES
    for sp, dp in ((2, 1), (4, 1), (2, 2))
    for accumulation in (1, 4)
    for kind in ("trainer", "sft")
]


@pytest.mark.parametrize(
    "engine,sp,dp,accumulation,kind", PRODUCT if os.environ.get("HF_ULYSSES_TEST_ALL") else PAIRWISE
)
def test_the_trajectory_of_one_process(ranks, engine, sp, dp, accumulation, kind):
    settings = dict(kind=kind, accumulation=accumulation, **({"bf16": False} if kind == "sft" else {}))
    expected = reference(ranks, batch=dp, **settings)
    results = ranks(sp * dp).run(train, engine=engine, sp=sp, dp=dp, **settings)
    assert_engine(results[0], engine)
    # ZeRO-0 in fp32 reports no norm, with or without sequence parallelism.
    assert_same(results, expected, norms=engine != "zero0")
    if kind == "sft":
        for name in ("mean_token_accuracy", "entropy", "num_tokens"):
            values, wanted = ([entry[name] for entry in log["log"]] for log in (results[0], expected))
            assert values == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.parametrize("engine", ["zero2_offload", "zero3_offload"])
def test_cpu_offload(ranks, engine):
    expected = reference(ranks, optimizer="adamw", accumulation=4)
    # DeepSpeed compiles its optimizer for the CPU in the first run with offload.
    results = ranks(2).run(train, timeout=400, engine=engine, sp=2, accumulation=4, optimizer="adamw")
    assert_same(results, expected)


def test_average_tokens_across_devices_off_is_data_parallelism_without(ranks):
    settings = dict(accumulation=2, average_tokens_across_devices=False)
    expected = ranks(2).run(train, engine="ddp", dp=2, **settings)[0]
    results = ranks(4).run(train, engine="ddp", sp=2, dp=2, **settings)
    assert_same(results, expected)
    assert results[0]["loss"] != pytest.approx(reference(ranks, accumulation=2, batch=2)["loss"], rel=1e-4)
