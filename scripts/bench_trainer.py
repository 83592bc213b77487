"""A whole Trainer step with sequence parallelism: hf_ulysses beside what accelerate, transformers and DeepSpeed carry.

    python scripts/bench_trainer.py [--launches 4] [--steps 8] [--json]

Two CPU processes (gloo, fp32) train a tiny Llama of 8 layers on rows of 4096 tokens under ZeRO-3, sp 2. Launches alternate
between the two; the first two steps of each (allocations, the start-up check) are left out; the median is over the
remaining steps of all launches, a step's time that of rank 0, from one `on_step_begin` to the next. Where other programs
load the machine, rank 0's CPU time beside it is the steadier measure.

Both run the same script, model, rows, arguments and `ParallelismConfig`; only `hf_ulysses.enable()` is called in one of
them. Rows have position_ids and every token is a target, because upstream needs the one and is not exact without the
other: so both train on the same loss, and the script fails when they do not.

Results: outputs/trainer/result.json. Not covered: GPUs.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "outputs" / "trainer"
OURS, THEIRS = "hf_ulysses", "upstream"
SP, LENGTH, LAYERS, SKIPPED = 2, 4096, 8, 2


def train(who, steps):
    import deepspeed
    import torch
    import transformers
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import hf_ulysses

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)  # Upstream on CPU expects it.
    transformers.logging.set_verbosity_error()
    if who == OURS:
        hf_ulysses.enable()
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        max_steps=steps,
        optim="adamw_torch",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=SP, sp_handler=handler),
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3},
        },
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 128, (4 * steps, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(LENGTH)} for row in tokens]
    begun = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            begun.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *args, **kwargs):
            ended[:] = [(time.perf_counter(), time.process_time())]

    ended = []
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    steps = list(zip(begun, begun[1:] + ended))[SKIPPED:]
    wall, cpu = ([(after[i] - before[i]) * 1000 for before, after in steps] for i in (0, 1))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"wall": wall, "cpu": cpu, "loss": losses}


def launch(who, steps):
    """Run `train` on SP processes; rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result, ranks = Path(folder) / "result.json", []
        for rank in range(SP):
            environment = {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **os.environ,
                **dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(SP), LOCAL_WORLD_SIZE=str(SP)),
                **dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu"),
            }
            command = [sys.executable, __file__, "--rank-of", who, "--steps", str(steps), "--result", str(result)]
            output = open(Path(folder) / f"{rank}.log", "w")
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        try:
            # gloo aborts at process exit now and then: the result decides.
            while not result.exists() and all(rank.poll() is None for rank in ranks):
                time.sleep(0.1)
            for rank in ranks:
                rank.wait(30)
        finally:
            for rank in ranks:
                rank.kill()
        if not result.exists():
            logs = "\n".join((Path(folder) / f"{rank}.log").read_text()[-3000:] for rank in range(SP))
            raise SystemExit(f"{who} did not finish:\n{logs}")
        return json.loads(result.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4, help="launches of each (default: 4)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each launch (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        result = train(arguments.rank_of, arguments.steps)
        if os.environ["RANK"] == "0":
            partial = Path(arguments.result).with_suffix(".partial")
            partial.write_text(json.dumps(result))
            partial.rename(arguments.result)
        sys.stdout.flush()
        os._exit(0)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    times, cpu, losses = {OURS: [], THEIRS: []}, {OURS: [], THEIRS: []}, {}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=2 * arguments.launches)
        for number in range(arguments.launches):
            for who in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
                progress.update(task, description=who)
                result = launch(who, arguments.steps)
                times[who] += result["wall"]
                cpu[who] += result["cpu"]
                losses[who] = result["loss"]
                progress.advance(task)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses[OURS], losses[THEIRS], strict=True))
    medians = {who: statistics.median(values) for who, values in times.items()}
    cpu_medians = {who: statistics.median(values) for who, values in cpu.items()}
    ratio, cpu_ratio = medians[OURS] / medians[THEIRS], cpu_medians[OURS] / cpu_medians[THEIRS]
    packages = {name: version(name) for name in ("torch", "accelerate", "transformers", "deepspeed")}
    document = {
        "environment": {**packages, "python": platform.python_version(), "cpu_cores": os.cpu_count()},
        "workload": f"Llama, {LAYERS} layers, {LENGTH} tokens, sp {SP}, ZeRO-3, fp32, gloo",
        "median_ms": {who: round(value, 1) for who, value in medians.items()},
        "median_cpu_ms": {who: round(value, 1) for who, value in cpu_medians.items()},
        "ratio": round(ratio, 3),
        "cpu_ratio": round(cpu_ratio, 3),
        "not_slower": ratio <= 1,
        "largest_relative_difference_of_losses": worst,
        "milliseconds": {who: [round(value, 1) for value in values] for who, values in times.items()},
        "cpu_milliseconds": {who: [round(value, 1) for value in values] for who, values in cpu.items()},
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "result.json").write_text(json.dumps(document, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        table = Table(title=f"One Trainer step: {document['workload']}")
        for name in ("", "median ms", "quarter to three quarters", "median CPU ms", "steps"):
            table.add_column(name)
        for who, values in times.items():
            low, _, high = statistics.quantiles(values, n=4)
            table.add_row(
                who, f"{medians[who]:.0f}", f"{low:.0f} to {high:.0f}", f"{cpu_medians[who]:.0f}", str(len(values))
            )
        Console().print(table)
        print(
            f"hf_ulysses / upstream: {ratio:.3f}, CPU time {cpu_ratio:.3f}. Losses differ by at most {worst:.1e} relative."
        )
    if worst > 1e-5:
        raise SystemExit("The two did not train on the same loss.")


if __name__ == "__main__":
    main()
