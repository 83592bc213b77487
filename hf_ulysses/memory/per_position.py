"""Tiled MLPs and norms: modules that treat each position by itself, found by structure, checked by numbers.

An MLP is a module of the decoder with two linear maps or more among its children that takes one tensor, or one and a
residual; of a MoE block the experts (three-dimensional weights, which take tokens, their experts and weights), never the
router, whose statistics are of the row. A norm has no children and one-dimensional weights only; torch's own and Liger's
make no copies and stay as they are.

That positions are independent is not believed: the first forward of each class swaps the halves of eight positions, and
cuts them off, before anything is tiled.

Not covered, refused by name: layers that keep their MLP's linear maps among their own children.
"""

import inspect
import logging

import torch
from torch import nn

from ..core.entrance import decoder_of
from .tiles import in_tiles

logger = logging.getLogger(__name__)
# Rows beside others can take another path through a matrix product; half precision rounds results.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
_TOLERANCE_HALF = 5e-2


def tile_mlps(model, tiles: int) -> list:
    """Run every MLP of `model`'s decoder in `tiles` tiles. Returns handles. Raises `ValueError` where there is none."""
    return _tile(model, tiles, "tiled_mlp", "MLP", _is_mlp)


def tile_norms(model, tiles: int) -> list:
    """Run every norm that is made of single operations in `tiles` tiles. Returns handles; none where all are
    fused. Raises `ValueError` where there is no norm at all."""
    return _tile(model, tiles, "tiled_norms", "norm", _is_norm)


def _tile(model, tiles, switch, kind, fits):
    found = [module for module in decoder_of(model).modules() if fits(module)]
    # The innermost: a block's experts and shared MLP, not the block around its router.
    found = [module for module in found if not any(inner in found for inner in list(module.modules())[1:])]
    if not found and not (kind == "norm" and any(map(_is_any_norm, decoder_of(model).modules()))):
        shape = {
            "MLP": "takes one tensor and has two linear maps or more, or experts. Models whose layers hold these maps themselves "
            "are not supported",
            "norm": "takes one tensor and has one-dimensional weights and no children",
        }[kind]
        raise ValueError(f"{switch} found no {kind} in {type(model).__name__}: a module that {shape}: set {switch}=False.")
    names = sorted({type(module).__name__ for module in found})
    logger.info("%s: %d modules (%s) in %d tiles.", switch, len(found), ", ".join(names), tiles)
    checked = set()
    return [_Tiled.put(module, tiles, switch, checked) for module in found]


def _is_mlp(module):
    names = _arguments(module)
    if any(len(getattr(p, "ds_shape", p.shape)) == 3 for p in module.parameters(recurse=False)):
        return len(names) == 3
    return sum(map(_is_linear, module.children())) >= 2 and len(names) in (1, 2) and all(names.values())


def _is_linear(module):
    # A linear map of any make: torch's, GPT-2's, quantized ones, and adapters around one.
    return hasattr(module, "weight") and (hasattr(module, "in_features") or hasattr(module, "nf"))


def _is_norm(module):
    """One that is made of single operations."""
    fused = type(module).__module__.partition(".")[0] in ("torch", "liger_kernel") or "forward" in vars(module)
    return not fused and _is_any_norm(module)


def _is_any_norm(module):
    own = list(module.parameters(recurse=False))
    one_dimensional = own and all(len(getattr(p, "ds_shape", p.shape)) == 1 for p in own)
    names = _arguments(module)
    return bool(one_dimensional and len(names) == 1 and not list(module.children()))


def _arguments(module) -> dict:
    """What `forward` takes: names, and whether it cannot do without. Empty where it takes any."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return {}
    return {p.name: p.default is p.empty for p in parameters}


class _Tiled:
    """In the place of a module's `forward`. An object, so that a deepcopy of the module gets one of its own."""

    def __init__(self, module, tiles, switch, checked):
        self.module, self.tiles, self.switch, self.checked = module, tiles, switch, checked
        self.inner = vars(module).get("forward")

    @classmethod
    def put(cls, module, tiles, switch, checked):
        module.forward = cls(module, tiles, switch, checked)
        return module.forward

    def remove(self):
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.inner is not None:
                self.module.forward = self.inner

    def whole(self, *tensors):
        # A tile of a batch is no contiguous tensor; some modules view theirs.
        tensors = [tensor.contiguous() for tensor in tensors]
        return self.inner(*tensors) if self.inner is not None else type(self.module).forward(self.module, *tensors)

    def __call__(self, *args, **kwargs):
        tensors = [*args, *(kwargs[name] for name in list(_arguments(self.module))[len(args) :])]
        if not all(torch.is_tensor(tensor) for tensor in tensors):
            raise ValueError(f"{self._refusal()} it takes {[type(tensor).__name__ for tensor in tensors]}.")
        # `(tokens, ...)` of experts, else `(B, sequence, ...)`.
        dim = 0 if tensors[0].dim() == 2 else 1
        if any(tensor.dim() <= dim or tensor.shape[dim] != tensors[0].shape[dim] for tensor in tensors):
            raise ValueError(f"{self._refusal()} it takes tensors of {[tuple(tensor.shape) for tensor in tensors]}.")
        if not tensors[0].shape[dim]:
            return self.whole(*tensors)
        self._check(tensors, dim)
        partitioned = any(hasattr(parameter, "ds_id") for parameter in self.module.parameters())
        random = any(isinstance(child, nn.Dropout) and child.p and child.training for child in self.module.modules())
        return in_tiles(self.whole, tensors, dim, self.tiles, always=partitioned, random=random)

    @torch.no_grad()
    def _check(self, tensors, dim):
        # Tensors without numbers (fake ones, meta) can neither be compared nor be wrong.
        if type(self.module) in self.checked or not _has_numbers(tensors[0]):
            return
        self.checked.add(type(self.module))
        if tensors[0].shape[dim] == 1:
            # Nothing to tell apart, but as many calls as on other ranks.
            tensors = [torch.cat([tensor, tensor], dim) for tensor in tensors]
        half = min(4, tensors[0].shape[dim] // 2)
        few = [tensor.narrow(dim, 0, 2 * half) for tensor in tensors]
        training = [child for child in self.module.modules() if child.training]
        for child in training:
            child.training = False
        try:
            result = self.whole(*few)
            swapped = self.whole(*(tensor.roll(half, dim) for tensor in few))
            alone = self.whole(*(tensor.narrow(dim, 0, half) for tensor in few))
        finally:
            for child in training:
                child.training = True
        if not torch.is_tensor(result) or result.dim() <= dim or result.shape[dim] != 2 * half:
            raise ValueError(f"{self._refusal()} it gives something else than one tensor with the same positions.")
        if not _same(swapped.roll(half, dim), result) or not _same(alone, result.narrow(dim, 0, half)):
            raise ValueError(f"{self._refusal()} a position's result depends on other positions.")

    def _refusal(self):
        return f"{type(self.module).__name__} cannot be cut into tiles ({self.switch}={self.tiles}):"


def _has_numbers(tensor):
    return type(tensor) is torch.Tensor and tensor.device.type != "meta"


def _same(ours, theirs):
    half = torch.is_autocast_enabled(theirs.device.type)
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE.get(theirs.dtype, _TOLERANCE_HALF)
    tolerance *= theirs.abs().nan_to_num(0, 0).max().item()
    return torch.allclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)
