"""Rows that cross what a model treats specially: the positions its rotary embeddings were made for, windows, chunks.

Rows of 45 tokens over 2 and 4 ranks, the packed one's documents of up to 23: forward and every gradient, one after the
other on the same model, whose rotary embeddings remember the longest row.
"""

import pytest

from ..one_architecture import CASES, try_architecture

LAYOUTS = {2: (4, 2), 4: (6, 3)}

# Full and partial rotary embeddings, one per kind of layer, complex ones, a modelling file's own class.
ROTARY = ("llama", "qwen2", "phi3", "gemma3_text", "deepseek_v2", "phimoe")


def assert_exact(ranks, size, model_type, changes=None):
    for found in ranks(size).run(try_architecture, model_type, *LAYOUTS[size], CASES, changes):
        statuses = {case: found.get(case, found.get("model")) for case in CASES}
        assert all(answer["status"] == "exact" for answer in statuses.values()), statuses


@pytest.mark.half("model_type", "rope_type", "size")
@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("model_type", ROTARY)
def test_only_the_last_shard_lies_beyond_the_original_positions(ranks, model_type, rope_type, size):
    assert_exact(ranks, size, f"{model_type}+{rope_type}")


# As long as a shard; longer than one and shorter than two; longer than the row.
@pytest.mark.half("name", "length", "size")
@pytest.mark.parametrize("size, length", [(2, 23), (4, 17), (4, 64)])
@pytest.mark.parametrize(
    "model_type, name",
    [
        ("mistral", "sliding_window"),
        ("gemma3_text", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("llama4_text", "attention_chunk_size"),
        ("nemotron_h", "chunk_size"),
        ("bamba", "mamba_chunk_size"),
    ],
)
def test_windows_and_chunks_across_the_cuts(ranks, model_type, name, length, size):
    assert_exact(ranks, size, model_type, {name: length})
