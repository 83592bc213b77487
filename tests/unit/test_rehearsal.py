"""The rehearsal for a GPU runs: its self-test, on a CPU."""

import subprocess
import sys
from pathlib import Path


def test_the_self_test_of_the_rehearsal(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "gpu_rehearsal.py"
    arguments = ["--self-test", "--models", "qwen3-4b", "--output", tmp_path / "result.json"]
    run = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "self-test passed" in run.stdout, run.stdout + run.stderr
