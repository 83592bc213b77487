"""One forward and backward of a tiny model: whole in one process, and sharded over the ranks of a world.

Both return loss, logits of the full row and every gradient; `assert_same` compares them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import hf_ulysses

from ..models import build

# Relative to the largest entry of a tensor. The models are float64, but modelling files compute norms, rotary tables,
# softmax and the loss in float32: a last bit of 6e-8 that flips there is amplified a few times. Measured: below 4e-7.
TOLERANCE = 2e-6
# For whole models in float32: every sum may be taken in another order. Measured: below 1.2e-6.
FLOAT32 = 5e-6


@dataclass
class Step:
    loss: float
    logits: torch.Tensor
    gradients: dict
    exchanges: int = 0


def whole(model, batch):
    """The step on the full rows, as the model does it by itself; with a cache it would not tell documents apart."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return Step(output.loss.item(), of_real_tokens(output.logits, batch), gradients(model))


def sharded(model, batch, sp):
    """The same step on an attached model; gradients averaged over ranks, as every engine does."""
    model.zero_grad()
    before = sp.exchanges
    part = sp.shard(batch)
    output = model(**part)
    loss = sp.reduce_loss(output.loss, part["shift_labels"])
    loss.backward()
    logits = of_real_tokens(sp.gather(output.logits, like=part), batch)
    return Step(loss.item(), logits, average(gradients(model)), sp.exchanges - before)


def on_whole_rows(model, batch, sp):
    """The same step with whole rows: the attached model is called like any other."""
    model.zero_grad()
    before = sp.exchanges
    output = model(**batch)
    output.loss.backward()
    return Step(
        output.loss.item(), of_real_tokens(output.logits, batch), average(gradients(model)), sp.exchanges - before
    )


def of_real_tokens(logits, batch):
    """Nobody reads the logits of padding, and where a window sees nothing but padding they average over all of it."""
    mask = batch.get("attention_mask")
    return logits.detach() if mask is None else logits.detach().where(mask[..., None] == 1, 0)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def average(tensors, group=None):
    for tensor in tensors.values():
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)
    return tensors


def whole_step(batch, **model):
    return whole(build(**model), batch)


def sharded_step(batch, **model):
    model = build(**model)
    with hf_ulysses.attach(model) as sp:
        return [sharded(model, batch, sp), on_whole_rows(model, batch, sp)]


def residual(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def assert_same(steps, reference, *, tolerance=TOLERANCE, exchanges=None):
    """Every rank's loss, logits and gradients are the reference's, and attention went through the exchange."""
    for step in steps if isinstance(steps, list) else [steps]:
        assert abs(step.loss - reference.loss) <= tolerance * abs(reference.loss), (step.loss, reference.loss)
        assert step.logits.shape == reference.logits.shape
        assert residual(step.logits, reference.logits) <= tolerance
        assert step.gradients.keys() == reference.gradients.keys()
        wrong = {
            name: error
            for name, theirs in reference.gradients.items()
            if not (error := residual(step.gradients[name], theirs)) <= tolerance
        }
        assert not wrong, wrong
        assert exchanges is None or step.exchanges == exchanges, step.exchanges


def compare(ranks, size, batch, *, tolerance=TOLERANCE, exchanges=2, **model):
    """The sharded step on `size` ranks against the whole step in one process. `exchanges`: attention layers."""
    reference = ranks(1).run(whole_step, batch, **model)[0]
    for steps in ranks(size).run(sharded_step, batch, **model):
        assert_same(steps, reference, tolerance=tolerance, exchanges=exchanges)
