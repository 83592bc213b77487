"""Which modules need the whole row, found out before the first step by running a short row both ways.

1. The row runs whole, and of every module's inputs and outputs a fingerprint per position is kept.
2. It runs sharded, and every rank compares its shard's fingerprints as they come. The first difference has one author:
   an output that differs where the inputs agree is the module's own doing; an input that differs is the doing of the
   module that is calling; so is an error, of the innermost module that was running.
3. The author, and all modules of its kind, from now on get the whole row (whole.py), and 2. is repeated until nothing
   differs. A model whose own code, around its layers, is the author runs that code on the whole row.

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

from . import labels
from .row import ROW_KEY
from .whole import Whole, map_arguments, tree_map

logger = logging.getLogger(__name__)

_LONGEST = 2048
_ROUNDS = 24
_SPECIAL_LENGTHS = re.compile(r"window|chunk|topk|top_k_tokens|block_size|budget|compress|local_attention")
# What cannot mix positions, so that noise is not taken for it.
_PER_POSITION = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Dropout)
# Reordered float32 sums differ by 1e-6; what is cut off by a shard's edge, by percents and more. Half precision rounds
# at 1e-2 and more in deep models, so that there only a shard's first and last positions are judged, coarsely.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.15


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


class _Discovery:
    def __init__(self, model, attachment, tokens):
        self.model, self.attachment = model, attachment
        self.names = {module: name for name, module in model.named_modules()}
        self.whole = Whole(attachment)
        # Under an engine every data-parallel replica takes part, so that all run the model equally often.
        self.everyone = None if attachment.under_engine else attachment.group
        self.found, self.dims = {}, {}
        self.handles = []
        # An odd number of tokens per shard, so that blocks of positions lie across its edges.
        length = _short_length(getattr(model, "config", None), attachment.size)
        self.tokens = tokens[:1].repeat(1, -(-length // tokens.shape[1]))[:, :length].contiguous()

    def run(self):
        state = [_state(module) for module in self.names]
        exchanges = self.attachment.exchanges
        self.model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                for batch in self._rows():
                    self._make_exact(batch)
                self._find_head()
        except BaseException:
            for handle in self.handles:
                handle.remove()
            raise
        finally:
            for module, saved in zip(self.names, state):
                _restore(module, *saved)
            self.attachment.exchanges = exchanges
        if self.found:
            names = sorted({type(module).__name__ for module in self.found})
            logger.info("%s runs %s on the whole row", type(self.model).__name__, names)
        return self.handles

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

    def _make_exact(self, batch):
        reference = _Trace(self, batch, None)
        reference.run(batch)
        if reference.error is not None:
            if "position_ids" in batch or "attention_mask" in batch:
                return  # The model does not do this without sequence parallelism either.
            raise reference.error
        for _ in range(_ROUNDS):
            trace = _Trace(self, batch, reference)
            trace.run(self._cut(batch))
            author, why, error = self._agree(trace)
            if author is None:
                return self._look(reference, trace)
            self._run_whole(author, why, error, reference, trace)
        raise ValueError(f"{type(self.model).__name__} could not be made exact in {_ROUNDS} rounds; last: {why}.")

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
        whole = self.model(**batch)
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
        return labels.surplus(self.model(**part), part[name])

    def _from_all(self, mine) -> list:
        answers = [None] * dist.get_world_size(self.everyone)
        dist.all_gather_object(answers, mine, group=self.everyone)
        return answers

    def _everywhere(self, answer):
        return all(self._from_all(bool(answer)))

    def _agree(self, trace):
        """The earliest author over all ranks."""
        mine = None if trace.author is None else (trace.order, trace.author, trace.why)
        first = min((answer for answer in self._from_all(mine) if answer is not None), default=None)
        return (None, None, None) if first is None else (first[1], first[2], trace.error)

    def _run_whole(self, author, why, error, reference, trace):
        author = next(module for module, name in self.names.items() if name == author)
        around_layers = self._is_body(author)
        again = author in self.found
        if again and not around_layers:
            # Another row may show an argument that was not there before.
            seen = dict(self.dims[author])
            self._look(reference, trace)
            if seen != self.dims[author]:
                return
            # What it is given is not the whole row's, and cannot be made so: the code around the layers must be.
            author = self._body_around(author)
            again, around_layers = author in self.found, True
        name, layers = type(author).__name__, _layers(author) if around_layers else []
        if again or around_layers and not layers:
            raise ValueError(
                f"{type(self.model).__name__} cannot be trained exactly over sp_size={self.attachment.size}: in {name}, "
                f"{why}{', and running it on the whole row does not help' if again else ''}. Train it without sequence "
                "parallelism."
            ) from error
        if around_layers:
            self.found[author] = why
            self.attachment.gathered.append(f"{self.names[author] or name} around its layers")
            self.handles += self.whole.run_body(author, layers)
            return
        kind = _kind(author)
        alike = [module for module in self.names if _kind(module) == kind]
        for module in alike:
            self.found[module], self.dims[module] = why, {}
            self.handles += self.whole.run_whole(module, self.dims[module])
            self.attachment.gathered.append(self.names[module])
            self.handles += [handle for layer in self._around(module) for handle in self.whole.carry_row(layer)]
        self._look(reference, trace)

    def _look(self, reference, trace):
        """Learn, from all ranks, where the sequence lies in the arguments of the modules that run whole."""
        mine = [reference.dims(self.names[module], trace) for module in self.dims]
        for dims, *seen in zip(self.dims.values(), *self._from_all(mine)):
            for path in {path: None for one in seen for path in one}:
                values = [one[path] for one in seen if path in one]
                dims.setdefault(path, max(values, key=_telling))

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


class _Trace:
    """One run of the model with every module call's fingerprints; compared with `reference`, if given, as they come."""

    def __init__(self, discovery, batch, reference):
        self.discovery, self.reference = discovery, reference
        self.size = discovery.attachment.size
        self.length = batch["input_ids"].shape[1]
        self.shard = -(-self.length // self.size)
        self.padded = self.shard * self.size
        self.mask, self.mask_shape = batch.get("attention_mask"), tuple(batch["input_ids"].shape)
        self.calls, self.records, self.running, self.half = {}, {}, [], False
        self.author = self.why = self.error = None
        self.order = 0

    def run(self, batch):
        handles = []
        for module in self.discovery.names:
            handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ]
        try:
            self.discovery.model(**batch)
        except Exception as error:
            # The shapes of a shard where a row's were expected, or one of our own refusals.
            self.error = error
            if self.reference is not None and self.author is None:
                # What raises in torch's own modules was handed to them by their caller.
                ours = [module for module, *_ in self.running if not _is_torchs(module)]
                self._blame(ours[-1] if ours else self.discovery.model, f"it raised {error!r:.300}")
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module, args, kwargs):
        name = self.discovery.names[module]
        call = self.calls[name] = self.calls.get(name, -1) + 1
        self.running.append((module, name, call))
        kwargs = {key: value for key, value in kwargs.items() if key != ROW_KEY}
        prints = {}
        map_arguments(lambda path, value: prints.update({path: self._print(value)}), module, args, kwargs)
        self._compare("in", prints, name, call, self.running[-2][0] if len(self.running) > 1 else module)

    def _after(self, module, args, kwargs, output):
        _, name, call = self.running.pop()
        prints = {}
        tree_map(lambda path, value: prints.update({path: self._print(value)}), output, "out")
        self._compare("out", prints, name, call, module)

    def _print(self, value):
        self.half = self.half or torch.is_tensor(value) and value.dtype in (torch.bfloat16, torch.float16)
        return _Print(value, (self.length, self.padded, self.shard))

    def _compare(self, what, prints, name, call, author):
        self.order += 1
        self.records[name, call, what] = prints
        if self.reference is None or self.author is not None:
            return
        expected = self.reference.records.get((name, call, what))
        if expected is None:
            return
        for path, value in prints.items():
            if path in expected and (difference := self._difference(expected[path], value)):
                subject = "got" if what == "in" else "returned"
                self._blame(author, f"{name or type(author).__name__} {subject} {difference} ({path})")
                return

    def _difference(self, whole, mine):
        if whole.shape is None or mine.shape is None or len(whole.shape) != len(mine.shape):
            return None
        rank, half = self.discovery.attachment.rank, self.reference.half
        changed = [d for d, (a, b) in enumerate(zip(whole.shape, mine.shape)) if a != b]
        if any(whole.shape[d] != self.length or mine.shape[d] not in (self.shard, self.padded) for d in changed):
            return None
        if sum(mine.shape[d] == self.shard for d in changed) > 1:
            return f"a shard's {mine.shape} where the row has {whole.shape}"
        if whole.counts or len(whole.shape) < 3:
            # Counters and indices, and tokens in no order of the row's (an expert's): what comes of them is judged.
            return None
        dims = changed or [d for d in whole.sums if whole.shape[d] == self.length]
        if len(dims) != 1:
            return None
        # Without the padding, the user's at the left and ours at the right.
        first = rank * self.shard if mine.shape[dims[0]] == self.shard else 0
        keep = slice(first, min(first + mine.shape[dims[0]], self.length))
        a, b = whole.sums[dims[0]][keep], mine.sums[dims[0]][: keep.stop - keep.start]
        if self.mask is not None:
            real = self.mask[0, keep].bool()
            a, b = a[real], b[real]
        if half and mine.shape[dims[0]] == self.shard and len(a) > 2:
            a, b = a[[0, -1]], b[[0, -1]]
        if not len(a):
            return None
        # In half precision what nearly cancels is noise beside the other positions.
        scale = a[:, 1] + (1 if half else 1e-3) * whole.mean + 1e-20
        error = torch.maximum((a[:, 0] - b[:, 0]).abs() / scale, (a[:, 1] - b[:, 1]).abs() / scale).max()
        tolerance = _TOLERANCE_HALF if half else _TOLERANCE
        return f"values that differ by {float(error):.1e} relative" if error > tolerance else None

    def _blame(self, author, why):
        if type(author) in _PER_POSITION:
            return
        self.author, self.why = self.discovery.names[author], why

    def dims(self, name, sharded):
        """Of the arguments and results of a module: where the row has its length and a shard its shard of it."""
        dims = {}
        for what in ("in", "out"):
            for call in range(self.calls.get(name, -1) + 1):
                whole, mine = (trace.records.get((name, call, what), {}) for trace in (self, sharded))
                for path, value in whole.items():
                    other = mine.get(path)
                    if value.none and path.endswith("position_ids") and other is not None and other.shape is not None:
                        dims[path] = "absent"
                    if value.shape is None:
                        continue
                    if path.endswith("mask") and value.shape == self.mask_shape:
                        dims[path] = "mask"
                        continue
                    if other is None or other.shape is None or len(other.shape) != len(value.shape):
                        changed = [d for d, n in enumerate(value.shape) if n == self.length]
                    else:
                        changed = [d for d, (a, b) in enumerate(zip(value.shape, other.shape)) if a != b]
                        changed = [d for d in changed if other.shape[d] == self.shard]
                    dims[path] = changed[0] if len(changed) == 1 else None
        return dims


class _Print:
    """A tensor's shape and, per position along every dimension that may be the sequence, its sum and norm."""

    def __init__(self, value, lengths):
        self.shape, self.none = None, value is None
        if not torch.is_tensor(value) or value.is_complex():
            return
        self.shape, self.counts = tuple(value.shape), not value.is_floating_point()
        dims = [d for d, n in enumerate(self.shape) if n in lengths]
        if not dims:
            self.sums = {}
            return
        # The lowest number of a dtype hides what a mask hides; as a zero it hides it from the comparison.
        value = value.detach().float()
        value = value.where(value.abs() < 1e30, 0.0)
        self.sums = {}
        for d in dims:
            others = [o for o in range(value.dim()) if o != d]
            total = value.sum(dim=others) if others else value
            norm = value.square().sum(dim=others).sqrt() if others else value.abs()
            self.sums[d] = torch.stack([total, norm], dim=-1)
            self.mean = norm.mean()


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


def _is_torchs(module):
    return type(module).__module__.startswith("torch.")


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
