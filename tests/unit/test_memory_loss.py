"""Tiled loss on models that are not attached: loss, every gradient, logits when read, live storage."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_ulysses.memory import Settings, switch_on

from ..distributed.steps import assert_same, whole
from ..models import FAMILIES, batch_of, build, checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_exchange import LiveStorage  # noqa: E402


class Calls:
    """How often the head's output embedding ran, and over how many positions at most."""

    def __init__(self, model):
        self.lengths, module = [], model.get_output_embeddings()
        plain = module.forward

        def forward(hidden):
            self.lengths.append(hidden.shape[1])
            return plain(hidden)

        module.forward = forward


def tiled(model, batch, tiles=4, **more):
    handles = switch_on(model, Settings(tiled_loss=tiles, **more))
    step = whole(model, batch)
    for handle in handles:
        handle.remove()
    assert "forward" not in vars(model) and "_loss_function" not in vars(model)
    return step


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family):
    """Gemma 2 and 4 cap their logits."""
    model = build(family, "eager")
    reference = whole(model, batch_of(2, 13))
    assert_same(tiled(model, batch_of(2, 13)), reference)


def sparse(length, targets, batch_size=1):
    batch = batch_of(batch_size, length)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, length // 2 : length // 2 + targets] = 7
    return batch


@pytest.mark.parametrize("targets", [0, 1, 30])
@pytest.mark.parametrize("tiles", [1, 3, 4, 64])
@pytest.mark.parametrize("count", [None, 50, "tensor"])
def test_tiles_with_few_targets_and_none(targets, tiles, count):
    """Tiles of padding, of one target, of all; a mean over the row and a sum over the step's count."""
    model = build()
    batch = sparse(64, targets)
    if count is not None:
        batch["num_items_in_batch"] = torch.tensor(50) if count == "tensor" else count
    elif targets == 0:
        switch_on(model, Settings(tiled_loss=tiles))
        assert model(**batch).loss.isnan() and build()(**batch).loss.isnan()
        return
    reference = whole(model, batch)
    if targets == 0:
        assert reference.loss == 0
    assert_same(tiled(model, batch, tiles), reference)


@pytest.mark.parametrize("length,tiles", [(5, 4), (2, 4), (33, 8)])
def test_odd_lengths(length, tiles):
    model = build(tie_word_embeddings=True)
    reference = whole(model, batch_of(3, length))
    assert_same(tiled(model, batch_of(3, length), tiles), reference)


def test_a_biased_head_shift_labels_and_another_ignore_index():
    model = build()
    model.lm_head = nn.Linear(64, 128).double()
    batch = batch_of(2, 15)
    reference = whole(model, batch)
    shifted = {**batch, "shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    assert_same(tiled(model, shifted), reference)
    other = {**batch, "labels": batch["labels"].where(batch["labels"] % 3 > 0, 1), "ignore_index": 1}
    # Upstream pads what it shifts with the same number.
    assert_same(tiled(model, other), whole(model, other))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("asked", ["argument", "config"])
def test_the_balance_of_a_router_counts_once(masked, asked):
    model = build("mixtral", router_aux_loss_coef=0.7, output_router_logits=asked == "config")
    batch = batch_of(2, 13)
    if asked == "argument":
        batch["output_router_logits"] = True
    if masked:
        batch["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
        batch["attention_mask"][0, 9:] = 0
        batch["labels"][0, 9:] = -100
    reference = whole(model, batch)
    assert abs(reference.loss - whole(model, {**batch, "output_router_logits": False}).loss) > 0.1
    assert_same(tiled(model, batch), reference)
    assert_same(tiled(model, {**batch, "num_items_in_batch": 40}), whole(model, {**batch, "num_items_in_batch": 40}))


def test_logits_are_computed_when_read_and_no_tile_before():
    model = build()
    expected = model(**batch_of(2, 16))
    switch_on(model, Settings(tiled_loss=4))
    model(**batch_of(2, 16))  # The trial.
    calls = Calls(model)
    for read in (
        lambda out: out.logits,
        lambda out: out["logits"],
        lambda out: out[1],
        lambda out: out.to_tuple()[1],
        lambda out: dict(out.items())["logits"],
    ):
        calls.lengths.clear()
        out = model(**batch_of(2, 16), use_cache=False)
        assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert list(out.values())[0] is out.loss and max(calls.lengths) == 4
        assert torch.allclose(read(out), expected.logits)
        assert torch.allclose(out.logits, expected.logits) and calls.lengths.count(16) == 1
    assert type(out).__name__ == type(expected).__name__ and isinstance(out, type(expected))


def test_what_is_no_loss_goes_straight_through():
    model = build().eval()
    switch_on(model, Settings(tiled_loss=4))
    calls = Calls(model)
    tokens = batch_of(1, 9)
    with torch.no_grad():
        model(tokens["input_ids"])
        assert calls.lengths == [9]
        model.generate(tokens["input_ids"], max_new_tokens=2, do_sample=False)
        loss = model(**tokens).loss
        assert loss.item() == pytest.approx(build().eval()(**tokens).loss.item(), rel=1e-6)
        assert model(**tokens, logits_to_keep=9).logits.shape[1] == 9
        assert isinstance(model(**tokens, return_dict=False), tuple)


def test_a_loss_that_does_not_add_up_is_refused_and_left_alone_by_auto():
    def mean_of_rows(logits, labels, vocab_size, **kwargs):
        rows = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        return rows.pow(2).mean()

    model = build()
    model.loss_function = mean_of_rows
    reference = model(**batch_of()).loss
    handles = switch_on(model, Settings(tiled_loss=4))
    with pytest.raises(ValueError, match="tiled_loss=4: the loss of LlamaForCausalLM .*mean_of_rows.* not the sum"):
        model(**batch_of())
    handles[0].remove()
    assert model.loss_function is mean_of_rows
    switch_on(model, Settings(tiled_loss="auto"))
    assert model(**batch_of()).loss == reference


@pytest.mark.parametrize("dropped", ["num_items_in_batch", "shift_labels"])
def test_a_head_that_keeps_an_argument_to_itself_is_refused_when_it_is_given_it(dropped):
    model = build()
    cls = type(model)

    class Head(cls):
        def forward(self, input_ids=None, labels=None, **kwargs):
            kwargs.pop(dropped, None)
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model.__class__ = Head
    switch_on(model, Settings(tiled_loss=4))
    batch = batch_of(2, 16)
    model(**batch)
    given = {"num_items_in_batch": 7, "shift_labels": batch["labels"].roll(-1, 1)}[dropped]
    with pytest.raises(ValueError, match="tiled_loss=4: the loss of Head .* not the sum"):
        model(**batch, **{dropped: given})


def test_a_loss_of_the_users_that_adds_up():
    def focal(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        nll = nn.functional.cross_entropy(logits.transpose(1, 2), shift_labels, reduction="none")
        count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return ((1 - (-nll).exp()) * nll).sum() / count

    model = build()
    model.loss_function = focal
    reference = whole(model, batch_of(2, 17))
    handles = switch_on(model, Settings(tiled_loss=4))
    assert_same(whole(model, batch_of(2, 17)), reference)
    handles[0].remove()
    assert model.loss_function is focal


def test_auto_is_for_large_logits_only(monkeypatch):
    from hf_ulysses.memory import loss

    model = build()
    reference = whole(model, batch_of(2, 17))
    switch_on(model, Settings(tiled_loss="auto"))
    calls = Calls(model)
    assert_same(whole(model, batch_of(2, 17)), reference)
    assert 17 in calls.lengths
    monkeypatch.setattr(loss, "_AUTO", 2 * 17 * 128 * 4 - 1)
    monkeypatch.setattr(loss, "_TILE", 2 * 4 * 128 * 4)
    model(**batch_of(2, 17))
    calls.lengths.clear()
    assert model(**batch_of(2, 17)).loss.item() == pytest.approx(reference.loss, rel=1e-6)
    assert max(calls.lengths) == 4
    assert_same(whole(model, batch_of(2, 17)), reference)


def test_a_model_without_a_head_is_refused_by_name():
    with pytest.raises(ValueError, match="tiled_loss found no language model head in LlamaModel"):
        switch_on(build().model, Settings(tiled_loss=True))
    assert switch_on(build().model, Settings(tiled_loss="auto")) == []


def test_a_copy_has_tiles_of_its_own_and_lora_works():
    from peft import LoraConfig, get_peft_model

    model = build()
    switch_on(model, Settings(tiled_loss=4))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert_same(whole(twin, batch_of()), whole(build(), batch_of()))
    lora = get_peft_model(build(), LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).double()
    reference = whole(lora, batch_of(2, 9))
    switch_on(lora, Settings(memory="max", offload_checkpoints=False, tiled_loss=3))
    checkpoint(lora)
    assert_same(whole(lora, batch_of(2, 9)), reference)


def test_the_peak_of_the_loss_at_a_vocabulary_of_50k():
    """At most 0.15x of whole logits at 8k tokens; and no longer a matter of vocabulary times length."""

    def peak(vocab, length, tiles):
        model = build(dtype=torch.float32, vocab_size=vocab, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
        switch_on(model, Settings(tiled_loss=tiles)) if tiles else None
        batch = {name: value % vocab for name, value in batch_of(1, length).items()}
        if tiles:
            model(**{name: value[:, :8] for name, value in batch.items()})
        # What the head does, without the layers before it.
        hidden = torch.zeros(1, length, 16, requires_grad=True)
        model.model.forward = lambda *args, **kwargs: type(kept)(last_hidden_state=hidden)
        with LiveStorage() as storage:
            model(**batch).loss.backward()
        return storage.peak

    from transformers.modeling_outputs import BaseModelOutputWithPast

    kept = BaseModelOutputWithPast()
    whole_peak, tiled_peak = peak(50_000, 8192, None), peak(50_000, 8192, True)
    assert tiled_peak <= 0.15 * whole_peak, (tiled_peak / whole_peak, tiled_peak, whole_peak)
    # Tiles of 8k tokens are up to a tenth longer than those of 4k: both are rounded to a whole number of tiles.
    shorter = peak(50_000, 4096, True)
    assert tiled_peak <= 1.1 * shorter, (tiled_peak, shorter)


@pytest.mark.parametrize("own", ["with its output embedding", "with the weight alone"])
def test_a_head_that_computes_its_cross_entropy_itself(own):
    """Refused by name, never silently whole; "auto" leaves it alone."""
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids, use_cache=False)[0]
            logits = self.lm_head(hidden) if "output" in own else nn.functional.linear(hidden, self.lm_head.weight)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return type(plain(**batch_of()))(loss=loss, logits=logits)

    plain = build()
    model = Own(plain.config).double()
    reference = model(**batch_of()).loss
    handles = switch_on(model, Settings(tiled_loss="auto"))
    assert model(**batch_of()).loss == reference
    handles[0].remove()
    switch_on(model, Settings(tiled_loss=True))
    with pytest.raises(ValueError, match="tiled_loss=True: .*Own"):
        model(**batch_of())
