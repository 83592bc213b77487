"""One training step of the real model class on fake tensors, as one rank of a fake world: the peak of its activations."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..core.attachment import attach
from ..core.sequence import ROW_KEY
from .kernels import stand_in
from .live import LiveStorage


@contextmanager
def fake_world(size):
    """A process group of `size` ranks of which only rank 0 exists. Raises ValueError inside of a real run."""
    if dist.is_initialized():
        raise ValueError("A plan needs a process of its own: torch.distributed is initialized already.")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(config, dtype, checkpointing):
    """The real class with fake weights: call under a FakeTensorMode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if checkpointing:
        # A fake tensor has no random state to keep.
        # Its name before Transformers 5.24 is deprecated now.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def measure(config, length, sp_size, batch=1, dtype=torch.bfloat16, checkpointing=True, attention="flash_attention_2"):
    """Bytes of the step's peak over parameters, which are not counted; a gradient counts until it is complete.

    Args:
        config (`transformers.PretrainedConfig`): of a causal language model; left as it is.
        length (`int`): tokens of the whole row.
        attention (`str`): a flash key is replaced by its stand-in (kernels.py); others run as they are.

    Returns:
        `tuple[int, torch.nn.Module]`: peak in bytes, and the model (fake) for counting its parameters.
    """
    flash = "flash" in attention
    with fake_world(sp_size), stand_in(attention) if flash else nullcontext():
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model = build(config, dtype, checkpointing)
        model.config._attn_implementation = attention
        for parameter in model.parameters():
            # Engines reduce and drop a full gradient as soon as it is complete.
            parameter.register_post_accumulate_grad_hook(_drop)
        with attach(model) as sp:
            # Weights are fake: there is nothing that a trial row could find out.
            sp._discovered = True
            with fake, LiveStorage() as storage:
                storage.ignore([*model.parameters(), *model.buffers()])
                _run(model, sp, batch, length, fake)
    return storage.peak, model


def _drop(parameter):
    parameter.grad = None


def _run(model, sp, batch, length, fake):
    """Forward and backward: the one place that knows how a batch goes into an attached model."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        tokens = torch.zeros(batch, length, dtype=torch.long)
        part = sp.cut({"input_ids": tokens, "labels": tokens})
    row = part[ROW_KEY]
    # Both read values: equal rows, and one document.
    row.verified, row._flash = True, {}
    row.position_ids = fake.from_tensor(row.position_ids)
    part = {name: fake.from_tensor(value) if torch.is_tensor(value) else value for name, value in part.items()}
    loss = model(**part).loss
    loss.backward()
