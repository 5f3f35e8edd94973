"""What hosts learn: inputs and targets for training and validation, made once and shared by all environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 16
"""Characters of a window of text."""


@dataclass(frozen=True, slots=True)
class Data:
    """Examples of a task: rows of inputs [M, inputs], float32, and their classes [M]; windows of `tokens` rows stay together."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A data set, and the host that is to learn it.

    Attributes:
        train, validation: examples; no row is in both.
        classes: that rows are told apart into.
        width: of the host's hidden layers.
        tokens: rows of a window; 1 where rows are independent.
        linear: the host has no activations.
        batch: windows of a minibatch.
        train_batches: minibatches of an epoch.
        validation_windows: windows that accuracy is measured on, a limit of its own.
        learning_rate: of hosts and seeds.
        price: accuracy that as many parameters in seeds as the host has are thought to be worth.
    """

    name: str
    train: Data
    validation: Data
    classes: int
    width: int
    tokens: int = 1
    linear: bool = False
    batch: int = 128
    train_batches: int = 4
    validation_windows: int = 256
    learning_rate: float = 0.01
    price: float = 0.02

    @property
    def inputs(self) -> int:
        """Entries of an input row."""
        return self.train.inputs.shape[1]

    def to(self, device: torch.device) -> LearningTask:
        """The task with its data on that device, and no more validation data than is looked at."""
        rows = self.validation_windows * self.tokens
        train, validation = (
            Data(data.inputs[:limit].to(device), data.targets[:limit].to(device))
            for data, limit in ((self.train, None), (self.validation, rows))
        )
        return replace(self, train=train, validation=validation)


def synthetic() -> LearningTask:
    """Points in the plane, lifted to 16 noisy dimensions, in three arms of a spiral: more than a narrow host can bend around."""
    generator = torch.Generator().manual_seed(7)
    rows, arms, turns = 1536, 3, 1.25
    targets = torch.arange(rows) % arms
    radius = torch.rand(rows, generator=generator).sqrt()
    angle = 2 * torch.pi * (turns * radius + targets / arms) + 0.12 * torch.randn(rows, generator=generator)
    plane = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    lift = torch.randn(2, 16, generator=generator)
    inputs = 2 * plane @ lift + 0.02 * torch.randn(rows, 16, generator=generator)
    return LearningTask("synthetic", *_split(inputs, targets, 1024, generator), classes=arms, width=8)


def digits() -> LearningTask:
    """What is left when a handwritten digit is divided by three: the 1,797 images of 8 x 8 pixels that scikit-learn brings.

    Digits with the same remainder look nothing alike, so a host without activations falls short.

    Raises ImportError where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ImportError("the task digits needs scikit-learn: pip install 'esper-telemetry[digits]'") from missing
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.as_tensor(images / 8 - 1).float(), torch.as_tensor(labels % 3).long()
    parts = _split(inputs, targets, 1280, torch.Generator().manual_seed(7))
    return LearningTask("digits", *parts, classes=3, width=12, linear=True, validation_windows=512)


def text() -> LearningTask:
    """The next character of a short story, in windows of 16; accuracy is the share of characters told right, in training too."""
    story = Path(__file__).with_name("text.txt").read_text(encoding="utf-8").lower()
    letters = sorted(set(story))
    codes = torch.tensor([letters.index(letter) for letter in story])
    windows = codes.unfold(0, TOKENS + 1, 4)
    held = len(windows) // 5  # the end of the story, less the windows that reach into both parts
    train, validation = windows[: -held - TOKENS // 4], windows[-held:]
    place = torch.eye(TOKENS)

    def data(rows: Tensor) -> Data:
        inputs = torch.cat([F.one_hot(rows[:, :-1], len(letters)).float(), place.expand(len(rows), -1, -1)], -1)
        return Data(inputs.flatten(0, 1), rows[:, 1:].flatten())

    parts = (data(train), data(validation))
    return LearningTask(
        "text",
        *parts,
        classes=len(letters),
        width=16,
        tokens=TOKENS,
        batch=32,
        validation_windows=64,
        learning_rate=0.03,
    )


def _split(inputs: Tensor, targets: Tensor, rows: int, generator: torch.Generator) -> tuple[Data, Data]:
    """The first so many rows in a random order, and the rest."""
    order = torch.randperm(len(inputs), generator=generator)
    first, rest = order[:rows], order[rows:]
    return Data(inputs[first], targets[first]), Data(inputs[rest], targets[rest])


TASKS: Mapping[str, Callable[[], LearningTask]] = {"synthetic": synthetic, "digits": digits, "text": text}


def make_task(name: str) -> LearningTask:
    """The task of that name; raises ValueError for one that does not exist, ImportError where its data are not installed."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]()
