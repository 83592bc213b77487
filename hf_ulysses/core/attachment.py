"""attach(model): the engine on one model, with nothing else switched on. Works in a bare PyTorch loop.

    sp = attach(model, group)
    part = sp.shard(batch)                                  full rows -> this rank's part
    out = model(**part)                                     hooks: row facts, masks, rotary, attention
    loss = sp.reduce_loss(out.loss, part["shift_labels"])   the row's token mean
    sp.detach()

What attaching touches, all undone by `detach`: forward hooks on the model, its inner models and its position-dependent
rotary embeddings; and, in the modelling files of the model's classes (counted over attachments), the names through
which they find attention functions and mask builders. A deepcopy of the model is not attached.
"""

import inspect
import sys
import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist

from . import balance
from ..mixing import discovery
from . import recomputation
from ..adapters import support
from .hooks import around
from .attention import exchanging
from .gather import all_gather_single, gather_sequence
from .loss import reduce_loss
from .masks import BUILDERS, for_full_row
from ..adapters.outside_loss import LossRule
from ..adapters.patching import Names
from .rotary import depends_on_positions, feed_full_row
from .sequence import ROW_KEY, current_row, hold, release
from .entrance import shard_batch
from ..mixing.spread import Spread
from .trees import leaves, tree_map

_attachments: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()
_names = Names()
# A row whose ranks read different data trains silently on a mix: compare on the first batch and every so often.
_VERIFY_EVERY = 100


def attachment_of(module) -> "Attachment | None":
    """The attachment of a module, by identity; `None` for modules of models that are not attached."""
    return _attachments.get(module)


class Attachment:
    """Sequence parallelism on one model. Made by `attach`; also a context manager that detaches on exit.

    Attributes:
        group (`torch.distributed.ProcessGroup`), size (`int`), rank (`int`): the sequence-parallel group.
        exchanges (`int`): attention calls that went through the exchange since attaching.
        direct_calls, calls_on_whole_row (`int`): those that did not, and those of them in modules that were given the whole
            row: the start-up check counts them.
        gathered (`list[str]`): modules that run on the whole row (see whole.py), known after the first `shard`.
        split (`list[str]`): modules that mix positions by themselves and exchange inside (see mixers.py, spread/).
        under_engine (`bool`): whether all ranks train this model together, data-parallel ones too.
    """

    def __init__(self, model, group, seq_length=None, under_engine=False):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.seq_length, self.under_engine = seq_length, under_engine
        self.exchanges = self.direct_calls = self.calls_on_whole_row = 0
        self.gathered, self.split = [], []
        # Calls of functions that mix positions and were split over ranks (mixing/scans.py).
        self.scans = 0
        self._parameters = inspect.signature(type(model).forward).parameters
        self._discovered, self.discovering = self.size == 1, False
        # Whether the model's head scores labels as they are (labels.py), known after the first `shard`.
        self.scores_own_labels = False
        self._model = weakref.ref(model)
        # What a trial row goes through: the model, or what an engine made of it where only that can be run.
        self.entry = self._model
        # Whether `num_items_in_batch` counts the targets of all ranks, which loss and gradients then are shares of.
        self.counts_all_ranks = True
        # Found out by the trainer's start-up check.
        self.checked, self.loss_rule = False, LossRule()
        self._random_states = None
        self._verifications = 0
        self._held, self._handles, self._entered = [], [], []

        modules = list(model.modules())
        for module in modules:
            _attachments[module] = self
            if module is model or hasattr(module, "get_input_embeddings"):
                self._handles += self._hook(module)
            if depends_on_positions(module):
                self._handles += feed_full_row(module, self.rank, self.size)
        for source in _modelling_modules(modules):
            for name, wrap in _replacements(source):
                self._held.append(_names.hold(source, name, wrap))
        for source in balance.sources_of_others():
            self._held.append(_names.hold(source, balance.NAME, balance.for_full_row))
        self._finalizer = weakref.finalize(model, _release_names, self._held)

    # -- the public contract ------------------------------------------------------------------------------------------

    def shard(self, batch):
        """Cut a batch of full rows into this rank's part. Collective on the first call and every 100th.

        Every rank of the group passes the *same* rows. Adds `position_ids`, `shift_labels`, the row's facts and, when
        the row had to be padded to a multiple of the group's size, `attention_mask`; sets `use_cache=False` where the
        model has a cache.

        Raises:
            ValueError: a batch that cannot be cut (see `sharding.py`), or rows that differ within the group.
        """
        part = self.cut(batch, self.seq_length)
        self.verify(part[ROW_KEY])
        self.discover(batch.get("input_ids"))
        if self.scores_own_labels and torch.is_tensor(part.get("labels")):
            part["shift_labels"] = part["labels"]
        return part

    def discover(self, tokens=None):
        """Find out, once, which modules need the whole row (discovery.py); `shard` does it by itself. Collective.

        Args:
            tokens (`torch.Tensor`, *optional*): of shape `(B, S)`, what the trial row is made of; any tokens do.
        """
        if self._discovered:
            return
        model = self._model()
        if not hasattr(model, "get_input_embeddings"):
            # Not a language model: there is no telling what a row of it looks like.
            self._discovered = True
            return
        if not torch.is_tensor(tokens):
            tokens = torch.arange(64, device=next(model.parameters()).device)[None]
        self.discovering = True
        try:
            self._handles += discovery.discover(model, self, tokens)
        finally:
            self.discovering = False
        self._discovered = True

    def cut(self, batch, seq_length=None):
        """`shard` without its checks. No communication."""
        part = shard_batch(batch, self.rank, self.size, seq_length)
        if "use_cache" in self._parameters:
            part["use_cache"] = False
        return part

    def owns(self, module) -> bool:
        return attachment_of(module) is self

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in self._parameters

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

    @contextmanager
    def own_randomness(self):
        """Inside, dropout and noise draw from a stream of this rank's own; outside, the ranks of a group stay in step.

        Shards of a row that drew from one stream would share their dropout masks; data pipelines have to draw alike.
        """
        shared = _random_states()
        if self._random_states is None:
            torch.manual_seed(torch.initial_seed() + self.rank)
        else:
            _set_random_states(self._random_states)
        try:
            yield
        finally:
            self._random_states = _random_states()
            _set_random_states(shared)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _hook(self, module):
        parameters = inspect.signature(type(module).forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes_cache = "use_cache" in parameters
        outermost = module is self._model()

        def enter(module, args, kwargs):
            if attachment_of(module) is not self:
                # A copy takes the hooks along.
                if outermost and attachment_of(module) is None and kwargs.get(ROW_KEY) is not None:
                    raise ValueError(
                        f"{type(module).__name__} got a sharded batch but is a copy of an attached model and not attached "
                        "(deepcopy, regional compilation): parts of it would see a shard. Attach it, too, or compile the "
                        "whole model."
                    )
                return None
            row = kwargs.get(ROW_KEY)
            self._entered.append((module, hold(row if row is not None else current_row())))
            if row is None:
                if outermost and current_row() is None:
                    self._refuse_unsharded(module)
                by_name = takes_cache and len(args) < list(parameters).index("use_cache")
                return (args, {**kwargs, "use_cache": False}) if self.discovering and by_name else None
            if outermost:
                for inner in module.modules():
                    recomputation.carry_row(inner)
            counted = kwargs.get("num_items_in_batch") is not None and self.counts_all_ranks
            row.group, row.counted = self.group, counted or row.counted
            if not row.verified:
                self.verify(row)
            kwargs = dict(kwargs)
            if not takes_any:
                # What `shard` added and the model has no use for.
                added = (ROW_KEY, "shift_labels") if row.positions_given else (ROW_KEY, "shift_labels", "position_ids")
                kwargs = {key: value for key, value in kwargs.items() if key not in added or key in parameters}
            if takes_cache:
                kwargs["use_cache"] = False
            if row.attention_mask is None and "attention_mask" in kwargs:
                # `shard` added it for those who count tokens; the model shall do what it does without one.
                kwargs["attention_mask"] = None
            return args, kwargs

        def leave(module, args, kwargs, output):
            if self._entered and self._entered[-1][0] is module:
                release(self._entered.pop()[1])
                if outermost and any(isinstance(value, Spread) for value in leaves(output)):
                    # Attention weights that were asked for.
                    return tree_map(lambda _, value: value.whole() if isinstance(value, Spread) else value, output)

        return around(module, enter, leave)

    def _refuse_unsharded(self, module):
        if module.training and torch.is_grad_enabled():
            raise ValueError(
                f"{type(module).__name__} was attached for sequence parallelism (sp_size={self.size}) but trains on a "
                "batch that was not sharded. Pass all of `sp.shard(batch)` to the model. Under Accelerate, pass the "
                "dataloader to accelerator.prepare() together with the model, or wrap it: "
                "dataloader = accelerator.deepspeed_ulysses_dl_adapter(dataloader, model)."
            )

    def row_outside_kwargs(self, module, row):
        """The current row, for attention that got none in its keyword arguments; an error if it would be lost."""
        if row is not None and recomputation.loses_row():
            raise ValueError(
                f"{type(self._model()).__name__} passes no keyword arguments on to {type(module).__name__} and runs it again "
                "in backward (checkpointing, reversible layers), where the row's facts would be lost. Switch gradient "
                "checkpointing off, or train it without sequence parallelism."
            )
        return row

    def verify(self, row):
        """Compare the row's checksum within the group, on the first call and every 100th. Collective then."""
        row.verified = True
        self._verifications += 1
        if (self._verifications - 1) % _VERIFY_EVERY:
            return
        checksums = row.checksum.new_empty(self.size * len(row.checksum))
        all_gather_single(checksums, row.checksum.contiguous(), group=self.group)
        checksums = checksums.view(self.size, -1).tolist()
        if any(checksum != checksums[0] for checksum in checksums):
            raise ValueError(
                "The ranks of a sequence-parallel group read different rows; (batch, length, checksums of tokens and labels) per rank: "
                f"{[tuple(c) for c in checksums]}. All of them must read the same batch: split the data over "
                "data-parallel ranks only, seed shuffling and random collators alike, and check that `group` is not "
                "the data-parallel group."
            )


def _generators():
    # Dropout draws on the device.
    return [torch, torch.get_device_module()] if torch.accelerator.is_available() else [torch]


def _random_states() -> list:
    return [module.get_rng_state() for module in _generators()]


def _set_random_states(states) -> None:
    for module, state in zip(_generators(), states):
        module.set_rng_state(state)


def detach_all() -> None:
    """Detach every attached model of the process."""
    for attachment in set(_attachments.values()):
        attachment.detach()


def attach(model, group=None, *, seq_length=None, under_engine=False) -> Attachment:
    """Attach sequence parallelism to `model`. Not collective, but every rank of `group` must do it.

    Args:
        model (`torch.nn.Module`): a Transformers model, wrapped (PEFT, DDP, FSDP2, DeepSpeed) or not.
        group (`torch.distributed.ProcessGroup`, *optional*): whose ranks share a row; defaults to all ranks.
        seq_length (`int`, *optional*): the only row length allowed.
        under_engine (`bool`, *optional*, defaults to `False`): all ranks of the world train this model together, so that
            what is collective at the start is so over all of them.

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
    support.check_model(model, dist.get_world_size(group))
    return Attachment(model, group, seq_length, under_engine)


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
        _names.release(held.pop())
