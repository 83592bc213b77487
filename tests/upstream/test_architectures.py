"""A few architectures of each way in which attention or mixing differs; scripts/sweep_architectures.py tries all of them."""

import pytest
import torch

import hf_ulysses

from ..models import batch_of, build
from ..one_architecture import CASES, try_architecture
from ..tiny_models import tiny_config

# What must hold over two and over four ranks, and the modules that exchange around their scans and convolutions.
MUST_HOLD = {
    "qwen3_5_text": ("linear_attn",),
    "qwen3_next": ("linear_attn",),
    "gpt_oss": (),
    "gemma2": (),
    "gemma3": (),
    "gemma4": (),
    "mistral": (),
    "llama4": (),
    "deepseek_v3": (),
    "olmo3": (),
    "lfm2": ("conv",),
    "nemotron_h": ("mixer",),
    "bamba": ("mamba",),
    "falcon_h1": ("mamba",),
}
# What else stands between attention and exactness: the modules that run on the whole row, and those that exchange inside.
OTHERS = {
    "deepseek_v32": (("self_attn",), ()),  # An indexer.
    "bloom": (("transformer",), ()),  # ALiBi from the whole mask, made around the layers: all of it runs whole.
    "roberta": (("embeddings",), ()),  # Positions counted behind padding.
    "opt": ((), ()),  # Positions counted where the mask is one.
    "openai-gpt": (("attn",), ()),  # No interface.
    "whisper": ((), ()),  # A decoder that scores labels as they are.
    "hrm_text": ((), ()),  # Runs its layers without gradients, too.
}
LAYOUTS = {2: (4, 2), 4: (6, 3)}


@pytest.mark.parametrize(
    "model_type, size", [(name, size) for size in LAYOUTS for name in MUST_HOLD] + [(name, 2) for name in OTHERS]
)
def test_exact(ranks, model_type, size):
    for found in ranks(size).run(try_architecture, model_type, *LAYOUTS[size]):
        assert found["unpacked"]["status"] == "exact", found
        possible = ("exact",) if model_type in MUST_HOLD else ("exact", "impossible")
        assert all(found[case]["status"] in possible for case in CASES), found
        gathered, split = OTHERS.get(model_type, ((), MUST_HOLD.get(model_type, ())))
        assert _kinds(found["unpacked"]["gathered"]) == set(gathered)
        assert bool(found["unpacked"]["scans"]) == bool(split)


def _kinds(modules):
    return {name.rpartition(".")[2] for name in modules}


def sharded_loss(change):
    """Loss of a tiny Llama that `change` has spoiled: whole, and sharded."""
    model = build("llama", dtype=torch.float32)
    change(model)
    batch = batch_of(1, 33)
    whole = model(**batch, use_cache=False).loss
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(batch)
        loss = sp.reduce_loss(model(**part).loss, part["shift_labels"])
        return whole.item(), loss.item(), sp.gathered, sp.scans


class Convolving(torch.nn.Module):
    """A layer that nobody knows: it adds what the token before had."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def convolve(model):
    model.model.layers[1].mlp = Convolving(model.model.layers[1].mlp)


def test_a_convolution_that_nobody_knows_runs_on_the_whole_row(ranks):
    for whole, sharded, gathered, scans in ranks(2).run(sharded_loss, convolve):
        assert sharded == pytest.approx(whole, rel=1e-5)
        assert not scans and gathered == ["model.layers.1.mlp"]


def average_over_the_row(model):
    model.model.forward = _averaging(model.model.forward)


def _averaging(forward):
    def averaging(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(dim=1, keepdim=True)
        return output

    return averaging


def test_what_mixes_around_the_layers_runs_whole(ranks):
    """The last resort: no rank has less to do than without sequence parallelism, and all compute the same."""
    for whole, loss, gathered, scans in ranks(2).run(whole_loss, average_over_the_row):
        assert loss == whole and gathered == ["model"] and not scans


def whole_loss(change):
    model = build("llama", dtype=torch.float32)
    change(model)
    batch = batch_of(1, 33)
    whole = model(**batch, use_cache=False).loss
    with hf_ulysses.attach(model) as sp:
        loss = model(**batch).loss
        with pytest.raises(ValueError, match="runs on whole rows, but was given a sharded batch"):
            model(**sp.shard(batch))
        return whole.item(), loss.item(), sp.gathered, sp.scans


def test_reversible_layers_run_whole(ranks):
    """Reformer runs its layers again in an autograd function of its own, in training only without padding."""
    for found in ranks(2).run(try_architecture, "reformer", 4, 2):
        assert all(found[case]["status"] == "exact" and found[case]["gathered"] == ["reformer"] for case in CASES), found


def found_in_half_precision(model_type):
    """Modules that run on the whole row in a model as it is initialised, where their effect on the logits is small."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).to(torch.bfloat16)
    ids = torch.randint(3, 99, (1, 46), generator=torch.Generator().manual_seed(0))
    with hf_ulysses.attach(model) as sp:
        sp.shard({"input_ids": ids, "labels": ids})
        return sp.gathered


@pytest.mark.parametrize(
    "model_type, modules",
    [("llama", []), ("mixtral", []), ("lfm2", []), ("qwen3_next", []), ("gpt_neo", ["transformer.h.0.attn.attention", "transformer.h.1.attn.attention"])],
)
def test_half_precision_is_not_mistaken_for_mixing(ranks, model_type, modules):
    assert ranks(2).run(found_in_half_precision, model_type) == [modules, modules]
