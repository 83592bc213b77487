"""Something happens to one rank: all end, soon, and the cause is said. A rank that fails ends, as a program does."""

import itertools
import os
import signal
import traceback
from datetime import timedelta

import pytest
import torch

from ..ranks import RankFailed
from .trajectory import rows, train

# Seconds from the fault on.
WITHIN = 60

ALL = list(itertools.product(("ddp", "fsdp2", "zero2", "zero3"), ("trial", "step", "evaluation"), ("exception", "oom", "kill")))
# Each engine, place and kind, and each place with an engine that gathers parameters; the trial, which waits for its peers
# by messages of its own, in every way.
FEW = [
    ("ddp", "trial", "exception"), ("zero3", "trial", "oom"), ("fsdp2", "trial", "kill"),
    ("zero2", "step", "kill"), ("fsdp2", "step", "exception"), ("zero3", "evaluation", "oom"),
]  # fmt: skip


def train_until(engine, place, kind, folder):
    """Rank 1 comes to the place and fails. Both ranks write down how they ended."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    from hf_ulysses.core import control
    from hf_ulysses.core.attachment import Attachment

    control.PATIENCE = timedelta(seconds=5)  # Not 30: for whom a rank waits that has failed.
    rank, locate, forward, trying = os.environ["RANK"], Attachment.locate, LlamaMLP.forward, []

    def locate_and_say(self, *args):
        trying.append(True)
        try:
            return locate(self, *args)
        finally:
            trying.pop()

    def fail_there(self, *args):
        here = "trial" if trying else "step" if self.training else "evaluation"
        if here == place and rank == "1":
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("planted: out of memory") if kind == "oom" else RuntimeError("planted: an exception")
        return forward(self, *args)

    Attachment.locate, LlamaMLP.forward = locate_and_say, fail_there
    try:
        train(engine, sp=2, steps=2, eval_data=rows(2), eval_strategy="steps", eval_steps=1)
        end = "trained to the end"
    except BaseException:
        end = traceback.format_exc()
    with open(os.path.join(folder, rank), "w") as file:
        file.write(end)
    os._exit(1)


@pytest.mark.parametrize("engine, place, kind", ALL if os.environ.get("HF_ULYSSES_TEST_ALL") else FEW)
def test_all_ranks_end_and_one_says_why(ranks, engine, place, kind, tmp_path):
    with pytest.raises(RankFailed):
        ranks(2).run(train_until, engine, place, kind, str(tmp_path), grace=WITHIN)
    ends = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(ends) == ({"0"} if kind == "kill" else {"0", "1"}) and "to the end" not in "".join(ends.values())
    gone = ("Connection closed by peer", "Connection reset by peer", "another rank")
    if kind == "kill":
        assert any(words in ends["0"] for words in gone), ends["0"]
    else:
        assert f"planted: {'out of memory' if kind == 'oom' else 'an exception'}" in ends["1"]
        # Told by its peer, or, where it waits in a collective of the engine, of its peer's end.
        told = ("planted",) if engine in ("ddp", "zero2") else ("planted", *gone)
        assert place != "trial" or any(words in ends["0"] for words in told), ends["0"]
