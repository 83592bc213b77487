"""Fingerprints of tensors, compared between a row that runs whole and its shards.

A fingerprint is, per position along every dimension that may be the sequence, a tensor's sum and norm.
"""

from typing import NamedTuple

import torch

# Reordered float32 sums differ by 1e-6; what is cut off by a shard's edge, by percents and more. Half precision rounds
# at 1e-2 and more in deep models, so that there only a shard's first and last positions are judged, coarsely.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.15


class Layout(NamedTuple):
    """How a trial row is laid out: `length` tokens, `padded` with padding, of which `shard` are this `rank`'s; the 2-D mask."""

    length: int
    padded: int
    shard: int
    rank: int
    mask: torch.Tensor | None


class Print:
    """A tensor's shape and, per position along every dimension that may be the sequence, its sum and norm."""

    def __init__(self, value, layout):
        self.shape, self.sums, self.total, self.half, self.none = None, {}, None, False, value is None
        if not torch.is_tensor(value) or value.is_complex():
            return
        self.shape, self.counts = tuple(value.shape), not value.is_floating_point()
        self.half = value.dtype in (torch.bfloat16, torch.float16)
        dims = [d for d, n in enumerate(self.shape) if n in (layout.length, layout.padded, layout.shard)]
        if not dims:
            if value.dim() == 2 and not self.counts:
                value = value.detach().float()
                self.total = torch.stack([value.sum(), value.norm()])
            return
        # The lowest number of a dtype hides what a mask hides; as a zero it hides it from the comparison.
        value = value.detach().float()
        value = value.where(value.abs() < 1e30, 0.0)
        for d in dims:
            others = [o for o in range(value.dim()) if o != d]
            total = value.sum(dim=others) if others else value
            norm = value.square().sum(dim=others).sqrt() if others else value.abs()
            self.sums[d] = torch.stack([total, norm], dim=-1)
            self.mean = norm.mean()


def difference(whole, mine, layout, half) -> str | None:
    """What a `Print` of a shard has that its part of the whole row's has not, in words; `None` if nothing.

    `half`: whether anything was computed in half precision, which rounds what comes after it in float32, too.
    """
    if whole.shape is None or mine.shape is None or len(whole.shape) != len(mine.shape):
        return None
    changed = [d for d, (a, b) in enumerate(zip(whole.shape, mine.shape)) if a != b]
    if any(whole.shape[d] != layout.length or mine.shape[d] not in (layout.shard, layout.padded) for d in changed):
        return None
    if sum(mine.shape[d] == layout.shard for d in changed) > 1:
        return f"a shard's {mine.shape} where the row has {whole.shape}"
    dims = changed or [d for d in whole.sums if whole.shape[d] == layout.length]
    if whole.counts or len(whole.shape) < 3 or len(dims) != 1:
        # Counters and indices, and tokens in no order of the row's (an expert's): what comes of them is judged.
        return None
    return _of_positions(whole, mine, dims[0], layout, half)


def pooled_otherwise(whole, mine, half) -> str | None:
    """As `difference`, for what has no position any more: a row's pooled states, `(B, H)`."""
    if whole.total is None or mine.total is None or whole.shape != mine.shape:
        return None
    error = float(((whole.total - mine.total).abs() / (whole.total[1] + 1e-20)).max())
    return f"values that differ by {error:.1e} relative" if error > (_TOLERANCE_HALF if half else _TOLERANCE) else None


def _of_positions(whole, mine, dim, layout, half):
    # Without the padding, the user's at the left and ours at the right.
    cut = mine.shape[dim] == layout.shard
    first = layout.rank * layout.shard if cut else 0
    keep = slice(first, min(first + mine.shape[dim], layout.length))
    a, b = whole.sums[dim][keep], mine.sums[dim][: keep.stop - keep.start]
    if layout.mask is not None:
        real = layout.mask.all(dim=0)[keep].bool()
        a, b = a[real], b[real]
    if half and cut and len(a) > 2:
        a, b = a[[0, -1]], b[[0, -1]]
    if not len(a):
        return None
    # In half precision what nearly cancels is noise beside the other positions.
    scale = a[:, 1] + (1 if half else 1e-3) * whole.mean + 1e-20
    error = torch.maximum((a[:, 0] - b[:, 0]).abs() / scale, (a[:, 1] - b[:, 1]).abs() / scale).max()
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE
    return f"values that differ by {float(error):.1e} relative" if error > tolerance else None


def place(path, seen, layout) -> int | str | None:
    """Where a module's argument or result has the sequence, from its `Print` in the whole row; the same on all ranks.

    Returns:
        A dimension; "mask", the 2-D mask; "square", keys by queries; "counted", positions that the model makes by itself.
    """
    if seen.none:
        return "counted" if path.endswith("position_ids") else None
    if seen.shape is None:
        return None
    is_mask, dims = path.endswith("mask"), [d for d, n in enumerate(seen.shape) if n == layout.length]
    if is_mask and layout.mask is not None and seen.shape == tuple(layout.mask.shape):
        return "mask"
    return dims[0] if len(dims) == 1 else "square" if is_mask and len(dims) == 2 else None
