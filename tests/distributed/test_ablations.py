"""Each exit with one piece of it missing: the comparison with one process fails, so it would be noticed.

The pieces are the reductions, the factors that make the mean of the ranks' gradients one process's, and the shift of labels.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ulysses
from hf_ulysses.core import cut, entrance, exits, gather, loss

from ..models import batch_of, build
from .steps import FLOAT32, Step, assert_same, average, gradients

# Uneven targets: the last tokens of the second row are none, so that a mean of means shows.
BATCH = batch_of(2, 33)
BATCH["labels"][1, 12:] = -100


# -- a forward and backward by each exit ----------------------------------------------------------------------------------


def by_loss(model, sp):
    output = model(**BATCH)
    return output.loss, output.logits


def by_count(model, sp):
    output = model(**BATCH, num_items_in_batch=44)
    return output.loss, output.logits


def by_shards(model, sp):
    """A sharded batch and the documented loop's weights: each rank hands back another gradient."""
    part = BATCH if sp is None else sp.shard(BATCH)
    output = model(**part)
    if sp is None:
        return output.loss, output.logits
    count = (part["shift_labels"] != -100).sum()
    weights = [torch.zeros_like(count) for _ in range(2)]
    dist.all_gather(weights, count)
    # What a loop that weights losses by their targets and averages gradients makes of it.
    return output.loss + (2 * count / sum(weights) - 1) * (output.loss - output.loss.detach()), sp.gather(output.logits, like=part)


def by_tokens(model, sp):
    from trl.trainer.utils import add_fused_lm_head

    if not hasattr(model, "fused"):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model.fused = True
    output = model(**BATCH, fused_lm_head=True)
    return output.loss + (output.log_probs * output.entropy).mean(), output.log_probs


def by_hidden(model, sp):
    output = model(input_ids=BATCH["input_ids"])
    return output.logits[:, -1].logsumexp(-1).sum() + output.logits[:, :3].square().mean(), output.logits


def by_embeddings(model, sp):
    embeddings = model.get_input_embeddings()(BATCH["input_ids"]).detach()
    model.embeddings = torch.nn.Parameter(embeddings)
    output = model(inputs_embeds=model.embeddings, labels=BATCH["labels"])
    return output.loss, output.logits


# -- what can be missing --------------------------------------------------------------------------------------------------


class Without:
    """`torch.distributed` for one module of ours, with other functions."""

    def __init__(self, **others):
        vars(self).update(others)

    def __getattr__(self, name):
        return getattr(dist, name)


def own_numbers(sums, group):
    """The loss is not summed; what compares rows is, and gradients are."""
    own = sums[:3].clone() if sums.dim() else None
    dist.all_reduce(sums, group=group)
    if own is not None:
        sums[:3] = own


def without(module, **others):
    return instead(module, dist=Without(**others))


def instead(owner, **attributes):
    return lambda: mock.patch.multiple(owner, **attributes)


def one_late(tensor, *more):
    return gather.gather_sequence(tensor, *more).roll(1, 1)


def all_positions(tensor, group, dim, length):
    """A place for the last token, too, which scores nothing: TRL slices from the right."""
    return gather.gather_sequence(tensor, group, dim, length + 1)


def kept(ctx, grad):
    """Each rank's own part of its own gradient, where those of all ranks are summed."""
    return grad.chunk(ctx.size, ctx.dim)[dist.get_rank(ctx.group)].contiguous(), None, None


def summed(ctx, grad):
    """All ranks' gradients of what comes from outside, not their mean."""
    grad = grad.contiguous().clone()
    dist.all_reduce(grad, group=ctx.group)
    return grad, None


NO_SUM = without(loss, all_reduce=own_numbers)
NO_FACTOR = without(loss, get_world_size=lambda group: 1)
NOT_SHIFTED = instead(exits, shifted=lambda labels: labels)
SHIFTED_TWICE = instead(exits, shifted=lambda labels: cut.shifted(cut.shifted(labels)))
OWN_GRADIENT = instead(gather._Gather, backward=staticmethod(kept))


ABLATIONS = {
    by_loss: {"no sum": NO_SUM, "no factor": NO_FACTOR, "not shifted": NOT_SHIFTED, "shifted twice": SHIFTED_TWICE, "one late": instead(entrance, gather_sequence=one_late)},
    by_count: {"no sum": NO_SUM, "no factor": NO_FACTOR, "not shifted": NOT_SHIFTED},
    by_shards: {
        "no sum": NO_SUM,
        "no sum in backward": without(loss, all_reduce=lambda t, group: dist.all_reduce(t, group=group) if t.dim() else None),
        "not shifted": instead(cut, shifted=lambda labels: labels),
    },
    by_tokens: {
        "no sum": NO_SUM, "no factor": NO_FACTOR, "not shifted": NOT_SHIFTED, "own gradient": OWN_GRADIENT,
        "one late": instead(exits, gather_sequence=one_late), "a place for the last token": instead(exits, gather_sequence=all_positions),
    },
    by_hidden: {"own gradient": OWN_GRADIENT, "one late": instead(entrance, gather_sequence=one_late)},
    by_embeddings: {
        "no sum": instead(gather._WholeGradient, backward=staticmethod(lambda ctx, grad: (grad / 2, None))),
        "no 1 / sp": instead(gather._WholeGradient, backward=staticmethod(summed)),
    },
}  # fmt: skip


def step(model, way, sp=None):
    model.zero_grad()
    loss, results = way(model, sp)
    loss.backward()
    found = gradients(model)
    return Step(loss.item(), results.detach(), found if sp is None else average(found))


def plain(way):
    return step(build(dtype=torch.float32), way)


def ablated(way, reference):
    """The names of the ablations after which the comparison still holds: none but the one that takes nothing away."""
    model, held = build(dtype=torch.float32), []
    with hf_ulysses.attach(model) as sp:
        sp.locate()
        for name, ablation in {"": mock.MagicMock, **ABLATIONS[way]}.items():
            with ablation():
                found = step(model, way, sp)
            try:
                assert_same(found, reference, tolerance=FLOAT32)
            except AssertionError:
                continue
            held.append(name)
    return held


@pytest.mark.parametrize("way", ABLATIONS, ids=lambda way: way.__name__)
def test_without_a_piece_it_is_noticed(ranks, way):
    if way is by_tokens:
        pytest.importorskip("trl")
    reference = ranks(1).run(plain, way)[0]
    for held in ranks(2).run(ablated, way, reference):
        assert held == [""]
