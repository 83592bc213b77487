"""Rows of any kind through a sharded Llama step: lengths, targets, packing, padding. Loss and gradients as in one."""

import math

import pytest
import torch
import torch.distributed as dist

import hf_ulysses

from ..models import batch_of, build, packed_positions, padded
from .steps import Step, assert_same, average, compare, gradients, of_real_tokens, residual, sharded, whole_step

IGNORED = -100


def targets_at(*positions, length=33, batch_size=1):
    """A batch in which only these tokens of each row are labels."""
    batch = batch_of(batch_size, length)
    keep = torch.zeros(length, dtype=torch.bool)
    keep[list(positions)] = True
    return {**batch, "labels": batch["labels"].where(keep, IGNORED)}


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length, batch_size", [(3, 1), (3, 3), (5, 1), (5, 3), (33, 3), (64, 1), (1533, 1), (257, 3)])
def test_any_length_and_batch_size(ranks, length, batch_size, size):
    """Case 10."""
    compare(ranks, size, batch_of(batch_size, length))


def step(batch, training=True):
    model = build().train(training)
    with hf_ulysses.attach(model) as sp:
        return sharded(model, batch, sp)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "batch", [batch_of(1, 1), batch_of(3, 1), targets_at(), targets_at(0)], ids=["1", "1x3", "none", "first"]
)
def test_nothing_to_learn_is_what_one_process_gives(ranks, batch, training):
    """Cases 4 and 35, and rows of one token: their only label has no token in front of it. 0 / 0 without any gradient."""
    assert all((gradient == 0).all() for gradient in ranks(1).run(whole_step, batch)[0].gradients.values())
    for result in ranks(4).run(step, batch, training):
        assert math.isnan(result.loss) and result.logits.isfinite().all()
        assert all((gradient == 0).all() for gradient in result.gradients.values())


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "batch",
    [
        targets_at(4, length=8),  # Case 3: the only target lies right behind the cut of two ranks.
        targets_at(32),  # Case 4: one target, so that all but one shard have none.
        targets_at(1, 2, 3, 20),
        targets_at(*range(9)),
        {"input_ids": torch.arange(1, 5)[None], "labels": torch.arange(1, 5)[None]},  # Case 5.
        {"input_ids": torch.arange(8)[None], "labels": torch.arange(1, 9)[None]},  # Case 3.
    ],
    ids=["behind the cut", "one", "uneven", "first shard only", "first label valid", "eight labels"],
)
def test_uneven_targets(ranks, batch, size):
    compare(ranks, size, batch)


def logits_twice(batch, other):
    """Logits of two batches, on an attached model."""
    model = build(**batch.pop("model", {}))
    with hf_ulysses.attach(model) as sp, torch.no_grad():
        parts = [sp.shard(b) for b in (batch, other)]
        return [sp.gather(model(**part).logits, like=part) for part in parts]


def with_token(batch, position, token):
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, position] = token
    return changed


# -- documents --------------------------------------------------------------------------------------------------------


def boundaries(*lengths):
    """What TRL's packing and padding-free collators add: 1-D boundaries next to the positions."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_packed_with_boundaries(ranks, attn):
    """Case 11. Boundaries are for kernels; sdpa and eager tell documents apart by their positions and ignore them."""
    batch = batch_of(1, 41, position_ids=packed_positions(13, 9, 19), **boundaries(13, 9, 19))
    compare(ranks, 4, batch, attn=attn)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_document_does_not_see_the_others(ranks, attn):
    """Case 11: changing a token of the first document leaves the second untouched, bit for bit."""
    batch = batch_of(1, 33, position_ids=packed_positions(12, 21))
    for before, after in ranks(2).run(logits_twice, {**batch, "model": dict(attn=attn)}, with_token(batch, 3, 99)):
        assert torch.equal(before[:, 12:], after[:, 12:])
        assert not torch.equal(before[:, 11], after[:, 11])


def losses_of_documents(batches, attn):
    """The loss of each batch, on an attached model."""
    model = build(attn=attn)
    with hf_ulysses.attach(model) as sp, torch.no_grad():
        parts = [sp.shard(batch) for batch in batches]
        return [sp.reduce_loss(model(**part).loss, part["shift_labels"]).item() for part in parts]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_document_costs_the_same_loss_packed_and_alone(ranks, attn):
    lengths = (13, 9, 19)
    row = batch_of(1, sum(lengths), position_ids=packed_positions(*lengths))
    packed, alone, start = [], [], 0
    for length in lengths:
        mine = slice(start, start + length)
        # The first token of a document is nobody's target.
        targets = torch.full_like(row["labels"], -100)
        targets[:, start + 1 : start + length] = row["labels"][:, start + 1 : start + length]
        packed.append({**row, "labels": targets})
        alone.append({"input_ids": row["input_ids"][:, mine], "labels": targets[:, mine]})
        start += length
    for losses in ranks(2).run(losses_of_documents, packed + alone, attn):
        # Transformers computes cross entropies in float32.
        assert losses[:3] == pytest.approx(losses[3:], rel=1e-6)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_window_ends(ranks, attn):
    """Case 19: two layers of window 16 carry a token 30 positions far and no further."""
    batch = batch_of(1, 64)
    model = dict(family="mistral", attn=attn, sliding_window=16)
    for before, after in ranks(4).run(logits_twice, {**batch, "model": model}, with_token(batch, 0, 99)):
        assert torch.equal(before[:, 31:], after[:, 31:])
        assert not torch.equal(before[:, 30], after[:, 30])


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_of_packed_rows(ranks, size):
    positions = torch.cat([packed_positions(13, 8), packed_positions(21), packed_positions(1, 20)])
    compare(ranks, size, batch_of(3, 21, position_ids=positions))


def test_positions_and_a_mask_of_the_user(ranks):
    """Left-padded rows whose positions start at the first real token: a mask is given, so none is guessed."""
    batch = padded(batch_of(2, 21), real=[10, 21], side="left")
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    compare(ranks, 4, batch)


def test_embeddings_instead_of_tokens(ranks):
    batch = batch_of(2, 21)
    batch["inputs_embeds"] = torch.randn(2, 21, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    del batch["input_ids"]
    # Nothing looks the embedding up, so it has no gradient; `assert_same` compares which parameters have one.
    compare(ranks, 4, batch)


# -- several rows: groups, accumulation, counts -----------------------------------------------------------------------

ROWS = [targets_at(*range(n), length=21) for n in (2, 6, 21, 4)]
NUM_TARGETS = sum(int((row["labels"][:, 1:] != IGNORED).sum()) for row in ROWS)


def accumulated(rows, num_items):
    model = build()
    losses = []
    for row in rows:
        output = model(**row, use_cache=False, num_items_in_batch=num_items)
        output.loss.backward()
        losses.append(output.loss.item())
    return Step(sum(losses), of_real_tokens(output.logits, row), gradients(model))


def accumulated_on_groups(rows, num_items):
    """Data parallel over pairs of ranks: each pair takes its rows one after the other."""
    model = build()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    mine = dist.get_rank() // 2
    num_groups = len(pairs)
    losses = []
    with hf_ulysses.attach(model, pairs[mine]) as sp:
        for row in rows[mine::num_groups]:
            part = sp.shard(row)
            output = model(**part, num_items_in_batch=num_items)
            # The count is of the whole step; gradients are averaged over the groups, too.
            loss = sp.reduce_loss(output.loss, part["shift_labels"], num_items_in_batch=num_items) * num_groups
            loss.backward()
            losses.append(loss.detach() / num_groups)
        logits = sp.gather(output.logits.detach(), like=part)
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return Step(total.item() / sp.size, logits, average(gradients(model)))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_count_of_the_whole_step(ranks, size, as_tensor):
    """Case 1: uneven targets, accumulation 4 on one pair and 2 on two pairs, against four rows in one process."""
    num_items = torch.tensor(NUM_TARGETS) if as_tensor else NUM_TARGETS
    reference = ranks(1).run(accumulated, ROWS, num_items)[0]
    results = ranks(size).run(accumulated_on_groups, ROWS, num_items)
    assert_same(results[-1], reference)
    for result in results:
        assert abs(result.loss - reference.loss) <= 2e-6 * reference.loss
        assert max(residual(result.gradients[name], reference.gradients[name]) for name in reference.gradients) < 2e-6
