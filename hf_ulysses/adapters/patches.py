"""The table: every upstream symbol that hf_ulysses replaces while it is enabled. Wrappers only, no copied bodies.

Besides these, an attached model has hooks and its modelling files' names for masks, attention and the experts' balance
(attachment.py), the functions that mix positions (scans.py) and of its checkpointing (recomputation.py); a trainer has the methods
shadowed on the instance that run models, count, and draw (trainer.py, trl.py).
"""

import importlib.util

from . import accelerate
from . import replicas
from . import trainer
from . import trl
from .patching import Patch, Patches

_NATIVE = "accelerate, transformers and trl shard batches and attend through hf_ulysses' engine themselves"


def _rows() -> list[Patch]:
    rows = [
        Patch(
            "accelerate.accelerator:Accelerator.__init__",
            accelerate.wrap_init,
            why="puts the StateView in place of the configuration and checks it; without it SP is upstream's",
            until=_NATIVE,
            parameters=("parallelism_config",),
        ),
        Patch(
            "accelerate.accelerator:Accelerator.prepare",
            accelerate.wrap_prepare,
            why="attaches models; keeps _prepare_deepspeed from registering its own attention, mpu and adapter; makes "
            "a loader that is prepared with its model yield shards",
            until=_NATIVE,
        ),
        Patch(
            "accelerate.accelerator:Accelerator.prepare_data_loader",
            accelerate.wrap_prepare_data_loader_method,
            why="says which accelerator prepares; the state that could tell is shared by all of a process",
            until="prepare_data_loader takes the data-parallel rank and size from a mesh with an sp dimension",
        ),
        Patch(
            "accelerate.accelerator:prepare_data_loader",
            accelerate.wrap_prepare_data_loader_function,
            why="splits data over data-parallel ranks only; without it peers read different rows",
            until="prepare_data_loader takes the data-parallel rank and size from a mesh with an sp dimension",
            parameters=("num_processes", "process_index", "torch_device_mesh", "dispatch_batches"),
        ),
        Patch(
            "accelerate.accelerator:Accelerator.gather_for_metrics",
            accelerate.wrap_gather_for_metrics,
            why="takes what peers have alike once: rows, numbers, and what remains of an incomplete last batch",
            until=_NATIVE,
            parameters=("input_data",),
        ),
        Patch(
            "accelerate.accelerator:gather_object",
            trl.wrap_gather_object,
            why="gather_for_metrics takes strings and other objects through it, as often as there are peers",
            until=_NATIVE,
        ),
        Patch(
            "accelerate.scheduler:AcceleratorState",
            replicas.wrap_state,
            why="a prepared scheduler steps once per process: sp times too fast",
            until="it counts data-parallel ranks",
        ),
        Patch(
            "accelerate.utils.random:AcceleratorState",
            replicas.wrap_state,
            why="set_seed(device_specific=True) seeds peers differently: they would draw, shuffle and generate differently",
            until="it counts data-parallel ranks",
        ),
        Patch(
            "accelerate.accelerator:Accelerator.load_state",
            accelerate.wrap_load_state,
            why="another layout saved other ranks' states: peers would draw differently",
            until=_NATIVE,
        ),
        Patch(
            "accelerate.local_sgd:LocalSGD.__init__",
            accelerate.wrap_local_sgd,
            why="ranks that share a row would step by themselves, each with its shard's gradient: refused",
            until=_NATIVE,
            parameters=("accelerator", "enabled"),
        ),
        Patch(
            "accelerate.accelerator:Accelerator.deepspeed_ulysses_dl_adapter",
            accelerate.wrap_dl_adapter,
            why="documented as callable; upstream's adapter on top of peers with equal rows would be wrong",
            until=_NATIVE,
            parameters=("dl", "model"),
        ),
        Patch(
            "transformers.training_args:TrainingArguments.__post_init__",
            trainer.wrap_arguments,
            why="refuses TRL's trainers that cannot be exact before they load a model, also with the layout of a YAML",
            until=_NATIVE,
        ),
        Patch(
            "transformers.trainer:Trainer.__init__",
            trainer.wrap_init,
            why="refuses trainers and models that cannot be exact, when they are built; lets losses see replicas, not ranks",
            until=_NATIVE,
        ),
        Patch(
            "transformers.trainer:Trainer.get_total_train_batch_size",
            trainer.wrap_total_batch_size,
            why="reports micro * accumulation * dp rows per step",
            until=_NATIVE,
            parameters=("args",),
        ),
        Patch(
            "transformers.trainer:Trainer.get_sp_size",
            trainer.wrap_sp_size,
            why="upstream's loader yields each batch sp_size times; ours once: steps and epochs would be wrong",
            until=_NATIVE,
        ),
        Patch(
            "transformers.trainer:Trainer._load_rng_state",
            trainer.wrap_load_rng_state,
            why="another layout saved other ranks' states: peers would draw differently in their collators",
            until=_NATIVE,
            parameters=("checkpoint",),
        ),
        Patch(
            "transformers.trainer:Trainer.evaluation_loop",
            trainer.wrap_evaluation_loop,
            why="says when nobody wants the logits, which the Trainer reads all the same: they stay in shards then",
            until="prediction_step looks at prediction_loss_only before it reads the outputs",
            parameters=("prediction_loss_only",),
        ),
        Patch(
            "torch.distributed.nn.functional:all_gather",
            accelerate.wrap_all_gather,
            why="documented loops differentiate through it; on gloo its backward fails in groups without rank 0",
            until="torch's _AlltoAll.forward passes group ranks to scatter as group_src",
            parameters=("tensor", "group"),
        ),
    ]
    if importlib.util.find_spec("deepspeed") is not None:
        groups = "deepspeed.utils.groups:_get_sequence_parallel_"
        why = "documented loops ask DeepSpeed for the sp group; without an mpu it has none"
        rows += [
            Patch(groups + "group", accelerate.wrap_group_getter, why, _NATIVE),
            Patch(groups + "rank", accelerate.wrap_rank_getter, why, _NATIVE),
            Patch(groups + "world_size", accelerate.wrap_world_size_getter, why, _NATIVE),
            Patch(
                "transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.trainer_config_process",
                trainer.wrap_deepspeed_config,
                why="a train_batch_size of micro * accumulation * dp in a DeepSpeed JSON is right, not a mismatch",
                until="transformers compares it with the data-parallel size",
                parameters=("args",),
            ),
            Patch(
                "transformers.trainer:deepspeed_load_checkpoint",
                trainer.wrap_load_checkpoint,
                why="says before anything is loaded that ZeRO's partitions need as many processes as saved them",
                until="the Trainer resumes through DeepSpeed's universal checkpoint",
                parameters=("deepspeed_engine", "checkpoint_path"),
            ),
        ]
    if importlib.util.find_spec("trl") is not None:
        rows += _rows_of_trl()
    return rows


_IN_TRAINERS = (
    ("gather", trl.wrap_gather, "gathers rewards from all ranks: a group of generations would hold copies"),
    ("gather_object", trl.wrap_gather_object, "the table of completions would hold each as often as there are peers"),
)
_IN_VLLM = (("gather_object", trl.wrap_gather_object, "a server would be asked as often as there are peers"),)


def _rows_of_trl() -> list[Patch]:
    rows, named = [], []
    for name, config in (("grpo", "GRPOConfig"), ("rloo", "RLOOConfig")):
        why = "refuses sequence parallelism; counts all ranks in the size of a generation batch: prompts are skipped"
        rows.append(Patch(f"trl.trainer.{name}_config:{config}.__post_init__", trl.wrap_config, why, _NATIVE))
        named += [(f"trl.trainer.{name}_trainer:", *row) for row in _IN_TRAINERS]
    # Older versions ask the server in the trainers' own modules.
    if importlib.util.find_spec("trl.generation") is not None:
        named += [("trl.generation.vllm_generation:", *row) for row in _IN_VLLM]
    until = "they gather from data-parallel ranks"
    return rows + [Patch(module + name, wrap, why, until) for module, name, wrap, why in named]


TABLE = Patches(_rows())
