"""Losses outside of the model that are declared to be sums over tokens, and are computed on shards therefore.

A loss of one's own needs no declaration to be exact: it is given whole rows, and logits of the whole row on every rank.
One that is a sum over tokens, divided by a count (or by the number of its tokens, where it gets none), can do without:

    @hf_ulysses.sums_over_tokens
    def loss(outputs, labels, num_items_in_batch=None):     # a Trainer's `compute_loss_func`
        ...

It is handed this shard's logits and `labels` that are shifted already: `labels[:, i]` is the target of `logits[:, i]`, -100
where there is none. On the first batches its value is compared with that of the whole row.
"""

import torch

from .cut import IGNORE_INDEX, cut_tensor, shifted
from .entrance import whole
from .exits import open_exit
from .loss import row_loss

_CHECKED = 2
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 3e-2


def sums_over_tokens(function):
    """Declare that `function(outputs, labels, num_items_in_batch)` is a sum over tokens over a count. Returns it."""
    function.sums_over_tokens = True
    return function


def is_declared(function) -> bool:
    return getattr(function, "sums_over_tokens", False)


class OnShards:
    """A declared loss as the whole row's: `(outputs of shards, labels of whole rows, count) -> loss`, equal on all ranks.

    Differentiable; collective over the attachment's group. `outputs` become whole when they are read afterwards.

    Raises:
        ValueError: on all ranks, when the shards' losses do not add up to the row's.
    """

    def __init__(self, function, attachment):
        self.function, self.attachment, self.calls = function, attachment, 0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        attachment, forward = self.attachment, self.attachment.last_forward
        targets = cut_tensor(shifted(labels), attachment.rank, attachment.size, IGNORE_INDEX)
        forward.count, forward.counted = (targets != IGNORE_INDEX).sum(), num_items_in_batch is not None
        loss = self.function(outputs, targets, num_items_in_batch=num_items_in_batch)
        loss = row_loss(loss, forward, attachment)
        forward.exit = "loss"
        self.calls += 1
        if self.calls <= _CHECKED:
            self._compare(loss, outputs, labels, num_items_in_batch)
        open_exit(attachment, forward, outputs)
        return loss

    @torch.no_grad()
    def _compare(self, loss, outputs, labels, num_items_in_batch):
        logits = whole(outputs["logits"].detach(), self.attachment.last_forward.row, self.attachment)
        expected = self.function(type(outputs)(logits=logits), shifted(labels), num_items_in_batch=num_items_in_batch)
        half = logits.dtype in (torch.bfloat16, torch.float16)
        error = float((loss - expected).abs() / expected.abs().clamp(min=1e-6))
        if error > (_TOLERANCE_HALF if half else _TOLERANCE):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise ValueError(
                f"{name} is declared to sum over tokens, but its shards' values give {float(loss):.6g} where the whole row has "
                f"{float(expected):.6g}. Divide a sum over targets by num_items_in_batch, do not shift `labels` (they are), or "
                "take hf_ulysses.sums_over_tokens away: undeclared it is given whole rows."
            )
