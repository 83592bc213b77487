"""Doing a piece after the other, where the inner values of all of them together would be too many. Torch only."""

import torch
from torch.utils.checkpoint import checkpoint


def again_in_backward(function, *arguments, random: bool = False):
    """`function(*arguments)`, of which backward keeps the arguments only."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=random)


def collected(result, part, dim: int, where: slice):
    """Write `part` into the places `where` of `result`, which nobody has written before. Differentiable, in place."""
    return _Collected.apply(result, part, dim, where)


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, result, part, dim, where):
        ctx.dim, ctx.where = dim, where
        result.narrow(dim, where.start, where.stop - where.start).copy_(part)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        # What lies elsewhere was written by others, so `grad` may go on to them whole, without a copy.
        part = grad.narrow(ctx.dim, ctx.where.start, ctx.where.stop - ctx.where.start)
        return grad if ctx.needs_input_grad[0] else None, part, None, None
