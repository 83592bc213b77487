"""What makes a host wait for its GPU, counted on a CPU: nothing in a layer, forward or backward, little in a micro-batch.

A value read by the host (`item`, `tolist`, `bool`, `nonzero`, `cpu`) waits for everything queued so far; a tensor made from a
list is copied to the device from memory that is not pinned, which waits, too (`lift_fresh` is where torch makes one). On a
CPU some are dispatched, others are seen only where Python calls them.
"""

import contextlib
import itertools
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ulysses

from ..kernels import flash_attn_2_cuda as extension, without_gpu
from ..kernels.flash import flash
from ..models import build, packed_positions
from .test_flex import fake_flex

pytestmark = without_gpu

DISPATCHED = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "equal", "unique_dim", "_unique2")
# What comes after `cpu` (`numpy`) reads the host's memory.
CALLED = (torch.Tensor.cpu, torch.Tensor.tolist)
LENGTH = 48
PAUSED = [False]


class Dispatched(TorchDispatchMode):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in DISPATCHED and not PAUSED[0]:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CALLED and not PAUSED[0]:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits():
    """Counts what waits, by name, while a `with` block runs."""
    counts = Counter()
    with Called(counts), Dispatched(counts):
        yield counts


def uncounted(function):
    """A stand-in for a kernel looks at its arguments; the kernel does not."""

    def run(*args, **kwargs):
        before, PAUSED[0] = PAUSED[0], True
        try:
            return function(*args, **kwargs)
        finally:
            PAUSED[0] = before

    return run


@contextlib.contextmanager
def kernels(attn):
    with contextlib.ExitStack() as stack:
        if attn == "flash_attention_2":
            stack.enter_context(flash(attn, exact=True))
            for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"):
                stack.enter_context(mock.patch.object(extension, name, uncounted(getattr(extension, name))))
        if attn == "flex_attention":
            ALL_ATTENTION_FUNCTIONS[attn] = uncounted(fake_flex)
            stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, attn)
            stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield


def waits_of(attn, rows, heads):
    """Of a micro-batch with one layer and with three: waits in forward and in backward."""
    found = []
    for layers in (1, 3):
        with kernels(attn):
            model = build("llama", attn=attn, dtype=torch.float32, num_hidden_layers=layers, **heads)
            ids = torch.arange(LENGTH)[None] % 64
            batch = {"input_ids": ids, "labels": ids, **ROWS[rows]}
            with hf_ulysses.attach(model, trial=False):
                model(**batch).loss.backward()  # The first batch is checked, and makes what is kept.
                with waits() as forward:
                    loss = model(**batch).loss
                with waits() as backward:
                    loss.backward()
        found.append((forward, backward))
    return found


EVEN = dict(num_attention_heads=4, num_key_value_heads=2)
# Over two ranks a query head's KV head is named by an index.
UNEVEN = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
# A tokenizer's mask of ones hides nothing.
ROWS = {
    "plain": {},
    "counted": dict(position_ids=torch.arange(LENGTH)[None]),
    "packed": dict(position_ids=packed_positions(11, 5, LENGTH - 16)),
    "mask of ones": dict(attention_mask=torch.ones(1, LENGTH, dtype=torch.long)),
}


ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
PRODUCT = list(itertools.product(ATTENTION, ROWS, ("even", "uneven")))
# Every pair of attention and rows; heads in turn, so that each pair with them is there, too.
PAIRWISE = [(a, r, h) for a, r, h in PRODUCT if (ATTENTION.index(a) + list(ROWS).index(r)) % 2 == (h == "uneven")]


@pytest.mark.parametrize("attn,rows,heads", PRODUCT if os.environ.get("HF_ULYSSES_TEST_ALL") else PAIRWISE)
def test_no_layer_waits(ranks, attn, rows, heads):
    heads = dict(even=EVEN, uneven=UNEVEN)[heads]
    for (few, few_back), (many, many_back) in ranks(2).run(waits_of, attn, rows, heads):
        assert few == many, "forward"
        assert few_back == many_back == Counter(), "backward"
        assert many.total() <= 3, many


def names_in_a_trace():
    model = build("llama", dtype=torch.float32)
    ids = torch.arange(LENGTH)[None] % 64
    with hf_ulysses.attach(model, trial=False):
        with torch.profiler.profile() as trace:
            model(input_ids=ids, labels=ids).loss.backward()
    return Counter(event.name for event in trace.events() if event.name.startswith("hf_ulysses"))


def test_the_exchange_has_a_name_in_a_trace(ranks):
    """Once each in the forward and the backward of two layers."""
    names = ranks(2).run(names_in_a_trace)[0]
    assert names == {"hf_ulysses: heads of the whole row": 4, "hf_ulysses: all heads of the shard": 4}
