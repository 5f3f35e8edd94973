"""The task: a random two-layer Llama with a character vocabulary learns to repeat the letter of its prompt.

Nothing is downloaded. An optimizer step takes some 50 ms on one core.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LETTERS = "abcdefgh"
SPECIAL = ("<pad>", "<end>", "<begin>")

Reward = Callable[..., list[float]]
"""A reward function of TRL."""


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are characters."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, "?", *LETTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "eos_token", "bos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=characters, **names)


def save_model(directory: Path, *, seed: int, width: int = 32) -> Path:
    """Write a random model and its tokenizer to a directory, which training reads them from; return it."""
    torch.manual_seed(seed)
    characters = tokenizer()
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
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


def prompts() -> Any:
    """Return the prompts: each letter with a question mark."""
    return Dataset.from_list([{"prompt": f"{letter}?"} for letter in LETTERS])


def repeats_letter(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of each completion's characters that are its prompt's letter; 0 for an empty one."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(prompt[0]) / max(1, len(text)) for prompt, text in pairs]


def build_trainer(
    directory: Path,
    *,
    seed: int,
    steps: int,
    rewards: Reward | list[Reward] = repeats_letter,
    callbacks: Sequence[Any] = (),
    trainer: type = GRPOTrainer,
    **settings: Any,
) -> Any:
    """Return a trainer that begins with the model of `directory`; `settings` change those of the task."""
    random.seed(seed)
    torch.manual_seed(seed)
    chosen = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "num_iterations": 2,
        "max_completion_length": 6,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "beta": 0.01,
        "loss_type": "grpo",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        **settings,
    }
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        max_steps=steps,
        seed=seed,
        use_cpu=True,
        disable_tqdm=True,
        **chosen,
    )
    return trainer(
        str(directory),
        reward_funcs=rewards,
        args=config,
        train_dataset=prompts(),
        callbacks=list(callbacks),
    )
