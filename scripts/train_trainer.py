"""Next-token training on long documents with the Transformers Trainer and a stock collator.

Nothing here knows about sequence parallelism: the configuration and `-m hf_ulysses` turn it on.

    # one text per file, rows of 64k tokens cut over 8 GPUs
    accelerate launch --config_file configs/zero3.yaml -m hf_ulysses scripts/train_trainer.py \\
        --model_name_or_path Qwen/Qwen3-4B --text_files books/*.txt --max_length 65536 --output_dir outputs/books \\
        --per_device_train_batch_size 1 --gradient_checkpointing --bf16 --attn_implementation flash_attention_2

    # two processes on a CPU; no model and no files given: a tiny Llama on the source of the Python standard library
    accelerate launch --config_file configs/zero3.yaml --num_processes 2 --parallelism_config_sp_size 2 \\
        --mixed_precision no -m hf_ulysses scripts/train_trainer.py --max_length 2048 --max_steps 10 \\
        --logging_steps 1 --per_device_train_batch_size 1 --use_cpu --output_dir outputs/trainer

Arguments are those of transformers.TrainingArguments and the ones of Arguments below. The numbers of the log are also
in output_dir/log.jsonl.
"""

import argparse
from dataclasses import dataclass, field

from data import training_rows
from datasets import Dataset
from tiny_llama import byte_tokenizer, tiny_llama
from training_log import use_training_log
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Arguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model to train; without it a tiny Llama with random weights."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager, flash_attention_2, ..."})
    text_files: list[str] = field(
        default_factory=list,
        metadata={"help": "One long text each; without them the source of the Python standard library."},
    )
    max_length: int = field(default=4096, metadata={"help": "Length of the longest row in tokens."})
    max_rows: int | None = field(default=None, metadata={"help": "Train on so many rows at most."})


def main():
    parser = HfArgumentParser(
        (Arguments, TrainingArguments),
        usage="accelerate launch --config_file CONFIG -m hf_ulysses scripts/train_trainer.py [arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments, training_arguments = parser.parse_args_into_dataclasses()

    if arguments.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model_name_or_path, attn_implementation=arguments.attn_implementation
        )
    else:
        tokenizer, model = byte_tokenizer(), tiny_llama()

    trainer = Trainer(
        model=model,
        args=training_arguments,
        train_dataset=Dataset.from_list(
            training_rows(tokenizer, arguments.max_length, arguments.text_files, arguments.max_rows)
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads input_ids and labels
        processing_class=tokenizer,
    )
    use_training_log(trainer)
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    if training_arguments.save_strategy != "no":
        trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
