"""What ranks of a sequence-parallel group have alike, taken once: to a trainer, its data-parallel ranks are all there are.

`Replicas` shows an accelerator that way: `gather`, `reduce`, `num_processes` and `process_index` together. A trainer that
gathers rows, slices what it has gathered by its own index and divides by the number of processes is then right in each.
"""

import functools

import torch

from ..core.control import Control
from .accelerate import of_each_group, sp_group, view_of


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
        return of_each_group(self._accelerator, tensor)

    def reduce(self, tensor, reduction="sum", scale=1.0):
        if reduction == "sum":
            scale = scale / view_of(self._accelerator).sp_size
        return self._accelerator.reduce(tensor, reduction, scale)


def among_replicas(trainer, method):
    """A method of one trainer that sees replicas, whoever has overridden it: to be set on the instance."""

    @functools.wraps(method)
    def method_among_replicas(*args, **kwargs):
        accelerator = trainer.accelerator
        if isinstance(accelerator, Replicas):
            return method(*args, **kwargs)
        trainer.accelerator = Replicas(accelerator)
        try:
            return method(*args, **kwargs)
        finally:
            trainer.accelerator = accelerator

    return method_among_replicas


def share_result(accelerator, function):
    """`function`, whose result on every rank is that of its group's first, and whose errors end all ranks. Collective.

    Every rank calls it, because models may run in it, which engines gather from all ranks.
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
        return Control(sp_group(accelerator), patience=None).from_first(result)

    return shared


def end_together(error) -> None:
    """Raise this rank's `error`, or say that another rank has one. Collective over all ranks."""
    everyone = Control(torch.distributed.group.WORLD, patience=None)
    errors = everyone.from_all(None if error is None else repr(error))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise RuntimeError(f"rank {rank} raised {other}")
