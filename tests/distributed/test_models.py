"""Whole models: loss, logits and every gradient of a sharded step are those of one process, family by family."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from ..models import batch_of, packed_positions, padded
from .steps import FLOAT32, compare

# gemma2's softcap and gpt_oss's sinks exist in eager only.
EAGER_ONLY = ("gemma2", "gpt_oss")
BOTH = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "deepseek_v3", "llama4_text", "gemma4_text")
PAIRS = [(family, "eager") for family in EAGER_ONLY + BOTH] + [(family, "sdpa") for family in BOTH]
PAIRS = [(family, attn) for family, attn in PAIRS if family in CONFIG_MAPPING]  # Old versions lack some.


@pytest.mark.parametrize("family, attn", PAIRS)
def test_a_row_whose_length_sp_does_not_divide(ranks, family, attn):
    compare(ranks, 2, batch_of(1, 33), family=family, attn=attn)


@pytest.mark.parametrize("family, attn", PAIRS)
def test_three_packed_documents_over_four_ranks(ranks, family, attn):
    """Case 11: documents across every cut, a padded tail behind them."""
    compare(ranks, 4, batch_of(1, 41, position_ids=packed_positions(13, 9, 19)), family=family, attn=attn)


@pytest.mark.half("family", "attn", "side")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family, attn", PAIRS)
def test_padded_rows(ranks, family, attn, side):
    """Cases 9, 21: three different rows of 20 to 34 tokens, no position_ids in the batch; four ranks pad them again.

    The last token of padding on the left predicts the first real one, so what a query without keys returns counts, too.
    """
    batch = padded(batch_of(3, 34), real=[20, 34, 27], side=side)
    # Eager attention turns float64's smallest number, which hides the keys of a row of padding, into -inf and NaN.
    precision = dict(dtype=torch.float32, tolerance=FLOAT32) if attn == "eager" else {}
    compare(ranks, 4, batch, family=family, attn=attn, **precision)
