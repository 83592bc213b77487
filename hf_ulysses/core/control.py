"""Groups of our own beside the one whose ranks share a row.

    own_group      what travels for the model: it does not queue behind an engine's collectives, which NCCL would serialise
    Control        what the ranks tell each other about it: over gloo, which needs no device, and gives up soon
"""

import functools
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

# A rank that is alive answers in milliseconds; one that is not shall not hold up the others.
PATIENCE = timedelta(seconds=30)


@functools.cache
def own_group(group):
    """A group of the ranks of `group` with a communicator of its own. Collective over `group` the first time."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


@functools.cache
def _over_gloo(group, patience):
    ranks = dist.get_process_group_ranks(group)
    try:
        return dist.new_group(ranks, backend="gloo", timeout=patience, use_local_synchronization=True)
    except RuntimeError as error:
        warnings.warn(f"Control messages go over the device's group, for gloo could not start: {error}", stacklevel=2)
        return group


class Control:
    """Messages among the ranks of a group.

    Args:
        group (`torch.distributed.ProcessGroup`): whose ranks talk. Collective over them the first time.
        patient (`bool`, *optional*): wait for a rank as long as torch does by default, not `PATIENCE`: for ranks that come from
            somebody else's code.
    """

    def __init__(self, group, patient=False):
        self._group = _over_gloo(group, None if patient else PATIENCE)
        on_device = dist.get_backend(self._group) == "nccl"
        self._device = torch.get_device_module().current_device() if on_device else "cpu"

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers. Collective."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return int(numbers)

    def from_all(self, what) -> list:
        """What every rank has to say, in rank order. Collective."""
        answers = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(answers, what, group=self._group)
        return answers

    def from_first(self, what):
        """What the group's first rank has to say. Collective."""
        answer = [what]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        return answer[0]

    def agree_to_read(self, what: str) -> None:
        """Whether all ranks read `what`, before they gather it. Collective; costs a message between hosts.

        Raises:
            RuntimeError: on every rank that reads, after `PATIENCE` at the latest, if one does not, or reads something else.
        """
        try:
            others = self.from_all(what)
        # How gloo says that nobody came.
        except RuntimeError as error:
            others = f"not all answered within {PATIENCE.total_seconds():.0f} s: {error}"
        if others != [what] * dist.get_world_size(self._group):
            raise RuntimeError(
                f"{what} of an attached model's output is the whole row's, gathered when it is read, by all ranks of the "
                f"sequence-parallel group together. Read it on all of them, or on none ({others})."
            )
