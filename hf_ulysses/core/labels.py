"""Which targets a model's own head scores, found out once, and how to give it a shard's.

A head scores `logits[i]` against the next token. The target behind a shard's last token lies in the next shard, so a
sharded batch carries `shift_labels`, made on the full row. Three kinds of heads, told apart by the loss they return:

    "takes"    uses `shift_labels` (all that call `loss_function(..., **kwargs)`)
    "shifts"   shifts `labels` by itself: it gets labels `[-100, *shift_labels]` and one dummy position at the end of the
               hidden states that its output embedding sees, so that what it cuts off is nothing
    "same"     scores `logits[i]` against `labels[i]` (decoders of encoder-decoders): its targets are its labels
"""

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 3e-2


def head_of(model):
    """The module whose forward takes labels, and its output embedding; `(None, None)` where there is none."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            output = module.get_output_embeddings()
            return (module, output) if isinstance(output, torch.nn.Module) else (module, None)
    return None, None


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)


def surplus(output, targets):
    """What a model's loss has besides the cross entropy of its logits and `targets`: an auxiliary loss, or a mistake."""
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if not torch.is_tensor(logits) or not torch.is_tensor(loss) or logits.shape[:-1] != targets.shape:
        return None
    return (loss.float() - cross_entropy(logits, targets)).reshape(())


def agree(one, other, half: bool) -> bool:
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE
    return one is not None and other is not None and bool((one - other).abs() <= tolerance * (1 + other.abs()))


def shifted(labels):
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def give_dummy_position(model) -> list:
    """Hook a head that "shifts". Returns the handles; acts on sharded batches only, which carry `shift_labels`."""
    head, output_embedding = head_of(model)
    inside = []

    def enter(module, args, kwargs):
        shift_labels = kwargs.get("shift_labels")
        inside.append(shift_labels is not None and kwargs.get("labels") is not None)
        if not inside[-1]:
            return None
        kwargs = {key: value for key, value in kwargs.items() if key != "shift_labels"}
        kwargs["labels"] = F.pad(shift_labels, (1, 0), value=IGNORE_INDEX)
        return args, kwargs

    def append(module, args):
        if not inside or not inside[-1]:
            return None
        return (F.pad(args[0], (0, 0, 0, 1)), *args[1:])

    def leave(module, args, kwargs, output):
        if inside.pop() and torch.is_tensor(getattr(output, "logits", None)):
            output.logits = output.logits[..., :-1, :]

    return [
        # Before the hook that takes away what the forward has no parameter for.
        head.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        head.register_forward_hook(leave, with_kwargs=True, always_call=True),
        output_embedding.register_forward_pre_hook(append),
    ]
