"""Rotary embeddings whose frequencies depend on the positions: dynamic NTK and longrope.

They choose frequencies from `max(position_ids)`, so a shard alone would choose others than the row. They are given the
full row's positions and their output, `cos` and `sin` of shape `(..., S, D)`, is cut to the shard. All other rotary
embeddings are functions of each position alone and are left alone.
"""

import inspect

import torch

from .hooks import around
from .sequence import current_row

_DEPENDENT = ("dynamic", "longrope")


def depends_on_positions(module) -> bool:
    """Whether `module` is a rotary embedding that reduces over positions (transformers' `rope_type`)."""
    types = getattr(module, "rope_type", None)
    types = types.values() if isinstance(types, dict) else [types]
    return any(isinstance(kind, str) and any(name in kind for name in _DEPENDENT) for kind in types)


def feed_full_row(module, rank: int, size: int):
    """Set the two hooks around a rotary module. Returns their handles."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def widen(module, args, kwargs):
        row = current_row()
        if row is None:
            return None
        args, kwargs = list(args), dict(kwargs)
        place, key = (kwargs, "position_ids") if "position_ids" in kwargs else (args, names.index("position_ids"))
        full = row.rotary_position_ids
        place[key] = full[(0,) * max(full.dim() - place[key].dim(), 0)]
        return tuple(args), kwargs

    def cut(module, args, kwargs, output):
        row = current_row()
        if row is None or output is None:
            return None
        part = row.padded // size
        if torch.is_tensor(output):  # Complex numbers, instead of cos and sin.
            return output.narrow(-2, rank * part, part)
        return tuple(table.narrow(-2, rank * part, part) for table in output)

    return around(module, widen, cut)
