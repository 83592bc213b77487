"""What strangers broke in the first stage, in a bare loop: each against one process (cases 34, 36 and 40)."""

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM, MBartConfig, PLBartConfig

import hf_ulysses
from hf_ulysses.core.sequence import current_row

from ..models import batch_of, build, packed_positions
from ..tiny_models import tiny_config, tiny_model
from .steps import average, gradients

TOLERANCE = 5e-6


def compared(ranks, function, *args, size=2):
    """`function(model_or_attached, ...)` returns a loss and gradients; equal in one process and on ranks."""
    (loss, expected), = ranks(1).run(function, False, *args)  # fmt: skip
    for mine, found in ranks(size).run(function, True, *args):
        assert mine == pytest.approx(loss, rel=1e-6)
        assert found.keys() == expected.keys()
        # Gradients that are zero in theory (a bias on the keys) are noise: measured beside the largest.
        largest = max(gradient.abs().max() for gradient in expected.values())
        worst = max(
            (float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-2 * largest)), name)
            for name in expected
        )
        assert worst[0] < TOLERANCE, worst


def step(model, attached, loss):
    if not attached:
        loss = loss(model)
    else:
        with hf_ulysses.attach(model):
            loss = loss(model)
    loss.backward()
    found = gradients(model)
    return loss.item(), average(found) if attached else found


# -- what the plain model is not told, nobody is told (34) --------------------------------------------------------------

BARTS = {"bart": BartConfig, "mbart": MBartConfig, "plbart": PLBartConfig}


def given_positions_it_ignores(attached, kind):
    torch.manual_seed(0)
    config = dict(d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4, vocab_size=128, dropout=0.0, attention_dropout=0.0)
    config = BARTS[kind](**config, is_decoder=True, is_encoder_decoder=False, init_std=0.2)
    model = AutoModelForCausalLM.from_config(config) if kind != "bart" else BartForCausalLM(config)
    batch = {**batch_of(1, 24), "position_ids": packed_positions(10, 14)}
    return step(model, attached, lambda model: model(**batch, use_cache=False).loss)


@pytest.mark.parametrize("kind", BARTS)
def test_positions_that_the_model_ignores(ranks, kind):
    compared(ranks, given_positions_it_ignores, kind)


# -- terms that no shard has (40) ---------------------------------------------------------------------------------------


def own_loss(attached, kind):
    model = build(dtype=torch.float32)
    batch = batch_of(2, 33)

    def z_loss(model):
        original = model.loss_function

        def with_z(logits, labels, vocab_size, **kwargs):
            return original(logits, labels, vocab_size, **kwargs) + 0.1 * logits.logsumexp(-1).square().mean()

        model.loss_function = with_z
        return model(**batch).loss

    def last_token(model):
        output = model(**batch, output_hidden_states=True)
        return output.loss + output.hidden_states[-1][:, -1].square().mean() + output.logits[:, 0].square().mean()

    def kept_logits(model):
        of_three = model(input_ids=batch["input_ids"], logits_to_keep=3).logits
        chosen = model(input_ids=batch["input_ids"], logits_to_keep=torch.tensor([0, 16, 32])).logits
        return of_three.square().mean() + chosen.logsumexp(-1).sum()

    return step(model, attached, {"z": z_loss, "last": last_token, "kept": kept_logits}[kind])


def test_a_loss_with_the_last_tokens_state(ranks):
    compared(ranks, own_loss, "last")


def test_logits_to_keep(ranks):
    compared(ranks, own_loss, "kept")


def test_a_z_loss_in_the_models_own_loss_function(ranks):
    """A mean over all positions is no mean over targets: the trial tells, and the head is given whole rows."""
    compared(ranks, own_loss, "z")


# -- what is left behind (36) -------------------------------------------------------------------------------------------


def interrupted():
    model, other = build(), build()
    with hf_ulysses.attach(model) as sp:
        sp.locate()
        handle = model.model.layers[1].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch_of(1, 33))
        handle.remove()
        plain = other(**batch_of(1, 33), use_cache=False).loss.item()
        again = model(**batch_of(1, 33)).loss.item()
        assert current_row() is None
        return plain, again, sp.exchanges


def _interrupt(module, args):
    raise KeyboardInterrupt


def test_an_interrupt_leaves_no_row_behind(ranks):
    for plain, again, exchanges in ranks(2).run(interrupted):
        assert again == pytest.approx(plain, rel=1e-6) and exchanges == 3


def forgotten(model_type):
    model = tiny_model(tiny_config(model_type))
    layers = [weakref.ref(module) for module in model.modules()]
    sp = hf_ulysses.attach(model)
    model(**batch_of(1, 33))
    gathered = list(sp.gathered)
    del model, sp
    gc.collect()
    return gathered, sum(layer() is not None for layer in layers)


@pytest.mark.parametrize("model_type", ["bloom", "qwen3_next"])
def test_a_model_that_is_dropped_is_freed(ranks, model_type):
    for gathered, alive in ranks(2).run(forgotten, model_type):
        assert alive == 0 and (gathered or model_type != "bloom")
