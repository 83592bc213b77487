"""Modules that need the whole row: run on it on every rank, and keep this shard's part of what comes out.

Attention goes through the exchange. What mixes or counts positions elsewhere (linear attention, recurrences,
convolutions, indexers, attention that calls no interface, embeddings that count) is found by discovery.py; what does not
exchange around its functions (mixers.py) runs here:

    run_whole    a module inside a layer     inputs gathered along the sequence -> the module -> own shard kept
    run_body     a model around its layers   inputs gathered, embeddings, masks and biases made for the whole row;
                                             each layer gets its shard of the hidden states, and what was made, whole

Gradients: every rank's loss is of its own shard, so each rank's gradient of a parameter is its share, as everywhere
else; what reaches the gathered inputs is summed over ranks by the gather's backward. The row's activations inside of a
module whose inputs are gathered are held like its shard's are; gradient checkpointing frees them layer by layer.
"""

import inspect

import torch

from ..core.hooks import around
from ..core.packed import DocumentMask
from ..core.gather import gather_sequence
from ..core.sequence import ROW_KEY, current_row, hold, release
from ..core.trees import tree_map

# What discovery saw of an argument or result: the dimension that is as long as the row; `None` when there is none;
# "mask" for the 2-D padding mask; "absent" for positions that the model counts by itself when the user gives none.
Where = int | str | None


class Whole:
    """The hooks of one attachment's whole modules. `dims` says, per module, where the sequence lies in its arguments.

    Args:
        attachment (`Attachment`): whose group shares the row.
    """

    def __init__(self, attachment):
        self._attachment = attachment
        self._entered = []
        self._bodies = []

    def run_whole(self, module, dims):
        """Returns the handles.

        Args:
            dims (`dict`): path of an argument or result -> what discovery saw there (see `Where`).
        """

        def enter(module, args, kwargs):
            row = self._row(module, kwargs)
            if row is None:
                return self._enter(module, None)
            args, kwargs = self._gather(module, args, kwargs, row, dims, _seen(row))
            if takes(module, "cu_seq_lens_q"):
                kwargs.update(row.boundaries)
            kwargs.pop(ROW_KEY, None)
            self._enter(module, row)
            return args, kwargs

        def leave(module, args, kwargs, output):
            row = self._leave(module)
            return output if row is None else self._cut(output, row, dims, _seen(row))

        return around(module, enter, leave)

    def run_body(self, module, layers):
        """Returns the handles: `module`'s own code sees the whole row, each of `layers` its shard."""

        def enter(module, args, kwargs):
            row = self._row(module, kwargs)
            if row is None:
                return self._enter(module, None)
            args, kwargs = self._gather(module, args, kwargs, row, {})
            if not row.positions_given:
                kwargs.pop("position_ids", None)
            if "attention_mask" in kwargs:
                kwargs["attention_mask"] = row.attention_mask
            if takes(module, "cu_seq_lens_q"):
                kwargs.update(row.boundaries)
            self._bodies.append(row)
            self._enter(module, row)
            return args, kwargs

        def leave(module, args, kwargs, output):
            row = self._leave(module)
            if row is not None:
                self._bodies.pop()
            return output if row is None else self._cut(output, row, {})

        def enter_layer(module, args, kwargs):
            row = kwargs.get(ROW_KEY) or (self._bodies[-1] if self._bodies and current_row() is None else None)
            self._entered.append((module, hold(row if row is not None else current_row()), None))
            if row is None:
                return None
            self._attachment.refuse_reversible(module, row)
            args, kwargs = self._cut_for_layer(module, args, kwargs, row)
            if takes(module, ROW_KEY):
                kwargs[ROW_KEY] = row
            return args, kwargs

        def leave_layer(module, args, kwargs, output):
            self._leave(module)

        handles = around(module, enter, leave)
        for layer in layers:
            handles += around(layer, enter_layer, leave_layer)
        return handles

    def hold_row(self, layer):
        """Returns the handles: while `layer` runs, also in a recomputation, its row is the current one."""

        def enter(module, args, kwargs):
            row = kwargs.get(ROW_KEY)
            self._entered.append((module, hold(row if row is not None else current_row()), None))

        return around(layer, enter, lambda module, args, kwargs, output: self._leave(module) and None)

    # -- rows in and out ----------------------------------------------------------------------------------------------

    def _row(self, module, kwargs):
        if not self._attachment.owns(module):
            return None  # A deepcopy takes the hooks along.
        return self._attachment.row_of(module, kwargs)

    def _enter(self, module, row):
        self._entered.append((module, hold(None) if row is not None else hold(current_row()), row))

    def _leave(self, module):
        if not self._entered or self._entered[-1][0] is not module:
            return None
        _, token, row = self._entered.pop()
        release(token)
        return row

    def _gather(self, module, args, kwargs, row, dims, length=None):
        shard, length = row.padded // self._attachment.size, row.padded if length is None else length

        def gather(path, value):
            where = dims.get(path)
            if where == "absent" and not row.positions_given:
                return None
            is_mask = path.endswith("mask") and torch.is_tensor(value) and value.dim() == 2
            if row.attention_mask is not None and (where == "mask" or is_mask):
                # The row's, which all ranks know; a rank whose shard has no padding may have been given none.
                mask = row.attention_mask[:, :length]
                return mask.to(value.dtype) if is_mask else mask
            if isinstance(value, DocumentMask):
                value = value.whole()
            if not torch.is_tensor(value) or path.endswith("labels"):
                return value
            if path.endswith("position_ids") and value.shape[-1] == shard:
                return row.position_ids[(0,) * max(row.position_ids.dim() - value.dim(), 0)][..., :length]
            dim = where if path in dims and where != "absent" else _sequence_dim(value, shard)
            if dim is not None and value.dim() > dim and value.shape[dim] == shard:
                return gather_sequence(value, self._attachment.group, dim, length).contiguous()
            return _shorten(value, row.padded, length).contiguous()

        return map_arguments(gather, module, args, kwargs)

    def _cut(self, output, row, dims, length=None):
        shard, length = row.padded // self._attachment.size, row.padded if length is None else length

        def cut(path, value):
            if not torch.is_tensor(value):
                return value
            dim = dims.get(path, _sequence_dim(value, length))
            if dim is None or value.dim() <= dim or value.shape[dim] != length:
                return value
            if length < row.padded:
                padding = list(value.shape)
                padding[dim] = row.padded - length
                value = torch.cat([value, value.new_zeros(padding)], dim)
            return value.narrow(dim, self._attachment.rank * shard, shard)

        return tree_map(cut, output, "out")

    def _cut_for_layer(self, module, args, kwargs, row):
        """Hidden states, rotary tables and positions are cut; masks and biases, with a row of keys each, stay whole."""
        shard = row.padded // self._attachment.size
        hidden_states = list(inspect.signature(type(module).forward).parameters)[1]

        def cut(path, value):
            if not torch.is_tensor(value) or isinstance(value, DocumentMask):
                return value
            dim = None
            if path.endswith("position_ids"):
                dim = value.dim() - 1
            elif value.dim() == 3 and (value.shape[-1] != row.padded or path == hidden_states):
                dim = 1
            elif value.dim() == 4 and value.shape[-1] != row.padded:
                dim = 2
            if dim is None or value.shape[dim] != row.padded:
                return value
            return value.narrow(dim, self._attachment.rank * shard, shard)

        return map_arguments(cut, module, args, kwargs)


def map_arguments(function, module, args, kwargs):
    """`function(path, leaf)` over a module's arguments, whose paths start with the parameter's name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    names += [f"*{i}" for i in range(len(args))]
    args = tuple(tree_map(function, value, name) for name, value in zip(names, args))
    return args, {name: tree_map(function, value, name) for name, value in kwargs.items()}


def _sequence_dim(tensor, length):
    """Where a sequence of `length` lies in a tensor that discovery has not seen: models put it behind the batch."""
    if tensor.dim() == 1:
        return 0 if tensor.shape[0] == length else None
    return 1 if tensor.dim() in (2, 3) and tensor.shape[1] == length else None


def _shorten(tensor, padded, length):
    """The row without the padding that sharding added: what is run whole sees what it would see without sharding."""
    for dim, n in enumerate(tensor.shape):
        if n == padded and length < padded:
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _seen(row):
    """How much of the row a module sees: not the padding behind it, unless the user's boundaries count that, too."""
    return row.padded if row.boundaries else row.length


def layers_of(module):
    """The layers that `module` runs one after the other: members of its outermost module lists."""
    found = []
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            found += list(child)
        elif not isinstance(child, (torch.nn.Sequential, torch.nn.ModuleDict)):
            found += layers_of(child)
    return found


def takes(module, name):
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
