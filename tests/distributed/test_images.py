"""Rows with images through a sharded model: the tower, what it merges and its positions are one process's, on whole rows.

Loss, logits and every gradient, the tower's and the projector's too, against one process in float32;
scripts/sweep_architectures.py --images tries every type.
"""

import logging

import pytest
import torch

import hf_ulysses
from hf_ulysses.core import cut as cutting
from hf_ulysses.core.entrance import decoder_of

from ..collectives import Collectives
from ..image_batches import IMAGE, ROWS, image_batch, image_config, image_token
from ..one_architecture import try_batches
from ..tiny_models import tiny_model

# Positions along three axes, deepstack, gated delta nets; masks by blocks of images; plain ones; images of any size; tiles.
FAMILIES = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm46v", "gemma3", "gemma4", "paligemma", "llava", "llava_onevision",
    "internvl", "smolvlm", "idefics3", "mistral3",
]  # fmt: skip
LAYOUTS = {2: (4, 2), 4: (6, 3)}


def tiny(family, size=2):
    return tiny_model(image_config(family, *LAYOUTS[size]), images=True)


def families(names, size, rows=ROWS):
    """Of each family, what `try_batches` finds; and how many attention layers its decoder exchanges in."""
    found = {}
    for family in names:
        model = tiny(family, size)
        batches = {case: image_batch(model, rows[case], "left" if "left" in case else None) for case in rows}
        # Gated delta nets are found by the trial.
        found[family] = try_batches(model, batches, trial=family == "qwen3_5")
        layers = decoder_of(model).config.layer_types if family == "qwen3_5" else decoder_of(model).layers
        found[family]["layers"] = sum(1 for layer in layers if layer != "linear_attention")
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("half", [0, 1])
def test_families(ranks, size, half):
    for found in ranks(size).run(families, FAMILIES[half::2], size):
        for family, answers in found.items():
            for case in ROWS:
                assert answers[case]["status"] == "exact", (family, case, answers[case])
                assert answers[case]["exchanges"] == answers["layers"] and not answers[case]["gathered"], (family, answers)


# -- rows -------------------------------------------------------------------------------------------------------------

KINDS = {
    "across the cut": ([(9, IMAGE, 10)], None),
    "in the first shard": ([(1, IMAGE, 1, IMAGE, 60)], None),
    "in the last shard": ([(60, IMAGE, 1, IMAGE, 1)], None),
    "unequal numbers": ([(3, IMAGE, 3, IMAGE, 1, IMAGE, 4), (20,), (9, IMAGE, 9)], None),
    "text alone": ([(23,), (20,)], None),
    "again images": ([(12, IMAGE, 11)], None),
    "padded left": ([(5, IMAGE, 20, IMAGE), (17,), (IMAGE, 3)], "left"),
    "padded right": ([(5, IMAGE, 20, IMAGE), (17,), (IMAGE, 3)], "right"),
    "nothing but an image": ([(1, IMAGE, 1)], None),
}


def kinds(family):
    """All kinds of rows, one after the other through one attached model."""
    model = tiny(family, 4)
    batches = {kind: image_batch(model, rows, side) for kind, (rows, side) in KINDS.items()}
    return try_batches(model, batches, trial=False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_kinds_of_rows(ranks, family, size):
    for found in ranks(size).run(kinds, family):
        wrong = {kind: found[kind] for kind in KINDS if found[kind]["status"] != "exact"}
        assert not wrong, wrong


def with_video(model, batch):
    """The last image of a batch made a video of one frame."""
    *grids, last = batch["image_grid_thw"]
    patches, config = int(last.prod()), model.config
    tokens = patches // config.vision_config.spatial_merge_size**2
    ids, types = batch["input_ids"].clone(), batch["mm_token_type_ids"].clone()
    places = (ids == image_token(config)).nonzero()[-tokens:].unbind(1)
    ids[places], types[places] = config.video_token_id, 2
    return {
        **batch,
        "input_ids": ids,
        "mm_token_type_ids": types,
        "pixel_values": batch["pixel_values"][:-patches],
        "image_grid_thw": torch.stack(grids),
        "pixel_values_videos": batch["pixel_values"][-patches:],
        "video_grid_thw": last[None],
    }


def videos(family):
    model = tiny(family)
    return try_batches(model, {"video": with_video(model, image_batch(model))}, trial=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_video_and_image_together(ranks, family):
    for found in ranks(2).run(videos, family):
        assert found["video"]["status"] == "exact", found


def packed_documents(family):
    """Two documents with an image each in one row: positions of the text, which restart, in front of those of the image's axes."""
    model = tiny(family, 4)
    parts = [image_batch(model, [row], seed=seed) for seed, row in enumerate([(5, IMAGE, 11), (9, IMAGE, 4, IMAGE, 2)])]
    positions = []
    for part in parts:
        part.pop("attention_mask", None)
        part["labels"][:, 0] = -100
        given = (part[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw"))
        text = torch.arange(part["input_ids"].shape[1]).expand(1, 1, -1)
        positions.append(torch.cat([text, model.model.get_rope_index(*given)[0]]))
    along = {name: int(name.endswith("ids") or name == "labels") for name in part}
    batch = {name: torch.cat([part[name] for part in parts], dim) for name, dim in along.items()}
    batch = {**batch, "position_ids": torch.cat(positions, dim=-1)}
    # The first document's mask matters: its loss alone is another one when positions run on.
    run_on = torch.cat([torch.arange(batch["input_ids"].shape[1]).expand(1, 1, -1), batch["position_ids"][1:]])
    differs = float(model(**batch).loss - model(**{**batch, "position_ids": run_on}).loss)
    return {**try_batches(model, {"packed": batch}, trial=False), "differs": abs(differs)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_documents_with_images(ranks, family, size):
    for found in ranks(size).run(packed_documents, family):
        assert found["packed"]["status"] == "exact" and found["differs"] > 1e-4, found


# -- a fault would show -----------------------------------------------------------------------------------------------


def shifted(what):
    """Qwen3-VL while its deepstack embeddings, or its positions, are those of the token before."""
    in_shard, pad_positions = cutting._Marked.in_shard, cutting._pad_positions
    if what == "deepstack":
        cutting._Marked.in_shard = lambda self, name, value: in_shard(self, name, value.roll(1, dims=0))
    else:
        cutting._pad_positions = lambda positions, padding: pad_positions(positions.roll(1, dims=-1), padding)
    try:
        return families(["qwen3_vl"], 2, {"images": ROWS["images"]})["qwen3_vl"]["images"]
    finally:
        cutting._Marked.in_shard, cutting._pad_positions = in_shard, pad_positions


@pytest.mark.parametrize("what", ["deepstack", "positions"])
def test_a_shift_by_one_is_found(ranks, what):
    for found in ranks(2).run(shifted, what):
        assert found["status"] == "wrong" and found["logits"] > 1e-3, found


# -- cost -------------------------------------------------------------------------------------------------------------


def costs(family):
    """Collectives of a text row and of a row of images of the same length, in forward and in all; the longest row that a
    layer of the decoder has seen."""
    model = tiny(family)
    images = image_batch(model, [(9, IMAGE, 10)])
    text = image_batch(model, [(images["input_ids"].shape[1],)])
    lengths, counts = set(), []
    for layer in decoder_of(model).layers:
        layer.register_forward_pre_hook(lambda _, args: lengths.add(args[0].shape[1]))
    with hf_ulysses.attach(model, trial=False):
        model(**text)  # The first batch is compared at once.
        for batch in (text, images):
            with Collectives() as wire:
                loss = model(**batch).loss
                forward = wire.counts
                loss.backward()
            counts.append((forward, wire.counts))
    return counts, lengths, text["input_ids"].shape[1]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_the_tower_exchanges_nothing(ranks, family):
    for (text, images), lengths, length in ranks(2).run(costs, family):
        assert images[0] == text[0]
        # Backward sums the gradient of each embedding that enters layers by itself.
        more = images[1] - text[1]
        assert set(more) <= {"allreduce_"} and more.total() == (2 if family == "qwen3_vl" else 0), more
        assert lengths == {-(-length // 2)}


def logged(family):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hf_ulysses")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        model = tiny(family)
        with hf_ulysses.attach(model, trial=False):
            model(**image_batch(model)).loss.backward()
        return [record for record in records if "on every rank" in record]
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_the_cost_of_the_tower_is_said(ranks):
    first, second = ranks(2).run(logged, "qwen3_vl")
    assert len(first) == 1 and "model.visual" in first[0] and "parameters" in first[0], first
    assert not second
    assert not ranks(2).run(logged_text)[0]


def logged_text():
    from ..models import batch_of, build

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hf_ulysses").addHandler(handler)
    try:
        model = build(dtype=torch.float32)
        with hf_ulysses.attach(model, trial=False):
            model(**batch_of())
        return [record for record in records if "on every rank" in record]
    finally:
        logging.getLogger("hf_ulysses").removeHandler(handler)


# -- refused ----------------------------------------------------------------------------------------------------------


def cross_attention():
    """Mllama's text attends to its images, whose mask has a row for each token."""
    model = tiny("mllama")
    batches = {"images": image_batch(model), "text": image_batch(model, [(23,), (20,)])}
    return try_batches(model, batches)


def test_cross_attention_to_images_is_refused_and_text_alone_is_exact(ranks):
    for found in ranks(2).run(cross_attention):
        assert found["images"]["status"] == "refused" and "'cross_attention_mask'" in found["images"]["why"], found
        assert found["text"]["status"] == "exact", found


def sharded_by_hand():
    model = tiny("llava")
    with hf_ulysses.attach(model, trial=False) as sp, pytest.raises(ValueError, match="'pixel_values' .* whole batch"):
        sp.shard(image_batch(model))


def test_images_are_not_sharded_by_hand(ranks):
    ranks(2).run(sharded_by_hand)
