"""enable() and disable(), and why each row of the patch table is there: without it, something that is shown here breaks."""

import os
import traceback

import pytest

from .test_accelerate_loop import documented_loop, make_accelerator
from .test_evaluation import evaluate
from .test_generation import by_tokens, prompts
from .trajectory import rows, tiny_llama, train
from .trl_trajectory import run


def snapshot():
    """Every attribute that the table replaces, by identity."""
    from hf_ulysses.adapters.patches import TABLE

    for patch in TABLE.table:
        patch.check()
    return {patch.target: vars(patch.owner)[patch.name] for patch in TABLE.table}


def enable_and_disable():
    import hf_ulysses

    before = snapshot()
    hf_ulysses.enable()
    hf_ulysses.enable()
    during = {patch.target: vars(patch.owner)[patch.name] for patch in hf_ulysses.adapters.patches.TABLE.table}
    assert all(during[target] is not before[target] for target in before)
    assert all(during[target].__wrapped__ is before[target] for target in before)
    hf_ulysses.disable()
    hf_ulysses.disable()
    assert all(value is before[target] for target, value in snapshot().items())
    with hf_ulysses.enabled():
        assert hf_ulysses.adapters.patches.TABLE.applied
    assert all(value is before[target] for target, value in snapshot().items())


@pytest.mark.versions
def test_disable_restores_everything_by_identity(ranks):
    ranks(1).run(enable_and_disable)


def train_disable_train():
    """After a run with sequence parallelism, disable() leaves names of modelling files and the model as they were."""
    import transformers.models.llama.modeling_llama as modelling

    import hf_ulysses

    before = dict(vars(modelling))
    model = tiny_llama()
    train(engine="ddp", sp=2, steps=1, model=model)
    assert vars(modelling)["create_causal_mask"] is not before["create_causal_mask"]
    hf_ulysses.disable()
    assert all(vars(modelling)[name] is value for name, value in before.items())
    assert not model._forward_hooks and not model._forward_pre_hooks
    return True


def test_disable_detaches_models(ranks):
    assert ranks(2).run(train_disable_train) == [True, True]


def enable_after_accelerator():
    from accelerate import Accelerator

    import hf_ulysses

    Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="after an Accelerator"):
        hf_ulysses.enable()


def test_enable_after_an_accelerator_is_an_error(ranks):
    ranks(1).run(enable_after_accelerator)


# -- ablation -------------------------------------------------------------------------------------------------------------


def trains_exactly(expected, **settings):
    result = train(sp=2, **settings)
    assert result["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    assert result["state"] == expected["state"]


def predicts_each_row_once(expected, **settings):
    assert evaluate(sp=2, count=3, eval_batch=2, **settings)["predictions"].shape == expected["predictions"].shape


def loops_exactly(expected, **settings):
    assert documented_loop(sp=2, **settings)["loss"] == pytest.approx(expected["loss"], rel=2e-5)


def refuses_prompt_tuning(expected):
    from peft import PromptTuningConfig, get_peft_model

    with pytest.raises(ValueError, match="virtual tokens"):
        build(get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))


def build(model):
    """A trainer that is never used."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    import hf_ulysses

    from .trajectory import _parallelism

    hf_ulysses.enable()
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, parallelism_config=_parallelism("ddp", 2, 1))
    return Trainer(model, arguments)


def leaves_logits_in_shards(expected):
    """An evaluation that only wants the loss, in which the Trainer reads the logits all the same."""
    from unittest import mock

    from hf_ulysses.core import entrance

    def evaluate(trainer):
        with mock.patch.object(entrance, "gather_sequence", side_effect=AssertionError("gathered")):
            return trainer.evaluate(rows(2))

    assert train(engine="ddp", sp=2, steps=1, after=evaluate)["after"]["eval_loss"] > 0


def reports_rows_per_step(expected):
    def total(trainer):
        return trainer.get_total_train_batch_size(trainer.args)

    assert train(engine="ddp", sp=2, steps=1, accumulation=2, after=total)["after"] == 2


def draws_alike_after_resuming(expected):
    """A checkpoint of two data-parallel ranks, whose states are not those of the two peers that resume."""
    import random
    import tempfile
    from pathlib import Path

    import numpy
    import torch

    folder = Path(tempfile.mkdtemp())
    for rank in range(2):
        numpy_state = numpy.random.RandomState(rank).get_state()
        states = dict(python=random.Random(rank).getstate(), numpy=numpy_state, cpu=torch.Generator().manual_seed(rank).get_state())
        torch.save(states, folder / f"rng_state_{rank}.pth")

    def draw(trainer):
        trainer._load_rng_state(str(folder))
        draws = [None, None]
        torch.distributed.all_gather_object(draws, (random.random(), numpy.random.rand(), torch.rand(1).item()))
        return draws

    first, second = train(engine="ddp", sp=2, steps=1, after=draw)["after"]
    assert first == second


def tells_the_group(expected):
    from deepspeed.utils import groups
    from torch import distributed as dist

    def ask(trainer):
        group = groups._get_sequence_parallel_group()
        return dist.get_world_size(group), groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()

    assert train(engine="zero2", sp=2, steps=1, after=ask)["after"] == (2, dist.get_rank(), 2)


def accepts_the_real_batch_size(expected):
    from .trajectory import deepspeed_config

    config = deepspeed_config(2, train_batch_size=2)
    trains_exactly(expected, steps=2, accumulation=2, engine="ddp", deepspeed=config)


def names_the_universal_checkpoint(expected):
    """A ZeRO checkpoint of three processes, resumed by two."""
    import tempfile
    from pathlib import Path

    from transformers import TrainerState

    folder = Path(tempfile.mkdtemp())
    (folder / "global_step3").mkdir()
    (folder / "latest").write_text("global_step3")
    TrainerState(train_batch_size=1, max_steps=1, logging_steps=1, save_steps=500, eval_steps=500).save_to_json(
        str(folder / "trainer_state.json")
    )
    for rank in range(3):
        (folder / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(ValueError, match="universal checkpoint"):
        train(engine="zero2", sp=2, steps=1, resume=str(folder))


def refuses_before_anything_is_loaded(expected):
    import tempfile

    from trl.experimental.sdft import SDFTConfig

    import hf_ulysses

    from .trajectory import _parallelism

    hf_ulysses.enable()
    with pytest.raises(ValueError, match="SDFTTrainer is not supported with sequence parallelism"):
        SDFTConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, parallelism_config=_parallelism("ddp", 2, 1))


def generate(name, **settings):
    """What a trainer that generates logs, and its table of completions."""
    arguments = dict(batch=2, num_generations=4, max_completion_length=6, beta=0.0, steps=2, after=table, **settings)
    return run(name, prompts(8), trainer_arguments=dict(reward_funcs=[by_tokens]), **arguments)


def table(trainer):
    return list(trainer._logs["prompt"]), list(trainer._logs["completion"])


def generates_exactly(expected, **settings):
    result = generate(sp=2, **settings)
    for name in ("loss", "reward"):
        logged = [[entry[name] for entry in run["log"] if name in entry] for run in (result, expected)]
        assert logged[0] == pytest.approx(logged[1], rel=5e-5, abs=1e-6), name
    assert result["after"] == expected["after"]


def asks_the_server_once(expected):
    """A vLLM server that counts and answers differently each time, behind TRL's own client code."""
    from types import SimpleNamespace

    from accelerate import Accelerator
    from torch import distributed as dist
    from trl.generation.vllm_generation import VLLMGeneration

    import hf_ulysses
    from hf_ulysses.adapters.replicas import Replicas

    from .trajectory import _parallelism

    asked = []

    def answer(prompts, n, **settings):
        asked.append(prompts)
        ids = [[len(asked), *prompt, index] for prompt in prompts for index in range(n)]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": None}

    hf_ulysses.enable()
    generation = object.__new__(VLLMGeneration)
    vars(generation).update(dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs")))
    vars(generation).update(dict.fromkeys(("max_completion_length", "structured_outputs_regex", "generation_kwargs")))
    accelerator = Accelerator(cpu=True, parallelism_config=_parallelism("ddp", 2, 2))
    generation.mode, generation.enable_sleep_mode, generation.accelerator = "server", False, Replicas(accelerator)
    generation.vllm_client = SimpleNamespace(generate=answer)
    group = dist.get_rank() // 2
    _, completions, *_ = generation.generate([[10 + group]] * 4, None, 4)
    assert completions == [[1, 10 + group, index] for index in range(4)]
    assert asked == ([[[10], [11]]] if dist.get_rank() == 0 else [])


def accelerator_of(dp=1):
    import hf_ulysses

    hf_ulysses.enable()
    return make_accelerator("ddp", 2, dp)


def gathers_objects_once(expected):
    assert accelerator_of(dp=2).gather_for_metrics([f"row {int(os.environ['RANK']) // 2}"]) == ["row 0", "row 1"]


def rates(**settings):
    """Of a loop that prepares its scheduler: ten steps down to zero."""
    import torch

    accelerator = make_accelerator(**settings)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found = []
    for row in rows(4):
        accelerator.backward(model(**{name: values[None] for name, values in row.items()}).loss)
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def steps_the_schedule_once(expected):
    import hf_ulysses

    hf_ulysses.enable()
    assert rates(engine="ddp", sp=2, dp=1) == expected == pytest.approx([0.9, 0.8, 0.7, 0.6])


def draws_alike_after_loading(expected):
    """A state that was saved by ranks with other random states."""
    import tempfile

    import torch

    accelerator, folder = accelerator_of(), [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder, src=0)
    torch.manual_seed(int(os.environ["RANK"]))
    accelerator.save_state(folder[0])
    accelerator.load_state(folder[0])
    draws = [None, None]
    torch.distributed.all_gather_object(draws, torch.rand(1).item())
    assert draws[0] == draws[1]


def refuses_local_sgd(expected):
    from accelerate.local_sgd import LocalSGD

    accelerator = accelerator_of()
    with pytest.raises(ValueError, match="LocalSGD lets every rank step by itself"):
        LocalSGD(accelerator, tiny_llama(), 2)
    LocalSGD(accelerator, tiny_llama(), 2, enabled=False)


_STEPS = (train, dict(steps=2))
_EPOCHS = dict(steps=-1, num_train_epochs=2, data=rows(3))
_LOOP = (documented_loop, {})
_EVALUATION = (evaluate, dict(count=3, eval_batch=2))
_GRPO, _RLOO = dict(name="GRPO", engine="ddp", dp=2), dict(name="RLOO", engine="ddp", dp=2)
# target -> (behaviour, its settings, reference run, ranks)
BEHAVIOURS = {
    "Accelerator.__init__": (trains_exactly, dict(engine="zero2", steps=2), _STEPS, 2),
    "Accelerator.prepare": (trains_exactly, dict(engine="zero2", steps=2), _STEPS, 2),
    "Accelerator.prepare_data_loader": (trains_exactly, dict(engine="zero2", steps=2), _STEPS, 2),
    "accelerator:prepare_data_loader": (trains_exactly, dict(engine="zero2", steps=2), _STEPS, 2),
    "Accelerator.gather_for_metrics": (predicts_each_row_once, dict(engine="ddp"), _EVALUATION, 2),
    "accelerator:gather_object": (gathers_objects_once, {}, None, 4),
    "scheduler:AcceleratorState": (steps_the_schedule_once, {}, (rates, dict(engine="plain", sp=1, dp=1)), 2),
    "random:AcceleratorState": (generates_exactly, _GRPO, (generate, _GRPO), 4),
    "Accelerator.load_state": (draws_alike_after_loading, {}, None, 2),
    "LocalSGD.__init__": (refuses_local_sgd, {}, None, 2),
    "Accelerator.deepspeed_ulysses_dl_adapter": (loops_exactly, dict(engine="zero2", loader="adapter"), _LOOP, 2),
    "TrainingArguments.__post_init__": (refuses_before_anything_is_loaded, {}, None, 2),
    "Trainer.__init__": (refuses_prompt_tuning, {}, None, 2),
    "Trainer.get_total_train_batch_size": (reports_rows_per_step, {}, None, 2),
    "Trainer.get_sp_size": (trains_exactly, dict(engine="ddp", **_EPOCHS), (train, _EPOCHS), 2),
    "Trainer._load_rng_state": (draws_alike_after_resuming, {}, None, 2),
    "Trainer.evaluation_loop": (leaves_logits_in_shards, {}, None, 2),
    "functional:all_gather": (loops_exactly, dict(engine="zero2", dp=2), (documented_loop, dict(engine="zero2", dp=2)), 4),
    "_get_sequence_parallel_group": (tells_the_group, {}, None, 2),
    "_get_sequence_parallel_rank": (tells_the_group, {}, None, 2),
    "_get_sequence_parallel_world_size": (tells_the_group, {}, None, 2),
    "deepspeed_load_checkpoint": (names_the_universal_checkpoint, {}, None, 2),
    "trainer_config_process": (accepts_the_real_batch_size, {}, (train, dict(steps=2, accumulation=2)), 2),
    "GRPOConfig.__post_init__": (generates_exactly, _GRPO, (generate, _GRPO), 4),
    "grpo_trainer:gather": (generates_exactly, _GRPO, (generate, _GRPO), 4),
    "grpo_trainer:gather_object": (generates_exactly, _GRPO, (generate, _GRPO), 4),
    "RLOOConfig.__post_init__": (generates_exactly, _RLOO, (generate, _RLOO), 4),
    "rloo_trainer:gather": (generates_exactly, _RLOO, (generate, _RLOO), 4),
    "rloo_trainer:gather_object": (generates_exactly, _RLOO, (generate, _RLOO), 4),
    "vllm_generation:gather_object": (asks_the_server_once, {}, None, 4),
}


def behave(behaviour, expected, settings, without=None):
    """Run a behaviour, with one row of the table left out or not; `None` when it holds, else what went wrong."""
    from hf_ulysses.adapters.patches import TABLE

    table = TABLE.table
    TABLE.table = [patch for patch in table if without is None or not patch.target.endswith(without)]
    assert len(TABLE.table) == len(table) - (without is not None)
    if expected is not None:
        # The documented loop logs each data-parallel rank's own loss.
        expected = expected[int(os.environ["RANK"]) // 2 % len(expected)]
    try:
        behaviour(expected, **settings)
    except BaseException:
        return traceback.format_exc()
    finally:
        import hf_ulysses

        hf_ulysses.disable()
        TABLE.table = table


def test_every_row_has_a_behaviour():
    from hf_ulysses.adapters.patches import TABLE

    assert len(BEHAVIOURS) == len(TABLE.table)
    assert all(any(patch.target.endswith(name) for name in BEHAVIOURS) for patch in TABLE.table)


@pytest.mark.parametrize("target", BEHAVIOURS)
def test_without_this_row_it_breaks(ranks, target):
    behaviour, settings, reference, size = BEHAVIOURS[target]
    expected = None
    if reference is not None:
        function, how = reference
        expected = ranks(how.get("dp", 1)).run(function, **how)
    assert ranks(size).run(behave, behaviour, expected, settings) == [None] * size
    broken = ranks(size).run(behave, behaviour, expected, settings, without=target)
    # Upstream's own sequence parallelism, which ran then, leaves its attention and groups behind in the process.
    ranks(size).stop()
    assert any(what is not None for what in broken), f"nothing breaks without {target}"
