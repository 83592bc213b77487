"""The command `hf-ulysses`: plan, check, verify, bench, config. Programs are launched by `python -m hf_ulysses` (cli.py)."""

import json
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

# Before torch and DeepSpeed are imported: a plan needs no GPU, and nobody wants their messages in front of a table.
os.environ.setdefault("DS_LOG_LEVEL", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import typer
from rich.console import Console
from rich.table import Table

from ..memory import Settings
from . import yaml_file

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", help="Know before you launch: what fits, what is wrong with a configuration, whether training is exact, how fast it is.")
_PROGRAM = {"allow_extra_args": True, "ignore_unknown_options": True}
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Output = Annotated[Path, typer.Option(help="Folder for results.")]


def main() -> None:
    """The console script: one line for what a user can mend, a traceback for what is our fault."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        missing = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"hf-ulysses: {' '.join(str(error).split())}{missing}", file=sys.stderr)
        sys.exit(2)


def _print_json(document):
    print(json.dumps(document, indent=1, default=str))


def _one_of(option, value, allowed):
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(allowed)}, not {value!r}.")


def _config(model):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no model configuration there: {str(error).splitlines()[0]}") from None


# -- plan -----------------------------------------------------------------------------------------------------------------


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="A folder with config.json, or an id of the hub. No weights are read.")],
    num_gpus: Annotated[int, typer.Option(help="GPUs of all nodes.")],
    gpu_memory_gib: Annotated[float, typer.Option(help="Memory of one GPU.")] = 80.0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node; host memory is per node.")] = 8,
    host_memory_gib: Annotated[float | None, typer.Option(help="CPU memory of a node; without it any amount fits.")] = None,
    sp_size: Annotated[int | None, typer.Option(help="GPUs that share a row; without it one is recommended.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a row; without it the longest is solved for.")] = None,
    engine: Annotated[str | None, typer.Option(help="ddp, zero0 to zero3 or fsdp2; without it one is recommended.")] = None,
    offload_optimizer: Annotated[bool, typer.Option(help="Optimizer states in CPU memory.")] = False,
    offload_params: Annotated[bool, typer.Option(help="Weights in CPU memory, too (zero3, fsdp2).")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute layers in backward.")] = True,
    attn: Annotated[str, typer.Option(help="Attention implementation; fused kernels need no square of the row.")] = "flash_attention_2",
    loss: Annotated[str, typer.Option(help="full: whole logits, as the Trainer; tiled: the tiled_loss switch.")] = "full",
    trainer: Annotated[str, typer.Option(help="trainer, sft (TRL: never whole logits) or dpo (two rows, a reference model).")] = "trainer",
    tiled_mlp: Annotated[bool | None, typer.Option(help="The tiled_mlp switch.")] = None,
    tiled_norms: Annotated[bool | None, typer.Option(help="The tiled_norms switch.")] = None,
    offload_checkpoints: Annotated[bool | None, typer.Option(help="The offload_checkpoints switch.")] = None,
    head_chunks: Annotated[str | None, typer.Option(help="The head_chunks switch: a number, or auto.")] = None,
    memory: Annotated[str | None, typer.Option(help="max: all switches, but for those that are said to be off.")] = None,
    micro_batch: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32: what weights are loaded in.")] = "bfloat16",
    lora_rank: Annotated[int, typer.Option(help="Train LoRA of this rank on all linear layers; 0 trains all weights.")] = 0,
    liger: Annotated[bool, typer.Option(help="With Liger's norms and loss.")] = False,
    images: Annotated[int, typer.Option(help="Images of every row, for a vision-language model.")] = 0,
    image_tokens: Annotated[int, typer.Option(help="Tokens of the row that each image becomes.")] = 256,
    write: Annotated[Path | None, typer.Option(help="Write the layout as an Accelerate YAML.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw memory by component over the row's length.")] = None,
    as_json: Json = False,
) -> None:
    """What fits: peak memory of a real training step, without GPUs and without weights.

    One step of the real model runs on tensors that have sizes and no contents. Exit code 1: it does not fit.
    """
    from .plan import Planner, Setup
    from .step import Step

    for option, value, allowed in (("--loss", loss, ("full", "tiled")), ("--trainer", trainer, ("trainer", "sft", "dpo")), ("--dtype", dtype, ("bfloat16", "float16", "float32"))):
        _one_of(option, value, allowed)
    for option, value, least in (("--micro-batch", micro_batch, 1), ("--seq-length", seq_length, 1), ("--images", images, 0), ("--lora-rank", lora_rank, 0)):
        if value is not None and value < least:
            raise ValueError(f"{option} must be at least {least}, not {value}.")
    if (offload_checkpoints or memory) and not gradient_checkpointing:
        raise ValueError("--offload-checkpoints needs --gradient-checkpointing: without it there are no checkpoints.")
    chunks = int(head_chunks) if head_chunks is not None and head_chunks.isdecimal() else head_chunks
    switches = Settings(loss == "tiled" or None, tiled_mlp, tiled_norms, offload_checkpoints, chunks, memory)
    step = Step(seq_length or 0, sp_size or 1, micro_batch, dtype, False, gradient_checkpointing, attn, switches, trainer, lora_rank, liger, images, image_tokens)
    setup = Setup(num_gpus, step, gpu_memory_gib, engine or "zero3", offload_optimizer, offload_params, gpus_per_node, host_memory_gib)
    if png is not None:
        from .pictures import memory_over_length
    planner = Planner(_config(model))
    with _planning() as progress:
        if seq_length is None:
            size = sp_size or max(n for n in planner.sp_sizes(num_gpus) if gpus_per_node % n == 0 or n == num_gpus)
            found = planner.longest(setup.with_step(sp_size=size), progress)
        elif sp_size is None or engine is None:
            found = planner.recommend(setup, sp_size, engine, progress)
        else:
            found = planner.plan(setup)
        if png is not None:
            memory_over_length(planner, found.setup, png, progress)
    if write is not None:
        precision = "no" if dtype == "float32" and found.setup.engine.startswith("zero") else "bf16"
        why = f"Planned by hf-ulysses for {model}, rows of {found.setup.step.length:,} tokens: {found.peak_memory_gib:.1f} GiB per GPU."
        yaml_file.write(yaml_file.document_of(found.setup, precision), write, why)
    _print_json({"model": model, **found.document()}) if as_json else _show_plan(model, found)
    raise typer.Exit(0 if found.fits else 1)


@contextmanager
def _planning():
    """`progress(length)` after each plan: a bar on stderr that says which length was measured. Without the libraries' warnings."""
    from .runs import progress_bar

    with progress_bar() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = bar.add_task("planning", total=None, note="")
        yield lambda length: bar.update(task, advance=1, note=f"{length:,} tokens")


def _show_plan(model, found):
    console, setup, step = Console(), found.setup, found.setup.step
    offload = "".join(f", {name} in CPU memory" for name, on in (("optimizer", setup.offload_optimizer), ("weights", setup.offload_params)) if on)
    console.print(f"{model}: {setup.num_gpus} GPUs, sp {step.sp_size}, {setup.engine}{offload}, rows of {step.length:,} tokens{step.memory}")
    table = Table("per GPU", "GiB")
    for name, size in found.breakdown.items():
        table.add_row(name, f"{size:7.2f}")
    console.print(table)
    verdict = "[bold green]fits[/bold green]" if found.fits else "[bold red]does not fit[/bold red]"
    host = "" if setup.host_memory_gib is None else f" of {setup.host_memory_gib:g}"
    console.print(f"{verdict}: {found.peak_memory_gib:.1f} of {setup.gpu_memory_gib:g} GiB; CPU memory {found.host_memory_gib:,.0f}{host} GiB per node")
    if found.max_seq_length is not None:
        console.print(f"longest row: [bold]{found.max_seq_length:,}[/bold] tokens")
    console.print(f"{found.all_to_all_gib_per_step:.1f} GiB sent in all-to-alls and {found.flops_per_step_per_gpu:.3g} FLOPs per step and GPU")
    for note in found.notes:
        console.print(f"[yellow]{note}[/yellow]")


# -- check ----------------------------------------------------------------------------------------------------------------


@app.command("check")
def check_command(
    config_file: Annotated[Path, typer.Argument(help="The Accelerate YAML.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id: its heads and its longest row are looked at.")] = None,
    attn: Annotated[str | None, typer.Option(help="The attention implementation that the program sets.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    as_json: Json = False,
) -> None:
    """The machine and a configuration before launch: each line ok, warning or error with the mend. Exit code 1: an error."""
    lines = checked(config_file, model, attn, seq_length)
    if as_json:
        _print_json([vars(line) for line in lines])
    else:
        show_lines(lines, Console())
    raise typer.Exit(1 if any(line.level == "error" for line in lines) else 0)


def checked(config_file, model=None, attn=None, seq_length=None):
    """The lines of `check`, also for `python -m hf_ulysses --check`."""
    from .check import Case, check, this_machine

    config = None if model is None else _config(model)
    return check(Case(yaml_file.read(config_file), this_machine(), config, attn, seq_length, Path(config_file).parent))


def show_lines(lines, console):
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for line in lines:
        style = styles[line.level]
        console.print(f"[{style}]{line.level:<8}[/{style}]", end="")
        console.print(line.what + (f" -> {line.mend}" if line.mend else ""), markup=False, highlight=False)


# -- verify, bench --------------------------------------------------------------------------------------------------------


@app.command("verify", context_settings=_PROGRAM)
def verify_command(
    context: typer.Context,
    config_file: Annotated[Path, typer.Option("--config_file", "--config-file", help="The Accelerate YAML with sp_size.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 20,
    tolerance: Annotated[float | None, typer.Option(help="Largest relative difference (default: 1e-4 in float32, 1e-2 in bf16).")] = None,
    output: Output = Path("outputs/verify"),
    as_json: Json = False,
) -> None:
    """Is it exact? Your own program data-parallel and sequence-parallel, the same rows per step, compared step by step.

    hf-ulysses verify --config_file zero3.yaml -- train.py ARGS: a program whose options are TrainingArguments, as trl.scripts.sft
    (-m trl.scripts.sft ARGS). Exit code 1: the runs differ.
    """
    from .compare import show
    from .runs import progress_bar
    from .verify import prepare, verify

    runs, wording = prepare(config_file, _program(context), steps, output.absolute())
    wording = replace(wording, tolerance=tolerance or wording.tolerance)
    with progress_bar() as progress:
        result = verify(runs, wording, steps, output.absolute(), progress)
    _print_json(result) if as_json else show(result, wording, Console())
    print(f"Written: {output}/verify.json and verify.png", file=sys.stderr)
    raise typer.Exit(0 if result["passed"] else 1)


@app.command("bench", context_settings=_PROGRAM)
def bench_command(
    context: typer.Context,
    config_file: Annotated[Path | None, typer.Option("--config_file", "--config-file", help="The Accelerate YAML; sp_size is varied.")] = None,
    lengths: Annotated[str, typer.Option(help="Row lengths.")] = "8192,16384,32768",
    sp_sizes: Annotated[str, typer.Option(help="sp sizes; 1 is the baseline.")] = "1,2,4",
    steps: Annotated[int, typer.Option(help="Steps of each case; the first two do not count.")] = 6,
    length_option: Annotated[str, typer.Option(help="The program's option for the row's length.")] = "--max_length",
    attention: Annotated[bool, typer.Option("--attention", help="One attention layer beside DeepSpeed's hook instead (CPU; in a checkout).")] = False,
    output: Output = Path("outputs/bench"),
    as_json: Json = False,
) -> None:
    """How fast, and how much memory? Tokens per second and peak memory over row lengths and sp sizes. Resumes where it stopped.

    hf-ulysses bench --config_file zero3.yaml --lengths 8192,32768 -- train.py ARGS
    """
    if attention:
        script = Path(__file__).parents[2] / "scripts" / "bench_exchange.py"
        if not script.exists():
            raise ValueError(f"bench --attention runs {script.name} of a checkout of hf_ulysses, and this is an installed one.")
        os.execv(sys.executable, [sys.executable, str(script), *(["--json"] if as_json else []), *context.args])
    from .bench import against_baseline, bench
    from .runs import progress_bar

    if config_file is None:
        raise ValueError("bench needs --config_file, or --attention.")
    numbers = [_numbers(option, text) for option, text in (("--sp-sizes", sp_sizes), ("--lengths", lengths))]
    with progress_bar() as progress:
        rows = bench(config_file, _program(context), *numbers, steps, length_option, output.absolute(), progress)
    if as_json:
        _print_json(rows)
        return
    table = Table("tokens", "sp", "tokens/s", "beside sp 1", "peak GiB", title="Throughput and peak memory")
    for row in rows:
        ratio = against_baseline(rows, row)
        numbers = [f"{row['tokens_per_second']:,.0f}", f"{ratio:.2f}x" if ratio else "", f"{row['peak_gib']:.2f}"] if row["status"] == "ok" else [row["status"], "", ""]
        table.add_row(f"{row['length']:,}", str(row["sp_size"]), *numbers)
    Console().print(table)
    print(f"Written: {output}/bench.json and bench.png", file=sys.stderr)


def _program(context):
    if not context.args:
        raise ValueError(f"{context.info_name} needs the program to run: hf-ulysses {context.info_name} OPTIONS -- train.py ARGS")
    return list(context.args)


def _numbers(option, text):
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"{option} must be numbers with commas between them, not {text!r}.")
    return [int(part) for part in text.split(",")]


# -- config ---------------------------------------------------------------------------------------------------------------


@app.command("config")
def config_command(
    write: Annotated[Path, typer.Option(help="Where to.")] = Path("hf_ulysses.yaml"),
    num_gpus: Annotated[int | None, typer.Option(help="GPUs of all nodes.")] = None,
    sp_size: Annotated[int | None, typer.Option(help="GPUs that share a row.")] = None,
    engine: Annotated[str | None, typer.Option(help="ddp, zero0 to zero3 or fsdp2.")] = None,
    offload_optimizer: Annotated[bool | None, typer.Option(help="Optimizer states in CPU memory.")] = None,
    mixed_precision: Annotated[str, typer.Option(help="bf16, fp16 or no.")] = "bf16",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    memory: Annotated[str | None, typer.Option(help="max: all memory switches.")] = None,
    as_json: Json = False,
) -> None:
    """Write an Accelerate YAML with sequence parallelism; asks for what no option says."""
    given = bool(num_gpus and sp_size and engine)
    num_gpus = num_gpus or typer.prompt("How many GPUs, over all nodes?", type=int, err=as_json)
    sp_size = sp_size or typer.prompt("How many of them share a row (sp_size)?", type=int, default=min(num_gpus, gpus_per_node), err=as_json)
    engine = engine or typer.prompt("Which engine (ddp, zero0 to zero3, fsdp2)?", default="zero3", err=as_json)
    if offload_optimizer is None:
        offload_optimizer = not given and engine not in ("ddp", "zero0") and typer.confirm("Optimizer states in CPU memory?", default=False, err=as_json)
    from .plan import Setup
    from .step import Step

    _one_of("--mixed-precision", mixed_precision, ("bf16", "fp16", "no"))
    setup = Setup(num_gpus, Step(0, sp_size, memory=Settings(memory=memory)), engine=engine, offload_optimizer=offload_optimizer, gpus_per_node=gpus_per_node)
    document = yaml_file.document_of(setup, mixed_precision)
    yaml_file.write(document, write, f"hf-ulysses config: {engine}, {num_gpus} GPUs, one row over {sp_size}.")
    _print_json(document) if as_json else Console().print(f"Written: {write}. Next: accelerate launch --config_file {write} -m hf_ulysses train.py", markup=False)


if __name__ == "__main__":
    main()
