"""Tiled MLPs and norms in one process: values, every gradient, and live storage, against the same model without."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_ulysses.memory import Settings, switch_on
from hf_ulysses.memory.tiles import cut

from ..distributed.steps import FLOAT32, TOLERANCE, assert_same, whole
from ..models import FAMILIES, batch_of, build, checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_exchange import LiveStorage  # noqa: E402


@pytest.mark.parametrize("length,tiles,sizes", [(5, 4, [2, 1, 1, 1]), (2, 4, [1, 1, 0, 0]), (8, 2, [4, 4]), (1, 1, [1])])
def test_cut(length, tiles, sizes):
    pieces = cut(length, tiles)
    assert [piece.stop - piece.start for piece in pieces] == sizes
    assert [i for piece in pieces for i in range(length)[piece]] == list(range(length))


def compare(model, batch, tolerance=TOLERANCE, **settings):
    reference = whole(model, batch)
    handles = switch_on(model, Settings(**settings))
    assert handles
    step = whole(model, batch)
    for handle in handles:
        handle.remove()
    assert_same(step, reference, tolerance=tolerance)
    assert_same(whole(model, batch), reference, tolerance=0)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", sorted(set(FAMILIES)))
def test_every_family(family, checkpointed):
    model = build(family, "eager")
    if checkpointed:
        checkpoint(model)
    compare(model, batch_of(2, 13), tiled_mlp=4, tiled_norms=3)


@pytest.mark.parametrize("length,tiles", [(5, 4), (2, 4), (1, 3), (7, 7), (9, 2)])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("partitioned", [False, True])
def test_any_length_in_any_number_of_tiles(length, tiles, batch_size, partitioned):
    model = build()
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    if partitioned:  # As ZeRO-3 marks parameters: then all ranks make the same number of calls.
        for parameter in model.model.layers[0].mlp.parameters():
            parameter.ds_id = 0
    batch = batch_of(batch_size, length + 1)
    batch = {name: value[:, :length] for name, value in batch.items()}
    reference = whole(model, batch) if length > 1 else None
    switch_on(model, Settings(tiled_mlp=tiles, tiled_norms=tiles))
    model.model(batch["input_ids"])  # The check.
    model.model.layers[0].mlp.up_proj.register_forward_hook(count)
    model.model(batch["input_ids"])
    assert calls == (tiles if partitioned else min(tiles, length))
    if reference is not None:
        assert_same(whole(model, batch), reference)


class Shifting(nn.Module):
    """What looks like an MLP and mixes positions, as the channel mixers of RWKV do."""

    def __init__(self, mlp):
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x):
        return self.down_proj(self.up_proj(x - 0.5 * nn.functional.pad(x, (0, 0, 1, -1))))


class Longing(Shifting):
    def forward(self, x):
        return self.down_proj(self.up_proj(x)) / x.shape[1]


class Two(Shifting):
    def forward(self, x):
        return self.down_proj(self.up_proj(x)), x


@pytest.mark.parametrize("kind,reason", [(Shifting, "depends on other"), (Longing, "depends on other"), (Two, "else than one tensor")])
def test_what_is_no_mlp_is_refused_by_name(kind, reason):
    model = build()
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp)
    switch_on(model, Settings(tiled_mlp=2))
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be cut into tiles .tiled_mlp=2.*{reason}"):
        model(**batch_of(1, 9))


def test_a_model_without_is_refused_by_name():
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(vocab_size=32, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="tiled_mlp found no MLP in OPTForCausalLM"):
        switch_on(model, Settings(tiled_mlp=True))
    # Its norms are torch's, and stay.
    assert switch_on(model, Settings(tiled_norms=True)) == []
    with pytest.raises(ValueError, match="tiled_norms found no norm in Linear"):
        switch_on(nn.Linear(2, 2), Settings(tiled_norms=True))


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "falcon", "phi3", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmo2"])
def test_other_shapes_of_mlp(architecture):
    from ..tiny_models import tiny_config, tiny_model

    # The grouped matrix product of experts has no float64.
    model = tiny_model(tiny_config(architecture, heads=4, kv_heads=2)).train()
    compare(model, batch_of(2, 11), tolerance=FLOAT32, tiled_mlp=3, tiled_norms=3)


def test_a_copy_has_tiles_of_its_own():
    model = build()
    reference = whole(build(), batch_of())
    switch_on(model, Settings(tiled_mlp=2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    assert_same(whole(twin, batch_of()), reference)


def test_lora_dropout_and_evaluation():
    from peft import LoraConfig, get_peft_model

    model = build()
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj", "down_proj", "q_proj"], init_lora_weights=False)).double()
    compare(model, batch_of(2, 9), tiled_mlp=4, tiled_norms=2)
    model.eval()
    with torch.no_grad():
        expected = model(**batch_of()).logits
        switch_on(model, Settings(tiled_mlp=4, tiled_norms=4))
        assert torch.allclose(model(**batch_of()).logits, expected, atol=1e-6)


def peak(model, x):
    with LiveStorage() as storage:
        out = model(x)
        out.backward(torch.ones_like(out))
    return storage.peak


def test_the_peak_of_an_mlp_in_eight_tiles():
    """At most 0.3x of the MLP's peak; what is left is mostly its input's and output's own size."""
    mlp = build(dtype=torch.float32, hidden_size=32, intermediate_size=112).model.layers[0].mlp
    plain, x = peak(mlp, torch.randn(1, 4096, 32, requires_grad=True)), torch.randn(1, 4096, 32, requires_grad=True)
    holder = nn.ModuleList([mlp])
    switch_on(holder, Settings(tiled_mlp=8))
    mlp(x)
    tiled = peak(mlp, x)
    assert tiled <= 0.3 * plain, (tiled, plain)


def test_the_peak_of_a_norm_in_eight_tiles():
    norm = build().model.norm.bfloat16()
    x = torch.randn(1, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = peak(norm, x)
    switch_on(nn.ModuleList([norm]), Settings(tiled_norms=8))
    norm(x)
    tiled = peak(norm, x)
    assert tiled <= 0.4 * plain, (tiled, plain)
