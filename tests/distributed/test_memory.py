"""Head chunks over ranks: live storage of the whole row's tensors, and collectives. All switches together, sharded."""

import pytest
import torch

import hf_ulysses
from hf_ulysses.memory import Settings, switch_on

from ..collectives import Collectives
from ..models import batch_of, build, checkpoint
from .steps import assert_same, sharded, whole_step
from .test_exchange_cost import bench_exchange

LENGTH, SIZE = 1024, 4


def full_row_peak(heads, chunks):
    """The peak of what has the whole row's length, over forward and backward of one checkpointed attention layer."""
    bench = bench_exchange()

    class FullRow(bench.LiveStorage):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before, self._born = self._born, lambda storage: None
            result = func(*args, **(kwargs or {}))
            self._born = before
            for tensor in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(tensor) and LENGTH in tensor.shape and tensor.is_floating_point():
                    storage = tensor.untyped_storage()
                    if storage not in self._seen:
                        self._born(storage)
            return result

    model = build(dtype=torch.float32, num_hidden_layers=1, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    checkpoint(model)
    with hf_ulysses.attach(model) as sp, bench.recorded_collectives():
        part = sp.shard(batch_of(1, LENGTH))
        handles = switch_on(model, Settings(head_chunks=chunks), sp)
        with FullRow() as storage:
            model(**part).loss.backward()
        for handle in handles:
            handle.remove()
        assert getattr(sp, "head_chunks", 1) == 1
    return storage.peak


@pytest.mark.parametrize("heads,at_most", [((32, 8), 0.5), ((16, 16), 0.3)])
def test_the_whole_row_of_a_few_heads(ranks, heads, at_most):
    """Forward and backward, with checkpointing: what is as long as the row is there for one chunk only."""
    one, four = ranks(SIZE).run(full_row_peak, heads, 1), ranks(SIZE).run(full_row_peak, heads, 4)
    for ours, theirs in zip(four, one):
        assert 0 < ours <= at_most * theirs, (ours / theirs, ours, theirs)


def counts(chunks, checkpointed):
    model = build(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)
    if checkpointed:
        checkpoint(model)
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(batch_of(1, 32))
        model(**part)
        switch_on(model, Settings(head_chunks=chunks), sp)
        with Collectives() as forward:
            loss = model(**part).loss
        with Collectives() as backward:
            loss.backward()
    return forward.counts["alltoall_base_"], backward.counts["alltoall_base_"]


@pytest.mark.parametrize("chunks", [2, 4])
def test_two_collectives_per_chunk_and_pass(ranks, chunks):
    """Backward: two for gradients, and one more to have query, key and value again; their output is not sent again."""
    assert set(ranks(2).run(counts, chunks, False)) == {(2 * chunks, 3 * chunks)}
    # The layer runs again, too; its last chunk stops as soon as backward has what it needs.
    ((forward, backward),) = set(ranks(2).run(counts, chunks, True))
    assert forward == 2 * chunks and backward <= 5 * chunks


ALL = dict(tiled_loss=3, tiled_mlp=3, tiled_norms=2, offload_checkpoints=True, head_chunks=2)


def sharded_with(batch, settings, **model):
    model = build(num_attention_heads=8, num_key_value_heads=4, **model)
    checkpoint(model)
    with hf_ulysses.attach(model) as sp:
        handles = switch_on(model, Settings(**settings), sp)
        step = sharded(model, batch, sp)
        for handle in handles:
            handle.remove()
    return step


@pytest.mark.half("settings", "size", "family")
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("settings", [ALL, *({name: value} for name, value in ALL.items())], ids=lambda s: "+".join(s))
def test_each_switch_alone_and_all_together(ranks, settings, size, family):
    model = dict(family=family, attn="eager" if family == "gpt_oss" else "sdpa")
    reference = ranks(1).run(whole_step, batch_of(2, 30), num_attention_heads=8, num_key_value_heads=4, **model)[0]
    assert_same(ranks(size).run(sharded_with, batch_of(2, 30), settings, **model), reference)


def attached_with(batch, memory, refused):
    model = build(num_attention_heads=8, num_key_value_heads=4)
    if not refused:
        checkpoint(model)
    with hf_ulysses.attach(model, memory=memory) as sp:
        if refused:
            with pytest.raises(ValueError, match="no layer of LlamaModel is checkpointed"):
                model(**batch)
            return True
        return sharded(model, batch, sp)


@pytest.mark.parametrize("memory", ["max", dict(tiled_mlp=3, head_chunks=2)], ids=str)
def test_a_loop_of_your_own(ranks, memory):
    reference = ranks(1).run(whole_step, batch_of(2, 30), num_attention_heads=8, num_key_value_heads=4)[0]
    assert_same(ranks(2).run(attached_with, batch_of(2, 30), memory, False), reference)
    assert all(ranks(2).run(attached_with, batch_of(2, 30), "max", True))
