"""TRL's preference trainers are exact, every metric that they log included: the reference is the same data-parallel
processes without sequence parallelism."""

import os

import pytest
import torch

from .trajectory import tiny_llama
from .trl_trajectory import class_of, judged, lora_config, preferences, run, scores, with_lora

# float32 sums in another order, in margins that are small differences of large sums of log-probabilities.
RELATIVE, ABSOLUTE = 5e-5, 2e-5
PARAMETERS = 1e-5
ALL = bool(os.environ.get("HF_ULYSSES_TEST_ALL"))
PRODUCT = [(engine, dp) for engine in ("ddp", "zero3", "fsdp2") for dp in (1, 2)]


def layouts(*chosen, versions=None):
    """`(engine, dp)`: each trainer on some, all engines on some trainer; `scripts/test.sh --all` runs the product.

    `versions` is the one that runs on the oldest and the newest versions, too.
    """
    marks = lambda layout: pytest.mark.versions if layout == versions else ()
    return pytest.mark.parametrize("engine,dp", [pytest.param(*it, marks=marks(it)) for it in (PRODUCT if ALL else chosen)])


def assert_exact(ranks, name, data, engine="ddp", sp=2, dp=1, timeout=120, **settings):
    plain = dict(engine="plain") if dp == 1 else dict(engine=engine, dp=dp)
    expected = ranks(dp).run(run, name, data, timeout=timeout, **plain, **settings)
    results = ranks(sp * dp).run(run, name, data, engine=engine, sp=sp, dp=dp, timeout=timeout, **settings)
    for rank, result in enumerate(results):
        # Some metrics are of a data-parallel rank's own rows.
        assert_same(result, expected[rank // sp])
        assert torch.equal(result["parameters"], results[0]["parameters"]), "parameters differ between ranks"
    return expected[0], results


def assert_same(result, expected):
    assert [set(entry) for entry in result["log"]] == [set(entry) for entry in expected["log"]]
    for entry, wanted in zip(result["log"], expected["log"]):
        for key, value in wanted.items():
            if value is None:
                assert entry[key] is None, key
                continue
            assert entry[key] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE, nan_ok=True), (wanted["step"], key)
    assert result["state"] == expected["state"]
    assert (result["parameters"] - expected["parameters"]).abs().max() < PARAMETERS
    assert result["exchanges"] > 0


def other_llama():
    """A reference model that is not the policy."""
    model = tiny_llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


@layouts(("zero3", 1), ("ddp", 2), versions=("ddp", 2))
def test_dpo(ranks, engine, dp):
    evaluation = dict(eval_data=preferences(5, seed=2))
    expected, results = assert_exact(
        ranks, "DPO", preferences(6 * dp), engine, dp=dp, reference=other_llama, beta=0.5, after=exchanges_of_reference,
        **evaluation,
    )  # fmt: skip
    assert all(result["after"] > 0 for result in results), "the reference model saw whole rows"
    assert {"rewards/margins", "logits/chosen", "grad_norm"} < set(expected["log"][0])
    assert any("eval_rewards/margins" in entry for entry in expected["log"])


def exchanges_of_reference(trainer, name="ref_model"):
    from hf_ulysses.core.attachment import attachment_of

    attachment = attachment_of(trainer.accelerator.unwrap_model(getattr(trainer, name)))
    return None if attachment is None else attachment.exchanges


# What a preference loss may do with whole rows: compare rows, count tokens, sort rows, weigh by all tokens' squares.
LOSSES = {
    "sigmoid and sft": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "ipo": dict(loss_type=["ipo"]),
    "aot": dict(loss_type=["aot"], padding_side="left"),
    "weighted, by shared length": dict(use_weighting=True, ld_alpha=0.5, padding_side="left"),
}
REST = ["hinge", "robust", "bco_pair", "sppo_hard", "nca_pair", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"]
if ALL:
    LOSSES.update({name: dict(loss_type=[name]) for name in REST})
    LOSSES["exo_pair"] = dict(loss_type=["exo_pair"], label_smoothing=0.1)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_dpo(ranks, loss):
    assert_exact(ranks, "DPO", preferences(6), reference=other_llama, beta=0.5, **LOSSES[loss])


# Without a reference model it is the policy with the new adapter switched off, or a copy of one that was there before.
ADAPTERS = {"switched off": dict(trainer_arguments=dict(peft_config=lora_config())), "ref": dict(model=with_lora)}


PAIRS = [(engine, adapter) for engine in ("ddp", "zero3", "fsdp2") for adapter in ADAPTERS]


@pytest.mark.parametrize("engine,adapter", PAIRS if ALL else [("zero3", "switched off"), ("fsdp2", "ref")])
def test_dpo_with_an_adapter(ranks, engine, adapter):
    assert_exact(ranks, "DPO", preferences(6), engine, beta=0.5, eval_data=preferences(3, seed=2), **ADAPTERS[adapter])


def test_dpo_of_seven_tokens_over_four_ranks(ranks):
    assert_exact(ranks, "DPO", preferences(6, [(2, 4, 3), (3, 2, 3)]), sp=4, reference=other_llama)


def saved(rows, folder):
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder)
    return str(folder)


def run_from_cache(name, **settings):
    """No log-probability is computed ahead."""
    from unittest import mock

    with mock.patch.object(class_of(name)[0], "compute_ref_log_probs", side_effect=AssertionError("computed again")):
        return run(name, **settings)


AHEAD = [("DPO", "ddp", 2), ("DPO", "zero3", 1), ("KTO", "fsdp2", 1)]


@pytest.mark.parametrize("name,engine,dp", [(name, *it) for name in ("DPO", "KTO") for it in PRODUCT] if ALL else AHEAD)
def test_reference_computed_ahead(ranks, tmp_path, name, engine, dp):
    """Of a number of rows that neither the ranks nor the batches divide; then from the cache."""
    # The rows are fingerprinted with all arguments, the output folder included.
    settings = dict(beta=0.5, precompute_ref_log_probs=True, reference=other_llama, output_dir=str(tmp_path / "out"))
    rows = preferences(7) if name == "DPO" else judged(7)
    plain = dict(engine="plain") if dp == 1 else dict(engine=engine, dp=dp)
    expected = ranks(dp).run(run, name, saved(rows, tmp_path / "plain"), **plain, **settings)[0]
    again = dict(settings, data=saved(rows, tmp_path / "sp"), engine=engine, sp=2, dp=dp)
    for function in (run, run_from_cache):
        for result in ranks(2 * dp).run(function, name, **again):
            assert_same(result, expected)


@layouts(("fsdp2", 1), ("zero3", 2))
def test_kto(ranks, engine, dp):
    """Every other batch is all rejected; a row and the row that estimates the KL have different lengths."""
    settings = dict(reference=other_llama, beta=0.5, eval_data=judged(5, seed=2), after=exchanges_of_reference)
    expected, results = assert_exact(ranks, "KTO", judged(6 * dp), engine, dp=dp, **settings)
    assert any(entry.get("kl", 0) > 0 for entry in expected["log"])
    assert all(result["after"] > 0 for result in results)


def test_kto_with_an_adapter_and_another_loss(ranks):
    assert_exact(ranks, "KTO", judged(6), loss_type="apo_zero_unpaired", **ADAPTERS["ref"])


@layouts(("zero3", 1), ("fsdp2", 2), versions=("fsdp2", 2))
def test_reward(ranks, engine, dp):
    """Pad = eos and rows that end in eos: the pooled token is found in the whole row. An incomplete last evaluation batch."""
    settings = dict(model=scores, pad="<1>", center_rewards_coefficient=0.1)
    rows = [{k: row[k] for k in ("chosen", "rejected", "margin")} for row in preferences(6 * dp, margin=[0.5, 0.0, 1.5])]
    expected, _ = assert_exact(ranks, "Reward", rows, engine, dp=dp, eval_data=rows[:3], **settings)
    assert any("eval_margin" in entry for entry in expected["log"])


def refused_with(**settings):
    try:
        run("Reward", preferences(2), **settings)
    except ValueError as error:
        return str(error)


def test_reward_with_three_labels_is_what_it_is_without(ranks):
    """TRL refuses it."""
    (expected,) = ranks(1).run(refused_with, model=three_scores)
    assert "num_labels=3" in expected
    assert ranks(2).run(refused_with, engine="ddp", sp=2, model=three_scores) == [expected] * 2


def three_scores():
    return scores(num_labels=3)
