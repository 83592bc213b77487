"""The rehearsal for a GPU runs: its self-test, on a CPU; and says what fails."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_self_test_of_the_rehearsal(tmp_path):
    result = tmp_path / "result.json"
    arguments = ["--self-test", "--models", "qwen3-4b", "--output", result]
    run = subprocess.run([sys.executable, SCRIPTS / "gpu_rehearsal.py", *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "self-test passed" in run.stdout, run.stdout + run.stderr
    verdicts = json.loads(result.read_text())["verdicts"]
    said = {name[0]: verdict.partition(":")[0] for name, verdict in verdicts.items()}
    assert said == {"1": "not run", "2": "not run", **dict.fromkeys("34567", "pass"), "8": "not run"}, verdicts


def test_what_fails_is_said_and_the_rest_is_run(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_checks

    def lacks(device):
        raise gpu_checks.NotRun("no such thing")

    def fails(device):
        assert device == "gpu", "numbers differ"

    monkeypatch.setattr(gpu_checks, "CHECKS", {"a": fails, "b": lacks, "c": lambda device: device})
    expected = {"a": "FAIL: AssertionError: numbers differ", "b": "not run: no such thing", "c": "pass: cpu"}
    assert {name: verdict.partition("\n")[0] for name, verdict in gpu_checks.run("cpu", lambda: False).items()} == expected
    assert set(gpu_checks.run("cpu", lambda: True).values()) == {"not run: no time was left"}
