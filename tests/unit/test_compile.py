"""torch.compile: one graph holds all layers with their exchanges, and a new step needs no new one. On fake tensors, too."""

from collections import Counter

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_ulysses
from hf_ulysses.core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_heads
from hf_ulysses.core.heads import share_heads
from hf_ulysses.planner.step import fake_world

from ..models import batch_of, build

LAYERS, STEPS = 2, 4


def graphs_of_steps():
    """All graphs, and how many there were after each step."""
    torch._dynamo.reset()
    model, graphs, counts = build(dtype=torch.float32, num_hidden_layers=LAYERS), [], []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with fake_world(2), hf_ulysses.attach(model, trial=False) as sp:
        # In a fake world every rank is alone.
        sp.peers.judge = sp.peers.judge_last = lambda *_, **__: None
        compiled = torch.compile(model, backend=keep)
        for seed in range(STEPS):
            compiled(**batch_of(1, 34, seed=seed)).loss.backward()
            counts.append(len(graphs))
    torch._dynamo.reset()
    return graphs, counts


def operations(graph):
    """Of a graph and those inside of it, by name."""
    return Counter(str(node.target) for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes)


def test_layers_are_in_one_graph():
    """Every exchange is torch's functional collective: four a layer, forward and backward."""
    graphs, counts = graphs_of_steps()
    exchanges = [operations(graph)["_c10d_functional.all_to_all_single"] for graph in graphs]
    assert {n for n in exchanges if n} == {4 * LAYERS}, exchanges
    # What begins and judges a step, what opens its output, and the loss have their own; see docs/first_gpu.md.
    assert counts[0] <= 6, counts
    assert counts[-1] == counts[1], f"the same step was compiled again and again: {counts}"


def test_the_exchange_runs_on_fake_tensors():
    with fake_world(3), FakeTensorMode():
        for heads, kv_heads in ((6, 3), (4, 2)):
            exchange = Exchange(torch.distributed.group.WORLD, 0, share_heads(heads, kv_heads, 3))
            query, key, value = (torch.empty(2, n, 5, 8, requires_grad=True) for n in (heads, kv_heads, kv_heads))
            rows = gather_seq_scatter_heads(query, key, value, exchange)
            assert [row.shape for row in rows] == [(2, n, 15, 8) for n in (2, 1, 1)]
            out = gather_heads_scatter_seq(rows[0].transpose(1, 2), exchange)
            (out.sum() + rows[1].sum() + rows[2].sum()).backward()
            assert out.shape == (2, 5, heads, 8) and value.grad.shape == value.shape
