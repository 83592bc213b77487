"""What makes a host wait for its GPU, counted by a dispatch mode: nothing in a layer, forward or backward.

A value read by the host (`item`, `tolist`, `bool`, `nonzero`) waits for everything queued so far; a tensor made from a
list is copied to the device from memory that is not pinned, which waits, too (`lift_fresh` is where torch makes one).
On a CPU the same operations are dispatched. What a step does once per batch does not depend on its number of layers, so
layers are judged by the difference between a deep and a shallow model.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ulysses

from ..models import build, packed_positions

WAITS = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "equal", "unique_dim", "_unique2")
LENGTH = 48


class Waits(TorchDispatchMode):
    """Counts the operations of `WAITS` while a `with` block runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in WAITS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def waits_of(attn, packed, heads, layers, backward):
    model = build("llama", attn=attn, dtype=torch.float32, num_hidden_layers=layers, **heads)
    ids = torch.arange(LENGTH)[None] % 64
    batch = {"input_ids": ids, "labels": ids}
    if packed:
        batch["position_ids"] = packed_positions(11, 5, LENGTH - 16)
    with hf_ulysses.attach(model) as sp:
        for _ in range(2):  # The first batch is checked, and makes what is kept.
            part = sp.shard(batch)
            forward, back = Waits(), Waits()
            with forward:
                loss = model(**part).loss
            with back:
                loss.backward()
    return (back if backward else forward).counts


EVEN = dict(num_attention_heads=4, num_key_value_heads=2)
# Over two ranks a query head's KV head is named by an index.
UNEVEN = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("heads", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_no_layer_waits(ranks, attn, packed, heads, backward):
    for few, many in zip(*(ranks(2).run(waits_of, attn, packed, heads, layers, backward) for layers in (1, 3))):
        assert few == many
        assert not backward or not few, few
