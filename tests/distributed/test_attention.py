"""The hook around a core attention function, in float64: output and every gradient are plain attention's to 1e-12.

The module below finds its core as remote modelling code does: through names of this file, which attaching replaces.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ulysses

from ..models import build_mask, packed_positions
from .steps import average, gradients, residual

# Data movement is bitwise and attention sees the same numbers head by head; what may differ is the order in which a
# matrix product over the whole row adds: a few ulp of 2e-16.
TOLERANCE = 1e-12


@dataclass
class Case:
    """An attention layer. `heads`: query and KV heads; `sizes`: of query and key, of value."""

    attn: str = "sdpa"
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (6, 6)
    mask: str = "causal"
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    chunks: int | str = 1


def eager_attention_forward(module, query, key, value, attention_mask, scaling, softcap=None, **kwargs):
    """What eager attention does in the modelling files of Llama, Gemma 2 (softcap) and gpt-oss (sinks)."""
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1) if module.case.sinks else scores[..., :0]
    probabilities = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., : scores.shape[-1]]
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


class Attention(nn.Module):
    def __init__(self, case):
        super().__init__()
        (num_heads, num_kv_heads), (qk_size, v_size) = case.heads, case.sizes
        self.case, self.num_key_value_groups, self.is_causal = (
            case,
            num_heads // num_kv_heads,
            case.mask != "bidirectional",
        )
        self.q, self.k, self.v = (
            nn.Linear(8, n, bias=False) for n in (num_heads * qk_size, num_kv_heads * qk_size, num_kv_heads * v_size)
        )
        self.sinks, self.slopes = nn.Parameter(torch.randn(num_heads)), nn.Parameter(torch.randn(num_heads))
        self.settings = LlamaConfig(attn_implementation=case.attn, sliding_window=5, attention_chunk_size=6)

    def forward(self, inputs_embeds, position_ids=None, attention_mask=None, **kwargs):
        qk_size, v_size = self.case.sizes
        query, key, value = (
            linear(inputs_embeds).unflatten(-1, (-1, size)).transpose(1, 2)
            for linear, size in ((self.q, qk_size), (self.k, qk_size), (self.v, v_size))
        )
        mask = self.mask(inputs_embeds, attention_mask, position_ids)
        core = eager_attention_forward if self.case.attn == "eager" else ALL_ATTENTION_FUNCTIONS[self.case.attn]
        softcap = {} if self.case.softcap is None else {"softcap": self.case.softcap}
        return core(self, query, key, value, mask, scaling=0.3, dropout=0.0, **softcap, **kwargs)[0]

    def mask(self, inputs_embeds, attention_mask, position_ids):
        builders = dict(
            causal=create_causal_mask,
            sliding=create_sliding_window_causal_mask,
            chunked=create_chunked_causal_mask,
            bidirectional=create_bidirectional_mask,
        )
        mask = build_mask(builders[self.case.mask], self.settings, inputs_embeds, attention_mask, position_ids)
        if self.case.bias:  # One slope per head, as in ALiBi.
            mask = mask + self.slopes[:, None, None] * torch.arange(mask.shape[-1], dtype=mask.dtype)
        return mask


def build(case):
    torch.manual_seed(0)
    return Attention(case).double()


def whole(case, batch, weights):
    """Output and all gradients of a weighted sum of it."""
    module, embeds = build(case), batch["inputs_embeds"].clone().requires_grad_()
    position_ids = torch.arange(embeds.shape[1]).expand(embeds.shape[:2])
    out = module(**{"position_ids": position_ids, **batch, "inputs_embeds": embeds})
    (out * weights).sum().backward()
    return {"out": out.detach(), "input": embeds.grad, **gradients(module)}


def sharded(case, batch, weights):
    module, embeds = build(case), batch["inputs_embeds"].clone().requires_grad_()
    with hf_ulysses.attach(module) as sp:
        sp.head_chunks = case.chunks
        part = sp.shard({**batch, "inputs_embeds": embeds, "weights": weights})
        local_weights = part.pop("weights")
        out = module(**part)
        (out * local_weights).sum().backward()
        assert sp.exchanges == 1
        full = sp.gather(out.detach(), like=part)
    summed = {name: tensor * sp.size for name, tensor in average({"input": embeds.grad, **gradients(module)}).items()}
    return {"out": full, **summed}


def compare(ranks, size, case, B=2, S=22, **batch):
    generator = torch.Generator().manual_seed(5)
    batch["inputs_embeds"] = torch.randn(B, S, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(B, S, case.heads[0], case.sizes[1], generator=generator, dtype=torch.float64)
    if "attention_mask" in batch:
        # What a query that sees nothing but padding returns is the core's own affair.
        weights = weights * batch["attention_mask"][..., None, None]
    reference = ranks(1).run(whole, case, batch, weights)[0]
    mask = batch.get("attention_mask", torch.ones(B, S))[..., None, None]
    for results in ranks(size).run(sharded, case, batch, weights):
        results["out"], expected = results["out"] * mask, {**reference, "out": reference["out"] * mask}
        errors = {name: residual(results[name], expected[name]) for name in expected}
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        assert results.keys() == expected.keys() and not wrong, wrong


CASES = {
    "plain": Case(),
    "plain eager": Case("eager"),
    "straddling KV heads": Case(heads=(6, 3)),
    "straddling KV heads eager": Case("eager", heads=(6, 3)),
    "uneven heads": Case(heads=(7, 7)),
    "replicated KV heads": Case(heads=(8, 2)),
    "replicated KV heads, uneven": Case("eager", heads=(10, 2)),
    "one KV head": Case(heads=(4, 1)),
    "sliding window": Case(mask="sliding"),
    "sliding window eager": Case("eager", mask="sliding"),
    "chunked": Case(mask="chunked"),
    "chunked eager": Case("eager", mask="chunked"),
    "bidirectional": Case(mask="bidirectional"),
    "softcap": Case("eager", softcap=0.5),
    "sinks": Case("eager", heads=(8, 2), sinks=True),
    "sinks, sliding window, uneven heads": Case("eager", heads=(7, 7), sinks=True, mask="sliding"),
    "bias per head": Case("eager", heads=(6, 3), bias=True),
    "MLA": Case(heads=(4, 4), sizes=(24, 16)),
    "MLA eager": Case("eager", heads=(4, 4), sizes=(24, 16)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_padded_inside_row(ranks, case, size):
    """22 tokens: two ranks divide them, four do not."""
    compare(ranks, size, CASES[case])


@pytest.mark.parametrize("case", [name for name in CASES if name != "bidirectional"])
def test_packed_documents(ranks, case):
    compare(ranks, 4, CASES[case], B=1, position_ids=packed_positions(5, 11, 6))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_padded_rows(ranks, case, side):
    hidden = torch.tensor([[0] * 7 + [1] * 15, [0] + [1] * 21])
    compare(ranks, 4, CASES[case], attention_mask=hidden if side == "left" else hidden.flip(-1))


CHUNKED = {
    "two chunks": Case(heads=(8, 4), chunks=2),
    "as many as KV heads": Case(heads=(16, 4), chunks=4),
    "auto": Case(heads=(16, 4), chunks="auto"),
    "KV heads that the chunks do not divide": Case(heads=(24, 3), chunks=2),
    "uneven heads in each chunk": Case("eager", heads=(14, 2), chunks=2),
    "parts of a KV head": Case(heads=(16, 1), chunks=4),
    "parts of KV heads": Case("eager", heads=(16, 2), chunks=4),
    "without groups": Case(heads=(9, 9), chunks=2),
    "sinks, sliding window": Case("eager", heads=(16, 4), sinks=True, mask="sliding", chunks=4),
    "bias per head": Case("eager", heads=(12, 3), bias=True, chunks=3),
    "MLA": Case(heads=(8, 8), sizes=(24, 16), chunks=2),
}


@pytest.mark.parametrize("rows", ["plain", "packed", "left"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CHUNKED)
def test_a_few_heads_at_a_time(ranks, case, size, rows):
    hidden = torch.tensor([[0] * 7 + [1] * 15, [0] + [1] * 21])
    more = dict(plain={}, packed=dict(B=1, position_ids=packed_positions(5, 11, 6)), left=dict(attention_mask=hidden))
    compare(ranks, size, CHUNKED[case], **more[rows])
