"""Plans: published measurements, the longest rows, every engine's arithmetic, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig
from typer.testing import CliRunner

from hf_ulysses.planner.app import app
from hf_ulysses.planner.yaml_file import read
from hf_ulysses.memory import Settings
from hf_ulysses.planner.plan import Planner, Setup
from hf_ulysses.planner.states import ENGINES, Sizes, states_of
from hf_ulysses.planner.step import Step

SHAPES = Path(__file__).parents[1] / "shapes"
MAX = Settings(memory="max")
NODE_GIB = 1536  # 1.5 TiB


def planner(name):
    shape = json.loads((SHAPES / f"{name}.json").read_text())
    return Planner(CONFIG_MAPPING[shape.pop("model_type")](**shape))


@pytest.fixture(scope="module")
def qwen():
    return planner("qwen3-4b")


@pytest.fixture(scope="module")
def llama():
    return planner("llama-3.1-8b")


@pytest.mark.parametrize(("length", "published"), [(8192, 23.4), (98304, 66.0), (131072, None)])
def test_published(qwen, length, published):
    """Qwen3-4B, 4 x H100 80 GB, ZeRO-3, no offload, checkpointing, flash attention 2, full logits, sp 4."""
    plan = qwen.plan(Setup(4, Step(length, 4)))
    assert plan.fits == (published is not None)
    if published is not None:
        assert plan.peak_memory_gib == pytest.approx(published, rel=0.15)


MILLIONS = Setup(8, Step(5_000_000, 8, memory=MAX), offload_optimizer=True, host_memory_gib=NODE_GIB)


def test_five_million_tokens_of_an_8b_model_on_one_node(llama):
    plan = llama.plan(MILLIONS)
    assert plan.fits and plan.host_memory_gib < NODE_GIB
    # 32 inputs of 5M x 4096 in bfloat16: the checkpoints alone.
    assert plan.host_memory_gib > 32 * 5e6 * 4096 * 2 / 2**30


@pytest.mark.parametrize("switches", [dict(tiled_norms=False), dict(tiled_loss=False), dict(offload_checkpoints=False)], ids=str)
def test_five_million_tokens_need_that_switch(llama, switches):
    all_of_them = dict(tiled_loss=True, tiled_mlp=8, tiled_norms=8, offload_checkpoints=True, head_chunks=4)
    step = replace(MILLIONS.step, memory=Settings(**{**all_of_them, **switches}))
    assert not llama.plan(replace(MILLIONS, step=step)).fits


def test_one_chunk_takes_more(llama):
    """5 GiB, so that 5M tokens still fit; the longest row with one chunk is 0.9 of that with four, or less."""
    step = replace(MILLIONS.step, memory=Settings(True, 8, 8, True, 1))
    one, four = llama.plan(replace(MILLIONS, step=step)), llama.plan(MILLIONS)
    assert one.peak_memory_gib > four.peak_memory_gib + 4


def test_the_longest_row_is_solved_for(qwen):
    setup = Setup(4, Step(0, 4, memory=MAX), offload_optimizer=True, host_memory_gib=NODE_GIB)
    plan = qwen.longest(setup)
    assert plan.max_seq_length >= 1_500_000 and plan.fits
    longer = replace(setup, step=replace(setup.step, length=int(1.02 * plan.max_seq_length) // 4 * 4))
    assert not qwen.plan(longer).fits


def test_nothing_fits(qwen):
    plan = qwen.longest(Setup(4, Step(0, 4), gpu_memory_gib=10))
    assert plan.max_seq_length == 0 and not plan.fits


def test_recommendation_is_the_cheapest_that_fits(qwen):
    short, long = (qwen.recommend(Setup(4, Step(length)), tell=lambda _: None) for length in (2048, 262_144))
    assert short.fits and short.setup.step.memory == Settings() and not short.setup.offload_optimizer
    assert long.fits and long.setup.step.memory == MAX


SIZES = Sizes(total=1000, trained=1000, layer=100, layer_trained=100, outside=200, outside_trained=200)


def test_states_per_parameter():
    """16 bytes each over the GPUs, whatever shards them; what is replicated does not shrink."""

    def bytes_each(engine, gpus, **more):
        states = states_of(engine, SIZES, gpus, 2, **more)
        return (states.parameters + states.gradients + states.optimizer) / 1000, states.host / 1000

    assert bytes_each("zero3", 4) == (4, 0) and bytes_each("fsdp2", 4) == (4, 0)
    assert bytes_each("zero2", 4) == (2 + 0.5 + 3, 0) and bytes_each("zero1", 4) == (2 + 2 + 3, 0)
    assert bytes_each("zero0", 4) == (16, 0) and bytes_each("ddp", 4) == (8, 0)
    assert bytes_each("zero3", 4, offload_optimizer=True) == (0.5, 4.5)
    assert bytes_each("zero3", 4, offload_optimizer=True, offload_params=True) == (0, 5)
    assert bytes_each("fsdp2", 4, offload_params=True) == (0, 4)


TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, num_hidden_layers=5
)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("more", [{}, dict(lora_rank=4), dict(trainer="dpo"), dict(liger=True), dict(dtype="float32")], ids=str)
def test_every_engine_and_kind_of_training(engine, more):
    plan = Planner(TINY).plan(Setup(4, Step(256, 2, **more), engine=engine))
    assert plan.fits and all(size >= 0 for size in plan.breakdown.values())
    assert plan.peak_memory_gib == pytest.approx(sum(plan.breakdown.values()))


def test_what_saves_memory_saves_it():
    # TRL's tiles are 32,768 words wide, whatever the vocabulary.
    planner = Planner(LlamaConfig(**{**TINY.to_dict(), "vocab_size": 65536}))

    def peak(**more):
        return planner.plan(Setup(1, Step(8192, 1, **more))).breakdown

    plain, lora, sft, liger = peak(), peak(lora_rank=4), peak(trainer="sft"), peak(liger=True)
    assert lora["optimizer"] < plain["optimizer"]
    whole = plain["logits"] + plain["activations"]
    assert all(found["logits"] + found["activations"] < 0.5 * whole for found in (sft, liger))
    kept = Planner(TINY).plan(Setup(1, Step(4096, 1, checkpointing=False))).breakdown["activations"]
    assert kept > Planner(TINY).plan(Setup(1, Step(4096, 1))).breakdown["activations"]


# -- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    TINY.save_pretrained(tmp_path)
    return tmp_path


def hf_ulysses(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_json(tiny):
    done = hf_ulysses("plan", "--model", tiny, "--num-gpus", 4, "--sp-size", 4, "--seq-length", 1024, "--engine", "zero3", "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["fits"] is True
    keys = {"peak_memory_gib", "host_memory_gib", "max_seq_length", "all_to_all_gib_per_step", "flops_per_step_per_gpu"}
    assert keys <= set(document)
    parts = {"parameters", "gradients", "optimizer", "activations", "logits", "communication", "allowance"}
    assert parts == set(document["breakdown"])


def test_solving_draws_and_writes(tiny):
    arguments = ["--gpu-memory-gib", 4, "--png", tiny / "p.png", "--write", tiny / "c.yaml", "--memory", "max"]
    done = hf_ulysses("plan", "--model", tiny, "--num-gpus", 4, *arguments)
    assert done.exit_code == 0, done.output
    assert "longest row" in done.stdout and (tiny / "p.png").stat().st_size > 10_000
    block = read(tiny / "c.yaml")["parallelism_config"]
    assert block["parallelism_config_sp_size"] == 4 and block["parallelism_config_sp_memory"] == "max"


def test_does_not_fit_is_an_exit_code(tiny):
    done = hf_ulysses("plan", "--model", tiny, "--num-gpus", 1, "--gpu-memory-gib", 1, "--sp-size", 1, "--engine", "ddp", "--seq-length", 64)
    assert done.exit_code == 1 and "does not fit" in done.stdout


BAD = {
    "no model": (["--model", "/nowhere", "--num-gpus", "4"], "no model configuration"),
    "engine": (["--num-gpus", "4", "--engine", "zero9"], "zero9"),
    "sp": (["--num-gpus", "4", "--sp-size", "3", "--engine", "zero3", "--seq-length", "64"], "Choose it from [1, 2, 4]"),
    "more ranks than heads": (["--num-gpus", "8", "--sp-size", "8", "--engine", "zero3", "--seq-length", "64"], "exceeds num_attention_heads=4"),
    "loss": (["--num-gpus", "4", "--loss", "half"], "full, tiled"),
    "chunks": (["--num-gpus", "4", "--head-chunks", "some"], "head_chunks"),
    "offload": (["--num-gpus", "4", "--engine", "ddp", "--offload-optimizer"], "cannot offload"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tiny, name, monkeypatch, capsys):
    from hf_ulysses.planner.app import main

    arguments, message = BAD[name]
    arguments = arguments if "--model" in arguments else ["--model", str(tiny), *arguments]
    monkeypatch.setattr("sys.argv", ["hf-ulysses", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and message in errors[-1] and errors[-1].startswith("hf-ulysses:")
    assert not any("Traceback" in line for line in errors)


def test_config_writes_a_yaml(tmp_path):
    done = hf_ulysses("config", "--num-gpus", 8, "--sp-size", 4, "--engine", "fsdp2", "--write", tmp_path / "c.yaml", "--json")
    assert json.loads(done.stdout) == read(tmp_path / "c.yaml")
