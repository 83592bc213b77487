"""Throughput and peak memory of your own program over row lengths and sp sizes, beside sp 1. Resumable; OOM is a row.

Every case is one launch in processes of its own. Results are written after each; cases that are there already are not run
again. The first two steps of a case (allocations, the start-up check) do not count.
"""

import json
import statistics
from itertools import product
from pathlib import Path

from .pictures import throughput
from .runs import launched, train
from .yaml_file import read, with_sp, write

SKIPPED = 2


def bench(config_file, program, sp_sizes, lengths, steps, length_option, output: Path, progress) -> list[dict]:
    """Writes bench.json and bench.png to `output`. Raises `ValueError` for an sp size that does not divide the ranks.

    Returns:
        `list[dict]`: a row per case, by length and sp_size: "status" ("ok", "out of memory" or "failed") and numbers.
    """
    document, file = read(config_file), output / "bench.json"
    ranks = int(document.get("num_processes") or 1)
    for sp in sp_sizes:
        if sp < 1 or ranks % sp:
            raise ValueError(f"sp_size={sp} does not divide num_processes={ranks}.")
    output.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text()) if file.exists() else []
    for length, sp in product(sorted(lengths), sorted(sp_sizes)):
        if any((row["sp_size"], row["length"]) == (sp, length) for row in rows):
            continue
        folder = output / f"sp{sp}-{length}"
        folder.mkdir(exist_ok=True)
        write(with_sp(document, sp), folder / "config.yaml", f"sp_size {sp} of hf-ulysses bench.")
        name = f"sp {sp}, {length:,} tokens"
        run = launched(name, folder, folder / "config.yaml", [*program, length_option, str(length)], steps, sp > 1)
        rows.append({"sp_size": sp, "length": length, **_numbers(run, train(run, steps, progress), length * ranks // sp)})
        file.write_text(json.dumps(rows, indent=1) + "\n")
    rows.sort(key=lambda row: (row["length"], row["sp_size"]))
    throughput(rows, output / "bench.png")
    return rows


def _numbers(run, finished, tokens_at_a_time):
    if not finished:
        oom = any(words in " ".join(run.output()).lower() for words in ("outofmemory", "out of memory", "cannot allocate memory"))
        return {"status": "out of memory" if oom else "failed", "error": ["", *run.output()][-1][-300:]}
    log = run.log()[SKIPPED:] or run.log()
    seconds = statistics.median(entry["seconds"] for entry in log)
    tokens = tokens_at_a_time * log[0]["micro_batch"] * log[0]["accumulation"]
    peak = max(entry["peak_bytes"] for entry in log) / 2**30
    return {"status": "ok", "tokens_per_second": tokens / seconds, "seconds_per_step": seconds, "peak_gib": peak}


def against_baseline(rows, row):
    """Tokens per second beside sp 1 at the same length, `None` where that has none."""
    of_one = [r for r in rows if r["length"] == row["length"] and r["sp_size"] == 1 and r["status"] == "ok"]
    return row["tokens_per_second"] / of_one[0]["tokens_per_second"] if of_one and row["status"] == "ok" else None
