"""Shards -> full row: the differentiable inverse of cutting along the sequence."""

import torch
import torch.distributed as dist

# torch 2.13 renamed it, with a warning; older ones know the old name only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_sequence(tensor, group, dim: int = 1, length: int | None = None):
    """Concatenate every rank's `tensor` along `dim`, in rank order. Differentiable; collective over `group`.

    Every rank ends up with the full tensor. Backward sums, over ranks, the gradients of this rank's part: a loss that
    each rank computes from the full row, with gradients averaged over ranks, has the gradient of one process.

    Args:
        tensor (`torch.Tensor`): this rank's shard, of the same shape on every rank.
        group (`torch.distributed.ProcessGroup`): the sequence-parallel group.
        dim (`int`, *optional*, defaults to 1): the sequence dimension.
        length (`int`, *optional*): cut the result to this length, to remove padding.
    """
    full = _Gather.apply(tensor, group, dim)
    # Laid out as one process has it: heads and losses take views of what they get.
    return (full if length is None else full.narrow(dim, 0, length)).contiguous()


def with_whole_gradient(tensor, group):
    """`(B, S, ...)` as it is; backward gives every rank the gradient of all positions, not of its shard's alone.

    For what comes from outside of a decoder, is the same on all ranks and is cut there. Each rank's gradient is `size` times
    its shard's part of one process's (all ranks back-propagate the row's loss), zero elsewhere: their mean is that of one
    process. Collective over `group` in backward.
    """
    return _WholeGradient.apply(tensor, group)


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad / dist.get_world_size(ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, dim):
        size = dist.get_world_size(group)
        ctx.group, ctx.dim, ctx.size = group, dim, size
        part = tensor.movedim(dim, 0).contiguous()
        full = part.new_empty(size * part.shape[0], *part.shape[1:])
        if part.dtype == torch.bool:
            # Not every backend carries booleans.
            all_gather_single(full.view(torch.uint8), part.view(torch.uint8), group=group)
        else:
            all_gather_single(full, part, group=group)
        return full.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        # An all-to-all and a sum: a reduce-scatter that gloo has too.
        send = grad.movedim(ctx.dim, 0).contiguous()
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=ctx.group)
        return receive.unflatten(0, (ctx.size, -1)).sum(dim=0).movedim(0, ctx.dim), None, None
