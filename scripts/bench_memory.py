"""What each memory switch costs in time, and what it adds in length: the tables of docs/memory.md.

    python scripts/bench_memory.py [LENGTH]             seconds of a training step, beside gradient checkpointing alone
    python scripts/bench_memory.py --plan CONFIG.json   GiB per GPU and longest row of a model, switches added one by one
"""

import sys
import time

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hf_ulysses.memory import Settings, switch_on
from hf_ulysses.planner.plan import Planner, Setup
from hf_ulysses.planner.step import Step

ALL = dict(tiled_loss=8, tiled_mlp=8, tiled_norms=8, offload_checkpoints=True)


def step_seconds(model, batch, repeats=3):
    """The shortest of `repeats` steps, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        model(**batch).loss.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return min(seconds[1:])


def main(length=4096):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes, max_position_embeddings=length)).to(device).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(8192, (1, length), device=device)
    batch = dict(input_ids=tokens, labels=tokens)
    plain = step_seconds(model, batch)
    print(f"gradient checkpointing alone    {plain:6.2f} s  1.00x")
    for settings in (*({name: value} for name, value in ALL.items()), ALL):
        handles = switch_on(model, Settings(**settings))
        seconds = step_seconds(model, batch)
        for handle in handles:
            handle.remove()
        print(f"{'+'.join(settings) if len(settings) == 1 else 'all of them':<31} {seconds:6.2f} s  {seconds / plain:.2f}x")


def plan(config, length=1_000_000):
    """On 8 GPUs of 80 GB, ZeRO-3, optimizer and 1.5 TiB in CPU memory."""
    planner, on = Planner(AutoConfig.from_pretrained(config)), {}
    print(f"| switched on | GiB per GPU, {length:,} tokens | longest row |\n| --- | --- | --- |")
    added = dict(tiled_loss=True, offload_checkpoints=True, tiled_norms=True, tiled_mlp=True, head_chunks=4)
    for name, value in {"": None, **added}.items():
        on |= {name: value} if name else {}
        setup = Setup(8, Step(length, 8, memory=Settings(**on)), offload_optimizer=True, host_memory_gib=1536)
        peak, longest = planner.plan(setup).peak_memory_gib, planner.longest(setup).max_seq_length
        print(f"| {f'+ `{name}`' if name else 'gradient checkpointing alone'} | {peak:.1f} | {longest:,} |", flush=True)


if __name__ == "__main__":
    plan(sys.argv[2]) if sys.argv[1:2] == ["--plan"] else main(*map(int, sys.argv[1:]))
