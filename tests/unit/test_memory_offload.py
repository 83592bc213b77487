"""Checkpoint offload in one process, on a CPU: the same numbers, and what stays on the device."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from hf_ulysses.memory import Settings, switch_on

from ..distributed.steps import assert_same, whole
from ..models import batch_of, build, checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_exchange import LiveStorage  # noqa: E402


def offloaded(model):
    handles = switch_on(model, Settings(offload_checkpoints=True))
    return handles, handles[-1].host


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_the_same_numbers_to_the_last_bit(family, reentrant):
    model = build(family)
    checkpoint(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    reference = whole(model, batch_of(2))
    handles, host = offloaded(model)
    for _ in range(2):
        assert_same(whole(model, batch_of(2)), reference, tolerance=0)
    # One input per layer, and the buffers of the first step serve the second.
    assert host.allocated == len(model.model.layers) * 2 * 33 * 64 * 8
    assert len(host.buffers) == len(model.model.layers)
    for handle in handles:
        handle.remove()
    assert_same(whole(model, batch_of(2)), reference, tolerance=0)
    assert "_Offloading" not in repr([vars(layer) for layer in model.model.layers])


def test_what_stays_on_the_device_does_not_grow_with_the_layers():
    def left(layers, offload):
        model = build(num_hidden_layers=layers, dtype=torch.float32)
        checkpoint(model)
        handles, host = offloaded(model) if offload else ([], None)
        tokens = batch_of(1, 512)["input_ids"]
        with LiveStorage() as storage:
            out = model.model(tokens, use_cache=False).last_hidden_state
            gc.collect()
            on_device = storage.live - (host.allocated if offload else 0)
            out.sum().backward()
        return on_device

    hidden = 512 * 64 * 4
    assert left(6, False) - left(2, False) == pytest.approx(4 * hidden, rel=0.05)
    assert abs(left(6, True) - left(2, True)) < 0.05 * hidden


def test_two_forwards_before_backward_and_two_backwards():
    model = build()
    checkpoint(model)

    def gradient():
        model.zero_grad()
        losses = [model(**batch_of(1, length, seed=length)).loss for length in (20, 31)]
        sum(losses).backward(retain_graph=True)
        losses[0].backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradient()
    handles, host = offloaded(model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradient(), expected))
    assert len(host.buffers) == 2 * len(model.model.layers)


def test_longer_rows_replace_the_buffers_of_shorter_ones():
    model = build()
    checkpoint(model)
    _, host = offloaded(model)
    for length in (9, 33, 17):
        model(**batch_of(1, length)).loss.backward()
    assert host.allocated == len(model.model.layers) * 33 * 64 * 8


def test_switched_on_before_checkpointing_is_and_again():
    model = build()
    _, host = offloaded(model)
    checkpoint(model)
    for _ in range(2):
        model(**batch_of()).loss.backward()
        checkpoint(model)
    assert host.allocated


def test_without_checkpointing_is_refused():
    model = build()
    offloaded(model)
    with pytest.raises(ValueError, match="no layer of LlamaModel is checkpointed.*gradient_checkpointing=True"):
        model(**batch_of())
    model.eval()
    with torch.no_grad():
        model(**batch_of())
