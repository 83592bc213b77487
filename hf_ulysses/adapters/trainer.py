"""Wrappers around the Transformers Trainer: shard in `_prepare_inputs`, count once, normalise, evaluate in shards.

The Trainer counts the targets of a step on full rows, then `_prepare_inputs` shards; the model returns (sum over this
shard's targets) / (targets of the step), and the Trainer multiplies by the number of processes, over which the engine
averages. So training needs no other change. Where no count reaches the loss (it is a mean over the shard's targets),
`reduce_loss` weights it; in evaluation the group's parts are added up, and logits, where asked for, gathered.
"""

import functools
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from . import outside_loss
from . import support
from .config import requested
from .accelerate import attach_model, gathering_rows, share_randomness, sp_group, view_of
from ..core.sequence import ROW_KEY
from ..core.entrance import is_sharded
from .startup import check_first_step


def view_of_trainer(trainer):
    return view_of(getattr(trainer, "accelerator", None))


def attachment_of_trainer(trainer):
    attachment = attach_model(trainer.accelerator, trainer.model)
    attachment.counts_all_ranks = trainer.args.average_tokens_across_devices
    return attachment


def wrap_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        view = view_of_trainer(self)
        if view is not None:
            support.check_trainer(self, counts_input_tokens())
            support.check_model(self.model, view.sp_size)

    return __init__


def wrap_prepare_inputs(original):
    @functools.wraps(original)
    def _prepare_inputs(self, inputs):
        inputs = original(self, inputs)
        if view_of_trainer(self) is None or is_sharded(inputs):
            return inputs
        return attachment_of_trainer(self).shard(inputs)

    return _prepare_inputs


def wrap_count(original):
    @functools.wraps(original)
    def _get_num_items_in_batch(self, batch_samples, device):
        count = original(self, batch_samples, device)
        view = view_of_trainer(self)
        if view is None or count is None:
            return count
        if not all(is_sharded(batch) for batch in batch_samples):
            # Full rows, which every rank of a group has counted.
            count = count / view.sp_size
        # No target in the whole step: zero loss instead of 0 / 0. A share of one target is less than one.
        return count + (count == 0)

    return _get_num_items_in_batch


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


def counts_input_tokens() -> bool:
    """Whether the Trainer counts input tokens in a method of its own (since transformers 5.2), so that it can be put right.

    Where it does not, `support.check_trainer` refuses `include_num_input_tokens_seen`.
    """
    from transformers import Trainer

    return "_track_num_input_tokens" in vars(Trainer)


def wrap_track_tokens(original):
    @functools.wraps(original)
    def _track_num_input_tokens(self, inputs):
        before, view = self.state.num_input_tokens_seen, view_of_trainer(self)
        original(self, inputs)
        if view is not None:
            # Gathered over all ranks, each row of which sp_size ranks have counted whole.
            self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // view.sp_size

    return _track_num_input_tokens


def wrap_training_step(original):
    @functools.wraps(original)
    def training_step(self, model, inputs, *args, **kwargs):
        view = view_of_trainer(self)
        if view is None:
            return original(self, model, inputs, *args, **kwargs)
        attachment = attachment_of_trainer(self)
        _check_once(self, attachment, model, inputs)
        with _loss_of_the_row(self, attachment), _noise_of_the_row(self, inputs), attachment.own_randomness():
            return original(self, model, inputs, *args, **kwargs)

    return training_step


def _check_once(trainer, attachment, model, inputs):
    if attachment.checked:
        return
    full = trainer._prepare_input(inputs)
    if not is_sharded(full):
        # Compares the rows of peers, then finds out which modules need them whole: before anything is judged.
        attachment.shard(full)
    if view_of_trainer(trainer).startup_check:
        attachment.loss_rule = check_first_step(trainer, attachment, model, full)
    attachment.checked = True


def wrap_load_rng_state(original):
    @functools.wraps(original)
    def _load_rng_state(self, checkpoint):
        original(self, checkpoint)
        if view_of_trainer(self) is not None and checkpoint is not None:
            share_randomness(sp_group(self.accelerator))

    return _load_rng_state


@contextmanager
def _noise_of_the_row(trainer, inputs):
    """NEFTune scales its noise with alpha / sqrt(tokens * size) of what it sees, a shard: alpha such that it is the row's."""
    embeddings = trainer.model.get_input_embeddings() if hasattr(trainer.model, "get_input_embeddings") else None
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    if alpha is None or is_sharded(inputs):
        yield
        return
    length, size = inputs["input_ids"].shape[1], view_of_trainer(trainer).sp_size
    embeddings.neftune_noise_alpha = alpha * (-(-length // size) / length) ** 0.5
    try:
        yield
    finally:
        embeddings.neftune_noise_alpha = alpha


@contextmanager
def _overridden(instance, name, function):
    """Shadow a method on one instance, whatever its subclass made of it."""
    if name in vars(instance):
        raise RuntimeError(f"hf_ulysses: {type(instance).__name__}.{name} is overridden on the instance already.")
    setattr(instance, name, function)
    try:
        yield
    finally:
        delattr(instance, name)


def _loss_of_the_row(trainer, attachment):
    """Inside, `trainer.compute_loss` returns what the engine has to average; in evaluation the row's loss."""
    compute_loss = trainer.compute_loss
    outside = outside_loss.is_outside(trainer)

    @functools.wraps(compute_loss)
    def compute_row_loss(model, inputs, *args, **kwargs):
        shift_labels = inputs.get("shift_labels")
        with outside_loss.one_position_more(trainer.model, inputs) if outside else nullcontext(inputs) as inputs:
            result = compute_loss(model, inputs, *args, **kwargs)
        if shift_labels is None:
            raise ValueError(
                "This batch has no labels, so the shards' losses cannot be weighted by their targets. Add `labels` in "
                "the collator, or train without sequence parallelism."
            )
        counted = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None) is not None
        loss, *rest = result if isinstance(result, tuple) else (result,)
        loss = outside_loss.of_the_row(
            loss, shift_labels, attachment, attachment.loss_rule, counted, trainer.model.training
        )
        rest = [outside_loss.without_dummy(output, shift_labels.shape[1]) for output in rest]
        return (loss, *rest) if isinstance(result, tuple) else loss

    return _overridden(trainer, "compute_loss", compute_row_loss)


def wrap_evaluation_loop(original):
    @functools.wraps(original)
    def evaluation_loop(self, *args, **kwargs):
        if view_of_trainer(self) is None:
            return original(self, *args, **kwargs)
        attachment = attachment_of_trainer(self)
        with _loss_of_the_row(self, attachment), _whole_predictions(self, attachment), gathering_rows():
            return original(self, *args, **kwargs)

    return evaluation_loop


def _whole_predictions(trainer, attachment):
    """Inside, `trainer.prediction_step` returns whole rows of logits and labels where logits were asked for."""
    prediction_step = trainer.prediction_step

    @functools.wraps(prediction_step)
    def predict_rows(model, inputs, *args, **kwargs):
        if outside_loss.is_outside(trainer):
            # How such a loss is normalised has to be known; the model itself is checked in the first training step.
            _check_once(trainer, attachment, model, inputs)
        full = trainer._prepare_input({key: value for key, value in inputs.items() if key in trainer.label_names})
        part = trainer._prepare_inputs(inputs)
        loss, logits, labels = prediction_step(model, part, *args, **kwargs)
        if labels is not None:
            labels = tuple(full[name] for name in trainer.label_names)
            labels = labels[0] if len(labels) == 1 else labels
        return loss, _gather_rows(logits, part, attachment), labels

    return _overridden(trainer, "prediction_step", predict_rows)


def _gather_rows(nested, part, attachment):
    if isinstance(nested, (tuple, list)):
        return type(nested)(_gather_rows(item, part, attachment) for item in nested)
    shard = part[ROW_KEY].padded // attachment.size
    if torch.is_tensor(nested) and nested.dim() > 1 and nested.shape[1] == shard:
        return attachment.gather(nested, like=part)
    return nested


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
