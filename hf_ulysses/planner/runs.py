"""Launching training programs and reading what they log: what `verify`, `bench` and scripts/quickstart.py share.

A program that is run by `python -m hf_ulysses.planner.runs LOG PROGRAM ARGS` is not changed: the Trainer's list of default
callbacks gets one more, which writes a line of JSON per logging step. PROGRAM may be `-m hf_ulysses PROGRAM`.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..cli import main, run_program

# The first one waits for models to load, for DeepSpeed to compile, and for whatever else the machine does.
SECONDS_WITHOUT_A_STEP = 900


@dataclass
class Run:
    """One training. `log_name` is written by the program, or by the callback below."""

    name: str
    command: list[str]
    directory: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    log_name: str = "log.jsonl"

    def log(self) -> list[dict]:
        """The training steps logged so far."""
        file = self.directory / self.log_name
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [entry for entry in map(json.loads, lines) if "loss" in entry]

    def output(self) -> list[str]:
        """The lines that it printed."""
        file = self.directory / "output.txt"
        return [line for line in file.read_text(errors="replace").splitlines() if line.strip()] if file.exists() else []


def train(run: Run, steps: int, progress) -> bool:
    """Runs one training and shows its progress in a rich `Progress`; whether all steps were logged."""
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / run.log_name).unlink(missing_ok=True)
    task = progress.add_task(run.name, total=steps, note="starting")
    with (run.directory / "output.txt").open("w") as file:
        process = subprocess.Popen(run.command, env=run.environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        done, last_step = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - last_step < SECONDS_WITHOUT_A_STEP:
            time.sleep(0.5)
            log = run.log()
            if len(log) > done:
                done, last_step = len(log), time.monotonic()
                progress.update(task, completed=done, note=f"loss {log[-1]['loss']:.4f}")
            if done >= steps and time.monotonic() - last_step > 60:
                break  # It does not exit by itself; all work is done.
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    # Judged by its result: a gloo process sometimes aborts while it exits, after all work is done.
    progress.update(task, completed=len(run.log()))
    return len(run.log()) >= steps


def progress_bar():
    """On stderr. Every task has a field `note`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))


def launched(name, directory, config_file, program: list[str], steps: int, plugin: bool) -> Run:
    """The run of `program` with `steps` steps under an Accelerate YAML, everything it writes in `directory`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Not log.jsonl, which a program of ours writes by itself.
    run = Run(name, [], directory, log_name="steps.jsonl")
    launch = ["accelerate.commands.launch", "--config_file", str(config_file), "--main_process_port", port]
    inner = ["-m", "hf_ulysses", "--config_file", str(config_file)] if plugin else []
    fixed = f"--max_steps {steps} --logging_steps 1 --save_strategy no --report_to none --output_dir"
    logged = ["-m", __name__, str(directory / run.log_name), *inner, *program, *fixed.split(), str(directory)]
    run.command = [sys.executable, "-m", *launch, *logged]
    return run


# -- in the program's process -------------------------------------------------------------------------------------------


def _callback(path):
    import torch
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        """Every log of the first rank, with seconds since the last step began and the peak of memory."""

        def on_step_begin(self, args, state, control, **kwargs):
            self.begun = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if not state.is_world_process_zero or "loss" not in (logs or {}):
                return
            # Of the first GPU, or of the process.
            gpu = torch.cuda.is_available()
            peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            more = {"seconds": time.perf_counter() - self.begun, "peak_bytes": peak}
            more["accumulation"], more["micro_batch"] = args.gradient_accumulation_steps, args.per_device_train_batch_size
            with open(path, "a") as file:
                print(json.dumps({"step": state.global_step, **logs, **more}), file=file)

    return Log


if __name__ == "__main__":
    from transformers import trainer

    trainer.DEFAULT_CALLBACKS.append(_callback(sys.argv[1]))
    arguments = sys.argv[2:]
    if arguments[:2] == ["-m", "hf_ulysses"]:
        main(arguments[2:])
    else:
        module = arguments[0] == "-m"
        run_program(module, *arguments[module:])
