"""The normalisation of the loss, argued once.

Let a row have N valid targets, n_r of them on sequence rank r, and let rank r compute the mean l_r over its own. The
row's token mean is L = sum_r n_r l_r / N. Engines average gradients over all ranks, so rank r has to back-propagate
c_r = P n_r l_r / N over P ranks: the average of the gradients of the c_r is the gradient of L. The value that is
reported is L itself, the same on every rank; a rank without targets contributes zero, not NaN.

A loss that is already a sum over a count of the whole optimizer step (`num_items_in_batch`) is a share of it: L is the
sum of the shares and c_r = P times the share.

`row_loss` is what comes out of an attached model: every rank has L, and its backward sums over the group what the ranks
hand back, so that L may be weighted, averaged or counted several times by whoever uses it, on each rank alike or not.
"""

import torch
import torch.distributed as dist

from .sequence import in_no_graph

IGNORE_INDEX = -100


def reduce_loss(loss, shift_labels, group, num_items_in_batch=None):
    """The row's token mean from this rank's part of it. Collective over `group` (one all-reduce of two numbers).

    Args:
        loss (`torch.Tensor`): a scalar, the mean over this rank's valid targets, or with `num_items_in_batch` their sum
            divided by that count. What an attached model returned as its loss is the row's already.
        shift_labels (`torch.Tensor`): this rank's targets, -100 where there is none.
        group (`torch.distributed.ProcessGroup`): the sequence-parallel group.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*): given when the loss is a sum over it.

    Returns:
        `torch.Tensor`: a scalar, equal on all ranks of the group. Averaging gradients over ranks gives its gradient.
    """
    if getattr(loss, "is_of_the_row", False):
        return loss
    size = dist.get_world_size(group)
    if num_items_in_batch is None:
        valid = (shift_labels != IGNORE_INDEX).sum()
        # `where` before the multiplication: the mean over no targets is NaN, and so would be its product with zero.
        weighted = torch.where(valid > 0, loss, torch.zeros_like(loss)) * valid
    else:
        valid, weighted = torch.ones_like(loss), loss
    sums = torch.stack([weighted.detach().double(), valid.detach().double()])
    dist.all_reduce(sums, group=group)
    total, count = sums.unbind()
    count = count.clamp(min=1) if num_items_in_batch is None else torch.ones_like(count)
    mean = (total / count).to(loss.dtype)
    contribution = weighted * (size / count).to(loss.dtype)
    # The value of the mean, to the last bit, and the gradient of this rank's contribution.
    return mean + (contribution - contribution.detach())


def row_loss(loss, forward, attachment):
    """The row's loss from a shard's, equal on all ranks. Differentiable; collective, for a sharded batch in backward, too.

    Args:
        loss (`torch.Tensor`): a scalar: the mean over `forward.count` targets, or a sum over `num_items_in_batch`.
        forward (`Forward`): the attached model's forward that it comes from.
        attachment (`Attachment`): its group; the row's checksum rides along.
    """
    payload = attachment.peers.payload(forward.row).to(loss.device)
    # Who has whole rows is a replica of its peers and hands back what they do; who has shards may weight them.
    alike = forward.given is None
    value, sums = _RowLoss.apply(loss, forward.count.to(loss.device), forward.counted, payload, attachment.group, alike)
    in_no_graph(attachment.peers.judge, forward.row, sums)
    value.is_of_the_row = True  # `reduce_loss` has nothing left to do.
    return value


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, count, counted, payload, group, alike):
        share, targets = loss.detach().double(), count.double()
        # The mean over no targets is NaN: it must not reach the row's.
        own = torch.where(count > 0, share * targets, 0.0)
        sums = torch.cat([torch.stack([own, targets, share]), payload])
        dist.all_reduce(sums, group=group)
        if counted:
            value, weight = sums[2], torch.ones_like(share)
        else:
            # A row without targets gives what one process gives, NaN or zero: what every rank has.
            some, size = sums[1] > 0, dist.get_world_size(group)
            value = torch.where(some, sums[0] / sums[1], sums[2] / size)
            weight = torch.where(some, targets / sums[1], 1 / size)
        ctx.group, ctx.alike, ctx.weight = group, alike, weight.to(loss.dtype)
        checksums = sums[3:].clone()
        ctx.mark_non_differentiable(checksums)
        return value.to(loss.dtype), checksums

    @staticmethod
    def backward(ctx, grad, _):
        if ctx.alike:
            grad = grad * dist.get_world_size(ctx.group)
        else:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad * ctx.weight, None, None, None, None, None
