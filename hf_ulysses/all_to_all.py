"""The exchange: sequence shards <-> head shards. Differentiable, torch only, two collectives per attention layer.

Before attention a rank holds `s = S / sp_size` tokens of all heads; attention wants all `S` tokens of some heads.

    gather_seq_scatter_heads   query_BHsD, key_BGsD, value_BGsE -> query_BhSD, key_BgSD, value_BgSE   one collective
    gather_heads_scatter_seq   out_BShE                         -> out_BsHE                           one collective

1. The wire layout is sequence-major, `[s, B, columns]` per peer, `columns` being query, key and value side by side.
   What arrives from the peers, in rank order, *is* `[S, B, columns]`: attention reads it in place, for any batch size.
2. So a direction costs one write (pack before attention, unpack after it) and no other copy; with batch size one the
   output leaves attention's own memory.
3. Backward runs the same two moves in reverse. Nothing is kept for it but shapes; gradients of a replicated KV head
   are summed by the owner of the sequence shard, once.

Shape suffixes: B batch, S sequence (s = S / sp_size), H query heads (h: this rank's), G key/value heads (g: this
rank's), D head size of query and key, E head size of value. Source: https://arxiv.org/abs/2309.14509
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .heads import HeadShare


@dataclass(frozen=True)
class Exchange:
    """Who takes part and who gets which heads.

    Args:
        group (`torch.distributed.ProcessGroup`): the sequence-parallel group.
        rank (`int`): this rank within it.
        shares (`tuple[HeadShare, ...]`): the heads of every rank, in rank order.
    """

    group: dist.ProcessGroup
    rank: int
    shares: tuple[HeadShare, ...]

    @property
    def mine(self) -> HeadShare:
        return self.shares[self.rank]


def gather_seq_scatter_heads(query_BHsD, key_BGsD, value_BGsE, exchange: Exchange):
    """Trade the sequence shard of all heads for the whole sequence of this rank's heads.

    All three travel in one `all_to_all_single`. Collective: every rank of `exchange.group` must call it, with the same
    shapes and dtypes. Any strides; the results are strided views of one buffer, contiguous in their last dimension.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: `query_BhSD`, `key_BgSD`, `value_BgSE`.
    """
    return _SeqToHeads.apply(query_BHsD, key_BGsD, value_BGsE, exchange)


def gather_heads_scatter_seq(out_BShE, exchange: Exchange):
    """Trade the whole sequence of this rank's heads for the sequence shard of all heads: the inverse of the above.

    Collective: every rank of `exchange.group` must call it.

    Returns:
        `torch.Tensor`: `out_BsHE`, contiguous.
    """
    return _HeadsToSeq.apply(out_BShE, exchange)


def _all_to_all(send, send_sizes, receive_sizes, group):
    receive = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    return receive


class _Columns:
    """Query, key and value of one share side by side in the last dimension of a `[rows, B, columns]` buffer."""

    def __init__(self, share: HeadShare, qk_size: int, v_size: int):
        self.heads = (share.query, share.kv, share.kv)
        self.sizes = (qk_size, qk_size, v_size)
        self.widths = [(h.stop - h.start) * size for h, size in zip(self.heads, self.sizes)]
        self.total = sum(self.widths)

    def views(self, buffer):
        """The three parts of `buffer` as `[B, heads, rows, size]` views."""
        parts = buffer.split(self.widths, dim=-1)
        return [part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part, size in zip(parts, self.sizes)]


class _SeqToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, exchange):
        B, H, s, D = query.shape
        G, E = key.shape[1], value.shape[-1]
        columns = [_Columns(share, D, E) for share in exchange.shares]
        ctx.exchange, ctx.columns, ctx.shape = exchange, columns, (B, H, G, s, D, E)

        send_sizes = [s * B * c.total for c in columns]
        send = query.new_empty(sum(send_sizes))
        for piece, c in zip(send.split(send_sizes), columns):
            for view, heads, source in zip(c.views(piece.view(s, B, c.total)), c.heads, (query, key, value)):
                view.copy_(source[:, heads])
        mine = columns[exchange.rank]
        receive_sizes = [s * B * mine.total] * len(columns)
        receive = _all_to_all(send, send_sizes, receive_sizes, exchange.group)
        return tuple(mine.views(receive.view(len(columns) * s, B, mine.total)))

    @staticmethod
    def backward(ctx, *grads):
        exchange, columns = ctx.exchange, ctx.columns
        B, H, G, s, D, E = ctx.shape
        mine = columns[exchange.rank]
        like = next(grad for grad in grads if grad is not None)
        send = like.new_empty(len(columns) * s, B, mine.total)
        for view, grad in zip(mine.views(send), grads):
            view.zero_() if grad is None else view.copy_(grad)
        send_sizes = [s * B * mine.total] * len(columns)
        receive_sizes = [s * B * c.total for c in columns]
        receive = _all_to_all(send.view(-1), send_sizes, receive_sizes, exchange.group)

        # Gradients get the memory layout that models give their heads, [B, s, heads, size], so that what follows in
        # backward (transpose, view, linear) needs no copy.
        results = [like.new_empty(B, s, n, size).transpose(1, 2) for n, size in ((H, D), (G, D), (G, E))]
        written = [0, 0, 0]
        for piece, c in zip(receive.split(receive_sizes), columns):
            for i, (view, heads) in enumerate(zip(c.views(piece.view(s, B, c.total)), c.heads)):
                # Shares are in head order: what lies before `written` has been filled by another replica of the head.
                again = max(min(written[i], heads.stop) - heads.start, 0)
                if again:
                    results[i][:, heads.start : heads.start + again] += view[:, :again]
                results[i][:, heads.start + again : heads.stop].copy_(view[:, again:])
                written[i] = max(written[i], heads.stop)
        return *results, None


class _HeadsToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, exchange):
        B, S, h, E = out.shape
        s = S // len(exchange.shares)
        ctx.exchange, ctx.shape = exchange, (B, s, h, E)
        # No copy when B is one: a dimension of size one has no say in what counts as contiguous.
        send = out.transpose(0, 1).contiguous().view(-1)
        receive_sizes = [s * B * share.num_query * E for share in exchange.shares]
        receive = _all_to_all(send, [s * B * h * E] * len(exchange.shares), receive_sizes, exchange.group)
        result = out.new_empty(B, s, sum(share.num_query for share in exchange.shares), E)
        for piece, share in zip(receive.split(receive_sizes), exchange.shares):
            result[:, :, share.query].copy_(piece.view(s, B, share.num_query, E).transpose(0, 1))
        return result

    @staticmethod
    def backward(ctx, grad):
        exchange = ctx.exchange
        B, s, h, E = ctx.shape
        send_sizes = [s * B * share.num_query * E for share in exchange.shares]
        send = grad.new_empty(sum(send_sizes))
        for piece, share in zip(send.split(send_sizes), exchange.shares):
            piece.view(s, B, share.num_query, E).copy_(grad[:, :, share.query].transpose(0, 1))
        receive_sizes = [s * B * h * E] * len(exchange.shares)
        receive = _all_to_all(send, send_sizes, receive_sizes, exchange.group)
        return receive.view(-1, B, h, E).transpose(0, 1), None
