"""A trial run, in which ranks may go different ways, must not leave one of them waiting in a collective for the others.

Before every collective of ours in a trial, the ranks of the group tell each other which one they are about to enter; a
rank that has given up says so instead. Where they differ, all of them stop. In training `meet` does nothing: what ran
in the trial goes the same way on every rank.

Not covered: an engine's own collectives (parameters gathered by ZeRO-3 or FSDP2) that come before the next one of ours.
"""

import zlib
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

_trial: ContextVar = ContextVar("ulysses_trial", default=None)


# Whether what runs is a question to one module, which nobody compares with another run.
_asking: ContextVar = ContextVar("ulysses_asking", default=False)


class PeersDiffer(RuntimeError):
    """Another rank has given up, or is about to enter another collective."""


@contextmanager
def trial(group, device):
    """Inside, collectives are announced. An error inside is told to the others, which get `PeersDiffer`."""
    token = _trial.set((group, device))
    try:
        yield
        meet("the end")
    except PeersDiffer:
        raise
    except Exception:
        _tell("gave up")
        raise
    finally:
        _trial.reset(token)


def on_trial() -> bool:
    return _trial.get() is not None


@contextmanager
def asking():
    """Inside, a module runs to answer a question: not as a part of the trial that is compared."""
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def is_asking() -> bool:
    return _asking.get()


def meet(*what):
    """Announce a collective: `what` is equal on all ranks that are about to enter the same one."""
    if _trial.get() is not None and not _tell(what):
        raise PeersDiffer(f"the ranks of a sequence-parallel group part before {what[0]}")


def _tell(what):
    group, device = _trial.get()
    mine = torch.tensor([zlib.crc32(repr(what).encode())], device=device)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return all(torch.equal(mine, other) for other in theirs)
