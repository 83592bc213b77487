"""Which attention heads belong to which sequence rank. Pure arithmetic, no tensors, no ranks.

1. Every query head has exactly one owner, owners hold contiguous ranges, loads differ by at most one head
   (by one head *per KV head* where several ranks share one).
2. A rank needs the KV heads that its query heads attend with. While there are enough of them each has one owner too;
   a KV head is replicated only when more ranks than KV heads take part.
3. Attention code repeats every KV head `groups` times. Where a share cannot be written that way (its query heads
   straddle KV heads unevenly) `kv_index` names the KV head of each query head instead, and `groups` is 1.

Source of the scheme: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509 (even heads only).
"""

from dataclasses import dataclass, replace
from functools import lru_cache


# More chunks save little more, and where key/value heads are fewer than ranks each sends them again.
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class HeadShare:
    """The heads of one sequence rank.

    Args:
        query (`slice`): the query heads, as a range of the model's heads.
        kv (`slice`): the key/value heads these need.
        groups (`int`): query heads per local key/value head, after `kv_index` has been applied.
        kv_index (`tuple[int, ...]`, *optional*): for each local query head its key/value head within `kv`.
    """

    query: slice
    kv: slice
    groups: int
    kv_index: tuple[int, ...] | None = None

    @property
    def num_query(self) -> int:
        return self.query.stop - self.query.start

    @property
    def num_kv(self) -> int:
        return self.kv.stop - self.kv.start

    def among(self, chunk: "HeadShare") -> "HeadShare":
        """This share of the heads of `chunk`, counted among all heads."""
        return replace(self, query=_moved(self.query, chunk.query.start), kv=_moved(self.kv, chunk.kv.start))


def _moved(heads: slice, by: int) -> slice:
    return slice(heads.start + by, heads.stop + by)


def _balanced(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` contiguous ranges whose lengths differ by at most one, longer ones first."""
    size, longer = divmod(total, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:])]


@lru_cache(maxsize=256)
def share_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> tuple[HeadShare, ...]:
    """Distribute `num_heads` query heads and `num_kv_heads` key/value heads over `sp_size` ranks.

    Returns:
        `tuple[HeadShare, ...]`: one share per sequence rank, in rank order.

    Raises:
        ValueError: more ranks than query heads, or query heads that are no multiple of the key/value heads.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key/value heads.")
    if sp_size > num_heads:
        raise ValueError(
            f"sp_size={sp_size} exceeds the {num_heads} query heads of an attention layer: some ranks would have no "
            f"head to compute. Choose sp_size from 1 to {num_heads} "
            f"(even loads: {[n for n in range(1, num_heads + 1) if num_heads % n == 0]})."
        )
    groups = num_heads // num_kv_heads
    if sp_size % num_kv_heads == 0:
        # More ranks than KV heads: split the query heads of each KV head among the ranks that replicate it.
        parts = _balanced(groups, sp_size // num_kv_heads)
        queries = [range(kv * groups + p.start, kv * groups + p.stop) for kv in range(num_kv_heads) for p in parts]
    else:
        queries = _balanced(num_heads, sp_size)
    return tuple(_share(query, groups) for query in queries)


@lru_cache(maxsize=256)
def chunk_heads(num_heads: int, num_kv_heads: int, sp_size: int, chunks: int | str) -> tuple[HeadShare, ...]:
    """Cut an attention layer's heads into chunks that are exchanged one after the other.

    A chunk has whole key/value heads with all their query heads; where there are fewer of them than chunks, part of the
    query heads of one. Each is distributed over all ranks, so it needs `sp_size` query heads.

    Args:
        chunks (`int` or `"auto"`): how many; "auto" the most, up to four, that keep key/value heads whole and loads even.

    Returns:
        `tuple[HeadShare, ...]`: one per chunk, in head order; `kv_index` is not used.

    Raises:
        ValueError: a number of chunks that does not fit, with those that do.
    """
    if chunks == 1:
        return (HeadShare(slice(0, num_heads), slice(0, num_kv_heads), num_heads // num_kv_heads),)
    possible = {n: found for n in range(1, num_heads + 1) if (found := _chunks(num_heads, num_kv_heads, sp_size, n))}
    if chunks == "auto":
        whole = {n: found for n, found in possible.items() if n <= min(num_kv_heads, _MOST_CHUNKS)}
        chunks = max((n for n, found in whole.items() if not any(c.num_query % sp_size for c in found)), default=1)
    if chunks != 1 and chunks not in possible:
        raise ValueError(
            f"head_chunks={chunks} does not fit an attention layer with {num_heads} query and {num_kv_heads} key/value "
            f"heads over sp_size={sp_size}: every rank needs a query head of every chunk. Choose it from {[*possible]}, or 'auto'."
        )
    return possible.get(chunks) or chunk_heads(num_heads, num_kv_heads, sp_size, 1)


def _chunks(num_heads, num_kv_heads, sp_size, chunks):
    groups = num_heads // num_kv_heads
    if chunks <= num_kv_heads:
        kv = _balanced(num_kv_heads, chunks)
        found = [HeadShare(slice(r.start * groups, r.stop * groups), slice(r.start, r.stop), groups) for r in kv]
    elif chunks % num_kv_heads == 0:
        found = share_heads(num_heads, num_kv_heads, chunks)
    else:
        return None
    return tuple(found) if min(chunk.num_query for chunk in found) >= sp_size else None


def _share(query: range, groups: int) -> HeadShare:
    kv_of_query = [head // groups for head in query]
    first, last = kv_of_query[0], kv_of_query[-1]
    repeats = {kv_of_query.count(kv) for kv in range(first, last + 1)}
    query, kv = slice(query.start, query.stop), slice(first, last + 1)
    if len(repeats) == 1:
        return HeadShare(query, kv, repeats.pop())
    return HeadShare(query, kv, 1, tuple(head - first for head in kv_of_query))
