"""Attention that calls no interface, in real models: exact, and every rank computes its heads' share of it."""

import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hf_ulysses

from ..collectives import Collectives
from ..models import batch_of, checkpoint, padded
from ..tiny_models import tiny_config, tiny_model
from .steps import assert_same, sharded, whole

TOLERANCE = 2e-5
FALCON = {
    "alibi": dict(alibi=True),
    "multi query": dict(multi_query=True, new_decoder_architecture=False),
    "many keys": dict(multi_query=False, new_decoder_architecture=False, num_kv_heads="heads"),
    "new": dict(new_decoder_architecture=True, num_kv_heads=2),
}
# The name of the attention module, and what of it the configuration is to change.
MODELS = {
    "bloom": ("self_attention", {}),
    "mpt": ("attn", {}),
    "gpt_neo": ("attention", {}),
    "gpt_neox_japanese": ("attention", {}),
    "openai-gpt": ("attn", {}),
    "xglm": ("self_attn", {}),
    "megatron-bert": ("self", {}),
    "rembert": ("self", {}),
    "doge": ("self_attn", {}),
    "minimax": ("self_attn", {}),
    "deepseek_v32": ("self_attn", {}),
    **{f"falcon, {name}": ("self_attention", changes) for name, changes in FALCON.items()},
}


def build(kind, heads=4, kv_heads=2):
    configuration = tiny_config(kind.partition(",")[0], heads, kv_heads)
    for name, value in MODELS[kind][1].items():
        setattr(configuration, name, heads if value == "heads" else value)
    configuration._experts_implementation = "eager"
    return tiny_model(configuration)


def rows(length=46):
    batch = batch_of(2, length)
    batch["input_ids"] %= 96
    batch["labels"] = batch["input_ids"].clone()
    return batch


def same(step, reference):
    for gradients in (step.gradients, reference.gradients):
        for name in [name for name in gradients if name.endswith(("k_proj.bias", "key.bias"))]:
            del gradients[name]  # Zero in theory: softmax does not see what all keys have in common.
    assert_same(step, reference, tolerance=TOLERANCE)


class Heads(TorchDispatchMode):
    """The heads, over all batch rows, of every softmax over positions and of every fused attention."""

    def __init__(self, length):
        super().__init__()
        self.length, self.counts = length, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax") and args[0].shape[-2:] == (self.length, self.length):
            self.counts.append(args[0].numel() / self.length**2)
        if name.startswith("_scaled_dot_product"):
            self.counts.append(args[0].numel() / args[0].shape[-1] / self.length)
        return function(*args, **(kwargs or {}))


def one_process(kind, batch, heads=(4, 2), reentrant=None):
    model = build(kind, *heads)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)
    with Heads(batch["input_ids"].shape[1]) as seen, FlopCounterMode(display=False) as flops:
        step = whole(model, batch)
    return step, seen.counts, flops.get_total_flops()


def in_shards(kind, batch, heads=(4, 2), reentrant=None):
    model = build(kind, *heads)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)
    with hf_ulysses.attach(model) as sp:
        sp.shard(batch)
        with Heads(batch["input_ids"].shape[1]) as seen, FlopCounterMode(display=False) as flops:
            step = sharded(model, batch, sp)
        kinds = [{name.rpartition(".")[2] for name in names} for names in (sp.split, sp.gathered)]
    return step, seen.counts, flops.get_total_flops(), *kinds


@pytest.mark.parametrize("size, heads", [(2, (4, 2)), (4, (8, 4))])
@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_attends_with_its_heads(ranks, kind, size, heads):
    reference, seen, flops = ranks(1).run(one_process, kind, rows(48), heads)[0]
    for step, mine, my_flops, split, gathered in ranks(size).run(in_shards, kind, rows(48), heads):
        same(step, reference)
        assert MODELS[kind][0] in split
        assert not gathered or gathered == {"transformer around its layers"}  # Where the positions' biases are made.
        assert seen and mine == [count / size for count in seen]
        assert my_flops <= 1.15 * flops / size


@pytest.mark.parametrize("kind", ["bloom", "falcon, many keys", "deepseek_v32", "minimax"])
@pytest.mark.parametrize("case", ["uneven", "padded left"])
def test_rows_that_do_not_divide(ranks, kind, case):
    batch = rows(45) if case == "uneven" else padded(rows(45), real=(45, 31), side="left")
    reference = ranks(1).run(one_process, kind, batch, (6, 3))[0][0]
    for step, _, _, split, _ in ranks(4).run(in_shards, kind, batch, (6, 3)):
        same(step, reference)
        assert MODELS[kind][0] in split


@pytest.mark.parametrize("length", [63, 64])
@pytest.mark.parametrize("kind", ["bloom", "gpt_neo", "minimax", "deepseek_v32"])
def test_rows_as_long_as_the_hidden_size(ranks, kind, length):
    """64, with the padding or without."""
    reference = ranks(1).run(one_process, kind, rows(length))[0][0]
    for step, _, _, split, _ in ranks(2).run(in_shards, kind, rows(length)):
        same(step, reference)
        assert MODELS[kind][0] in split


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["gpt_neo", "deepseek_v32", "falcon, new"])
def test_gradient_checkpointing(ranks, kind, reentrant):
    reference = ranks(1).run(one_process, kind, rows(45), (4, 2), reentrant)[0][0]
    for step, *_, gathered in ranks(2).run(in_shards, kind, rows(45), (4, 2), reentrant):
        same(step, reference)
        assert not gathered


def collectives():
    """Of one layer, forward and backward."""
    model = build("gpt_neo")
    with hf_ulysses.attach(model) as sp:
        part, counts = sp.shard(rows(45)), []
        layer = model.transformer.h[1].attn.attention

        def count(module, args, kwargs):
            if not counts:
                counts.append(None)
                args = [a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
                with torch.enable_grad(), Collectives() as forward:
                    output = module(*args, **kwargs)[0]
                with Collectives() as backward:
                    output.sum().backward()
                counts[:] = [forward.counts, backward.counts]

        layer.register_forward_pre_hook(count, with_kwargs=True, prepend=True)
        model(**part)
    return counts


def test_collectives_of_a_layer(ranks):
    """Query and key, then the value, then the output."""
    for forward, backward in ranks(2).run(collectives):
        assert forward == backward == {"alltoall_base_": 3}


def dropped_out():
    """What of its attention weights a rank drops in training."""
    model, drawn = build("gpt_neo").train(), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(rows(46))
        dropout = model.transformer.h[0].attn.attention.attn_dropout
        dropout.register_forward_hook(lambda module, args, output: drawn.append(output.local == 0))
        with sp.own_randomness():
            model(**part)
    return drawn[0]


def test_ranks_drop_out_by_themselves(ranks):
    first, second = ranks(2).run(dropped_out)
    kept = torch.ones(first.shape[-2:]).tril().bool()  # What lies behind is masked.
    assert 0.4 < (first == second)[..., kept].float().mean() < 0.6


# -- as training stacks wrap them -------------------------------------------------------------------------------------


def wrapped(kind, batch, how, attached):
    model = build(kind)
    if how == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "query_key_value"]))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model = model.to(torch.bfloat16) if how == "bfloat16" else model
    if not attached:
        return whole(model, batch)
    torch._dynamo.reset()
    with hf_ulysses.attach(model) as sp:
        # Without graphs' code, which would only take time.
        step = sharded(torch.compile(model, backend="eager") if how == "compiled" else model, batch, sp)
        assert {name.rpartition(".")[2] for name in sp.split} == {MODELS[kind][0]}
        assert all(name.endswith("around its layers") for name in sp.gathered)
    step.gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in step.gradients.items()}
    return step


@pytest.mark.parametrize("how", ["lora", "compiled", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt_neo", "bloom", "falcon, new"])
def test_wrapped(ranks, kind, how):
    reference = ranks(1).run(wrapped, kind, rows(45), how, False)[0]
    for step in ranks(2).run(wrapped, kind, rows(45), how, True):
        # Eight bits of mantissa: 0.4 % for each rounding, of which a layer makes a dozen.
        assert_same(step, reference, tolerance=0.1 if how == "bfloat16" else TOLERANCE)


def copied(batch):
    model = build("deepseek_v32")
    with hf_ulysses.attach(model) as sp:
        sp.shard(batch)
        return whole(copy.deepcopy(model), batch)


def test_a_copy_is_not_attached(ranks):
    reference = ranks(1).run(one_process, "deepseek_v32", rows(45))[0][0]
    for step in ranks(2).run(copied, rows(45)):
        same(step, reference)


def attentions(batch, attached):
    model = build("gpt_neo")
    if not attached:
        return model(**batch, output_attentions=True).attentions[-1].detach()
    with hf_ulysses.attach(model) as sp:
        return model(**sp.shard(batch), output_attentions=True).attentions[-1].detach()


def test_attention_weights_that_are_asked_for(ranks):
    reference = ranks(1).run(attentions, rows(45), False)[0]
    for found in ranks(2).run(attentions, rows(45), True):
        assert torch.allclose(found, reference, atol=1e-6)


def inferred(batch, attached):
    model = build("minimax").eval()
    with hf_ulysses.attach(model) if attached else contextlib.nullcontext() as sp, torch.inference_mode():
        if not attached:
            return model(**batch, use_cache=False).logits.clone()
        part = sp.shard(batch)
        return sp.gather(model(**part).logits, like=part).clone()


def test_inference_mode(ranks):
    reference = ranks(1).run(inferred, rows(45), False)[0]
    for found in ranks(2).run(inferred, rows(45), True):
        assert torch.allclose(found, reference, atol=1e-5)


def look_at_attention_weights(model):
    """A layer that adds something of its attention's weights to what it passes on."""
    for block in model.transformer.h:
        block.__class__ = type("Looking", (type(block),), {"forward": _looking})


def _looking(self, hidden_states, *args, **kwargs):
    output, weights = super(type(self), self).forward(hidden_states, *args, **kwargs)
    return output + weights.mean((1, 3))[..., None] * 64 * output, weights


def looked_at(batch, attached, reentrant):
    model = build("gpt_neo")
    look_at_attention_weights(model)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)
    if not attached:
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        assert "transformer.h.0" in (sp.split if reentrant is None else sp.gathered)
    return step


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_attention_weights_that_the_layer_uses(ranks, reentrant):
    """A tensor held in part would not come through a checkpoint inside of the layer, nor bring its gradient out of it."""
    reference = ranks(1).run(looked_at, rows(45), False, reentrant)[0]
    for step in ranks(2).run(looked_at, rows(45), True, reentrant):
        same(step, reference)


class Gate(torch.nn.Linear):
    """Gives back what it gets, in training; and who called it goes on writing there."""

    def forward(self, x):
        return x if self.training else super().forward(x)


class Gated(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.gate = inner, Gate(64, 64)

    def forward(self, hidden_states):
        hidden_states = hidden_states.cumsum(1)
        gated = self.gate(hidden_states)
        hidden_states[:, 2] = 5
        return self.inner(gated)


def written_behind_a_gate():
    model = build("gpt_neo")
    model.transformer.h[1].mlp = Gated(model.transformer.h[1].mlp)
    with hf_ulysses.attach(model.train()) as sp:
        part = sp.shard(rows(45))
        assert "transformer.h.1.mlp" in sp.split
        with pytest.raises(TypeError, match="something may or may not be a view"):
            model(**part)


def test_a_child_that_gives_back_what_it_gets(ranks):
    ranks(2).run(written_behind_a_gate)


class Shifted(torch.nn.Linear):
    """A projection that adds what the position before has, by a weight that is zero in the beginning."""

    def __init__(self, inner):
        super().__init__(inner.in_features, inner.out_features, inner.bias is not None)
        self.weight, self.bias = inner.weight, inner.bias
        self.before = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) + self.before * super().forward(torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def opened_after_the_trial(batch, attached):
    model = build("gpt_neo")
    shifted = [Shifted(block.attn.attention.v_proj) for block in model.transformer.h]
    for block, projection in zip(model.transformer.h, shifted):
        block.attn.attention.v_proj = projection
    with hf_ulysses.attach(model) if attached else contextlib.nullcontext() as sp:
        if attached:
            sp.shard(batch)
        with torch.no_grad():
            for projection in shifted:
                projection.before.fill_(0.5)
        return sharded(model, batch, sp) if attached else whole(model, batch)


def test_a_child_that_will_mix(ranks):
    """Its numbers do not show in the trial."""
    reference = ranks(1).run(opened_after_the_trial, rows(45), False)[0]
    for step in ranks(2).run(opened_after_the_trial, rows(45), True):
        same(step, reference)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class InTraining(torch.nn.Module):
    """Mixes, and hands over to an autograd function, in training only: the trial does not see that."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states):
        hidden_states = hidden_states + hidden_states.cumsum(1)
        return self.inner(Doubling.apply(hidden_states) if self.training else hidden_states * 2)


def refused_in_training():
    model = build("gpt_neo")
    model.transformer.h[1].mlp = InTraining(model.transformer.h[1].mlp)
    with hf_ulysses.attach(model.train()) as sp:
        part = sp.shard(rows(45))
        assert "transformer.h.1.mlp" in sp.split
        with pytest.raises(TypeError, match="an autograd function was given a tensor that is held in part"):
            model(**part)


def test_an_autograd_function_in_training_only_is_refused(ranks):
    ranks(2).run(refused_in_training)
