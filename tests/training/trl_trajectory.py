"""One short run of a TRL trainer, as the numbers that two equal runs must share: every metric that it logs."""

import copy
import tempfile

import torch

from .trajectory import ENGINES, VOCAB, _parallelism, fsdp_on_cpu, parameters, tiny_llama

STEPS = 3
# What a run logs about the machine, not about the model.
_OF_THE_MACHINE = ("runtime", "per_second", "step_time", "profiling", "total_flos", "sampling/time")


def tokenizer(padding_side="right", pad="<0>"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(VOCAB)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, eos_token="<1>", padding_side=padding_side, chat_template=template
    )


def text(length, generator):
    """`length` words, each with a space in front of it, none of them padding or the end."""
    return "".join(f" <{n}>" for n in torch.randint(2, VOCAB, (length,), generator=generator).tolist())


# (prompt, chosen, rejected): a short prompt; completions wholly in the last shard; a prompt across all cuts of 4.
LENGTHS = [(3, 12, 5), (30, 3, 2), (9, 4, 14), (33, 5, 2)]


def preferences(count, lengths=LENGTHS, seed=1, **columns):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        names = zip(("prompt", "chosen", "rejected"), lengths[index % len(lengths)])
        rows.append({name: text(length, generator) for name, length in names})
        rows[-1].update({name: values[index % len(values)] for name, values in columns.items()})
    return rows


def judged(count, labels=(True, False, False, False), seed=1):
    """Rows of KTO; with batches of two every other batch is all rejected, and each KL row has another row's completion."""
    rows = preferences(count, seed=seed)
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": labels[index % len(labels)]}
        for index, row in enumerate(rows)
    ]


def scores(num_labels=1, **overrides):
    from transformers import LlamaForSequenceClassification

    config = copy.deepcopy(tiny_llama(**overrides).config)
    config.num_labels = num_labels
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def lora_config():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def with_lora():
    """An adapter that has been trained before: its weights are not zero."""
    from peft import get_peft_model

    model = get_peft_model(tiny_llama(), lora_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model


def class_of(name):
    """A trainer of TRL or of its experiments, and its configuration."""
    import importlib
    import importlib.util

    import trl

    folder = f"trl.experimental.{ {'OnlineDPO': 'online_dpo'}.get(name, name.lower()) }"
    # Where some have moved to, and from where KTO has come back.
    is_there = hasattr(trl, f"{name}Trainer") and (trl.__version__ >= "1" or importlib.util.find_spec(folder) is None)
    module = trl if is_there else importlib.import_module(folder)
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def run(name, data, engine="plain", sp=1, dp=1, batch=2, model=tiny_llama, reference=None, eval_data=None, steps=STEPS,
        padding_side="right", pad="<0>", after=None, environment=None, trainer_arguments=None, models=None, **arguments):  # fmt: skip
    """Train with TRL's `name + "Trainer"` and return what it logged, did and has learnt.

    Args:
        data, eval_data (`list[dict]` or `str`): rows as TRL takes them, or the folder that they were saved to.
        model, reference (`Callable`): make a model when called; `reference` makes the `ref_model`.
        models (`Callable`, *optional*): makes other models, by the names of the trainer's arguments.
        after (`Callable`, *optional*): called with the trained trainer; what it returns is the result's "after".
    """
    import os

    import transformers
    from datasets import Dataset, load_from_disk

    import hf_ulysses

    os.environ.update(environment or {})
    if sp > 1 or environment:
        hf_ulysses.enable()
    transformers.logging.set_verbosity_error()
    trainer_class, config_class = class_of(name)
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=steps,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
        gradient_checkpointing=False,
        parallelism_config=_parallelism(engine, sp, dp),
        **copy.deepcopy(ENGINES[engine]),
    )
    if eval_data is not None:
        settings.update(eval_strategy="steps", eval_steps=2)
    settings.update(arguments)
    if "deepspeed" in settings:
        settings["deepspeed"]["zero_allow_untested_optimizer"] = True
    more = dict(trainer_arguments or {})
    # Before the configuration: under ZeRO-3 weights are drawn in another order after it.
    more["model"] = model()
    if reference is not None:
        more["ref_model"] = reference()
    more.update({} if models is None else models())
    config = config_class(**settings)
    fsdp_on_cpu(config)
    for which, rows in (("train_dataset", data), ("eval_dataset", eval_data)):
        if rows is not None:
            more[which] = load_from_disk(rows) if isinstance(rows, str) else Dataset.from_list(rows)
    trainer = trainer_class(args=config, processing_class=tokenizer(padding_side, pad), **more)
    if not hasattr(trainer, "_calculate_rewards"):  # Those that generate have a sampler of their own.
        trainer._get_train_sampler = lambda _=None: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    attachment = hf_ulysses.core.attachment.attachment_of(trainer.accelerator.unwrap_model(trainer.model))
    return {
        "log": [_numbers(entry) for entry in trainer.state.log_history],
        "state": {"global_step": trainer.state.global_step, "epoch": trainer.state.epoch},
        "parameters": parameters(trainer),
        "engine": str(trainer.accelerator.distributed_type),
        "exchanges": 0 if attachment is None else attachment.exchanges,
        "after": None if after is None else after(trainer),
    }


def _numbers(entry):
    return {key: value for key, value in entry.items() if not any(word in key for word in _OF_THE_MACHINE)}
