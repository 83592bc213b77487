"""What enters a decoder beside its rows: embeddings of marked positions, positions along several axes, masks by kind of layer."""

import pytest
import torch

from hf_ulysses.core.cut import cut

LENGTH, WIDTH = 7, 3


def arguments(**more):
    embeddings = torch.arange(2.0 * LENGTH * WIDTH).reshape(2, LENGTH, WIDTH)
    marks = torch.zeros(2, LENGTH, dtype=torch.bool)
    # Across the cut in the first row, only behind it in the second: no slice of what they mark is one shard's.
    marks[0, 2:6] = marks[1, 5:7] = True
    return {"inputs_embeds": embeddings, "visual_pos_masks": marks, **more}


def shards(given, size=2):
    return [cut(given, rank, size)[0] for rank in range(size)]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("container", [list, tuple, lambda parts: dict(enumerate(parts))], ids=["list", "tuple", "dict"])
def test_each_shard_gets_what_its_marked_positions_need(container, dims):
    given = arguments()
    marks = given["visual_pos_masks"]
    if dims == 3:
        given["visual_pos_masks"] = marks[..., None]
    given["deepstack_visual_embeds"] = container([given["inputs_embeds"][marks], -given["inputs_embeds"][marks]])
    parts = shards(given)
    assert [int(part["visual_pos_masks"].sum()) for part in parts] == [2, 4]
    for part in parts:
        assert type(part["deepstack_visual_embeds"]) is type(given["deepstack_visual_embeds"])
        here = part["inputs_embeds"][part["visual_pos_masks"].reshape(2, -1)]
        assert torch.equal(part["deepstack_visual_embeds"][0], here)
        assert torch.equal(part["deepstack_visual_embeds"][1], -here)


def test_a_shard_without_marked_positions_gets_none():
    given = arguments()
    given["visual_pos_masks"][:] = False
    given["visual_pos_masks"][:, 0] = True
    given["features"] = given["inputs_embeds"][given["visual_pos_masks"]]
    assert [len(part["features"]) for part in shards(given, 4)] == [2, 0, 0, 0]


def test_two_masks_that_mark_as_many_positions_are_refused():
    given = arguments()
    given["audio_pos_masks"] = given["visual_pos_masks"].flip(1)
    given["features"] = given["inputs_embeds"][given["visual_pos_masks"]]
    with pytest.raises(ValueError, match=r"'features' of shape \(6, 3\).*'audio_pos_masks', 'visual_pos_masks'"):
        cut(given, 0, 2)
    given["audio_pos_masks"] = given["visual_pos_masks"].clone()
    assert len(shards(given)[0]["features"]) == 2, "the same positions under two names are no question"


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_positions_along_several_axes(axes, rows):
    positions = torch.arange(axes * rows * LENGTH).reshape(axes, rows, LENGTH)
    parts = shards(arguments(position_ids=positions))
    together = torch.cat([part["position_ids"] for part in parts], dim=-1)
    assert together.shape == (axes, 2, LENGTH + 1)
    assert torch.equal(together[..., :LENGTH], positions.expand(axes, 2, LENGTH))


def test_masks_by_kind_of_layer_stay_whole_and_hide_our_padding():
    mask = torch.zeros(2, 1, LENGTH, LENGTH)
    given = arguments(attention_mask={"full_attention": mask, "sliding_attention": mask.bool(), "other": None})
    for part in shards(given):
        full, sliding, other = part["attention_mask"].values()
        assert full.shape == sliding.shape == (2, 1, LENGTH + 1, LENGTH + 1) and other is None
        assert (full[..., LENGTH] == float("-inf")).all() and not sliding[..., LENGTH].any()


@pytest.mark.parametrize(
    "value, name",
    [
        (torch.zeros(5, LENGTH), "'strange' of shape (5, 7)"),
        ([torch.zeros(2), torch.zeros(5, LENGTH, 4)], "'strange[1]' of shape (5, 7, 4)"),
        ({"a": torch.zeros(LENGTH)}, "'strange.a' of shape (7,)"),
    ],
)
def test_what_is_as_long_as_the_row_and_has_no_rule_is_named(value, name):
    with pytest.raises(ValueError) as error:
        cut(arguments(strange=value), 0, 2)
    assert name in str(error.value)


def test_what_belongs_to_no_position_passes():
    pixels, grid = torch.ones(56, 384), torch.tensor([[1, 4, 4]])
    for part in shards(arguments(pixel_values=pixels, image_grid_thw=grid)):
        assert part["pixel_values"] is pixels and part["image_grid_thw"] is grid
