"""Modules that mix positions by themselves, on tensors of the whole row that are held in part (tensor.py)."""

from .modules import inside
from .tensor import CannotSplit, Factor, Ranks, Spread

__all__ = ["CannotSplit", "Factor", "Ranks", "Spread", "inside"]
