"""What every rank knows of the full row, and how it reaches the places that need it.

Every rank of a sequence-parallel group read the same row before it was cut, so the full row's positions, 2-D mask and
document boundaries are known everywhere without communication. They ride in the batch, under `ROW_KEY`, as a `Row`:

    batch[ROW_KEY] -> model(**batch) -> the layers' keyword arguments -> the attention hook     (survives recomputation
                          |                                                                      under checkpointing)
                          +-> `current_row()` while that forward runs -> mask builders, rotary embeddings (which get no
                                                                         keyword arguments of ours)
"""

import copy
from contextlib import contextmanager

import torch

from . import packed

ROW_KEY = "ulysses_row"


class Row:
    """The full row's facts, on one rank. Read-only by convention.

    Not a dataclass on purpose: torch's FSDP rebuilds dataclasses field by field while it casts a forward's inputs.

    Args:
        length (`int`): tokens of the row as the user gave it.
        padded (`int`): tokens after padding to a multiple of sp_size; every shard has `padded // sp_size`.
        position_ids (`torch.Tensor`): of shape `(B, padded)` or `(k, B, padded)` (mrope), the padding counted on.
        attention_mask (`torch.Tensor`, *optional*): of shape `(B, padded)`, zero on the padding; `None` when the user
            gave none: then documents are told apart by `position_ids`.
        boundaries (`dict`): `cu_seq_lens_q/k` and `max_length_q/k` of the full row, where the user gave them.
        checksum (`torch.Tensor`): of shape `()`, int64; equal on two ranks that read the same row.
        attachment (`Attachment`), share (`float`): set when a decoder begins: whose ranks share the row, and what part of an
            auxiliary loss of the whole row is a rank's (balance.py).
        positions_given (`bool`): whether the user gave `position_ids`; else they were counted, as most models count.
        documents (`list`), build_mask (`Callable`): set by a mask builder where attention without a mask runs document by
            document (packed.py): those of every batch row, and what makes the whole mask after all.
    """

    __slots__ = (
        *("length", "padded", "position_ids", "attention_mask", "boundaries", "checksum", "positions_given"),
        *("attachment", "share", "shift_labels", "documents", "build_mask", "_bundles", "_flash", "_facts"),
    )

    def __init__(self, length, padded, position_ids, attention_mask, boundaries, checksum, positions_given=True):
        self.length, self.padded = length, padded
        self.position_ids, self.attention_mask, self.boundaries = position_ids, attention_mask, boundaries
        self.checksum, self.positions_given = checksum, positions_given
        self.attachment, self.share, self.shift_labels = None, 1.0, None
        self.documents = self.build_mask = self._bundles = self._flash = self._facts = None

    @property
    def padding(self) -> int:
        return self.padded - self.length

    @property
    def padding_mask(self):
        """`attention_mask`, or one of ones when there is padding of ours to hide, else `None`. `(B, padded)`."""
        if self.attention_mask is not None or not self.padding:
            return self.attention_mask
        batch_size = self.position_ids.shape[-2]
        mask = torch.ones(batch_size, self.padded, dtype=torch.long, device=self.position_ids.device)
        mask[:, self.length :] = 0
        return mask

    @property
    def text_positions(self):
        """`position_ids` as `(B, padded)`: the text's, which are the first of several rows of positions."""
        return self.position_ids[(0,) * (self.position_ids.dim() - 2)]

    @property
    def facts(self):
        """What the rows are made of (`packed.Facts`), found when first asked for."""
        if self._facts is None:
            plain = self.attention_mask is None and not self.positions_given
            self._facts = packed.Facts() if plain else in_no_graph(packed.facts_of, self)
        return self._facts

    def flash_arguments(self) -> dict:
        """What spares flash attention a look at the positions in every layer; made once.

        Its varlen arguments for a packed row of batch size one; no positions for rows that are one document each.
        """
        if self._flash is None:
            facts, self._flash = self.facts, {}
            if not facts.hides and facts.in_one:
                self._flash = {"position_ids": None}
            elif not facts.hides and facts.documents is not None and len(facts.documents) == 1:
                self._flash = packed.boundaries(facts.documents[0], self.position_ids.device)
        return self._flash

    @property
    def bundles(self):
        """`documents` as attention runs them; made once."""
        if self._bundles is None:
            self._bundles = packed.bundled(self.documents, self.padded, self.position_ids.device)
        return self._bundles

    def to(self, *args, **kwargs):
        """A copy with its tensors moved, as `torch.Tensor.to`; loops that move every value of a batch need it."""
        # Positions and masks keep their dtype, whatever a loop casts its batch to.
        return self._moved(lambda tensor: tensor.to(*args, **kwargs).to(tensor.dtype))

    def pin_memory(self):
        """A copy in pinned memory; for loaders that pin what they hand over."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move):
        moved = copy.copy(self)
        for name in ("position_ids", "attention_mask", "checksum", "shift_labels"):
            value = getattr(self, name)
            setattr(moved, name, value if value is None else move(value))
        moved.boundaries = {name: move(value) if torch.is_tensor(value) else value for name, value in self.boundaries.items()}
        # Of other tensors.
        moved.documents = moved.build_mask = moved._flash = moved._bundles = None
        return moved

    def __repr__(self):
        return f"Row(length={self.length}, padded={self.padded})"


# Stands for the row in a module that was given the whole of it inside of a sharded forward.
_WHOLE = object()
# A `Row`, `_WHOLE`, or `None`. Not a `ContextVar`: each look at one would end a graph of torch.compile.
_current: "Row | object | None" = None


def in_no_graph(function, *arguments):
    """`function(*arguments)`, the host's work, which torch.compile shall not trace."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)
    return function(*arguments)


def current_row() -> Row | None:
    """The row of the forward that is running, `None` outside of a sharded forward.

    In what backward runs again, only by recomputation.py and by the row in a layer's keyword arguments.
    """
    return None if _current is _WHOLE else _current


def on_whole_row() -> bool:
    """Whether a sharded forward is running a module on the whole row just now (whole.py)."""
    return _current is _WHOLE


@contextmanager
def holding(row: Row | None):
    """Make `row` the current row inside the `with` block."""
    token = hold(row)
    try:
        yield row
    finally:
        release(token)


def hold(row: Row | None):
    """Make `row` the current row until `release(token)`; for hooks, which cannot be a `with` block.

    No row, inside of a sharded forward: what runs until then has been given the whole row.
    """
    global _current
    token = (_current,)
    _current = _WHOLE if row is None and _current is not None else row
    return token


def release(token) -> None:
    global _current
    (_current,) = token


def forget_rows() -> None:
    """No row is current: a forward begins, whatever an interrupted one may have left."""
    release((None,))
