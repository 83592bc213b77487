"""Per-model verdicts of the sweep (scripts/sweep_architectures.py) against the golden ones: never below.

A case that was exact stays exact; nothing becomes wrong or an error; what was exchanged is not run slower: `KINDS` are in
order, and no further module runs on the whole row. Better is no regression.
"""

CASES = ("unpacked", "packed", "left_padded")
# All attention through the exchange; modules that exchange inside; modules that run on the whole row.
KINDS = ("exchange", "inside", "whole")
AROUND = "around its layers"


def compare(golden: dict, results: dict, complete: bool = False) -> list[str]:
    """One line per regression of `results` against `golden`; empty where nothing is worse.

    Args:
        golden (`dict`): `golden("sweep")`.
        results (`dict`): what the sweep writes: `{model type: {"sp2": {case: {"status", "gathered", "split", ...}}}}`.
            A model type or size that is not in it is not judged; a new one only has to be neither wrong nor an error.
        complete (`bool`, *optional*, defaults to `False`): whether every golden model and size must be in `results`.
    """
    regressions = []
    for name, by_size in sorted(results.items()):
        for size, found in sorted(by_size.items()):
            regressions += _verdicts(name, size, golden.get(name, {}).get(size, {}), found)
        if golden.get(name, {}).get("kind"):
            regressions += _kinds(name, golden[name], by_size)
    if complete:
        wanted = [(name, size) for name, record in golden.items() for size in ("sp2", "sp4") if size in record]
        regressions += [f"{name}, {size}: not tried" for name, size in wanted if size not in results.get(name, {})]
    return regressions


def _verdicts(name, size, wanted, found):
    for case in CASES:
        answer = found.get(case) or found.get("model") or {"status": "missing"}
        status = answer["status"]
        if status in ("wrong", "error") or (wanted.get(case) == "exact" and status != "exact"):
            yield f"{name}, {size} {case}: {wanted.get(case, 'not tried')} -> {status} {answer.get('why', '')}".rstrip()


def _kinds(name, wanted, by_size):
    answers = [found[case] for found in by_size.values() for case in CASES if case in found]
    exact = [answer for answer in answers if answer["status"] == "exact"]
    if exact and KINDS.index(kind(exact)) > KINDS.index(wanted["kind"]):
        yield f"{name}: {wanted['kind']} -> {kind(exact)}"
    for module in sorted(on_the_whole_row(exact) - set(wanted["whole"])):
        yield f"{name}: {module} runs on the whole row"


def kind(answers) -> str:
    """How a model's mixing is run, as docs/models.md tells: one of `KINDS`."""
    if on_the_whole_row(answers):
        return "whole"
    return "inside" if any(answer["gathered"] or answer["split"] for answer in answers) else "exchange"


def on_the_whole_row(answers) -> set[str]:
    """Names within a layer of the modules that run on the whole row; what lies around the layers does not count."""
    return {pattern(m) for answer in answers for m in answer["gathered"] if not m.endswith(AROUND)}


def pattern(module):
    """`model.layers.3.mixer` -> `mixer`: what lies within a layer, or at the top."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :] if numbers else parts[-1:])
