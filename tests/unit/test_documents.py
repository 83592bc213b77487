"""Documents of a row: found as the definition says, attended one by one with the result of the whole mask."""

import pytest
import torch
import torch.utils.checkpoint
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from hf_ulysses.core import packed as documents
from hf_ulysses.core import sequence as row
from hf_ulysses.core.masks import for_full_row
from hf_ulysses.core.cut import shard_batch

from ..models import build_mask

LENGTH = 24
BUILDERS = [create_causal_mask, create_sliding_window_causal_mask, create_chunked_causal_mask]
CONFIG = LlamaConfig(attn_implementation="sdpa", sliding_window=5, attention_chunk_size=6)


def positions(*rows):
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


def mask(*spans):
    index = torch.arange(LENGTH)
    return torch.stack([(index >= start) & (index < stop) for start, stop in spans]).long()


ROWS = {
    "packed": dict(position_ids=positions((10, 1, 13), (LENGTH,), (1, 1, 22))),
    "padded left": dict(attention_mask=mask((5, LENGTH), (0, LENGTH))),
    "padded right": dict(attention_mask=mask((0, 20), (0, LENGTH))),
    "padded both sides": dict(attention_mask=mask((3, 20), (1, 2))),
}
UNDIVIDED = {
    "one document each": dict(position_ids=positions((LENGTH,), (LENGTH,))),
    "nothing hidden": dict(attention_mask=mask((0, LENGTH))),
    "a row of padding": dict(attention_mask=mask((0, 0), (0, LENGTH))),
    "a hole": dict(attention_mask=mask((0, 10)) + mask((12, LENGTH))),
    "documents that do not start at zero": dict(
        position_ids=torch.cat([positions((10,)), positions((14,)) + 3], dim=1)
    ),
}


def row_of(facts, size=1):
    batch_size, length = next(iter(facts.values())).shape
    return shard_batch({"input_ids": torch.ones(batch_size, length, dtype=torch.long), **facts}, 0, size)[row.ROW_KEY]


def spans(found):
    return [[(document.start, document.stop) for document in documents] for documents in found]


def test_documents_are_where_positions_restart():
    found = documents.split(row_of(ROWS["packed"]), ROWS["packed"]["position_ids"])
    assert spans(found) == [[(0, 10), (10, 11), (11, 24)], [(0, 24)], [(0, 1), (1, 2), (2, 24)]]


def test_documents_are_what_padding_leaves():
    assert spans(documents.split(row_of(ROWS["padded both sides"]), None)) == [[(3, 20)], [(1, 2)]]


@pytest.mark.parametrize("name", UNDIVIDED)
def test_rows_that_need_the_whole_mask(name):
    facts = UNDIVIDED[name]
    assert documents.split(row_of(facts), facts.get("position_ids")) is None


def test_boundaries_of_a_packed_row_with_our_padding():
    found = row_of(dict(position_ids=positions((10, 1, 2))), size=4).flash_arguments()
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 10, 11, 13, 16]
    assert (found["max_length_q"], found["max_length_k"]) == (10, 10)


def built(build, facts):
    """The mask with and without documents, as a model asks for it."""
    embeds = torch.zeros(len(next(iter(facts.values()))), LENGTH, 8)
    arguments = (CONFIG, embeds, facts.get("attention_mask"), facts.get("position_ids", torch.arange(LENGTH)[None]))
    theirs = build_mask(build, *arguments)
    with row.holding(row_of(facts)):
        return build_mask(for_full_row(build), *arguments), theirs


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", ROWS)
def test_attention_over_documents_is_attention_over_the_whole_mask(name, build):
    facts = ROWS[name]
    ours, theirs = built(build, facts)
    batch_size = len(theirs)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch_size, n, LENGTH, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2)]
    # Queries that see nothing may return anything; those of padding on the right see the row in front of it.
    seen = theirs.any(dim=-1).transpose(1, 2)[..., None]

    def core(query, key, value, mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]

    def attend(mask):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        if isinstance(mask, documents.DocumentMask):
            out = documents.attend(core, *leaves, mask, {})
        else:
            out = core(*leaves, mask, {})
        (out * seen).square().sum().backward()
        return [(out * seen).detach(), *(leaf.grad for leaf in leaves)]

    for result, expected in zip(attend(ours), attend(theirs)):
        # float64; the kernel adds up documents instead of rows.
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", BUILDERS[:2], ids=lambda build: build.__name__)
def test_documents_are_attended_by_themselves(build):
    """The reason for all this: no call sees more than a document, and plain causal documents have no mask at all."""
    ours, _ = built(build, ROWS["packed"])
    assert isinstance(ours, documents.DocumentMask)
    calls = []

    def core(query, key, value, mask, kwargs):
        calls.append((len(query), query.shape[2], key.shape[2], None if mask is None else mask.shape[-1]))
        return query.transpose(1, 2)

    tensor = torch.randn(3, 4, LENGTH, 8)
    assert torch.equal(documents.attend(core, tensor, tensor, tensor, ours, {}), tensor.transpose(1, 2))
    # Documents of 24, 22, 13, 10 tokens and of one together, two of one token.
    windowed = build is create_sliding_window_causal_mask
    assert len(calls) == 2 and set(calls) == {(5, 24, 24, 24 if windowed else None), (2, 1, 1, None)}


def test_a_model_that_looks_into_its_mask_gets_the_real_one():
    ours, theirs = built(create_causal_mask, ROWS["packed"])
    assert (ours.shape, ours.dtype, ours.device, ours.dim()) == (theirs.shape, theirs.dtype, theirs.device, 4)
    assert torch.equal(ours.whole(), theirs)
    for changed, expected in [
        (~ours, ~theirs),
        (ours[:, :, :5], theirs[:, :, :5]),
        (ours & theirs, theirs),
        (ours.to(torch.float32), theirs.to(torch.float32)),
        (torch.where(ours, 0.0, -1.0), torch.where(theirs, 0.0, -1.0)),
        (ours.clone(), theirs),
        (theirs.float().to(ours), theirs),
        (torch.cat([ours, theirs]), torch.cat([theirs, theirs])),
        (ours.expand(-1, 4, -1, -1), theirs.expand(-1, 4, -1, -1)),
    ]:
        assert type(changed) is torch.Tensor and torch.equal(changed, expected)


ASKED = {
    "get_device": lambda mask: mask.get_device(),
    "contiguous": lambda mask: mask.contiguous(),
    "is_contiguous": lambda mask: mask.is_contiguous(),
    "is_contiguous, in a format": lambda mask: mask.is_contiguous(memory_format=torch.contiguous_format),
    "detach": lambda mask: mask.detach(),
    "data": lambda mask: mask.data,
    "bool": lambda mask: mask.bool(),
    "to its device": lambda mask: mask.to(mask.device),
    "to its dtype": lambda mask: mask.to(dtype=torch.bool, non_blocking=True),
    "to itself": lambda mask: mask.to(mask),
    "requires_grad": lambda mask: setattr(mask, "requires_grad", mask.requires_grad),
    "sizes": lambda mask: (mask.shape, mask.size(-1), mask.stride(), mask.numel(), mask.nelement(), len(mask), mask.ndim),
    "kinds": lambda mask: (mask.dtype, mask.device, mask.is_cuda, mask.is_complex(), mask.is_floating_point(), mask.grad),
    "repr": repr,
    "bytes": lambda mask: (mask.element_size(), mask.itemsize, mask.nbytes, mask.layout),
}
LONG = 2**21


def mask_of_a_long_row():
    """Whole, it would have 2^42 elements: no machine builds it."""

    def refuse():
        raise AssertionError("the whole mask was built")

    here = slice(0, LONG)
    block = documents.Block(here, here, None, causal=True)
    return documents.document_mask([[block]], LONG, torch.device("cpu"), refuse)


@pytest.mark.parametrize("name", ASKED)
def test_asking_a_mask_what_it_is_does_not_build_it(name):
    mask = mask_of_a_long_row()
    answer = ASKED[name](mask)
    if torch.is_tensor(answer):
        assert answer is mask


@pytest.mark.parametrize("name", ["mT", "mH", "real"])
def test_a_view_of_a_mask_is_one_of_the_real_mask(name):
    ours, theirs = built(create_causal_mask, ROWS["packed"])
    assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_passes_a_mask_on(reentrant):
    mask, seen = mask_of_a_long_row(), []

    def layer(hidden, mask):
        seen.append(mask)
        return hidden * 2

    hidden = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, hidden, mask, use_reentrant=reentrant).sum().backward()
    assert all(isinstance(one, documents.DocumentMask) and one.blocks for one in seen)
    # Nothing of an elementwise product is recomputed but by the reentrant variant.
    assert len(seen) == (2 if reentrant else 1) and torch.equal(hidden.grad, torch.full((3,), 2.0))
