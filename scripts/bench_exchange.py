"""What sequence parallelism adds to attention: hf_ulysses' hook beside DeepSpeed's UlyssesSPAttentionHF, in one run.

    python scripts/bench_exchange.py              everything, about half an hour on two CPU cores
    python scripts/bench_exchange.py --quick      sp 2, up to 4096 tokens, in a minute or two
    python scripts/bench_exchange.py --json       the results as JSON on stdout instead of the table

1. `sp` processes (CPU, gloo, one thread each) build the same tensors, in the layout in which models make them, and check
   that both hooks return the same output and gradients.
2. A round runs forward and backward of every variant around one core once, in random order; the table shows medians over
   rounds, of the slowest rank. So whatever else the machine does falls on all variants alike.
3. Variants: both hooks around sdpa; attention alone (sdpa on one rank's heads over the whole row, nothing exchanged); both
   hooks around an identity core, which costs nothing, so that attention's own time does not hide the exchange; the wire
   alone: the fewest bytes that have to travel, in four collectives on buffers that are there already.
4. One more pass counts collectives, bytes that leave a rank, and the peak of storage allocated during the pass.

Results: outputs/exchange/result.json and exchange.png.

Not covered: GPUs and NCCL (gloo through the loopback device is slower than NVLink, and copies are cheaper than there).
With sp 4 on two cores, ranks wait for each other's time slices: compare variants, not sp sizes.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

OUTPUT = Path(__file__).resolve().parent.parent / "outputs" / "exchange"
OURS, THEIRS, ALONE, WIRE = "hf_ulysses", "DeepSpeed", "attention alone", "wire alone"
VARIANTS = [(OURS, "sdpa"), (THEIRS, "sdpa"), (ALONE, "sdpa")]
VARIANTS += [(OURS, "identity"), (THEIRS, "identity"), (WIRE, "identity")]
MAX_TIME_RATIO, MAX_PEAK_RATIO = 0.5, 0.8


@dataclass(frozen=True)
class Case:
    sp: int
    length: int
    heads: int
    kv_heads: int
    head_size: int = 64

    def __str__(self):
        return f"sp {self.sp}, {self.length} tokens, heads {self.heads}/{self.kv_heads}"


# What the promise is about.
REFERENCE = Case(sp=2, length=4096, heads=16, kv_heads=4)


@dataclass
class Result:
    case: Case
    variant: str
    core: str
    milliseconds: list[float] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    peak_bytes: int = 0

    @property
    def median(self):
        return statistics.median(self.milliseconds)


# -- measuring ----------------------------------------------------------------------------------------------------------


class LiveStorage(TorchDispatchMode):
    """The bytes of all storages that were allocated inside the `with` block and are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen and storage.data_ptr() not in given:
                    self._born(storage)
        return result

    def _born(self, storage):
        size = storage.nbytes()
        self._seen.add(storage)
        weakref.finalize(storage, self._died, size).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _died(self, size):
        self.live -= size


@contextmanager
def recorded_collectives():
    """Yields a list that gets `(name, bytes that leave this rank)` of each collective; both hooks look them up here."""
    record, originals = [], {}

    def wrap(name, sent):
        originals[name] = original = getattr(dist, name)

        def wrapper(*args, **kwargs):
            record.append((name, sent(*args, **kwargs)))
            result = original(*args, **kwargs)
            time.sleep(0.05)  # gloo's worker thread lets go of the buffers a moment after the call returns.
            return result

        setattr(dist, name, wrapper)

    def all_to_all(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = list(input_split_sizes or [input.shape[0] // size] * size)
        return (sum(sizes) - sizes[rank]) * input[:1].numel() * input.element_size()

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        return (dist.get_world_size(group) - 1) * tensor.nbytes

    wrap("all_to_all_single", all_to_all)
    wrap("all_gather", all_gather)
    try:
        yield record
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# -- what is measured ---------------------------------------------------------------------------------------------------


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        ctx.kv_heads = key.shape[1]
        return query.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.transpose(1, 2)
        return grad, grad[:, : ctx.kv_heads], grad[:, : ctx.kv_heads]


def identity(module, query, key, value, attention_mask=None, **kwargs):
    """A core that returns the query and gives all three a gradient, without computing or copying anything."""
    return _Identity.apply(query, key, value), None


def make_variants(case, rank):
    """`{(variant, core): step}`; a step runs forward and backward, calls `between` in between, and returns gradients."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from hf_ulysses.core.attention import exchanging
    from hf_ulysses.core.sequence import ROW_KEY
    from hf_ulysses.core.cut import shard_batch

    part = shard_batch({"input_ids": torch.zeros(1, case.length, dtype=torch.long)}, rank, case.sp)
    facts = {ROW_KEY: part[ROW_KEY], "position_ids": part["position_ids"]}
    row_of = lambda module, kwargs: kwargs[ROW_KEY]  # noqa: E731
    attachment = SimpleNamespace(group=dist.group.WORLD, rank=rank, size=case.sp, exchanges=0, row_of=row_of)

    class Attention(torch.nn.Module):
        is_causal = True

        def __init__(self, num_key_value_groups):
            super().__init__()
            self.num_key_value_groups = num_key_value_groups

    def heads(count, length):
        return torch.randn(1, length, count * case.head_size).unflatten(-1, (count, -1)).transpose(1, 2)

    def tensors(share, length):
        torch.manual_seed(rank)
        kv_heads = max(case.kv_heads // share, 1)
        counts = (case.heads // share, kv_heads, kv_heads)
        inputs = [heads(count, length).requires_grad_() for count in counts]
        return inputs, torch.randn(1, length, case.heads // share * case.head_size)

    def step(function, tensors, facts):
        inputs, grad = tensors
        module = Attention(inputs[0].shape[1] // inputs[1].shape[1])

        def run(between=lambda: None, keep=False):
            output = function(module, *inputs, None, **facts)[0].flatten(2)
            edge, kept = torch.autograd.graph.get_gradient_edge(output), output.detach() if keep else None
            # In a model the output is gone by now: the projection behind it has had its backward.
            del output
            between()
            return kept, *torch.autograd.grad(edge, inputs, grad)

        return run

    sharded = tensors(1, case.length // case.sp)
    variants = {(ALONE, "sdpa"): step(sdpa_attention_forward, tensors(case.sp, case.length), {})}
    for name, core in (("sdpa", sdpa_attention_forward), ("identity", identity)):
        theirs = UlyssesSPAttentionHF(
            core, 1, case.heads, case.head_size, case.kv_heads, 1, dist.group.WORLD, seq_length_is_variable=True
        )
        variants[OURS, name] = step(exchanging(core, lambda module: attachment), sharded, facts)
        variants[THEIRS, name] = step(theirs, sharded, {"position_ids": part["position_ids"]})
    variants[WIRE, "identity"] = wire(case, rank)
    return {key: variants[key] for key in VARIANTS}


def wire(case, rank):
    columns = [case.heads + 2 * max(case.kv_heads, case.sp), case.heads]
    pieces = [case.length // case.sp * n // case.sp * case.head_size for n in columns]
    buffers = [(torch.zeros((case.sp - 1) * n), torch.zeros((case.sp - 1) * n)) for n in pieces]
    sizes = [[0 if peer == rank else n for peer in range(case.sp)] for n in pieces]

    def run(between=lambda: None):
        for direction in ((0, 1), (1, 0)):
            for i in direction:
                receive, send = buffers[i]
                dist.all_to_all_single(receive, send, sizes[i], sizes[i])
            between()

    return run


def check_equal(variants, cores):
    for core in cores:
        for ours, theirs in zip(variants[OURS, core](keep=True), variants[THEIRS, core](keep=True)):
            torch.testing.assert_close(ours, theirs, msg=lambda m: f"the two hooks differ around {core}: {m}")


def count(step, result):
    with recorded_collectives() as record, LiveStorage() as storage:
        forward = []
        step(between=lambda: forward.extend([] if forward else record))
    result.forward = [name for name, _ in forward]
    result.backward = [name for name, _ in record[len(forward) :]]
    result.sent_bytes = sum(sent for _, sent in record)
    result.peak_bytes = storage.peak


def timed(step):
    dist.barrier()
    started = time.perf_counter()
    step()
    elapsed = torch.tensor((time.perf_counter() - started) * 1000)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def measure(case, rank, rounds, seconds, tell):
    """`rounds` rounds around each core; a variant that has used up its part of `seconds` takes part in three only."""
    variants = make_variants(case, rank)
    check_equal(variants, ("sdpa", "identity") if case.length <= 4096 else ("identity",))
    results = {key: Result(case, *key) for key in variants}
    for key, step in variants.items():
        count(step, results[key])
    # Another order in every round, and attention's rounds apart: the step after a long one finds cold caches.
    order = random.Random(0)
    for core, number in itertools.product(("sdpa", "identity"), range(rounds)):
        around_core = [key for key in variants if key[1] == core]
        for key in order.sample(around_core, len(around_core)):
            times = results[key].milliseconds  # Equal on all ranks, so all of them decide alike.
            if number < 3 or sum(times) < seconds * 1000 / len(variants):
                times.append(timed(variants[key]))
        tell(("round", number + 1 + (rounds if core == "identity" else 0)))
    return list(results.values())


# -- processes ----------------------------------------------------------------------------------------------------------


def rank_main(rank, sp, cases, rounds, seconds, folder, queue):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(sp), DS_ACCELERATOR="cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    os.dup2(2, 1)  # Stdout is for the results.
    import deepspeed

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{sp}", rank=rank, world_size=sp, timeout=timedelta(minutes=10)
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    tell = queue.put if rank == 0 else lambda message: None
    for case in cases:
        tell(("case", case))
        results = measure(case, rank, rounds, seconds, tell)
        tell(("results", results))
    dist.barrier()
    os._exit(0)  # gloo's threads abort now and then at a regular exit.


def run(cases, rounds, seconds, on_message):
    results = []
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for sp, group in itertools.groupby(cases, key=lambda case: case.sp):
            queue = context.SimpleQueue()
            arguments = (sp, list(group), rounds, seconds, folder, queue)
            ranks = torch.multiprocessing.start_processes(rank_main, arguments, sp, join=False, start_method="spawn")
            finished = False
            while not (finished and queue.empty()):
                while not queue.empty():
                    kind, value = queue.get()
                    on_message(kind, value)
                    results += value if kind == "results" else []
                finished = ranks.join(timeout=0.2)
    return results


def run_with_progress(cases, rounds, seconds):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        whole = progress.add_task("all cases", total=len(cases))
        current = progress.add_task("starting ranks", total=2 * rounds)

        def on_message(kind, value):
            if kind == "case":
                progress.reset(current, description=str(value))
            elif kind == "round":
                progress.update(current, completed=value)
            else:
                progress.advance(whole)

        return run(cases, rounds, seconds, on_message)


# -- reporting ----------------------------------------------------------------------------------------------------------


def find(results, case, variant, core):
    return next(r for r in results if (r.case, r.variant, r.core) == (case, variant, core))


def summary(results):
    """The promise, of the reference case: `{what: (value, bound, holds)}`."""
    ours, theirs = (find(results, REFERENCE, variant, "identity") for variant in (OURS, THEIRS))
    c = REFERENCE
    tokens, travelling = c.length // c.sp, 2 * c.heads + 2 * max(c.kv_heads, c.sp)
    bound = 2 * (c.sp - 1) * tokens * travelling * c.head_size * 4 // c.sp
    time_ratio, peak_ratio = ours.median / theirs.median, ours.peak_bytes / theirs.peak_bytes
    return {
        "time / DeepSpeed's": (round(time_ratio, 3), MAX_TIME_RATIO, time_ratio <= MAX_TIME_RATIO),
        "live-storage peak / DeepSpeed's": (round(peak_ratio, 3), MAX_PEAK_RATIO, peak_ratio <= MAX_PEAK_RATIO),
        "collectives": (len(ours.forward + ours.backward), 4, len(ours.forward + ours.backward) == 4),
        "bytes sent": (ours.sent_bytes, bound, ours.sent_bytes == bound),
    }


def environment():
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    return {**packages, "python": platform.python_version(), "cpu_cores": os.cpu_count(), "backend": "gloo, fp32"}


def as_json(results):
    rows = [{**asdict(r), "median_ms": round(r.median, 3)} for r in results]
    for row in rows:
        row["milliseconds"] = [round(value, 3) for value in row["milliseconds"]]
    found = REFERENCE in {r.case for r in results}
    verdict = {k: dict(zip(("value", "bound", "holds"), v)) for k, v in summary(results).items()} if found else {}
    return {"environment": environment(), "reference": asdict(REFERENCE), "must_hold": verdict, "results": rows}


def show(results):
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 132)
    table = Table(title="Forward + backward of one attention layer; CPU, gloo, fp32, head size 64")
    for name in ("sp", "tokens", "heads", "core", "variant"):
        table.add_column(name)
    for name in ("median ms", "/ DeepSpeed", "collectives", "MB sent", "peak MB", "/ DeepSpeed"):
        table.add_column(name, justify="right")
    previous = None
    for r in results:
        if previous is not None and r.case != previous:
            table.add_section()
        c, previous = r.case, r.case
        theirs = find(results, c, THEIRS, r.core)
        table.add_row(
            str(c.sp), str(c.length), f"{c.heads}/{c.kv_heads}", r.core, r.variant, f"{r.median:.1f}",
            f"{r.median / theirs.median:.2f}", f"{len(r.forward)} + {len(r.backward)}", f"{r.sent_bytes / 1e6:.1f}",
            f"{r.peak_bytes / 1e6:.1f}", f"{r.peak_bytes / theirs.peak_bytes:.2f}" if r.peak_bytes else "",
        )  # fmt: skip
    console.print(table)
    if REFERENCE in {r.case for r in results}:
        for what, (value, bound, holds) in summary(results).items():
            console.print(
                f"{what} ({REFERENCE}, identity core): {value}, bound {bound}: {'holds' if holds else 'MISSED'}"
            )


def plot(results, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({(r.case.sp, r.case.heads, r.case.kv_heads) for r in results})
    figure, grid = plt.subplots(2, len(sizes), figsize=(4 * len(sizes), 7), squeeze=False, sharex=True)
    colors = {OURS: "tab:blue", THEIRS: "tab:orange", ALONE: "tab:gray", WIRE: "tab:green"}
    for column, (sp, heads, kv_heads) in enumerate(sizes):
        for (variant, core), (row, (what, unit)) in itertools.product(
            VARIANTS, enumerate((("median", "ms, forward + backward"), ("peak_bytes", "MB, live-storage peak")))
        ):
            own = [r for r in results if (r.variant, r.core) == (variant, core)]
            own = [r for r in own if (r.case.sp, r.case.heads, r.case.kv_heads) == (sp, heads, kv_heads)]
            values = [getattr(r, what) / (1 if row == 0 else 1e6) for r in own]
            style = dict(color=colors[variant], linestyle="-" if core == "sdpa" else "--", marker="o", markersize=3)
            grid[row][column].loglog([r.case.length for r in own], values, label=f"{variant}, {core}", **style)
            grid[row][column].set_ylabel(unit if column == 0 else "")
        grid[0][column].set_title(f"sp {sp}, {heads} / {kv_heads} heads")
        grid[1][column].set_xlabel("tokens of the row")
    grid[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sp 2, 1024 and 4096 tokens, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--sp", type=int, nargs="+", help="sequence-parallel sizes (default: 2 4)")
    parser.add_argument("--length", type=int, nargs="+", help="row lengths (default: 1024 4096 16384)")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default: 30, quick: 10)")
    parser.add_argument("--seconds", type=float, help="seconds per case (default: 60, quick: 20)")
    arguments = parser.parse_args()
    sizes = arguments.sp or ([2] if arguments.quick else [2, 4])
    lengths = arguments.length or ([1024, 4096] if arguments.quick else [1024, 4096, 16384])
    rounds = arguments.rounds or (10 if arguments.quick else 30)
    seconds = arguments.seconds or (20 if arguments.quick else 60)
    cases = [Case(sp, length, 16, kv) for sp in sizes for kv in (4, 16) for length in lengths]

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = run_with_progress(cases, rounds, seconds)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    document = json.dumps(as_json(results), indent=1)
    (OUTPUT / "result.json").write_text(document + "\n")
    plot(results, OUTPUT / "exchange.png")
    print(document) if arguments.json else show(results)
    print(f"Written: {OUTPUT}/result.json and exchange.png", file=sys.stderr)


if __name__ == "__main__":
    main()
