"""Batches with images for any image-text model, without its processor: pixels as its configuration and signature want them.

    config = image_config("qwen3_vl", heads=4, kv_heads=2)
    model = tiny_model(config, images=True)
    batch = image_batch(model, [(5, IMAGE, 3, IMAGE, 11), (17, IMAGE, 2)])

1. What the model's forward takes says which layouts of pixels are possible: rows of patches with `image_grid_thw`, patches
   with positions or masks, tiles per image, plain images. The first that its own `get_image_features` accepts is taken.
2. The features that come out say how many placeholder tokens each image needs; they go where a row has an `IMAGE`.
3. Text avoids every special token. Types of tokens are 1 where there is an image, for who asks for them.
"""

import inspect
from functools import partial

import torch

from .tiny_models import HEAD_SIZE, VOCAB, tiny_config

IMAGE = "image"
# Rows with unequal numbers of images, one of them across the middle; and one beside a row of text.
ROWS = {
    "images": [(5, IMAGE, 3, IMAGE, 11), (17, IMAGE, 2)],
    "images_left_padded": [(9, IMAGE, 14), (13,)],
}
# Sizes that the rules for text leave as they are, by name, in sub-configurations too. `h` and `g` as there.
_SIZES = {
    "mm_tokens_per_image": 4,
    "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
    "image_seq_length": 16,
    "vision_soft_tokens_per_image": 4,
    "position_embedding_size": 64,
    "projector_hidden_size": 64,
    "num_query_tokens": 4,
    "additional_vocab_size": 1,
    "posemb_grid_size": 8,
    "deepstack_visual_indexes": [0, 1],
    "projection_dim": lambda h, g: h * HEAD_SIZE,
    "projector_patch_to_query_dict": {16: 4},
    "projection_hidden_size": lambda h, g: h * HEAD_SIZE,
    "insert_layer_id": 0,
    "projector_input_dim": lambda h, g: h * HEAD_SIZE,
    "projector_output_dim": lambda h, g: h * HEAD_SIZE,
    "mm_embed_dim": lambda h, g: h * HEAD_SIZE,
    "output_proj_dims": lambda h, g: h * HEAD_SIZE,
    "mm_posemb_size": 64,
    "vision_hidden_size": lambda h, g: h * HEAD_SIZE,
    "deepstack_layer_map": [[-1, 0]],
    "spatial_target_layers": [1],
    "drop_path_rate": 0.0,
    "intermediate_layers_indices": [0],
    "num_global_layers": 1,
    "cross_attention_layers": [1],
}
# Where each layer has one, those that a tower of two layers has.
_LAYERS = {"vision_feature_layer": [-1, -2]}


def _gemma4(config, size, heads):
    from transformers import Gemma4VisionConfig

    config.vision_config = Gemma4VisionConfig(
        hidden_size=size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=HEAD_SIZE, patch_size=8, pooling_kernel_size=2)  # fmt: skip


def _gemma4_unified(config, size, heads):
    from transformers import Gemma4UnifiedVisionConfig

    config.vision_config = Gemma4UnifiedVisionConfig(
        patch_size=8, pooling_kernel_size=2, mm_embed_dim=size, output_proj_dims=size, mm_posemb_size=64)  # fmt: skip


def _merged(config, size, heads):
    config.out_hidden_size = 4 * size


def _llama4(config, size, heads):
    config.vision_config.intermediate_size = 4 * size  # Of four patches.
    config.vision_config.vision_output_dim = size


def _mllama(config, size, heads):
    config.vision_config.vision_output_dim = 2 * size  # One layer's and the last.


def _omni(config, size, heads):
    config.vision_start_token_id = 110  # Without one, padded rows have no positions.


def _token(config, size, heads):
    config.image_token_id = VOCAB - 1


# What default configurations lack, and sizes that have to fit each other.
_SPECIAL = {
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "muse_glimmer": _merged,
    "muse_spark": _merged,
    "llama4": _llama4,
    "mllama": _mllama,
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _omni),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "molmo2"), _token),
}


def image_config(model_type, heads=4, kv_heads=2):
    """`tiny_config`, with a tower that is small, too."""
    config = tiny_config(model_type, heads, kv_heads)
    special = _SPECIAL.get(model_type)
    if special is not None:
        special(config, heads * HEAD_SIZE, heads)
    for part in _parts(config):
        for name, value in _SIZES.items():
            if getattr(part, name, None) is not None:
                setattr(part, name, value(heads, kv_heads) if callable(value) else value)
        for name, value in vars(part).items():
            if isinstance(value, (list, tuple)) and len(value) == 2 and name in ("image_size", "patch_size"):
                setattr(part, name, type(value)([32 if name == "image_size" else 8] * 2))
            if isinstance(value, (list, tuple)) and name in _LAYERS:
                setattr(part, name, _LAYERS[name])
        if hasattr(part, "spatial_merge_size") and hasattr(part, "window_size"):
            part.window_size = 4 * part.patch_size  # In pixels: two merged patches.
    return config


def image_batch(model, rows=ROWS["images"], side=None, seed=1, image_size=1):
    """Whole rows with labels and pixels, as a processor would make them.

    Args:
        rows (`list[tuple]`): what each row is made of: numbers of text tokens, and `IMAGE`.
        side (`str`, *optional*): where shorter rows are padded; else they get more text.
        image_size (`int`, *optional*, defaults to 1): how many times larger images are than they have to be.

    Raises:
        ValueError: no layout of pixels suits the model.
    """
    generator = torch.Generator().manual_seed(seed)
    images = [row.count(IMAGE) for row in rows]
    pixels, counts = pixels_of(model, images, generator, image_size) if sum(images) else ({}, [])
    batch = {**_tokens(model, rows, counts, side, generator), **pixels}
    if "cross_attention_mask" in batch:
        batch["cross_attention_mask"] = batch["cross_attention_mask"].expand(-1, batch["input_ids"].shape[1], -1, -1)
    return batch


def takes(model):
    """Names of what the model, or the one inside of its head, is given."""
    modules = [model, getattr(model, "model", model)]
    return {name for module in modules for name in inspect.signature(type(module).forward).parameters}


# -- tokens -----------------------------------------------------------------------------------------------------------


def image_token(config):
    for name in ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    raise ValueError(f"{type(config).__name__} names no token for images")


def _tokens(model, rows, counts, side, generator):
    config = model.config
    special = {value for name, value in vars(config).items() if "token_i" in name and isinstance(value, int)}
    text = torch.tensor([token for token in range(3, 100) if token not in special])
    placeholder = image_token(config) if counts else -1
    counts, made = iter(counts), []
    for row in rows:
        parts = []
        for part in row:
            if part == IMAGE:
                parts.append(torch.full((next(counts),), placeholder))
            else:
                parts.append(text[torch.randint(len(text), (part,), generator=generator)])
        made.append(torch.cat(parts))
    # Odd, so that the last shard has padding.
    length = max(len(row) for row in made) | 1
    pad = getattr(config.get_text_config(), "pad_token_id", None) or 0
    ids, mask = torch.full((len(rows), length), pad), torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(made):
        if side is None:
            row = torch.cat([row, text[torch.randint(len(text), (length - len(row),), generator=generator)]])
        place = slice(length - len(row), length) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, 1
    labels = ids.where((mask == 1) & (ids != placeholder), torch.tensor(-100))
    labels[:, 3:9:2] = -100
    batch = {"input_ids": ids, "labels": labels}
    if side is not None:
        batch["attention_mask"] = mask
    for name in {"mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"} & takes(model):
        batch[name] = (ids == placeholder).long()
    return batch


# -- pixels -----------------------------------------------------------------------------------------------------------


def pixels_of(model, images, generator, image_size=1):
    """What the model wants to be given for its images, and how many tokens each of them becomes."""
    errors = []
    noise = partial(torch.randn, generator=generator)
    for make in _layouts(model):
        try:
            with torch.no_grad():
                pixels = make(model, images, noise, image_size)
                return pixels, _count(model, pixels, sum(images))
        except Exception as error:
            errors.append(f"{make.func.__name__ if isinstance(make, partial) else make.__name__}: {' '.join(str(error).split())[:90]}")
    raise ValueError(f"no layout of pixels suits {type(model).__name__}: {'; '.join(errors)}")


def _count(model, pixels, images):
    """Tokens of each image: the rows of its features."""
    owners = [module for module in model.modules() if hasattr(module, "get_image_features")]
    if "cross_attention_mask" in pixels:
        return [1] * images
    owner = owners[-1]
    parameters = inspect.signature(owner.get_image_features).parameters
    found = owner.get_image_features(**{name: value for name, value in pixels.items() if name in parameters})
    if getattr(found, "deepstack_features", None) and getattr(found, "pooler_output", None) is None:
        found = found.deepstack_features[0][1]  # Pairs of layer and features.
    elif hasattr(found, "last_hidden_state"):
        found = found.last_hidden_state if found.get("pooler_output") is None else found.pooler_output
    found = found[0] if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)) else found
    parts = [found] if torch.is_tensor(found) else list(found)
    counts = [part.numel() // part.shape[-1] for part in parts]
    if len(counts) == images:
        return counts
    assert sum(counts) % images == 0, (counts, images)
    return [sum(counts) // images] * images


def _layouts(model):
    names = takes(model)
    if "image_grid_thw" in names:
        for scale in (1, 2, 4):
            for with_time in (True, False):
                yield partial(_rows_of_patches, scale=scale, with_time=with_time)
            yield partial(_patches, scale=scale)
        yield _merged_patches
    if "image_grid_hw" in names:
        yield _rows_of_patches_hw
    if "target_sizes" in names:
        yield _strips
    if "cross_attention_mask" in names:
        yield _attended
    if "image_position_ids" in names:
        yield _patches_with_positions
        yield partial(_patches_with_positions, pooled=True)
    if "spatial_shapes" in names:
        yield _patches_with_shapes
    if "image_sizes" in names:
        yield partial(_tiles, tiles=2)
    if "pixel_attention_mask" in names:
        yield _images_by_row
        yield partial(_images_by_row, mask_of_pixels=False)
    yield _images
    if "high_res_pixel_values" in names:
        yield _images_twice
    yield _images_of_patches
    if "image_sizes" in names:
        yield partial(_images, sizes=False)


def _parts(config):
    """A configuration and those inside of it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _size(model, *names, default=None):
    config = model.config
    for part in (getattr(config, "vision_config", None), config, getattr(config, "vq_config", None)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value
    if default is None:
        raise ValueError(f"{type(config).__name__} has none of {names}")
    return default


def _channels(model):
    return _size(model, "in_channels", "in_chans", "num_channels", default=3)


def _grids(model, images, scale):
    """Height and width in patches, multiples of what is merged, another one for every second image."""
    merge = _size(model, "spatial_merge_size", "merge_size", default=2)
    shapes = [(2, 2), (2, 3)]
    return [tuple(side * merge * scale for side in shapes[index % 2]) for index in range(sum(images))]


def _rows_of_patches(model, images, noise, image_size, scale, with_time):
    grids = _grids(model, images, scale * image_size)
    patch, time = _size(model, "patch_size"), _size(model, "temporal_patch_size", "patch_temporal", default=1)
    size = _channels(model) * patch * patch * (time if with_time else 1)
    pixels = {
        "pixel_values": noise(sum(h * w for h, w in grids), size),
        "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids]),
    }
    if "image_merge_sizes" in takes(model):
        pixels["image_merge_sizes"] = torch.full((len(grids),), 2)
    return pixels


def _patches(model, images, noise, image_size, scale):
    grids = _grids(model, images, scale * image_size)
    patch = _size(model, "patch_size")
    return {
        "pixel_values": noise(sum(h * w for h, w in grids), _channels(model), patch, patch),
        "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids]),
    }


def _merged_patches(model, images, noise, image_size):
    """Channels last, merged before they are embedded."""
    merge, patch = _size(model, "spatial_merge_size", default=1), _size(model, "patch_size")
    grids = [(2, 2 + index % 2) for index in range(sum(images))]
    side = merge * patch
    return {
        "pixel_values": noise(sum(h * w for h, w in grids), side, side, _channels(model)),
        "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids]),
    }


def _rows_of_patches_hw(model, images, noise, image_size):
    pixels = _rows_of_patches(model, images, noise, image_size, scale=1, with_time=False)
    return {"pixel_values": pixels["pixel_values"], "image_grid_hw": pixels["image_grid_thw"][:, 1:]}


def _strips(model, images, noise, image_size):
    """All patches of all images side by side."""
    grids = [(4, 4 + 4 * (index % 2)) for index in range(sum(images))]
    patch = _size(model, "patch_size")
    return {
        "pixel_values": noise(1, _channels(model), patch, sum(h * w for h, w in grids) * patch),
        "target_sizes": torch.tensor(grids),
    }


def _patches_with_positions(model, images, noise, image_size, pooled=False):
    kernel, patch = _size(model, "pooling_kernel_size", default=1), _size(model, "patch_size")
    kernel, patch = (1, kernel * patch) if pooled else (kernel, patch)
    side, images = 2 * kernel * image_size, sum(images)
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1).reshape(-1, 2)
    return {
        "pixel_values": noise(images, side * side, _channels(model) * patch * patch),
        "image_position_ids": places.expand(images, -1, -1).contiguous(),
    }


def _patches_with_shapes(model, images, noise, image_size):
    grids = _grids(model, images, image_size)
    longest, patch = max(h * w for h, w in grids), _size(model, "patch_size")
    return {
        "pixel_values": noise(len(grids), longest, _channels(model) * patch * patch),
        "spatial_shapes": torch.tensor(grids),
        "pixel_attention_mask": torch.stack([(torch.arange(longest) < h * w).long() for h, w in grids]),
    }


def _side(model):
    return _size(model, "image_size", default=32)


def _tiles(model, images, noise, image_size, tiles):
    side = _side(model)
    return {
        "pixel_values": noise(sum(images), tiles, _channels(model), side, side),
        "image_sizes": torch.tensor([(side, side)] * sum(images)),
    }


def _images_by_row(model, images, noise, image_size, mask_of_pixels=True):
    """Rows with fewer images get blank ones, which the model leaves out."""
    side = _side(model)
    pixels = noise(len(images), max(images), _channels(model), side, side)
    for row, count in enumerate(images):
        pixels[row, count:] = 0.0
    mask = torch.ones(len(images), max(images), side, side, dtype=torch.long)
    if not mask_of_pixels:
        mask = torch.arange(max(images)) < torch.tensor(images)[:, None]
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _images_twice(model, images, noise, image_size):
    pixels = _images(model, images, noise, image_size)
    side = model.config.high_res_vision_config.image_size
    return {**pixels, "high_res_pixel_values": noise(sum(images), _channels(model), side, side)}


def _images_of_patches(model, images, noise, image_size):
    """One image after the other as rows of patches, all of one size."""
    patch, images = _size(model, "patch_size"), sum(images)
    return {"pixel_values": noise(images, 4, _channels(model) * patch * patch)}


def _attended(model, images, noise, image_size):
    """Images that text attends to instead of becoming part of it."""
    side, tiles = _side(model), model.config.vision_config.max_num_tiles
    rows, most = len(images), max(images)
    mask = torch.ones(rows, 1, most, tiles, dtype=torch.long)
    return {
        "pixel_values": noise(rows, most, tiles, _channels(model), side, side),
        "aspect_ratio_ids": torch.ones(rows, most, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, most, tiles, dtype=torch.long),
        "cross_attention_mask": mask,
    }


def _images(model, images, noise, image_size, sizes=True):
    side = _side(model)
    pixels = {"pixel_values": noise(sum(images), _channels(model), side, side)}
    if sizes and "image_sizes" in takes(model):
        pixels["image_sizes"] = torch.tensor([(side, side)] * sum(images))
    return pixels
