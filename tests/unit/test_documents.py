"""Documents of a row: found as the definition says, attended one by one with the result of the whole mask."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from hf_ulysses.core import packed
from hf_ulysses.core import sequence as row
from hf_ulysses.core.masks import for_full_row
from hf_ulysses.core.cut import shard_batch

from ..models import build_mask

LENGTH = 24
BUILDERS = [create_causal_mask, create_sliding_window_causal_mask, create_chunked_causal_mask]
# Windows and chunks longer than any row, or shorter than most documents.
CONFIG = LlamaConfig(attn_implementation="sdpa", sliding_window=30, attention_chunk_size=30)
SHORT = LlamaConfig(attn_implementation="sdpa", sliding_window=5, attention_chunk_size=6)


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
    assert spans(row_of(ROWS["packed"]).facts.documents) == [[(0, 10), (10, 11), (11, 24)], [(0, 24)], [(0, 1), (1, 2), (2, 24)]]


def test_documents_are_what_padding_leaves():
    assert spans(row_of(ROWS["padded both sides"]).facts.visible) == [[(3, 20)], [(1, 2)]]


def test_boundaries_of_a_packed_row_with_our_padding():
    found = row_of(dict(position_ids=positions((10, 1, 2))), size=4).flash_arguments()
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 10, 11, 13, 16]
    assert (found["max_length_q"], found["max_length_k"]) == (10, 10)


def built(build, facts, config=CONFIG):
    """Our mask, the row, and the mask of one process, as a model asks for it."""
    embeds = torch.zeros(len(next(iter(facts.values()))), LENGTH, 8)
    arguments = (config, embeds, facts.get("attention_mask"), facts.get("position_ids", torch.arange(LENGTH)[None]))
    theirs = build_mask(build, *arguments)
    with row.holding(row_of(facts)) as held:
        return build_mask(for_full_row(build), *arguments), held, theirs


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", ROWS)
def test_attention_over_documents_is_attention_over_the_whole_mask(name, build):
    facts = ROWS[name]
    ours, held, theirs = built(build, facts)
    assert ours is None and torch.equal(held.build_mask(), theirs)
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
        out = packed.attend(core, *leaves, held.bundles, {}) if mask is None else core(*leaves, mask, {})
        (out * seen).square().sum().backward()
        return [(out * seen).detach(), *(leaf.grad for leaf in leaves)]

    for result, expected in zip(attend(ours), attend(theirs)):
        # float64; the kernel adds up documents instead of rows.
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", BUILDERS[1:], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", ROWS)
def test_what_is_shorter_than_a_document_needs_the_whole_mask(name, build):
    ours, held, theirs = built(build, ROWS[name], SHORT)
    assert torch.equal(ours, theirs) and held.build_mask is None


@pytest.mark.parametrize("name", UNDIVIDED)
def test_rows_that_need_the_whole_mask(name):
    ours, held, theirs = built(create_causal_mask, UNDIVIDED[name])
    assert held.build_mask is None and (ours is theirs is None or torch.equal(ours, theirs))


def test_a_model_that_tells_no_positions_does_not_part_documents():
    facts = ROWS["packed"]
    with row.holding(row_of(facts)) as held:
        assert build_mask(for_full_row(create_causal_mask), CONFIG, torch.zeros(3, LENGTH, 8), None, None) is None
    assert held.build_mask is None


def test_documents_are_attended_by_themselves():
    """The reason for all this: no call sees more than a document, and none has a mask."""
    _, held, _ = built(create_causal_mask, ROWS["packed"])
    calls = []

    def core(query, key, value, mask, kwargs):
        calls.append((len(query), query.shape[2], key.shape[2], mask))
        return query.transpose(1, 2)

    tensor = torch.randn(3, 4, LENGTH, 8)
    assert torch.equal(packed.attend(core, tensor, tensor, tensor, held.bundles, {}), tensor.transpose(1, 2))
    # Documents of 24, 22, 13, 10 tokens and of one together, two of one token.
    assert len(calls) == 2 and set(calls) == {(5, 24, 24, None), (2, 1, 1, None)}
