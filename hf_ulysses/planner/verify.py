"""The documentation's diagnosis on your own model, data and engine: do sequence-parallel ranks train as data-parallel ones do?

Data-parallel over all ranks with one row each, against sequence-parallel with sp_size accumulated rows: the same program, seed
and order of rows, so that every optimizer step sees the same rows, and loss and gradient norm have to agree.
"""

import json
from dataclasses import asdict
from pathlib import Path

from .compare import Wording, compare
from .pictures import two_trainings
from .runs import Run, launched, train
from .yaml_file import PREFIX, read, with_sp, write

# float32 differs in the order of sums only. bfloat16 has 8 bits: 2^-8 per operation, averaged over tokens.
TOLERANCES = {"no": 1e-4, "fp16": 1e-2, "bf16": 1e-2}


def prepare(config_file, program, steps, output: Path) -> tuple[list[Run], Wording]:
    """Both runs. Raises `ValueError` for a configuration without sequence parallelism."""
    document = read(config_file)
    sp = int((document.get("parallelism_config") or {}).get(PREFIX + "sp_size") or 1)
    ranks = int(document.get("num_processes") or 1)
    if sp < 2 or ranks % sp:
        raise ValueError(f"{config_file}: {PREFIX}sp_size must be above 1 and divide num_processes, but they are {sp} and {ranks}.")
    output.mkdir(parents=True, exist_ok=True)
    # The user's own block stays where it is used: switches, seq_length.
    write(with_sp(document, 1), output / "plain.yaml", "The same without sequence parallelism (hf-ulysses verify).")
    runs = [
        launched(name, output / folder, file, [*program, "--gradient_accumulation_steps", str(size)], steps, size > 1)
        for name, size, folder, file in ((f"DP={ranks}", 1, "plain", output / "plain.yaml"), (f"SP={sp}", sp, "sharded", config_file))
    ]
    title = f"{runs[0].name}, accumulation 1, against {runs[1].name}, accumulation {sp}"
    return runs, Wording(runs[0].name, runs[1].name, TOLERANCES.get(str(document.get("mixed_precision") or "no"), 1e-2), title)


def verify(runs, wording, steps, output: Path, progress) -> dict:
    """Run both and compare; writes verify.json and verify.png to `output`. Raises `ValueError` with the end of a failed run."""
    for run in runs:
        if not train(run, steps, progress):
            end = ["", *run.output()][-1]
            raise ValueError(f"{run.name} logged {len(run.log())} of {steps} steps; {run.directory}/output.txt ends with: {end}")
    result = compare(runs[0].log()[:steps], runs[1].log()[:steps], wording.tolerance) | {"runs": asdict(wording)}
    (output / "verify.json").write_text(json.dumps(result, indent=2) + "\n")
    two_trainings(result, wording, output / "verify.png")
    return result
