"""Runs through flash attention's real dispatch (tests/kernels), under the engines that cast and gather: exact trajectories."""

import pytest

from ..kernels import without_gpu
from ..kernels.flash import flash
from .test_packing import documents, flattened, padded
from .test_trajectories import assert_engine, assert_same
from .trajectory import tiny_llama, train

pytestmark = without_gpu

KEY = "flash_attention_2"
UNEVEN = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=16, hidden_size=96)


def with_flash(run, *args, sp, dp=1, sizes=None, **settings):
    """`run` (a function like `train`) with a model that attends by flash attention; the result's "after": what was called."""
    from hf_ulysses import ParallelismConfig

    model = tiny_llama(**(sizes or {}))
    # Loading it so would ask for a GPU.
    model.config._attn_implementation = KEY
    parallelism = ParallelismConfig(sp_backend="torch", sp_size=sp, dp_shard_size=dp)
    with flash(KEY, exact=True) as calls:
        return run(
            *args, model=model, sp=sp, dp=dp, parallelism_config=parallelism, after=lambda _: sorted(set(calls)), **settings
        )


def with_sizes(sizes, **settings):
    return train(model=tiny_llama(**sizes), **settings)


PLAIN, VARLEN = ["bwd", "fwd"], ["varlen_bwd", "varlen_fwd"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("engine,sp", [("zero3", 2), ("fsdp2", 4)])
def test_plain_rows(ranks, engine, sp, checkpointing):
    settings = dict(steps=4, gradient_checkpointing=checkpointing)
    expected = ranks(1).run(with_sizes, UNEVEN, **settings)[0]
    results = ranks(sp).run(with_flash, train, engine=engine, sp=sp, sizes=UNEVEN, **settings)
    assert_engine(results[0], engine)
    assert_same(results, expected)
    assert all(set(PLAIN) <= set(result["after"]) for result in results)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_packed_rows(ranks, engine):
    settings = dict(steps=4, data=documents(12))
    expected = ranks(1).run(flattened, batch=3, **settings)[0]
    results = ranks(2).run(with_flash, flattened, engine=engine, sp=2, batch=3, **settings)
    assert_same(results, expected)
    assert all(set(VARLEN) <= set(result["after"]) for result in results)


@pytest.mark.parametrize("engine,side", [("zero3", "left"), ("fsdp2", "right")])
def test_padded_rows(ranks, engine, side):
    settings = dict(steps=4, data=documents(12))
    expected = ranks(1).run(padded, side, batch=3, **settings)[0]
    results = ranks(2).run(with_flash, padded, side, engine=engine, sp=2, batch=3, **settings)
    assert_same(results, expected)
    assert all(set(VARLEN) <= set(result["after"]) for result in results)
