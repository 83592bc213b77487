"""Preference training of any causal LM on long rows with TRL's DPOTrainer.

Nothing here knows about sequence parallelism: the configuration and `-m hf_ulysses` turn it on.

    # a dataset of the hub with "prompt", "chosen" and "rejected" (or conversations), rows of 64k tokens cut over 8 GPUs
    accelerate launch --config_file configs/zero3.yaml -m hf_ulysses scripts/dpo.py \\
        --model_name_or_path Qwen/Qwen3-4B --dataset_name my/long-preferences --max_length 65536 \\
        --per_device_train_batch_size 1 --attn_implementation flash_attention_2 --output_dir outputs/dpo

    # the same on a local file, with LoRA: the reference is the model with the adapter switched off
        ... --train_files mine.jsonl --use_peft

    # two processes on a CPU, a tiny model and made-up rows, nothing downloaded
    python scripts/tiny_llama.py outputs/tiny
    accelerate launch --config_file configs/zero3.yaml --num_processes 2 --parallelism_config_sp_size 2 \\
        --mixed_precision no -m hf_ulysses scripts/dpo.py --model_name_or_path outputs/tiny --max_steps 4 \\
        --logging_steps 1 --per_device_train_batch_size 2 --bf16 false --use_cpu --output_dir outputs/dpo

Arguments are those of trl.DPOConfig and trl.ModelConfig, and the ones of DataArguments below. The numbers of the log are
also in output_dir/log.jsonl. `-m hf_ulysses -m trl.scripts.dpo` runs TRL's own script in the same way.
"""

import argparse
from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from training_log import use_training_log
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config


@dataclass
class DataArguments:
    """What to train on; without either, a few made-up rows."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "Local .json or .jsonl files."})


def load_rows(arguments: DataArguments) -> Dataset:
    if arguments.dataset_name:
        return load_dataset(arguments.dataset_name, split=arguments.dataset_train_split)
    if arguments.train_files:
        return load_dataset("json", data_files=arguments.train_files, split="train")
    return Dataset.from_list([made_up(number) for number in range(64)])


def made_up(number: int) -> dict:
    """Counting on is chosen, counting backwards rejected; prompts of different lengths."""
    prompt = " ".join(map(str, range(number, number + 20 + number)))
    last = number + 20 + number
    return {
        "prompt": prompt + " ",
        "chosen": " ".join(map(str, range(last, last + 8))),
        "rejected": " ".join(map(str, range(last, last - 5, -1))),
    }


def main():
    parser = TrlParser(
        (DataArguments, DPOConfig, ModelConfig),
        usage="accelerate launch --config_file CONFIG -m hf_ulysses scripts/dpo.py [arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data_arguments, training_arguments, model_arguments = parser.parse_args_and_config()
    training_arguments.model_init_kwargs = {
        "revision": model_arguments.model_revision,
        "dtype": model_arguments.dtype or "auto",
        "attn_implementation": model_arguments.attn_implementation,
    }
    with training_arguments.main_process_first(desc="loading the dataset"):
        rows = load_rows(data_arguments)
    trainer = DPOTrainer(
        model_arguments.model_name_or_path,
        args=training_arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_arguments.model_name_or_path),
        peft_config=get_peft_config(model_arguments),
    )
    use_training_log(trainer)
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    if training_arguments.save_strategy != "no":
        trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
