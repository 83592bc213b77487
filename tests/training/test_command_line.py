"""`python -m hf_ulysses`: unmodified programs under the usual launchers, in processes of their own."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_machines import free_port
from .trajectory import VOCAB, tiny_llama, train
from .trl_trajectory import tokenizer

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
from tests.training.trajectory import train
import hf_ulysses

assert hf_ulysses.adapters.patches.TABLE.applied, "the plugin is not on"
assert sys.argv[2:] == ["--its-own", "argument"]
result = train(environment={{"FROM": "launcher"}}, steps=2)
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as out:
    json.dump({{"loss": result["loss"], "exchanges": result["exchanges"]}}, out)
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)  # gloo aborts at exit now and then
"""


def run(command, timeout=240, **environment):
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def torchrun(ranks, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port()), *command]


def test_help_says_what_to_do():
    done = run([sys.executable, "-m", "hf_ulysses", "--help"])
    assert done.returncode == 0
    for word in ("accelerate launch", "torchrun", "--sp-size", "--sp-backend", "-m hf_ulysses"):
        assert word in done.stdout


def test_script_under_torchrun(ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    options = ["--sp-size", "2", "--sp-backend", "torch", str(program), str(tmp_path), "--its-own", "argument"]
    done = run(torchrun(2, "-m", "hf_ulysses", *options))
    expected = ranks(1).run(train, steps=2)[0]
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        assert path.exists(), done.stdout[-3000:]
        result = json.loads(path.read_text())
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["exchanges"] > 0
    layout = [line for line in done.stdout.splitlines() if line.startswith("hf_ulysses: sequence parallelism on")]
    assert len(layout) == 1, done.stdout[-3000:]
    for part in ("dp_replicate 1 x dp_shard 1 x sp 2 = 2 ranks", "DDP", "attention sdpa", "multiple of 2"):
        assert part in layout[0]


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
mixed_precision: "no"
deepspeed_config:
  zero_stage: 3
parallelism_config:
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
"""


# Rows, and a script of TRL's with what it needs.
SCRIPTS = {
    "sft": (("text",), ["--packing", "--pad_to_multiple_of", "2", "--max_length", "64"]),
    "dpo": (("prompt", "chosen", "rejected"), []),
    "grpo": (("prompt",), ["--reward_funcs", "rewards.length", "--num_generations", "4", "--max_completion_length", "8"]),
}
REWARDS = "def length(completions, **kwargs):\n    return [len(text) % 7 for text in completions]\n"


@pytest.mark.parametrize("name", SCRIPTS if os.environ.get("HF_ULYSSES_TEST_ALL") else ["dpo"])
def test_trl_script_as_documented(tmp_path, name):
    """TRL's script on local data, as `-m trl.scripts.NAME`: as it is, and under the plugin with ZeRO-3."""
    columns, more = SCRIPTS[name]
    model, data = tmp_path / "model", tmp_path / "data"
    data.mkdir()
    tiny_llama().save_pretrained(model)
    tokenizer().save_pretrained(model)
    generator = random.Random(0)
    with open(data / "train.jsonl", "w") as out:
        for _ in range(24):
            words = [f" <{generator.randrange(2, VOCAB)}>" for _ in range(generator.randrange(5, 40))]
            out.write(json.dumps({column: "".join(words[at:]) for at, column in enumerate(columns)}) + "\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "rewards.py").write_text(REWARDS)
    script = ["-m", f"trl.scripts.{name}", "--model_name_or_path", str(model), "--dataset_name", str(data), *more]
    script += ["--max_steps", "3", "--use_cpu", "--bf16", "False"]
    script += ["--report_to", "none", "--output_dir", str(tmp_path / "out"), "--logging_steps", "1", "--dtype", "float32"]
    script += ["--per_device_train_batch_size", "4" if name == "grpo" else "1"]
    script += ["--save_strategy", "no", "--optim", "sgd", "--max_grad_norm", "1.0"]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", str(free_port())]
    path = f"{ROOT}:{tmp_path}"
    alone = run([sys.executable, *script], PYTHONPATH=path)
    sharded = run([*launch, "--config_file", str(tmp_path / "config.yaml"), "-m", "hf_ulysses", *script], PYTHONPATH=path)
    assert "DeepSpeed ZeRO-3" in sharded.stdout and "on the whole row" not in sharded.stdout, sharded.stdout[-3000:]
    losses = [
        [float(value) for value in re.findall(r"'loss': '?(-?[0-9.]+)", done.stdout)] for done in (alone, sharded)
    ]
    assert len(losses[0]) == 3, alone.stdout[-3000:]
    # Printed with four digits.
    assert losses[1] == pytest.approx(losses[0], abs=2e-3), sharded.stdout[-3000:]


DYING = """
import os, sys
sys.path.insert(0, {root!r})
from tests.training.trajectory import train

def die(trainer):
    step = trainer.training_step
    def training_step(*args, **kwargs):
        if os.environ["RANK"] == "1" and trainer.state.global_step == 1:
            os._exit(1)
        return step(*args, **kwargs)
    trainer.training_step = training_step

train(engine="ddp", sp=2, steps=4, before=die)
"""


def test_a_rank_that_dies_takes_the_others_down(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(DYING.format(root=str(ROOT)))
    start = time.monotonic()
    done = run(torchrun(2, str(program)))
    assert done.returncode != 0
    assert "exitcode" in done.stdout
    assert time.monotonic() - start < 200, "hung until the collectives' timeout"
