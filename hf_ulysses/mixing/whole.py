"""Modules that need the whole row run on it, on every rank, and keep this shard's part of what comes out.

What mixes or counts positions by itself and has no spec (specs.py) is found by the trial (locate.py): indexers, attention that
calls no interface, embeddings that count. What such a module is given is made what one process would give it:

    a tensor with the sequence in one dimension     gathered
    the 2-D mask, a mask of keys by queries         the row's own, which all ranks know
    position_ids                                    the row's; `None` where one process has none

Gradients: what reaches the gathered inputs is summed over ranks by the gather's backward; a parameter's is its shard's share, as
everywhere else. The whole row's activations inside of the module are held on every rank; checkpointing frees them layer by layer.
"""

import inspect

import torch

from ..core.cut import cut_tensor
from ..core.gather import gather_sequence
from ..core.hooks import around
from ..core.sequence import ROW_KEY, current_row, hold, release
from ..core.trees import tree_map


def run_whole(module, places, attachment, seen=None) -> list:
    """Let `module` run on the whole row in sharded forwards. Returns the handles.

    Args:
        places (`dict`): path of an argument or result -> where it has the sequence, as the trial saw (`prints.place`).
        attachment (`Attachment`): whose group shares the row.
        seen (`Callable`, *optional*): row -> how many tokens of it `module` sees; defaults to the user's, unless boundaries of
            documents count the padding behind them, too.
    """
    seen = seen or (lambda row: row.padded if row.boundaries else row.length)
    rows = []

    def enter(module, args, kwargs):
        # A deepcopy takes the hooks along.
        row = attachment.row_of(module, kwargs) if attachment.owns(module) else None
        if row is not None:
            args, kwargs = map_arguments(_gathering(row, places, attachment, seen(row)), module, args, kwargs)
            if takes(module, "cu_seq_lens_q"):
                kwargs.update(row.boundaries)
            kwargs.pop(ROW_KEY, None)
        rows.append((row, hold(None if row is not None else current_row())))
        return args, kwargs

    def leave(module, args, kwargs, output):
        if not rows:
            return None
        row, token = rows.pop()
        release(token)
        return None if row is None else tree_map(_cutting(places, attachment, seen(row)), output, "out")

    return around(module, enter, leave)


def run_rotary_whole(module, attachment) -> list:
    """The same for a rotary embedding, whose first argument only tells a dtype, and whose tables are `(..., S, D)`."""
    first = [*inspect.signature(type(module).forward).parameters][1]
    tables = dict.fromkeys(("out", "out[0]", "out[1]"), -2)
    return run_whole(module, {first: "as it is", **tables}, attachment, lambda row: row.length)


def depends_on_positions(module) -> bool:
    """Whether `module` is a rotary embedding that chooses its frequencies by the largest position (`rope_type`)."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or "longrope" in kind) for kind in kinds)


def _gathering(row, places, attachment, length):
    shard = row.padded // attachment.size

    def gather(path, value):
        where = places.get(path)
        if where == "as it is":
            return value
        if where == "counted" and not row.positions_given:
            return None
        if where == "square" and value is None and row.build_mask is not None:
            value = row.build_mask()
        is_mask = path.endswith("mask") and torch.is_tensor(value) and value.dim() == 2
        if row.attention_mask is not None and (where == "mask" or is_mask):
            # A rank whose shard has no padding may have been given none.
            return row.attention_mask[:, :length].to(value.dtype if is_mask else row.attention_mask.dtype)
        if not torch.is_tensor(value) or path.endswith("labels"):
            return value
        if path.endswith("position_ids") and value.shape[-1] == shard:
            if not attachment.takes_positions:  # It counts them by itself, whatever the user gave.
                return torch.arange(length, device=value.device).expand(*value.shape[:-1], -1)
            return row.position_ids[(0,) * max(row.position_ids.dim() - value.dim(), 0)][..., :length]
        dim = where if isinstance(where, int) else 1
        if value.dim() > dim and value.shape[dim] == shard:
            return gather_sequence(value, attachment.group, dim, length).contiguous()
        for dim, n in enumerate(value.shape):
            if n == row.padded:
                value = value.narrow(dim, 0, length)
        return value.contiguous()

    return gather


def _cutting(places, attachment, length):
    def cut(path, value):
        dim = places.get(path, 1)
        if not torch.is_tensor(value) or not isinstance(dim, int) or value.dim() <= dim or value.shape[dim] != length:
            return value
        return cut_tensor(value, attachment.rank, attachment.size, dim=dim)

    return cut


def map_arguments(function, module, args, kwargs):
    """`function(path, leaf)` over a module's arguments, whose paths start with the parameter's name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    names += [f"*{i}" for i in range(len(args))]
    args = tuple(tree_map(function, value, name) for name, value in zip(names, args))
    return args, {name: tree_map(function, value, name) for name, value in kwargs.items()}


def takes(module, name):
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
