"""The exits of a decoder, as the head in front of it needs them. The first that fits:

    loss     labels are given and the head scores next tokens by `shift_labels`: head and loss run on the shard; the loss
             that comes out is the row's, equal on all ranks; logits become whole when somebody reads them (lazy.py)
    tokens   TRL's fused head (`fused_lm_head=True`): the same, and its per-token results are gathered at once
    hidden   anything else: the decoder's output is gathered (entrance.py), and what follows is one process's code

Labels are shifted on the whole row, so that the target behind a cut is scored by the shard in front of it. What is handed
to the head as `labels` beside `shift_labels` is blank: a head that used them would lose its loss, not a few targets.
"""

import inspect

import torch

from .cut import IGNORE_INDEX, cut_tensor, shifted
from .entrance import whole
from .gather import gather_sequence
from .lazy import whole_when_read
from .loss import row_loss
from .sequence import release
from .trees import leaves, tree_map

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def head_of(model):
    """The module whose forward takes labels, `None` where there is none."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            return module if "labels" in inspect.signature(type(module).forward).parameters else None
    return None


def scores_shift_labels(head) -> bool:
    """Whether `head` hands keyword arguments on to a loss function that takes `shift_labels`, as far as can be seen."""
    parameters = inspect.signature(type(head).forward).parameters.values()
    loss_function = getattr(head, "loss_function", None)
    return (
        isinstance(head.get_output_embeddings(), torch.nn.Module)
        and any(p.kind is p.VAR_KEYWORD for p in parameters)
        and callable(loss_function)
        and "shift_labels" in inspect.signature(loss_function).parameters
    )


class Exit:
    """The hooks around one attachment's head."""

    def __init__(self, attachment, head):
        self.attachment = attachment
        self.names = list(inspect.signature(type(head).forward).parameters)[1:]

    def enter(self, module, args, kwargs):
        forward = self.attachment.forward
        if forward is None or not self.attachment.owns(module):
            return None
        kwargs = {**dict(zip(self.names, args)), **kwargs}
        labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
        if forward.given is not None:
            shift_labels = forward.given.shift_labels if shift_labels is None else shift_labels
        targets = shift_labels if shift_labels is not None else labels
        if labels is None and shift_labels is None or not torch.is_tensor(targets):
            if self.attachment.shards_wanted:
                forward.exit = "shards"  # For a declared loss (declared.py).
            return (), kwargs
        if not self._splits(targets, kwargs):
            if forward.given is not None:
                # The head needs whole rows: labels as the user had them.
                row = forward.given
                kwargs["labels"] = gather_sequence(labels, self.attachment.group, 1, row.length).contiguous()
                kwargs.pop("shift_labels", None)
                forward.opened = True
            return (), kwargs
        forward.exit = "loss"
        if kwargs.get("fused_lm_head"):
            forward.exit = "tokens"
            # TRL calls no module to multiply by its weight. FSDP2 leaves a shard there where the head is a unit of its own (its
            # norm is not found), and the gradient of what TRL gathers from shards is one rank's.
            # (`bool` does nothing, where there is no FSDP2.)
            getattr(module.get_output_embeddings(), "unshard", bool)()
        forward.counted = kwargs.get("num_items_in_batch") is not None
        if forward.given is None:
            forward.length = targets.shape[1]
            # TRL's per-token results have no place for the last token where it shifts by itself.
            forward.fields = forward.length - (shift_labels is None)
            shift_labels = shifted(labels) if shift_labels is None else shift_labels
            shift_labels = cut_tensor(shift_labels, self.attachment.rank, self.attachment.size, IGNORE_INDEX)
        forward.count = (shift_labels != IGNORE_INDEX).sum()
        kwargs["shift_labels"], kwargs["labels"] = shift_labels, torch.full_like(shift_labels, IGNORE_INDEX)
        return (), kwargs

    def _splits(self, targets, kwargs):
        if not self.attachment.splits_loss or targets.dim() != 2:
            return False
        keep = kwargs.get("logits_to_keep")
        return keep is None or isinstance(keep, int) and keep == 0

    def leave(self, module, args, kwargs, output):
        forward = self.attachment.forward
        if forward is None or not self.attachment.owns(module):
            return None
        if forward.exit == "tokens" and not module.training and not torch.is_grad_enabled():
            getattr(module.get_output_embeddings(), "reshard", bool)()
        if forward.held is not None:
            release(forward.held)
            forward.held = None
        if output is None or forward.exit in ("hidden", "shards"):
            return None
        loss = output.get("loss") if isinstance(output, dict) else output[0]
        loss = row_loss(loss, forward, self.attachment)
        if not isinstance(output, dict):
            return (loss, *output[1:])
        output["loss"] = loss
        if forward.counted and torch.is_tensor(output.get("aux_loss")):
            output["aux_loss"] = output["aux_loss"] / forward.row.share  # The whole row's.
        if forward.exit == "tokens" and forward.given is None:
            for name in _PER_TOKEN:
                if torch.is_tensor(output.get(name)):
                    output[name] = gather_sequence(output[name], self.attachment.group, 1, forward.fields)
        return output


def open_exit(attachment, forward, output):
    """What leaves the outermost module of a forward: whole rows, gathered when they are read."""
    row = forward.row
    if row is not None and forward.opened:
        return tree_map(lambda _, leaf: _cut_again(leaf, row, attachment), output)
    if row is None or forward.exit != "loss" or forward.given is not None:
        return output
    if not isinstance(output, dict):
        return output if attachment.loss_only else whole(output, row, attachment)
    shard, batch_size = row.padded // attachment.size, row.position_ids.shape[-2]
    names = []
    for name in output.keys():
        parts = [leaf for leaf in leaves(output[name]) if torch.is_tensor(leaf) and leaf.dim() >= 2]
        routers = "router" in name and any(leaf.shape[0] == batch_size * shard for leaf in parts)
        if routers or any(leaf.shape[:2] == (batch_size, shard) for leaf in parts):
            names.append(name)
    if not names:
        return output
    gather, agree = lambda name, value: whole({name: value}, row, attachment)[name], attachment.control.agree_to_read
    return whole_when_read(output, names, gather, agree, lambda: attachment.loss_only)


def _cut_again(leaf, row, attachment):
    """Who gave shards gets shards."""
    if not torch.is_tensor(leaf) or leaf.dim() < 2 or leaf.shape[1] != row.length:
        return leaf
    return cut_tensor(leaf, attachment.rank, attachment.size)
