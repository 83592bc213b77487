"""One training step of the real model class on fake tensors, as rank 0 of a fake world: what its memory and work are.

1. The model is built without weights (torch's FakeTensorMode), attached, and given the memory switches: the code that will run.
2. Forward and backward of whole rows run under `LiveStorage`. Kernels that need a GPU are replaced by stand-ins of their
   memory (kernels.py); everything else is what the model, the entrance, the exits and the switches really do.
3. Layers that are all alike are not all run: two and three of them are, and each further one adds what the third added.
   Of a loss in more than three tiles three run: all are alike, and one lives at a time.

Fake tensors are on the CPU, because torch without CUDA cannot differentiate others; sizes are the same.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..core.attachment import attach
from ..core.entrance import decoder_of
from ..memory import Settings, loss, offload, per_position, switch_on
from .images import WholeNumbers, image_batch
from .kernels import KEY, has_stand_in, stand_ins
from .live import LiveStorage

_RUN, _TILES = (2, 3), 3


@dataclass(frozen=True)
class Step:
    """What a rank does in one step.

    Args:
        length (`int`): tokens of a whole row, over `sp_size` ranks; `batch` (`int`): rows.
        dtype (`str`): of weights and activations; `autocast` (`bool`): float32 weights, bfloat16 activations.
        attention (`str`): an attention key; those with fused kernels are replaced by their stand-in, others run.
        trainer (`str`): "trainer" (the model's own loss), "sft" (TRL's fused head), "dpo" (twice the rows, fused head).
        lora_rank (`int`): of LoRA on all linear layers, 0 is none.
        liger (`bool`): fused norms, and the loss in tiles as Liger makes them.
        images, image_tokens (`int`): images of every row, and the tokens of `length` that each of them becomes.
    """

    length: int
    sp_size: int = 1
    batch: int = 1
    dtype: str = "bfloat16"
    autocast: bool = False
    checkpointing: bool = True
    attention: str = "flash_attention_2"
    memory: Settings = field(default_factory=Settings)
    trainer: str = "trainer"
    lora_rank: int = 0
    liger: bool = False
    images: int = 0
    image_tokens: int = 0


@dataclass(frozen=True)
class Measured:
    """Bytes at the step's peak beside parameters and complete gradients: `peak`, and `logits` of it. `host`: of offloaded
    checkpoints. `sent`: by exchanges. `flops`: of forward, recomputation and backward. All of one rank."""

    peak: int
    logits: int
    host: int
    sent: int
    flops: float


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


def build(config, step: Step):
    """The real class without weights, as `step` trains it, and the FakeTensorMode that it lives in."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
    from transformers.modeling_utils import local_torch_dtype
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    auto = AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    fake, dtype = FakeTensorMode(allow_non_fake_inputs=True), _dtype(step)
    with fake:
        # There is nothing to initialize, and some models look at the values.
        with mock.patch.object(PreTrainedModel, "initialize_weights", lambda model: None):
            model = auto.from_config(config, dtype=dtype, attn_implementation="eager").train()
        if step.trainer != "trainer":
            from trl.trainer.utils import add_fused_lm_head

            more = ("mean_logits",) if step.trainer == "dpo" else ()
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1", *more))
        if step.checkpointing:
            # Its name before Transformers 5.24 is deprecated now. A fake tensor has no random state to keep.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False, "preserve_rng_state": False})
        attention = KEY if has_stand_in(step.attention) else step.attention
        for part in {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values():
            part._attn_implementation = attention
        if step.lora_rank:
            from peft import LoraConfig, get_peft_model

            if step.checkpointing:
                model.enable_input_require_grads()
            lora = LoraConfig(r=step.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            # Fake parameters cannot be moved; adapters are where they belong, in the dtype that engines cast them to.
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module), local_torch_dtype(dtype):
                model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model, fake


def _dtype(step):
    return torch.float32 if step.autocast else getattr(torch, step.dtype)


def layers_of(model):
    """The decoder's largest list of modules: its owner, its name, and itself."""
    owned = [(o, name, c) for o in decoder_of(model).modules() for name, c in o.named_children()]
    lists = [found for found in owned if isinstance(found[2], torch.nn.ModuleList)]
    return max(lists, key=lambda found: sum(p.numel() for p in found[2].parameters()), default=(None, None, []))


def _are_alike(layers):
    def shape(layer):
        return [(type(module), [p.shape for p in module.parameters(recurse=False)]) for module in layer.modules()]

    return len(layers) > max(_RUN) and all(shape(layer) == shape(layers[0]) for layer in layers[1:])


def measure(model, fake, step: Step, whole=False) -> Measured:
    """Run a step of `build`'s result. `whole`: all layers and all tiles, however long that takes."""
    owner, name, layers = layers_of(model)
    if whole or not _are_alike(layers):
        return _measure(model, fake, step, whole)
    try:
        few = []
        for count in _RUN:
            setattr(owner, name, torch.nn.ModuleList(list(layers)[:count]))
            few.append(_measure(model, fake, step, whole))
    finally:
        setattr(owner, name, layers)
    two, three = few
    more = len(layers) - _RUN[1]
    each = {key: getattr(three, key) - getattr(two, key) for key in ("peak", "host", "sent", "flops")}
    return replace(three, **{key: getattr(three, key) + more * extra for key, extra in each.items()})


def _measure(model, fake, step, whole):
    vocabulary = model.config.get_text_config().vocab_size
    storage, memory = LiveStorage(width=vocabulary), step.memory.resolved()
    norms = [m for m in decoder_of(model).modules() if per_position._is_norm(m)] if step.liger else []
    if step.liger and step.trainer == "trainer":
        memory = replace(memory, tiled_loss=math.ceil(vocabulary / model.config.get_text_config().hidden_size))
    with ExitStack() as stack:
        # Engines reduce and drop a full gradient as soon as it is complete.
        for parameter in model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(_drop)
                stack.callback(handle.remove)
        for context in (fake_world(step.sp_size), *stand_ins(storage, step.attention, norms, step.trainer != "trainer")):
            stack.enter_context(context)
        sp = stack.enter_context(attach(model, trial=False))
        # Fake rows are equal by themselves, and nobody could read a checksum.
        sp.peers.judge = lambda *_: None
        handles = switch_on(model, memory, sp)
        stack.callback(lambda: [handle.remove() for handle in handles])
        stack.enter_context(_as_on_a_gpu(storage))
        if not whole:
            stack.enter_context(mock.patch.object(loss, "cut", _first_tiles(storage)))
        stack.enter_context(fake)
        rows = step.batch * (2 if step.trainer == "dpo" else 1)
        with_images = step.images or hasattr(model.config, "vision_config")
        if with_images:
            stack.enter_context(WholeNumbers())
        batch = {"input_ids": torch.zeros(rows, step.length, dtype=torch.long)}
        batch["labels"] = batch["input_ids"]
        if with_images:
            batch |= image_batch(model, batch["input_ids"], step.images, step.image_tokens, _dtype(step))
        stack.enter_context(storage)
        storage.ignore([*model.parameters(), *model.buffers(), *batch.values()])
        run(model, batch, step)
    host = sum(handle.host.allocated for handle in handles if hasattr(handle, "host"))
    return Measured(storage.peak, storage.logits_at_peak, host, storage.sent, storage.flops)


def run(model, batch, step):
    """Forward and backward of whole rows, as the Trainer does them: the one place that knows how a batch goes into a model."""
    fused = {"fused_lm_head": True} if step.trainer != "trainer" else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=step.autocast):
        if step.trainer == "dpo":
            with torch.no_grad():
                model(**batch, **fused)
        output = model(**batch, **fused)
        total = output.log_probs.sum() if step.trainer == "dpo" else output.loss
    # As the Trainer, which keeps its outputs in a local variable of a function that has returned.
    del output
    total.backward()


def _drop(parameter):
    parameter.grad = None


def _first_tiles(storage):
    cut = loss.cut

    def first(length, tiles):
        pieces = cut(length, tiles)
        storage.repeat = max(1.0, len(pieces) / _TILES)
        return pieces[:_TILES]

    return first


@contextmanager
def _as_on_a_gpu(storage):
    """Checkpoints on the host are not counted, and, as with a stream of its own, the last one that left still is."""
    buffer, keep, begin = offload.Host._buffer, offload.Host.keep, offload.Host.begin

    def elsewhere(host, tensor):
        with storage.elsewhere():
            return buffer(host, tensor)

    def leaving(host, tensor):
        host._leaving = tensor
        return keep(host, tensor)

    def arrive(host, kept):
        host._leaving = None
        return begin(host, kept)

    with mock.patch.multiple(offload.Host, _buffer=elsewhere, keep=leaving, begin=arrive):
        yield
