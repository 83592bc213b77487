"""A training loop of your own with Accelerate, as its documentation writes it for sequence parallelism.

`accelerator.prepare` makes the loader yield this rank's part of each row, with `shift_labels`. Every rank computes the
mean loss of its part, and the loop joins them: a differentiable all_gather of the losses, each weighted with its number
of targets. The same loop runs without sequence parallelism; there is nothing to join then.

    # rows of 64k tokens cut over 8 GPUs
    accelerate launch --config_file configs/zero3.yaml -m hf_ulysses scripts/train_accelerate.py \\
        --model_name_or_path Qwen/Qwen3-4B --text_files books/*.txt --max_length 65536 --attn_implementation sdpa

    # two processes on a CPU; no model and no files given: a tiny Llama on the source of the Python standard library
    accelerate launch --config_file configs/zero3.yaml --num_processes 2 --parallelism_config_sp_size 2 \\
        --mixed_precision no -m hf_ulysses scripts/train_accelerate.py --max_length 2048 --max_steps 10 --use_cpu

With several rows per optimizer step (accumulation or data parallelism) this loop weights every row alike, however few
targets it has. The Trainer and SFTTrainer weight every target alike; see scripts/train_trainer.py.
"""

import argparse

import torch
import torch.distributed.nn.functional
from accelerate import Accelerator, PartialState
from data import training_rows
from tiny_llama import byte_tokenizer, tiny_llama
from torch.utils.data import DataLoader
from tqdm import tqdm
from training_log import log_line, quiet_warnings
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed


def row_loss(model: torch.nn.Module, batch: dict, sp_group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """The mean loss over the targets of the whole rows, the same on every rank of the group."""
    if sp_group is None:
        return model(**batch).loss
    shift_labels = batch["shift_labels"]
    logits = model(**{key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten())

    good_tokens = (shift_labels != -100).sum()
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=sp_group))
    good_tokens = torch.stack(torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group))
    # A rank without targets has a loss of 0 / 0: left out, as multiplying it by 0 would not help.
    return (torch.where(good_tokens > 0, losses, 0.0) * good_tokens).sum() / good_tokens.sum().clamp(min=1)


def main():
    parser = argparse.ArgumentParser(
        usage="accelerate launch --config_file CONFIG -m hf_ulysses scripts/train_accelerate.py [arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_name_or_path", help="model to train (default: a tiny Llama with random weights)")
    parser.add_argument("--attn_implementation", help="sdpa, eager, flash_attention_2, ...")
    parser.add_argument("--text_files", nargs="*", help="one long text each (default: the Python standard library)")
    parser.add_argument("--max_length", type=int, default=4096, help="length of the longest row in tokens")
    parser.add_argument("--batch_size", type=int, default=1, help="rows per rank or sequence-parallel group")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--use_cpu", action="store_true")
    arguments = parser.parse_args()

    set_seed(arguments.seed)
    quiet_warnings()
    if arguments.use_cpu:
        PartialState(cpu=True)  # before the Accelerator: with Accelerator(cpu=True) there would be no DeepSpeed
    accelerator = Accelerator(gradient_accumulation_steps=arguments.gradient_accumulation_steps)

    if arguments.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model_name_or_path, attn_implementation=arguments.attn_implementation
        )
    else:
        tokenizer, model = byte_tokenizer(), tiny_llama()
    rows = training_rows(tokenizer, arguments.max_length, arguments.text_files)
    loader = DataLoader(
        rows, batch_size=arguments.batch_size, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    config = accelerator.parallelism_config
    sp_group = None
    if config is not None and config.sp_size > 1:
        sp_group = accelerator.torch_device_mesh["sp"].get_group()

    step = 0
    bar = tqdm(total=arguments.max_steps, disable=not accelerator.is_main_process)
    model.train()
    while step < arguments.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = row_loss(model, batch, sp_group)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    # Under DeepSpeed the engine clips by itself (Accelerate sets 1.0); this only returns the norm.
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            bar.update()
            if accelerator.is_main_process:
                bar.write(log_line(step, arguments.max_steps, {"loss": loss.item(), "grad_norm": grad_norm}))
            if step == arguments.max_steps:
                break
    bar.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
