"""What each memory switch adds to the time of a training step, beside gradient checkpointing alone, in one run.

    python scripts/bench_memory.py [LENGTH]      one process, CPU or GPU
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ulysses.memory import Settings, switch_on

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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
