"""What the exchange costs in a whole attention layer, beside DeepSpeed's UlyssesSPAttentionHF: collectives, bytes and the
peak of live storage. No times: scripts/bench_exchange.py measures those."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def bench_exchange():
    """scripts/bench_exchange.py as a module: the same hooks, cores and counters as in the benchmark."""
    file = Path(__file__).parents[2] / "scripts" / "bench_exchange.py"
    spec = importlib.util.spec_from_file_location("bench_exchange", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look it up.
    spec.loader.exec_module(module)
    return module


def costs(length, heads, kv_heads):
    """`{(variant, core): (forward, backward, sent, peak)}` of one layer on this rank, after a check of equality."""
    import deepspeed

    bench = bench_exchange()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    case = bench.Case(size, length, heads, kv_heads, head_size=16)
    variants = bench.make_variants(case, rank)
    bench.check_equal(variants, ("sdpa", "identity"))
    results = {key: bench.Result(case, *key) for key in variants}
    for key, step in variants.items():
        bench.count(step, results[key])
    return {key: (r.forward, r.backward, r.sent_bytes, r.peak_bytes) for key, r in results.items()}


def bound(size, length, heads, kv_heads, head_size=16):
    """Bytes that have to leave a rank, forward and backward: query, the KV heads that travel, output; fp32."""
    travelling = 2 * heads + 2 * max(kv_heads, size)
    return 2 * (size - 1) * (length // size) * travelling * head_size * 4 // size


@pytest.mark.parametrize("size, heads, kv_heads", [(2, 16, 4), (2, 16, 16), (4, 16, 4), (4, 8, 2)])
def test_collectives_and_bytes(ranks, size, heads, kv_heads):
    """With 2 KV heads over 4 ranks each one travels twice."""
    for cost in ranks(size).run(costs, 256, heads, kv_heads, timeout=300):
        for core in ("identity", "sdpa"):
            forward, backward, sent, _ = cost["hf_ulysses", core]
            assert forward == backward == ["all_to_all_single"] * 2
            assert sent == bound(size, 256, heads, kv_heads)
            forward, backward, _, _ = cost["DeepSpeed", core]
            assert (len(forward), len(backward)) == (5, 4)


@pytest.mark.parametrize("heads, kv_heads", [(16, 4), (16, 8)])
def test_the_peak_of_live_storage_is_at_most_four_fifths_of_deepspeeds(ranks, heads, kv_heads):
    """Around an identity core: around attention both peak in attention's own backward."""
    for cost in ranks(2).run(costs, 1024, heads, kv_heads, timeout=300):
        assert cost["hf_ulysses", "identity"][3] <= 0.8 * cost["DeepSpeed", "identity"][3]


def test_around_attention_the_exchange_adds_nothing_to_the_peak(ranks):
    """What attention itself needs in its backward: its inputs, its output, its gradients and the gradient it is given."""
    for cost in ranks(2).run(costs, 1024, 16, 4, timeout=300):
        alone = cost["attention alone", "sdpa"][3]
        inputs_and_gradient = (8 + 2 * 2 + 8) * 1024 * 16 * 4
        assert cost["hf_ulysses", "sdpa"][3] <= 1.01 * (alone + inputs_and_gradient)
        assert cost["hf_ulysses", "sdpa"][3] <= 1.01 * cost["DeepSpeed", "sdpa"][3]


def left_between_passes(length):
    """Bytes that were allocated in forward and live on until backward: of the hook, and of attention alone."""
    import deepspeed

    bench = bench_exchange()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    variants = bench.make_variants(bench.Case(dist.get_world_size(), length, 16, 4, head_size=16), dist.get_rank())
    left = {}
    for key in ((bench.OURS, "identity"), (bench.OURS, "sdpa"), (bench.ALONE, "sdpa")):
        with bench.recorded_collectives(), bench.LiveStorage() as storage:
            variants[key](between=lambda: left.setdefault(key, storage.live))
    return left


def test_nothing_of_the_exchange_is_kept_for_backward(ranks):
    for left in ranks(2).run(left_between_passes, 256, timeout=300):
        assert left["hf_ulysses", "identity"] == 0
        # Attention saves its inputs, here the buffer that was received, and its output. Nothing else is there.
        received = (8 + 2 * 2) * 256 * 16 * 4
        assert left["hf_ulysses", "sdpa"] == left["attention alone", "sdpa"] + received


def strided_and_half(dtype):
    from hf_ulysses.core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_heads
    from hf_ulysses.core.heads import share_heads

    bench = bench_exchange()
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.group.WORLD, rank, share_heads(16, 4, size))
    # As a fused projection leaves them, batch of two.
    qkv = torch.randn(2, 32, 24 * 8, dtype=dtype)
    parts = qkv.split([16 * 8, 4 * 8, 4 * 8], dim=-1)
    tensors = [part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts]
    with bench.recorded_collectives() as record, bench.LiveStorage() as storage:
        query, key, value = gather_seq_scatter_heads(*tensors, exchange)
        peak = storage.peak
        gather_heads_scatter_seq(query.transpose(1, 2), exchange)
    return [sent for _, sent in record], peak, qkv.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_strided_inputs_travel_as_they_are(ranks, dtype):
    for size in (2, 4):
        for (qkv, out), peak, nbytes in ranks(size).run(strided_and_half, dtype):
            assert qkv == nbytes * (size - 1) // size
            assert out == 2 * 32 * 16 * 8 * dtype.itemsize * (size - 1) // size
            assert peak <= 2 * nbytes, "one send and one receive buffer"
