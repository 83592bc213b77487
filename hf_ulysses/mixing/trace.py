"""One run of a model with a fingerprint of every module's inputs and outputs, compared with another run's as they come.

A fingerprint is, per position along every dimension that may be the sequence, a tensor's sum and norm. `Trace` names the
first module whose output differs from the reference where its inputs agree; discovery.py decides what to do about it.
"""

import contextlib

import torch

from ..core.sequence import ROW_KEY
from ..core.trees import tree_map
from .trial import PeersDiffer, is_asking, trial
from .whole import map_arguments

# What cannot mix positions, so that noise is not taken for it.
_PER_POSITION = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Dropout)
# Reordered float32 sums differ by 1e-6; what is cut off by a shard's edge, by percents and more. Half precision rounds
# at 1e-2 and more in deep models, so that there only a shard's first and last positions are judged, coarsely.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.15


class Trace:
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
        self.order, self.found_at = 0, None

    def run(self, batch):
        handles = []
        for module in self.discovery.names:
            handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ]
        try:
            with contextlib.nullcontext() if self.reference is None else self._trial():
                self.discovery.entry(**batch)
        except Exception as error:
            # The shapes of a shard where a row's were expected, or one of our own refusals.
            self.error = error
            if self.reference is not None and self.author is None:
                # What raises in torch's own modules was handed to them by their caller.
                ours = [module for module, *_ in self.running if not _is_torchs(module)]
                self._blame(ours[-1] if ours else self.discovery.model, f"it raised {error!r:.300}")
                if isinstance(error, PeersDiffer):
                    self.found_at = float("inf")  # Another rank knows better, if one has given up.
        finally:
            for handle in handles:
                handle.remove()

    def _trial(self):
        return trial(self.discovery.attachment.group, self.discovery.tokens.device)

    def _before(self, module, args, kwargs):
        if is_asking():
            return
        name = self.discovery.names[module]
        call = self.calls[name] = self.calls.get(name, -1) + 1
        self.running.append((module, name, call))
        kwargs = {key: value for key, value in kwargs.items() if key != ROW_KEY}
        prints = {}
        map_arguments(lambda path, value: prints.update({path: self._print(value)}), module, args, kwargs)
        self._compare("in", prints, name, call, self.running[-2][0] if len(self.running) > 1 else module)

    def _after(self, module, args, kwargs, output):
        if is_asking():
            return
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
        if self.reference is None or self.author is not None or name in self.discovery.between_exchanges:
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
        self.author, self.why, self.found_at = self.discovery.names[author], why, self.order

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


def _is_torchs(module):
    return type(module).__module__.startswith("torch.")
