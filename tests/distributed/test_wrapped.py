"""Models as training stacks wrap them, in a bare loop: checkpointing, LoRA, DDP, FSDP2, autocast, torch.compile."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_ulysses

from ..collectives import Collectives
from ..models import batch_of, build, checkpoint, packed_positions
from .steps import Step, assert_same, of_real_tokens, on_whole_rows, residual, sharded, whole, whole_step

PACKED = batch_of(1, 33, position_ids=packed_positions(13, 20))
DYNAMIC = dict(
    max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
)


# -- gradient checkpointing -------------------------------------------------------------------------------------------


def checkpointed(batch, reentrant, **kind):
    """Attention is recomputed in backward, where nothing but its arguments says which row it belongs to."""
    model = build(**kind)
    checkpoint(model, reentrant=reentrant)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        assert step.exchanges == 4, "twice two layers"
        return step


KINDS = [dict(attn="sdpa"), dict(attn="eager"), dict(family="mistral"), dict(family="gpt_oss", attn="eager"), DYNAMIC]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", KINDS, ids=["sdpa", "eager", "sliding window", "sinks", "dynamic rotary"])
def test_gradient_checkpointing(ranks, kind, reentrant):
    reference = ranks(1).run(whole_step, PACKED, **kind)[0]
    assert_same(ranks(2).run(checkpointed, PACKED, reentrant, **kind), reference)


# -- PEFT -------------------------------------------------------------------------------------------------------------


def with_lora(batch, attached, checkpointing):
    from peft import LoraConfig, get_peft_model

    # Every attention projection, and what lora_B starts with is not zero, so that lora_A has a gradient.
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    base = build()
    torch.manual_seed(1)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    if checkpointing is not None:
        checkpoint(model, reentrant=checkpointing)
        model.enable_input_require_grads()
    if not attached:
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
    assert len(step.gradients) == 16 and all("lora" in name for name in step.gradients)
    return step


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_lora(ranks, checkpointing):
    pytest.importorskip("peft")
    reference = ranks(1).run(with_lora, PACKED, False, None)[0]
    assert_same(ranks(2).run(with_lora, PACKED, True, checkpointing), reference)


def adapted(kind, tmp=None):
    """A model with an adapter that is not zero."""
    import peft

    attention = ["q_proj", "v_proj"]
    base, task = build(), "CAUSAL_LM"
    torch.manual_seed(1)
    if kind == "adapter_names":
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=attention, init_lora_weights=False), "one", autocast_adapter_dtype=False)
        model.add_adapter("two", peft.LoraConfig(r=4, target_modules=attention, init_lora_weights=False), autocast_adapter_dtype=False)
        return model.eval()
    configs = {
        "alora": lambda: peft.LoraConfig(task_type=task, target_modules=attention, alora_invocation_tokens=[5, 6]),
        "adaption prompt": lambda: peft.AdaptionPromptConfig(task_type=task, adapter_len=4, adapter_layers=2),
        "poly": lambda: peft.PolyConfig(task_type=task, r=4, target_modules=attention, n_tasks=3, n_skills=2),
        "adalora": lambda: peft.AdaLoraConfig(task_type=task, target_modules=attention, total_step=10),
        "shadow": lambda: peft.ShadowConfig(task_type=task),
        "x-lora": lambda: peft.XLoraConfig(task_type=task, hidden_size=64, adapters={"0": tmp}),
    }
    if kind == "x-lora":
        peft.get_peft_model(base, peft.LoraConfig(task_type=task, target_modules=attention)).save_pretrained(tmp)
        base = build()
        base.config.use_cache = False
    model = peft.get_peft_model(base, configs[kind](), autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model.double().train()


# What is said in a call beside the batch: which adapter, or task, each row is for; a count of targets.
CALLS = {
    "adapter_names": dict(adapter_names=["two", "__base__", "one"]),
    "poly": dict(task_ids=torch.tensor([2, 0, 1])),
    "adaption prompt": {},
    "adalora": {},
    "adalora, counted": dict(num_items_in_batch=96),
}


def with_adapter(kind, attached):
    model = adapted(kind.partition(",")[0])
    batch = {**batch_of(3, 33), **CALLS[kind]}
    if not attached:
        return whole(model, batch)
    # A short row would have no task.
    with hf_ulysses.attach(model, trial=kind != "poly") as sp:
        return on_whole_rows(model, batch, sp)


@pytest.mark.parametrize("kind", CALLS)
def test_adapters_of_peft(ranks, kind):
    """Per position, or per row of the batch; AdaLoRA adds to the loss what is no sum over tokens."""
    pytest.importorskip("peft")
    reference = ranks(1).run(with_adapter, kind, False)[0]
    assert_same(ranks(2).run(with_adapter, kind, True), reference)


def refused_adapter(kind, tmp):
    with pytest.raises(ValueError, match="hands its layers what it has computed from the whole row's tokens"):
        hf_ulysses.attach(adapted(kind, tmp))


@pytest.mark.parametrize("kind", ["alora", "x-lora", "shadow"])
def test_adapters_that_look_at_the_row_are_refused(ranks, kind, tmp_path):
    pytest.importorskip("peft")
    ranks(2).run(refused_adapter, kind, str(tmp_path))


# -- DDP and FSDP2 over all ranks, sequence parallel over pairs of them -----------------------------------------------

ROWS = [batch_of(1, 33, seed=seed) for seed in (1, 2)]


def two_rows(rows):
    """The mean of two rows' losses: what data parallelism over two rows computes."""
    model = build()
    for row in rows:
        output = model(**row, use_cache=False)
        (output.loss / len(rows)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(output.loss.item(), of_real_tokens(output.logits, row), gradients)


def data_parallel_pairs():
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    return pairs, dist.get_rank() // 2


def in_ddp(rows, attach_inner, checkpointing):
    inner = build()
    if checkpointing:
        checkpoint(inner, reentrant=False)
    model = DistributedDataParallel(inner)
    pairs, mine = data_parallel_pairs()
    with hf_ulysses.attach(inner if attach_inner else model, pairs[mine]) as sp:
        part = sp.shard(rows[mine])
        output = model(**part)
        loss = sp.reduce_loss(output.loss, part["shift_labels"])
        loss.backward()  # DDP averages over all ranks.
        logits = sp.gather(output.logits.detach(), like=part)
    gradients = {name: parameter.grad for name, parameter in inner.named_parameters()}
    return Step(loss.item(), logits, gradients)


def in_fsdp2(rows, attach_inner, checkpointing):
    model = build()
    if checkpointing:
        checkpoint(model, reentrant=False)
    pairs, mine = data_parallel_pairs()
    if attach_inner:
        sp = hf_ulysses.attach(model, pairs[mine])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not attach_inner:
        sp = hf_ulysses.attach(model, pairs[mine])
    with sp:
        part = sp.shard(rows[mine])
        output = model(**part)
        loss = sp.reduce_loss(output.loss, part["shift_labels"])
        loss.backward()  # FSDP2 averages over all ranks.
        logits = sp.gather(output.logits.detach(), like=part)
        assert sp.exchanges == (4 if checkpointing else 2)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return Step(loss.item(), logits, gradients)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("attach_first", [True, False], ids=["attached, then wrapped", "wrapped, then attached"])
@pytest.mark.parametrize("wrapped", [in_ddp, in_fsdp2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("size", [2, 4])
def test_engines_that_average_over_all_ranks(ranks, size, wrapped, attach_first, checkpointing):
    rows = ROWS[: size // 2]
    reference = ranks(1).run(two_rows, rows)[0]
    steps = ranks(size).run(wrapped, rows, attach_first, checkpointing)
    assert_same(steps[-1], reference)
    for step in steps:
        assert max(residual(step.gradients[name], reference.gradients[name]) for name in reference.gradients) < 2e-6


# -- mixed precision and compilation ----------------------------------------------------------------------------------


def under_autocast(batch, attached, **kind):
    model = build(dtype=torch.float32, **kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not attached:
            return whole(model, batch)
        with hf_ulysses.attach(model) as sp:
            step = sharded(model, batch, sp)
            with Collectives() as wire:
                model(**sp.shard(batch))
            heads, tokens = 4 + 2 + 2, 17
            assert wire.sent[0] == heads // 2 * tokens * 16 * torch.bfloat16.itemsize, "nothing travels in float32"
            return step


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_autocast(ranks, attn):
    """Query and key leave their norms in float32, value its projection in bfloat16; they travel in one buffer."""
    kind = dict(family="qwen3", attn=attn)
    reference = ranks(1).run(under_autocast, PACKED, False, **kind)[0]
    # bfloat16 has 8 bits: gradients of weights are sums over two shards instead of one over the row.
    assert_same(ranks(2).run(under_autocast, PACKED, True, **kind), reference, tolerance=2e-2)


def compiled(batch):
    torch._dynamo.reset()
    model = build()
    with hf_ulysses.attach(model) as sp:
        # Graphs and their breaks are the subject; generating code for them would only take time.
        with Collectives() as wire:
            step = sharded(torch.compile(model, backend="eager"), batch, sp)
        # Exchanges that torch.compile has traced are not counted by the attachment, and have another name on the wire.
        assert wire.counts["all_to_all_single"] + wire.counts["alltoall_base_"] >= 8, wire.counts
    step.gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in step.gradients.items()}
    return step


def test_torch_compile(ranks):
    """Over documents, whose mask is not an ordinary tensor."""
    reference = ranks(1).run(whole_step, PACKED)[0]
    assert_same(ranks(2).run(compiled, PACKED), reference)
