"""The network that a script acts with: its inputs before each step of the environments, and its mode.

Shapes: T steps, B environments, N rows of a minibatch, n inputs of the first layer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from esper_telemetry.equations.transitions import checksums
from esper_telemetry.metrics.statistics import are_among

MAX_INPUT_ENTRIES = 1 << 22
"""Entries of the inputs of one rollout that are copied."""

MAX_GRAPH_ENTRIES = 1 << 14
"""Largest number of input entries that are copied for a convolution, or for a layer with a graph, which may be training on a minibatch."""

MAX_LAYERS = 16
"""Layers of the acting network that are known."""

SAME_INPUT = 1e-5
"""Largest difference between equal inputs, relative to the largest input."""

MIN_GROUP = 3
"""Rows that suffice to decide whether inputs are other inputs scaled and shifted."""

MIN_SCALED = 0.95
"""Share of groups and inputs that must fit, because normalisers clip a few."""

DRIFT_STEPS, DRIFT = 8, 1e-3
"""Steps within which running statistics change by at most this share of the variance."""

MIN_SHARE = 0.5
"""Share of rows with different inputs above which a script acts on other observations than it trains on."""


MAX_UPDATES, MAX_UPDATE_ROWS = 4, 1 << 15
"""Earlier updates, and rows of each, whose inputs are compared with the rows of a loss."""

MIN_TRAINED_SHARE = 0.25
"""Share of the rows of a loss from which a memory has not been cleared: half in the second update, more later. Single rows are equal by
chance, or because the states of the task are few."""

SAME_CHECKSUM = 1e-9
"""Largest difference between checksums of equal inputs, relative to the largest checksum."""


class Acting(NamedTuple):
    """The inputs and the network that a script acted with.

    Attributes:
        inputs: [T, B, n], of the first layer.
        weights: of the layers of the network.
        training: the network was in training mode.
    """

    inputs: Tensor
    weights: list[weakref.ref[Tensor]]
    training: bool

    def difference(
        self, inputs: Tensor | None, rows: Tensor, observations: Tensor | None, trained: Sequence[Tensor], modules: Iterable[nn.Module]
    ) -> str | None:
        """Return the hypothesis of `replayed_log_probs` that explains why training computes other log-probabilities; None without any.

        Args:
            inputs: [N, n], of the first layer in training.
            rows: [N], their transitions, counted time by time.
            observations: [T, B, ...], stored ones; None if they are not known.
            trained: parameters.
            modules: of the script.
        """
        size = self.inputs.shape[2]
        if inputs is not None and len(inputs) == len(rows) and inputs.numel() == len(rows) * size:
            device = self.inputs.device
            acted, own = self.inputs.reshape(-1, size)[rows.to(device)].double(), inputs.reshape(-1, size).to(device).double()
            limit = SAME_INPUT * max(1.0, float(acted.abs().max()))
            others = ((acted - own).abs() > limit).any(1)
            if float(others.double().mean()) > MIN_SHARE:
                factor = (acted * own).sum() / acted.square().sum().clamp(min=SAME_INPUT)
                if float((factor * acted - own).abs().max()) <= SAME_INPUT * float(own.abs().max()):
                    return "other_scale"
                scaled = are_scaled(acted.unsqueeze(0), own.unsqueeze(0))
                if not scaled and observations is not None and observations.numel() == self.inputs.numel():
                    stored = observations.reshape(self.inputs.shape).to(device).double()
                    scaled = are_scaled(self.inputs.double(), stored) or _scales_drift(self.inputs.double(), stored)
                return "other_statistics" if scaled else "other_observations"
        weights = [weight for one in self.weights if (weight := one()) is not None]
        # a copy of the policy may be up to date
        known = [any(one.shape == weight.shape and torch.equal(one, weight) for one in trained) for weight in weights]
        if trained and weights and not any(known):
            return "older_weights"
        parts = [part for module in modules for part in module.modules()]
        random = any(isinstance(part, _DropoutNd) and part.p > 0 and part.training for part in parts)
        modes = any(isinstance(part, _DropoutNd | _BatchNorm) and part.training != self.training for part in parts)
        return "other_mode" if modes else "random_passes" if random else None


def _scales_drift(acted: Tensor, stored: Tensor) -> bool:
    """Return True if inputs [T, B, n] are the stored ones, shifted and scaled by numbers that hardly change between steps."""
    whole = len(acted) // DRIFT_STEPS * DRIFT_STEPS
    delayed = torch.isclose(acted[1:], stored[:-1]).all(-1), torch.isclose(acted[:-1], stored[1:]).all(-1)
    if not whole or max(float(one.double().mean()) for one in delayed) > MIN_SHARE:
        return False
    one, other = (part[:whole].unflatten(0, (-1, DRIFT_STEPS)).transpose(1, 2).flatten(0, 1) for part in (acted, stored))
    return are_scaled(one, other, tolerance=DRIFT)


def are_scaled(acted: Tensor, own: Tensor, tolerance: float = SAME_INPUT) -> bool:
    """Return True if inputs [K, M, n] are the other inputs, scaled and shifted.

    The numbers may differ between the K groups, as running statistics do between steps.
    """
    if acted.shape[1] < MIN_GROUP:
        return False
    one, other = acted - acted.mean(1, keepdim=True), own - own.mean(1, keepdim=True)
    sizes = one.square().sum(1) * other.square().sum(1)
    varies = sizes > SAME_INPUT**2
    squares = (one * other).sum(1).square()[varies] / sizes[varies]
    return bool(squares.numel()) and float((squares > 1 - tolerance).double().mean()) > MIN_SCALED


def change_of(acted: Tensor, own: Tensor) -> str | None:
    """Return the hypothesis by which the actions [M, n] of the loss come from those that were acted on; None if no known change does."""
    if bool((acted != acted.round()).any()) and any(torch.equal(own, change(acted)) for change in (torch.trunc, torch.round, torch.floor)):
        return "whole_actions"
    if torch.equal(own, acted.clamp(own.amin(0), own.amax(0))):
        return "cut_actions"
    return "scaled_actions" if are_scaled(acted.unsqueeze(0), own.unsqueeze(0)) else None


class ActingLog:
    """Records the first layer that a script calls after each step of its environments."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._pending: Tensor | None = None
        self._weights: dict[int, weakref.ref[Tensor]] = {}
        self._training = False
        self._entries = 0

    def add(self, layer: nn.Module, inputs: Tensor, *, has_graph: bool) -> bool:
        """Record a call of a layer that may act, and return whether it is the first one for the next step of the environments.

        `has_graph`: its output has one, so that it may be training.
        """
        if self._pending is not None and self._steps:
            return False  # neither its inputs nor its weights would be kept
        is_convolution = isinstance(layer, nn.Conv2d)
        if (has_graph or is_convolution) and inputs.numel() > MAX_GRAPH_ENTRIES:
            return False
        # reading the weight of a parametrised layer computes it, and may change the layer's buffers
        weight = layer._parameters.get("weight")
        if not self._steps and isinstance(weight, Tensor) and len(self._weights) < MAX_LAYERS:
            self._weights.setdefault(id(weight), weakref.ref(weight))
        if self._pending is not None or self._entries + inputs.numel() > MAX_INPUT_ENTRIES:
            return False
        size = inputs.shape[-3:].numel() if is_convolution else inputs.shape[-1]
        self._pending, self._training = inputs.detach().reshape(-1, size).clone(), layer.training
        return True

    def before_backward(self) -> None:
        """Treat all calls since the last step of the environments as training."""
        self._pending = None
        if not self._steps:
            self._weights.clear()

    def after_env_step(self) -> None:
        """The environments have taken a step, with the actions of the network."""
        if self._pending is not None:
            self._steps.append(self._pending)
            self._entries += self._pending.numel()
            self._pending = None

    def take(self, steps: int, envs: int) -> Acting | None:
        """Return what was recorded since the last call; None if it does not fit a rollout of T steps of B environments."""
        recorded = [one for one in self._steps if len(one) == envs]
        acting = None
        if steps and len(recorded) == steps and len({one.shape for one in recorded}) == 1:
            acting = Acting(torch.stack(recorded), list(self._weights.values()), self._training)
        self._steps, self._pending, self._entries = [], None, 0
        self._weights.clear()
        return acting


class TrainedRows:
    """Recognises rows of a loss that an earlier update was trained on, and that no later step acted on, by checksums of inputs."""

    def __init__(self) -> None:
        self._earlier: deque[Tensor] = deque(maxlen=MAX_UPDATES)
        self._now: list[Tensor] = []
        self._tables: list[Tensor] = []  # of earlier updates, and acted on, sorted; empty without one of them

    def begin(self, acting: Acting | None) -> None:
        """Begin an update, with what was acted on since the last one."""
        if self._now:
            self._earlier.append(torch.cat(self._now)[:MAX_UPDATE_ROWS])
        self._now = []
        tables = [] if acting is None or not self._earlier else [torch.cat([*self._earlier]), checksums(acting.inputs.float()).flatten()]
        self._tables = [table.sort().values for table in tables]

    def add(self, inputs: Tensor) -> Tensor | None:
        """Return which rows [N] of a loss were trained on before, by the checksums of their inputs; None if none is known."""
        if sum(map(len, self._now)) < MAX_UPDATE_ROWS:
            self._now.append(inputs)
        if not self._tables:
            return None
        earlier, acted = (are_among(inputs, table.to(inputs.device)[None], SAME_CHECKSUM)[0] for table in self._tables)
        repeated = earlier & ~acted
        is_share = bool(acted.any()) and float(repeated.float().mean()) >= MIN_TRAINED_SHARE
        return repeated if is_share else None
