"""Packed and padded rows make no tensor of S x S elements under sdpa; counted by a dispatch mode, not by the clock."""

import sys
from pathlib import Path

import pytest
import torch

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
