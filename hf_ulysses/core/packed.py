"""Packed and padded rows cost what their documents cost.

A row that is made of documents (positions that restart) or padding has a mask that is block-diagonal and causal. Built
whole, it has S x S elements, and attention over it costs S x S. Here the mask builder is called once per document
instead, and attention runs document by document:

1. `split(row)` finds the documents of each batch row, on the host, once per forward.
2. `masks.py` builds each document's own mask (for causal attention under sdpa: none at all) and hands a `DocumentMask`
   to the model in place of the S x S tensor.
3. The attention hook recognises it and calls the core once per block.

A `DocumentMask` looks like the `(B, 1, S, S)` boolean tensor that it stands for, in one byte. A model that does more with
its mask than pass it on gets the real one: any other operation builds it first. So nothing depends on good behaviour
but the cost.

Not covered, done with the whole mask: documents that do not start at position 0, 2-D masks with holes, windows or chunks
together with padding on the right.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Document:
    """Tokens `start` to `stop` of a batch row: one document, or what padding leaves of a row."""

    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Queries that attend to keys: a document to itself with the model's own `mask`, or padding to a document."""

    query: slice
    key: slice
    mask: torch.Tensor | None
    causal: bool


def split(row, position_ids) -> "list[list[Document]] | None":
    """The documents of every batch row, `None` where each row is one document or the whole mask is needed.

    Args:
        row (`Row`): the full row's facts.
        position_ids (`torch.Tensor`, *optional*): of shape `(B, S)`, those that the mask builder was given.
    """
    if row.attention_mask is not None:
        return _by_padding(row.attention_mask.bool())
    return None if position_ids is None else _by_positions(position_ids)


def _by_padding(mask_BS):
    length = mask_BS.shape[1]
    place = torch.arange(length, device=mask_BS.device)
    first, count = mask_BS.int().argmax(dim=1), mask_BS.sum(dim=1)
    whole = ((place >= first[:, None]) & (place < (first + count)[:, None]) == mask_BS).all(dim=1)
    spans = torch.stack([first, count, whole.long()], dim=1).tolist()
    if any(not whole or not count for _, count, whole in spans) or all(count == length for _, count, _ in spans):
        return None
    return [[Document(first, first + count)] for first, count, _ in spans]


def _by_positions(position_ids_BS):
    length = position_ids_BS.shape[1]
    restarts = position_ids_BS.diff(dim=1) != 1
    firsts = torch.nn.functional.pad(restarts, (1, 0), value=True)
    # One transfer to the host: where documents start, and whether all of them count from zero.
    rows, starts = firsts.nonzero().T.tolist()
    from_zero = bool((position_ids_BS[firsts] == 0).all())
    if len(starts) == len(position_ids_BS) or not from_zero:
        return None
    documents = [[] for _ in range(len(position_ids_BS))]
    for i, (batch, start) in enumerate(zip(rows, starts)):
        stop = starts[i + 1] if i + 1 < len(rows) and rows[i + 1] == batch else length
        documents[batch].append(Document(start, stop))
    return documents


def boundaries(documents: list[Document], device) -> dict:
    """A row's documents as flash attention's varlen arguments: `cu_seq_lens_q/k` `(n + 1,)` int32, `max_length_q/k`."""
    cumulative = torch.tensor([0, *(document.stop for document in documents)], dtype=torch.int32, device=device)
    longest = max(document.stop - document.start for document in documents)
    return dict(cu_seq_lens_q=cumulative, cu_seq_lens_k=cumulative, max_length_q=longest, max_length_k=longest)


# What gives the mask back, and what only asks for sizes and places, or sets `requires_grad`.
_ITSELF = ("detach", "contiguous", "bool")
_OF_THE_STAND_IN = (
    "__get__",
    "__set__",
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "size",
    "stride",
)


class DocumentMask(torch.Tensor):
    """Stands for a `(B, 1, S, S)` boolean mask; see the module's docstring. Made by `document_mask`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if isinstance(args[0] if args else None, cls):
            if name in _ITSELF or name == "to" and args[0]._stays(*args[1:], **kwargs):
                return args[0]
        # On accelerators torch's checkpoint asks every positional argument for its device.
        if name in _OF_THE_STAND_IN:
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args, **kwargs)
            if not torch.is_tensor(answer):
                return answer
            # A view (`mT`, `data` ...) of the stand-in would be a mask of nothing.
            if func == torch.Tensor.data.__get__:
                return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = torch.utils._pytree.tree_map_only(DocumentMask, DocumentMask.whole, (args, kwargs))
            return func(*args, **kwargs)

    def _stays(self, *args, **kwargs):
        """Whether `self.to(...)` is `self`: asked of an empty tensor, as it costs a whole mask to try."""
        if isinstance(args[0] if args else None, DocumentMask):
            args = (args[0].device, args[0].dtype, *args[1:])
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.to(*args, **kwargs) is empty

    def is_contiguous(self, **kwargs):
        """True, as the real mask would be."""
        return True

    def __repr__(self, **kwargs):
        return f"DocumentMask(shape={tuple(self.shape)}, blocks={[len(blocks) for blocks in self.blocks]})"

    def whole(self):
        """The `(B, 1, S, S)` mask itself, as the model's builder makes it."""
        return self._build_whole()


def document_mask(blocks: list[list[Block]], length: int, device, build_whole) -> DocumentMask:
    """A `DocumentMask` over `blocks` (one list per batch row, in query order); `build_whole()` makes the real mask."""
    stand_in = torch.zeros(1, dtype=torch.bool, device=device).expand(len(blocks), 1, length, length)
    mask = stand_in.as_subclass(DocumentMask)
    mask.blocks, mask._build_whole = blocks, build_whole
    return mask


def attend(core, query_BhSD, key_BgSD, value_BgSE, mask: DocumentMask, kwargs):
    """Run `core(query, key, value, mask, kwargs) -> out_BShE` block by block. Queries of no block give zero."""
    batch = []
    for b, blocks in enumerate(mask.blocks):
        pieces, done = [], 0
        for block in blocks:
            if block.query.start > done:
                pieces.append(_zeros(query_BhSD, value_BgSE, block.query.start - done))
            here = {n: v[..., block.query, block.key] if _is_bias(v, mask) else v for n, v in kwargs.items()}
            if not block.causal:
                here["is_causal"] = False
            q, k, v = query_BhSD[b : b + 1, :, block.query], key_BgSD[b : b + 1], value_BgSE[b : b + 1]
            pieces.append(core(q, k[:, :, block.key], v[:, :, block.key], block.mask, here))
            done = block.query.stop
        if done < query_BhSD.shape[2]:
            pieces.append(_zeros(query_BhSD, value_BgSE, query_BhSD.shape[2] - done))
        batch.append(torch.cat(pieces, dim=1))
    return torch.cat(batch)


def _zeros(query_BhSD, value_BgSE, length):
    return query_BhSD.new_zeros(1, length, query_BhSD.shape[1], value_BgSE.shape[-1])


def _is_bias(value, mask):
    return torch.is_tensor(value) and value.dim() == 4 and value.shape[-2:] == mask.shape[-2:]
