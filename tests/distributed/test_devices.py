"""Numbers and models as they come on GPUs: positions of any dtype and size, half precision, parameters that are made later."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_ulysses

from ..models import batch_of, build, config_of, packed_positions
from .steps import TOLERANCE, Step, assert_same, average, gradients, of_real_tokens, residual, whole

LENGTH = 33
PACKED, COUNTED = packed_positions(11, 2, 20), torch.arange(LENGTH)[None]
# Above 2 ** 24 float32 holds every second number only: what counts in it loses the documents.
FAR = COUNTED + 2**24 + 1
POSITIONS = [
    *[PACKED.to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, torch.bfloat16)],
    FAR, FAR.to(torch.int32), COUNTED.to(torch.int16), torch.cat([COUNTED, FAR]),
]  # fmt: skip


def batches():
    return [batch_of(len(positions), LENGTH, position_ids=positions) for positions in POSITIONS]


def step(model, batch):
    """Of an attached model or a plain one; gradients averaged over ranks."""
    one = whole(model, batch)
    if dist.is_initialized():
        average(one.gradients)
    return one


def plain_steps():
    model = build()
    return [step(model, batch) for batch in batches()]


def attached_steps():
    model = build()
    with hf_ulysses.attach(model, trial=False):
        return [step(model, batch) for batch in batches()]


def test_positions_of_any_dtype_and_size(ranks):
    expected = ranks(1).run(plain_steps)[0]
    for found in ranks(2).run(attached_steps):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)


def under_autocast(dtype, attached):
    model, batch = build(dtype=torch.float32), batch_of(1, LENGTH, position_ids=PACKED)
    with torch.autocast("cpu", dtype):
        if not attached:
            return step(model, batch)
        with hf_ulysses.attach(model):
            return step(model, batch)


def test_float16_autocast(ranks):
    """bfloat16 is in test_wrapped.py. 11 bits: 5e-4 a rounding, of several in each layer."""
    expected = ranks(1).run(under_autocast, torch.float16, False)[0]
    for found in ranks(2).run(under_autocast, torch.float16, True):
        assert_same(found, expected, tolerance=5e-3)


def on_meta(when):
    """FSDP2's own way to a model that no rank could hold: made on meta, sharded, given memory, loaded."""
    from transformers import AutoModelForCausalLM

    full, batch = build(), batch_of(1, LENGTH)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama")).to(torch.float64).train()
    sp = hf_ulysses.attach(model) if when == "on meta" else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sp = hf_ulysses.attach(model) if when == "sharded" else sp
    model.to_empty(device="cpu")
    set_model_state_dict(model, full.state_dict(), options=StateDictOptions(full_state_dict=True))
    for mine, theirs in zip(model.buffers(), full.buffers(), strict=True):
        mine.copy_(theirs)  # Rotary frequencies are in no checkpoint.
    sp = hf_ulysses.attach(model) if when == "filled" else sp
    with sp:
        output = model(**batch)
        output.loss.backward()
        found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        return Step(output.loss.item(), of_real_tokens(output.logits, batch), found, sp.exchanges)


def from_the_start():
    return whole(build(), batch_of(1, LENGTH))


@pytest.mark.parametrize("when", ["on meta", "sharded", "filled"])
def test_a_model_that_is_made_on_meta(ranks, when):
    expected = ranks(1).run(from_the_start)[0]
    for found in ranks(2).run(on_meta, when):
        assert_same(found, expected, exchanges=2)
