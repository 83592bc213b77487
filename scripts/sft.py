"""Supervised fine-tuning of any causal LM on long rows with TRL's SFTTrainer.

Nothing here knows about sequence parallelism: the configuration and `-m hf_ulysses` turn it on.

    # Qwen3-4B on a dataset of the hub, one row of 128k tokens cut over 8 GPUs
    accelerate launch --config_file configs/zero3.yaml -m hf_ulysses scripts/sft.py \\
        --model_name_or_path Qwen/Qwen3-4B --dataset_name my/long-conversations --max_length 131072 \\
        --per_device_train_batch_size 1 --attn_implementation flash_attention_2 --learning_rate 1e-5 \\
        --output_dir outputs/qwen3-4b

    # the same on local files: .jsonl in any format that SFTTrainer knows ("text", "messages", "prompt" and
    # "completion", or "input_ids" and "labels"); any other file is one long text, cut into rows of max_length tokens
        ... --train_files mine.jsonl
        ... --train_files books/*.txt

    # the same on the source of the Python standard library, which every machine has
        ... --standard_library

    # two processes on a CPU, a tiny model, nothing downloaded
    python scripts/tiny_llama.py outputs/tiny
    accelerate launch --config_file configs/zero3.yaml --num_processes 2 --parallelism_config_sp_size 2 \\
        --mixed_precision no -m hf_ulysses scripts/sft.py --model_name_or_path outputs/tiny --standard_library \\
        --max_length 2048 --max_steps 10 --logging_steps 1 --per_device_train_batch_size 1 --bf16 false --use_cpu \\
        --output_dir outputs/sft

Arguments are those of trl.SFTConfig and trl.ModelConfig, and the ones of DataArguments below; `--config FILE.yaml`
reads them from a file. The numbers of the log are also in output_dir/log.jsonl.
"""

import argparse
from dataclasses import dataclass, field

from data import training_rows
from datasets import Dataset, load_dataset
from training_log import use_training_log
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class DataArguments:
    """What to train on: exactly one of `dataset_name`, `train_files`, `standard_library`."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    dataset_train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Its split to evaluate on (--eval_strategy)."})
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Local .json or .jsonl files, or text files (one long document each)."}
    )
    eval_files: list[str] = field(default_factory=list, metadata={"help": "The same for evaluation."})
    standard_library: bool = field(
        default=False, metadata={"help": "The source of the Python standard library, one document per package."}
    )
    max_rows: int | None = field(default=None, metadata={"help": "Train on so many rows at most."})

    def __post_init__(self):
        if bool(self.dataset_name) + bool(self.train_files) + self.standard_library != 1:
            raise ValueError("Give exactly one of --dataset_name, --train_files, --standard_library.")


def load_datasets(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Dataset, Dataset | None]:
    """Loads the training and, if there is one, the evaluation dataset."""
    if arguments.dataset_name:
        splits = load_dataset(arguments.dataset_name, arguments.dataset_config)
        train, test = splits[arguments.dataset_train_split], splits.get(arguments.dataset_test_split)
    elif arguments.standard_library:
        train, test = Dataset.from_list(training_rows(tokenizer, max_length, max_rows=arguments.max_rows)), None
    else:
        train = load_files(arguments.train_files, tokenizer, max_length)
        test = load_files(arguments.eval_files, tokenizer, max_length) if arguments.eval_files else None
    return train.select(range(min(len(train), arguments.max_rows or len(train)))), test


def load_files(files: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    if all(file.endswith((".json", ".jsonl")) for file in files):
        return load_dataset("json", data_files=files, split="train")
    return Dataset.from_list(training_rows(tokenizer, max_length, text_files=files))


def main():
    parser = TrlParser(
        (DataArguments, SFTConfig, ModelConfig),
        usage="accelerate launch --config_file CONFIG -m hf_ulysses scripts/sft.py [arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data_arguments, training_arguments, model_arguments = parser.parse_args_and_config()

    tokenizer = AutoTokenizer.from_pretrained(model_arguments.model_name_or_path)
    with training_arguments.main_process_first(desc="loading the dataset"):
        train, test = load_datasets(data_arguments, tokenizer, training_arguments.max_length)
    if "input_ids" in train.column_names:  # tokenized already, with its own labels
        if test is not None and "input_ids" not in test.column_names:
            raise ValueError("The training rows are tokenized, the evaluation rows are not: give both in one form.")
        training_arguments.dataset_kwargs = {"skip_prepare_dataset": True}

    # ModelConfig calls it torch_dtype before TRL 0.24.
    dtype = getattr(model_arguments, "dtype", None) or getattr(model_arguments, "torch_dtype", None) or "auto"
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model_arguments.model_name_or_path,
            revision=model_arguments.model_revision,
            dtype=dtype,
            attn_implementation=model_arguments.attn_implementation,
        ),
        args=training_arguments,
        train_dataset=train,
        eval_dataset=test if training_arguments.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_arguments),
    )
    use_training_log(trainer)
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    if training_arguments.save_strategy != "no":
        trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
