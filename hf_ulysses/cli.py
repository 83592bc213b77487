"""python -m hf_ulysses [--sp-size N] [--sp-backend B] SCRIPT ARGS | -m MODULE ARGS: run a program with the plugin on."""

import argparse
import os
import runpy
import sys

_DESCRIPTION = """\
Run an unmodified training program with hf_ulysses on.

  accelerate launch --config_file configs/zero3.yaml -m hf_ulysses train.py ARGS
  accelerate launch --config_file configs/zero3.yaml -m hf_ulysses -m trl.scripts.sft ARGS
  torchrun --nproc-per-node 4 -m hf_ulysses --sp-size 4 --sp-backend torch train.py ARGS

What to do comes from the program's own ParallelismConfig, from the `parallelism_config:` block of the Accelerate YAML,
or from the two options below. Options of the program go after its name."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_ulysses", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sp-size", type=int, metavar="N", help="ranks that share a row (overrides the environment)")
    parser.add_argument(
        "--sp-backend", choices=["deepspeed", "torch"], help='"deepspeed" under DeepSpeed, "torch" under FSDP2 and DDP'
    )
    parser.add_argument("--memory", choices=["max"], help="switch on all that saves memory (docs/memory.md)")
    parser.add_argument(
        "--config_file", metavar="YAML", help="the Accelerate YAML again, for its memory switches, which accelerate does not export"
    )
    parser.add_argument("--check", action="store_true", help="first look at the YAML of --config_file (hf-ulysses check); end if it is wrong")
    # DeepSpeed's launcher says it here, too; LOCAL_RANK has it.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", metavar="PROGRAM", help="script or module to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the program's own arguments")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if options.sp_size is not None:
        _export(options.sp_size)
    if options.sp_backend is not None:
        os.environ["PARALLELISM_CONFIG_SP_BACKEND"] = options.sp_backend
    if options.memory is not None:
        os.environ["PARALLELISM_CONFIG_SP_MEMORY"] = options.memory
    # Long rows fragment the allocator; a user's own setting stays.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    if options.check:
        _check(options.config_file)
    from .door import enable

    if options.config_file is not None:
        from .adapters.config import export_yaml

        export_yaml(options.config_file)
    enable()
    run_program(options.module, options.program, *options.args)


def run_program(module: bool, program: str, *args: str) -> None:
    """As `python PROGRAM ARGS` or `python -m PROGRAM ARGS` would, in this process."""
    sys.argv = [program, *args]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(program)))
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _check(config_file) -> None:
    """What `hf-ulysses check` says, on the first rank; every rank ends if there is an error."""
    from rich.console import Console

    from .planner.app import checked, show_lines

    if config_file is None:
        sys.exit("python -m hf_ulysses: --check needs --config_file, the Accelerate YAML.")
    lines = checked(config_file)
    if os.environ.get("RANK", "0") == "0":
        show_lines(lines, Console(stderr=True))
    if any(line.level == "error" for line in lines):
        sys.exit(1)


def _export(sp_size: int) -> None:
    """Configure the environment as `accelerate launch` would: the ranks that are not for sp are data-parallel."""
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    os.environ["PARALLELISM_CONFIG_SP_SIZE"] = str(sp_size)
    dp = [f"PARALLELISM_CONFIG_DP_{name}_SIZE" for name in ("REPLICATE", "SHARD")]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if all(int(os.environ.get(name, "1")) == 1 for name in dp) and world_size % sp_size == 0:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(world_size // sp_size)
