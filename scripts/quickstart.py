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
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from data import training_rows
from rich.console import Console
from tiny_llama import byte_tokenizer, tiny_llama
from transformers.utils import logging

from hf_ulysses.planner.compare import Wording, compare, show
from hf_ulysses.planner.pictures import two_trainings
from hf_ulysses.planner.runs import Run, progress_bar, train

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "outputs" / "quickstart"

SP_SIZE = 2
ROWS_PER_STEP = 2
MAX_LENGTH = 5120
MIN_LENGTH = 4096
TOLERANCE = 1e-4
REQUIRED_FALL = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps of each run (default: 32)")
    steps = parser.parse_args().steps

    console = Console()
    started = time.monotonic()
    device, plain, sharded = prepare(steps)
    console.print(f"[bold]SFTTrainer, ZeRO-3, rows of {MIN_LENGTH} to {MAX_LENGTH} tokens, {device}[/bold]")
    with progress_bar() as progress:
        for run in (plain, sharded):
            if not train(run, steps, progress):
                progress.stop()
                print("\n".join(run.output()[-40:]), file=sys.stderr)
                sys.exit(f"\n{run.name}: ended after {len(run.log())} of {steps} steps. All of its output: {run.directory}/output.txt")

    result = compare(plain.log(), sharded.log(), TOLERANCE, REQUIRED_FALL)
    result["device"], result["layout"] = device, layout(sharded)
    result["seconds"] = round(time.monotonic() - started, 1)
    result["versions"] = {name: version(name) for name in ("torch", "accelerate", "transformers", "trl", "deepspeed")}
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    title = f"SFTTrainer on rows of {MIN_LENGTH} to {MAX_LENGTH} tokens: {device}"
    wording = Wording("one process, no SP", f"ZeRO-3, SP={SP_SIZE}", TOLERANCE, title)
    show(result, wording, console)
    console.print(result["layout"])
    two_trainings(result, wording, OUTPUT / "curves.png")
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
        Run("one process, no SP", [sys.executable, *script(plain)], plain, plain_environment),
        Run(f"ZeRO-3, SP={SP_SIZE}", [sys.executable, *launch.split(), *script(sharded)], sharded, sharded_environment),
    )


def layout(run: Run) -> str:
    """The line that hf_ulysses prints at the start; without it the run was no run with sequence parallelism."""
    lines = run.output()
    found = [line for line in lines if line.startswith("hf_ulysses:") and f"sp {SP_SIZE}" in line]
    if not found:
        sys.exit(f"{run.name}: hf_ulysses did not report sp {SP_SIZE} in {run.directory / 'output.txt'}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
