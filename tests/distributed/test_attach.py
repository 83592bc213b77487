"""The life of an attachment: who is attached, what attaching touches, what detaching leaves, what is refused."""

import copy
import gc
import inspect
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForLanguageModeling, DynamicCache, PreTrainedTokenizerFast

import hf_ulysses
from hf_ulysses.core.attachment import attachment_of
from hf_ulysses.core.sequence import current_row
from hf_ulysses.core.cut import shard_batch

from ..collectives import Collectives
from ..models import batch_of, build, checkpoint
from .steps import Step, assert_same, gradients, sharded, whole

BATCH, OTHER = batch_of(2, 33), batch_of(2, 33, seed=2)
MORE_HEADS = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=8)


def names_of(model):
    """Every name of the modelling files of a model, and the hooks on its modules."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    names = {(file.__name__, name): value for file in files for name, value in vars(file).items()}
    hooks = {name: (*m._forward_pre_hooks.values(), *m._forward_hooks.values()) for name, m in model.named_modules()}
    return names, hooks


def unchanged(before, after):
    (names, hooks), (names_after, hooks_after) = before, after
    return (
        names.keys() == names_after.keys() and all(names[k] is names_after[k] for k in names) and hooks == hooks_after
    )


# -- attach, train, detach, train (case 20) ---------------------------------------------------------------------------


def detach_and_go_on():
    model = build()
    before = names_of(model)
    sp = hf_ulysses.attach(model)
    assert attachment_of(model) is sp and not unchanged(before, names_of(model))
    first = sharded(model, BATCH, sp)
    sp.detach()
    sp.detach()
    assert attachment_of(model) is None and unchanged(before, names_of(model))
    plain = whole(model, BATCH)
    assert sp.exchanges == 2, "only the sharded step exchanged"
    with hf_ulysses.attach(model) as again:
        second = sharded(model, BATCH, again)
    assert unchanged(before, names_of(model))
    return first, plain, second


def test_attach_train_detach_train(ranks):
    reference = ranks(1).run(plain_steps, [{}], [BATCH])[0]
    for steps in ranks(2).run(detach_and_go_on):
        for step in steps:
            assert_same(step, reference[0])


def detach_after_an_error():
    model = build()
    before = names_of(model)
    with pytest.raises(RuntimeError, match="an error of the user's"), hf_ulysses.attach(model) as sp:
        broken = sp.shard(BATCH)
        broken["input_ids"] = broken["input_ids"] + 1000
        with pytest.raises(IndexError):
            model(**broken)
        assert current_row() is None, "a forward that raised leaves no row behind"
        raise RuntimeError("an error of the user's")
    assert unchanged(before, names_of(model))


def test_errors_leave_nothing_behind(ranks):
    ranks(2).run(detach_after_an_error)


def forget_a_model():
    model, other = build(), build()
    before = names_of(other)
    hf_ulysses.attach(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None, unchanged(before, names_of(other))


def test_a_model_that_is_dropped_restores_the_names(ranks):
    assert ranks(2).run(forget_a_model) == [(True, True)] * 2


# -- several models (case 20) -----------------------------------------------------------------------------------------


def plain_steps(kinds, batches):
    models = [build(**kind) for kind in kinds]
    return [whole(model, batch) for batch in batches for model in models]


def alternate(kinds, batches):
    models = [build(**kind) for kind in kinds]
    attached = [hf_ulysses.attach(model) for model in models]
    before = names_of(models[0])
    steps = [sharded(model, batch, sp) for batch in batches for model, sp in zip(models, attached)]
    attached[0].detach()
    assert before[0] == names_of(models[0])[0], "the other model still needs the names"
    steps += [sharded(models[1], batches[0], attached[1])]
    attached[1].detach()
    return steps


def test_two_attached_models_with_other_heads(ranks):
    kinds, batches = [{}, MORE_HEADS], [BATCH, OTHER]
    reference = ranks(1).run(plain_steps, kinds, batches)[0]
    for steps in ranks(4).run(alternate, kinds, batches):
        for ours, theirs in zip(steps, [*reference, reference[1]], strict=True):
            assert_same(ours, theirs, exchanges=2)


def beside_others():
    """An attached model between a copy of it and one of the same class: they take full rows as before."""
    model = build()
    early = copy.deepcopy(model)
    sp = hf_ulysses.attach(model)
    late = copy.deepcopy(model)
    assert attachment_of(late) is None and all(attachment_of(module) is None for module in late.modules())
    steps = [
        whole(early, BATCH),
        whole(late, BATCH),
        sharded(model, BATCH, sp),
        whole(late, BATCH),
        whole(build(), BATCH),
    ]
    assert sp.exchanges == 2
    late.to(torch.float32).to(torch.float64)
    sp.detach()
    return steps


def test_copies_are_not_attached(ranks):
    reference = ranks(1).run(plain_steps, [{}], [BATCH])[0][0]
    for steps in ranks(2).run(beside_others):
        for step in steps:
            assert_same(step, reference)


def shard_to_a_copy(early):
    model = build()
    copied = copy.deepcopy(model) if early else None
    with hf_ulysses.attach(model) as sp:
        copied = copied or copy.deepcopy(model)
        with pytest.raises(ValueError, match="not attached"):
            copied(**sp.shard(BATCH))


@pytest.mark.parametrize("early", [False, True], ids=["copied after attaching", "copied before"])
def test_a_shard_for_a_model_that_is_not_attached(ranks, early):
    """It would attend within the shard, and train on that without a word."""
    ranks(2).run(shard_to_a_copy, early)


def generate(attached):
    model = build().eval()
    tokens = BATCH["input_ids"][:, :7]
    options = dict(max_new_tokens=5, do_sample=False)
    if not attached:
        return model.generate(tokens, **options).tolist()
    with hf_ulysses.attach(model) as sp:
        model(**sp.shard(BATCH))
        with Collectives() as wire:
            out = model.generate(tokens, **options)
        assert not wire.names and sp.exchanges == 2
        model(**sp.shard(BATCH))
        assert sp.exchanges == 4
        return out.tolist()


def test_generate_is_plain_attention(ranks):
    """Case 17: in between sharded forwards, with a cache of its own."""
    expected = ranks(1).run(generate, False)
    assert ranks(2).run(generate, True) == expected * 2


# -- what a forward costs and needs -----------------------------------------------------------------------------------


def collectives_of_a_step(whole):
    model = build()
    with hf_ulysses.attach(model) as sp:
        model(**sp.shard(BATCH))
        with Collectives() as sharding:
            part = OTHER if whole else sp.shard(OTHER)
        with Collectives() as forward:
            output = model(**part)
        with Collectives() as backward:
            output.loss.backward()
        with Collectives() as reading:
            output.logits, output["logits"]
    return sharding.names, forward.names, backward.names, reading.names


def test_two_collectives_per_layer_and_pass_and_one_more(ranks):
    """The one more is of five numbers: the loss, its targets and what compares the rows. Who reads logits says so to the
    others first, over the hosts' network."""
    exchange = ["alltoall_base_"] * 2 * 2
    expected = [], [*exchange, "allreduce_"], exchange, ["allgather_", "allgather_", "_allgather_base_"]
    assert [tuple(map(list, got)) for got in ranks(2).run(collectives_of_a_step, True)] == [expected] * 2
    # A shard's loss may be weighted by who uses it, on each rank otherwise.
    expected = [], [*exchange, "allreduce_"], ["allreduce_", *exchange], []
    assert [tuple(map(list, got)) for got in ranks(2).run(collectives_of_a_step, False)] == [expected] * 2


def evaluate():
    model = build().eval()
    with hf_ulysses.attach(model) as sp, torch.no_grad():
        part = sp.shard(BATCH)
        assert part["input_ids"].shape == (2, 17)
        output = model(**part)
        loss = sp.reduce_loss(output.loss, part["shift_labels"])
        return Step(loss.item(), sp.gather(output.logits, like=part), {})


def test_evaluation_goes_the_same_way(ranks):
    reference = ranks(1).run(plain_steps, [{}], [BATCH])[0][0]
    reference.gradients = {}
    for step in ranks(2).run(evaluate):
        assert_same(step, reference)


def move_every_value():
    model = build()
    with hf_ulysses.attach(model) as sp:
        part = {key: value.to("cpu") if hasattr(value, "to") else value for key, value in sp.shard(BATCH).items()}
        model(**part)
        return sp.exchanges


def test_a_loop_that_moves_every_value(ranks):
    assert ranks(2).run(move_every_value) == [2, 2]


def stock_collator(attached):
    """Case 9: padded rows with attention_mask, no position_ids, a BatchEncoding."""
    vocabulary = WordLevel({f"<{i}>": i for i in range(128)}, unk_token="<1>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), pad_token="<0>")
    rows = [{"input_ids": list(range(3, 3 + n))} for n in (20, 60, 33)]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert "position_ids" not in batch and batch["attention_mask"].sum() == 113
    model = build()
    if not attached:
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        return sharded(model, batch, sp)


def test_a_stock_collator(ranks):
    reference = ranks(1).run(stock_collator, False)[0]
    assert_same(ranks(4).run(stock_collator, True), reference, exchanges=2)


# -- never silent -----------------------------------------------------------------------------------------------------


def different_rows(late):
    """Ranks that read different rows, as data-parallel replicas do."""
    model = build()
    batch = batch_of(1, 32, seed=dist.get_rank())
    with hf_ulysses.attach(model) as sp:
        if late:
            part = shard_batch(batch, sp.rank, sp.size)  # By hand: the forward looks at it.
            with pytest.raises(ValueError) as error:
                model(**part)
            assert current_row() is None
        else:
            with pytest.raises(ValueError) as error:
                sp.shard(batch)
    return str(error.value)


@pytest.mark.parametrize("late", [False, True])
def test_different_rows_on_the_ranks_of_a_group(ranks, late):
    """Case 24: an error on every rank, with what each of them read."""
    messages = ranks(4).run(different_rows, late)
    assert len(set(messages)) == 1
    assert "read different rows" in messages[0] and messages[0].count("(1, 32, ") == 4


def rows_part_later(whole):
    """From the second batch on, this rank's rows are not its peer's: said by the forward after that."""
    model = build()
    with hf_ulysses.attach(model) as sp:
        into = (lambda batch: batch) if whole else sp.shard
        model(**into(batch_of(1, 32)))
        model(**into(batch_of(1, 32, seed=dist.get_rank())))
        with pytest.raises(ValueError, match="different rows in the last batch"):
            model(**into(batch_of(1, 32)))
        labels = batch_of(1, 32)
        labels["labels"] = labels["labels"].roll(dist.get_rank())
        model(**into(labels))
        with pytest.raises(ValueError, match="different rows in the last batch"):
            model(**into(batch_of(1, 32)))


@pytest.mark.parametrize("whole", [True, False], ids=["whole rows", "shards"])
def test_rows_are_compared_with_every_batch(ranks, whole):
    """Case 39."""
    ranks(2).run(rows_part_later, whole)


def unsharded():
    model = build()
    with hf_ulysses.attach(model) as sp:
        model.eval()(**BATCH)
        with torch.no_grad():
            model.train()(**BATCH)
        model(**BATCH)
        model(**sp.shard(BATCH))
        return sp.exchanges


def test_whole_rows_are_cut_like_sharded_ones(ranks):
    assert ranks(2).run(unsharded) == [8, 8]


def refusals():
    model = build()
    with hf_ulysses.attach(model, seq_length=32) as sp:
        with pytest.raises(ValueError, match="LlamaForCausalLM is attached already"):
            hf_ulysses.attach(model)
        with pytest.raises(ValueError, match="sp_seq_length=32.*33 tokens"):
            sp.shard(BATCH)
        with pytest.raises(ValueError, match="sp_seq_length=32.*33 tokens"):
            model(**BATCH)
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(BATCH)
        with pytest.raises(ValueError, match="output_attentions=True is not supported"):
            model(**{**part, "output_attentions": True})
        # transformers 5.24 renamed it.
        cache = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        with pytest.raises(ValueError, match="use_cache=False"):
            model(**part, **{cache: DynamicCache(config=model.config)})
        assert model(**{**part, "use_cache": True}).past_key_values is None
        with pytest.raises(ValueError, match="output_attentions=True is not supported"):
            model(**BATCH, output_attentions=True)
    with pytest.raises(ValueError, match=r"sp_size=4 exceeds num_attention_heads=2.*\[1, 2\]"):
        hf_ulysses.attach(build(num_attention_heads=2, num_key_value_heads=2))


def test_what_is_refused_says_why(ranks):
    ranks(4).run(refusals)


def without_a_world():
    with pytest.raises(ValueError, match="init_process_group"):
        hf_ulysses.attach(build())


def test_no_world(ranks):
    ranks(1).run(without_a_world)


def one_rank():
    """A group of one: the same code, nothing to exchange with."""
    model = build()
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with hf_ulysses.attach(model, mine) as sp:
        part = sp.shard(BATCH)
        output = model(**part)
        loss = sp.reduce_loss(output.loss, part["shift_labels"])
        loss.backward()
        return Step(loss.item(), sp.gather(output.logits.detach(), like=part), gradients(model))


def test_a_group_of_one(ranks):
    reference = ranks(1).run(plain_steps, [{}], [BATCH])[0][0]
    assert_same(ranks(2).run(one_rank), reference)


def dropped_out(checkpointing):
    """What two ranks drop of the same positions' states, and what they draw afterwards."""
    model = build(attention_dropout=0.5)
    seen = []

    def drop(module, args, output):
        if module.training:  # Not in the trial.
            seen.append(torch.nn.functional.dropout(torch.ones_like(output), 0.5) == 0)
            return output.masked_fill(seen[-1], 0)

    model.model.layers[0].mlp.register_forward_hook(drop)
    if checkpointing:
        checkpoint(model)
    batch = batch_of(1, 32)
    batch["input_ids"][:, 16:] = batch["input_ids"][:, :16]
    torch.manual_seed(7)
    with hf_ulysses.attach(model):
        model.train()
        model(**batch).loss.backward()
    assert len(seen) == 1 + checkpointing and torch.equal(seen[0], seen[-1]), "what is run again drops the same"
    return seen[0], torch.rand(1).item()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_each_ranks_own_and_all_else_the_groups(ranks, checkpointing):
    (mine, next_of_mine), (theirs, next_of_theirs) = ranks(2).run(dropped_out, checkpointing)
    assert not torch.equal(mine, theirs) and 0.3 < (mine == theirs).float().mean() < 0.7
    assert next_of_mine == next_of_theirs


def skips_layers():
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = dict(hidden_size=32, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32, vocab_size=128)
    model = OPTForCausalLM(OPTConfig(num_hidden_layers=8, layerdrop=0.5, **config)).train()
    with hf_ulysses.attach(model) as sp:
        counts = []
        for _ in range(4):
            before = sp.exchanges
            model(**batch_of(1, 33)).loss.backward()
            counts.append(sp.exchanges - before)
        return counts


def test_peers_skip_the_same_layers(ranks):
    """Case 38: LayerDrop decides which way the code goes; peers that decide differently would wait for each other."""
    first, second = ranks(2).run(skips_layers)
    assert first == second and len(set(first)) > 1


def copied_around_its_layers():
    """What regional compilation does to a model: a shallow copy of the outer modules around the original layers."""
    model = build()
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(batch_of(1, 33))
        outer = copy.copy(model)
        outer.__dict__ = {**model.__dict__, "_modules": dict(model._modules)}
        with pytest.raises(ValueError, match="is a copy of an attached model"):
            outer(**part)


def test_a_copy_around_attached_layers_is_refused(ranks):
    ranks(2).run(copied_around_its_layers)



def checkpointed_by_torch():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = build()
    batch = batch_of(1, 33)
    sp = hf_ulysses.attach(model)
    # After attaching, as engines do.
    apply_activation_checkpointing(model, check_fn=lambda module: "DecoderLayer" in type(module).__name__)
    functions = {module: vars(module)["checkpoint_fn"] for module in model.modules() if "checkpoint_fn" in vars(module)}
    assert functions
    part = sp.shard(batch)
    sp.reduce_loss(model(**part).loss, part["shift_labels"]).backward()
    assert all(vars(module)["checkpoint_fn"] is not function for module, function in functions.items())
    sp.detach()
    assert all(vars(module)["checkpoint_fn"] is function for module, function in functions.items())


def test_detaching_gives_checkpoint_functions_back(ranks):
    ranks(2).run(checkpointed_by_torch)
