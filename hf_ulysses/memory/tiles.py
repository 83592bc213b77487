"""Running a function of single positions a tile of the sequence at a time, so that its inner values exist for one tile.

1. `cut` makes balanced tiles. How many of them run is a matter of the setting, not of the row: under ZeRO-3 every call
   gathers parameters, and all ranks have to gather equally often, whatever the lengths of their rows.
2. Each tile runs under `torch.utils.checkpoint`, so that backward, too, has the inner values of one tile. All tiles are
   one autograd graph: a parameter's gradient is accumulated from all of them and reduced by the engine once.
3. Results are written side by side into one tensor (`collected`), where `torch.cat` would hold everything twice.
"""

from ..core.pieces import again_in_backward, collected


def cut(length: int, tiles: int) -> list[slice]:
    """Cut `range(length)` into `tiles` slices whose lengths differ by at most one; empty ones last."""
    size, longer = divmod(length, tiles)
    starts = [tile * size + min(tile, longer) for tile in range(tiles + 1)]
    return [slice(start, stop) for start, stop in zip(starts, starts[1:])]


def in_tiles(function, tensors, dim: int, tiles: int, *, always: bool, random: bool = False):
    """`function(*tensors)`, a few positions at a time.

    Args:
        function (`Callable`): takes tensors, gives one tensor with the same positions in `dim`.
        tensors (`list[torch.Tensor]`): cut along `dim`, where all have the same length.
        always (`bool`): call it for empty tiles, too: with the last position, of whose result nothing is kept. Its gradient is zero
            then, but parameters are gathered in forward and backward as on every other rank.
        random (`bool`): whether it draws random numbers, which have to be the same when it runs again.
    """
    length = tensors[0].shape[dim]
    result = None
    for piece in cut(length, tiles if always else min(tiles, length)):
        empty = piece.start == piece.stop
        where = slice(length - 1, length) if empty else piece
        out = again_in_backward(function, *(tensor[(slice(None),) * dim + (where,)] for tensor in tensors), random=random)
        if empty:
            out = out.narrow(dim, 0, 0)
        if result is None:
            result = out.new_empty([*out.shape[:dim], length, *out.shape[dim + 1 :]])
        result = collected(result, out, dim, piece)
    return result
