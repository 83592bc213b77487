"""A small Llama with random weights and a byte-level tokenizer, for trying things where nothing can be downloaded.

    python scripts/tiny_llama.py DIRECTORY      saves both, for --model_name_or_path DIRECTORY
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per byte: 256 of them, and three special tokens (`<pad>`, `<bos>`, `<eos>`)."""
    specials = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: index for index, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Makes a Llama for `byte_tokenizer`: 2 layers, hidden size 128, 4 query and 2 KV heads, 0.4 million parameters."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    byte_tokenizer().save_pretrained(sys.argv[1])
    tiny_llama().save_pretrained(sys.argv[1])
