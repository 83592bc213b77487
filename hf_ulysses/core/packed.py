"""Packed and padded rows cost what their documents cost.

A row that is made of documents (positions that restart) or padding has a mask that is block-diagonal and causal. Built
whole, it has S x S elements, and attention over it costs S x S. Where sdpa would need no mask for any document alone:

1. `facts_of(row)` finds the documents of each batch row, on the host, once per batch.
2. `masks.py` returns no mask, as for a row of one document, and notes so in the row (`Row.build_mask`).
3. The attention hook, given no mask for such a row, calls the core once for all documents of about the same length: some
   calls per layer, however many documents.

Done with the whole mask: documents that do not start at position 0, 2-D masks with holes, windows or chunks shorter than a
document, and whatever is not causal or not sdpa. A layer that is given no mask on purpose, whatever its neighbours are given,
shows in the padded row of the trial (mixing/locate.py).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch

# That many documents are run one by one, without a copy of their tokens.
_FEW = 3


class Document(NamedTuple):
    """Tokens `start` to `stop` of a batch row: one document, or what padding leaves of a row."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


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
    given = [tensor.long() for tensor in (mask, positions) if tensor is not None]
    found = Facts()
    if not given:
        return found
    # The only time that the host waits for the device.
    host = torch.stack(given).cpu().numpy()
    if mask is not None:
        hides = bool((host[0][:, : row.length] == 0).any())
        found = replace(found, hides=hides, visible=_by_padding(host[0] != 0))
    if positions is not None:
        in_one, documents = _by_positions(host[-1])
        found = replace(found, in_one=in_one, documents=documents)
    return found


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
    longest = max(document.length for document in documents)
    return dict(cu_seq_lens_q=cumulative, cu_seq_lens_k=cumulative, max_length_q=longest, max_length_k=longest)


def to_device(numbers, dtype, device):
    """A tensor of `numbers` on `device`. From pinned memory: the host does not wait for its copy."""
    host = torch.from_numpy(numpy.asarray(numbers)).to(dtype)
    host = host.pin_memory() if torch.device(device).type == "cuda" else host
    return host.to(device, non_blocking=True)


def attend(core, query_BhSD, key_BgSD, value_BgSE, bundles, kwargs):
    """Run causal `core(query, key, value, mask, kwargs) -> out_BShE` for every document of a batch, each by itself.

    Args:
        bundles: what `bundled` made of the documents. Queries in front of a row's first document give zero.
    """
    bundles, where = bundles
    B, _, S, _ = query_BhSD.shape
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BhSD, key_BgSD, value_BgSE))
    pieces = []
    for bundle in bundles:
        few = [_rows(tensor, bundle, keys) for tensor, keys in ((query, False), (key, True), (value, True))]
        pieces.append(core(*few, None, kwargs if bundle.causal else {**kwargs, "is_causal": False}).flatten(0, 1))
    if where is None:
        return torch.cat(pieces).view(B, S, *pieces[0].shape[1:])
    pieces.append(pieces[0].new_zeros(1, *pieces[0].shape[1:]))
    return torch.cat(pieces).index_select(0, where).view(B, S, *pieces[0].shape[1:])


class _Bundle(NamedTuple):
    """Queries and keys that are run together: of one batch row, or of many documents at `places`, `(n, length)`."""

    row: int
    query: slice
    key: slice
    causal: bool = True
    places: torch.Tensor | None = None


def _rows(tensor_BShD, bundle, keys):
    """A bundle's queries or keys, `[n, h, length, D]`."""
    if bundle.places is None:
        return tensor_BShD[bundle.row : bundle.row + 1, bundle.key if keys else bundle.query].transpose(1, 2)
    flat = tensor_BShD.flatten(0, 1).index_select(0, bundle.places.view(-1))
    return flat.unflatten(0, bundle.places.shape).transpose(1, 2)


def bundled(documents: list[list[Document]], length: int, device):
    """The documents of a batch for `attend`: bundles, and where each token is in their outputs, one after the other.

    Documents of about the same length are run together, as rows that are padded on the right: what lies behind a query is
    hidden from it. Padding behind a row's last document sees all of that one and no padding, as with a mask.
    The place is `None` where that is the order of the row. A token of no document is behind the last.
    """
    numbered = [(row, document) for row, of_row in enumerate(documents) for document in of_row]
    groups = _of_about_the_same_length(numbered) if len(numbered) > _FEW else [[one] for one in numbered]
    tails = [(row, of_row[-1]) for row, of_row in enumerate(documents) if of_row[-1].stop < length]
    bundles, where, done = [], numpy.full(len(documents) * length, -1), 0
    for group in groups:
        (row, longest), size = group[0], group[0][1].length
        places = numpy.zeros((len(group), size), dtype=numpy.int64)
        for i, (of_row, document) in enumerate(group):
            start, count = of_row * length + document.start, document.length
            places[i] = numpy.minimum(start + numpy.arange(size), start + count - 1)
            where[start : start + count] = done + i * size + numpy.arange(count)
        done += len(group) * size
        here = slice(longest.start, longest.stop)
        bundles.append(_Bundle(row, here, here, True, to_device(places, torch.long, device) if len(group) > 1 else None))
    for row, last in tails:
        bundles.append(_Bundle(row, slice(last.stop, length), slice(last.start, last.stop), causal=False))
        where[row * length + last.stop : (row + 1) * length] = done + numpy.arange(length - last.stop)
        done += length - last.stop
    if (where == numpy.arange(len(where))).all() and done == len(where):
        return bundles, None
    where[where < 0] = done
    return bundles, to_device(where, torch.long, device)


def _of_about_the_same_length(numbered):
    """Groups of documents, longest first, in which padding to the longest at most doubles the tokens."""
    groups, tokens = [], 0
    for one in sorted(numbered, key=lambda one: -one[1].length):
        if groups and (len(groups[-1]) + 1) * groups[-1][0][1].length <= 2 * (tokens + one[1].length):
            groups[-1].append(one)
            tokens += one[1].length
        else:
            groups.append([one])
            tokens = one[1].length
    return groups
