"""Losses that are computed outside of the model: label smoothing, `compute_loss_func`, an overridden `compute_loss`.

They shift by themselves: `logits[:, :-1]` against `labels[:, 1:]`, which on a shard would lose the target behind the cut.
One rule for all: while such a loss is computed, the labels are `[-100, *shift_labels]` and the logits get one dummy
position more, so that what they cut off is the dummy, and their sum over a shard's targets is exact.

What they do with `num_items_in_batch` and with the number of processes is their own affair, too; `LossRule` says what was
found out (startup.py), and `of_the_row` turns a shard's loss into what the engine has to average:

    counts, scales    sum / count * processes    Trainer's own way: as it is
    counts            sum / count                times sp_size: the same row is averaged over sp_size times as many ranks
                                                 (but as it is where the count was this rank's own, divided by sp_size)
    scales            mean * processes           processes are sp_size times as many: divided by sp_size, then as below
    neither           mean                       weighted with the shard's share of the row's targets (loss.py)
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..core.sequence import ROW_KEY
from ..core.entrance import IGNORE_INDEX


@dataclass(frozen=True)
class LossRule:
    """Whether a trainer's `compute_loss` divides by `num_items_in_batch`, and multiplies by the number of processes."""

    counts: bool = True
    scales: bool = True


def is_outside(trainer) -> bool:
    """Whether `trainer` may compute its loss from logits and labels, outside of the model."""
    if getattr(trainer, "label_smoother", None) is not None or getattr(trainer, "compute_loss_func", None) is not None:
        return True
    return type(trainer).compute_loss.__module__.partition(".")[0] not in ("transformers", "trl")


@contextmanager
def one_position_more(model, inputs):
    """Inside, `inputs["labels"]` and the logits of `model`, where it is called without labels, have a dummy position.

    Args:
        model (`torch.nn.Module`): the unwrapped model.
        inputs (`Mapping`): a sharded batch; changed inside the block.
    """
    labels, shift_labels = inputs.get("labels"), inputs.get("shift_labels")
    if labels is None or shift_labels is None:
        yield inputs
        return

    def give_labels_back(module, args, kwargs):
        # The model's own loss takes `shift_labels`; the labels beside them have to have its length.
        if kwargs.get("labels") is not None and kwargs.get(ROW_KEY) is not None:
            return args, {**kwargs, "labels": labels}

    def append(module, args, kwargs, output):
        logits = getattr(output, "logits", None)
        if torch.is_tensor(logits) and kwargs.get("labels") is None and logits.shape[1] == shift_labels.shape[1]:
            output.logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))

    handles = [
        # Before the hooks of the attachment, which take from the arguments what the forward has no parameter for.
        model.register_forward_pre_hook(give_labels_back, with_kwargs=True, prepend=True),
        model.register_forward_hook(append, with_kwargs=True),
    ]
    try:
        yield {**inputs, "labels": torch.nn.functional.pad(shift_labels, (1, 0), value=IGNORE_INDEX)}
    finally:
        for handle in handles:
            handle.remove()


def without_dummy(outputs, length):
    """Take the dummy position off the logits again."""
    logits = getattr(outputs, "logits", None)
    if torch.is_tensor(logits) and logits.dim() == 3 and logits.shape[1] == length + 1:
        outputs.logits = logits[:, :-1]
    return outputs


def of_the_row(loss, shift_labels, attachment, rule: LossRule, counted: bool, training: bool):
    """A shard's loss as the engine has to average it; in evaluation the row's loss on every rank. Collective.

    Args:
        loss (`torch.Tensor`): a scalar, what `compute_loss` returned for this shard.
        shift_labels (`torch.Tensor`): the shard's targets.
        rule (`LossRule`): how that loss is normalised. counted (`bool`): whether it got `num_items_in_batch` at all.
        training (`bool`): whether gradients are wanted.
    """
    if not counted or not rule.counts:
        scale = attachment.size if counted and rule.scales else 1
        return attachment.reduce_loss(loss / scale, shift_labels)
    if not rule.scales and attachment.counts_all_ranks:
        loss = loss * attachment.size
    if training:
        return loss
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=attachment.group)
    return loss / attachment.size
