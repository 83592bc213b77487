"""attach(model): the engine on one model, with nothing else switched on. Works in a bare PyTorch loop.

    sp = attach(model, group)
    out = model(**batch)                                    whole rows in, whole rows out; average gradients over ranks
    sp.detach()

or, with rows that are sharded explicitly:

    part = sp.shard(batch)                                  full rows -> this rank's part
    out = model(**part)                                     shards in, shards out; out.loss is the row's
    loss = sp.reduce_loss(out.loss, part["shift_labels"])   the row's token mean

What attaching touches, all undone by `detach`: forward hooks on the model, its head, its decoder and the decoder's
position-dependent rotary embeddings; and, in the modelling files of the decoder's classes (counted over attachments), the
names through which they find attention functions and mask builders. A deepcopy of the model is not attached.
"""

import copy
import inspect
import logging
import sys
import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..mixing import locate, scans
from ..mixing.whole import depends_on_positions, run_rotary_whole
from . import balance, recomputation
from .attention import exchanging
from .control import Control, own_group
from .cut import shard_batch
from .entrance import Entrance, Forward, decoder_of, towers_of
from .exits import Exit, head_of, open_exit, scores_shift_labels
from .gather import gather_sequence
from .hooks import around
from .loss import reduce_loss
from .masks import BUILDERS, for_full_row
from .models import check_model
from .names import Names
from .peers import Peers
from .randomness import called_by
from .sequence import ROW_KEY, current_row, forget_rows, hold, in_no_graph, on_whole_row, release

logger = logging.getLogger(__name__)

_attachments: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()
_names = Names()


def attachment_of(module) -> "Attachment | None":
    """The attachment of a module, by identity; `None` for modules of models that are not attached."""
    return _attachments.get(module)


class Attachment:
    """Sequence parallelism on one model. Made by `attach`; also a context manager that detaches on exit.

    Attributes:
        group (`torch.distributed.ProcessGroup`), size (`int`), rank (`int`): the sequence-parallel group.
        exchanges, scans (`int`): calls of attention functions, and of functions that mix positions otherwise, that went
            through the exchange since attaching; those that torch.compile has traced are not counted.
        gathered (`list[str]`): modules that run on the whole row (mixing/whole.py), known after the first forward.
        runs_whole (`bool`): whether all of the decoder does.
        counts_by_mask (`bool`): whether the decoder counts positions that it is not given where the 2-D mask is one.
        attending (`bool`): whether an attention function runs just now, or has raised.
        splits_loss (`bool`): whether the head scores shards, or is given whole rows (exits.py).
        loss_only (`bool`): set while nobody wants more of an output than its loss; logits are then read by name only.
        shards_wanted (`bool`): set while calls without labels shall return shards (declared.py).
        on_first_step (`Callable`, *optional*): called once, with the forward and the output of the first training step (adapters).
        under_engine (`bool`): whether all ranks train this model together, data-parallel ones too.
    """

    def __init__(self, model, group, seq_length=None, trial=True, under_engine=False):
        # What travels for the model does not queue behind an engine's collectives.
        self.group = own_group(group)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.seq_length, self.under_engine = seq_length, under_engine
        self.exchanges = self.scans = 0
        self.gathered, self.attending, self.runs_whole = [], False, False
        self.loss_only = self.shards_wanted = self.counts_by_mask = False
        self.forward = self.last_forward = self.on_first_step = None
        self.peers, self.control = Peers(self.group), Control(self.group)
        self._tried = self.size == 1 or not trial
        self._plain, self._in_engine, self._is_engine, self._trying = 0, False, False, False
        self._model = weakref.ref(model)
        # What a trial row goes through: the model, or what an engine made of it where only that can be run.
        self.entry = self._model
        self._held, self._handles, self._again = [], [], []
        decoder, head = decoder_of(model), head_of(model)
        self._decoder = weakref.ref(decoder)
        self.splits_loss = head is not None and scores_shift_labels(head)
        self.entrance = Entrance(self, decoder)
        self._finalizer = weakref.finalize(model, _release_names, self._held)
        if self.size > 1:
            self._hook(model, head, decoder)

    def _hook(self, model, head, decoder):
        for module in {model, *([head] if head is not None else []), *decoder.modules()}:
            _attachments[module] = self
        self._handles += around(model, self._begin, self._end)
        if head is not None:
            exits = Exit(self, head)
            self._handles += around(head, exits.enter, exits.leave)
        self._handles += around(decoder, self.entrance.enter, self.entrance.leave)
        for module in decoder.modules():
            if depends_on_positions(module):
                self._handles += run_rotary_whole(module, self)
        layers = {member for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) for member in module}
        for module in called_by(decoder):
            self._handles += around(module, self.entrance.streams.begin, self.entrance.streams.end)
            if module in layers and not type(module).__module__.startswith("torch."):
                self._handles += around(module, self._begin_layer, self._end_layer)
        self._handles += scans.attach(list(decoder.modules()))
        for source in _modelling_modules([model, *decoder.modules()]):
            for name, wrap in _replacements(source):
                self._held.append(_names.hold(source, name, wrap))
        for source in balance.sources_of_others():
            self._held.append(_names.hold(source, balance.NAME, balance.for_full_row))
        if dist.get_rank() == 0:
            _report_towers(model, decoder, self.size)

    # -- the public contract ------------------------------------------------------------------------------------------

    def shard(self, batch):
        """Cut a batch of full rows into this rank's part. Every rank of the group passes the *same* rows.

        Collective on the first call, which compares them and tries a short row; later batches are compared by the forward that they go through.

        Adds `position_ids`, `shift_labels`, the row's facts and, when the row had to be padded to a multiple of the group's
        size, `attention_mask`; sets `use_cache=False` where the model has a cache.

        Raises:
            ValueError: a batch that cannot be cut (see `cut.py`), or rows that differ within the group.
        """
        self.locate()
        part = shard_batch(batch, self.rank, self.size, self.seq_length, self.counts_by_mask)
        if "use_cache" in inspect.signature(type(self._model()).forward).parameters:
            part["use_cache"] = False
        if not self.peers.judged:
            self.compare_rows(part[ROW_KEY])
        return part

    def locate(self, device=None):
        """Find out, once, which modules need the whole row (mixing/locate.py); the first forward does it by itself. Collective.

        Args:
            device (`torch.device`, *optional*): where the short row is made; defaults to where the model is.
        """
        if self._tried:
            return
        self._tried = True
        model = self._model()
        if not hasattr(model, "get_input_embeddings"):
            return  # Not a language model: there is no telling what a row of it looks like.
        # The short row has a length of its own, and is not the first batch to be judged.
        seq_length, peers = self.seq_length, self.peers
        self.seq_length, self.peers = None, Peers(self.group)
        self._trying = True  # Nobody reads what comes out, least of all the hooks of an engine around the model.
        try:
            self._handles += locate.locate(model, self, device or next(model.parameters()).device)
        except BaseException:
            self._tried = False
            raise
        finally:
            self.seq_length, self.peers, self.forward = seq_length, peers, None
            self._trying = False

    @contextmanager
    def plain(self):
        """Inside, the model computes as if it were not attached."""
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1

    @property
    def is_plain(self) -> bool:
        return self._plain > 0 or self.runs_whole

    def inside(self, engine) -> None:
        """Say that `engine` (DDP, DeepSpeed's, a compiled module) calls the model: outputs are opened when they leave it."""
        if engine is not self._model():
            self._handles += around(engine, self._begin_engine, self._end_engine)

    def _inside_fsdp(self, module):
        """FSDP's own hook looks at all that a module returns, which must not count as reading it: ours comes behind it."""
        # By name: its import takes seconds, which who has such a module has paid.
        if not self._is_engine and any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            self._handles.append(module.register_forward_hook(self._end_engine, with_kwargs=True, always_call=True))
            self._is_engine = True

    def owns(self, module) -> bool:
        return attachment_of(module) is self

    @property
    def decoder(self):
        return self._decoder()

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in self.entrance.names

    def reduce_loss(self, loss, shift_labels, num_items_in_batch=None):
        """The row's token mean, equal on all ranks; see `loss.reduce_loss`. Collective."""
        return reduce_loss(loss, shift_labels, self.group, num_items_in_batch)

    def gather(self, tensor, like=None, dim=1):
        """Shards `(B, s, ...)` -> the full row `(B, S, ...)`, padding removed. Differentiable, collective.

        Args:
            tensor (`torch.Tensor`): this rank's shard.
            like (`Mapping`, *optional*): the sharded batch it belongs to; without it the padding stays.
            dim (`int`, *optional*, defaults to 1): the sequence dimension.
        """
        return gather_sequence(tensor, self.group, dim, None if like is None else like[ROW_KEY].length)

    def also_remove(self, handles):
        """Have `detach` remove `handles`, too."""
        self._handles += handles

    def detach(self):
        """Undo `attach`: remove hooks, restore names. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._finalizer.detach():
            _release_names(self._held)
        for module in self._model().modules() if self._model() is not None else ():
            recomputation.forget_row(module)
        for module in [module for module, attachment in _attachments.items() if attachment is self]:
            del _attachments[module]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.detach()

    # -- hooks around the model ---------------------------------------------------------------------------------------

    def _begin(self, module, args, kwargs):
        if attachment_of(module) is not self:
            # A copy takes the hooks along.
            if attachment_of(module) is None and kwargs.get(ROW_KEY) is not None:
                raise ValueError(
                    f"{type(module).__name__} got a sharded batch but is a copy of an attached model and not attached "
                    "(deepcopy, regional compilation): parts of it would see a shard. Attach it, too, or compile the "
                    "whole model."
                )
            return None
        self._inside_fsdp(module)
        device = next((value.device for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
        if not self._plain:
            self.locate(device)
        if self.is_plain:
            if kwargs.get(ROW_KEY) is not None:
                raise ValueError(
                    f"{type(module).__name__} cannot be split along the sequence and runs on whole rows, but was given a "
                    "sharded batch. Pass the batch itself, or train without sequence parallelism."
                )
            return None
        # What an interrupted forward left behind; an engine calls its model once.
        self._in_engine &= self.forward is None or self._trying
        self._in_engine |= self._is_engine
        self.entrance.reset()
        forget_rows()
        in_no_graph(self.peers.judge_last)
        kwargs = dict(kwargs)
        # A copy: what mask builders note in it is of this model's forward.
        self.forward = Forward(given=copy.copy(kwargs.pop(ROW_KEY, None)))
        if self.forward.given is not None and device not in (None, self.forward.given.position_ids.device):
            # FSDP's root moves tensors, and no object of ours.
            self.forward.given = self.forward.given.to(device)
        self.forward.tokens = [kwargs[name] for name in ("input_ids", "labels") if torch.is_tensor(kwargs.get(name))]
        if self.forward.given is not None:
            self.forward.outer = hold(self.forward.given)  # For masks that are built in front of the decoder.
        if self.forward.given is not None and not _takes_any(module):
            # What `shard` added and the model has no use for.
            added = ("shift_labels",) if self.forward.given.positions_given else ("shift_labels", "position_ids")
            parameters = inspect.signature(type(module).forward).parameters
            kwargs = {key: value for key, value in kwargs.items() if key not in added or key in parameters}
        return args, kwargs

    def _end(self, module, args, kwargs, output):
        forward = self.forward
        if forward is None or self.is_plain or attachment_of(module) is not self:
            return None
        if forward.outer is not None:
            release(forward.outer)
            forward.outer = None
        return None if self._in_engine or self._trying else self._leave(output)

    def _begin_engine(self, module, args, kwargs):
        self._in_engine, self.forward = True, None

    def _end_engine(self, module, args, kwargs, output):
        self._in_engine = False
        return self._leave(output)

    def _leave(self, output):
        forward, self.forward = self.forward, None
        self.last_forward = forward
        if output is None or forward is None or self._trying:
            return None
        if self.on_first_step is not None and forward.row is not None and torch.is_grad_enabled() and self._model().training:
            self.on_first_step, report = None, self.on_first_step
            report(forward, output)
        return open_exit(self, forward, output)

    # -- for the rest of the package ----------------------------------------------------------------------------------

    def row_of(self, module, kwargs):
        """The row that a module of the decoder works on, `None` where it runs plainly or has been given the whole of it."""
        row = kwargs.get(ROW_KEY) or current_row()
        running = self.entrance.running
        is_plain = self.is_plain or on_whole_row() or running and running[-1] is None
        if row is None and not is_plain and (running or torch.is_grad_enabled()):
            self._refuse(module)
        return row

    def _begin_layer(self, module, args, kwargs):
        """One that runs again in backward has the row of its first time, or is refused: not all that is in it asks for the row."""
        inside = self.entrance.running or current_row() is not None or on_whole_row()
        again = not inside and not self.is_plain and self.owns(module)
        row = kwargs.get(ROW_KEY) if again else None
        if again and row is None and torch.is_grad_enabled():
            self._refuse(module)
        self._again.append(None if row is None else hold(row))

    def _end_layer(self, module, args, kwargs, output):
        if self._again and (token := self._again.pop()) is not None:
            release(token)

    def _refuse(self, module):
        raise ValueError(
            f"{type(module).__name__} runs outside of its decoder's forward, where the row's facts are lost: a layer that is run "
            "again in backward by other means than gradient checkpointing (reversible layers), or called by itself. Train "
            f"{type(self._model()).__name__} without sequence parallelism, or without that."
        )

    def share_of_auxiliary(self, forward) -> float:
        """What part of an auxiliary loss each rank adds to its loss: means over targets are weighted to the whole of it, sums
        over a count are added up."""
        return 1 / self.size if forward.counted else 1.0

    def carry_row(self, decoder):
        for module in decoder.modules():
            recomputation.carry_row(module)

    def compare_rows(self, row):
        """Compare the checksums of peers where no loss takes them along. Collective."""
        sums = self.peers.payload(row)
        dist.all_reduce(sums, group=self.group)
        self.peers.judge(row, sums)


def _takes_any(module):
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(module).forward).parameters.values())


def detach_all() -> None:
    """Detach every attached model of the process."""
    for attachment in set(_attachments.values()):
        attachment.detach()


def attach(model, group=None, *, seq_length=None, trial=True, under_engine=False, memory=None) -> Attachment:
    """Attach sequence parallelism to `model`. Not collective, but every rank of `group` must do it.

    Args:
        model (`torch.nn.Module`): a Transformers model, wrapped (PEFT, DDP, FSDP2, DeepSpeed) or not.
        group (`torch.distributed.ProcessGroup`, *optional*): whose ranks share a row; defaults to all ranks.
        seq_length (`int`, *optional*): the only row length allowed.
        trial (`bool`, *optional*, defaults to `True`): find out on a short row, before the first one, which modules need it
            whole. Without, all that mixes positions has to be attention or a declared scan.
        under_engine (`bool`, *optional*, defaults to `False`): all ranks of the world train this model together, so that
            what is collective at the start is so over all of them.
        memory (`dict` or `"max"`, *optional*): the memory switches (`hf_ulysses.memory.Settings`), until `detach()`.

    Returns:
        `Attachment`

    Raises:
        ValueError: the model cannot be trained exactly with a group of this size, or is attached already.
    """
    if not dist.is_initialized():
        raise ValueError("attach() needs torch.distributed: call torch.distributed.init_process_group() first.")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(
            "attach() was called by a rank outside of `group`: pass the group that this rank shares rows with."
        )
    for module in model.modules():
        if attachment_of(module) is not None:
            raise ValueError(f"{type(module).__name__} is attached already: detach() it first.")
    check_model(model, dist.get_world_size(group))
    attachment = Attachment(model, group, seq_length, trial, under_engine)
    if memory is not None:
        from ..memory import switch_on

        try:
            attachment.also_remove(switch_on(model, memory, attachment))
        except ValueError:
            attachment.detach()
            raise
    return attachment


class _Registry:
    """A modelling file's `ALL_ATTENTION_FUNCTIONS`, handing out functions that exchange."""

    def __init__(self, registry):
        self._registry = registry

    def __getattr__(self, name):
        return getattr(self._registry, name)

    def __contains__(self, key):
        return key in self._registry

    def __getitem__(self, key):
        return exchanging(self._registry[key], attachment_of)

    def get(self, key, default=None):
        found = self._registry.get(key, default)
        return exchanging(found, attachment_of) if callable(found) else found

    def get_interface(self, *args, **kwargs):
        return exchanging(self._registry.get_interface(*args, **kwargs), attachment_of)


def _report_towers(model, decoder, size):
    for name, tower in towers_of(model, decoder).items():
        # DeepSpeed keeps the size of a parameter that is elsewhere.
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in tower.parameters())
        logger.info(
            "%s runs %s (%.1f million parameters), in front of its decoder, on every rank: each of %d computes it for the "
            "whole row and holds its activations until backward where it is trained",
            type(model).__name__, name, count / 1e6, size,
        )  # fmt: skip


def _modelling_modules(modules):
    """The Python modules that define the classes of `modules`, base classes included; torch's own left out."""
    names = {cls.__module__ for module in modules for cls in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules and name.partition(".")[0] != "torch"]


def _replacements(source):
    """What to replace in a modelling file, found by the names that transformers' modelling files use."""
    for name in BUILDERS:
        if callable(vars(source).get(name)):
            yield name, for_full_row
    if callable(vars(source).get(balance.NAME)):
        yield balance.NAME, balance.for_full_row
    if "ALL_ATTENTION_FUNCTIONS" in vars(source):
        yield "ALL_ATTENTION_FUNCTIONS", _Registry
    if callable(vars(source).get("eager_attention_forward")):
        yield "eager_attention_forward", lambda core: exchanging(core, attachment_of)


def _release_names(held):
    while held:
        held.pop().remove()
