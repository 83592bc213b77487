"""Published: Qwen3-4B, 4 x H100 80 GB, ZeRO-3, no offload, checkpointing, flash attention 2, full logits, sp 4."""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from hf_ulysses.planner.plan import plan_zero3


@pytest.mark.parametrize(("length", "published"), [(8192, 23.4), (98304, 66.0), (131072, None)])
def test_published(length, published):
    shape = json.loads((Path(__file__).parents[1] / "shapes" / "qwen3-4b.json").read_text())
    plan = plan_zero3(CONFIG_MAPPING[shape.pop("model_type")](**shape), length, 4, 4, 80)
    assert plan["fits"] == (published is not None)
    if published is not None:
        assert plan["peak_memory_gib"] == pytest.approx(published, rel=0.15)
