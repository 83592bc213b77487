"""The wrapper around the model's own mask builders: the full row goes in, what cannot be widened is refused."""

import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

from hf_ulysses.core.masks import for_full_row
from hf_ulysses.core.sequence import ROW_KEY, holding
from hf_ulysses.core.cut import shard_batch

from ..models import build_mask

CONFIG = LlamaConfig(attn_implementation="eager", sliding_window=5)
LENGTH, SIZE = 9, 4
SHARD = torch.zeros(1, 3, 8)  # A quarter of nine tokens, padded to twelve.


def row(**facts):
    return shard_batch({"input_ids": torch.ones(1, LENGTH, dtype=torch.long), **facts}, 0, SIZE)[ROW_KEY]


@pytest.mark.parametrize("build", [create_causal_mask, create_sliding_window_causal_mask, create_bidirectional_mask])
def test_the_mask_is_the_full_rows(build):
    """Compared with the mask of the padded row, built whole, where a real token looks."""
    held = row()
    positions = torch.arange(held.padded)[None]
    hidden = (positions < LENGTH).long()
    expected = build_mask(build, CONFIG, torch.zeros(1, held.padded, 8), hidden, positions)
    with holding(held):
        ours = build_mask(for_full_row(build), CONFIG, SHARD, None, positions[:, :3])
    assert ours.shape == expected.shape == (1, 1, held.padded, held.padded)
    assert torch.equal(ours[:, :, :LENGTH] == 0, expected[:, :, :LENGTH] == 0)


def test_without_a_row_nothing_is_changed():
    seen = []

    def create_causal_mask(config, inputs_embeds, attention_mask, **kwargs):
        seen.append((config, inputs_embeds, attention_mask, kwargs))
        return "mask"

    assert for_full_row(create_causal_mask)(CONFIG, SHARD, attention_mask=None, past_key_values=1) == "mask"
    assert seen == [(CONFIG, SHARD, None, {"past_key_values": 1})]


def test_a_query_without_keys_averages_over_the_users_row():
    """Eager attention makes equal weights of a row of smallest numbers; our padding must not be among them."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    with holding(row(attention_mask=mask)):
        built = build_mask(for_full_row(create_causal_mask), CONFIG, SHARD, mask[:, :3], torch.arange(3)[None])
    weights = (torch.zeros(12, 12) + built[0, 0]).softmax(dim=-1)
    torch.testing.assert_close(weights[0], torch.tensor([1 / 9] * 9 + [0] * 3))


def test_the_old_name_of_the_cache():
    """Code outside of transformers goes on using it, and transformers goes on taking it."""
    names = inspect.signature(create_causal_mask).parameters
    arguments = {"cache_position": torch.arange(3)} if "cache_position" in names else {}
    arguments["inputs_embeds" if "inputs_embeds" in names else "input_embeds"] = SHARD
    with holding(row()):
        mask = for_full_row(create_causal_mask)(CONFIG, attention_mask=None, past_key_values=None, **arguments)
    assert mask.shape == (1, 1, 12, 12)


@pytest.mark.parametrize("name", ["or_mask_function", "and_mask_function"])
def test_overlays_are_refused(name):
    overlay = {name: lambda *indices: indices[2] == 0}
    message = f"create_causal_mask was called with {name}.*this rank's shard"
    with holding(row()), pytest.raises(ValueError, match=message):
        build_mask(for_full_row(create_causal_mask), CONFIG, SHARD, None, torch.arange(3)[None], **overlay)


def test_a_cache_is_refused():
    cache = DynamicCache(config=CONFIG)
    with holding(row()), pytest.raises(ValueError, match="key/value cache: set use_cache=False"):
        build_mask(for_full_row(create_causal_mask), CONFIG, SHARD, None, torch.arange(3)[None], cache)
