"""What gpu_rehearsal.py says pass or fail of: a tiny model through everything that a GPU does in another way than a CPU.

Each check returns what it saw, in words; raises `NotRun` where the machine has not what it takes, and anything else where it
fails. They run in the rehearsal's fake world, one rank of many, so that numbers are compared in "several ranks" alone.
"""

import contextlib
import io
import tempfile
import traceback
from collections import Counter

import torch
import torch.distributed as dist

import hf_ulysses
from hf_ulysses.core.cut import shard_batch
from hf_ulysses.core.sequence import ROW_KEY

LENGTH, VOCABULARY = 2048, 512
WAITS = {
    "cuda": ("cudaStreamSynchronize", "cudaEventSynchronize"),
    "cpu": ("aten::_local_scalar_dense", "aten::nonzero"),
}


class NotRun(Exception):
    """The machine has not what a check takes."""


def build(device, attention="sdpa", layers=2, dtype=torch.bfloat16):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, dtype).train()


def batch_of(device, documents=1, length=LENGTH):
    tokens = torch.arange(length, device=device)[None] * 7 % VOCABULARY
    if documents == 1:
        return {"input_ids": tokens, "labels": tokens}
    positions = torch.arange(length, device=device)[None] % -(-length // documents)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


@contextlib.contextmanager
def attached(model):
    """In a fake world: what compares ranks is left out, for every rank is alone."""
    with hf_ulysses.attach(model, trial=False) as sp:
        sp.peers.judge = sp.peers.judge_last = lambda *_, **__: None
        yield sp


def step(model, batch):
    model(**batch).loss.backward()


def events(function, device):
    """Names of all that a profiler sees of the second call of `function`."""
    function()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as trace:
        function()
    return Counter(event.name for event in trace.events())


def attentions(device):
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    there = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return [key for key, available in there.items() if device == "cuda" and available()]


# -- the checks ------------------------------------------------------------------------------------------------------------


def flash(device):
    found = attentions(device)
    if not found:
        raise NotRun("neither flash attention 2 nor 3 is installed")
    for key in found:
        with attached(model := build(device, key)):
            for documents in (1, 16):
                step(model, batch_of(device, documents))
            padded = batch_of(device)
            padded["attention_mask"] = (torch.arange(LENGTH, device=device) < LENGTH - 100).long()[None]
            step(model, padded)
    return f"{', '.join(found)}: plain, packed, padded"


def triton(device):
    if device == "cpu":
        raise NotRun("no GPU; in Triton's interpreter: tests/training/test_liger.py")
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        raise NotRun("liger-kernel is not installed") from None
    model = build(device)
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    with attached(model):
        step(model, batch_of(device))
    return "Liger's norms, rotary embedding and SwiGLU"


def waits(device):
    most = 0
    for attention in ("sdpa", *attentions(device)):
        for documents in (1, 16):
            counts = []
            for layers in (2, 4):
                with attached(model := build(device, attention, layers)):
                    seen = events(lambda: step(model, batch_of(device, documents)), device)
                counts.append(sum(seen[name] for name in WAITS[device]))
            assert counts[0] == counts[1], f"{attention}, {documents} documents: {counts} waits with 2 and 4 layers"
            most = max(most, *counts)
    assert most <= 3, f"{most} waits in a micro-batch"
    return f"{most} in a micro-batch, none in a layer"


def packed(device):
    launches = []
    for documents in (1, 160):
        with attached(model := build(device)):
            seen = events(lambda: step(model, batch_of(device, documents)), device)
        launches.append(sum(n for name, n in seen.items() if name.startswith("cudaLaunch" if device == "cuda" else "aten::")))
    assert launches[1] <= 3 * launches[0], f"160 documents launch {launches[1]} operations, one {launches[0]}"
    return f"160 documents launch {launches[1] / launches[0]:.1f} times the operations of one"


def several_ranks(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise NotRun("one GPU: nothing here has ever run over NCCL")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_compare, args=(2, f"file://{folder}/meet", device), nprocs=2)
    return "two ranks compute what one does, over " + ("NCCL" if device == "cuda" else "gloo")


def _compare(rank, size, meet, device):
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=meet, rank=rank, world_size=size)
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    model = build(place, dtype=torch.float32)
    for documents in (1, 16):
        batch, results = batch_of(place, documents, 512), []
        for around in (contextlib.nullcontext(), hf_ulysses.attach(model)):
            with around:
                model.zero_grad()
                loss = model(**batch, use_cache=False).loss
                loss.backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.all_reduce(gradient)
            results.append((loss.item(), gradient / size))
        (loss, gradient), (ours, our_gradient) = results
        # Sums in float32 in another order, some in TF32's.
        assert abs(ours - loss) < 1e-3 * abs(loss), (ours, loss)
        assert (our_gradient - gradient).abs().max() < 1e-2 * gradient.abs().max()
    dist.destroy_process_group()


def compiled(device):
    with_exchange = []

    def keep(graph, inputs):
        names = [str(node.target) for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes]
        with_exchange.append(sum("all_to_all" in name for name in names))
        return graph

    torch._dynamo.reset()
    layers = 2 if device == "cuda" else 1
    with attached(model := build(device, layers=layers)):
        function = torch.compile(model, backend=keep)
        step(function, batch_of(device, length=256))
    with_exchange = [n for n in with_exchange if n]
    torch._dynamo.reset()
    assert len(with_exchange) == 1, f"{layers} layers are in {len(with_exchange)} graphs"
    return f"{layers} layers and their {with_exchange[0]} exchanges are in one graph"


def devices(device):
    model, batch = build(device, dtype=torch.float32), batch_of("cpu", 16)
    batch["position_ids"] = batch["position_ids"].to(torch.int32)

    def shard(batch):
        return shard_batch(batch, dist.get_rank(), dist.get_world_size())

    for part in torch.utils.data.DataLoader([batch], batch_size=None, pin_memory=device == "cuda", collate_fn=shard):
        assert device == "cpu" or part[ROW_KEY].position_ids.is_pinned(), "the row is not pinned"
        # As FSDP's root does, which knows no object of ours.
        moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in part.items()}
        for dtype in (torch.bfloat16, torch.float16):
            with attached(model), torch.autocast(device, dtype):
                step(model, moved)
    with attached(model):
        torch.save(model, io.BytesIO())
    return "pinned rows, batches on the CPU, int32 positions, bf16 and fp16 autocast, torch.save; fp8 never run"


CHECKS = {
    "1 flash attention": flash,
    "2 Triton kernels": triton,
    "3 host waits": waits,
    "4 packed rows": packed,
    "5 several ranks": several_ranks,
    "6 torch.compile": compiled,
    "7 devices and dtypes": devices,
}


def run(device, deadline_passed):
    """All checks: name -> "pass: ...", "FAIL: ...", "not run: ...". Those that do not fit the time are not run."""
    verdicts = {}
    for name, check in CHECKS.items():
        try:
            if deadline_passed():
                raise NotRun("no time was left")
            verdicts[name] = f"pass: {check(device)}"
        except NotRun as why:
            verdicts[name] = f"not run: {why}"
        # Whatever it is, the others are run, too.
        except Exception as error:
            verdicts[name] = f"FAIL: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{name}: {verdicts[name]}", flush=True)
    return verdicts
