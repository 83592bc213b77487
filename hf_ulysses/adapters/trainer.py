"""Wrappers around the Transformers Trainer. Its batches, losses and metrics are whole rows, and its code is left alone:
the counts that depend on how often a row is read are put right, and evaluation says when only the loss is wanted.
"""

import functools
import inspect
from contextlib import contextmanager
from pathlib import Path

import torch

from ..core import declared
from ..core.models import check_model
from . import support, trl
from .accelerate import attach_model
from .config import requested
from .replicas import among_replicas, counting_replicas, share_randomness, sp_group, view_of

# Where a trainer runs models, counts and compares; those that it has. Not where it saves: FSDP's files are by rank.
_AMONG_REPLICAS = ("training_step", "prediction_step", "compute_loss", "compute_ref_log_probs", "evaluate", "predict")
_AMONG_REPLICAS += ("_get_num_items_in_batch", "_track_num_input_tokens")


_SIZE = ("world_size",)


def view_of_trainer(trainer):
    return view_of(getattr(trainer, "accelerator", None))


def wrap_arguments(original):
    @functools.wraps(original)
    def __post_init__(self, *args, **kwargs):
        if requested(self.parallelism_config) is not None:
            support.check_arguments(self)
        original(self, *args, **kwargs)

    return __post_init__


def wrap_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        view = view_of_trainer(self)
        if view is not None:
            support.check_trainer(self)
            check_model(self.model, view.sp_size)
            for name in _AMONG_REPLICAS:
                if hasattr(self, name):
                    setattr(self, name, among_replicas(self, getattr(self, name)))
            self.compute_loss = _with_declared_loss(self, self.compute_loss)
            self.store_flos = _of_replicas(self, self.store_flos)
            # A sampler that balances batches over ranks, and the number of steps of an evaluation, count ranks by these.
            for name, counts in (("_get_train_sampler", ("world_size", "process_index")), ("evaluate", _SIZE), ("predict", _SIZE)):
                setattr(self, name, _with_counts_of_replicas(self, getattr(self, name), counts))
            trl.adopt(self)

    return __init__


def _with_counts_of_replicas(trainer, method, counts):
    """A method of one trainer to which properties of its arguments that count ranks count replicas."""

    @functools.wraps(method)
    def method_with_counts(*args, **kwargs):
        with counting_replicas(trainer.args, view_of_trainer(trainer).sp_size, *counts):
            return method(*args, **kwargs)

    return method_with_counts


def _of_replicas(trainer, store_flos):
    """The sum over ranks of the operations that each has counted for its whole row."""

    @functools.wraps(store_flos)
    def store_flos_of_replicas():
        trainer.current_flos /= view_of_trainer(trainer).sp_size
        store_flos()

    return store_flos_of_replicas


def _with_declared_loss(trainer, compute_loss):
    """`compute_loss`, with a declared loss (core/declared.py), or the Trainer's label smoothing, computed on shards."""

    @functools.wraps(compute_loss)
    def compute_declared_loss(*args, **kwargs):
        with _declared(trainer):
            return compute_loss(*args, **kwargs)

    return compute_declared_loss


@contextmanager
def _declared(trainer):
    function = trainer.compute_loss_func
    if function is None and trainer.label_smoother is not None and _shifts(trainer):
        smoother = trainer.label_smoother
        function = declared.sums_over_tokens(lambda outputs, labels, **kwargs: smoother(outputs, labels, **kwargs))
    is_upstreams = type(trainer).compute_loss.__module__ == "transformers.trainer"
    if not is_upstreams or not declared.is_declared(function):
        yield
        return
    attachment = attach_model(trainer.accelerator, trainer.model)
    if not attachment.splits_loss:
        yield  # A head that needs whole rows gives whole rows.
        return
    held = trainer.compute_loss_func
    if not hasattr(trainer, "_ulysses_loss"):
        trainer._ulysses_loss = declared.OnShards(function, attachment)
    trainer.compute_loss_func, attachment.shards_wanted = trainer._ulysses_loss, True
    try:
        yield
    finally:
        trainer.compute_loss_func, attachment.shards_wanted = held, False


def _shifts(trainer) -> bool:
    """Whether the Trainer shifts labels for its label smoothing: it knows so by the name of the model's class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def wrap_total_batch_size(original):
    @functools.wraps(original)
    def get_total_train_batch_size(self, args):
        total, view = original(self, args), view_of_trainer(self)
        return total if view is None else total // view.sp_size

    return get_total_train_batch_size


def wrap_sp_size(original):
    @functools.wraps(original)
    def get_sp_size(self):
        # One, as the Trainer's arithmetic means it: "how often is a batch of the loader used".
        return original(self) if view_of_trainer(self) is None else 1

    return get_sp_size


def wrap_load_rng_state(original):
    @functools.wraps(original)
    def _load_rng_state(self, checkpoint):
        original(self, checkpoint)
        if view_of_trainer(self) is not None and checkpoint is not None:
            share_randomness(sp_group(self.accelerator))

    return _load_rng_state


def wrap_evaluation_loop(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluation_loop(self, *args, **kwargs):
        if view_of_trainer(self) is None:
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        support.check_evaluation(self, arguments["dataloader"])
        asked = arguments.get("prediction_loss_only")
        attachment = attach_model(self.accelerator, self.model)
        attachment.loss_only = self.args.prediction_loss_only if asked is None else asked
        try:
            return original(self, *args, **kwargs)
        finally:
            attachment.loss_only = False

    return evaluation_loop


def wrap_deepspeed_config(original):
    @functools.wraps(original)
    def trainer_config_process(self, args, *rest, **kwargs):
        view = requested(args.parallelism_config)
        if view is not None:
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
            # Both ways of counting are in use; DeepSpeed derives its own when none is given.
            if self.config.get("train_batch_size") in (rows * args.world_size, rows * args.world_size // view.sp_size):
                self.config.pop("train_batch_size")
        return original(self, args, *rest, **kwargs)

    return trainer_config_process


def wrap_load_checkpoint(original):
    @functools.wraps(original)
    def deepspeed_load_checkpoint(deepspeed_engine, checkpoint_path, *args, **kwargs):
        _check_partitions(Path(checkpoint_path), torch.distributed.get_world_size())
        return original(deepspeed_engine, checkpoint_path, *args, **kwargs)

    return deepspeed_load_checkpoint


def _check_partitions(checkpoint: Path, ranks: int) -> None:
    """ZeRO's optimizer states are cut over all ranks, sequence ranks too: another number needs another format."""
    latest = checkpoint / "latest"
    if not latest.is_file():
        return
    saved = len(list((checkpoint / latest.read_text().strip()).glob("*optim_states.pt")))
    if saved > 1 and saved != ranks:
        raise ValueError(
            f"{checkpoint} was saved under ZeRO by {saved} processes and cannot be resumed by {ranks}. Resume with {saved} "
            "processes (any sp_size that divides them), or convert it with DeepSpeed's universal checkpoint "
            "(deepspeed.checkpoint.ds_to_universal) and load that with load_universal in the DeepSpeed configuration."
        )
