"""Losses that are declared to be sums over tokens run on shards: exact, never with whole logits, refused where it does not hold."""

from unittest import mock

import pytest
import torch

import hf_ulysses

from ..ranks import RankFailed
from .trajectory import rows, train

LENGTH = 33


def cross_entropy(outputs, labels, num_items_in_batch=None):
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def shifted(outputs, labels, num_items_in_batch=None):
    """The same for one process: it shifts by itself."""
    return cross_entropy(type(outputs)(logits=outputs.logits[:, :-1]), labels[:, 1:], num_items_in_batch)


def smoothed(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs, labels, num_items_in_batch) + 0.1 * outputs.logits.logsumexp(-1).square().mean()


def trained(declared, function=None, **settings):
    import transformers

    from hf_ulysses.core import entrance

    gathered, gather = [], entrance.gather_sequence
    count = mock.patch.object(entrance, "gather_sequence", lambda t, *rest: gathered.append(t.shape) or gather(t, *rest))

    class WithLoss(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            loss = hf_ulysses.sums_over_tokens(function) if declared else function
            super().__init__(*args, **kwargs, compute_loss_func=loss)

    original = transformers.Trainer
    transformers.Trainer = WithLoss if function is not None else original
    try:
        with count:
            result = train(batch=2, steps=4, data=rows(8, LENGTH), **settings)
    finally:
        transformers.Trainer = original
    result["whole logits"] = sum(shape[-1] == 128 for shape in gathered)
    return result


def assert_same(results, expected, most):
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5
        assert result["whole logits"] <= most, "logits of the whole row, after the batches that are checked"


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_a_declared_loss(ranks, engine):
    expected = ranks(1).run(trained, False, shifted)[0]
    assert_same(ranks(2).run(trained, True, cross_entropy, engine=engine, sp=2), expected, most=2)


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_the_trainers_label_smoothing(ranks, engine):
    expected = ranks(1).run(trained, False, label_smoothing_factor=0.1)[0]
    assert_same(ranks(2).run(trained, False, engine=engine, sp=2, label_smoothing_factor=0.1), expected, most=2)


@pytest.mark.parametrize("function", [shifted, smoothed])
def test_what_is_no_sum_over_tokens_is_refused(ranks, function):
    with pytest.raises(RankFailed, match=f"{function.__name__} is declared to sum over tokens"):
        ranks(2).run(trained, True, function, engine="ddp", sp=2)
