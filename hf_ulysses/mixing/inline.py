"""Lightning attention, whose scan is a loop in the module's own forward: there is no function to stand in front of.

The module's forward runs for the whole row and this rank's heads, between two exchanges at its children:

    hidden states (a stand-in as long as the row, without memory) -> children that read them get the shard
    `entrance`  its output, all heads of the shard    -> all-to-all -> the row of this rank's heads
    `leaving`   its input, the row of this rank's heads -> all-to-all -> all heads of the shard
"""

from dataclasses import dataclass

from ..core.all_to_all import Exchange, gather_heads_scatter_seq, gather_seq_scatter_all
from ..core.cut import pad
from ..core.heads import share_heads
from ..core.hooks import around


@dataclass(frozen=True)
class Inline:
    """Names in such a module: of two children, of its number of heads, and of its buffers with the heads' dimension."""

    entrance: str
    leaving: str
    count: str
    buffers: dict

    def fits(self, module):
        names = [self.entrance, self.leaving, self.count, *self.buffers]
        return all(hasattr(module, name) for name in names)


INLINE = (
    Inline(
        "qkv_proj", "norm", "num_attention_heads",
        {"slope_rate": 0, "query_decay": 0, "key_decay": 0, "diagonal_decay": 1},
    ),
)  # fmt: skip


def attach(module, spec, sharded_call) -> list:
    """The handles. `sharded_call()`: the attachment's call in a sharded forward (scans.py), else `None`."""
    running = []

    def enter(module, args, kwargs):
        call, num_heads = sharded_call(), getattr(module, spec.count)
        call = call if call is not None and num_heads >= call.attachment.size else None
        running.append(call)
        if call is None:
            return None
        call.attachment.scans += 1
        call.hidden_states = args[0] if args else kwargs["hidden_states"]
        # As long as the row, without memory.
        B, _, size = call.hidden_states.shape
        call.stand_in = call.hidden_states.new_zeros(()).expand(B, call.length, size)
        shares = share_heads(num_heads, num_heads, call.attachment.size)
        call.exchange = Exchange(call.attachment.group, call.attachment.rank, shares, (True,))
        mine = call.exchange.mine
        call.saved = {name: getattr(module, name) for name in (spec.count, *spec.buffers)}
        setattr(module, spec.count, mine.num_query)
        for name, dim in spec.buffers.items():
            setattr(module, name, call.saved[name].narrow(dim, mine.query.start, mine.num_query))
        if "attention_mask" in kwargs:
            # The row's, which all ranks know: one whose shard has no padding may have been given none.
            mask = call.row.attention_mask
            kwargs = {**kwargs, "attention_mask": None if mask is None else mask[:, : call.length]}
        if args:
            return (call.stand_in, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": call.stand_in}

    def leave(module, args, kwargs, output):
        call = running.pop() if running else None
        for name, value in (call.saved if call is not None else {}).items():
            setattr(module, name, value)

    def before_child(child, args, kwargs):
        call = running[-1] if running else None
        return ((call.hidden_states, *args[1:]), kwargs) if call is not None and args[0] is call.stand_in else None

    def after_entrance(child, args, kwargs, output):
        call = running[-1] if running else None
        if call is None:
            return None
        heads_BHsE = output.unflatten(-1, (call.exchange.shares[-1].query.stop, -1)).transpose(1, 2)
        (row_BhSE,) = gather_seq_scatter_all([heads_BHsE], call.exchange)
        return row_BhSE[:, :, : call.length].transpose(1, 2).flatten(2)

    def before_leaving(child, args, kwargs):
        call = running[-1] if running else None
        if call is None:
            return None
        out_BShE = args[0].unflatten(-1, (call.exchange.mine.num_query, -1))
        out_BShE = pad(out_BShE, call.row.padded - call.length, 0)
        return (gather_heads_scatter_seq(out_BShE, call.exchange).flatten(2), *args[1:]), kwargs

    def nothing(*_):
        return None

    children = dict(module.named_children())
    handles = around(module, enter, leave)
    for name, child in children.items():
        handles += around(child, before_child, after_entrance if name == spec.entrance else nothing)
    return handles + around(children[spec.leaving], before_leaving, nothing)

