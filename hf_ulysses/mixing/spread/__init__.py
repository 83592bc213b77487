"""Modules that mix positions by themselves, on tensors of the whole row that are held in part (tensor.py)."""

from .layout import CannotSplit, Factor, Ranks
from .modules import inside
from .tensor import Spread

__all__ = ["CannotSplit", "Factor", "Ranks", "Spread", "inside"]
