"""Throughput and peak memory of your own program over row lengths and sp sizes, beside sp 1. Resumable; OOM is a row.

Every case is one launch in processes of its own. Results are written after each; cases that are there already are not run
again. The first two steps of a case (allocations, the start-up check) do not count.
"""

import json
import statistics
from pathlib import Path

from .runs import Run, launched, train
from .yaml_file import read, with_sp, write

SKIPPED = 2


def cases(sp_sizes, lengths):
    return [(sp, length) for length in sorted(lengths) for sp in sorted(sp_sizes)]


def bench(config_file, program, sp_sizes, lengths, steps, length_option, output: Path, progress) -> list[dict]:
    """One row per case, in the order of `cases`: sp_size, length, status ("ok", "out of memory" or "failed") and numbers."""
    document, file = read(config_file), output / "bench.json"
    ranks = int(document.get("num_processes") or 1)
    for sp in sp_sizes:
        if ranks % sp:
            raise ValueError(f"sp_size={sp} does not divide num_processes={ranks}.")
    output.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text()) if file.exists() else []
    for sp, length in cases(sp_sizes, lengths):
        if any((row["sp_size"], row["length"]) == (sp, length) for row in rows):
            continue
        folder = output / f"sp{sp}-{length}"
        folder.mkdir(exist_ok=True)
        write(with_sp(document, sp), folder / "config.yaml", f"sp_size {sp} of hf-ulysses bench.")
        fixed = f"{length_option} {length} --max_steps {steps} --logging_steps 1 --save_strategy no --report_to none --output_dir {folder}"
        command = launched(folder / "config.yaml", folder / "bench.jsonl", [*program, *fixed.split()], sp > 1)
        run = Run(f"sp {sp}, {length:,} tokens", command, folder, log_name="bench.jsonl")
        rows.append(_row(run, train(run, steps, progress), sp, length, ranks))
        file.write_text(json.dumps(rows, indent=1) + "\n")
    return sorted(rows, key=lambda row: (row["length"], row["sp_size"]))


def _row(run, finished, sp, length, ranks):
    row = {"sp_size": sp, "length": length}
    if not finished:
        oom = any(words in run.output().lower() for words in ("outofmemory", "out of memory", "cannot allocate memory"))
        lines = [line for line in run.output().splitlines() if line.strip()]
        return row | {"status": "out of memory" if oom else "failed", "error": lines[-1][-300:] if lines else ""}
    log = run.log()[SKIPPED:] or run.log()
    seconds = statistics.median(entry["seconds"] for entry in log)
    # Rows that are trained at a time, times accumulation.
    tokens = length * log[0]["micro_batch"] * log[0]["accumulation"] * ranks // sp
    peak = max(entry["peak_bytes"] for entry in log) / 2**30
    return row | {"status": "ok", "tokens_per_second": tokens / seconds, "seconds_per_step": seconds, "peak_gib": peak}


def against_baseline(rows, row):
    """Tokens per second beside sp 1 at the same length, `None` where that has none."""
    of_one = [r for r in rows if r["length"] == row["length"] and r["sp_size"] == 1 and r["status"] == "ok"]
    return row["tokens_per_second"] / of_one[0]["tokens_per_second"] if of_one and row["status"] == "ok" else None


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, key, title in zip(axes, ("tokens_per_second", "peak_gib"), ("tokens/s", "peak memory of rank 0, GiB")):
        for sp in sorted({row["sp_size"] for row in rows}):
            own = [row for row in rows if row["sp_size"] == sp and row["status"] == "ok"]
            axis.plot([row["length"] for row in own], [row[key] for row in own], "o-", label=f"sp {sp}")
        axis.set_xscale("log", base=2)
        axis.set_title(title)
        axis.set_xlabel("tokens of a row")
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
