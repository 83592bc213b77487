"""Rows with images on tensors without contents: pixels as the configuration wants them, and whole numbers that are there.

A model finds its images by the values of tokens and grids. So what is made of whole numbers alone is computed
(`WholeNumbers`), and everything that a weight or a pixel goes into has a size only.

Not covered: layouts of pixels other than rows of patches with `image_grid_thw` (Qwen-VL, GLM-V) and plain images of the
configured size (LLaVA, Gemma 3, InternVL); more images of other sizes in one row.
"""

import inspect
import math

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WholeNumbers(TorchDispatchMode):
    """Inside of a FakeTensorMode: operators that get no fake tensor, and those that make whole numbers of none, really run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            # By a mask that is there: how many it takes is known.
            args = (args[0], [place for index in args[1] for place in _places(index)])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        if tensors and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            real = func(*args, **kwargs) if tensors else None
        if tensors:
            return real
        made = func(*args, **kwargs)
        if torch.is_tensor(made) and not made.dtype.is_floating_point:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return made


def _places(index):
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    with unset_fake_temporarily():
        return index.nonzero().unbind(1)


def image_batch(model, tokens, images: int, image_tokens: int, dtype) -> dict:
    """What the model gets beside `tokens`, into which placeholders are put; pixels have no contents.

    Raises:
        ValueError: a model of another kind, or more image tokens than tokens.
    """
    config, name = model.config, type(model).__name__
    vision = getattr(config, "vision_config", None)
    placeholder = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if images and (vision is None or placeholder is None):
        raise ValueError(f"--images: {name} has no vision_config or no token for images. Plan it without, as text.")
    if images * (image_tokens + 1) >= tokens.shape[1]:
        raise ValueError(f"{images} images of {image_tokens} tokens do not fit into a row of {tokens.shape[1]}.")
    for start in range(1, images * (image_tokens + 1), image_tokens + 1):
        tokens[:, start : start + image_tokens] = placeholder
    taken = {key for module in (model, getattr(model, "model", model)) for key in inspect.signature(module.forward).parameters}
    batch = {key: (tokens == placeholder).long() for key in ("mm_token_type_ids", "token_type_ids") if key in taken}
    if not images:
        return batch
    count, channels = tokens.shape[0] * images, _size(vision, 3, "in_channels", "in_chans", "num_channels")
    if "image_grid_thw" in taken:
        merge, time, patch = (_size(vision, 1, f"{name}_size") for name in ("spatial_merge", "temporal_patch", "patch"))
        height = max(side for side in range(1, math.isqrt(image_tokens) + 1) if image_tokens % side == 0)
        grid = [1, merge * height, merge * image_tokens // height]
        pixels = torch.empty(count * math.prod(grid), channels * time * patch * patch, dtype=dtype)
        return {**batch, "pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * count)}
    side = _size(vision, 224, "image_size")
    return {**batch, "pixel_values": torch.empty(count, channels, side, side, dtype=dtype)}


def _size(vision, default, *names):
    value = next((value for name in names if (value := getattr(vision, name, None)) is not None), default)
    return value[0] if isinstance(value, (list, tuple)) else value
