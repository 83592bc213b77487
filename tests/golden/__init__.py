"""What the first stage measured, kept as numbers: the way of a batch may change, these may not get worse.

    sweep.json          per model type: verdict of every case over 2 and 4 ranks, and how the model's mixing is run
    trajectories.json   losses, gradient norms and parameters of small training runs
    peaks.json          peaks of live storage of a training step and of a loss-only evaluation
    collectives.json    collectives and bytes per attention layer, and around the layers

`python -m tests.golden.make` measures them; only a better number is a reason to run it again.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def golden(name: str) -> dict:
    """The recorded numbers: "sweep", "trajectories", "peaks" or "collectives"."""
    return json.loads((FOLDER / f"{name}.json").read_text())
