"""The exchange moves data and computes nothing: compared bitwise with slices of the full tensors, gradients too."""

import threading

import pytest
import torch
import torch.distributed as dist

import hf_ulysses.core.all_to_all
from hf_ulysses.core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_heads
from hf_ulysses.core.heads import share_heads

from ..collectives import Collectives

HEADS = [(4, 4), (8, 8), (8, 2), (12, 2), (6, 3), (7, 7), (5, 1), (4, 1), (10, 5)]


def full_tensors(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# -- the ways in which models lay out their heads; each takes the contiguous (B, heads, s, size) ----------------------


def contiguous(query, key, value):
    return query.contiguous(), key.contiguous(), value.contiguous()


def heads_of_a_linear(*tensors):
    """`(B, s, heads * size)` viewed and transposed, as nearly all models do."""
    return tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)


def fused_projection(query, key, value):
    """Query, key and value as slices of one projection."""
    flat = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
    parts = torch.cat(flat, dim=-1).split([part.shape[-1] for part in flat], dim=-1)
    return tuple(
        part.unflatten(-1, (tensor.shape[1], -1)).transpose(1, 2) for part, tensor in zip(parts, (query, key, value))
    )


def one_key_for_all_heads(query, key, value):
    """Keys that are one head expanded (MLA's rotary part): stride zero."""
    return query, key[:, :1].expand_as(key), value


LAYOUTS = [contiguous, heads_of_a_linear, fused_projection, one_key_for_all_heads]


def check_exchange(num_heads, num_kv_heads, B, S, D, E, dtype, layout, rank, size, group):
    """Both directions and their gradients on one rank, against the definition."""
    shares = share_heads(num_heads, num_kv_heads, size)
    exchange, share, s = Exchange(group, rank, shares), shares[rank], S // size
    mine = slice(rank * s, (rank + 1) * s)
    shapes = [(B, num_heads, S, D), (B, num_kv_heads, S, D), (B, num_kv_heads, S, E)]
    full = layout(*full_tensors(0, dtype, *shapes))

    local = [tensor.requires_grad_() for tensor in layout(*[tensor[:, :, mine].clone() for tensor in full])]
    results = gather_seq_scatter_heads(*local, exchange)
    heads = (share.query, share.kv, share.kv)
    for result, tensor, part in zip(results, full, heads):
        assert torch.equal(result, tensor[:, part]) and result.stride(-1) == 1

    # Every rank draws all ranks' gradients, so each can tell what it should receive.
    all_grads = [
        full_tensors(1 + r, dtype, *[(B, part.stop - part.start, S, n) for part, n in zip(parts, (D, D, E))])
        for r, parts in enumerate([(other.query, other.kv, other.kv) for other in shares])
    ]
    # In the layout in which attention leaves them.
    grads = heads_of_a_linear(*all_grads[rank])
    received = torch.autograd.grad(results, local, grads)
    for i, (grad, shape) in enumerate(zip(received, shapes)):
        expected = torch.zeros(shape, dtype=dtype)
        for other, other_grads in zip(shares, all_grads):
            expected[:, (other.query, other.kv, other.kv)[i]] += other_grads[i]  # A replicated head: summed, once.
        assert torch.equal(grad, expected[:, :, mine])

    (out,) = full_tensors(50, dtype, (B, S, num_heads, E))
    out_local = out[:, :, share.query].clone().requires_grad_()
    for strided in (out_local, out_local.transpose(1, 2).contiguous().transpose(1, 2)):
        result = gather_heads_scatter_seq(strided, exchange)
        assert torch.equal(result, out[:, mine]) and result.is_contiguous()
        (grad,) = full_tensors(51, dtype, out.shape)
        given = grad[:, mine].transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(torch.autograd.grad(result, out_local, given, retain_graph=True)[0], grad[:, :, share.query])


def on_ranks(*args):
    check_exchange(*args, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_head_counts(ranks, heads, size):
    ranks(size).run(on_ranks, *heads, 2, 12, 3, 3, torch.float32, heads_of_a_linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("B", [1, 2, 3])
def test_any_batch_size_and_dtype(ranks, B, dtype):
    ranks(4).run(on_ranks, 8, 2, B, 8, 4, 4, dtype, heads_of_a_linear)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("B", [1, 2])
def test_any_strides_and_a_value_of_another_size(ranks, B, layout):
    ranks(4).run(on_ranks, 6, 3, B, 8, 24, 16, torch.float32, layout)


class Threads:
    """Stands in for `torch.distributed` in all_to_all.py: a world of threads, for more ranks than there are cores."""

    def __init__(self, size):
        self.size, self.sent, self.errors = size, {}, []
        self.barrier = threading.Barrier(size, timeout=60)
        self.local = threading.local()

    def all_to_all_single(self, receive, send, receive_sizes, send_sizes, group):
        self.sent[self.local.rank] = send.split(send_sizes)
        self.barrier.wait()
        for source, piece in enumerate(receive.split(receive_sizes)):
            piece.copy_(self.sent[source][self.local.rank])
        self.barrier.wait()

    def run(self, function, *args):
        def target(rank):
            self.local.rank = rank
            try:
                function(*args, rank, self.size, None)
            except BaseException as error:
                self.errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise next((e for e in self.errors if not isinstance(e, threading.BrokenBarrierError)), self.errors[0])


@pytest.mark.parametrize(
    "heads, size", [((8, 2), 8), ((12, 2), 8), ((40, 8), 16), ((16, 4), 16), ((28, 4), 8)], ids=str
)
def test_more_ranks_than_this_machine_has(monkeypatch, heads, size):
    """Case 18."""
    world = Threads(size)
    monkeypatch.setattr(hf_ulysses.core.all_to_all, "dist", world)
    world.run(check_exchange, *heads, 1, 2 * size, 3, 2, torch.float32, heads_of_a_linear)


def gradient_of_some(used):
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD, rank, share_heads(4, 4, size))
    local = [torch.ones(1, 4, 2, 3, requires_grad=True) for _ in range(3)]
    results = gather_seq_scatter_heads(*local, exchange)
    sum(results[i].sum() for i in used).backward()
    return [None if tensor.grad is None else tensor.grad.unique().tolist() for tensor in local]


def test_a_core_that_ignores_one_of_the_three(ranks):
    assert ranks(2).run(gradient_of_some, [0, 2]) == [[[1.0], [0.0], [1.0]]] * 2
    assert ranks(2).run(gradient_of_some, [1]) == [[[0.0], [1.0], [0.0]]] * 2


# -- cost -------------------------------------------------------------------------------------------------------------


def cost(num_heads, num_kv_heads, B, s, D):
    """Collectives and bytes of both directions, and what is left of the exchange between forward and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD, rank, share_heads(num_heads, num_kv_heads, size))
    query, key, value = (torch.randn(B, n, s, D, requires_grad=True) for n in (num_heads, num_kv_heads, num_kv_heads))
    saved = []
    with (
        Collectives() as forward,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.shape) or tensor, lambda tensor: tensor
        ),
    ):
        query_BhSD, key_BgSD, value_BgSD = gather_seq_scatter_heads(query, key, value, exchange)
        out = gather_heads_scatter_seq(query_BhSD.transpose(1, 2), exchange)
    kept = [name for f in (out.grad_fn, query_BhSD.grad_fn) for name, v in vars(f).items() if holds_tensors(v)]
    with Collectives() as backward:
        torch.autograd.backward([out, key_BgSD, value_BgSD], [torch.ones_like(t) for t in (out, key_BgSD, value_BgSD)])
    return (forward.names, forward.sent), (backward.names, backward.sent), saved, kept


def holds_tensors(value):
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(item) for item in value)
    return torch.is_tensor(value) or (hasattr(value, "__dict__") and holds_tensors(list(vars(value).values())))


@pytest.mark.parametrize("heads, travelling_kv", [((16, 16), 16), ((16, 4), 4), ((8, 2), 4), ((4, 1), 4)], ids=str)
@pytest.mark.parametrize("B", [1, 3])
def test_two_collectives_and_the_least_bytes(ranks, heads, travelling_kv, B):
    """Sent per direction: (P-1)/P x local tokens x heads x head size x element size; KV heads replicated as needed."""
    P, s, D = 4, 6, 8
    per_head = (P - 1) * B * s * D * 4 // P
    qkv, out = (heads[0] + 2 * travelling_kv) * per_head, heads[0] * per_head
    for forward, backward, saved, kept in ranks(P).run(cost, *heads, B, s, D):
        assert forward == (["alltoall_base_"] * 2, [qkv, out])
        assert backward == (["alltoall_base_"] * 2, [out, qkv])
        assert not saved and not kept, "nothing is kept for backward but shapes"
