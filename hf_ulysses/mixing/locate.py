"""The trial: which modules need the whole row, found out on a short row before the first step.

1. The row runs whole; of every module's arguments and results in the decoder a fingerprint is kept (prints.py).
2. It runs in shards, and every module is compared as it returns. A result that differs where the arguments agree is the
   module's own doing; arguments that differ are the doing of whoever calls. Attention and scans exchange (attention.py,
   scans.py) and agree; what does not, and all modules of its kind, run on the whole row from then on (whole.py), this call
   first. A decoder that does so with its own code, around its layers, runs that code on the whole row.
   What even then does not agree runs whole altogether, and is said so.
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
from .prints import Layout, Print, difference, places, pooled_otherwise
from .whole import Whole, layers_of, map_arguments, takes

logger = logging.getLogger(__name__)

_LONGEST = 2048
_SPECIAL_LENGTHS = re.compile(r"window|chunk|topk|top_k_tokens|block_size|budget|compress|local_attention")
# What cannot mix positions, so that noise is not taken for it.
_PER_POSITION = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Dropout)
# What a module may raise when it is given a shard where its code expects a row.
_OF_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError)
_OF_DEVICES = re.compile(r"CUDA|HIP|cuDNN|cuBLAS|NCCL|XPU|kernel|triton|inductor|dynamo|out of memory", re.IGNORECASE)
_FINE, _DIFFERS, _FAILED = range(3)
_PEER = "The trial failed on another rank"


class NotExact(ValueError):
    """A model that cannot be made exact; on all ranks alike."""


class _StartAgain(Exception):
    """What was tried so far is not how the model will run."""


class _NothingHelps(Exception):
    """The decoder cannot be split; on all ranks alike."""


class _PeerFailed(RuntimeError):
    """Another rank has failed."""


def locate(model, attachment, device) -> list:
    """Find the modules that need the whole row and let them have it.

    Collective over the attachment's group; over all ranks under an engine.

    Returns:
        `list` of hook handles. Raises `ValueError` on all ranks for a model that cannot be made exact.
    """
    return _Trial(model, attachment, device).run()


class _Trial:
    def __init__(self, model, attachment, device):
        self.model, self.attachment, self.entry = model, attachment, attachment.entry()
        self.decoder = attachment.decoder
        inside = set(self.decoder.modules())
        self.names = {module: name for name, module in model.named_modules() if module in inside}
        # Under an engine every data-parallel replica takes part, so that all run the model equally often.
        self.control = Control(torch.distributed.group.WORLD) if attachment.under_engine else attachment.control
        self.whole, self.dims = Whole(attachment), {}
        self.hooks, self.body_hooks, self.found = {}, [], set()
        self.forwards, self.started = 0, time.monotonic()
        fitting = [m for m in self.names if any(spec.fits(m) for spec in inline.INLINE)]
        self.between_exchanges = {child for module in fitting for child in module.children()}
        # An odd number of tokens per shard, so that blocks of positions lie across its edges.
        length = _short_length(getattr(model, "config", None), attachment.size)
        vocabulary = getattr(_text(getattr(model, "config", None)), "vocab_size", None) or 64
        self.tokens = (torch.arange(length, device=device) * 7 % min(vocabulary, 1000))[None]

    def run(self):
        state = [_state(module) for module in self.model.modules()]
        counts = self.attachment.exchanges, self.attachment.scans
        states = random_states()
        self.model.eval()
        try:
            # Eagerly: torch.compile would specialize on short rows, and on the hooks that watch them.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self._try_rows()
        except _NothingHelps as why:
            self._run_all_of_it_whole(why)
        except BaseException:
            for handle in self._handles():
                handle.remove()
            self.attachment.gathered = []
            raise
        finally:
            for module, saved in zip(self.model.modules(), state):
                _restore(module, *saved)
            self.attachment.exchanges, self.attachment.scans = counts
            set_random_states(states)
        return self._handles()

    def _run_all_of_it_whole(self, why):
        """The last resort: every rank computes the whole row. Exact, and no cheaper than without sequence parallelism."""
        for handle in self._handles():
            handle.remove()
        self.hooks, self.body_hooks = {}, []
        self.attachment.runs_whole, self.attachment.gathered = True, [self.names[self.decoder] or "the model"]
        if torch.distributed.get_rank() == 0:
            logger.warning(
                "%s runs on the whole row on every rank, so that sequence parallelism saves nothing: %s",
                type(self.model).__name__,
                why,
            )

    def _handles(self):
        return [handle for handles in self.hooks.values() for handle in handles] + self.body_hooks

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _try_rows(self):
        length = self.tokens.shape[1]
        # A token less than the shards could hold: one of them gets padding.
        short = self.tokens[:, 1:]
        mask = torch.ones_like(self.tokens).repeat(2, 1)
        mask[1, :5] = 0
        first = self._make_exact({"input_ids": short}, labels=_targets(short, self.attachment.size))
        found = len(self.found)
        self._make_exact({"input_ids": self.tokens.repeat(2, 1), "attention_mask": mask}, optional=True)
        if (self.found or self.attachment.scans) and self.attachment.takes_positions:
            cuts = [0, length // 3 + 1, length // 2 + 2, length]
            positions = torch.cat([torch.arange(b - a, device=mask.device) for a, b in zip(cuts, cuts[1:])])
            self._make_exact({"input_ids": self.tokens, "position_ids": positions[None]}, optional=True)
        if len(self.found) > found:
            # What was changed for a later row must do for the first, too.
            self._split(first, {"input_ids": short}, {"input_ids": short})

    def _make_exact(self, batch, labels=None, optional=False):
        """Returns the run of the whole row, `None` of one that the model does not take."""
        given = batch
        if labels is not None and self.attachment.splits_loss:
            # With a count, as trainers do: what is added to a loss, but is no sum over targets, shows then.
            count = {"num_items_in_batch": int((labels != IGNORE_INDEX).sum())} if takes(self.model, "num_items_in_batch") else {}
            given = dict(batch, labels=labels, **count)
        whole = _Run(self, batch, None)
        self._once(whole, given)
        failed = self.control.from_all(whole.failed)
        explainable = all(self.control.from_all(whole.explainable))
        if any(failed) and not explainable:
            raise whole.error or _PeerFailed(f"{_PEER}: {next(filter(None, failed))}")
        if any(failed):
            if optional and all(failed):
                return None  # The model does not do this without sequence parallelism either.
            raise NotExact(
                f"{type(self.model).__name__} does not run on the short row that is tried before the first step: "
                f"{next(filter(None, failed))}. SequenceParallelConfig(trial=False) does without, if it mixes positions by "
                "attention and scans alone."
            ) from whole.error
        mine = self._split(whole, batch, given)
        if given is not batch:
            self._judge_loss(whole.loss, mine.loss, whole.half)
        return whole

    def _split(self, whole, batch, given):
        """Run the row in shards until nothing differs; returns the last run."""
        for _ in range(2 * len(self.names)):
            mine = _Run(self, batch, whole)
            try:
                self._once(mine, given)
                if not self._explained(mine):
                    return mine
            except _StartAgain:
                pass
        raise _NothingHelps("every module has been tried")

    def _once(self, run, batch):
        self.forwards += 1
        if time.monotonic() - self.started > 2 and torch.distributed.get_rank() == 0:
            print(f"hf_ulysses: trying a short row before the first step, forward {self.forwards}", file=sys.stderr)
        # With a cache, a model does not tell documents apart.
        caches = "use_cache" in self.attachment.entrance.names and takes(self.model, "use_cache")
        with self.attachment.plain() if run.reference is None else nullcontext():
            run.run(self.entry, {**batch, **({"use_cache": False} if caches else {})})

    def _judge_loss(self, whole, shards, run_half):
        """Whether the head scores shards as it scores the row; else its rows stay whole (exits.py)."""
        if whole is None or shards is None:
            agree = False
        else:
            # A mean over other positions than the targets' shows in the fourth digit only; reordered sums in the seventh.
            tolerance = 3e-2 if whole.dtype in (torch.bfloat16, torch.float16) or run_half else 2e-5
            agree = bool((shards - whole).abs() <= tolerance * (1 + whole.abs()))
        self.attachment.splits_loss = all(self.control.from_all(agree))

    def _explained(self, run):
        """Whether a forward stopped at a module that has been mended since; raises what cannot be mended."""
        answers = self.control.from_all((run.failed, run.culprit))
        if not any(failed for failed, _ in answers):
            return False
        culprits = [culprit for failed, culprit in answers if failed and culprit is not None]
        why = next((failed for failed, _ in answers if failed and _PEER not in failed), _PEER)
        if not culprits:
            if run.error is None or isinstance(run.error, _PeerFailed):
                raise _PeerFailed(f"{_PEER}: {why}")
            raise run.error
        by_name = {name: module for module, name in self.names.items()}
        self.mend(by_name[culprits[0]], f"it raised {why}", {}, run.error)
        return True

    # -- mending ------------------------------------------------------------------------------------------------------

    def mend(self, module, why, where, error=None):
        """Let `module`, and all of its kind, have the whole row; raises `_StartAgain` if what ran before is void."""
        around_layers = self.is_body(module)
        again = module in self.found
        if again and not around_layers:
            # What it is given is not the whole row's, and cannot be made so: the code around the layers must be.
            module = [m for m in self.names if self.is_body(m) and module in set(m.modules())][-1]
            again, around_layers = module in self.found, True
        name, layers = type(module).__name__, layers_of(module) if around_layers else []
        if again or around_layers and not layers:
            raise _NothingHelps(f"in {name}, {why}") from error
        self.found.add(module)
        logger.info("%s (%s): %s", self.names[module], name, why)
        if around_layers:
            self.attachment.gathered.append(f"{self.names[module] or name} around its layers")
            self.body_hooks += self.whole.run_body(module, layers)
            for kind in list(self.hooks):
                self._drop(kind)  # What they were given was not right.
            raise _StartAgain
        kind = _kind(module)
        alike = self._drop(kind)
        self.learn(kind, where)
        hooks = []
        for one in alike:
            hooks += self.whole.run_whole(one, self.dims.setdefault(kind, {}))
            for layer in self._layers_around(one):
                hooks += self.whole.hold_row(layer)
        self.hooks[kind] = hooks
        self.found.update(alike)
        inside = {inner for one in alike for inner in one.modules()} - set(alike)
        for other in [k for k in self.hooks if all(m in inside for m in self.names if _kind(m) == k)]:
            self._drop(other)  # What lies inside sees the whole row, too.
        names = [self.names[one] for one in alike]
        self.attachment.gathered = [n for n in self.attachment.gathered if n not in names] + names

    def learn(self, kind, where):
        """Where modules of a kind have the sequence in their arguments; another row may show one that was not there before.

        Of what ranks saw, the most telling: one whose shard has no padding may have been given no mask.
        """
        dims, seen = self.dims.setdefault(kind, {}), self.control.from_all(where)
        for path in {path: None for one in seen for path in one}:
            dims.setdefault(path, max((one[path] for one in seen if path in one), key=_telling))

    def _drop(self, kind):
        """Undo what was done to the modules of a kind, which are returned."""
        alike = [module for module in self.names if _kind(module) == kind]
        for handle in self.hooks.pop(kind, []):
            handle.remove()
        names = {self.names[module] for module in alike}
        self.attachment.gathered = [name for name in self.attachment.gathered if name not in names]
        self.found.difference_update(alike)
        return alike

    def is_body(self, module):
        """Whether `module` is a model around its layers: most of the modules lie in it."""
        return not isinstance(module, torch.nn.ModuleList) and sum(1 for _ in module.modules()) > len(self.names) / 2

    def _layers_around(self, module):
        """The layer that `module` lies in, which checkpointing may run again, by its place in a module list."""
        by_name = {name: module for module, name in self.names.items()}
        parts = self.names[module].split(".")
        parents = [".".join(parts[:i]) for i in range(1, len(parts))]
        return [by_name[p] for p in parents if isinstance(by_name.get(p.rpartition(".")[0]), torch.nn.ModuleList)]


class _Run:
    """One forward; with a `reference` run, one in shards, which is compared with it."""

    def __init__(self, trial, batch, reference):
        self.trial, self.reference = trial, reference
        size, (rows, length) = trial.attachment.size, batch["input_ids"].shape
        shard = -(-length // size)
        self.rows = rows
        self.layout = Layout(length, shard * size, shard, trial.attachment.rank, batch.get("attention_mask"))
        self.calls, self.records, self.running, self.blamed = {}, {}, [], {}
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
            except (_StartAgain, _NothingHelps):
                raise
            except Exception as error:  # Raised, or explained, when all ranks know of it.
                self._fail(error)
        if self.reference is not None and self.error is None and self.trial.control.largest(_FINE) == _FAILED:
            self.failed = _PEER

    def _fail(self, error):
        """Tell the others, who are at the next module or at the end; and whose doing it may be."""
        self.error, self.failed = error, f"{type(error).__name__}: {str(error)[:300]}"
        self.explainable = type(error) in _OF_SHAPES and not _OF_DEVICES.search(str(error))
        if self.reference is None:
            return
        if not isinstance(error, _PeerFailed):
            self.trial.control.largest(_FAILED)
            ours = [module for module, *_ in self.running if not type(module).__module__.startswith("torch.")]
            if self.explainable and ours and not self.trial.attachment.attending:
                self.culprit = self.trial.names[ours[-1]]

    def _before(self, module, args, kwargs):
        if self.suspended:
            return
        call = self.calls[module] = self.calls.get(module, -1) + 1
        prints = {}
        kwargs = {key: value for key, value in kwargs.items() if key != ROW_KEY}
        map_arguments(lambda path, value: prints.update({path: self._print(value)}), module, args, kwargs)
        self.records[module, call, "in"] = prints
        if self.reference is not None and module in self.trial.found and not self.trial.is_body(module):
            self._agreed(None)
            self.trial.learn(_kind(module), self._places(module))
        elif self.reference is not None and self.running and (why := self._differs(module, call, "in")):
            self.blamed.setdefault(self.running[-1][0], why)
        self.running.append((module, call))

    def _after(self, module, args, kwargs, output):
        if self.suspended:
            return None
        _, call = self.running.pop()
        self._record_output(module, call, output)
        if self.reference is None:
            return None
        if isinstance(module, _PER_POSITION) or not self._is_compared(module, call):
            if module in self.blamed and self.running:
                self.blamed.setdefault(self.running[-1][0], self.blamed.pop(module))
            return None
        why = self.blamed.pop(module, None) or self._differs(module, call, "out")
        if not self._agreed(why):
            return None
        why = next(filter(None, self.trial.control.from_all(why)))
        self.trial.mend(module, why, self._places(module))
        # Again, on the whole row by now: what comes after it is given what it should be.
        self.suspended = True
        try:
            output = module(*args, **kwargs)
        finally:
            self.suspended = False
        self._record_output(module, call, output)
        if self._agreed(why := self._differs(module, call, "out")):
            self.trial.mend(module, why or "it differs on another rank", {})
        return output

    def _record_output(self, module, call, output):
        prints = {}
        tree_map(lambda path, value: prints.update({path: self._print(value)}), output, "out")
        self.records[module, call, "out"] = prints

    def _print(self, value):
        found = Print(value, self.layout)
        self.half = self.half or found.half
        return found

    def _agreed(self, why) -> bool:
        worst = self.trial.control.largest(_DIFFERS if why else _FINE)
        if worst == _FAILED:
            raise _PeerFailed(_PEER)
        return worst == _DIFFERS

    def _is_compared(self, module, call):
        """Whether the ranks talk after `module`: where the whole row's result has its length in one dimension.

        All ranks know that one; what works on some tokens only, as an expert does, may not be called on every rank.
        """
        given, returned = (self.reference.records.get((module, call, what), {}).values() for what in ("in", "out"))
        of_the_row = [any(len(p.shape or ()) > 2 and self.layout.length in p.shape for p in prints) for prints in (given, returned)]
        # Or a row is pooled: to one state for each of the batch.
        return of_the_row[1] or of_the_row[0] and any(p.total is not None and p.shape[0] == self.rows for p in returned)

    def _differs(self, module, call, what):
        if module in self.trial.between_exchanges or any(outer in self.blamed for outer, _ in self.running):
            return None
        expected = self.reference.records.get((module, call, what), {})
        for path, mine in self.records[module, call, what].items():
            if path not in expected:
                continue
            found = difference(expected[path], mine, self.layout, self.reference.half)
            if not found and what == "out" and self._is_compared(module, call):
                found = pooled_otherwise(expected[path], mine, self.reference.half)
            if found:
                got = "got" if what == "in" else "returned"
                return f"{self.trial.names[module] or type(module).__name__} {got} {found} ({path})"
        return None

    def _places(self, module):
        found = {}
        for what in ("in", "out"):
            for call in range(self.calls[module] + 1):
                whole, mine = (run.records.get((module, call, what), {}) for run in (self.reference, self))
                found.update(places(whole, mine, self.layout))
        return found


def _targets(tokens, size):
    """Labels of a trial row: uneven over the shards, so that a mean of means shows."""
    targets = tokens.clone()
    targets[:, 3 : targets.shape[1] // size : 2] = IGNORE_INDEX
    return targets


def _telling(where):
    """Of what ranks saw at one place, the most telling."""
    return 3 if where == "mask" else 2 if isinstance(where, int) else 1 if where == "absent" else 0


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


def _text(config):
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
