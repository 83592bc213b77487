"""Plans: published measurements, the longest rows, every engine's arithmetic, and the command."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig
from typer.testing import CliRunner

from hf_ulysses.memory import Settings
from hf_ulysses.planner.app import app, main
from hf_ulysses.planner.plan import Planner, Setup
from hf_ulysses.planner.states import ENGINES, Sizes, states_of
from hf_ulysses.planner.step import Step
from hf_ulysses.planner.yaml_file import read

from ..image_batches import image_config

SHAPES = Path(__file__).parents[1] / "shapes"
MAX = Settings(memory="max")
NODE_GIB = 1536  # 1.5 TiB
slow = pytest.mark.skipif(os.environ.get("HF_ULYSSES_TEST_ALL") != "1", reason="HF_ULYSSES_TEST_ALL=1 plans more large models")


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
ON = dict(tiled_loss=True, tiled_mlp=8, tiled_norms=8, offload_checkpoints=True, head_chunks=4)


def test_five_million_tokens_of_an_8b_model_on_one_node(llama):
    plan = llama.plan(MILLIONS)
    assert plan.fits and plan.host_memory_gib < NODE_GIB
    # 32 inputs of 5M x 4096 in bfloat16: the checkpoints alone.
    assert plan.host_memory_gib > 32 * 5e6 * 4096 * 2 / 2**30
    assert not llama.plan(MILLIONS.with_step(memory=Settings(**{**ON, "tiled_norms": False}))).fits


@slow
@pytest.mark.parametrize("switches", [dict(tiled_loss=False), dict(offload_checkpoints=False)], ids=str)
def test_five_million_tokens_need_that_switch(llama, switches):
    assert not llama.plan(MILLIONS.with_step(memory=Settings(**{**ON, **switches}))).fits


@slow
def test_one_chunk_takes_more(llama):
    one = llama.plan(MILLIONS.with_step(memory=Settings(**{**ON, "head_chunks": 1})))
    assert one.peak_memory_gib > llama.plan(MILLIONS).peak_memory_gib + 4


@slow
def test_the_longest_row_of_a_4b_model(qwen):
    plan = qwen.longest(Setup(4, Step(0, 4, memory=MAX), offload_optimizer=True, host_memory_gib=NODE_GIB))
    assert plan.max_seq_length >= 1_500_000 and plan.fits


# One layer, so that none has to be extrapolated.
TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, num_hidden_layers=1
)


@pytest.fixture(scope="module")
def small():
    return Planner(TINY)


def test_nothing_fits(small):
    nothing = small.longest(Setup(4, Step(0, 4), gpu_memory_gib=1))
    assert nothing.max_seq_length == 0 and not nothing.fits


def test_recommendation_is_the_cheapest_that_fits(small):
    short = small.recommend(Setup(4, Step(2048)))
    assert short.fits and (short.setup.engine, short.setup.step.sp_size, short.setup.step.memory) == ("zero2", 1, Settings())
    setup = Setup(4, Step(65536, 4))
    without, best = (small.plan(setup.with_step(memory=memory)).peak_memory_gib for memory in (Settings(), MAX))
    long = small.recommend(replace(setup, gpu_memory_gib=(without + best) / 2), sp_size=4, engine="zero3")
    assert long.fits and long.setup.step.memory == MAX and not long.setup.offload_optimizer


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
    # A second model that is only asked has no gradients and no optimizer.
    assert bytes_each("zero3", 4, reference=True) == (4.5, 0) and bytes_each("ddp", 4, reference=True) == (10, 0)


@pytest.mark.parametrize("more", [{}, dict(lora_rank=4), dict(trainer="dpo"), dict(liger=True), dict(dtype="float32")], ids=str)
def test_every_engine_and_kind_of_training(small, more):
    for engine in ENGINES:
        plan = small.plan(Setup(4, Step(256, 2, **more), engine=engine))
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


def test_preferences_are_two_rows_and_a_reference(small):
    """Of TRL's fused head, as SFT's; the reference keeps nothing for a backward."""
    sft, two, dpo = (small.plan(Setup(2, Step(4096, 2, **more))) for more in (dict(trainer="sft"), dict(trainer="sft", batch=2), dict(trainer="dpo")))
    assert dpo.breakdown["activations"] > 1.5 * sft.breakdown["activations"]
    assert dpo.breakdown["activations"] == pytest.approx(two.breakdown["activations"], rel=0.05)
    assert dpo.breakdown["parameters"] == 2 * sft.breakdown["parameters"]
    # Forward without backward: a third or less of what training's two rows take.
    assert 1.1 < dpo.flops_per_step_per_gpu / two.flops_per_step_per_gpu < 1.4


@pytest.mark.parametrize(("family", "tokens"), [("qwen3_vl", 64), ("gemma3", 4)])
def test_images(family, tokens):
    """tests/distributed/test_plan.py has a real run beside a plan."""
    planner = Planner(image_config(family))
    setup = Setup(2, Step(512, 2, image_tokens=tokens))
    none, some = (planner.plan(setup.with_step(images=images)).breakdown["activations"] for images in (0, 4))
    assert some > none
    with pytest.raises(ValueError, match=f"512 images of {tokens} tokens do not fit into a row of 512"):
        planner.plan(setup.with_step(images=512))


# -- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    TINY.save_pretrained(tmp_path)
    return tmp_path


def hf_ulysses(*arguments, **more):
    return CliRunner().invoke(app, list(map(str, arguments)), **more)


def test_json(tiny):
    done = hf_ulysses("plan", "--model", tiny, "--num-gpus", 4, "--sp-size", 4, "--seq-length", 1024, "--engine", "zero3", "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["fits"] is True
    keys = {"peak_memory_gib", "host_memory_gib", "max_seq_length", "all_to_all_gib_per_step", "flops_per_step_per_gpu"}
    assert keys <= set(document)
    parts = {"parameters", "gradients", "optimizer", "activations", "logits", "communication", "allowance"}
    assert parts == set(document["breakdown"])


def test_solving_draws_and_writes(tiny, small):
    arguments = ["--gpu-memory-gib", 2.1, "--png", tiny / "p.png", "--write", tiny / "c.yaml", "--tiled-mlp"]
    done = hf_ulysses("plan", "--model", tiny, "--num-gpus", 4, *arguments)
    assert done.exit_code == 0, done.output
    longest = int(re.search(r"longest row: ([\d,]+) tokens", done.stdout)[1].replace(",", ""))
    setup = Setup(4, Step(0, 4, memory=Settings(tiled_mlp=True)), gpu_memory_gib=2.1)
    fits = [small.plan(setup.with_step(length=int(part * longest) // 256 * 256)).fits for part in (1, 1.02)]
    assert fits == [True, False] and (tiny / "p.png").stat().st_size > 10_000
    block = read(tiny / "c.yaml")["parallelism_config"]
    assert block["parallelism_config_sp_size"] == 4 and block["parallelism_config_sp_tiled_mlp"] is True


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
    "no rows": (["--num-gpus", "4", "--micro-batch", "0"], "--micro-batch must be at least 1"),
    "no tower": (["--num-gpus", "4", "--sp-size", "2", "--engine", "zero3", "--seq-length", "64", "--images", "1"], "LlamaForCausalLM"),
}  # fmt: skip


def said_of_bad_input(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["hf-ulysses", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and errors[-1].startswith("hf-ulysses:")
    assert not any("Traceback" in line for line in errors)
    return errors[-1]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tiny, name, monkeypatch, capsys):
    arguments, message = BAD[name]
    model = [] if "--model" in arguments else ["--model", tiny]
    assert message in said_of_bad_input(monkeypatch, capsys, "plan", *model, *arguments)


def test_bad_files_and_programs_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("a: [")
    for arguments, message in [
        (["check", tmp_path / "none.yaml"], "No such file"),
        (["check", tmp_path / "c.yaml"], "is not YAML"),
        (["verify", "--config_file", tmp_path / "c.yaml"], "needs the program to run"),
        (["bench"], "needs --config_file"),
        (["bench", "--config_file", "c.yaml", "--lengths", "many"], "--lengths must be numbers"),
        (["config", "--num-gpus", 4, "--sp-size", 3, "--engine", "ddp", "--write", tmp_path / "x"], "Choose it from [1, 2, 4]"),
    ]:
        assert message in said_of_bad_input(monkeypatch, capsys, *arguments)


def test_config_writes_a_yaml(tmp_path):
    done = hf_ulysses("config", "--num-gpus", 8, "--sp-size", 4, "--engine", "fsdp2", "--write", tmp_path / "c.yaml", "--json")
    assert json.loads(done.stdout) == read(tmp_path / "c.yaml")


def test_config_asks(tmp_path):
    """An empty answer takes the default; check has no error for the result."""
    done = hf_ulysses("config", "--write", tmp_path / "c.yaml", input="8\n4\n\ny\n")
    assert done.exit_code == 0 and all(word in done.output for word in ("GPUs", "sp_size", "engine", "CPU memory")), done.output
    document = read(tmp_path / "c.yaml")
    assert document["deepspeed_config"]["zero_stage"] == 3 and document["deepspeed_config"]["offload_optimizer_device"] == "cpu"
    assert document["parallelism_config"]["parallelism_config_sp_size"] == 4
    checked = hf_ulysses("check", tmp_path / "c.yaml", "--json")
    assert checked.exit_code == 0 and {line["level"] for line in json.loads(checked.stdout)} <= {"ok", "warning"}
