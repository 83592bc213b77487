"""One training run of a tiny model, as the numbers that two equal runs must share. The same code for every engine,
with sequence parallelism or without."""

import copy
import os
import tempfile

import torch

VOCAB, LENGTH, STEPS = 128, 66, 8
VALID_TARGETS = (1, 5, 64, 3)


def tiny_llama(**overrides):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        attention_dropout=0.0,
        attn_implementation="sdpa",
        # The default init of 0.02 leaves gradients so small that clipping at 1.0 would never act.
        initializer_range=0.1,
    )
    return LlamaForCausalLM(LlamaConfig(**{**config, **overrides}))


def rows(count, length=LENGTH, seed=1):
    """Rows with 1, 5, 64, 3, ... valid targets, at random places."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = torch.full_like(ids, -100)
        valid = min(VALID_TARGETS[index % len(VALID_TARGETS)], length - 1)
        where = 1 + torch.randperm(length - 1, generator=generator)[:valid]
        labels[where] = ids[where]
        data.append({"input_ids": ids, "labels": labels})
    return data


def deepspeed_config(stage, offload_optimizer=False, offload_param=False, **extra):
    zero = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
        **extra,
    }


ENGINES = {
    "plain": {},
    "ddp": {},
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
    "zero0": {"deepspeed": deepspeed_config(0)},
    "zero1": {"deepspeed": deepspeed_config(1)},
    "zero2": {"deepspeed": deepspeed_config(2)},
    "zero3": {"deepspeed": deepspeed_config(3)},
    "zero2_offload": {"deepspeed": deepspeed_config(2, offload_optimizer=True)},
    "zero3_offload": {"deepspeed": deepspeed_config(3, offload_optimizer=True, offload_param=True)},
}


def _parallelism(engine, sp, dp):
    if sp == 1:
        return None
    if engine in ("ddp", "fsdp2"):
        from hf_ulysses import ParallelismConfig

        return ParallelismConfig(sp_backend="torch", sp_size=sp, dp_shard_size=dp)
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=sp, dp_shard_size=dp, sp_handler=handler)


def train(engine="plain", sp=1, dp=1, accumulation=1, batch=1, kind="trainer", optimizer="sgd", steps=STEPS,
          data=None, eval_data=None, model=None, before=None, after=None, environment=None, packed=False,
          data_collator=None, resume=None, in_order=True, processing_class=None, **arguments):  # fmt: skip
    """Train and return `{"loss": [...], "grad_norm": [...], "parameters": flat tensor, "log": [...], "exchanges": int}`.

    Args:
        engine (`str`): a key of `ENGINES`. sp, dp (`int`): the mesh. kind (`str`): "trainer" or "sft".
        data (`list[dict]`, *optional*): rows; defaults to just enough rows with uneven targets for `steps` steps.
        before, after (`Callable`, *optional*): called with the trainer before and after it trains; what `after` returns
            is the result's "after".
        processing_class (*optional*): of an SFTTrainer, for a `data` that is a dataset as it prepares them itself.
        environment (`dict`, *optional*): variables as a launcher sets them; then the engine comes from there.
    """
    import transformers
    from transformers import Trainer, TrainingArguments

    import hf_ulysses

    os.environ.update(environment or {})
    if sp > 1 or environment:
        hf_ulysses.enable()
    transformers.logging.set_verbosity_error()
    model = tiny_llama() if model is None else model
    data = rows(steps * accumulation * batch * dp) if data is None else data
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=0.1 if optimizer == "sgd" else 1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="sgd" if optimizer == "sgd" else "adamw_torch",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        remove_unused_columns=False,
        parallelism_config=_parallelism(engine, sp, dp),
    )
    settings.update(copy.deepcopy(ENGINES[engine]))
    settings.update(arguments)
    if optimizer == "sgd" and "deepspeed" in settings:
        settings["deepspeed"]["zero_allow_untested_optimizer"] = True
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        settings.setdefault("max_length", None)
        # Packing is done while TRL prepares the dataset; else rows are trained as they are.
        settings["dataset_kwargs"] = None if packed else {"skip_prepare_dataset": True}
        config = SFTConfig(**settings)
        fsdp_on_cpu(config)
        trainer = SFTTrainer(
            model,
            config,
            train_dataset=_dataset(data) if processing_class is None else data,
            eval_dataset=None if eval_data is None else _dataset(eval_data),
            processing_class=processing_class or _tokenizer(),
            data_collator=data_collator,
        )
    else:
        config = TrainingArguments(**settings)
        fsdp_on_cpu(config)
        trainer = Trainer(model, config, train_dataset=data, eval_dataset=eval_data, data_collator=data_collator)
    # In order, so that every layout reads the same rows in a step; an argument only since transformers 5.2.
    if in_order:
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
    if before is not None:
        before(trainer)
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    attachment = hf_ulysses.core.attachment.attachment_of(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    return {
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [entry.get("grad_norm") for entry in log],
        "log": log,
        "state": {"global_step": trainer.state.global_step, "epoch": trainer.state.epoch},
        "parameters": parameters(trainer),
        "exchanges": 0 if attachment is None else attachment.exchanges,
        "eval_loss": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "engine": str(trainer.accelerator.distributed_type),
        "after": None if after is None else after(trainer),
    }


def fsdp_on_cpu(config):
    if config.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_cpu()


def shard_on_cpu():
    """Accelerate knows FSDP on accelerators only and silently runs DDP on CPU ranks: say that these are GPU ranks."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    # Pinned memory needs an accelerator too.
    torch.distributed.fsdp.CPUOffloadPolicy.__init__.__defaults__ = (False,)


def parameters(trainer):
    """All parameters as one flat tensor, whatever the engine does to them."""
    flat = []
    for parameter in trainer.model.parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                flat.append(parameter.detach().clone().flatten())
        else:
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            flat.append(full.detach().clone().flatten())
    return torch.cat(flat)


def _dataset(data):
    from datasets import Dataset

    return Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in data])


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<{n}>": n for n in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")), pad_token="<0>", eos_token="<1>"
    )


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    result = train(**eval(f"dict({sys.argv[1]})"))
    if int(os.environ.get("RANK", "0")) == 0:
        print("RUN", sys.argv[1], result["state"], result["exchanges"], result["parameters"].double().sum().item())
        for loss, norm in zip(result["loss"], result["grad_norm"]):
            print(f"  {loss:.7f} {norm if norm is None else round(norm, 6)}")
