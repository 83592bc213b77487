"""The first thing to run on a GPU: pass or fail of everything that it does in another way than a CPU (gpu_checks.py), then
one rank of a large world, alone on one GPU: how long a training step takes and how much memory it needs.

    python scripts/gpu_rehearsal.py                  ends within 7 minutes, whatever the GPU
    python scripts/gpu_rehearsal.py --models qwen3-4b --lengths 65536 131072 --sp 8
    python scripts/gpu_rehearsal.py --self-test      the same code on CPU with a tiny model, in seconds

1. A fake process group of `sp` ranks (torch's own, made for tests), this process being one from its middle. The model has
   random weights, its parameters are sharded over all ranks by FSDP2 (fp32, computing in bf16) as they would be, and
   hf_ulysses is attached. So kernels, shapes and memory are those of a real rank.
2. Collectives become local copies of the same size: the exchange here, FSDP's all-gathers in the fake group. So what is
   missing from the step time is the wire. The exchange's own cost (packing, unpacking, local copy) is timed alone, too.
3. Row lengths double until memory or time runs out. Each length: one warm-up step, then the median of timed steps; a step
   is forward, backward (with gradient checkpointing) and AdamW. The result is written after every length.

4. The memory of each model's longest row is compared with what the planner says.

Attention: flash_attention_2 where flash_attn is installed, else sdpa. Results: outputs/gpu_rehearsal/result.json. Ends with
an error if anything fails; what could not be run is said.

Not covered: the time of the wire, of waiting for slower ranks and of loading data; gradient clipping. The loss is
computed from whole logits, as models do by default, which is what runs out of memory first.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import gpu_checks
import hf_ulysses
from hf_ulysses.core import all_to_all
from hf_ulysses.core.heads import share_heads

OUTPUT = Path(__file__).resolve().parent.parent / "outputs" / "gpu_rehearsal"
GIB = 2**30

# The sizes of Qwen/Qwen3-4B and meta-llama/Llama-3.1-8B.
MODELS = {
    "qwen3-4b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
}
TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=16, max_position_embeddings=4096,
)  # fmt: skip


def join_fake_world(size):
    """A rank from the middle: at either end of the row the exchange is a little cheaper."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("fake", rank=size // 2, world_size=size, store=FakeStore())


def copy_locally(receive, send, receive_sizes, send_sizes, group=None):
    """In place of `all_to_all_single`: as many bytes, from this rank's own buffer."""
    common = min(receive.numel(), send.numel())
    receive[:common].copy_(send[:common])
    if receive.numel() > common:
        receive[common:].zero_()


def build(sizes, attention, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = dict(sizes)
    config = CONFIG_MAPPING[sizes.pop("model_type")](**sizes)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).train()
    # Transformers 5.24 renamed it, with a warning; the default is not reentrant.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    return model, optimizer


def train_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    # The fake group reduces nothing: what would be the gradient is uninitialised memory.
    torch._foreach_zero_([p.grad.to_local() for p in model.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad()


class Clock:
    def __init__(self, device):
        self.device = device

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, function):
        self.synchronize()
        started = time.perf_counter()
        function()
        self.synchronize()
        return (time.perf_counter() - started) * 1000


def exchange_alone(sizes, length, device, clock, repeats=5):
    """Milliseconds of one layer's exchange, forward and backward, in bf16 and without a core."""
    size, rank = dist.get_world_size(), dist.get_rank()
    heads, kv_heads, head_dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    exchange = all_to_all.Exchange(dist.group.WORLD, rank, share_heads(heads, kv_heads, size))

    def projected(count):
        flat = torch.randn(1, length // size, count * head_dim, dtype=torch.bfloat16, device=device)
        return flat.unflatten(-1, (count, head_dim)).transpose(1, 2).requires_grad_()

    inputs = [projected(heads), projected(kv_heads), projected(kv_heads)]
    ones = torch.ones(1, length // size, heads, head_dim, dtype=torch.bfloat16, device=device)

    def once():
        query, key, value = all_to_all.gather_seq_scatter_heads(*inputs, exchange)
        out = all_to_all.gather_heads_scatter_seq(query.transpose(1, 2), exchange)
        torch.autograd.grad([out, key, value], inputs, [ones, key.detach(), value.detach()])

    once()
    return statistics.median(clock.milliseconds(once) for _ in range(repeats))


def planned(sizes, length, sp, attention):
    """GiB that a GPU allocates in such a step, says the planner. It wants a process of its own."""
    from transformers import CONFIG_MAPPING

    from hf_ulysses.planner.plan import Planner, Setup
    from hf_ulysses.planner.step import Step

    sizes = dict(sizes)
    config = CONFIG_MAPPING[sizes.pop("model_type")](**sizes)
    step = Step(length=length, sp_size=sp, dtype="float32", attention=attention)
    plan = Planner(config).plan(Setup(num_gpus=sp, step=step, engine="fsdp2"))
    return plan.peak_memory_gib - plan.breakdown["allowance"]


def against_the_plan(entry, sizes, sp, attention):
    """Of the longest row: "pass: ..." where less than planned is allocated, and not much less."""
    last = entry["lengths"][-1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        plan = pool.apply(planned, (sizes, last["length"], sp, attention))
    entry["planned_gib"] = round(plan, 2)
    if "peak_allocated_gib" not in last:
        return f"not run: no GPU; the plan for {last['length']} tokens is {plan:.2f} GiB"
    share = last["peak_allocated_gib"] / plan
    verdict = "pass" if 0.8 <= share <= 1.05 else "FAIL"
    return f"{verdict}: {last['length']} tokens need {last['peak_allocated_gib']} GiB, {share:.0%} of the plan"


def measure(model, optimizer, sp, sizes, length, device, repeats):
    clock = Clock(device)
    tokens = torch.randint(0, sizes["vocab_size"], (1, length), device=device)
    batch = {"input_ids": tokens, "labels": tokens}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = sp.exchanges
    warm_up = clock.milliseconds(lambda: train_step(model, optimizer, batch))
    # Forward, and once more when the checkpoint is recomputed.
    assert sp.exchanges - before == 2 * sizes["num_hidden_layers"], "attention did not go through the exchange"
    times = [clock.milliseconds(lambda: train_step(model, optimizer, batch)) for _ in range(repeats)]
    median = statistics.median(times)
    memory = {}
    if device == "cuda":
        memory["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        memory["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    alone = exchange_alone(sizes, length, device, clock)
    return {
        "length": length,
        "tokens_per_rank": length // sp.size,
        "step_ms": round(median, 1),
        "warm_up_ms": round(warm_up, 1),
        "steps_ms": [round(t, 1) for t in times],
        "tokens_per_second_of_all_ranks": round(length / median * 1000),
        **memory,
        "exchange_ms_per_layer": round(alone, 3),
        # Its forward runs twice per layer under checkpointing; forward and backward cost about the same.
        "exchange_share_of_step": round(1.5 * alone * sizes["num_hidden_layers"] / median, 4),
    }


def rehearse(name, sizes, lengths, attention, device, deadline, repeats, record):
    """Growing lengths of one model until memory or time runs out; `record` is called after each one."""
    model, optimizer = build(sizes, attention, device)
    entry = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": attention,
        "lengths": [],
        "stopped": "all lengths measured",
    }
    last = None
    # Not what compares ranks, at the start and in each batch: in a fake group every rank is alone.
    with hf_ulysses.attach(model, trial=False) as sp, mock.patch.object(all_to_all.dist, "all_to_all_single", copy_locally):
        sp.peers.judge = sp.peers.judge_last = lambda *_, **__: None
        for length in lengths:
            # A step grows at most with the square of the length; a warm-up and `repeats` steps.
            left = deadline - time.monotonic()
            expected = 0 if last is None else last["step_ms"] / 1000 * (length / last["length"]) ** 2 * (repeats + 1.5)
            if left <= 0 or expected > left:
                entry["stopped"] = f"{length} tokens would take about {expected:.0f} s, {max(left, 0):.0f} s are left"
                break
            try:
                last = measure(model, optimizer, sp, sizes, length, device, repeats)
            except torch.OutOfMemoryError:
                entry["stopped"] = f"out of memory at {length} tokens"
                break
            entry["lengths"].append(last)
            print(f"{name}: {json.dumps(last)}", flush=True)
            record(entry)
    record(entry)
    print(f"{name}: {entry['stopped']}", flush=True)
    return entry


def attention_at_hand(device):
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sp", type=int, default=8, help="ranks of the fake world, all one sp group (default: 8)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(13, 21)], help="tokens per row")
    parser.add_argument("--attention", help="attention implementation (default: flash_attention_2 if there, else sdpa)")
    parser.add_argument("--seconds", type=float, default=360, help="start nothing that would end later (default: 360)")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps per length (default: 2)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "result.json")
    parser.add_argument("--self-test", action="store_true", help="tiny models on CPU; checks that everything runs")
    arguments = parser.parse_args()

    started = time.monotonic()
    device = "cpu" if arguments.self_test else "cuda"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("No GPU found: run with --self-test for the check on CPU.")
        torch.cuda.set_device(0)
    lengths = [64, 128, 256] if arguments.self_test else arguments.lengths
    attention = arguments.attention or attention_at_hand(device)
    join_fake_world(arguments.sp)
    packages = {name: version(name) for name in ("torch", "transformers")}
    document = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "device_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
        if device == "cuda"
        else None,
        **packages,
        "sp_size": arguments.sp,
        "engine": "FSDP2 over all ranks, fp32 parameters and AdamW, bf16 compute, gradient checkpointing",
        "exchange": "local copy of the same size",
        "verdicts": {},
        "models": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)

    def record(entry):
        document["models"] = [e for e in document["models"] if e["model"] != entry["model"]] + [entry]
        document["seconds"] = round(time.monotonic() - started, 1)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    # The checks take a minute; they get a third of the time at most.
    late = float("inf") if arguments.self_test else started + arguments.seconds / 3
    document["verdicts"] = gpu_checks.run(device, lambda: time.monotonic() > late)
    free(device)
    for number, name in enumerate(arguments.models):
        # What is left is divided evenly among the models that are still to come.
        left = arguments.seconds - (time.monotonic() - started)
        deadline = time.monotonic() + left / (len(arguments.models) - number)
        sizes = {**MODELS[name], **(TINY if arguments.self_test else {})}
        entry = rehearse(name, sizes, lengths, attention, device, deadline, arguments.repeats, record)
        free(device)
        if entry["lengths"]:
            verdict = against_the_plan(entry, sizes, arguments.sp, attention)
            document["verdicts"][f"8 memory of {name}"] = verdict
            print(f"8 memory of {name}: {verdict}", flush=True)
            record(entry)
    dist.destroy_process_group()
    print(f"{time.monotonic() - started:.0f} s. Written: {arguments.output}", flush=True)
    failed = [name for name, verdict in document["verdicts"].items() if verdict.startswith("FAIL")]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    if arguments.self_test:
        incomplete = [entry for entry in document["models"] if len(entry["lengths"]) != len(lengths)]
        if incomplete:
            raise SystemExit(f"self-test failed: {incomplete}")
        print("self-test passed")


if __name__ == "__main__":
    main()
