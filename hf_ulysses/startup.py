"""The start-up check: before the first step, a short row sharded against the same row whole.

Through the trainer's own `compute_loss`, on the user's own model under its engine, without gradients:

1. Every rank computes its shard's loss twice: from the sharded row, and from the whole row with all targets of other
   shards masked. They must agree on every rank: a model that mixes positions outside attention, whose attention
   bypasses the exchange, or whose head shifts labels by itself is caught here, whatever it is called.
2. The shards' losses together must give the whole row's: a loss that is normalised in another way than assumed is
   caught here.

It finds forward faults; gradients are the tests' business.
"""

import copy

import torch
import torch.distributed as dist

from .row import ROW_KEY
from .sharding import IGNORE_INDEX

_TOKENS_PER_SHARD = 16
# Reordered sums of a few dozen float32 losses differ by about 1e-6 relative; a fault (a lost target, a dropped mask)
# moves the loss of 16 targets by percents. Half precision rounds at 1e-2.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 3e-2


def check_first_step(trainer, attachment, model, inputs) -> None:
    """Compare sharded and whole. Collective over all ranks.

    Args:
        trainer (`transformers.Trainer`): its `compute_loss` is called, on a copy that keeps the trainer's state as is.
        attachment (`Attachment`): of the trainer's model.
        model (`torch.nn.Module`): the prepared model, as `training_step` gets it.
        inputs (`Mapping`): the first batch, full rows, on the device.

    Raises:
        ValueError: on all ranks, when any rank finds a difference.
    """
    if not torch.is_tensor(inputs.get("input_ids")):
        return
    batch, whole, count = _rows(inputs["input_ids"], attachment)
    if trainer._get_num_items_in_batch([batch], batch["input_ids"].device) is None:
        count = None
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            before = attachment.exchanges
            part = attachment.shard(batch)
            shift_labels = part["shift_labels"]
            sharded = _loss(trainer, model, part, count)
            exchanges = attachment.exchanges - before
            alone = _loss(trainer, model, whole, count)
            together = _loss(trainer, model, batch, count)
    finally:
        model.train(training)

    if count is None:
        combined = attachment.reduce_loss(sharded, shift_labels)
    else:
        combined = sharded.clone()
        dist.all_reduce(combined, group=attachment.group)
    worst = torch.stack([_difference(sharded, alone), _difference(combined, together), -torch.tensor(float(exchanges))])
    worst = worst.to(sharded.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    _judge(trainer, attachment, worst.tolist(), _is_half(trainer, model))


def _rows(input_ids, attachment):
    """A short row with labels, the same with only this shard's targets, and the number of targets of the former."""
    shard = _TOKENS_PER_SHARD
    length = shard * attachment.size
    ids = input_ids[:1].repeat(1, -(-length // input_ids.shape[1]))[:, :length].contiguous()
    labels = ids.clone()
    # Uneven targets, so that a mean of means shows.
    labels[:, 3 : shard + 1 : 2] = IGNORE_INDEX
    mine = torch.full_like(labels, IGNORE_INDEX)
    own = slice(attachment.rank * shard + 1, (attachment.rank + 1) * shard + 1)
    mine[:, own] = labels[:, own]
    count = (labels[:, 1:] != IGNORE_INDEX).sum().float()
    return {"input_ids": ids, "labels": labels}, _with_positions(ids, mine), count


def _with_positions(ids, labels):
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def _loss(trainer, model, inputs, count):
    """`compute_loss` on a copy of the trainer whose counters and metrics are its own."""
    copied = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if name.startswith("_") and isinstance(value, (dict, list)):
            try:
                setattr(copied, name, copy.deepcopy(value))
            except Exception:  # noqa: BLE001 - what cannot be copied holds no metrics
                pass
    kwargs = {} if count is None else {"num_items_in_batch": count}
    inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    loss = copied.compute_loss(model, inputs, **kwargs)
    return loss.detach().float().reshape(())


def _difference(one, other):
    difference = (one - other).abs() / other.abs().clamp(min=1e-6)
    return difference.nan_to_num(nan=float("inf")).cpu()


def _is_half(trainer, model):
    mixed = getattr(trainer.accelerator, "mixed_precision", "no") in ("bf16", "fp16", "fp8")
    return mixed or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


def _judge(trainer, attachment, worst, half):
    shard_error, row_error, fewest = worst
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE
    name = type(trainer.model).__name__
    what_to_do = (
        "Train this model without sequence parallelism, or switch the check off with "
        "SequenceParallelConfig(startup_check=False) if you know better."
    )
    if shard_error > tolerance:
        bypass = " No attention call went through the exchange." if fewest == 0 else ""
        raise ValueError(
            f"Start-up check: the loss of a shard differs from the same targets' loss in the whole row by "
            f"{shard_error:.2e} relative (allowed {tolerance:.0e}), for {name} over sp_size={attachment.size}.{bypass} "
            "The model mixes positions outside the attention interface, builds its own masks or positions, or shifts "
            f"labels in its own head. {what_to_do}"
        )
    if row_error > tolerance:
        raise ValueError(
            f"Start-up check: the shards' losses add up to another loss than the whole row's, by {row_error:.2e} relative "
            f"(allowed {tolerance:.0e}), for {type(trainer).__name__} with {name} over sp_size={attachment.size}. "
            "compute_loss normalises in a way that does not split over shards: divide a sum over targets by "
            f"num_items_in_batch. {what_to_do}"
        )


__all__ = ["ROW_KEY", "check_first_step"]
