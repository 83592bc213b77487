"""Batch -> shard without ranks: all shards together are the padded row, shifted and numbered while it was whole."""

import copy

import pytest
import torch
from transformers import BatchEncoding

from hf_ulysses.core.sequence import ROW_KEY, Row
from hf_ulysses.core.cut import is_sharded, shard_batch

LENGTHS = [1, 5, 33, 1533]
SIZES = [2, 4]
BATCHES = [1, 3]


def full_batch(batch_size, length, **more):
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(0, 100, (batch_size, length), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids.clone(), **more}


def all_shards(batch, size):
    return [shard_batch(batch, rank, size) for rank in range(size)]


def joined(shards, key):
    return torch.cat([shard[key] for shard in shards], dim=-1)


def naive_shift(labels, padded):
    """`target[i] = labels[i + 1]`, nothing behind the end, written out."""
    rows = [row[1:] + [-100] for row in labels.tolist()]
    return torch.tensor([row + [-100] * (padded - len(row)) for row in rows])


def padded_length(length, size):
    return next(n for n in range(length, length + size) if n % size == 0)


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_shards_together_are_the_padded_row(length, size, batch_size):
    batch = full_batch(batch_size, length)
    before = copy.deepcopy(batch)
    shards = all_shards(batch, size)
    padded = padded_length(length, size)

    for key, fill in (("input_ids", 0), ("labels", -100)):
        whole = joined(shards, key)
        assert torch.equal(whole[:, :length], batch[key])
        assert (whole[:, length:] == fill).all()
    assert torch.equal(joined(shards, "shift_labels"), naive_shift(batch["labels"], padded))
    assert joined(shards, "position_ids").tolist() == [list(range(padded))] * batch_size
    for shard in shards:
        assert shard["input_ids"].shape == (batch_size, padded // size)
        assert all(value.is_contiguous() for value in shard.values() if torch.is_tensor(value))
        assert is_sharded(shard)

    row = shards[0][ROW_KEY]
    assert (row.length, row.padded, row.padding) == (length, padded, padded - length)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in before)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mask_exists_exactly_when_there_is_something_to_hide(length):
    shards = all_shards(full_batch(2, length), 4)
    padded = padded_length(length, 4)
    row = shards[0][ROW_KEY]
    assert row.attention_mask is None, "None still means: documents are told apart by position_ids"
    if padded == length:
        assert "attention_mask" not in shards[0] and row.padding_mask is None
    else:
        hidden = [[1] * length + [0] * (padded - length)] * 2
        assert joined(shards, "attention_mask").tolist() == hidden
        assert row.padding_mask.tolist() == hidden


def test_a_given_mask_is_padded_and_known_on_every_rank():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    shards = all_shards(full_batch(2, 5, attention_mask=mask), 2)
    padded = torch.nn.functional.pad(mask, (0, 1))
    assert torch.equal(joined(shards, "attention_mask"), padded)
    for shard in shards:
        assert torch.equal(shard[ROW_KEY].attention_mask, padded)
        assert torch.equal(shard[ROW_KEY].padding_mask, padded)


def test_eight_labels_make_seven_targets():
    """Case 3: the target right behind the cut is scored by the shard in front of it."""
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(1, 9)[None]}
    first, second = all_shards(batch, 2)
    assert first["shift_labels"].tolist() == [[2, 3, 4, 5]]
    assert second["shift_labels"].tolist() == [[6, 7, 8, -100]]


def test_shift_labels_of_the_user_are_kept():
    given = torch.tensor([[-100, 7, 8, -100, 9]])
    shards = all_shards(full_batch(1, 5, shift_labels=given), 2)
    assert joined(shards, "shift_labels").tolist() == [[-100, 7, 8, -100, 9, -100]]


# -- positions and documents ------------------------------------------------------------------------------------------


def test_a_packed_row_gets_its_padding_as_one_dummy_document():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    shards = all_shards(full_batch(2, 5, position_ids=positions), 4)
    assert joined(shards, "position_ids").tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_one_row_of_positions_serves_the_batch():
    shards = all_shards(full_batch(3, 5, position_ids=torch.arange(5)[None]), 2)
    assert joined(shards, "position_ids").tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_several_rows_of_positions_per_token():
    positions = torch.stack([torch.arange(5), torch.arange(5) * 2, torch.arange(5) * 3])[:, None].expand(3, 2, 5)
    shards = all_shards(full_batch(2, 5, position_ids=positions), 2)
    assert torch.equal(joined(shards, "position_ids")[..., :5], positions)
    assert shards[1]["position_ids"].shape == (3, 2, 3)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_boundaries_are_the_full_rows(as_tensor):
    cu_seq_lens = torch.tensor([0, 2, 5], dtype=torch.int32)
    longest = torch.tensor(3) if as_tensor else 3
    given = {
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    for shard in all_shards(full_batch(1, 5, **given), 4):
        assert not set(given) & set(shard), "a boundary of the full row would mislead whoever sees only a shard"
        boundaries = shard[ROW_KEY].boundaries
        assert boundaries["cu_seq_lens_q"].tolist() == boundaries["cu_seq_lens_k"].tolist() == [0, 2, 5, 8]
        assert boundaries["cu_seq_lens_q"].dtype == torch.int32
        assert boundaries["max_length_q"] == boundaries["max_length_k"] == 3
        assert type(boundaries["max_length_q"]) is int, "a tensor would be read by the host in every layer"
    assert cu_seq_lens.tolist() == [0, 2, 5]


def test_a_dummy_document_longer_than_all_others():
    given = {"cu_seq_lens_q": torch.tensor([0, 1]), "max_length_q": 1}
    assert all_shards(full_batch(1, 1, **given), 4)[0][ROW_KEY].boundaries["max_length_q"] == 3


# -- what is cut and what is not --------------------------------------------------------------------------------------


def test_every_per_token_tensor_is_cut_whatever_its_name():
    more = {
        "token_type_ids": torch.arange(10).view(2, 5),
        "completion_mask": torch.ones(2, 5),
        "x": torch.rand(2, 5, 3),
    }
    shards = all_shards(full_batch(2, 5, **more), 2)
    for key, value in more.items():
        whole = torch.cat([shard[key] for shard in shards], dim=1)
        assert torch.equal(whole[:, :5], value) and whole.shape[1] == 6 and (whole[:, 5:] == 0).all()


def test_what_has_no_token_dimension_is_passed_on():
    more = {
        "num_items_in_batch": torch.tensor(7),
        "weight": torch.rand(2),
        "names": ["a", "b"],
        "flag": True,
        "no": None,
    }
    for shard in all_shards(full_batch(2, 5, **more), 2):
        assert all(shard[key] is value for key, value in more.items())


def test_inputs_embeds_keep_their_gradient():
    embeds = torch.rand(2, 5, 4, requires_grad=True)
    for shard in all_shards({"inputs_embeds": embeds}, 2):
        shard["inputs_embeds"].sum().backward()
    assert torch.equal(embeds.grad, torch.ones_like(embeds))


def test_the_type_of_the_batch_is_kept():
    part = shard_batch(BatchEncoding(full_batch(1, 4)), 0, 2)
    assert type(part) is BatchEncoding and is_sharded(part)
    assert type(shard_batch(full_batch(1, 4), 0, 2)) is dict
    assert not is_sharded(full_batch(1, 4)) and not is_sharded([1])


ERRORS = {
    "no tokens": ({"prompt_ids": torch.ones(1, 4)}, r"neither `input_ids` nor `inputs_embeds`.*\['prompt_ids'\]"),
    "not a mapping": ((torch.ones(1, 4),), "not tuple"),
    "images": (full_batch(1, 4, pixel_values=torch.ones(1, 3, 2, 2)), "'pixel_values' holds images or audio, which"),
    "audio": (full_batch(1, 4, input_features=torch.ones(1, 4)), "'input_features' holds images or audio, which"),
    "4-D mask": (full_batch(1, 4, attention_mask=torch.ones(1, 1, 4, 4)), r"\(1, 1, 4, 4\).*2-D padding mask"),
    "labels per row": ({"input_ids": torch.ones(2, 4), "labels": torch.ones(2)}, r"labels of shape \(2,\)"),
    "labels of another length": (
        {"input_ids": torch.ones(2, 4), "labels": torch.ones(2, 3)},
        r"labels of shape \(2, 3\)",
    ),
    "tokens elsewhere": (full_batch(2, 5, odd=torch.ones(5, 2)), r"'odd' of shape \(5, 2\).*over 2 sequence ranks"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_entry(case):
    batch, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        shard_batch(batch, 0, 2)


def test_one_length_only():
    assert shard_batch(full_batch(1, 6), 0, 2, seq_length=6)[ROW_KEY].length == 6
    with pytest.raises(ValueError, match="sp_seq_length=8.*this row has 6 tokens"):
        shard_batch(full_batch(1, 6), 0, 2, seq_length=8)


# -- the row ----------------------------------------------------------------------------------------------------------


def checksum(tokens):
    key = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    return shard_batch({key: tokens}, 0, 2)[ROW_KEY].checksum


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_checksum_tells_rows_apart(dtype):
    shape = (2, 6)
    tokens = torch.arange(12).view(shape).to(dtype)
    swapped = tokens.clone()
    swapped[0, 0], swapped[1, 3] = tokens[1, 3], tokens[0, 0]
    changed = tokens.clone()
    changed[1, 5] += 1
    checksums = [checksum(t).tolist() for t in (tokens, swapped, changed, tokens[:1], tokens.view(3, 4, *shape[2:]))]
    assert checksum(tokens.clone()).tolist() == checksums[0]
    assert len(set(checksums)) == len(checksums) and max(checksums) < 2**24


def test_a_row_can_be_moved_like_a_tensor():
    """Loops that do `{key: value.to(device) for key, value in batch.items()}` must keep the row intact."""
    given = {
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "cu_seq_lens_q": torch.tensor([0, 5]),
        "max_length_q": 5,
    }
    row = shard_batch(full_batch(1, 5, **given), 0, 2)[ROW_KEY]
    for moved in (
        row.to("meta"),
        row.to(torch.device("meta")),
        row.to("meta", non_blocking=True),
        row.to(device="meta"),
    ):
        assert isinstance(moved, Row) and moved is not row
        tensors = (moved.position_ids, moved.attention_mask, moved.checksum, moved.boundaries["cu_seq_lens_q"])
        assert all(tensor.device.type == "meta" for tensor in tensors)
        assert (moved.length, moved.padded, moved.boundaries["max_length_q"]) == (5, 6, 5)
    cast = row.to(torch.bfloat16)
    assert cast.position_ids.dtype == torch.int64 and cast.position_ids.device.type == "cpu"
