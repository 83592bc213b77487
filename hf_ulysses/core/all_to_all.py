"""The exchange: sequence shards <-> head shards. Differentiable, torch only, two collectives per attention layer.

Before attention a rank holds `s = S / sp_size` tokens of all heads; attention wants all `S` tokens of some heads.

    gather_seq_scatter_heads   query_BHsD, key_BGsD, value_BGsE -> query_BhSD, key_BgSD, value_BgSE   one collective
    gather_heads_scatter_seq   out_BShE                         -> out_BsHE                           one collective

1. The wire layout is sequence-major, `[s, B, columns]` per peer, `columns` being query, key and value side by side.
2. Sequence to heads (`_to_heads`): packed once. What arrives from the peers, in rank order, *is* `[S, B, columns]`:
   attention reads it in place, for any batch size.
3. Heads to sequence (`_to_sequence`): packed once for the other ranks, unpacked once. What is this rank's both before
   and after goes straight to its place.
4. Backward of one is the other. Nothing is kept for it but shapes; gradients of a replicated KV head are summed by the
   owner of the sequence shard, once.

Shape suffixes: B batch, S sequence (s = S / sp_size), H query heads (h: this rank's), G key/value heads (g: this
rank's), D head size of query and key, E head size of value. Source: https://arxiv.org/abs/2309.14509
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .heads import HeadShare


@dataclass(frozen=True)
class Exchange:
    """Who takes part and who gets which heads.

    Args:
        group (`torch.distributed.ProcessGroup`): the sequence-parallel group.
        rank (`int`): this rank within it.
        shares (`tuple[HeadShare, ...]`): the heads of every rank, in rank order.
        queries (`tuple[bool, ...]`): which of the tensors that travel have query heads; the others key/value heads.
    """

    group: dist.ProcessGroup
    rank: int
    shares: tuple[HeadShare, ...]
    queries: tuple[bool, ...] = (True, False, False)

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
    return _SeqToHeads.apply(exchange, query_BHsD, key_BGsD, value_BGsE)


def gather_seq_scatter_all(tensors, exchange: Exchange):
    """The same for any number of tensors `[B, heads, s, size]` of one dtype, as `exchange.queries` describes them."""
    return _SeqToHeads.apply(exchange, *tensors)


def gather_heads_scatter_seq(out_BShE, exchange: Exchange):
    """Trade the whole sequence of this rank's heads for the sequence shard of all heads: the inverse of the above.

    Collective: every rank of `exchange.group` must call it.

    Returns:
        `torch.Tensor`: `out_BsHE`, contiguous.
    """
    return _HeadsToSeq.apply(exchange, out_BShE)


class _SeqToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        results = _to_heads(tensors, exchange)
        ctx.exchange, ctx.shapes = exchange, [result.shape for result in results]
        ctx.options = dict(dtype=results[0].dtype, device=results[0].device)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # A core that ignores one of the three: a zero that takes no memory.
        zero = torch.zeros((), **ctx.options)
        grads = [zero.expand(shape) if grad is None else grad for grad, shape in zip(grads, ctx.shapes)]
        return None, *_to_sequence(grads, ctx.exchange)


class _HeadsToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, out_BShE):
        ctx.exchange = exchange
        (out_BHsE,) = _to_sequence([out_BShE.transpose(1, 2)], exchange)
        return out_BHsE.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BsHE):
        (grad_BhSE,) = _to_heads([grad_BsHE.transpose(1, 2)], ctx.exchange)
        return None, grad_BhSE.transpose(1, 2)


# -- the two moves: of query, key and value together, or of the output alone --------------------------------------------


class _Columns:
    """The tensors' heads of one share, side by side in the last dimension of a `[..., rows, B, columns]` buffer."""

    def __init__(self, share: HeadShare, tensors, queries):
        self.heads = [share.query if query else share.kv for query in queries[: len(tensors)]]
        self.sizes = [tensor.shape[-1] for tensor in tensors]
        self.widths = [(heads.stop - heads.start) * size for heads, size in zip(self.heads, self.sizes)]
        self.total = sum(self.widths)

    def views(self, buffer):
        """The parts of `buffer`, one per tensor, as `[..., B, heads, rows, size]`."""
        parts = buffer.split(self.widths, dim=-1)
        return [part.unflatten(-1, (-1, size)).movedim(-4, -2) for part, size in zip(parts, self.sizes)]


def _to_heads(tensors, exchange):
    """`[B, all heads, s, size]` of each tensor -> `[B, this rank's heads, S, size]`, views of one buffer."""
    B, _, s, _ = tensors[0].shape
    rank, P = exchange.rank, len(exchange.shares)
    columns = [_Columns(share, tensors, exchange.queries) for share in exchange.shares]
    mine = columns[rank]
    send_sizes, receive_sizes = [s * B * c.total for c in columns], [s * B * mine.total] * P
    buffer = tensors[0].new_empty(P * s, B, mine.total)
    receive = buffer
    if rank in (0, P - 1):
        # What travels lies in one piece, so only at either end of the row this rank's own part need not travel too.
        send_sizes[rank] = receive_sizes[rank] = 0
        receive = buffer[s:] if rank == 0 else buffer[:-s]
        for view, heads, tensor in zip(mine.views(buffer[rank * s : (rank + 1) * s]), mine.heads, tensors):
            view.copy_(tensor[:, heads])
    send = _packed_by_heads(tensors, columns, send_sizes)
    with torch.profiler.record_function("hf_ulysses: heads of the whole row"):
        dist.all_to_all_single(receive.view(-1), send, receive_sizes, send_sizes, group=exchange.group)
    return mine.views(buffer)


def _to_sequence(tensors, exchange):
    """`[B, this rank's heads, S, size]` of each tensor -> `[B, all heads, s, size]`; replicated heads are summed."""
    B, _, S, _ = tensors[0].shape
    rank, P = exchange.rank, len(exchange.shares)
    s = S // P
    own = slice(rank * s, (rank + 1) * s)
    columns = [_Columns(share, tensors, exchange.queries) for share in exchange.shares]
    send_sizes, receive_sizes = [s * B * columns[rank].total] * P, [s * B * c.total for c in columns]
    send_sizes[rank] = receive_sizes[rank] = 0
    send = _packed_by_rows(tensors, columns[rank], own)
    receive = send.new_empty(sum(receive_sizes))
    with torch.profiler.record_function("hf_ulysses: all heads of the shard"):
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=exchange.group)
    del send  # Before the results are allocated.

    kept = range(rank, rank + 1), [tensor[None, :, :, own] for tensor in tensors]
    travelled = _runs(receive, receive_sizes, columns, s, B)
    return _unpacked(sorted([kept, *travelled], key=lambda part: part[0].start), columns)


def _packed_by_heads(tensors, columns, sizes):
    """For every rank (of those with a size) its heads of this rank's rows."""
    B, _, s, _ = tensors[0].shape
    send = tensors[0].new_empty(sum(sizes))
    for run, views in _runs(send, sizes, columns, s, B):
        for view, heads, tensor in zip(views, columns[run.start].heads, tensors):
            view.copy_(_of_run(tensor, heads, run))
    return send


def _packed_by_rows(tensors, columns, own):
    """For every other rank its rows of this rank's heads: all rows but this rank's `own`."""
    B, _, S, _ = tensors[0].shape
    send = tensors[0].new_empty(S - (own.stop - own.start), B, columns.total)
    for view, tensor in zip(columns.views(send), tensors):
        view[:, :, : own.start].copy_(tensor[:, :, : own.start])
        view[:, :, own.start :].copy_(tensor[:, :, own.stop :])
    return send.view(-1)


def _unpacked(parts, columns):
    """All ranks' heads of this rank's rows, from `parts` in rank order: a run and its views, one per tensor."""
    _, B, _, s, _ = parts[0][1][0].shape
    # In the memory layout that models give their heads, [B, s, heads, size]: what follows (transpose, view, linear)
    # needs no copy.
    results = [
        parts[0][1][0].new_empty(B, s, heads.stop, size).transpose(1, 2)
        for heads, size in zip(columns[-1].heads, columns[-1].sizes)
    ]
    written = [0] * len(results)
    for run, views in parts:
        for i, (view, heads) in enumerate(zip(views, columns[run.start].heads)):
            # Shares are in head order: what lies before `written` has been filled by another replica of the head.
            again = max(min(written[i], heads.stop) - heads.start, 0)
            result = _of_run(results[i], heads, run)
            if again:
                result[:, :, :again] += view[:, :, :again]
            result[:, :, again:].copy_(view[:, :, again:])
            written[i] = max(written[i], heads.start + len(run) * (heads.stop - heads.start))
    return results


def _runs(buffer, sizes, columns, s, B):
    """Cut a send or receive buffer into runs of ranks: neighbours with even shares, which one strided copy serves.

    Yields the run (`range` of ranks; ranks of size zero left out) and its part of the buffer, one view per tensor as
    `[run, B, heads, s, size]`.
    """
    even = all(heads.stop == len(columns) * (heads.stop - heads.start) for heads in columns[-1].heads)
    runs = []
    for rank in (rank for rank, size in enumerate(sizes) if size):
        if even and runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    for run, piece in zip(runs, buffer.split([len(run) * sizes[run.start] for run in runs])):
        yield run, columns[run.start].views(piece.view(len(run), s, B, -1))


def _of_run(tensor, heads, run):
    """The heads of a run's ranks: `[B, all heads, ...]` -> `[run, B, heads, ...]`; `heads`: those of its first rank."""
    count = heads.stop - heads.start
    return tensor[:, heads.start : heads.start + len(run) * count].unflatten(1, (len(run), count)).movedim(1, 0)
