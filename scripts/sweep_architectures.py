"""Every causal language model that transformers can build, tiny: sharded against one process, forward and every gradient.

    python scripts/sweep_architectures.py [--only NAME ...] [--json FILE] [--table docs/models.md] [--redo]

Unpacked, packed and left-padded rows; 4 query / 2 key-value heads over sp=2, 6 / 3 over sp=4. Resumable: what the JSON
file holds already is not tried again, unless --redo says so. A model that crashes or hangs does not stop the sweep.
"""

import argparse
import collections
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.one_architecture import CASES, try_architecture  # noqa: E402
from tests.ranks import Pools, RankFailed  # noqa: E402

LAYOUTS = {2: (4, 2), 4: (6, 3)}


def sweep(names, path, redo, timeout):
    results = json.loads(path.read_text()) if path.exists() else {}
    todo = [(name, size) for size in LAYOUTS for name in names if redo or f"sp{size}" not in results.get(name, {})]
    ranks = Pools()
    columns = TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for name, size in todo:
            progress.update(bar, description=f"{name} sp={size}")
            try:
                first, *others = ranks(size).run(try_architecture, name, *LAYOUTS[size], timeout=timeout)
                found = _merge([first, *others])
            except RankFailed as error:
                found = {case: {"status": "error", "why": str(error)[-600:]} for case in CASES}
            results.setdefault(name, {})[f"sp{size}"] = found
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1, sort_keys=True))
            progress.advance(bar)
    ranks.stop()
    return results


def _merge(ranks):
    """The first rank's answer, or of each case the worst one where ranks differ."""
    order = ["exact", "impossible", "refused", "error", "wrong"]
    merged = dict(ranks[0])
    for case in CASES:
        answers = [answer[case] for answer in ranks if case in answer]
        if answers:
            merged[case] = max(answers, key=lambda answer: order.index(answer["status"]))
    return merged


def summary(results):
    counts = collections.Counter()
    for name, by_size in results.items():
        for size, found in by_size.items():
            for case in CASES:
                counts[size, case, found.get(case, found.get("model", {})).get("status", "?")] += 1
    return "\n".join(f"{size} {case:12} {status:10} {count}" for (size, case, status), count in sorted(counts.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME")
    parser.add_argument("--json", type=Path, default=ROOT / "outputs" / "architectures.json")
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()
    results = sweep(args.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), args.json, args.redo, args.timeout)
    print(summary({name: results[name] for name in args.only or results}))


if __name__ == "__main__":
    main()
