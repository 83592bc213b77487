"""What a batch and an attached model go through on their way to a device: pinned, moved, cast, saved, copied."""

import ast
import copy
import io
from pathlib import Path

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

import hf_ulysses
from hf_ulysses.core.cut import shard_batch
from hf_ulysses.core.sequence import ROW_KEY, Row
from hf_ulysses.mixing.prints import Layout, Print
from hf_ulysses.planner.step import fake_world

from ..models import batch_of, build, packed_positions
from ..tiny_models import tiny_config, tiny_model

LENGTH = 33
POSITIONS = packed_positions(11, 2, 20)
ENDS = torch.tensor([0, 11, 13, LENGTH], dtype=torch.int32)
BOUNDARIES = dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_q=20, max_length_k=20)


def sharded_batch():
    return shard_batch(batch_of(1, LENGTH, position_ids=POSITIONS, **BOUNDARIES), rank=0, size=2)


def tensors_of(row):
    found = [row.position_ids, row.checksum, row.shift_labels, *row.boundaries.values()]
    return [value for value in found if torch.is_tensor(value)]


def test_a_loader_pins_the_row(monkeypatch):
    """There is no memory to pin here: what is asked for is recorded."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: pinned.append(tensor) or tensor.clone())
    batch = sharded_batch()
    result = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert isinstance(result[ROW_KEY], Row) and result[ROW_KEY] is not batch[ROW_KEY]
    assert all(any(tensor is one for one in pinned) for tensor in tensors_of(batch[ROW_KEY]))


def test_accelerate_moves_the_row():
    from accelerate.utils import send_to_device

    row = send_to_device(sharded_batch(), "meta")[ROW_KEY]
    assert {tensor.device.type for tensor in tensors_of(row)} == {"meta"} and len(tensors_of(row)) == 5


def test_fsdp_casts_around_the_row():
    batch = sharded_batch()
    assert _apply_to_tensors(lambda tensor: tensor.to(torch.bfloat16), batch)[ROW_KEY] is batch[ROW_KEY]


@pytest.mark.parametrize("explicit", [True, False], ids=["shards", "whole rows"])
def test_attention_gets_everything_on_the_models_device(explicit):
    """FSDP's root moves a batch's tensors to the device, and no object of ours."""
    from transformers import AttentionInterface

    seen = []

    def core(module, query, key, value, attention_mask, cu_seq_lens_q=None, position_ids=None, **kwargs):
        seen.append([query.device.type, cu_seq_lens_q.device.type, position_ids.device.type])
        return query.transpose(1, 2), None

    AttentionInterface.register("looks_at_devices", core)
    model = build(attn="looks_at_devices", dtype=torch.float32).to("meta")
    with fake_world(2), hf_ulysses.attach(model, trial=False) as sp:
        sp.peers.judge = sp.compare_rows = lambda *_: None
        batch = batch_of(1, LENGTH, position_ids=POSITIONS, **BOUNDARIES)
        if explicit:
            batch = sp.shard(batch)
        _, (moved,) = _to_kwargs((), batch, torch.device("meta"), False)
        assert not explicit or moved[ROW_KEY].position_ids.device.type == "cpu", "FSDP moves it now"
        model(**moved)
    assert seen == [["meta"] * 3] * 2


def test_the_trial_runs_where_the_batch_is(monkeypatch):
    """Parameters may be elsewhere: offloaded, or on a device that nobody has moved the batch to."""
    tried = []

    def record(model, attachment, device):
        tried.append(device.type)
        raise RuntimeError("seen")

    monkeypatch.setattr(hf_ulysses.mixing.locate, "locate", record)
    model = build(dtype=torch.float32)
    with fake_world(2), hf_ulysses.attach(model), pytest.raises(RuntimeError, match="seen"):
        model(**{key: value.to("meta") for key, value in batch_of(1, LENGTH).items()})
    assert tried == ["meta"]


# -- saved and copied models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["default", "dynamic", "mamba"])
def test_an_attached_model_can_be_saved_whole(kind):
    """`torch.save(model)`: what is loaded is the model, attached to nothing. Rotary embeddings and convolutions have hooks."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    model = build(dtype=torch.float32, rope_parameters=parameters) if kind in ("default", "dynamic") else tiny_model(tiny_config(kind))
    file = io.BytesIO()
    batch = batch_of(1, LENGTH)
    expected = model(**batch).loss
    with fake_world(2):
        with hf_ulysses.attach(model, trial=False):
            torch.save(model, file)
            file.seek(0)
            loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(model)
            for twin in (loaded, copied):
                assert torch.equal(twin(**batch).loss, expected)
            # Loaded, it may be attached by itself.
            hf_ulysses.attach(loaded, trial=False).detach()
        assert torch.equal(model(**batch).loss, expected)


# -- lengths and numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rows_that_are_padded_for_fp8_give_shards_that_it_takes(size):
    """fp8 matrix products want multiples of 16 tokens: `pad_to_multiple_of=16 * sp_size` in the collator."""
    from transformers import DataCollatorForTokenClassification

    from ..training.trajectory import _tokenizer

    collator = DataCollatorForTokenClassification(_tokenizer(), pad_to_multiple_of=16 * size)
    rows = [{"input_ids": list(range(2, 2 + n)), "labels": list(range(2, 2 + n))} for n in (5, 101)]
    batch = collator(rows)
    for rank in range(size):
        part = shard_batch(batch, rank, size)
        assert part["input_ids"].shape[1] % 16 == 0 and part[ROW_KEY].padding == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32])
def test_positions_of_any_dtype_are_facts_alike(dtype):
    for positions, documents in ((POSITIONS, 3), (torch.arange(LENGTH)[None], 1)):
        row = shard_batch(batch_of(1, LENGTH, position_ids=positions.to(dtype)), 1, 2)[ROW_KEY]
        assert row.position_ids.dtype == dtype and row.padding == 1
        found = row.facts.documents
        assert row.facts.in_one == (documents == 1)
        # Behind packed documents the padding is one more.
        assert documents == 1 or [one.stop for one in found[0]] == [11, 13, LENGTH, LENGTH + 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_that_float32_cannot_count(dtype):
    """Above 2 ** 24 every second position would be lost."""
    row = shard_batch(batch_of(1, LENGTH, position_ids=(torch.arange(LENGTH) + 2**24 + 1)[None].to(dtype)), 1, 2)[ROW_KEY]
    assert row.facts.in_one and row.position_ids[0].diff().tolist() == [1] * LENGTH
    assert row.position_ids.dtype == dtype and row.position_ids[0, row.length - 1] == 2**24 + LENGTH


# -- what a start costs, and who talks over what ----------------------------------------------------------------------------


def test_a_trials_fingerprints_are_small():
    """Of the logits of a vocabulary, too: a number or two per position, of whatever dimension may be the sequence."""
    layout = Layout(length=66, padded=66, shard=33, rank=0, mask=None)
    fingerprint = Print(torch.zeros(1, 66, 100_000), layout)
    assert sum(sums.untyped_storage().nbytes() for sums in fingerprint.sums.values()) < 10_000


def test_the_random_states_of_other_devices_are_left_alone(monkeypatch):
    """`fork_rng()` warns on every rank of a machine with several GPUs; only this rank's is saved and restored."""
    from hf_ulysses.core import randomness

    class Device:
        states = []
        get_rng_state = staticmethod(lambda: "state")
        set_rng_state = staticmethod(states.append)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: Device)
    states = randomness.random_states()
    randomness.set_random_states(states)
    assert len(states) == 2 and Device.states == ["state"]


def test_objects_travel_between_hosts():
    """Collectives of Python objects go through the device where its group is used: only control.py, over gloo, may."""
    package = Path(hf_ulysses.__file__).parent
    names = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier", "monitored_barrier"}
    callers = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert callers == {"core/control.py"}
