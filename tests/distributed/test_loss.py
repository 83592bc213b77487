"""The loss: the row's token mean, equal on all ranks, with the right gradient after averaging. And gathering."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from hf_ulysses.core.gather import gather_sequence
from hf_ulysses.core.loss import reduce_loss

from ..collectives import Collectives
from .steps import average

VALID = {  # Valid targets per rank.
    "even": (3, 3, 3, 3),
    "uneven": (5, 1, 0, 2),
    "all on the last": (0, 0, 0, 1),
    "none": (0, 0, 0, 0),
}


def full_row(valid):
    """Logits and targets of four shards of six tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 7, (4, 6), generator=generator)
    for shard, n in enumerate(valid):
        targets[shard, n:] = -100
    return logits, targets


def token_sum(logits, targets):
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def reduced(valid, num_items):
    rank = dist.get_rank()
    logits, targets = full_row(valid)
    logits.requires_grad_()
    mine = logits[rank], targets[rank]
    if num_items is None:
        loss = cross_entropy(*mine)  # The mean over this rank's targets: NaN where there are none.
    else:
        loss = token_sum(*mine) / num_items
    with Collectives() as wire:
        loss = reduce_loss(loss, targets[rank], dist.group.WORLD, num_items)
    loss.backward()
    return loss.item(), average({"logits": logits.grad})["logits"], wire.names


@pytest.mark.parametrize("num_items", [None, 40, torch.tensor(40)], ids=["mean", "count", "count tensor"])
@pytest.mark.parametrize("valid", VALID)
def test_value_and_gradient(ranks, valid, num_items):
    logits, targets = full_row(VALID[valid])
    logits.requires_grad_()
    expected = token_sum(logits, targets) / (max(sum(VALID[valid]), 1) if num_items is None else num_items)
    expected.backward()
    results = ranks(4).run(reduced, VALID[valid], num_items)
    assert len({value for value, _, _ in results}) == 1, "the same number on every rank"
    for value, gradient, names in results:
        # float64; the sum is taken shard by shard instead of token by token.
        assert value == pytest.approx(expected.item(), rel=1e-14)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-13, atol=1e-15)
        assert names == ["allreduce_"]


def dtype_of(dtype):
    loss = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    out = reduce_loss(loss, torch.tensor([[1, -100]]), dist.group.WORLD)
    out.backward()
    return out.dtype, out.item(), loss.grad.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_kept(ranks, dtype):
    assert ranks(2).run(dtype_of, dtype) == [(dtype, 2.0, 1.0)] * 2


# -- gather -----------------------------------------------------------------------------------------------------------


def gathered(dim, length, dtype):
    """A tensor whose entries say where they come from; the gradient of a weighted sum of the full row."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = [2, 3, 4]
    shape[dim] *= size
    full = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    s = full.shape[dim] // size
    # As strided as a shard of logits can be.
    part = full.narrow(dim, rank * s, s).transpose(0, 1).contiguous().transpose(0, 1)
    with Collectives() as wire:
        result = gather_sequence(part.requires_grad_(dtype.is_floating_point), dist.group.WORLD, dim, length)
    expected = full if length is None else full.narrow(dim, 0, length)
    assert torch.equal(result, expected) and result.dtype == dtype
    if not dtype.is_floating_point:
        return wire.names
    weights = expected.cos()
    (result * weights).sum().backward()
    wanted = torch.cat(
        [weights, weights.new_zeros(full.shape).narrow(dim, 0, full.shape[dim] - expected.shape[dim])], dim
    )
    # Every rank computes the same loss of the full row, and its part's gradient is the sum over all of them.
    torch.testing.assert_close(part.grad, wanted.narrow(dim, rank * s, s) * size, rtol=0, atol=0)
    return wire.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("dim, length", [(1, None), (1, 10), (0, None), (2, 13)])
def test_gather_is_the_inverse_of_cutting(ranks, dim, length, dtype):
    names = ranks(4).run(gathered, dim, length, dtype)
    assert names == [["_allgather_base_"]] * 4


def loss_of_the_full_row():
    """A loss that needs whole rows, computed on every rank from gathered logits; gradients averaged over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(1, 4 * size, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.eye(5, dtype=torch.float64).requires_grad_()
    row_loss(gather_sequence(rows[:, rank * 4 : rank * 4 + 4] @ weight, dist.group.WORLD)).backward()
    ours = average({"weight": weight.grad})["weight"]
    weight.grad = None
    row_loss(rows @ weight).backward()
    torch.testing.assert_close(ours, weight.grad, rtol=1e-13, atol=1e-15)


def row_loss(rows):
    return rows.max(dim=1).values.square().sum() + (rows[:, 0] * rows[:, -1]).sum()


def test_a_loss_that_pools_the_row(ranks):
    ranks(4).run(loss_of_the_full_row)
