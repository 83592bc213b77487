"""The main job, end to end, beside its reference: `bash scripts/quickstart.sh` runs this in the right environment.

1. Make a small Llama with random weights, and rows of at least 4096 tokens from the Python standard library's source.
2. Train it with scripts/sft.py in one process, without sequence parallelism.
3. Train it again with the same script, rows and arguments under configs/zero3.yaml and `-m hf_ulysses`, each row cut
   over two processes: two GPUs if there are two, else two CPU processes with gloo.
4. Compare loss and grad_norm of every step: a table, outputs/quickstart/curves.png and outputs/quickstart/result.json.
   The exit status is 0 only if no value differs by more than 1e-4 relative and the loss has fallen by 20 %.

Both runs use fp32 (no TF32), sdpa, AdamW, active gradient clipping and two accumulated rows per step.

Not covered: speed and memory. The model is tiny and two ranks share one CPU; the times shown say nothing about GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib
import torch
from data import training_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_llama import byte_tokenizer, tiny_llama
from transformers.utils import logging

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "outputs" / "quickstart"

SP_SIZE = 2
ROWS_PER_STEP = 2
MAX_LENGTH = 5120
MIN_LENGTH = 4096
TOLERANCE = 1e-4
REQUIRED_FALL = 0.2
SECONDS_WITHOUT_A_STEP = 300


@dataclass
class Run:
    name: str
    command: list[str]
    environment: dict[str, str]
    directory: Path

    def log(self) -> list[dict]:
        """The training steps logged so far."""
        file = self.directory / "log.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [entry for entry in map(json.loads, lines) if "loss" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps of each run (default: 32)")
    steps = parser.parse_args().steps

    console = Console()
    started = time.monotonic()
    device, plain, sharded = prepare(steps)
    console.print(f"[bold]SFTTrainer, ZeRO-3, rows of {MIN_LENGTH} to {MAX_LENGTH} tokens, {device}[/bold]")
    with Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    ) as progress:
        for run in (plain, sharded):
            train(run, steps, progress)

    result = compare(plain.log(), sharded.log())
    result["device"], result["layout"] = device, layout(sharded)
    result["seconds"] = round(time.monotonic() - started, 1)
    result["versions"] = {name: version(name) for name in ("torch", "accelerate", "transformers", "trl", "deepspeed")}
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)
    plot(result, OUTPUT / "curves.png")
    console.print(f"Curves: {OUTPUT / 'curves.png'}    Numbers: {OUTPUT / 'result.json'}")
    return 0 if result["passed"] else 1


def prepare(steps: int) -> tuple[str, Run, Run]:
    """Writes the model and the rows, and says how to start both runs."""
    logging.disable_progress_bar()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    model, rows_file = OUTPUT / "model", OUTPUT / "rows.jsonl"
    tiny_llama().save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    rows = training_rows(byte_tokenizer(), MAX_LENGTH, max_rows=steps * ROWS_PER_STEP, min_rows_per_document=5)
    assert all(MIN_LENGTH <= len(row["input_ids"]) <= MAX_LENGTH for row in rows)
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    gpus = torch.cuda.device_count()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if gpus >= SP_SIZE:
        device = f"{SP_SIZE} x {torch.cuda.get_device_name()}"
        plain_environment = {**environment, "CUDA_VISIBLE_DEVICES": "0"}
        sharded_environment = environment
    else:
        device = f"{SP_SIZE} CPU processes with gloo"
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        cores = len(os.sched_getaffinity(0))
        plain_environment = {**environment, "OMP_NUM_THREADS": str(cores)}
        sharded_environment = {**environment, "OMP_NUM_THREADS": str(max(1, cores // SP_SIZE))}

    def script(directory: Path) -> list[str]:
        arguments = f"""
            {ROOT}/scripts/sft.py --model_name_or_path {model} --attn_implementation sdpa --dtype float32
            --train_files {rows_file} --max_length {MAX_LENGTH} --per_device_train_batch_size 1
            --gradient_accumulation_steps {ROWS_PER_STEP} --max_steps {steps} --learning_rate 3e-3 --max_grad_norm 1.0
            --bf16 false --logging_steps 1 --save_strategy no --report_to none --output_dir {directory}"""
        return arguments.split() + ([] if gpus >= SP_SIZE else ["--use_cpu"])

    launch = f"""
        -m accelerate.commands.launch --config_file {ROOT}/configs/zero3.yaml --num_processes {SP_SIZE}
        --parallelism_config_sp_size {SP_SIZE} --mixed_precision no --main_process_port 0 -m hf_ulysses"""
    plain, sharded = OUTPUT / "plain", OUTPUT / "sharded"
    return (
        device,
        Run("one process, no SP", [sys.executable, *script(plain)], plain_environment, plain),
        Run(f"ZeRO-3, SP={SP_SIZE}", [sys.executable, *launch.split(), *script(sharded)], sharded_environment, sharded),
    )


def train(run: Run, steps: int, progress: Progress) -> None:
    """Runs one training and shows its progress; exits with the end of its output if it fails."""
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "log.jsonl").unlink(missing_ok=True)
    output = run.directory / "output.txt"
    task = progress.add_task(run.name, total=steps, loss="starting")
    with output.open("w") as file:
        process = subprocess.Popen(run.command, env=run.environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        done, last_step = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - last_step < SECONDS_WITHOUT_A_STEP:
            time.sleep(0.5)
            log = run.log()
            if len(log) > done:
                done, last_step = len(log), time.monotonic()
                progress.update(task, completed=done, loss=f"loss {log[-1]['loss']:.4f}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    # Judged by its result: a gloo process sometimes aborts while it exits, after all work is done.
    progress.update(task, completed=len(run.log()))
    if len(run.log()) < steps:
        progress.stop()
        print("\n".join(output.read_text(errors="replace").splitlines()[-40:]), file=sys.stderr)
        sys.exit(f"\n{run.name}: ended after {len(run.log())} of {steps} steps. All of its output: {output}")


def layout(run: Run) -> str:
    """The line that hf_ulysses prints at the start; without it the run was no run with sequence parallelism."""
    lines = (run.directory / "output.txt").read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith("hf_ulysses:") and f"sp {SP_SIZE}" in line]
    if not found:
        sys.exit(f"{run.name}: hf_ulysses did not report sp {SP_SIZE} in {run.directory / 'output.txt'}")
    return found[0]


def compare(plain: list[dict], sharded: list[dict]) -> dict:
    """Compares loss and grad_norm step by step."""
    steps = []
    for reference, value in zip(plain, sharded, strict=True):
        step = {"step": reference["step"]}
        for key in ("loss", "grad_norm"):
            step[key] = {
                "plain": reference[key],
                "sharded": value[key],
                "relative_difference": abs(value[key] - reference[key]) / abs(reference[key]),
            }
        steps.append(step)
    # Each step sees other rows, so the ends of the curve are averaged.
    ends = max(1, len(steps) // 8)
    first = sum(step["loss"]["sharded"] for step in steps[:ends]) / ends
    last = sum(step["loss"]["sharded"] for step in steps[-ends:]) / ends
    largest = {key: max(step[key]["relative_difference"] for step in steps) for key in ("loss", "grad_norm")}
    fall = 1 - last / first
    return {
        # Not `max(...) > TOLERANCE`: a NaN must fail.
        "passed": all(difference <= TOLERANCE for difference in largest.values()) and fall >= REQUIRED_FALL,
        "largest_relative_difference": largest,
        "tolerance": TOLERANCE,
        "fall_of_loss": fall,
        "required_fall_of_loss": REQUIRED_FALL,
        "steps": steps,
    }


def show(result: dict, console: Console) -> None:
    table = Table(title=f"without SP and with SP={SP_SIZE}, step by step")
    for column in ("step", "loss", f"SP={SP_SIZE}", "difference", "grad_norm", f"SP={SP_SIZE}", "difference"):
        table.add_column(column, justify="right")
    for step in result["steps"]:
        cells = [str(step["step"])]
        for key in ("loss", "grad_norm"):
            values = step[key]
            difference = values["relative_difference"]
            style = "green" if difference <= TOLERANCE else "bold red"
            cells += [f"{values['plain']:.6f}", f"{values['sharded']:.6f}", f"[{style}]{difference:.1e}[/{style}]"]
        table.add_row(*cells)
    console.print(table)
    console.print(result["layout"])
    largest = result["largest_relative_difference"]
    verdict = "[bold green]PASSED[/bold green]" if result["passed"] else "[bold red]FAILED[/bold red]"
    console.print(
        f"{verdict}  largest relative difference: loss {largest['loss']:.1e}, grad_norm {largest['grad_norm']:.1e} "
        f"(allowed {TOLERANCE:.0e}); the loss fell by {result['fall_of_loss']:.0%} (required {REQUIRED_FALL:.0%}); "
        f"{result['seconds']:.0f} s"
    )


def plot(result: dict, path: Path) -> None:
    steps = [step["step"] for step in result["steps"]]
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True, height_ratios=[3, 2], layout="constrained")
    for (curve, difference), key in zip(axes.T, ("loss", "grad_norm"), strict=True):
        values = {name: [step[key][name] for step in result["steps"]] for name in result["steps"][0][key]}
        curve.plot(steps, values["plain"], color="tab:blue", linewidth=4, alpha=0.4, label="one process, no SP")
        curve.plot(steps, values["sharded"], color="tab:red", linewidth=1.2, label=f"ZeRO-3, SP={SP_SIZE}")
        curve.set_title(key)
        curve.legend()
        visible = [max(value, 1e-9) for value in values["relative_difference"]]  # a logarithmic axis has no 0
        difference.semilogy(steps, visible, ".-", color="tab:gray")
        difference.axhline(TOLERANCE, color="tab:red", linestyle="--", linewidth=1, label=f"allowed: {TOLERANCE:.0e}")
        difference.set_ylabel("relative difference")
        difference.set_xlabel("optimizer step")
        difference.legend()
    figure.suptitle(f"SFTTrainer on rows of {MIN_LENGTH} to {MAX_LENGTH} tokens: {result['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
