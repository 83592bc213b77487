"""Liger's fused linear cross entropy gets the shard's targets and the step's count, wherever the Trainer applies it.

Its kernels need a GPU. What is tested is the wiring: a stub with the interface of liger-kernel 0.8 replaces the model's
forward as Liger does, on the instance while training starts, returns no logits in training, and counts what it is given.
"""

import sys
from types import MethodType, ModuleType

import pytest
import torch

from .test_trajectories import assert_engine, assert_same
from .trajectory import rows, train

CALLS = []


def fused_forward(self, input_ids=None, labels=None, shift_labels=None, skip_logits=None, num_items_in_batch=None, **kwargs):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    skip_logits = self.training and labels is not None if skip_logits is None else skip_logits
    logits, loss = self.lm_head(hidden), None
    if labels is not None:
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=-100, reduction=reduction
        )
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        CALLS.append((self.training, tuple(shift_labels.shape), skip_logits, num_items_in_batch is not None))
    return CausalLMOutputWithPast(loss=loss, logits=None if skip_logits else logits)


def apply_to_instance(model, fused_linear_cross_entropy=True, **others):
    if fused_linear_cross_entropy:
        model.forward = MethodType(fused_forward, model)


def with_liger(**settings):
    from unittest import mock

    CALLS.clear()
    stub = ModuleType("liger_kernel.transformers")
    stub._apply_liger_kernel_to_instance = apply_to_instance
    sys.modules.update({"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.transformers": stub})
    try:
        with mock.patch("transformers.integrations.liger.is_liger_kernel_available", lambda: True):
            return train(use_liger_kernel=True, after=lambda trainer: list(CALLS), **settings)
    finally:
        del sys.modules["liger_kernel"], sys.modules["liger_kernel.transformers"]


@pytest.mark.parametrize("engine,dp,accumulation", [("zero3", 1, 2), ("fsdp2", 1, 1), ("ddp", 2, 1)])
def test_fused_loss(ranks, engine, dp, accumulation):
    settings = dict(steps=4, eval_data=rows(3, seed=9), eval_strategy="steps", eval_steps=2, prediction_loss_only=True,
                    per_device_eval_batch_size=1)  # fmt: skip
    expected = ranks(1).run(train, batch=dp, accumulation=accumulation, **settings)[0]
    results = ranks(2 * dp).run(with_liger, engine=engine, sp=2, dp=dp, accumulation=accumulation, **settings)
    assert_engine(results[0], engine)
    assert_same(results, expected)
    for result in results:
        if dp == 1:
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
        training = [call for call in result["after"] if call[0]]
        evaluation = [call for call in result["after"] if not call[0] and call[1][1] == 33]
        assert training == [(True, (1, 33), True, True)] * 4 * accumulation
        assert {call[2] for call in evaluation} == {True} and len(evaluation) == 2 * -(-3 // dp)
