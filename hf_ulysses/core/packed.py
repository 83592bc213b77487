"""Packed and padded rows cost what their documents cost.

A row that is made of documents (positions that restart) or padding has a mask that is block-diagonal and causal. Built
whole, it has S x S elements, and attention over it costs S x S. Here the mask builder is called once per document
instead, and attention runs document by document:

1. `facts_of(row)` finds the documents of each batch row, on the host, once per batch.
2. `masks.py` builds each document's own mask (for causal attention under sdpa: none at all) and hands a `DocumentMask`
   to the model in place of the S x S tensor.
3. The attention hook recognises it and calls the core once for all documents of about the same length: some calls per
   layer, however many documents.

A `DocumentMask` looks like the `(B, 1, S, S)` boolean tensor that it stands for, in one byte. A model that does more with
its mask than pass it on gets the real one: any other operation builds it first. So nothing depends on good behaviour
but the cost.

Not covered, done with the whole mask: documents that do not start at position 0, 2-D masks with holes, windows or chunks
together with padding on the right.
"""

from dataclasses import dataclass, replace

import numpy
import torch

# That many documents are run one by one, without a copy of their tokens.
_FEW = 3


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


@dataclass(frozen=True)
class Facts:
    """What the rows of a batch are made of, as the host knows it: found once per batch, with one copy to the host.

    Args:
        hides (`bool`): whether the 2-D mask hides any of the user's tokens.
        visible (`list[list[Document]]`, *optional*): what the 2-D mask leaves of every batch row; `None` where it hides
            nothing, or where the whole mask is needed.
        in_one (`bool`): whether positions count every batch row through.
        documents (`list[list[Document]]`, *optional*): of every batch row, by positions; `None` where each row is one, or
            where they do not start at position 0.
    """

    hides: bool = False
    visible: list | None = None
    in_one: bool = True
    documents: list | None = None


def facts_of(row) -> Facts:
    """The `Facts` of a `Row`."""
    mask, positions = row.attention_mask, row.text_positions if row.positions_given else None
    if mask is None and positions is None:
        return Facts()
    given = [tensor.long() for tensor in (mask, positions) if tensor is not None]
    # The only time that the host waits for the device.
    host = torch.stack(given).cpu().numpy()
    found = Facts()
    if mask is not None:
        hides = bool((host[0][:, : row.length] == 0).any())
        found = replace(found, hides=hides, visible=_by_padding(host[0] != 0))
    if positions is not None:
        in_one, documents = _by_positions(host[-1])
        found = replace(found, in_one=in_one, documents=documents)
    return found


def split(row, position_ids) -> "list[list[Document]] | None":
    """The documents of every batch row, `None` where each row is one document or the whole mask is needed.

    Args:
        row (`Row`): the full row's facts.
        position_ids (`torch.Tensor`, *optional*): of shape `(B, S)`, those that the mask builder was given.
    """
    if row.attention_mask is not None:
        return row.facts.visible
    return None if position_ids is None else row.facts.documents


def _by_padding(mask_BS):
    length = mask_BS.shape[1]
    place = numpy.arange(length)
    first, count = mask_BS.argmax(axis=1), mask_BS.sum(axis=1)
    whole = ((place >= first[:, None]) & (place < (first + count)[:, None]) == mask_BS).all()
    if not whole or not count.all() or (count == length).all():
        return None
    return [[Document(start, start + n)] for start, n in zip(first.tolist(), count.tolist())]


def _by_positions(positions_BS):
    """Whether each row is one document, and the documents of all if they count from zero."""
    batch_size, length = positions_BS.shape
    firsts = numpy.ones((batch_size, length), dtype=bool)
    firsts[:, 1:] = numpy.diff(positions_BS, axis=1) != 1
    if firsts.sum() == batch_size or (positions_BS[firsts] != 0).any():
        return bool(firsts.sum() == batch_size), None
    documents = []
    for of_row in firsts:
        starts = [*numpy.flatnonzero(of_row).tolist(), length]
        documents.append([Document(start, stop) for start, stop in zip(starts, starts[1:])])
    return False, documents


def boundaries(documents: list[Document], device) -> dict:
    """A row's documents as flash attention's varlen arguments: `cu_seq_lens_q/k` `(n + 1,)` int32, `max_length_q/k`."""
    cumulative = to_device([0, *(document.stop for document in documents)], torch.int32, device)
    longest = max(document.stop - document.start for document in documents)
    return dict(cu_seq_lens_q=cumulative, cu_seq_lens_k=cumulative, max_length_q=longest, max_length_k=longest)


def to_device(numbers, dtype, device):
    """A tensor of `numbers` on `device`. From pinned memory: the host does not wait for its copy."""
    host = torch.from_numpy(numpy.asarray(numbers)).to(dtype)
    host = host.pin_memory() if torch.device(device).type == "cuda" else host
    return host.to(device, non_blocking=True)


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
    mask.blocks, mask._build_whole, mask.bundles = blocks, build_whole, None
    return mask


def attend(core, query_BhSD, key_BgSD, value_BgSE, mask: DocumentMask, kwargs):
    """Run `core(query, key, value, mask, kwargs) -> out_BShE` for all blocks. Queries of no block give zero.

    Documents of about the same length are run together, as rows that are padded on the right: what lies behind a query is
    hidden from it. A bias of queries by keys is as large as the whole mask, which is used with it.
    """
    if any(torch.is_tensor(v) and v.dim() == 4 and v.shape[-2:] == mask.shape[-2:] for v in kwargs.values()):
        return core(query_BhSD, key_BgSD, value_BgSE, mask.whole(), kwargs)
    (B, _, S, _), device = query_BhSD.shape, query_BhSD.device
    if mask.bundles is None:
        mask.bundles = _bundles(mask.blocks, S, device)
    bundles, where = mask.bundles
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BhSD, key_BgSD, value_BgSE))
    pieces = []
    for bundle in bundles:
        few = [_rows(tensor, bundle, keys) for tensor, keys in ((query, False), (key, True), (value, True))]
        here = kwargs if bundle.block.causal else {**kwargs, "is_causal": False}
        pieces.append(core(*few, bundle.block.mask, here).flatten(0, 1))
    if where is None:
        return torch.cat(pieces).view(B, S, *pieces[0].shape[1:])
    pieces.append(pieces[0].new_zeros(1, *pieces[0].shape[1:]))
    return torch.cat(pieces).index_select(0, where).view(B, S, *pieces[0].shape[1:])


@dataclass(frozen=True)
class _Bundle:
    """Blocks that are run together: `row` and `block` of the longest, and where the tokens of all are, `(n, length)`."""

    row: int
    block: Block
    places: torch.Tensor | None


def _rows(tensor_BShD, bundle, keys):
    """A bundle's queries or keys, `[n, h, length, D]`."""
    if bundle.places is None:
        here = bundle.block.key if keys else bundle.block.query
        return tensor_BShD[bundle.row : bundle.row + 1, here].transpose(1, 2)
    flat = tensor_BShD.flatten(0, 1).index_select(0, bundle.places.view(-1))
    return flat.unflatten(0, bundle.places.shape).transpose(1, 2)


def _bundles(blocks, length, device):
    """The bundles of a batch's blocks, and where each token is in their outputs, one after the other.

    The place is `None` where that is the order of the row. A token of no block is behind the last.
    """
    numbered = [(row, block) for row, of_row in enumerate(blocks) for block in of_row]
    alone = [one for one in numbered if not one[1].causal]
    documents = [one for one in numbered if one[1].causal]
    if len(documents) > _FEW:
        groups = _of_about_the_same_length(documents)
    else:
        groups = [[one] for one in documents]
    groups = sorted(groups + [[one] for one in alone], key=lambda group: (group[0][0], group[0][1].query.start))
    bundles, where, done = [], numpy.full(len(blocks) * length, -1), 0
    for group in groups:
        row, longest = group[0]
        size = longest.query.stop - longest.query.start
        places = numpy.zeros((len(group), size), dtype=numpy.int64)
        for i, (of_row, block) in enumerate(group):
            start, count = of_row * length + block.query.start, block.query.stop - block.query.start
            places[i] = numpy.minimum(start + numpy.arange(size), start + count - 1)
            where[start : start + count] = done + i * size + numpy.arange(count)
        done += len(group) * size
        places = to_device(places, torch.long, device) if len(group) > 1 else None
        bundles.append(_Bundle(row, longest, places))
    if (where == numpy.arange(len(where))).all() and done == len(where):
        return bundles, None
    where[where < 0] = done
    return bundles, to_device(where, torch.long, device)


def _of_about_the_same_length(documents):
    """Groups of documents, longest first, in which padding to the longest at most doubles the tokens."""
    groups, tokens = [], 0
    for one in sorted(documents, key=lambda one: one[1].query.start - one[1].query.stop):
        size = one[1].query.stop - one[1].query.start
        longest = groups and groups[-1][0][1].query
        if groups and (len(groups[-1]) + 1) * (longest.stop - longest.start) <= 2 * (tokens + size):
            groups[-1].append(one)
            tokens += size
        else:
            groups.append([one])
            tokens = size
    return groups
