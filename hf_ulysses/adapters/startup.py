"""The start-up check: before the first step, a short row sharded against the same row whole.

Through the trainer's own `compute_loss`, on the user's own model under its engine, without gradients. On every rank:

1. The hidden states of this shard's tokens are those of the whole row, token by token: a model that mixes positions
   outside attention, or whose attention bypasses the exchange, is caught here, whatever it is called.
2. As many attention calls go through the exchange, or lie in modules that run on the whole row, as the model makes in
   an unsharded run: attention that does not show yet (an output projection or a gate of zeros) is caught here.
3. The shard's loss is that of the whole row with all other shards' targets masked: a head that shifts labels by itself,
   or a loss that needs the whole row, is caught here.
4. The shards' losses together give the whole row's: a loss that is normalised in another way is caught here.

It finds forward faults; gradients are the tests' business. Not covered: models without `input_ids`.
"""

import copy
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from .outside_loss import LossRule, is_outside, of_the_row, one_position_more
from ..core.sequence import ROW_KEY
from ..core.entrance import IGNORE_INDEX, shard_batch

_TOKENS_PER_SHARD = 16
# Sums in another order differ by 1e-6 in float32, by a few percent over the layers of a deep model in half precision;
# a fault changes the tokens behind a cut by about their own size, and the loss of 16 targets by percents.
_HIDDEN, _HIDDEN_HALF = 1e-3, 1e-1
_LOSS, _LOSS_HALF = 1e-4, 3e-2


def check_first_step(trainer, attachment, model, inputs) -> None:
    """Compare sharded and whole. Collective over all ranks.

    Args:
        trainer (`transformers.Trainer`): its `compute_loss` is called, on a copy that keeps the trainer's state as is.
        attachment (`Attachment`): of the trainer's model.
        model (`torch.nn.Module`): the prepared model, as `training_step` gets it.
        inputs (`Mapping`): the first batch, full rows, on the device.

    Returns:
        `LossRule`: how the trainer's loss is normalised.

    Raises:
        ValueError: on all ranks, when any rank finds a difference.
    """
    if not torch.is_tensor(inputs.get("input_ids")):
        return LossRule()
    row, own, count = _rows(inputs["input_ids"], attachment)
    if trainer._get_num_items_in_batch([row], row["input_ids"].device) is None:
        count = None
    # Of a count of this rank's rows alone, every rank that works on one takes its share (in_trainer.py).
    share = count if count is None or attachment.counts_all_ranks else count / attachment.size
    part = shard_batch(row, attachment.rank, attachment.size)
    # First, or peers with different rows would look like a fault of the model.
    attachment.verify(part[ROW_KEY])
    # The model's own: DeepSpeed's engine says that it trains, whatever its module does.
    training = trainer.model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            before = attachment.exchanges + attachment.calls_on_whole_row
            sharded, hidden_sharded = _run(trainer, model, part, share)
            seen = attachment.exchanges + attachment.calls_on_whole_row - before
            before = attachment.direct_calls
            alone, hidden_whole = _run(trainer, model, own, share)
            made = attachment.direct_calls - before
            together, _ = _run(_with_processes(trainer, 1, attachment.size), model, row, count)
            rule = _rule(trainer, attachment, model, row, count, together)
    finally:
        model.train(training)

    # What evaluation reports for the row, against the same from one process of as many data-parallel ranks.
    combined = of_the_row(sharded, part["shift_labels"], attachment, rule, count is not None, training=False)
    # An auxiliary loss of the whole row's routers is in each shard's loss as this rank's share: judged by their sum alone.
    shard_error = torch.zeros(()) if hidden_whole.auxiliary else _error(sharded, alone)
    errors = [_token_error(hidden_sharded, hidden_whole, attachment), shard_error, _error(combined, together)]
    calls = [torch.tensor(float(number)) for number in (abs(seen - made), -seen, made)]
    worst = torch.stack([*errors, *calls]).to(sharded.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    _judge(trainer, attachment, worst.tolist())
    return rule


def _rule(trainer, attachment, model, row, count, together):
    """Find out what a loss of the user's own does with the count and with the number of processes, by doubling them."""
    if count is None or not is_outside(trainer):
        return LossRule()
    fewer, _ = _run(_with_processes(trainer, 1, attachment.size), model, row, 2 * count)
    more, _ = _run(_with_processes(trainer, 2, attachment.size), model, row, count)
    # Ratios, for a loss may be negative.
    return LossRule(counts=bool(fewer / together < 0.75), scales=bool(more / together > 1.5))


class _With:
    """An object with another value of one attribute; everything else is the object's."""

    def __init__(self, instance, name, value):
        self.__dict__.update(_instance=instance, **{name: value})

    def __getattr__(self, name):
        return getattr(self._instance, name)


def _with_processes(trainer, times, size):
    """A copy of the trainer that runs in `times / size` as many processes, as far as its arithmetic is concerned."""
    copied = copy.copy(trainer)
    copied.accelerator = _With(trainer.accelerator, "num_processes", trainer.accelerator.num_processes * times // size)
    copied.args = _With(trainer.args, "world_size", trainer.args.world_size * times // size)
    return copied


def _rows(input_ids, attachment):
    """A short row with labels, the same row with this shard's targets only, and the number of targets of the former."""
    shard = _TOKENS_PER_SHARD
    length = shard * attachment.size
    ids = input_ids[:1].repeat(1, -(-length // input_ids.shape[1]))[:, :length].contiguous()
    labels = ids.clone()
    # Uneven targets, so that a mean of means shows.
    labels[:, 3 : shard + 1 : 2] = IGNORE_INDEX
    mine = torch.full_like(labels, IGNORE_INDEX)
    # The target of a shard's last token is the next shard's first one.
    targets = slice(attachment.rank * shard + 1, (attachment.rank + 1) * shard + 1)
    mine[:, targets] = labels[:, targets]
    count = (labels[:, 1:] != IGNORE_INDEX).sum().float()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**given, "labels": labels}, {**given, "labels": mine}, count


def _run(trainer, model, inputs, count):
    """The loss and the last hidden states (or logits) of one `compute_loss`."""
    kwargs = {} if count is None else {"num_items_in_batch": count}
    outside = is_outside(trainer) and "shift_labels" in inputs
    with (
        _last_states(trainer.model) as states,
        one_position_more(trainer.model, inputs) if outside else nullcontext(dict(inputs)) as inputs,
    ):
        loss = _with_own_metrics(trainer).compute_loss(model, inputs, **kwargs)
    return loss.detach().float().reshape(()), states


def _with_own_metrics(trainer):
    """A copy of the trainer whose counters and metrics are its own."""
    copied = copy.copy(trainer)
    # While it evaluates, the trainer's own is shadowed by the row's.
    vars(copied).pop("compute_loss", None)
    for name, value in vars(trainer).items():
        if "metrics" in name and isinstance(value, (dict, list)):
            setattr(copied, name, copy.deepcopy(value))
    return copied


class _States(list):
    """What `_last_states` collects, and whether a model returned an auxiliary loss besides."""

    auxiliary = False


@contextmanager
def _last_states(model):
    """Collects, in order, the first tensor of every (inner) model's output: `last_hidden_state`, or logits."""
    states = _States()

    def keep(module, args, output):
        states.auxiliary |= torch.is_tensor(getattr(output, "aux_loss", None))
        found = getattr(output, "last_hidden_state", None)
        found = found if found is not None else getattr(output, "logits", None)
        if torch.is_tensor(found):
            states.append(found.detach())

    handles = [m.register_forward_hook(keep) for m in model.modules() if hasattr(m, "get_input_embeddings")]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _token_error(sharded, whole, attachment):
    """The largest difference of a token's states, relative to the largest norm of a token's."""
    if not sharded or not whole:
        return torch.tensor(0.0)
    part, full = sharded[0].float(), whole[0].float()
    mine = full[:, attachment.rank * part.shape[1] : (attachment.rank + 1) * part.shape[1]]
    error = (part - mine).norm(dim=-1).max() / full.norm(dim=-1).max().clamp(min=1e-12)
    return error.nan_to_num(nan=float("inf")).cpu()


def _error(one, other):
    error = (one - other).abs() / other.abs().clamp(min=1e-6)
    return error.nan_to_num(nan=float("inf")).cpu()


def _is_half(trainer):
    mixed = getattr(trainer.accelerator, "mixed_precision", "no") in ("bf16", "fp16", "fp8")
    return mixed or any(p.dtype in (torch.bfloat16, torch.float16) for p in trainer.model.parameters())


def _judge(trainer, attachment, worst):
    hidden, shard, row, uncounted, fewest, made = worst
    half = _is_half(trainer)
    hidden_tolerance, loss_tolerance = (_HIDDEN_HALF, _LOSS_HALF) if half else (_HIDDEN, _LOSS)
    name = f"{type(trainer.model).__name__} over sp_size={attachment.size}"
    found = None
    calls = f"{-fewest:.0f} of {made:.0f} saw the whole row"
    if hidden > hidden_tolerance:
        bypass = f" Of its attention calls, {calls}: attention bypasses the exchange." if uncounted or not made else ""
        found = (
            f"the hidden states of a shard of {name} differ from the whole row's by {hidden:.1e} of their norm (allowed "
            f"{hidden_tolerance:.0e}).{bypass} The model mixes positions outside the attention interface, or builds its "
            "own masks or positions."
        )
    elif uncounted:
        found = (
            f"of the attention calls of {name}, {calls}, through the exchange or in a module that is given it. The others "
            "attend within their shard, or are left out: the model loses the row's facts on the way."
        )
    elif shard > loss_tolerance:
        found = (
            f"the loss of a shard of {name} differs from that of the same targets in the whole row by {shard:.1e} "
            f"(allowed {loss_tolerance:.0e}). The head or the loss shifts labels by itself, or needs the whole row."
        )
    elif row > loss_tolerance:
        found = (
            f"the shards' losses of {name} add up to another loss than the whole row's, by {row:.1e} (allowed "
            f"{loss_tolerance:.0e}). {type(trainer).__name__}.compute_loss normalises in a way that does not split over "
            "shards: divide a sum over targets by num_items_in_batch."
        )
    if found:
        raise ValueError(
            f"Start-up check: {found} Train without sequence parallelism, or switch the check off with "
            "SequenceParallelConfig(startup_check=False) if you know better."
        )
