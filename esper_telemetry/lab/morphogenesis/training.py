"""Training of hosts and seeds: their tasks, the optimizers, one epoch with its validation, and the watchdog.

Optimizers work on rows of parameters, in place: each row has its own clipping, moments and step count. All environments share data that
are made once. The watchdog finds hosts whose validation loss has broken, which then get older weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.network import Mixing, Network, Views

SGD_MOMENTUM = 0.9
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


class AdamMoments(NamedTuple):
    """Optimizer state of R rows: first and second moments [R, size] and step counts [R]; R may be several axes."""

    first: Tensor
    second: Tensor
    steps: Tensor

    @staticmethod
    def of(rows: Tensor) -> AdamMoments:
        """Return the state of new parameters."""
        return AdamMoments(torch.zeros_like(rows), torch.zeros_like(rows), torch.zeros_like(rows[..., 0]))

    def clear(self, where: Tensor) -> None:
        """Zero the selected rows [R]."""
        for part in self:
            part.masked_fill_(where.view(*where.shape, *[1] * (part.dim() - where.dim())), 0.0)


def clip(gradients: Tensor, limit: float) -> Tensor:
    """Clip rows of gradients [..., size] to that norm, in place; return the norms [...] before clipping."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=-1)
    gradients.mul_((limit / (norms + 1e-6)).clamp(max=1.0).unsqueeze(-1))
    return norms


def adam(rows: Tensor, gradients: Tensor, moments: AdamMoments, rate: float, where: Tensor) -> None:
    """Take one step (Kingma & Ba 2015) in the selected rows [R]; the others and their moments are not changed."""
    on = where.to(rows.dtype).unsqueeze(-1)
    steps = moments.steps.add_(where).clamp(min=1).unsqueeze(-1)
    moments.first.lerp_(gradients, on * (1 - ADAM_BETAS[0]))
    moments.second.lerp_(gradients.square(), on * (1 - ADAM_BETAS[1]))
    first, second = (1 - beta**steps for beta in ADAM_BETAS)
    size = moments.second.sqrt().mul_(second.rsqrt()).add_(ADAM_EPS)
    rows.addcdiv_(moments.first * (on * rate / first), size, value=-1.0)


def sgd(rows: Tensor, gradients: Tensor, moments: AdamMoments, rate: float, where: Tensor) -> None:
    """Take one step with momentum in the selected rows [R]."""
    on = where.to(rows.dtype).unsqueeze(-1)
    moments.steps.add_(where)
    moments.first.lerp_(moments.first * SGD_MOMENTUM + gradients, on)
    rows.addcmul_(moments.first, on, value=-rate)


Optimizer = Callable[[Tensor, Tensor, AdamMoments, float, Tensor], None]
OPTIMIZERS: Mapping[str, Optimizer] = {"adam": adam, "sgd": sgd}


WATCHDOG_WINDOW_EPOCHS, WATCHDOG_MIN_EPOCHS = 20, 10
"""Losses in the watchdog's history, and the number it needs."""

DIVERGENCE_SIGMAS, DIVERGENCE_FACTOR, MIN_DIVERGENT_LOSS, DIVERGENCE_EPOCHS = 6.0, 3.0, 12.0, 3
"""A loss diverges beyond this many standard deviations, multiples of the mean, and this value, for this many epochs in a row."""

MAX_LEARNED_LOSS_FRAC, CHANCE_LOSS_TOLERANCE = 0.6, 0.065
"""In a lobotomy, a host whose loss was below this fraction of the loss of guessing returns to within this fraction of it."""


class TrainingWatchdog(NamedTuple):
    """History of the losses [N, WATCHDOG_WINDOW_EPOCHS], NaN for missing ones, and consecutive divergences [N]."""

    losses: Tensor
    strikes: Tensor

    @staticmethod
    def fresh(envs: int, device: torch.device) -> TrainingWatchdog:
        """Return an empty history."""
        return TrainingWatchdog(torch.full((envs, WATCHDOG_WINDOW_EPOCHS), torch.nan, device=device), torch.zeros(envs, device=device))

    def cleared(self, where: Tensor) -> TrainingWatchdog:
        """Return a history that is empty for the selected environments [N]."""
        return TrainingWatchdog(self.losses.masked_fill(where.unsqueeze(1), torch.nan), self.strikes.masked_fill(where, 0.0))


class WatchdogVerdict(NamedTuple):
    """Broken hosts [N], by reason, and hosts whose loss is stable: neither unusual nor above the mean of its history."""

    nonfinite: Tensor
    lobotomy: Tensor
    divergence: Tensor
    stable: Tensor

    @property
    def panic(self) -> Tensor:
        """Hosts broken for any reason."""
        return self.nonfinite | self.lobotomy | self.divergence


def watch_losses(watch: TrainingWatchdog, loss: Tensor, classes: int) -> tuple[TrainingWatchdog, WatchdogVerdict]:
    """Compare the losses [N] of an epoch with the history; unusual losses do not enter it."""
    count = watch.losses.isfinite().sum(1)
    mean = watch.losses.nan_to_num().sum(1) / count.clamp(min=1)
    spread = ((watch.losses - mean.unsqueeze(1)).nan_to_num().square().sum(1) / count.clamp(min=1)).sqrt()
    nonfinite, enough, chance = ~loss.isfinite(), count >= WATCHDOG_MIN_EPOCHS, log(classes)
    lobotomy = enough & (mean < MAX_LEARNED_LOSS_FRAC * chance) & ((loss - chance).abs() < CHANCE_LOSS_TOLERANCE * chance)
    far = enough & (loss > MIN_DIVERGENT_LOSS) & (loss > mean + DIVERGENCE_SIGMAS * spread) & (loss > DIVERGENCE_FACTOR * mean)
    strikes = torch.where(far, watch.strikes + 1, 0.0)
    unusual = nonfinite | lobotomy | far
    losses = torch.where(unusual.unsqueeze(1), watch.losses, torch.cat([watch.losses[:, 1:], loss.unsqueeze(1)], 1))
    stable = ~unusual & ((count == 0) | (loss <= mean))
    return TrainingWatchdog(losses, strikes), WatchdogVerdict(nonfinite, lobotomy, strikes >= DIVERGENCE_EPOCHS, stable)


WINDOW_TOKENS = 16
"""Characters in a window of text."""


@dataclass(frozen=True, slots=True)
class Data:
    """Examples of a task: rows of inputs [M, inputs], float32, and their classes [M]; windows of `tokens` rows stay together."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A data set, and the host that learns it.

    Attributes:
        train, validation: examples, without common rows.
        classes: number of classes of the rows.
        width: units of the host's hidden layers.
        tokens: rows of a window; 1 if rows are independent.
        linear: whether the host lacks activations.
        batch: windows per minibatch.
        train_batches: minibatches per epoch.
        validation_windows: maximum number of windows for validation.
        learning_rate: learning rate of hosts and seeds.
        price: accuracy charged for as many parameters in seeds as the host has.
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
        """Return the task with its data on that device, and with at most `validation_windows` windows for validation."""
        rows = self.validation_windows * self.tokens
        train, validation = (
            Data(data.inputs[:limit].to(device), data.targets[:limit].to(device))
            for data, limit in ((self.train, None), (self.validation, rows))
        )
        return replace(self, train=train, validation=validation)


def synthetic() -> LearningTask:
    """Return the task `synthetic`: three arms of a spiral, lifted to 16 noisy dimensions, too curved for a narrow host."""
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
    """Return the task `digits`: a handwritten digit modulo three, on the 1,797 images of 8 x 8 pixels of scikit-learn.

    Digits with the same remainder do not look alike, so a host without activations cannot separate them.

    Raises:
        ImportError: scikit-learn is missing.
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
    """Return the task `text`: the next character of a short story, in windows of 16; accuracy is per character."""
    story = Path(__file__).with_name("text.txt").read_text(encoding="utf-8").lower()
    letters = sorted(set(story))
    codes = torch.tensor([letters.index(letter) for letter in story])
    windows = codes.unfold(0, WINDOW_TOKENS + 1, 4)
    rows = len(windows) // 5  # the end of the story, without the windows that overlap both parts
    train, validation = windows[: -rows - WINDOW_TOKENS // 4], windows[-rows:]
    place = torch.eye(WINDOW_TOKENS)

    def data(rows: Tensor) -> Data:
        inputs = torch.cat([F.one_hot(rows[:, :-1], len(letters)).float(), place.expand(len(rows), -1, -1)], -1)
        return Data(inputs.flatten(0, 1), rows[:, 1:].flatten())

    parts = (data(train), data(validation))
    return LearningTask(
        "text", *parts, classes=len(letters), width=16, tokens=WINDOW_TOKENS, batch=32, validation_windows=64, learning_rate=0.03
    )


def _split(inputs: Tensor, targets: Tensor, rows: int, generator: torch.Generator) -> tuple[Data, Data]:
    """Return that many rows in a random order, and the rest."""
    order = torch.randperm(len(inputs), generator=generator)
    first, rest = order[:rows], order[rows:]
    return Data(inputs[first], targets[first]), Data(inputs[rest], targets[rest])


TASKS: Mapping[str, Callable[[], LearningTask]] = {"synthetic": synthetic, "digits": digits, "text": text}


def make_task(name: str) -> LearningTask:
    """Return the task with that name; raise ValueError for an unknown one, ImportError if its data are not installed."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]()


MAX_GRADIENT_NORM = 1.0
"""Clip limit of the gradient norm of a host, and of each seed separately."""


class Weights(NamedTuple):
    """Parameters and optimizer state, written to in place.

    Attributes:
        rows: [N, 1 + S, size], a host in the first row of each network, its seeds in the others; zero elsewhere.
        moments: optimizer state of the rows.
    """

    rows: Tensor
    moments: AdamMoments


class Epoch(NamedTuple):
    """Results of an epoch, over all its minibatches; norms are taken before clipping.

    Attributes:
        loss, accuracy: [N], on the training data, before each step.
        host_norm: [N], mean.
        seed_norm, seed_peak: [N, S], mean and largest.
        tensor_norm, tensor_peak: [N, S, parameters], the same for each parameter of a seed.
        upstream: [N, S], mean norm of the loss's gradient with respect to a seed's effect.
    """

    loss: Tensor
    accuracy: Tensor
    host_norm: Tensor
    seed_norm: Tensor
    seed_peak: Tensor
    tensor_norm: Tensor
    tensor_peak: Tensor
    upstream: Tensor


def gradients(network: Network, weights: Views, data: Data, mixing: Mixing, into: Views) -> tuple[Tensor, Tensor]:
    """Write the gradients of every network's mean cross-entropy over M rows of data.

    Returns the log-probabilities [N, classes, M], and the gradient norms at the seeds' effects [N, S].
    """
    passed = network.forward(weights, data.inputs, mixing)
    logs = passed.logits.log_softmax(1)
    slope = logs.exp()
    slope.scatter_add_(1, _wide(data.targets, slope), torch.full_like(slope[:, :1], -1.0))
    return logs, network.backward(weights, passed, slope.div_(len(data.targets)), mixing, into)


def scores(logs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row and its accuracy, 1 or 0, [N, M], from log-probabilities [N, classes, M] and classes [M]."""
    own = logs.gather(1, _wide(targets, logs)).squeeze(1)
    return -own, (own >= logs.amax(1)).to(logs.dtype)


def minibatches(task: LearningTask, generator: torch.Generator) -> list[Data]:
    """Return the minibatches of an epoch: windows in a random order, the same for all networks."""
    tokens, limit = task.tokens, task.train_batches * task.batch
    windows = len(task.train.targets) // tokens
    order = torch.randperm(windows, generator=generator, device=generator.device)[:limit]
    rows = (order.unsqueeze(1) * tokens + torch.arange(tokens, device=order.device)).flatten()
    parts = (task.train.inputs[rows].split(task.batch * tokens), task.train.targets[rows].split(task.batch * tokens))
    return [Data(*pair) for pair in zip(*parts, strict=True)]


@torch.no_grad()
def train_epoch(
    network: Network, weights: Weights, batches: Sequence[Data], mixing: Mixing, *, learning: Tensor, optimizer: Optimizer, rate: float
) -> Epoch:
    """Train the hosts, and the seeds selected by `learning` [N, S], for one epoch."""
    slopes = torch.zeros_like(weights.rows)
    views, into = network.views(weights.rows), network.views(slopes)
    where = torch.cat([torch.ones_like(learning[:, :1]), learning], 1)
    logs, norms, unclipped, upstream = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for data in batches:
        log_probs, norm = gradients(network, views, data, mixing, into)
        unclipped.append(slopes[:, 1:].clone())
        norms.append(clip(slopes, MAX_GRADIENT_NORM))
        optimizer(weights.rows, slopes, weights.moments, rate, where)
        logs.append(log_probs)
        upstream.append(norm)
    loss, right = scores(torch.cat(logs, 2), torch.cat([data.targets for data in batches]))
    norm, peak = torch.stack(norms).mean(0), torch.stack(norms).amax(0)
    tensors = network.seed.norms(torch.stack(unclipped))
    return Epoch(
        loss=loss.mean(1),
        accuracy=right.mean(1),
        host_norm=norm[:, 0],
        seed_norm=norm[:, 1:],
        seed_peak=peak[:, 1:],
        tensor_norm=tensors.mean(0),
        tensor_peak=tensors.amax(0),
        upstream=torch.stack(upstream).mean(0),
    )


@torch.no_grad()
def validate(network: Network, rows: Tensor, data: Data, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy, [N, 2^S] each, with every subset of the seeds switched off: seed s in columns with bit s set."""
    occupied = [slot for slot, who in enumerate(mixing.who) if who]
    logits = network.forward(network.views(rows), data.inputs, mixing, subsets=True).logits
    by_row = scores(logits.log_softmax(1), data.targets.repeat(2 ** len(occupied)))
    columns = [sum((subset >> slot & 1) << place for place, slot in enumerate(occupied)) for subset in range(2**network.slots)]
    loss, accuracy = (part.unflatten(1, (-1, len(data.targets))).mean(2)[:, columns] for part in by_row)
    return loss, accuracy


def _wide(targets: Tensor, like: Tensor) -> Tensor:
    """Return classes [M] as an index [N, 1, M]."""
    return targets.expand(len(like), 1, -1)
