"""The pool of ranks itself: a test tool that hides failures would make every other test worthless."""

import os
import time
import warnings
from contextvars import ContextVar

import pytest
import torch
import torch.distributed as dist

from ..ranks import RankFailed

variable = ContextVar("variable", default="clean")


def world(value):
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    launched = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return dist.get_rank(), dist.get_world_size(), int(total), launched, torch.get_num_threads()


def plain():
    return dist.is_initialized(), "RANK" in os.environ


def pid():
    return os.getpid()


def leave_a_trace():
    variable.set("dirty")
    os.environ["HF_ULYSSES_TRACE"] = "1"
    from accelerate import PartialState

    PartialState(cpu=True)


def find_a_trace():
    from accelerate import PartialState

    return variable.get(), os.environ.get("HF_ULYSSES_TRACE"), PartialState._shared_state


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("needle")
    dist.barrier()


def die_on(rank):
    print("last words", flush=True)
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang():
    time.sleep(600)


def deprecated():
    warnings.warn("old", FutureWarning)


def returns_what_cannot_be_sent():
    return lambda: None


@pytest.mark.parametrize("size", [2, 4])
def test_a_world_of_that_size_with_the_launchers_environment(ranks, size):
    for rank, answer in enumerate(ranks(size).run(world, 10)):
        launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
        assert answer == (rank, size, sum(10 + r for r in range(size)), launched, 1)


def test_single_is_a_plain_process(single):
    assert single(plain) == (False, False)


def test_processes_are_reused(ranks):
    assert ranks(2).run(pid) == ranks(2).run(pid)


def test_calls_leave_no_trace(ranks):
    ranks(2).run(leave_a_trace)
    assert ranks(2).run(find_a_trace) == [("clean", None, {})] * 2


def test_a_rank_that_raises(ranks):
    before = ranks(2).run(pid)
    with pytest.raises(RankFailed, match="(?s)^rank 1 of 2: Traceback.*raise_on.*ValueError: needle"):
        ranks(2).run(raise_on, 1)
    assert not set(before) & set(ranks(2).run(pid))


def test_a_rank_that_dies(ranks):
    with pytest.raises(RankFailed, match="(?s)^rank 1 of 2: the process died with exit code 7.*last words"):
        ranks(2).run(die_on, 1)


def test_a_rank_that_hangs_says_where(ranks):
    start = time.monotonic()
    with pytest.raises(
        RankFailed, match="(?s)no answer .* after 1 s.*rank 0 stood at.*in hang.*rank 1 stood at.*in hang"
    ):
        ranks(2).run(hang, timeout=1)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("function", [deprecated, returns_what_cannot_be_sent])
def test_failures_outside_of_the_functions_own_code(single, function):
    with pytest.raises(RankFailed, match="FutureWarning: old|[Cc]an't (get|pickle) local object"):
        single(function)


def test_at_most_two_pools(ranks):
    ranks(4).run(pid)
    four = ranks(4)
    ranks(2).run(pid)
    ranks(3).run(pid)
    assert four is not ranks(4)
