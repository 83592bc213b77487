"""What is measured, for the script that records the golden numbers and for the test that compares with them alike.

Every step is measured in two ways: `sharded` cuts the batch with `sp.shard` and reduces the loss with `sp.reduce_loss`;
`whole` hands the attached model whole rows and takes the loss that comes out.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import hf_ulysses

from ..collectives import Collectives
from ..models import batch_of, build, checkpoint
from ..training.trajectory import rows, tiny_llama, train

# Logits matter: 256 x 4096 of them on each of two ranks, 4 MiB in float32, where a layer's activations take 64 KiB.
VOCAB, LENGTH = 4096, 512


def row_loss(model, sp, batch, way):
    if way == "whole":
        return model(**batch).loss
    part = sp.shard(batch)
    return sp.reduce_loss(model(**part).loss, part["shift_labels"])


# -- peaks of live storage --------------------------------------------------------------------------------------------


def live_storage():
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from bench_exchange import LiveStorage

    return LiveStorage()


def peaks(way):
    """Bytes: the peak of one training step, and of one evaluation of which only the loss is read. Collective."""
    model = build("llama", dtype=torch.float32, vocab_size=VOCAB)
    batch = batch_of(1, LENGTH)
    with hf_ulysses.attach(model) as sp:
        row_loss(model, sp, batch, way).backward()  # The first step holds the start-up check.
        return {"training": _least(_training_step, model, sp, batch, way),
                "evaluation": _least(_evaluation_step, model.eval(), sp, batch, way)}  # fmt: skip


def _least(step, model, *args):
    """Of three: gloo's worker thread lets go of its buffers a moment late."""
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with live_storage() as storage:
            step(model, *args)
        found.append(storage.peak)
    return min(found)


def _training_step(*args):
    row_loss(*args).backward()


def _evaluation_step(*args):
    with torch.no_grad():
        row_loss(*args).item()


def trainer_peaks():
    """The same of the Trainer's own `training_step` and loss-only `evaluation_loop`, under DDP."""
    found = {"training": [], "evaluation": []}

    def watch(trainer):
        def measured(original, name):
            def step(*args, **kwargs):
                with live_storage() as storage:
                    result = original(*args, **kwargs)
                found[name].append(storage.peak)
                return result

            return step

        trainer.training_step = measured(trainer.training_step, "training")
        trainer.evaluation_loop = measured(trainer.evaluation_loop, "evaluation")

    train(
        engine="ddp", sp=2, model=tiny_llama(vocab_size=VOCAB), before=watch, data=rows(6, length=LENGTH), steps=6,
        eval_data=rows(2, length=LENGTH, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    # Not the first two steps: the start-up check, and DDP's buckets laid out anew.
    return {"training": min(found["training"][2:]), "evaluation": min(found["evaluation"][1:])}


# -- collectives ------------------------------------------------------------------------------------------------------

# name: (size, query heads, key-value heads, whether layers are recomputed). 2 key-value heads over 4 ranks travel twice.
LAYOUTS = {
    "sp2 mha": (2, 4, 4, False),
    "sp2 gqa": (2, 4, 2, False),
    "sp2 gqa recomputed": (2, 4, 2, True),
    "sp4 mha": (4, 8, 8, False),
    "sp4 gqa": (4, 8, 4, False),
    "sp4 gqa fewer": (4, 8, 2, False),
}


class Traffic(Collectives):
    """Collectives, and of each the bytes of all tensors that it is handed, buffers to receive in included."""

    def __init__(self):
        super().__init__()
        self.buffers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.buffers += sum(leaf.nbytes for leaf in tree_leaves(args) if torch.is_tensor(leaf))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def found(self):
        return Counter({**self.counts, "bytes sent": sum(self.sent), "bytes of buffers": self.buffers})


def collectives(heads, kv_heads, recomputed, way):
    """`{"layer": {"forward", "backward"}, "around": {...}}`: what a layer adds, and the rest, by name. Collective."""
    one, three = (_step(layers, heads, kv_heads, recomputed, way) for layers in (1, 3))
    found = {"layer": {}, "around": {}}
    for which in one:
        twice = three[which] - one[which]
        assert all(count % 2 == 0 for count in twice.values()), twice
        layer = Counter({name: count // 2 for name, count in twice.items()})
        found["layer"][which], found["around"][which] = dict(layer), dict(one[which] - layer)
    return found


def _step(layers, heads, kv_heads, recomputed, way):
    model = build(
        "llama", dtype=torch.float32, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    if recomputed:
        checkpoint(model)
    batch = batch_of(1, 64)
    with hf_ulysses.attach(model) as sp:
        row_loss(model, sp, batch, way).backward()
        with Traffic() as forward:
            loss = row_loss(model, sp, batch, way)
        with Traffic() as backward:
            loss.backward()
    return {"forward": forward.found(), "backward": backward.found()}


# -- trajectories -----------------------------------------------------------------------------------------------------


def runs():
    """`{name: (settings of train, their reference in one process)}`."""
    found = {}
    for kind in ("trainer", "sft"):
        half = {"bf16": False} if kind == "sft" else {}
        for accumulation in (1, 4):
            for engine in ("ddp", "zero2", "zero3", "fsdp2"):
                same = dict(kind=kind, accumulation=accumulation, **half)
                name = f"{kind} {engine} sp2 accumulation{accumulation}"
                found[name] = dict(engine=engine, sp=2, **same), same
    found["trainer ddp dp2 sp2"] = dict(engine="ddp", sp=2, dp=2), dict(batch=2)
    packed = dict(
        kind="sft", bf16=False, steps=4, data=documents(24), packed=True, packing=True, packing_strategy="bfd", max_length=64
    )
    found["sft zero3 sp2 packed"] = dict(engine="zero3", sp=2, **packed), packed
    evaluated = dict(
        steps=4, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
        per_device_eval_batch_size=1, eval_on_start=True,
    )  # fmt: skip
    found["trainer fsdp2 sp2 evaluated"] = dict(engine="fsdp2", sp=2, **evaluated), evaluated
    return found


def documents(count):
    """Documents of 5 to 39 tokens with uneven targets."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 40, (count,), generator=generator).tolist()
    return [rows(1, length, seed=300 + index)[0] for index, length in enumerate(lengths)]


def trajectory(settings):
    """A training run as numbers for a JSON file. Collective."""
    result = train(**settings)
    parameters = result["parameters"].double()
    logged = ("mean_token_accuracy", "entropy", "num_tokens") if settings.get("kind") == "sft" else ()
    return {
        "engine": result["engine"],
        # Not how many: the start-up check has some, too.
        "exchanged": result["exchanges"] > 0,
        **{name: result[name] for name in ("loss", "grad_norm", "eval_loss")},
        **{name: [entry[name] for entry in result["log"]] for name in logged},
        "parameters": {"sum": parameters.sum().item(), "norm": parameters.norm().item()},
    }
