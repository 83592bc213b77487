"""Measure the golden numbers and write them: `python -m tests.golden.make [sweep] [trajectories] [peaks] [collectives]`.

The sweep's verdicts are read from docs/models.md, which names every type once; which of its cases the type cannot do in
one process either is asked of the type itself, and what is refused is tried again. The counts have to be the page's.
All of it takes five minutes. A package that a type needs (scipy, inkling_mm_model) has to be there as in the sweep.
"""

import json
import sys
import warnings
from collections import Counter

import pytest

from ..one_architecture import CASES, _batch, _reference, try_architecture
from ..ranks import Pools
from ..tiny_models import tiny_config, tiny_model
from . import FOLDER, golden, measure
from .verdicts import AROUND

PAGE = FOLDER.parents[1] / "docs" / "models.md"
# As in scripts/sweep_architectures.py.
HEADS = {2: (4, 2), 4: (6, 3)}


def sweep(ranks):
    lines = PAGE.read_text().splitlines()
    found = {}
    for name, record in _page(lines).items():
        verdict = record.pop("verdict")
        for size, heads in HEADS.items():
            if verdict == "refused":
                answer = ranks(size).run(try_architecture, name, *heads)[0]
                record[f"sp{size}"] = {case: answer[case]["status"] for case in CASES}
            else:
                possible = _possible(name, heads)
                record[f"sp{size}"] = {case: "exact" if possible[case] else "impossible" for case in CASES}
        assert (verdict == "exact") == any(record[f"sp{s}"][c] == "exact" for s in HEADS for c in CASES), name
        found[name] = record
    _check_counts(lines, found)
    return found


def _page(lines):
    """`{type: {"verdict", "kind", "inside", "whole"}}`."""
    found, section = {}, ""
    for line in lines:
        if line.startswith("## "):
            section = line
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if section.endswith("through the exchange") and "," in line:
            for name in line.rstrip(".").split(", "):
                found[name] = {"verdict": "exact", "kind": "exchange", "inside": [], "whole": []}
        elif not line.startswith("| ") or cells[0] in ("ranks", "model type") or not section:
            continue
        elif section.startswith("## Exact"):
            kind = "inside" if "exchange inside" in section else "whole"
            columns = [[m for m in cell.replace("`", "").split(", ") if m] for cell in cells[1:3]]
            inside, whole = columns if kind == "inside" else reversed(columns)
            whole = [module for module in whole if not module.endswith(AROUND)]
            found[cells[0]] = {"verdict": "exact", "kind": kind, "inside": inside, "whole": whole}
        else:
            verdict = "refused" if section.startswith("## Refused") else "impossible"
            found[cells[0]] = {"verdict": verdict, "kind": None, "inside": [], "whole": []}
    return dict(sorted(found.items()))


def _possible(name, heads):
    """By case, whether one process can do it without sequence parallelism."""
    warnings.simplefilter("ignore")
    try:
        model = tiny_model(tiny_config(name, *heads))
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"{name}: {error}"[:200])
        return dict.fromkeys(CASES, False)
    return {case: _reference(model, _batch(model, case))["status"] == "possible" for case in CASES}


def _check_counts(lines, found):
    """Against the page's own table of counts."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith(("| sp2 ", "| sp4 "))]
    for size, case, exact, refused, _, _, impossible in rows:
        counts = Counter(record[size][case] for record in found.values())
        wanted = {"exact": int(exact), "refused": int(refused), "impossible": int(impossible)}
        assert counts == wanted, (size, case, counts, wanted)


def trajectories(ranks):
    found, references = {}, {}
    for name, (settings, reference) in measure.runs().items():
        key = repr(reference)
        if key not in references:
            references[key] = ranks(1).run(measure.trajectory, reference)[0]
        size = settings["sp"] * settings.get("dp", 1)
        first, *others = ranks(size).run(measure.trajectory, settings)
        assert all(other == first for other in others), name
        # What is recorded has to be right, not only today's.
        assert first["exchanged"], name
        for number in first.keys() - {"engine", "exchanged", "parameters"}:
            assert first[number] == pytest.approx(references[key][number], rel=2e-5), (name, number)
        found[name] = first
    # Without sequence parallelism, to tell a change of the stack from one of ours.
    found["one process"] = references[repr(measure.runs()["trainer ddp sp2 accumulation1"][1])]
    return found


def peaks(ranks):
    return {"attach": ranks(2).run(measure.peaks, "sharded"), "trainer": ranks(2).run(measure.trainer_peaks)}


def collectives(ranks):
    # By rank: where the ranks' shares lie in a buffer is not the same on the first and on the inner ones.
    return {
        name: ranks(size).run(measure.collectives, *layout, "sharded") for name, (size, *layout) in measure.LAYOUTS.items()
    }


def main(names):
    ranks = Pools()
    for make in (sweep, trajectories, peaks, collectives):
        if not names or make.__name__ in names:
            write(make.__name__, make(ranks))
    ranks.stop()


def write(name, found):
    """One entry a line."""
    entries = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    (FOLDER / f"{name}.json").write_text("{\n" + entries + "\n}\n")
    assert golden(name) == found


if __name__ == "__main__":
    main(sys.argv[1:])
