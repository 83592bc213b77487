"""Every YAML in configs/ trains: read by Accelerate's own launcher, changed only in device, precision and process count."""

import json
from pathlib import Path

import pytest
import yaml

from .trajectory import train

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def launch_environment(path: Path, folder: Path, **changes) -> dict:
    """What `accelerate launch --config_file path` puts into the environment of its processes."""
    import os

    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    config = yaml.safe_load(path.read_text())
    config.update(changes)
    changed = folder / path.name
    changed.write_text(yaml.safe_dump(config))
    args = launch_command_parser().parse_args(["--config_file", str(changed), "train.py"])
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config["deepspeed_config"])
        environment = prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = prepare_multi_gpu_env(args)
    return {k: v for k, v in environment.items() if os.environ.get(k) != v}


def small(path: Path) -> tuple[int, dict]:
    """The same layout on 2 or 4 CPU ranks: the number of ranks and what changes in the YAML."""
    config = yaml.safe_load(path.read_text())
    sizes = config["parallelism_config"]
    dp = {k: 2 for k in sizes if "_dp_" in k and sizes[k] > 1}
    if len(dp) == 2:
        # Four ranks hold two axes of two: replicas x sequence shards, over which FSDP2 shards as well.
        dp["parallelism_config_dp_shard_size"] = 1
    ranks = 4 if dp else 2
    # Not `use_cpu`: ACCELERATE_USE_CPU turns DeepSpeed and FSDP into plain DDP; TrainingArguments(use_cpu=True) does not.
    changes = dict(num_processes=ranks, mixed_precision="no")
    return ranks, {**changes, "parallelism_config": {**sizes, **dp, "parallelism_config_sp_size": 2}}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_trains(ranks, tmp_path, path):
    size, changes = small(path)
    environment = launch_environment(path, tmp_path, **changes)
    optimizer = "adamw" if "offload" in path.stem and "zero" in path.stem else "sgd"
    expected = ranks(1).run(train, steps=2, batch=size // 2, optimizer=optimizer)[0]
    run = dict(steps=2, dp=size // 2, environment=environment, optimizer=optimizer)
    # DeepSpeed compiles its optimizer for the CPU in the first run with offload.
    for result in ranks(size).run(train, timeout=400, **run):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        assert result["exchanges"] > 0
        engine = yaml.safe_load(path.read_text())["distributed_type"]
        assert result["engine"].endswith({"MULTI_GPU": "MULTI_CPU"}.get(engine, engine))


# How a DeepSpeed JSON may count rows, per device 1 and accumulation 2 on two ranks of one row: rows of the step are 2.
BATCH_SIZES = {"auto": "auto", "rows": 2, "times ranks": 4, "absent": None}


def communication_dtype(trainer):
    return str(trainer.accelerator.deepspeed_plugin.deepspeed_config.get("communication_data_type"))


@pytest.mark.parametrize("counting", BATCH_SIZES)
def test_deepspeed_config_file(ranks, tmp_path, counting):
    config = {
        "train_micro_batch_size_per_gpu": "auto" if counting == "auto" else 1,
        "gradient_accumulation_steps": "auto" if counting == "auto" else 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "seq_parallel_communication_data_type": "fp32",
    }
    if BATCH_SIZES[counting] is not None:
        config["train_batch_size"] = BATCH_SIZES[counting]
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    environment = launch_environment(
        Path(__file__).parents[2] / "configs" / "zero2.yaml",
        tmp_path,
        num_processes=2,
        deepspeed_config={"deepspeed_config_file": str(tmp_path / "ds_config.json")},
        parallelism_config={"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed"},
        mixed_precision=None,
    )
    expected = ranks(1).run(train, steps=2, accumulation=2)[0]
    for result in ranks(2).run(
        train, steps=2, accumulation=2, environment=environment, after=communication_dtype
    ):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        assert result["engine"].endswith("DEEPSPEED") and result["exchanges"] > 0
        assert result["after"] == "fp32"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_line_says_when_to_use_it(path):
    assert path.read_text().startswith("# ")


def test_there_are_configs():
    assert len(CONFIGS) >= 10
