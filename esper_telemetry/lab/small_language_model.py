"""A small random language model, and a verifiable task: repeat the letter of the prompt. Nothing is downloaded.

A two-layer Llama with a character vocabulary; an optimizer step takes about 50 ms on one core. It needs `transformers` and `tokenizers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
SPECIAL = ("<pad>", "<end>", "<begin>")


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are characters."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, "?", *LETTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "eos_token", "bos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=characters, **names)


def save_model(directory: Path, *, seed: int, width: int = 32, layers: int = 2) -> Path:
    """Write a random model and its tokenizer to a directory, from which training reads them; return it."""
    torch.manual_seed(seed)
    characters = tokenizer()
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    characters.save_pretrained(directory)
    return directory


def repeats_letter(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of each completion's characters that equal its prompt's letter; 0 for an empty completion."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(prompt[0]) / max(1, len(text)) for prompt, text in pairs]
