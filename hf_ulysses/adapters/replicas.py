"""What ranks of a sequence-parallel group have alike, taken once: to a trainer, its data-parallel ranks are all there are.

`Replicas` shows an accelerator that way: `gather`, `reduce`, `num_processes` and `process_index` together. A trainer that
gathers rows, slices what it has gathered by its own index and divides by the number of processes is then right in each.
"""

import functools
import io
import random
from contextlib import contextmanager

import numpy
import torch

from ..core.control import Control
from ..core.randomness import random_states, set_random_states
from .config import StateView


def view_of(accelerator):
    """The `StateView` of an accelerator with sequence parallelism, `None` of any other."""
    return getattr(accelerator, "_ulysses", None)


def shared_view():
    """The `StateView` of this process's accelerators, `None` without sequence parallelism."""
    from accelerate.state import AcceleratorState

    config = AcceleratorState._shared_state.get("parallelism_config")
    return config if isinstance(config, StateView) else None


def sp_group(accelerator):
    return accelerator.torch_device_mesh["sp"].get_group()


def of_each_group(gathered, size):
    """What has been gathered from all ranks, in rank order, with what groups of `size` of them have alike taken once."""
    from accelerate.utils.operations import recursively_apply

    world = torch.distributed.get_world_size()

    def first_of_group(tensor):
        return tensor.unflatten(0, (world // size, size, len(tensor) // world))[:, 0].flatten(0, 1)

    return recursively_apply(first_of_group, gathered)


class Replicas:
    """An accelerator as a data-parallel rank sees it; everything else is the accelerator's."""

    def __init__(self, accelerator):
        size = view_of(accelerator).sp_size
        self.__dict__.update(
            _accelerator=accelerator,
            num_processes=accelerator.num_processes // size,
            process_index=accelerator.process_index // size,
        )

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def __setattr__(self, name, value):
        setattr(self._accelerator, name, value)

    def gather(self, tensor):
        gathered, size = self._accelerator.gather(tensor), view_of(self).sp_size
        if getattr(self._accelerator, "_yields_shards", False):
            _check_alike(gathered, size)
        return of_each_group(gathered, size)

    def reduce(self, tensor, reduction="sum", scale=1.0):
        from accelerate.utils.operations import recursively_apply

        reduced, size = self._accelerator.reduce(tensor, reduction, scale), view_of(self).sp_size
        if reduction != "sum":
            return reduced
        # Each replica has been added as often as it has ranks.
        return recursively_apply(lambda total: total / size if total.is_floating_point() else total // size, reduced)


def _check_alike(gathered, size):
    """Refuse what an explicitly sharded batch makes of gathering: the first shard of each row would be all that is seen."""
    from accelerate.utils.operations import recursively_apply

    world = torch.distributed.get_world_size()

    def check(tensor):
        of_ranks = tensor.unflatten(0, (world // size, size, len(tensor) // world)).double()
        # A number that all ranks have may differ in its last digits.
        if not torch.allclose(of_ranks, of_ranks[:, :1].expand_as(of_ranks), rtol=1e-2, atol=1e-2, equal_nan=True):
            raise ValueError(
                "gather_for_metrics was given what differs within a sequence-parallel group: shards of a row, of which it would keep "
                "the first. Gather the row first (attachment.gather), or prepare the loader in a call of its own, without the "
                "model: its batches are whole rows, and so is what the model returns."
            )
        return tensor

    recursively_apply(check, gathered)


class _StateOfReplicas:
    """An `AcceleratorState` that counts data-parallel ranks; everything else is the state's."""

    def __init__(self, state, sp_size):
        self._state = state
        self.num_processes, self.process_index = state.num_processes // sp_size, state.process_index // sp_size

    def __getattr__(self, name):
        return getattr(self._state, name)


def wrap_state(original):
    """The name `AcceleratorState` in a module that counts processes where it means data-parallel ranks."""

    @functools.wraps(original, updated=())
    def state(*args, **kwargs):
        found, view = original(*args, **kwargs), shared_view()
        return found if view is None else _StateOfReplicas(found, view.sp_size)

    return state


def replicas_of(accelerator):
    return accelerator if isinstance(accelerator, Replicas) else Replicas(accelerator)


def among_replicas(trainer, method):
    """A method of one trainer that sees replicas, whoever has overridden it: to be set on the instance."""

    @functools.wraps(method)
    def method_among_replicas(*args, **kwargs):
        accelerator = trainer.accelerator
        trainer.accelerator = replicas_of(accelerator)
        try:
            return method(*args, **kwargs)
        finally:
            trainer.accelerator = accelerator

    return method_among_replicas


@contextmanager
def counting_replicas(arguments, sp_size, *names):
    """Inside, the properties `names` of training arguments count data-parallel ranks, not processes."""
    cls = type(arguments)

    def counted(name):
        return property(lambda self: getattr(cls, name).fget(self) // sp_size)

    # A property cannot be shadowed on an instance.
    arguments.__class__ = type(cls.__name__, (cls,), {name: counted(name) for name in names})
    try:
        yield
    finally:
        arguments.__class__ = cls


def share_randomness(group) -> None:
    """Give all ranks of `group` the random states of its first one, which data pipelines draw from. Collective."""
    mine = [random.getstate(), numpy.random.get_state(), random_states()]
    states = Control(group, patient=True).from_first(mine)
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    set_random_states(states[2])


def share_result(accelerator, function):
    """`function`, whose result on every rank is that of its group's first, and whose errors end all ranks. Collective.

    Every rank calls it, because models may run in it, which engines gather from all ranks. Then they draw alike again.
    """

    @functools.wraps(function)
    def shared(*args, **kwargs):
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        # Whatever it is: it is raised again, on all ranks.
        except Exception as raised:
            error = raised
        end_together(error)
        group, written, device = sp_group(accelerator), io.BytesIO(), accelerator.device
        torch.save(result, written)
        sent = Control(group, patient=True).from_first(written.getvalue())
        share_randomness(group)
        # Written by a peer of this process: anything may be in it. "cpu:0" is no place for `load`.
        place = "cpu" if device.type == "cpu" else device
        return torch.load(io.BytesIO(sent), map_location=place, weights_only=False)

    return shared


def end_together(error) -> None:
    """Raise this rank's `error`, or say that another rank has one. Collective over all ranks."""
    everyone = Control(torch.distributed.group.WORLD, patient=True)
    errors = everyone.from_all(None if error is None else repr(error))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise RuntimeError(f"rank {rank} raised {other}")
