"""GRPO on a tiny language model with telemetry: nothing is downloaded, and it learns in a minute on a CPU.

    python examples/language_model.py --steps 150
    esper-telemetry run examples/language_model.py --plain      # the same without an edit

It needs `pip install -e '.[trl]'`. A two-layer Llama with random weights learns to repeat the letter of its prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from esper_telemetry import Telemetry
from esper_telemetry.adapters.trl import TelemetryCallback

LETTERS = "abcdefgh"


def save_model(directory: Path) -> None:
    """Write a random model and a tokenizer whose tokens are characters."""
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<end>", "?", *LETTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def repeats_letter(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of a completion's characters that are the letter of its prompt."""
    return [text.count(prompt[0]) / max(1, len(text)) for prompt, text in zip(prompts, completions, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--run-dir", default="auto")
    parser.add_argument("--plain", action="store_true", help="do not attach telemetry")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(directory)
        callbacks = []
        if not options.plain:
            telemetry = stack.enter_context(Telemetry(["console"], run_dir=options.run_dir))
            callbacks.append(TelemetryCallback(telemetry))
        config = GRPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=32,
            num_generations=8,
            num_iterations=2,  # with 1 every ratio is 1 by construction, and nothing is ever clipped
            max_completion_length=6,
            learning_rate=3e-3,
            max_steps=options.steps,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        GRPOTrainer(
            str(directory),
            reward_funcs=repeats_letter,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"{letter}?"} for letter in LETTERS]),
            callbacks=callbacks,
        ).train()


if __name__ == "__main__":
    main()
