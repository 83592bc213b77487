"""Which rank owns which heads: every combination of small counts against the definition of grouped-query attention."""

import re

import pytest

from hf_ulysses.core.heads import chunk_heads, share_heads

COUNTS = [
    (num_heads, num_kv_heads, sp_size)
    for num_heads in range(1, 17)
    for num_kv_heads in range(1, num_heads + 1)
    if num_heads % num_kv_heads == 0
    for sp_size in range(1, num_heads + 1)
] + [(40, 8, 16), (32, 8, 16), (64, 8, 64), (28, 4, 8), (71, 1, 8)]


def kv_heads_attended_with(share):
    """For each of a rank's query heads, in order, the model's KV head that its core attention would use."""
    local = share.kv_index or [i // share.groups for i in range(share.num_query)]
    return [share.kv.start + index for index in local]


def num_kv_after_index(share):
    return len(share.kv_index) if share.kv_index else share.num_kv


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_against_the_definition(counts):
    num_heads, num_kv_heads, sp_size = counts
    shares = share_heads(*counts)
    assert len(shares) == sp_size

    owned = [head for share in shares for head in range(num_heads)[share.query]]
    assert owned == list(range(num_heads)), "every query head has one owner, in rank order"

    loads = [share.num_query for share in shares]
    assert max(loads) - min(loads) <= 1 and min(loads) >= 1

    for share in shares:
        wanted = [head // (num_heads // num_kv_heads) for head in range(num_heads)[share.query]]
        assert kv_heads_attended_with(share) == wanted
        assert sorted(set(wanted)) == list(range(num_kv_heads)[share.kv]), "no KV head travels for nothing"
        assert num_kv_after_index(share) * share.groups == share.num_query, "what repeat_kv makes of it"

    carried = [head for share in shares for head in range(num_kv_heads)[share.kv]]
    if num_kv_heads % sp_size == 0:
        assert carried == list(range(num_kv_heads)), "no KV head is computed twice when the counts divide"
    if sp_size % num_kv_heads == 0:
        assert all(share.num_kv == 1 for share in shares), "replicas only as far as the ranks need them"
    if num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0:
        assert all(share.kv_index is None for share in shares), "attention repeats KV heads by itself"


def test_too_many_ranks_lists_the_options():
    with pytest.raises(ValueError, match=r"sp_size=16 exceeds the 12 query heads.*from 1 to 12.*\[1, 2, 3, 4, 6, 12\]"):
        share_heads(12, 4, 16)


def test_heads_that_are_not_grouped():
    with pytest.raises(ValueError, match=re.escape("7 query heads are no multiple of 2 key/value heads")):
        share_heads(7, 2, 2)


@pytest.mark.parametrize(
    "heads,sp_size,chunks,sizes",
    [
        ((32, 8), 8, 4, [(8, 2)] * 4),
        ((32, 8), 8, "auto", [(8, 2)] * 4),
        ((32, 8), 4, 8, [(4, 1)] * 8),
        ((32, 8), 16, "auto", [(16, 4)] * 2),
        ((24, 3), 4, 2, [(16, 2), (8, 1)]),
        ((16, 1), 4, 4, [(4, 1)] * 4),
        ((16, 2), 4, 4, [(4, 1)] * 4),
        ((9, 9), 4, 2, [(5, 5), (4, 4)]),
        ((7, 7), 4, "auto", [(7, 7)]),
    ],
)
def test_chunks(heads, sp_size, chunks, sizes):
    found = chunk_heads(*heads, sp_size, chunks)
    assert [(chunk.num_query, chunk.num_kv) for chunk in found] == sizes
    assert [head for chunk in found for head in range(heads[0])[chunk.query]] == list(range(heads[0]))
    assert all(chunk.query.start // (heads[0] // heads[1]) == chunk.kv.start for chunk in found)


@pytest.mark.parametrize("heads,sp_size,chunks,choices", [((8, 2), 4, 4, "1, 2"), ((8, 2), 2, 3, "1, 2, 4"), ((4, 4), 4, 2, "1")])
def test_chunks_that_do_not_fit_are_refused_with_those_that_do(heads, sp_size, chunks, choices):
    with pytest.raises(ValueError, match=rf"head_chunks={chunks} .*{heads[0]} query.*Choose it from \[{choices}\]"):
        chunk_heads(*heads, sp_size, chunks)
