"""The custom training loop of Accelerate's documentation runs unchanged under sequence parallelism.

Its loss is the sp group's token mean, by a differentiable all_gather weighted with the number of good tokens; over
data-parallel ranks it is a mean of means, by its own definition. Reference: the same loop at sp=1 on the same dp ranks.
"""

import pytest
import torch

from .test_trajectories import assert_engine
from .trajectory import _parallelism, deepspeed_config, parameters, rows, shard_on_cpu, tiny_llama

RELATIVE = 2e-5


def make_accelerator(engine, sp, dp):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    # DeepSpeed on CPU ranks: the state knows of the CPU before the engine is chosen, by the plugin alone.
    PartialState(cpu=True)
    plugin = None
    if engine.startswith("zero"):
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(int(engine[4])))
    fsdp = None
    if engine == "fsdp2":
        from accelerate.utils import FullyShardedDataParallelPlugin

        shard_on_cpu()
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    return Accelerator(deepspeed_plugin=plugin, fsdp_plugin=fsdp, parallelism_config=_parallelism(engine, sp, dp))


def collate(features):
    return {name: torch.stack([f[name] for f in features]) for name in ("input_ids", "labels")}


def documented_loop(
    engine="plain", sp=1, dp=1, group_from="deepspeed", loader="together", skip=0, move=False, aware=True
):
    import hf_ulysses

    if sp > 1:
        hf_ulysses.enable()
    accelerator = make_accelerator(engine, sp, dp)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataloader = torch.utils.data.DataLoader(rows(4 * dp), batch_size=1, collate_fn=collate)
    if loader == "together":
        model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    else:
        if accelerator.distributed_type == "DEEPSPEED":
            accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        dataloader = accelerator.prepare(dataloader)
        model, optimizer = accelerator.prepare(model, optimizer)
        if loader == "adapter":
            dataloader = accelerator.deepspeed_ulysses_dl_adapter(dataloader, model)
    if skip:
        dataloader = accelerator.skip_first_batches(dataloader, skip)

    sp_size = accelerator.parallelism_config.sp_size if accelerator.parallelism_config and aware else 1
    if sp_size > 1:
        if group_from == "deepspeed":
            from deepspeed.utils import groups

            sp_group = groups._get_sequence_parallel_group()
        else:
            sp_group = accelerator.torch_device_mesh["sp"].get_group()
        sp_world_size = sp_size
        assert torch.distributed.get_world_size(sp_group) == sp

    unwrapped_model = accelerator.unwrap_model(model)
    losses, lengths = [], []
    for batch in dataloader:
        if move:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        optimizer.zero_grad()
        outputs = model(**batch)
        lengths.append(batch["input_ids"].shape[1])
        if sp_size > 1:
            shift_labels = batch["shift_labels"]
            loss = unwrapped_model.loss_function(
                logits=outputs.logits,
                labels=None,
                shift_labels=shift_labels,
                vocab_size=unwrapped_model.config.vocab_size,
            )
            losses_per_rank = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
            good_tokens = (shift_labels != -100).view(-1).sum()
            good_tokens_per_rank = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
            total_loss = sum(
                losses_per_rank[rank] * good_tokens_per_rank[rank]
                for rank in range(sp_world_size)
                if good_tokens_per_rank[rank] > 0
            )
            total_good_tokens = sum(good_tokens_per_rank)
            loss = total_loss / max(total_good_tokens, 1)
        else:
            loss = outputs.loss
        accelerator.backward(loss)
        # DeepSpeed clips at 1.0 by itself (Accelerate's default for "auto").
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    class Trained:
        pass

    Trained.model = unwrapped_model
    return {"loss": losses, "lengths": lengths, "parameters": parameters(Trained), "backend": str(accelerator.distributed_type)}


CASES = [
    ("zero0", 1, dict(group_from="mesh")),
    ("zero1", 1, dict(loader="adapter")),
    ("zero2", 1, dict()),
    ("zero3", 1, dict(group_from="mesh", move=True)),
    ("ddp", 1, dict(group_from="mesh")),
    ("fsdp2", 1, dict(group_from="mesh")),
    ("zero2", 2, dict(move=True)),
    ("zero3", 2, dict(loader="adapter")),
]


@pytest.mark.versions
@pytest.mark.parametrize("engine,dp,how", CASES)
def test_documented_loop(ranks, engine, dp, how):
    expected = ranks(dp).run(documented_loop, engine="plain" if dp == 1 else "zero2", dp=dp)
    results = ranks(2 * dp).run(documented_loop, engine=engine, sp=2, dp=dp, **how)
    for rank, result in enumerate(results):
        assert result["loss"] == pytest.approx(expected[rank // 2]["loss"], rel=RELATIVE)
        assert (result["parameters"] - expected[0]["parameters"]).abs().max() < 1e-5
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert set(result["lengths"]) == {33}
        assert_engine({"engine": result["backend"]}, engine)


def test_skipped_batches_are_sharded_too(ranks):
    results = ranks(2).run(documented_loop, engine="zero2", sp=2, skip=2)
    assert [len(result["loss"]) for result in results] == [2, 2]
    assert set(results[0]["lengths"]) == {33}


@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2", "ddp"])
@pytest.mark.parametrize("loader", ["together", "apart"])
def test_a_loop_that_knows_nothing_of_it(ranks, engine, loader):
    """Case 30: `accelerator.backward(model(**batch).loss)`, on shards or on whole rows."""
    expected = ranks(1).run(documented_loop)[0]
    for result in ranks(2).run(documented_loop, engine=engine, sp=2, loader=loader, aware=False):
        assert result["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert (result["parameters"] - expected["parameters"]).abs().max() < 1e-5
        assert set(result["lengths"]) == {33 if loader == "together" else 66}


def evaluated(engine="plain", sp=1, dp=1, loader="together"):
    """Case 30: the losses of three rows, gathered for a metric as a loop that knows nothing of it does."""
    import hf_ulysses

    if sp > 1:
        hf_ulysses.enable()
    accelerator = make_accelerator(engine, sp, dp)
    data = torch.utils.data.DataLoader(rows(3), batch_size=1, collate_fn=collate)
    if loader == "together":
        model, data = accelerator.prepare(tiny_llama(), data)
    else:
        data, model = accelerator.prepare(data), accelerator.prepare(tiny_llama())
    model.eval()
    found, both = [], []
    for batch in data:
        with torch.no_grad():
            loss = model(**batch).loss
        found += accelerator.gather_for_metrics(loss.repeat(1)).tolist()
        gathered = accelerator.gather_for_metrics({"a": loss.repeat(1), "b": (loss.repeat(1, 2),)})
        both += [*gathered["a"].tolist(), *gathered["b"][0][:, 1].tolist()]
    return found, sorted(both)


@pytest.mark.parametrize("loader", ["together", "apart"])
@pytest.mark.parametrize("dp", [1, 2])
def test_what_is_gathered_for_metrics_is_counted_once(ranks, dp, loader):
    expected, both = ranks(1).run(evaluated)[0]
    assert len(expected) == 3 and both == sorted(2 * expected)
    for found, nested in ranks(2 * dp).run(evaluated, engine="ddp", sp=2, dp=dp, loader=loader):
        assert found == pytest.approx(expected, rel=RELATIVE) and nested == pytest.approx(both, rel=RELATIVE)


def compiled_by_regions():
    from accelerate import Accelerator, PartialState
    from accelerate.utils import TorchDynamoPlugin

    import hf_ulysses

    hf_ulysses.enable()
    PartialState(cpu=True)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(dynamo_plugin=plugin, parallelism_config=_parallelism("ddp", 2, 1))
    with pytest.raises(ValueError, match="use_regional_compilation"):
        accelerator.prepare(tiny_llama())


def test_regional_compilation_is_refused(ranks):
    ranks(2).run(compiled_by_regions)


def gather_shards():
    import hf_ulysses

    hf_ulysses.enable()
    accelerator = make_accelerator("ddp", 2, 1)
    model, data = accelerator.prepare(tiny_llama(), torch.utils.data.DataLoader(rows(1), collate_fn=collate))
    batch = next(iter(data))
    with pytest.raises(ValueError, match="differs within a sequence-parallel group: shards of a row"):
        accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), batch["labels"]))


def test_shards_are_not_gathered_as_if_they_were_rows(ranks):
    ranks(2).run(gather_shards)


def reduced():
    import hf_ulysses
    from hf_ulysses.adapters.replicas import Replicas

    hf_ulysses.enable()
    accelerator = Replicas(make_accelerator("ddp", 2, 2))
    replica = accelerator.process_index
    return [accelerator.reduce({"a": torch.tensor(5.0 + replica)}, how)["a"].item() for how in ("sum", "mean")] + [
        accelerator.reduce(torch.tensor([3, replica])).tolist()
    ]


def test_what_replicas_reduce_is_counted_once(ranks):
    """Two of them, of 5 and 6: as their trainer would see without sequence parallelism."""
    assert ranks(4).run(reduced) == [[11.0, 5.5, [6, 1]]] * 4


def scheduled(sp, dp):
    """The steps that DeepSpeed's own scheduler is told of: for each data-parallel rank its share."""
    from accelerate.utils import DummyOptim, DummyScheduler

    import hf_ulysses

    if sp > 1:
        hf_ulysses.enable()
    accelerator = make_accelerator("zero2", sp, dp)
    params = dict(warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps="auto")
    config = accelerator.deepspeed_plugin.deepspeed_config
    config.update(train_micro_batch_size_per_gpu=1, zero_allow_untested_optimizer=True)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    # The plugin knows what is "auto" by a copy of its own.
    accelerator.deepspeed_plugin.hf_ds_config.config.update(config)
    model = tiny_llama()
    optimizer = DummyOptim(model.parameters(), lr=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=2)
    accelerator.prepare(model, optimizer, scheduler)
    return accelerator.deepspeed_config["scheduler"]["params"]["total_num_steps"], scheduler.total_num_steps


def test_deepspeeds_own_scheduler_counts_data_parallel_ranks(ranks):
    assert ranks(4).run(scheduled, 2, 2) == [(50, 100)] * 4 and ranks(2).run(scheduled, 1, 2) == [(50, 100)] * 2
