"""Which modules need the whole row, found out before the first step by running a short row both ways.

1. The row runs whole, and of every module's inputs and outputs a fingerprint per position is kept.
2. It runs sharded, and every rank compares its shard's fingerprints as they come. The first difference has one author:
   an output that differs where the inputs agree is the module's own doing; an input that differs is the doing of the
   module that is calling; so is an error, of the innermost module that was running.
3. The author, and all modules of its kind, from now on go the first of these ways that makes the next round agree: exchange
   around the functions in which they mix (scans.py; before the first round); compute with tensors of the whole row that are held in part
   (spread/); get the whole row on every rank (whole.py). 2. is repeated until nothing differs. A model whose own code,
   around its layers, is the author runs that code on the whole row.

So no list of layer names decides, and a model that nobody has heard of is exact or refused. The short row is as long as
what the configuration treats specially (windows, chunks, top-k), up to a limit; packed and padded rows are tried, too.

Not covered: gradients (a module that is right in its outputs is right in its gradients, but for detached copies), and
effects that a short row with the current weights does not show.
"""

import inspect
import logging
import re

import torch
import torch.distributed as dist

from ..core import labels
from . import scans
from ..core.sequence import ROW_KEY
from .trace import Trace
from .whole import Whole

logger = logging.getLogger(__name__)

_LONGEST = 2048
_ROUNDS = 48
_SPECIAL_LENGTHS = re.compile(r"window|chunk|topk|top_k_tokens|block_size|budget|compress|local_attention")


def discover(model, attachment, tokens) -> list:
    """Find the modules that need the whole row and hook them. Collective over the attachment's group; over all ranks
    under an engine.

    Args:
        model (`torch.nn.Module`): the attached model.
        attachment (`Attachment`): its attachment.
        tokens (`torch.Tensor`): of shape `(B, S)`: a batch's input_ids, which the short row is made of.

    Returns:
        `list` of hook handles. Raises `ValueError` on all ranks for a model that cannot be made exact.
    """
    return _Discovery(model, attachment, tokens).run()


class NotExact(ValueError):
    """A model that cannot be made exact; on all ranks alike."""


class _Discovery:
    def __init__(self, model, attachment, tokens):
        self.model, self.attachment, self.entry = model, attachment, attachment.entry()
        self.names = {module: name for name, module in model.named_modules()}
        self.whole = Whole(attachment)
        # Under an engine every data-parallel replica takes part, so that all run the model equally often.
        self.everyone = None if attachment.under_engine else attachment.group
        self.found, self.dims = set(), {}
        # Kind of module -> the ways that are left to it, the handles of the one it goes, and what that could not split.
        self.ways, self.hooks, self.undone = {}, {}, {}
        self.handles, self.may_spread, self.has_spread, self.changes = [], False, False, 0
        # An odd number of tokens per shard, so that blocks of positions lie across its edges.
        length = _short_length(getattr(model, "config", None), attachment.size)
        self.tokens = tokens[:1].repeat(1, -(-length // tokens.shape[1]))[:, :length].contiguous()

    def run(self):
        state = [_state(module) for module in self.names]
        exchanges = self.attachment.exchanges
        self.model.eval()
        self.scans = scans.attach(list(self.names), self.attachment)
        fitting = [m for m in self.names if any(spec.fits(m) for spec in scans.inline.INLINE)]
        self.between_exchanges = {self.names[child] for module in fitting for child in module.children()}
        for layer in _layers(self.model) if self.scans else ():
            self.scans += self.whole.hold_row(layer)
        try:
            # Eagerly: torch.compile would specialize on short rows, and on the hooks that watch them.
            with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
                if not self._make_all_exact(forgiving=True):
                    # Without what could go wrong besides: modules that compute with tensors held in part.
                    self._start_over()
                    self._make_all_exact()
                self._find_head()
        except BaseException:
            for handle in [*self.scans, *self.handles, *self._hooks_of_kinds()]:
                handle.remove()
            self.attachment.split, self.attachment.gathered = [], []
            raise
        finally:
            for module, saved in zip(self.names, state):
                _restore(module, *saved)
            self.attachment.exchanges = exchanges
        self._report()
        return self.scans + self.handles + self._hooks_of_kinds()

    def _report(self):
        if dist.get_rank() != 0:
            return
        name, attachment = type(self.model).__name__, self.attachment
        if attachment.split:
            logger.info(
                "%s exchanges inside of %s, which mix positions by themselves", name, _briefly(attachment.split)
            )
        if attachment.gathered:
            held = not any(getattr(module, "gradient_checkpointing", False) for module in self.names)
            hint = " and holds its activations until backward; gradient_checkpointing=True frees them layer by layer"
            modules = _briefly(attachment.gathered)
            logger.warning("%s runs %s on the whole row, on every rank%s", name, modules, hint if held else "")

    def _hooks_of_kinds(self):
        return [handle for handles in self.hooks.values() for handle in handles]

    def _rows(self):
        length = self.tokens.shape[1]
        # A token less than the shards could hold: one of them gets padding.
        yield {"input_ids": self.tokens[:, 1:]}
        mask = torch.ones_like(self.tokens)
        mask[:, :5] = 0
        yield {"input_ids": self.tokens, "attention_mask": mask}
        if self.attachment.takes_positions:
            cuts = [0, length // 3 + 1, length // 2 + 2, length]
            positions = [torch.arange(b - a, device=self.tokens.device) for a, b in zip(cuts, cuts[1:])]
            yield {"input_ids": self.tokens, "position_ids": torch.cat(positions)[None]}

    def _make_all_exact(self, forgiving=False):
        """Whether it worked; raises if not, unless `forgiving` and there is something that can be done without."""
        rows, row = list(self._rows()), 0
        while row < len(rows):
            changes = self.changes
            try:
                self._make_exact(rows[row])
            except NotExact:
                if forgiving and self.has_spread:
                    return False
                raise
            # What was changed for a later row must do for those before, too.
            row = 0 if row and self.changes > changes else row + 1
        return True

    def _start_over(self):
        for handle in self.handles:
            handle.remove()
        self._forget_ways()
        self.handles, self.attachment.gathered, self.may_spread = [], [], False
        self.found.clear()

    def _make_exact(self, batch):
        reference = Trace(self, batch, None)
        reference.run(batch)
        if not self._everywhere(reference.error is None):
            if "position_ids" in batch or "attention_mask" in batch:
                return  # The model does not do this without sequence parallelism either.
            raise reference.error or RuntimeError("The trial row failed on another rank.")
        for _ in range(_ROUNDS):
            for operations in self.undone.values():
                operations.clear()
            trace = Trace(self, batch, reference)
            trace.run(self._cut(batch))
            author, why, error = self._agree(trace)
            if author is None:
                self._look(reference, trace)
                # What could not be split after all costs less if its inputs are gathered.
                undone = [kind for kind, operations in self.undone.items() if not self._everywhere(not operations)]
                if not undone:
                    return
                for kind in undone:
                    if kind not in self.undone:
                        continue  # Inside of one that is gathered by now.
                    logger.info("%s cannot be split: %s", kind[0].__name__, "; ".join(self.undone[kind]))
                    self._next_way(kind, batch)
                continue
            self._mend(author, why, error, reference, trace, batch)
        raise NotExact(f"{type(self.model).__name__} could not be made exact in {_ROUNDS} rounds; last: {why}.")

    def _cut(self, batch):
        part = self.attachment.cut(batch)
        part[ROW_KEY].verified = True
        return part

    def _find_head(self):
        """Whether the model's head takes `shift_labels`, shifts by itself, or does not shift (labels.py)."""
        head, output_embedding = labels.head_of(self.model)
        if head is None or "labels" not in inspect.signature(type(head).forward).parameters:
            return
        targets = self.tokens.clone()
        targets[:, 3 : targets.shape[1] // self.attachment.size : 2] = labels.IGNORE_INDEX
        batch = {"input_ids": self.tokens, "labels": targets}
        whole = self.entry(**batch)
        next_token = labels.surplus(whole, labels.shifted(targets))
        same_token = labels.surplus(whole, targets)
        if next_token is None:
            return  # No logits to compare with: left to the trainer's start-up check.
        part = self._cut(batch)
        half = whole.logits.dtype in (torch.bfloat16, torch.float16)
        if self._everywhere(labels.agree(self._surplus(part, "shift_labels"), next_token, half)):
            return
        if self._everywhere(labels.agree(self._surplus(part, "labels"), same_token, half)):
            self.attachment.scores_own_labels = True
            return
        if output_embedding is not None:
            self.handles += labels.give_dummy_position(self.model)
            if self._everywhere(labels.agree(self._surplus(self._cut(batch), "shift_labels"), next_token, half)):
                return
        raise ValueError(
            f"{type(self.model).__name__} computes its loss in a way that does not split over sp_size="
            f"{self.attachment.size} shards: it neither uses shift_labels, nor shifts labels by one, nor scores them as "
            "they are. Train it without sequence parallelism, or compute the loss outside of the model."
        )

    def _surplus(self, part, name):
        return labels.surplus(self.entry(**part), part[name])

    def _from_all(self, mine) -> list:
        answers = [None] * dist.get_world_size(self.everyone)
        dist.all_gather_object(answers, mine, group=self.everyone)
        return answers

    def _everywhere(self, answer):
        return all(self._from_all(bool(answer)))

    def _agree(self, trace):
        """The earliest author over all ranks."""
        mine = None if trace.author is None else (trace.found_at, trace.author, trace.why)
        first = min((answer for answer in self._from_all(mine) if answer is not None), default=None)
        return (None, None, None) if first is None else (first[1], first[2], trace.error)

    def _mend(self, author, why, error, reference, trace, batch):
        if self._look(reference, trace):
            return  # Another row showed an argument that was not there before.
        author = next(module for module, name in self.names.items() if name == author)
        around_layers = self._is_body(author)
        again = author in self.found
        if again and not around_layers:
            # What it is given is not the whole row's, and cannot be made so: the code around the layers must be.
            author = self._body_around(author)
            again, around_layers = author in self.found, True
        name, layers = type(author).__name__, _layers(author) if around_layers else []
        if again or around_layers and not layers:
            raise NotExact(
                f"{type(self.model).__name__} cannot be trained exactly over sp_size={self.attachment.size}: in {name}, "
                f"{why}{', and running it on the whole row does not help' if again else ''}. Train it without sequence "
                "parallelism."
            ) from error
        if around_layers:
            self.found.add(author)
            self.attachment.gathered.append(f"{self.names[author] or name} around its layers")
            self.handles += self.whole.run_body(author, layers)
            self.changes += 1
            self._forget_ways()  # What they were given was not right.
            return
        logger.info("%s (%s): %s", self.names[author], name, why)
        self._next_way(_kind(author), batch)
        self._look(reference, trace)

    def _next_way(self, kind, batch):
        """Let all modules of a kind go the next way that they can."""
        self.changes += 1
        alike = self._drop(kind)
        ways = [*([self._spread] if self.may_spread else []), self._gather]
        ways = self.ways.setdefault(kind, ways)
        hooks = None
        while hooks is None:
            hooks = ways.pop(0)(kind, alike, batch)
        for module in alike:
            hooks += [handle for layer in self._around(module) for handle in self.whole.hold_row(layer)]
        self.hooks[kind] = hooks

    def _drop(self, kind):
        """Undo what was done to the modules of a kind, which are returned."""
        alike = [module for module in self.names if _kind(module) == kind]
        for handle in self.hooks.pop(kind, []):
            handle.remove()
        self.undone.pop(kind, None)
        names, attachment = {self.names[module] for module in alike}, self.attachment
        attachment.split = [name for name in attachment.split if name not in names]
        attachment.gathered = [name for name in attachment.gathered if name not in names]
        self.found.difference_update(alike)
        return alike

    def _forget_ways(self):
        for kind in list(self.hooks):
            self._drop(kind)
        self.ways.clear()
        self.dims.clear()

    def _spread(self, kind, alike, batch):
        if any(getattr(inner, "gradient_checkpointing", False) for module in alike for inner in module.modules()):
            return None  # A checkpoint inside of it would be given what is no tensor.
        self.undone[kind], self.has_spread = [], True
        self.attachment.split += [self.names[module] for module in alike]
        return self._on_whole_row(alike, self.undone[kind])

    def _gather(self, kind, alike, batch):
        self.attachment.gathered += [self.names[module] for module in alike]
        self.found.update(alike)
        inside = {inner for module in alike for inner in module.modules()} - set(alike)
        for other in [other for other in self.hooks if all(m in inside for m in self.names if _kind(m) == other)]:
            self._drop(other)  # What lies inside sees the whole row, too.
            self.ways.pop(other)
        return self._on_whole_row(alike)

    def _on_whole_row(self, modules, undone=None):
        for module in modules:
            self.dims.setdefault(module, {})
        return [handle for module in modules for handle in self.whole.run_whole(module, self.dims[module], undone)]

    def _look(self, reference, trace):
        """Learn, from all ranks, where the sequence lies in the arguments of the modules that run whole; whether it is news."""
        mine, before = [reference.dims(self.names[module], trace) for module in self.dims], repr(self.dims.values())
        for dims, *seen in zip(self.dims.values(), *self._from_all(mine)):
            for path in {path: None for one in seen for path in one}:
                values = [one[path] for one in seen if path in one]
                dims.setdefault(path, max(values, key=_telling))
        return repr(self.dims.values()) != before

    def _is_body(self, module):
        """Whether `module` is a model around its layers: most of the modules lie in it."""
        return not isinstance(module, torch.nn.ModuleList) and sum(1 for _ in module.modules()) > len(self.names) / 2

    def _body_around(self, module):
        parents = [m for m, name in self.names.items() if self._is_body(m) and module in set(m.modules())]
        return parents[-1]

    def _around(self, module):
        """The layer that `module` lies in, which checkpointing may run again, by its place in a module list."""
        name, by_name = self.names[module], {name: module for module, name in self.names.items()}
        parts = name.split(".")
        parents = [".".join(parts[:i]) for i in range(1, len(parts))]
        return [by_name[p] for p in parents if isinstance(by_name.get(p.rpartition(".")[0]), torch.nn.ModuleList)]


def _briefly(names):
    """Names of modules, once for all layers."""
    return sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})


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


def _layers(module):
    """The layers that `module` runs one after the other: members of its outermost module lists."""
    found = []
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            found += list(child)
        elif not isinstance(child, (torch.nn.Sequential, torch.nn.ModuleDict)):
            found += _layers(child)
    return found


def _kind(module):
    """What modules of one kind have in common: their class and their children's classes."""
    return type(module), tuple((name, type(child)) for name, child in module.named_children())
