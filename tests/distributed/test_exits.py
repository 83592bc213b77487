"""What leaves an attached model is whole when it is read, and gathered only for who reads it."""

import datetime
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_ulysses
from hf_ulysses.core import control, entrance

from ..models import batch_of, build
from ..ranks import RankFailed

BATCH = batch_of(2, 33)


def in_ddp(model, sp, find_unused_parameters=False):
    engine = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    sp.inside(engine)
    return engine


def in_fsdp2(model, sp):
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    return model


def in_bf16(model, sp):
    """As `Accelerator.prepare_model` does it: the output is made anew, with its floats as float32."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    return model


ENGINES = {
    "plain": lambda model, sp: model,
    "ddp": in_ddp,
    "ddp, unused parameters": lambda model, sp: in_ddp(model, sp, find_unused_parameters=True),
    "fsdp2": in_fsdp2,
    "bf16": in_bf16,
    "bf16, ddp": lambda model, sp: in_ddp(in_bf16(model, sp), sp),
}
# How -> the fields of whole rows that are gathered by it.
LOGITS = ["logits"]
BOTH = ["logits", "hidden_states"]
READS = {
    "loss": (lambda output: output.loss, []),
    "loss by key": (lambda output: output["loss"], []),
    "loss by place": (lambda output: output.get("loss"), []),
    "what it has": (lambda output: ("logits" in output, list(output), list(output.keys()), len(output), bool(output)), []),
    "attribute": (lambda output: output.logits, LOGITS),
    "twice": (lambda output: (output.logits, output["logits"], output.logits), LOGITS),
    "key": (lambda output: output["logits"], LOGITS),
    "get": (lambda output: output.get("logits"), LOGITS),
    "another": (lambda output: output.hidden_states, ["hidden_states"]),
    "items": (lambda output: dict(output.items()), BOTH),
    "values": (lambda output: list(output.values()), BOTH),
    "places": (lambda output: output[1:], BOTH),
    "tuple": (lambda output: output.to_tuple(), BOTH),
}


def gathers(name, reads):
    """For every way to read an output: what was gathered until it is there, and by reading."""
    model = build(dtype=torch.float32)
    gathered, gather = [], entrance.gather_sequence
    with hf_ulysses.attach(model) as sp:
        engine = ENGINES[name](model, sp)
        engine(**BATCH)  # The trial is over.
        found = {}
        count = mock.patch.object(entrance, "gather_sequence", lambda t, *rest: gathered.append(t.shape[-1]) or gather(t, *rest))
        with count:
            for how in reads:
                output = engine(**BATCH, output_hidden_states=True)
                output.loss.backward()
                before = len(gathered)
                READS[how][0](output)
                found[how] = before, [width for width in gathered[before:]]
                gathered.clear()
            tuples = engine(**BATCH, return_dict=False)
            found["return_dict=False"] = [width for width in gathered], tuples[1].shape
            gathered.clear()
            sp.loss_only = True
            output = engine(**BATCH)
            found["loss only"] = len(output.items()), len(output[1:]), len(list(output.values())), len(gathered)
            found["loss only"] += (len(engine(**BATCH, return_dict=False)), len(gathered))
            output.logits
            found["by name"] = gathered
    return found


WIDTHS = {"logits": [128], "hidden_states": [64] * 3}


@pytest.mark.parametrize("name", ENGINES)
def test_gathered_for_who_reads_it(ranks, name):
    reads = list(READS) if name == "plain" else ["loss", "attribute", "items"]
    for found in ranks(2).run(gathers, name, reads):
        for how in reads:
            wanted = [width for field in sorted(READS[how][1]) for width in WIDTHS[field]]
            assert found[how] == (0, wanted), how
        # A tuple cannot wait: it holds tensors.
        assert found["return_dict=False"] == ([128], (2, 33, 128))
        assert found["loss only"][:4] == (1, 0, 1, 0)
        assert found["loss only"][5] == 0 and found["by name"] == [128]


def read_alone(read):
    """Rank 0 reads what rank 1 does not; they have a second to meet."""
    model = build()
    with mock.patch.object(control, "PATIENCE", datetime.timedelta(seconds=1)):
        group = dist.new_group([0, 1])  # Its control group is made with that patience.
        sp = hf_ulysses.attach(model, group)
    output = model(**BATCH, output_hidden_states=True)
    try:
        read[dist.get_rank()](output)
    except RuntimeError as error:
        return str(error)
    finally:
        sp.detach()
    return None


def test_reading_on_one_rank_is_an_error_that_names_the_field(ranks):
    mine, other = ranks(2).run(read_alone, [_logits, _nothing])
    assert other is None
    assert "logits of an attached model's output" in mine and "Read it on all of them, or on none" in mine


def test_reading_other_fields_is_an_error_on_both(ranks):
    for message, name in zip(ranks(2).run(read_alone, [_logits, _hidden_states]), ("logits", "hidden_states")):
        assert message.startswith(f"{name} of") and "['logits', 'hidden_states']" in message


def _logits(output):
    output.logits


def _hidden_states(output):
    output.hidden_states


def _nothing(output):
    import time

    time.sleep(1.5)  # Not gone, but elsewhere.


def interrupted_in_an_engine():
    """Ctrl-C inside of an engine's forward; then the model without it, and the engine again."""
    model = build(dtype=torch.float32)
    with hf_ulysses.attach(model) as sp:
        engine = in_ddp(model, sp)
        engine(**BATCH)
        handle = model.model.layers[1].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(**BATCH)
        handle.remove()
        with torch.no_grad():
            return [run(**BATCH).logits.shape for run in (model, engine, model)]


def _interrupt(module, args):
    raise KeyboardInterrupt


def test_an_interrupt_in_an_engine_is_forgotten(ranks):
    for shapes in ranks(2).run(interrupted_in_an_engine):
        assert shapes == [(2, 33, 128)] * 3


def pooled(length):
    """BERT's classifier: its base model returns a state per token and one per row, of size 64 both."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    batch = {"input_ids": torch.arange(2 * length).reshape(2, length) % 120 + 3, "labels": torch.tensor([0, 1])}
    expected = model(**batch).loss
    with hf_ulysses.attach(model):
        return torch.allclose(model(**batch).loss, expected, rtol=1e-6)


def test_a_pooled_state_is_not_taken_for_tokens(ranks):
    """With 64 tokens on each rank there is no telling them apart."""
    assert ranks(2).run(pooled, 126) == [True, True]
    with pytest.raises(RankFailed, match=r"holds a tensor of shape \(2, 64\) \(pooler_output\): .* Pad rows to another length"):
        ranks(2).run(pooled, 128)


def routers(return_dict):
    model = build("mixtral", dtype=torch.float32)
    given = dict(BATCH, output_router_logits=True, return_dict=return_dict)
    expected = model(**given)
    expected = expected.router_logits if return_dict else expected[-1]
    with hf_ulysses.attach(model) as sp:
        output = model(**given)
        found = output.router_logits if return_dict else output[-1]
        return [torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)], sp.splits_loss


@pytest.mark.parametrize("return_dict", [True, False])
def test_router_logits_are_whole_too(ranks, return_dict):
    """Of shape (B * S, experts), unlike all others."""
    assert ranks(2).run(routers, return_dict) == [([True, True], True)] * 2
