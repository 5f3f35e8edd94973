"""The objective of a minibatch with its graph, for checks that recompute gradients and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class LossRows:
    """Inputs of PPO's losses in the N rows of a minibatch that count.

    Attributes:
        log_ratio, log_probs, values: [N], of the policy now, with graph.
        entropy: of the policy now, [N] or its mean, 0-d, with graph.
        advantages: [N], as they multiply the ratio.
        old_values, returns: [N], the critic's estimates at collection and its targets.
        raw_advantages: [N], before they were normalised over the minibatch; None where they are not known.
        clip: range of the ratio; None for a policy gradient without a ratio.
        clip_value: range of the values; None where they are not clipped.
        clip_maximum: the value loss of a row is the larger one of that of the value and that of the clipped value.
        unmasked_entropy: of the policy without its action masks, [N]; None unless that is what it returns as its entropy.
        padding: rows of the minibatch that do not count, as a mistaken loss reads them; None where there are none.
    """

    log_ratio: Tensor
    log_probs: Tensor
    values: Tensor
    entropy: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor
    raw_advantages: Tensor | None = None
    clip: float | None = None
    clip_value: float | None = None
    clip_maximum: bool = True
    unmasked_entropy: Tensor | None = None
    padding: LossRows | None = None


class MinibatchForward(NamedTuple):
    """A forward pass of a minibatch.

    Attributes:
        policy: that passes it.
        rows: takes the policy, or a copy of it, and returns a context in which the pass's graph is valid; it leaves no trace in training.
            It can be pickled where its inputs can.
    """

    policy: nn.Module
    rows: Callable[[Any], AbstractContextManager[LossRows]]


@dataclass(frozen=True, slots=True)
class MinibatchObjective:
    """Event: a minibatch that the trainer learns from next, at the weights before its step. Valid until that step.

    Attributes:
        epoch, step: pass over the rollout and optimizer step within the update, from 0.
        steps: number of steps that an update has, unless it stops early; None where it is not known.
        forward: returns the pass over the minibatch; None where the source cannot take one.
        coefficients: weights of the losses `policy`, `value` (half the squared error) and `entropy` (its negative mean).
        parameters: trainable parameters by name.
        optimizer: takes the step.
        max_norm: limit of the gradient's global norm by the trainer's settings; None where nothing is clipped.
        learning_rate: by the trainer's settings and schedule; None where the optimizer's own is meant.
        gradient_step: steps of this optimizer so far; None where they are not counted.
        terms: gradients [d] of the terms, float64, from a source that has no `forward`, with coefficients that replace the others; returns
            None where it cannot give them.
        value_gradient: returns the gradient [N] of the trainer's loss at the values, once its backward pass is over; None where it is not
            known.
        by_name: the numbers come from variables that were found by their names: only a difference that a known mistake explains counts,
            and clipping is known only with a `max_norm`.
    """

    epoch: int
    step: int
    steps: int | None
    forward: Callable[[], MinibatchForward] | None
    coefficients: Mapping[str, float]
    parameters: Mapping[str, Tensor]
    optimizer: Optimizer
    max_norm: float | None
    learning_rate: float | None
    gradient_step: int | None
    terms: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, float]] | None] | None = None
    value_gradient: Callable[[], Tensor | None] = lambda: None
    by_name: bool = False
