"""Packed and padded rows make no tensor of S x S elements under sdpa, and launch no operations per document; counted by a
dispatch mode, not by the clock."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ulysses

from ..models import build

LENGTH = 1024


def largest_tensor(kind):
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from bench_packed import LargestTensor

    model = build("llama", dtype=torch.float32)
    ids = torch.arange(LENGTH)[None] % 64
    batch = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        batch["position_ids"] = torch.arange(LENGTH // 16).repeat(16)[None]
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[:, slice(0, 200) if kind == "left" else slice(-200, None)] = 0
        batch["attention_mask"] = mask
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(batch)
        with LargestTensor() as mode:
            sp.reduce_loss(model(**part).loss, part["shift_labels"]).backward()
    return mode.elements


@pytest.mark.parametrize("kind", ["packed", "left", "right", "plain"])
def test_no_square_tensor(ranks, kind):
    assert max(ranks(2).run(largest_tensor, kind)) < LENGTH * LENGTH // 4


class Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations(documents):
    """Of a step with that many documents of 1 to 11 tokens, or one."""
    model = build("llama", dtype=torch.float32)
    ids = torch.arange(LENGTH)[None] % 64
    lengths = [1 + i * 7 % 11 for i in range(documents - 1)]
    lengths.append(LENGTH - sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with hf_ulysses.attach(model, trial=False):
        for _ in range(2):
            with Operations() as mode:
                model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    return mode.number


def test_many_documents_launch_few_operations(ranks):
    (one, _), (many, _) = (ranks(2).run(operations, documents) for documents in (1, 160))
    assert many <= 2 * one, (many, one)
