"""Several machines: `accelerate launch --num_machines 2` on loopback, 2 ranks each. Groups stay inside a machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .trajectory import train

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
import torch
from tests.training.trajectory import train

def group(trainer):
    members = torch.distributed.get_process_group_ranks(trainer.accelerator.torch_device_mesh["sp"].get_group())
    return members

result = train(environment={{"FROM": "launcher"}}, steps=3, dp=2, after=group)
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as out:
    json.dump({{"loss": result["loss"], "group": result["after"], "exchanges": result["exchanges"]}}, out)
os._exit(0)  # gloo aborts at exit now and then
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_machines(ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    config = yaml.safe_load((ROOT / "configs" / "ddp.yaml").read_text())
    config.update(num_machines=2, num_processes=4, mixed_precision="no", use_cpu=True)
    config["parallelism_config"] = {
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_sp_size": 2,
        "parallelism_config_sp_backend": "torch",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(tmp_path / "config.yaml")]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    machines = [
        subprocess.Popen(
            [*launch, "--machine_rank", str(machine), str(program), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in range(2)
    ]
    output = "\n".join(machine.communicate(timeout=240)[0][-3000:] for machine in machines)
    found = [tmp_path / f"{rank}.json" for rank in range(4)]
    assert all(path.exists() for path in found), output
    expected = ranks(1).run(train, steps=3, batch=2)[0]
    for rank, path in enumerate(found):
        result = json.loads(path.read_text())
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert result["group"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["exchanges"] > 0


def spanning(local_world_size):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    return train(engine="ddp", sp=4, steps=1)["loss"]


def test_groups_across_machines_are_warned_of(ranks):
    from ..ranks import RankFailed

    with pytest.raises(RankFailed, match=r"sp_size=4 does not divide the 2 processes of a machine"):
        ranks(4).run(as_error, 2)


def as_error(local_world_size):
    import warnings

    warnings.filterwarnings("error", message="sp_size=")
    return spanning(local_world_size)
