"""Steps, epochs and rows: the data is split over data-parallel ranks only, and peers read the same rows."""

import random

import pytest
import torch

from ..ranks import RankFailed
from .test_trajectories import assert_same
from .trajectory import rows, train


class Stream(torch.utils.data.IterableDataset):
    """Rows that can only be read in order, as from a file or the network."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize("engine", ["zero2", "ddp"])
def test_iterable_dataset(ranks, engine):
    expected = ranks(1).run(train, data=Stream(rows(16)), batch=2, steps=6, in_order=False)[0]
    results = ranks(4).run(train, engine=engine, sp=2, dp=2, data=Stream(rows(16)), steps=6, in_order=False)
    for result in results:
        # The Trainer's epoch of a stream is a share of max_steps; equal, too.
        assert_same([result], expected)


def streamed(shards, **settings):
    """Train on a streaming dataset of the `datasets` library."""
    from datasets import Dataset

    data = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows(16)])
    stream = data.to_iterable_dataset(num_shards=shards).shuffle(seed=3, buffer_size=4)
    return train(data=stream, data_collator=tensors, in_order=False, steps=6, **settings)


def tensors(features):
    return {name: torch.tensor([f[name] for f in features]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_streaming(ranks, engine, shards):
    """A stream with a shard for every data-parallel rank is read by shards, else row by row: as without dispatching."""
    alone = {"accelerator_config": {"dispatch_batches": False}}
    expected = ranks(2).run(streamed, shards, engine="ddp", dp=2, **alone)[0]
    assert_same(ranks(4).run(streamed, shards, engine=engine, sp=2, dp=2), expected)


class Dropping:
    """A collator that replaces random tokens, by the three generators that people use."""

    def __call__(self, features):
        import numpy

        batch = {name: torch.stack([f[name] for f in features]).clone() for name in ("input_ids", "labels")}
        length = batch["input_ids"].shape[1]
        for place in (random.randrange(length), numpy.random.randint(length), int(torch.randint(length, ()))):
            batch["input_ids"][:, place] = 0
        return batch


def verify_every_batch(**settings):
    import multiprocessing

    # The ranks of the pool are daemons, which may not start worker processes.
    multiprocessing.current_process()._config["daemon"] = False
    return train(data_collator=Dropping(), after=lambda trainer: trainer.model.training, **settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_collator(ranks, workers):
    """Peers draw alike, and what they draw is what one process draws."""
    settings = dict(steps=6, dataloader_num_workers=workers)
    expected = ranks(1).run(verify_every_batch, **settings)[0]
    assert_same(ranks(2).run(verify_every_batch, engine="ddp", sp=2, **settings), expected)


def different_rows(**settings):
    """Rows that depend on the rank, as an unseeded shuffle would make them."""
    import os

    return train(data=rows(8, seed=int(os.environ["RANK"])), **settings)


def test_peers_with_different_rows_are_an_error_on_all_ranks(ranks):
    from ..ranks import RankFailed

    with pytest.raises(RankFailed, match="read different rows") as error:
        ranks(2).run(different_rows, engine="ddp", sp=2, steps=2)
    assert str(error.value).count("read different rows") == 2


def epochs(**settings):
    """Which rows each epoch reads, in order, and how many steps there are."""
    seen, epoch = [], []

    class Logging:
        def __call__(self, features):
            epoch.extend(int(f["input_ids"][0]) * 1000 + int(f["input_ids"][1]) for f in features)
            return {name: torch.stack([f[name] for f in features]) for name in ("input_ids", "labels")}

    def watch(trainer):
        from transformers import TrainerCallback

        class Epochs(TrainerCallback):
            def on_epoch_end(self, *args, **kwargs):
                seen.append(list(epoch))
                epoch.clear()

        trainer.add_callback(Epochs())

    result = train(steps=-1, data_collator=Logging(), before=watch, in_order=False, **settings)
    return result["state"], seen


def test_steps_and_epochs(ranks):
    data = rows(128, length=8)
    ids = sorted(int(row["input_ids"][0]) * 1000 + int(row["input_ids"][1]) for row in data)
    state, _ = ranks(4).run(epochs, engine="ddp", dp=4, data=data, accumulation=2, num_train_epochs=1)[0]
    assert state == {"global_step": 16, "epoch": 1.0}
    results = ranks(4).run(epochs, engine="ddp", sp=2, dp=2, data=data, accumulation=2, num_train_epochs=3)
    for rank, (state, seen) in enumerate(results):
        assert state == {"global_step": 3 * 32, "epoch": 3.0}
        assert seen == results[rank - rank % 2][1], "peers read different rows"
        for epoch in range(3):
            assert sorted(results[0][1][epoch] + results[2][1][epoch]) == ids, "not every row once"
        assert seen[0] != seen[1] != seen[2], "the order is the same in every epoch"


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_that_do_not_divide(ranks, drop_last):
    settings = dict(data=rows(7), steps=-1, num_train_epochs=2, dataloader_drop_last=drop_last)
    expected = ranks(2).run(train, engine="ddp", dp=2, **settings)[0]
    assert_same(ranks(4).run(train, engine="ddp", sp=2, dp=2, **settings), expected)


def test_loss_matching_experiment(ranks):
    """The documentation's: DP=4, SP=1, accumulation 1 against DP=1, SP=4, accumulation 4, same rows, 20 steps."""
    data = rows(80)
    expected = ranks(4).run(train, engine="zero3", dp=4, data=data, steps=20)[0]
    results = ranks(4).run(train, engine="zero3", sp=4, accumulation=4, data=data, steps=20)
    assert results[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert results[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)


def balanced(**settings):
    """Rows of unequal lengths, put together by the Trainer's sampler so that all ranks have as much to do."""
    from datasets import Dataset

    data = [row for index, length in enumerate([9, 40, 12, 33, 20, 66, 7, 25] * 2) for row in rows(1, length, seed=index)]
    data = Dataset.from_list([{name: values.tolist() for name, values in row.items()} for row in data])
    more = dict(train_sampling_strategy="batch_rebalance", in_order=False, data_collator=padded, steps=3, batch=2, accumulation=2)
    return train(data=data, **more, **settings)


def padded(features):
    pad = dict(input_ids=0, labels=-100)
    return {
        name: torch.nn.utils.rnn.pad_sequence([torch.tensor(f[name]) for f in features], batch_first=True, padding_value=value)
        for name, value in pad.items()
    }


@pytest.mark.parametrize("engine, dp", [("zero3", 1), ("ddp", 2)])
def test_batches_balanced_over_ranks(ranks, engine, dp):
    from transformers import trainer_pt_utils

    if not hasattr(trainer_pt_utils, "BatchRebalanceSampler"):
        pytest.skip("of transformers 5.14 and later")
    expected = ranks(dp).run(balanced, engine="plain" if dp == 1 else "ddp", dp=dp)[0]
    assert_same(ranks(2 * dp).run(balanced, engine=engine, sp=2, dp=dp), expected)


def speeds(trainer):
    return next(entry for entry in trainer.state.log_history if "eval_samples_per_second" in entry)


def test_evaluation_steps_per_second(ranks):
    """Six rows, one at a time: as many steps as rows, whatever they take."""
    settings = dict(data=rows(2), steps=2, eval_data=rows(6), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1)
    for result in ranks(2).run(train, engine="ddp", sp=2, after=speeds, **settings):
        log = result["after"]
        assert log["eval_samples_per_second"] == pytest.approx(log["eval_steps_per_second"], rel=0.02)


def flos(trainer):
    return trainer.state.total_flos


def test_operations_of_a_row_are_counted_once(ranks):
    expected = ranks(1).run(train, steps=2, after=flos)[0]["after"]
    assert [result["after"] for result in ranks(2).run(train, engine="ddp", sp=2, steps=2, after=flos)] == [expected] * 2


def evaluate_a_stream(**settings):
    train(engine="ddp", sp=2, dp=2, steps=1, after=lambda trainer: trainer.evaluate(Stream(rows(5))), **settings)


def test_a_stream_is_not_evaluated_over_replicas(ranks):
    """The last batch of one of them would be filled up with rows that are counted twice."""
    with pytest.raises(RankFailed, match="Evaluating an iterable dataset over 2 data-parallel ranks counts the rows twice"):
        ranks(4).run(evaluate_a_stream)
    ranks(4).run(evaluate_a_stream, dataloader_drop_last=True)


def with_lomo():
    import tempfile

    from transformers import TrainingArguments

    import hf_ulysses

    from .trajectory import _parallelism

    hf_ulysses.enable()
    with pytest.raises(ValueError, match="optim='lomo' changes weights within backward"):
        TrainingArguments(tempfile.mkdtemp(), use_cpu=True, optim="lomo", parallelism_config=_parallelism("ddp", 2, 1))


def test_optimizers_that_step_in_backward_are_refused(ranks):
    ranks(2).run(with_lomo)
