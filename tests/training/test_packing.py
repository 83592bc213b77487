"""Packed and padding-free rows train through stock collators, and give what one process gives.

Documents are told apart by positions that restart; they never attend to each other, wherever the cut falls.
"""

import pytest
import torch

from .test_trajectories import assert_same
from .trajectory import rows, train


def documents(count, seed=3):
    """Documents of 5 to 40 tokens with uneven targets, the first token sometimes a target."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for index in range(count):
        length = int(torch.randint(5, 40, (1,), generator=generator))
        row = rows(1, length, seed=100 * seed + index)[0]
        data.append({"input_ids": row["input_ids"], "labels": row["labels"]})
    return data


SFT = dict(kind="sft", bf16=False, steps=4)
HOW = {
    "bfd": dict(packing=True, packing_strategy="bfd", max_length=64),
    "wrapped": dict(packing=True, packing_strategy="wrapped", max_length=51),
    "padding_free": dict(padding_free=True, max_length=None, batch=3),
}


@pytest.mark.half("engine", "how")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("engine,sp,dp", [("zero3", 2, 1), ("fsdp2", 4, 1), ("zero3", 2, 2), ("fsdp2", 2, 2)])
def test_sft(ranks, engine, sp, dp, how):
    settings = {**SFT, **HOW[how], "data": documents(24 * dp), "packed": how != "padding_free"}
    batch = settings.pop("batch", 1)
    expected = ranks(1).run(train, batch=batch * dp, **settings)[0]
    results = ranks(sp * dp).run(train, engine=engine, sp=sp, dp=dp, batch=batch, **settings)
    assert_same(results, expected)
    for name in ("mean_token_accuracy", "entropy", "num_tokens"):
        values, wanted = ([entry[name] for entry in log["log"]] for log in (results[0], expected))
        assert values == pytest.approx(wanted, rel=1e-5), name


def flattened(**settings):
    from transformers import DataCollatorWithFlattening

    return train(data_collator=DataCollatorWithFlattening(), **settings)


@pytest.mark.parametrize("engine,dp", [("zero2", 1), ("zero3", 2), ("fsdp2", 1), ("ddp", 2)])
def test_trainer_with_flattening(ranks, engine, dp):
    settings = dict(steps=4, data=documents(12 * dp))
    expected = ranks(1).run(flattened, batch=3 * dp, **settings)[0]
    assert_same(ranks(2 * dp).run(flattened, engine=engine, sp=2, dp=dp, batch=3, **settings), expected)


def padded(side, **settings):
    from transformers import DataCollatorForTokenClassification

    from .trajectory import _tokenizer

    tokenizer = _tokenizer()
    tokenizer.padding_side = side
    return train(data_collator=DataCollatorForTokenClassification(tokenizer), **settings)


@pytest.mark.parametrize("engine,dp", [("zero3", 1), ("fsdp2", 2)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(ranks, engine, dp, side):
    settings = dict(steps=4, data=documents(12 * dp))
    expected = ranks(1).run(padded, side, batch=3 * dp, **settings)[0]
    assert_same(ranks(2 * dp).run(padded, side, engine=engine, sp=2, dp=dp, batch=3, **settings), expected)
