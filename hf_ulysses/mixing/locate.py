"""The trial: which modules need the whole row, found out on a short row before the first step.

1. The row runs whole; of every module's arguments and results in the decoder a fingerprint is kept (prints.py).
2. It runs in shards, and every module is compared as it returns. A result that differs where the arguments agree is the
   module's own doing; arguments that differ are the doing of whoever calls. Attention and scans exchange (attention.py,
   scans.py) and agree; what does not, and all modules of its kind, run on the whole row from then on (whole.py), this call
   first. Where even that does not help, or the decoder's own code is to blame, all of the decoder runs whole, and is said so.
3. Rows without padding, padded ones and, where something was found, packed ones; with labels, so that the head is tried, too.

So no list of layer names decides, and a model that nobody has heard of is exact or refused. Two forwards a row, and one more
for every module whose code stops at a shard's shape.

Errors: what a device or a kernel says, and what happens inside of an attention function, is nobody's doing: it is raised on
all ranks. After every module the ranks tell each other how it went (control.py), so that none waits for one that failed.

Not covered: gradients (a module that is right in its outputs is right in its gradients, but for detached copies), and
effects that a short row with the current weights does not show.
"""

import logging
import re
import sys
import time
from contextlib import ExitStack, nullcontext

import torch

from ..core.control import Control
from ..core.cut import IGNORE_INDEX
from ..core.randomness import random_states, set_random_states
from ..core.sequence import ROW_KEY
from ..core.trees import tree_map
from . import inline
from .prints import Layout, Print, difference, place, pooled_otherwise
from .whole import map_arguments, run_whole, takes

logger = logging.getLogger(__name__)

_LONGEST = 2048
_SPECIAL_LENGTHS = re.compile(r"window|chunk|topk|top_k_tokens|block_size|budget|compress|local_attention")
# What cannot mix positions, so that noise is not taken for it; not what is derived from them, which may count.
_PER_POSITION = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Dropout)
# What a module may raise when it is given a shard where its code expects a row.
_OF_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError)
_OF_DEVICES = re.compile(r"CUDA|HIP|cuDNN|cuBLAS|NCCL|XPU|kernel|triton|inductor|dynamo|out of memory", re.IGNORECASE)
_FINE, _DIFFERS, _FAILED = range(3)
_PEER = "The trial failed on another rank"


class _NothingHelps(Exception):
    """The decoder cannot be split; on all ranks alike."""


class _PeerFailed(RuntimeError):
    """Another rank has failed."""


def locate(model, attachment, device) -> list:
    """Find the modules that need the whole row and let them have it.

    Collective over the attachment's group; over all ranks under an engine.

    Returns:
        `list` of hook handles. Raises `ValueError` on all ranks for a model that does not run on a short row.
    """
    trial = _Trial(model, attachment, device)
    state = [_state(module) for module in model.modules()]
    counts, states = (attachment.exchanges, attachment.scans), random_states()
    model.eval()
    try:
        # Eagerly: torch.compile would specialize on short rows, and on the hooks that watch them.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            trial.try_rows()
    except _NothingHelps as why:
        # The last resort: every rank computes the whole row. Exact, and no cheaper than without sequence parallelism.
        trial.give_up()
        attachment.runs_whole, attachment.gathered = True, [trial.names[attachment.decoder] or "the model"]
        if torch.distributed.get_rank() == 0:
            logger.warning(
                "%s runs on the whole row on every rank, so that sequence parallelism saves nothing: %s",
                type(model).__name__,
                why,
            )
    except BaseException:
        trial.give_up()
        raise
    finally:
        for module, saved in zip(model.modules(), state):
            _restore(module, *saved)
        attachment.exchanges, attachment.scans = counts
        set_random_states(states)
    return trial.handles


class _Trial:
    def __init__(self, model, attachment, device):
        self.model, self.attachment, self.entry = model, attachment, attachment.entry()
        inside = set(attachment.decoder.modules())
        self.names = {module: name for name, module in model.named_modules() if module in inside}
        # Under an engine every data-parallel replica takes part, so that all run the model equally often.
        self.control = Control(torch.distributed.group.WORLD) if attachment.under_engine else attachment.control
        # Module -> where it has the sequence (prints.place).
        self.found, self.handles = {}, []
        self.forwards, self.started = 0, time.monotonic()
        fitting = [m for m in self.names if any(spec.fits(m) for spec in inline.INLINE)]
        self.between_exchanges = {child for module in fitting for child in module.children()}
        config = getattr(model, "config", None)
        # An odd number of tokens per shard, so that blocks of positions lie across its edges.
        length = _short_length(config, attachment.size)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = getattr(text, "vocab_size", None) or 64
        self.tokens = (torch.arange(length, device=device) * 7 % min(vocabulary, 1000))[None]

    def give_up(self):
        for handle in self.handles:
            handle.remove()
        self.handles, self.attachment.gathered = [], []
        self.found.clear()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def try_rows(self):
        length = self.tokens.shape[1]
        # A token less than the shards could hold: one of them gets padding.
        short = {"input_ids": self.tokens[:, 1:]}
        mask = torch.ones_like(self.tokens).repeat(2, 1)
        mask[1, :5] = 0
        first = self._make_exact(short, labels=_targets(short["input_ids"], self.attachment.size))
        found = len(self.found)
        self._make_exact({"input_ids": self.tokens.repeat(2, 1), "attention_mask": mask}, optional=True)
        if (self.found or self.attachment.scans) and self.attachment.takes_positions:
            cuts = [0, length // 3 + 1, length // 2 + 2, length]
            positions = torch.cat([torch.arange(b - a, device=mask.device) for a, b in zip(cuts, cuts[1:])])
            self._make_exact({"input_ids": self.tokens, "position_ids": positions[None]}, optional=True)
        if len(self.found) > found:
            # What was changed for a later row must do for the first, too.
            self._split(first, short, short)

    def _make_exact(self, batch, labels=None, optional=False):
        """Returns the run of the whole row, `None` of one that the model does not take."""
        given = batch
        if labels is not None and self.attachment.splits_loss:
            # With a count, as trainers do: what is added to a loss, but is no sum over targets, shows then.
            count = {"num_items_in_batch": int((labels != IGNORE_INDEX).sum())} if takes(self.model, "num_items_in_batch") else {}
            given = dict(batch, labels=labels, **count)
        whole = _Run(self, batch, None)
        self._once(whole, given)
        try:
            failed, explainable = zip(*self.control.from_all((whole.failed, whole.explainable)))
        except RuntimeError as silence:
            # Its peers wait for it elsewhere, in an engine's own collectives, until it ends.
            raise whole.error or silence
        if any(failed):
            why = next(filter(None, failed))
            if not all(explainable):
                raise whole.error or _PeerFailed(f"{_PEER}: {why}")
            if optional and all(failed):
                logger.info("%s does not do %s without sequence parallelism either: %s", type(self.model).__name__, [*batch], why)
                return None
            raise ValueError(
                f"{type(self.model).__name__} does not run on the short row that is tried before the first step: {why}. "
                "SequenceParallelConfig(trial=False) does without, if it mixes positions by attention and scans alone."
            ) from whole.error
        mine = self._split(whole, batch, given)
        if given is not batch:
            self._judge_loss(whole.loss, mine.loss, whole.half)
        return whole

    def _split(self, whole, batch, given):
        """Run the row in shards until nothing differs; returns the last run."""
        for _ in self.names:
            mine = _Run(self, batch, whole)
            try:
                self._once(mine, given)
                if not self._stopped(mine):
                    return mine
            except _NothingHelps:
                # Perhaps positions are counted where the mask is one, as OPT's.
                if "attention_mask" not in batch or not self.attachment.takes_positions or self.attachment.counts_by_mask:
                    raise
                self.give_up()
                self.attachment.counts_by_mask = True
        raise _NothingHelps("every module has been tried")

    def _once(self, run, batch):
        self.forwards += 1
        if time.monotonic() - self.started > 2 and torch.distributed.get_rank() == 0:
            print(f"hf_ulysses: trying a short row before the first step, forward {self.forwards}", file=sys.stderr)
        self.attachment.forward = None  # That of the forward before.
        # With a cache, a model does not tell documents apart.
        caches = "use_cache" in self.attachment.entrance.names and takes(self.model, "use_cache")
        with self.attachment.plain() if run.reference is None else nullcontext():
            run.run(self.entry, {**batch, **({"use_cache": False} if caches else {})})

    def _judge_loss(self, whole, shards, half):
        """Whether the head scores shards as it scores the row; else its rows stay whole (exits.py)."""
        agree = whole is not None and shards is not None
        if agree:
            # A mean over other positions than the targets' shows in the fourth digit only; reordered sums in the seventh.
            tolerance = 3e-2 if whole.dtype in (torch.bfloat16, torch.float16) or half else 2e-5
            agree = bool((shards - whole).abs() <= tolerance * (1 + whole.abs()))
        self.attachment.splits_loss = all(self.control.from_all(agree))

    def _stopped(self, run):
        """Whether a forward stopped at a module that runs whole from now on; raises what is nobody's doing."""
        answers = [answer for answer in self.control.from_all((run.failed, run.culprit)) if answer[0]]
        if not answers:
            return False
        why = next((failed for failed, _ in answers if _PEER not in failed), _PEER)
        culprit = next((culprit for _, culprit in answers if culprit is not None), None)
        if culprit is not None:
            self.mend({name: module for module, name in self.names.items()}[culprit], f"it raised {why}", run)
            return True
        if run.error is None or isinstance(run.error, _PeerFailed):
            raise _PeerFailed(f"{_PEER}: {why}")
        raise run.error

    def mend(self, module, why, run):
        """Let `module`, and all of its kind, have the whole row."""
        name = type(module).__name__
        is_decoder = not isinstance(module, torch.nn.ModuleList) and sum(1 for _ in module.modules()) > len(self.names) / 2
        if module in self.found or is_decoder:
            # What a found one is given is not the whole row's, and cannot be made so: it is made around the layers.
            raise _NothingHelps(f"in {name}, {why}") from run.error
        logger.info("%s (%s): %s", self.names[module], name, why)
        for one in [one for one in self.names if _kind(one) == _kind(module)]:
            self.found[one] = {}
            self.handles += run_whole(one, self.found[one], self.attachment)
            run.learn(one)
        found = [name for one, name in self.names.items() if one in self.found]
        # What lies inside of one is given the whole row with it.
        self.attachment.gathered = [n for n in found if not any(n.startswith(f"{outer}.") for outer in found)]


class _Run:
    """One forward; with a `reference` run, one in shards, which is compared with it."""

    def __init__(self, trial, batch, reference):
        self.trial, self.reference = trial, reference
        size, (rows, length) = trial.attachment.size, batch["input_ids"].shape
        shard = -(-length // size)
        self.rows = rows
        self.layout = Layout(length, shard * size, shard, trial.attachment.rank, batch.get("attention_mask"))
        # Module -> for each of its calls, path -> print; what runs; modules that gave others what differs.
        self.inputs, self.outputs, self.running, self.blamed = {}, {}, [], {}
        self.loss = self.error = self.failed = self.culprit = None
        self.explainable = True
        self.suspended = self.half = trial.attachment.attending = False

    def run(self, entry, batch):
        with ExitStack() as hooks:
            for module in self.trial.names:
                hooks.callback(module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove)
                hooks.callback(module.register_forward_hook(self._after, with_kwargs=True).remove)
            try:
                self.loss = getattr(entry(**batch), "loss", None)
            except _NothingHelps:
                raise
            except Exception as error:  # Raised, or explained, when all ranks know of it.
                self._fail(error)
        if self.reference is not None and self.error is None and self.trial.control.largest(_FINE) == _FAILED:
            self.failed = _PEER

    def _fail(self, error):
        """Tell the others, who are at the next module or at the end; and whose doing it may be."""
        self.error, self.failed = error, f"{type(error).__name__}: {str(error)[:300]}"
        self.explainable = type(error) in _OF_SHAPES and not _OF_DEVICES.search(str(error))
        if self.reference is None or isinstance(error, _PeerFailed):
            return
        self.trial.control.largest(_FAILED)
        ours = [module for module in self.running if not type(module).__module__.startswith("torch.")]
        if self.explainable and ours and not self.trial.attachment.attending:
            self.culprit = self.trial.names[ours[-1]]

    def _before(self, module, args, kwargs):
        if self.suspended:
            return
        kwargs = {key: value for key, value in kwargs.items() if key != ROW_KEY}
        self._record(self.inputs, module, lambda keep: map_arguments(keep, module, args, kwargs))
        if self.reference is not None and module in self.trial.found:
            self._agreed(None)
            self.learn(module)
        elif self.reference is not None and self.running and (why := self._differs(module, "inputs")):
            self.blamed.setdefault(self.running[-1], why)
        self.running.append(module)

    def _after(self, module, args, kwargs, output):
        if self.suspended:
            return None
        self.running.pop()
        self._record(self.outputs, module, lambda keep: tree_map(keep, output, "out"))
        if self.reference is None:
            return None
        if type(module) in _PER_POSITION or not self._is_compared(module):
            if module in self.blamed and self.running:
                self.blamed.setdefault(self.running[-1], self.blamed.pop(module))
            return None
        why = self.blamed.pop(module, None) or self._differs(module, "outputs")
        if not self._agreed(why):
            return None
        self.trial.mend(module, next(filter(None, self.trial.control.from_all(why))), self)
        # Again, on the whole row by now: what comes after it is given what it should be.
        self.suspended = True
        try:
            output = module(*args, **kwargs)
        finally:
            self.suspended = False
        self.outputs[module].pop()
        self._record(self.outputs, module, lambda keep: tree_map(keep, output, "out"))
        if self._agreed(why := self._differs(module, "outputs")):
            self.trial.mend(module, why or "it differs on another rank", self)
        return output

    def _record(self, records, module, walk):
        prints = {}
        walk(lambda path, value: prints.update({path: Print(value, self.layout)}))
        self.half = self.half or any(seen.half for seen in prints.values())
        records.setdefault(module, []).append(prints)

    def _agreed(self, why) -> bool:
        worst = self.trial.control.largest(_DIFFERS if why else _FINE)
        if worst == _FAILED:
            raise _PeerFailed(_PEER)
        return worst == _DIFFERS

    def _expected(self, module, what) -> dict:
        """What the whole row's run saw in this call."""
        calls, number = getattr(self.reference, what).get(module, []), len(getattr(self, what)[module])
        return calls[number - 1] if number <= len(calls) else {}

    def _is_compared(self, module):
        """Whether the ranks talk after `module`: where the whole row's result has its length in one dimension.

        All ranks know that one; what works on some tokens only, as an expert does, may not be called on every rank.
        """
        given, returned = (self._expected(module, what).values() for what in ("inputs", "outputs"))
        of_the_row = [any(len(p.shape or ()) > 2 and self.layout.length in p.shape for p in prints) for prints in (given, returned)]
        # Or a row is pooled: to one state for each of the batch.
        return of_the_row[1] or of_the_row[0] and any(p.total is not None and p.shape[0] == self.rows for p in returned)

    def _differs(self, module, what):
        if module in self.trial.between_exchanges or any(outer in self.blamed for outer in self.running):
            return None
        expected = self._expected(module, what)
        for path, mine in getattr(self, what)[module][-1].items():
            if path not in expected:
                continue
            found = difference(expected[path], mine, self.layout, self.reference.half)
            if not found and what == "outputs" and self._is_compared(module):
                found = pooled_otherwise(expected[path], mine, self.reference.half)
            if found:
                got = "got" if what == "inputs" else "returned"
                return f"{self.trial.names[module] or type(module).__name__} {got} {found} ({path})"
        return None

    def learn(self, module):
        """Where a found module has the sequence, from the whole row's run; another row may show what was not there before."""
        places = self.trial.found[module]
        for calls in (self.reference.inputs, self.reference.outputs):
            for path, seen in (item for prints in calls.get(module, []) for item in prints.items()):
                where = place(path, seen, self.layout)
                if where is not None and not isinstance(places.get(path), str):
                    places[path] = where if isinstance(where, str) else places.get(path, where)


def _targets(tokens, size):
    """Labels of a trial row: uneven over the shards, so that a mean of means shows."""
    targets = tokens.clone()
    targets[:, 3 : targets.shape[1] // size : 2] = IGNORE_INDEX
    return targets


def _state(module):
    """What a forward may change in a module: its mode and other plain attributes, and its buffers."""
    plain = {name: value for name, value in vars(module).items() if _is_plain(value)}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None}
    return set(vars(module)), plain, buffers


def _restore(module, names, plain, buffers):
    for name in [name for name, value in vars(module).items() if name not in names and _is_plain(value)]:
        delattr(module, name)
    vars(module).update(plain)
    for name, (buffer, content) in buffers.items():
        buffer.copy_(content)
        module._buffers[name] = buffer


def _is_plain(value):
    # Tensors that are no buffers are replaced, not written to: rotary embeddings remember the longest row in one.
    return type(value) in (bool, int, float, type(None)) or torch.is_tensor(value)


def _short_length(config, size):
    """Longer than what the configuration treats specially, an odd number of tokens for each shard."""
    shard = -(-(max([12 * size, *_special_lengths(config)]) + 5) // size)
    return (shard + 1 - shard % 2) * size


def _special_lengths(config):
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    if values.get("rope_type") in ("dynamic", "longrope"):
        yield min(values.get("original_max_position_embeddings") or 0, _LONGEST)
    for name, value in values.items():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _special_lengths(value)
        elif type(value) is int and value <= _LONGEST and _SPECIAL_LENGTHS.search(str(name)):
            yield value


def _kind(module):
    """What modules of one kind have in common: their class and their children's classes."""
    return type(module), tuple((name, type(child)) for name, child in module.named_children())
