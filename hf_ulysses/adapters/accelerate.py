"""Wrappers around Accelerate: one process mesh, loaders split over data-parallel ranks, models attached in `prepare`.

Each function takes the original and returns its replacement; `patches.py` says where they go and why. An `Accelerator`
with sequence parallelism carries its `StateView` as `_ulysses`; all others are passed straight through.
"""

import functools
import inspect
import sys
import weakref
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

from ..core.attachment import Attachment, attach, attachment_of
from ..core.cut import shard_batch
from ..memory import switch_on
from .config import StateView, memory_settings, requested, upstream_backends
from .replicas import Replicas, share_randomness, shared_view, sp_group, view_of

# The accelerator whose `prepare_data_loader` runs: the function it calls gets no reference to it.
_preparing: ContextVar = ContextVar("ulysses_preparing", default=None)


def attach_model(accelerator, model) -> Attachment:
    """Attach `model`, or return the attachment of it or of what it wraps."""
    for module in model.modules():
        if attachment_of(module) is not None:
            return attachment_of(module)
    view = view_of(accelerator)
    if view.attention_to_set is not None and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(view.attention_to_set)
    options = dict(seq_length=view.seq_length, trial=view.trial, memory=view.memory_settings)
    attachment = attach(model, sp_group(accelerator), under_engine=True, **options)
    if accelerator.is_main_process:
        _say_once(accelerator, model)
        attachment.on_first_step = functools.partial(_say_exit, attachment)
    return attachment


# Models whose rows nobody shares, with the handles of their memory switches.
_alone: "weakref.WeakKeyDictionary[torch.nn.Module, list]" = weakref.WeakKeyDictionary()


def _save_memory(accelerator, model):
    """The memory switches without sequence parallelism; until `disable()`."""
    settings = memory_settings(getattr(accelerator.state.parallelism_config, "sp_handler", None))
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not str(settings) or inner in _alone:
        return
    _alone[inner] = switch_on(inner, settings)
    if accelerator.is_main_process:
        print(f"hf_ulysses: sequence parallelism off{settings}", file=sys.stderr, flush=True)


def forget_memory() -> None:
    while _alone:
        for handle in _alone.popitem()[1]:
            handle.remove()


def _say_once(accelerator, model):
    view = view_of(accelerator)
    if getattr(view, "_said", False):
        return
    view._said = True
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    also = f" | accelerate's own {view.sp_backend!r} backend is not used" * (view.sp_backend in upstream_backends())
    also += " | evaluation is sharded, too" * bool(getattr(view.sp_handler, "sp_disable_in_eval", False))
    print(
        f"hf_ulysses: sequence parallelism on | dp_replicate {view.dp_replicate_size} x dp_shard {view.dp_shard_size} x "
        f"sp {view.sp_size} = {accelerator.num_processes} ranks | {engine_name(accelerator)} | attention {attention} | "
        f"rows padded to a multiple of {view.sp_size}{also}{view.memory_settings}",
        file=sys.stderr,
        flush=True,
    )


def _say_exit(attachment, forward, output):
    """What the head of a model costs on each rank, by the shapes of its first training step."""
    logits = output.get("logits") if isinstance(output, dict) else None
    size, row = 0 if logits is None else logits.nbytes / 2**30, forward.row
    if forward.in_shards:
        said = f"{forward.exit.replace('hidden', 'shards')} exit, the head computes shards: logits {size:.3g} GiB per rank"
        said += f", {size * attachment.size:.3g} GiB where they are read" * (forward.exit == "loss" and forward.given is None)
    else:
        said = f"hidden exit, the head computes whole rows: hidden states {forward.bytes / 2**30:.3g} GiB"
        said += f" and logits {size:.3g} GiB per rank"
        if attachment.splits_loss:
            said += "; a compute_loss_func that sums over tokens can be declared: @hf_ulysses.sums_over_tokens"
    print(f"hf_ulysses: {row.position_ids.shape[-2]} x {row.length} tokens | {said}", file=sys.stderr, flush=True)


def engine_name(accelerator) -> str:
    if accelerator.distributed_type == "DEEPSPEED":
        return f"DeepSpeed ZeRO-{_zero(accelerator).get('stage', 0)}"
    return "FSDP2" if accelerator.distributed_type == "FSDP" else "DDP"


def _zero(accelerator) -> dict:
    return accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})


# -- DeepSpeed's configuration --------------------------------------------------------------------------------------------


def check_deepspeed_config(accelerator) -> None:
    """Refuse what DeepSpeed would ignore or do twice; honour a documented key that is dead without an `mpu`."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    for key in ("sequence_parallel", "sequence_parallel_size"):
        if config.get(key):
            raise ValueError(
                f"The DeepSpeed configuration holds {key!r}: {config[key]!r}, DeepSpeed's own sequence parallelism. "
                "Remove it: sp_size in the parallelism config is all that hf_ulysses needs."
            )
    if (config.get("tensor_parallel") or {}).get("autotp_size", 1) > 1:
        raise ValueError(
            f"The DeepSpeed configuration holds 'tensor_parallel': {config['tensor_parallel']!r}. Sequence parallelism combines "
            "with data parallelism only: remove it, or set autotp_size to 1."
        )
    offload = (_zero(accelerator).get("offload_param") or {}).get("device", "none")
    if _zero(accelerator).get("stage", 0) != 3 and offload != "none":
        raise ValueError(
            f"offload_param to {offload!r} needs ZeRO-3; at stage {_zero(accelerator).get('stage', 0)} DeepSpeed ignores "
            "it silently. Set zero_stage 3, or remove offload_param (offload_param_device: none)."
        )
    if (dtype := config.get("seq_parallel_communication_data_type")) is not None:
        config.setdefault("communication_data_type", dtype)


def _drop_batch_size(accelerator) -> None:
    # Rows per step are micro * accumulation * dp here, but DeepSpeed asserts micro * accumulation * world, and derives
    # it when it is not given. Nothing that is computed depends on it.
    accelerator.deepspeed_plugin.deepspeed_config.pop("train_batch_size", None)


# -- wrappers -------------------------------------------------------------------------------------------------------------


def wrap_init(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        view = requested(bound.arguments.get("parallelism_config"))
        if view is not None:
            bound.arguments["parallelism_config"] = view
        original(*bound.args, **bound.kwargs)
        if view is not None and self.state.parallelism_config is not view:
            # The state is shared by all accelerators of a process, and the first one has filled it.
            self.state.parallelism_config = view
            self.state.device_mesh = view.get_device_mesh(self.device.type)
            view._validate_accelerator(self)
        held = self.state.parallelism_config
        self._ulysses = held if isinstance(held, StateView) else None
        if self._ulysses is not None:
            if self.split_batches or self.dispatch_batches:
                option = "split_batches" if self.split_batches else "dispatch_batches"
                raise ValueError(
                    f"{option}=True is not supported with sequence parallelism: every rank of a sequence-parallel group "
                    f"reads its rows itself. Set {option}=False."
                )
            if self.distributed_type == "DEEPSPEED":
                check_deepspeed_config(self)

    return __init__


def wrap_prepare(original):
    @functools.wraps(original)
    def prepare(self, *args, **kwargs):
        models = [obj for obj in args if isinstance(obj, torch.nn.Module)]
        if view_of(self) is None:
            for model in models:
                _save_memory(self, model)
            return original(self, *args, **kwargs)
        if models and getattr(self.state.dynamo_plugin, "use_regional_compilation", False):
            raise ValueError(
                "use_regional_compilation copies the model around its layers, where sequence parallelism has its hooks. Set "
                "it to False: the whole model can be compiled."
            )
        attachments = [attach_model(self, model) for model in models]
        deepspeed = self.distributed_type == "DEEPSPEED"
        if deepspeed:
            check_deepspeed_config(self)
            _drop_batch_size(self)
        with _hidden(self) if deepspeed else nullcontext(), _steps_of_replicas(self, args):
            result = original(self, *args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for model, prepared in zip(args, results):
            if isinstance(model, torch.nn.Module):
                _tried(self, attach_model(self, model), prepared)
        for obj in results if attachments else ():
            if isinstance(obj, torch.utils.data.DataLoader):
                yield_shards(obj, attachments[0])
                self._yields_shards = True
        return result

    return prepare


def attach_prepared(accelerator, model, prepared) -> None:
    """Attach `model`, which runs as `prepared`, and try it. Collective."""
    _tried(accelerator, attach_model(accelerator, model), prepared)


def _tried(accelerator, attachment, prepared):
    """Before the first step, and outside of any forward: a short row through the model as the engine runs it."""
    attachment.inside(prepared)
    if hasattr(prepared, "_orig_mod"):
        # FSDP2 shards the compiled model, so that the model alone has no root.
        attachment.entry = weakref.ref(prepared)
    attachment.locate(accelerator.device)
    for module in prepared.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # FSDP2 keeps its root whole until backward, and checkpoints are loaded into shards.


@contextmanager
def _hidden(accelerator):
    """`_prepare_deepspeed` reads `sp_size` rather than `sp_enabled`: without a configuration it does plain ZeRO."""
    view, accelerator.state.parallelism_config = accelerator.state.parallelism_config, None
    try:
        yield
    finally:
        accelerator.state.parallelism_config = view


@contextmanager
def _steps_of_replicas(accelerator, prepared):
    """DeepSpeed's scheduler is told its steps divided by the number of processes: inside they are as many more."""
    from accelerate.utils import DummyScheduler

    dummies = [obj for obj in prepared if isinstance(obj, DummyScheduler) and obj.total_num_steps is not None]
    counts = [dummy.total_num_steps for dummy in dummies]
    for dummy in dummies:
        dummy.total_num_steps *= view_of(accelerator).sp_size
    try:
        yield
    finally:
        for dummy, count in zip(dummies, counts):
            dummy.total_num_steps = count


class _ShardingCollate:
    """A collate function followed by `shard_batch`; picklable, for worker processes."""

    def __init__(self, collate, rank, size, seq_length):
        self.collate, self.rank, self.size, self.seq_length = collate, rank, size, seq_length

    def __call__(self, features):
        return shard_batch(self.collate(features), self.rank, self.size, self.seq_length)


def yield_shards(loader, attachment):
    """Make a prepared loader yield this rank's parts. Composes the collate function, so that whatever builds another
    loader from this one (`skip_first_batches`) shards too. Returns the loader."""
    attachment.locate()
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base.collate_fn, _ShardingCollate):
        base.collate_fn = _ShardingCollate(base.collate_fn, attachment.rank, attachment.size, attachment.seq_length)
    return loader


def wrap_dl_adapter(original):
    @functools.wraps(original)
    def deepspeed_ulysses_dl_adapter(self, dl, model):
        if view_of(self) is None:
            return original(self, dl, model)
        return yield_shards(dl, attach_model(self, model))

    return deepspeed_ulysses_dl_adapter


def wrap_prepare_data_loader_method(original):
    @functools.wraps(original)
    def prepare_data_loader(self, *args, **kwargs):
        token = _preparing.set(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _preparing.reset(token)

    return prepare_data_loader


def wrap_prepare_data_loader_function(original):
    @functools.wraps(original)
    def prepare_data_loader(*args, **kwargs):
        view = view_of(_preparing.get())
        if view is not None:
            kwargs["num_processes"] //= view.sp_size
            kwargs["process_index"] //= view.sp_size
            # With a mesh the function would count data-parallel ranks by itself, without knowing of "sp"; and an
            # iterable dataset would be read by rank 0 and dispatched in as many slices as there are processes.
            kwargs["torch_device_mesh"] = None
            kwargs["dispatch_batches"] = False
        loader = original(*args, **kwargs)
        if view is not None:
            _seed_workers_alike(getattr(loader, "base_dataloader", loader), kwargs["process_index"])
        return loader

    return prepare_data_loader


def _seed_workers_alike(loader, dp_rank):
    """The Trainer seeds loader workers with `seed_worker(num_workers=..., rank=process_index)`: peers have to draw alike."""
    init = loader.worker_init_fn
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        loader.worker_init_fn = functools.partial(init.func, *init.args, **{**init.keywords, "rank": dp_rank})


def wrap_gather_for_metrics(original):
    @functools.wraps(original)
    def gather_for_metrics(self, input_data, *args, **kwargs):
        return original(self if view_of(self) is None else Replicas(self), input_data, *args, **kwargs)

    return gather_for_metrics


def wrap_load_state(original):
    @functools.wraps(original)
    def load_state(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if view_of(self) is not None:
            share_randomness(sp_group(self))
        return result

    return load_state


def wrap_local_sgd(original):
    @functools.wraps(original)
    def __init__(self, accelerator, *args, **kwargs):
        original(self, accelerator, *args, **kwargs)
        if view_of(accelerator) is not None and self.enabled:
            raise ValueError(
                "LocalSGD lets every rank step by itself, with the gradient of its shard of the row alone. With sequence parallelism "
                "gradients are averaged in every step: pass enabled=False, or set sp_size=1."
            )

    return __init__


# -- deepspeed.utils.groups and torch.distributed.nn, which documented training loops call -------------------------------


def shared_sp_group():
    """The sequence-parallel group of this process's accelerators, `None` without."""
    from accelerate.state import AcceleratorState

    return None if shared_view() is None else AcceleratorState._shared_state["device_mesh"]["sp"].get_group()


def _answer(original, value_of_group):
    @functools.wraps(original)
    def getter():
        # `None` too while the engine is built (`_hidden`): DeepSpeed itself must go on believing in plain ZeRO.
        group = shared_sp_group()
        return original() if group is None else value_of_group(group)

    return getter


def wrap_group_getter(original):
    return _answer(original, lambda group: group)


def wrap_rank_getter(original):
    return _answer(original, torch.distributed.get_rank)


def wrap_world_size_getter(original):
    return _answer(original, torch.distributed.get_world_size)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        total = torch.stack(grads)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[torch.distributed.get_rank(ctx.group)], None


def wrap_all_gather(original):
    @functools.wraps(original)
    def all_gather(tensor, group=None):
        if group is None or torch.distributed.get_backend(group) != "gloo":
            return original(tensor) if group is None else original(tensor, group)
        return _AllGather.apply(tensor, group)

    return all_gather
