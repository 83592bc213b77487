"""NCCL hangs where two ranks call collectives in another order, on one communicator or across several; gloo often not.
What each rank calls in a training step is recorded here and compared: names, groups, sizes.
"""

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .trajectory import rows, train

class Recorded(TorchDispatchMode):
    """`calls`: (name, ranks of the group, communicator, numbers of tensors, split sizes) of every collective, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append(_call(func._schema.name.partition("::")[2], args))
        return func(*args, **(kwargs or {}))


def _call(name, args):
    groups = [group for group in map(_group, args) if group is not None]
    sizes = [list(arg) for arg in args if isinstance(arg, (list, tuple)) and arg and all(type(n) is int for n in arg)]
    numbers = [sum(tensor.numel() for tensor in _tensors(arg)) for arg in args if list(_tensors(arg))]
    return name, tuple(dist.get_process_group_ranks(groups[0])), groups[0].group_name, numbers, sizes


def _group(arg):
    if isinstance(arg, dist.ProcessGroup):
        return arg
    boxed = type(arg).__name__ == "ScriptObject" and "ProcessGroup" in str(arg._type())
    return dist.ProcessGroup.unbox(arg) if boxed else None


def _tensors(arg):
    if hasattr(arg, "numel"):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for inner in arg:
            yield from _tensors(inner)


def recorded(prefetch, **settings):
    """The calls of the second optimizer step: the first has the trial, and learns what to prefetch."""
    from transformers import TrainerCallback

    class Record(TrainerCallback):
        mode = Recorded()

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                self.mode.__enter__()
            elif prefetch:
                layers = list(model.model.layers)
                for layer, after in zip(layers, layers[1:]):
                    layer.set_modules_to_forward_prefetch([after])
                for before, layer in zip(layers, layers[1:]):
                    layer.set_modules_to_backward_prefetch([before])

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                self.mode.__exit__(None, None, None)

    record = Record()
    train(before=lambda trainer: trainer.add_callback(record), steps=2, accumulation=2, **settings)
    return record.mode.calls


def assert_same_order(calls):
    """`calls`: of every rank. A communicator waits for what was started on another one, so groups are not looked at apart."""
    for a, mine in enumerate(calls):
        for b, theirs in enumerate(calls[:a]):
            ours, others = ([call for call in of_one if {a, b} <= set(call[1])] for of_one in (mine, theirs))
            assert [call[:2] for call in ours] == [call[:2] for call in others]
            for (name, group, _, numbers, sizes), (*_, other_numbers, other_sizes) in zip(ours, others):
                if name != "alltoall_base_" or not sizes:
                    assert numbers == other_numbers, (name, group)
                    continue
                # (what it receives from each, what it sends to each)
                (received, sent), (other_received, other_sent) = sizes, other_sizes
                place, other_place = group.index(a), group.index(b)
                assert sent[other_place] == other_received[place] and received[other_place] == other_sent[place]


@pytest.mark.parametrize("engine,dp", [("fsdp2", 1), ("fsdp2", 2), ("zero3", 1), ("zero3", 2)])
def test_the_order_of_collectives(ranks, engine, dp):
    settings = dict(engine=engine, sp=2, dp=dp, data=rows(4 * dp))
    calls = ranks(2 * dp).run(recorded, engine == "fsdp2", **settings)
    assert_same_order(calls)
    for mine in calls:
        exchanges = [call for call in mine if call[0] == "alltoall_base_"]
        assert len(exchanges) >= 2 * 2 * 2 * 2, "two layers, there and back, twice"
        # What the engine gathers and scatters does not share a communicator with the exchange.
        there = {name for name, _, communicator, *_ in mine if communicator == exchanges[0][2]}
        assert there <= {"alltoall_base_", "allreduce_"}, there
        assert {name for name, *_ in mine} - there, "the engine's own are recorded"


def test_another_order_is_seen():
    exchange, gather = ("alltoall_base_", (0, 1), "own", [8, 8], [[2, 6], [2, 6]]), ("_allgather_base_", (0, 1), "", [4, 8], [])
    other = ("alltoall_base_", (0, 1), "own", [8, 8], [[6, 2], [6, 2]])
    assert_same_order([[exchange, gather], [other, gather]])
    for wrong in ([gather, other], [other], [other, (*gather[:3], [4, 4], [])], [(*other[:4], [[3, 5], [6, 2]]), gather]):
        with pytest.raises(AssertionError):
            assert_same_order([[exchange, gather], wrong])
