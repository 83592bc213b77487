"""What a packed row costs: 16 documents of 512 tokens in a row of 8192, beside one document of 8192 tokens.

    python scripts/bench_packed.py             table; about a minute on two CPU cores
    python scripts/bench_packed.py --json      the numbers as JSON on stdout instead

1. Two processes (CPU, gloo, one thread each) attach a small Llama with sdpa attention and shard both rows.
2. A round is forward and backward of the packed row, then of the single document; the table shows medians over rounds of
   the slowest rank, and their ratio.
3. One more pass of each looks at every tensor that is made: the largest must be far from S x S elements.

Exits non-zero when the packed row makes a tensor of S x S elements or takes more than 0.35 of the single document's time.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

LENGTH, DOCUMENTS, SP, MAX_RATIO = 8192, 16, 2, 0.35


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest storage that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, size)
        return result


def build_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=256,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batch_of(documents):
    ids = torch.arange(LENGTH)[None] * 7919 % 256
    positions = torch.arange(LENGTH // documents).repeat(documents)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def rank_main(rank, folder, rounds, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SP)
    import hf_ulysses

    model = build_model()
    sp = hf_ulysses.attach(model)
    parts = {documents: sp.shard(batch_of(documents)) for documents in (DOCUMENTS, 1)}

    def step(documents):
        part = parts[documents]
        sp.reduce_loss(model(**part).loss, part["shift_labels"]).backward()
        model.zero_grad()

    times = {documents: [] for documents in parts}
    for round_number in range(rounds + 1):
        for documents in parts:
            dist.barrier()
            start = time.perf_counter()
            step(documents)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if round_number:  # The first round warms up.
                times[documents].append(took.item())
        queue.put(("round", round_number))
    largest = {}
    for documents in parts:
        with LargestTensor() as mode:
            step(documents)
        largest[documents] = mode.elements
    if rank == 0:
        queue.put(("result", {n: (statistics.median(times[n]), largest[n]) for n in parts}))
    dist.barrier()
    # gloo's threads abort now and then at a regular exit; the queue has to be flushed first.
    queue.close()
    queue.join_thread()
    os._exit(0)


def measure(rounds):
    from rich.progress import Progress

    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=SP * (rounds + 1))
        ranks = [context.Process(target=rank_main, args=(rank, folder, rounds, queue)) for rank in range(SP)]
        for process in ranks:
            process.start()
        while True:
            kind, value = queue.get(timeout=300)
            if kind == "result":
                break
            progress.advance(task)
        for process in ranks:
            process.join()
    (packed, largest), (single, _) = value[DOCUMENTS], value[1]
    return {
        "length": LENGTH,
        "documents": DOCUMENTS,
        "sp_size": SP,
        "packed_seconds": packed,
        "single_seconds": single,
        "ratio": packed / single,
        "largest_tensor_elements": largest,
        "square_elements": LENGTH * LENGTH,
    }


def show(result):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"A row of {LENGTH} tokens, sdpa, sp {SP}: forward and backward")
    for column in ("row", "seconds (median)", "relative"):
        table.add_column(column, justify="right")
    table.add_row("one document", f"{result['single_seconds']:.3f}", "1.00")
    table.add_row(f"{DOCUMENTS} documents", f"{result['packed_seconds']:.3f}", f"{result['ratio']:.2f}")
    console = Console()
    console.print(table)
    share = result["largest_tensor_elements"] / result["square_elements"]
    console.print(f"largest tensor of the packed row: {result['largest_tensor_elements']:,} elements, {share:.3f} of S x S")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    result = measure(options.rounds)
    print(json.dumps(result, indent=2)) if options.json else show(result)
    too_large = result["largest_tensor_elements"] >= result["square_elements"] // 4
    sys.exit(too_large or result["ratio"] > MAX_RATIO)


if __name__ == "__main__":
    main()
