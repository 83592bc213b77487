"""Pools of rank processes: started once per session and world size, then answering in milliseconds.

    def all_reduce(value):                      # a function of the test module, pickled by reference
        ...
    def test_it(ranks):
        assert ranks(2).run(all_reduce, 1) == [2, 2]

1. A fork server imports the slow libraries once; every rank is forked from it.
2. Each rank has its own default gloo group, met through a file, and the environment a launcher would set.
3. `run` sends the function to all ranks and waits. The earliest failure is raised in the parent with the rank's
   traceback and output; a rank that dies is an error; after the time limit the error shows where every rank stood.
4. After a failure the pool is thrown away and the next `run` starts a new one: no rank stays half in a collective.

`ranks(1)` is one plain process, without a process group and without the launcher's environment: the reference.
"""

import contextvars
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

from .upstream_warnings import warnings_are_errors

TIMEOUT = 120
GRACE = 1
MAX_POOLS = 2
PRELOAD = ["pytest", "torch", "accelerate", "transformers.trainer", "peft", "deepspeed", "trl.trainer.sft_trainer"]


class RankFailed(Exception):
    """A function failed on a rank; the message holds the rank, its traceback and the end of its output."""


class Pools:
    """The pools of a session by world size; at most `MAX_POOLS` of more than one rank are alive."""

    def __init__(self):
        self._pools = {}

    def __call__(self, size: int) -> "Pool":
        pool = self._pools.pop(size, None) or Pool(size)
        self._pools[size] = pool  # Last in the dictionary is most recently used.
        larger = [n for n in self._pools if n > 1]
        for other in larger[:-MAX_POOLS]:
            self._pools.pop(other).stop()
        return pool

    def stop(self):
        while self._pools:
            self._pools.popitem()[1].stop()


class Pool:
    """`size` rank processes with a default process group of that size; started by the first `run`."""

    def __init__(self, size: int):
        self.size = size
        self._ranks = []

    def run(self, function, *args, timeout=TIMEOUT, grace=GRACE, **kwargs) -> list:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

        Once one rank has failed, the others have `grace` seconds to report, too.

        Raises:
            RankFailed: on the first rank that raised or died, or when the time is up.
        """
        job = pickle.dumps((function, args, kwargs))
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.begin(job)
        deadline = time.monotonic() + timeout
        failed = False
        while running := [rank for rank in self._ranks if rank.running]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for ready in wait([rank.connection for rank in running], left):
                next(rank for rank in running if rank.connection is ready).receive()
            if not failed and any(rank.failure for rank in self._ranks):
                failed, deadline = True, min(deadline, time.monotonic() + grace)
        if failed or running:
            error = self._failure(timeout)
            self.stop()
            raise error
        return [pickle.loads(rank.result) for rank in self._ranks]

    def stop(self):
        for rank in self._ranks:
            rank.stop()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks = []

    def _start(self):
        # Before anything imports Triton: its kernels run in its interpreter, on the CPU.
        os.environ["TRITON_INTERPRET"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="hf_ulysses_ranks_"))
        port = _free_port()
        self._ranks = [_Rank(context, rank, self.size, port, self._folder) for rank in range(self.size)]

    def _failure(self, timeout):
        dead = [rank for rank in self._ranks if rank.failure and rank.failure[0] == 0]
        raised = sorted((rank for rank in self._ranks if rank.failure), key=lambda rank: rank.failure[0])
        if not raised:
            stacks = [f"--- rank {rank.number} stood at:\n{rank.stack()}" for rank in self._ranks if rank.running]
            return RankFailed(
                "\n".join([f"no answer from all ranks after {timeout} s", *stacks, self._ranks[0].output()])
            )
        first = (dead or raised)[0]
        others = {rank.number: rank.failure[1].strip().splitlines()[-1] for rank in raised if rank is not first}
        rest = "".join(f"\n--- rank {number}: {line}" for number, line in sorted(others.items()))
        return RankFailed(f"rank {first.number} of {self.size}: {first.failure[1]}{rest}\n{first.output()}")


class _Rank:
    """The parent's end of one rank process."""

    def __init__(self, context, number, size, port, folder):
        self.number, self._folder = number, folder
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_rank_main, args=(theirs, number, size, port, folder), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, job):
        self.running, self.result, self.failure = True, None, None
        try:
            self.connection.send_bytes(job)
        except OSError:
            self._died()

    def receive(self):
        try:
            failed, *answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return self._died()
        self.running = False
        if failed:
            self.failure = tuple(answer)
        else:
            self.result = answer[0]

    def _died(self):
        self._process.join(5)
        self.running, self.failure = False, (0, f"the process died with exit code {self._process.exitcode}")

    def stack(self):
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return (self._folder / f"{self.number}.stack").read_text()

    def output(self):
        text = (self._folder / f"{self.number}.output").read_text(errors="replace")
        return f"--- output of rank {self.number}:\n{text[-3000:]}" if text else ""

    def stop(self):
        self._process.kill()
        self._process.join()
        self.connection.close()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- in the rank process ----------------------------------------------------------------------------------------------


def _rank_main(connection, rank, size, port, folder):
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gc.freeze()  # What the fork server imported need not be searched for garbage after every call.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=False)
    _join_world(rank, size, port, folder)
    environment = dict(os.environ)
    try:
        while True:
            job = connection.recv_bytes()
            connection.send_bytes(contextvars.copy_context().run(_answer, job))
            os.environ.clear()
            os.environ.update(environment)
    except EOFError:
        pass
    finally:
        # gloo's threads abort now and then at a regular exit.
        os._exit(0)


def _join_world(rank, size, port, folder):
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if size == 1:
        return
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )


def _answer(job):
    """Run one job; `(failed, when, traceback)` or `(failed, pickled result)`, pickled."""
    try:
        function, args, kwargs = pickle.loads(job)
        with warnings_are_errors():
            result = pickle.dumps(function(*args, **kwargs))
        return pickle.dumps((False, result))
    except BaseException:
        return pickle.dumps((True, time.monotonic(), traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        reset_library_state()


def reset_library_state():
    """What a finished job may leave behind in a rank; the environment and ContextVars are restored by the loop."""
    import torch

    gc.collect()
    torch.set_default_dtype(torch.float32)
    if "hf_ulysses" in sys.modules and hasattr(sys.modules["hf_ulysses"], "disable"):
        sys.modules["hf_ulysses"].disable()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
