"""TRL's preference trainers are exact, every metric that they log included: the reference is the same data-parallel
processes without sequence parallelism."""

import os

import pytest
import torch

from .trajectory import tiny_llama
from .trl_trajectory import judged, lora, preferences, run, scores

# float32 sums in another order, in margins that are small differences of large sums of log-probabilities.
RELATIVE, ABSOLUTE = 5e-5, 2e-5
PARAMETERS = 1e-5
ALL = bool(os.environ.get("HF_ULYSSES_TEST_ALL"))


def assert_exact(ranks, name, data, engine="ddp", sp=2, dp=1, timeout=120, **settings):
    plain = dict(engine="plain") if dp == 1 else dict(engine=engine, dp=dp)
    (expected, *_) = ranks(dp).run(run, name, data, timeout=timeout, **plain, **settings)
    results = ranks(sp * dp).run(run, name, data, engine=engine, sp=sp, dp=dp, timeout=timeout, **settings)
    for result in results:
        assert_same(result, expected)
        assert torch.equal(result["parameters"], results[0]["parameters"]), "parameters differ between ranks"
    return expected, results


def assert_same(result, expected):
    assert [set(entry) for entry in result["log"]] == [set(entry) for entry in expected["log"]]
    for entry, wanted in zip(result["log"], expected["log"]):
        for key, value in wanted.items():
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


@pytest.mark.parametrize("engine,dp", [("ddp", 1), ("zero3", 1), ("fsdp2", 1), ("ddp", 2)])
def test_dpo(ranks, engine, dp):
    evaluation = dict(eval_data=preferences(5, seed=2))
    expected, results = assert_exact(
        ranks, "DPO", preferences(6 * dp), engine, dp=dp, reference=other_llama, beta=0.5, after=exchanges_of_reference,
        **evaluation,
    )  # fmt: skip
    assert all(result["after"] > 0 for result in results), "the reference model saw whole rows"
    assert {"rewards/margins", "logits/chosen", "num_tokens", "grad_norm"} < set(expected["log"][0])
    assert any("eval_rewards/margins" in entry for entry in expected["log"])


def exchanges_of_reference(trainer):
    from hf_ulysses.core.attachment import attachment_of

    attachment = attachment_of(trainer.accelerator.unwrap_model(trainer.ref_model))
    return None if attachment is None else attachment.exchanges
