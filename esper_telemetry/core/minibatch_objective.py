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
        log_ratio, log_probs, values: [N], from the present policy, with graph.
        entropy: entropy of the present policy, [N] or its mean, 0-d, with graph.
        advantages: [N], as they multiply the ratio.
        old_values, returns: [N], the critic's estimates at collection and its targets.
        raw_advantages: [N], before they were normalised over the minibatch; None if they are not known.
        clip: range of the ratio; None for a policy gradient without a ratio.
        clip_value: range of the values; None if they are not clipped.
        clip_maximum: the value loss of a row is the larger loss of the value and the clipped value.
        unmasked_entropy: entropy of the policy without its action masks, [N]; None unless the policy returns this as its entropy.
        padding: rows of the minibatch that do not count, as a mistaken loss would read them; None without padding.
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
        policy: policy of the pass.
        rows: takes the policy, or a copy of it, and returns a context in which the pass's graph is valid; it does not affect training.
            It can be pickled if its inputs can.
    """

    policy: nn.Module
    rows: Callable[[Any], AbstractContextManager[LossRows]]


@dataclass(frozen=True, slots=True)
class MinibatchObjective:
    """Event: the next minibatch that the trainer learns from, with the weights before its step. Valid until that step.

    Attributes:
        epoch, step: pass over the rollout and optimizer step within the update, from 0.
        steps: number of steps in an update, unless it stops early; None if it is not known.
        forward: returns the pass over the minibatch; None if the source cannot provide one.
        coefficients: weights of the losses `policy`, `value` (half the squared error) and `entropy` (its negative mean).
        parameters: trainable parameters by name.
        optimizer: optimizer that takes the step.
        max_norm: limit of the gradient's global norm by the trainer's settings; None if nothing is clipped.
        learning_rate: by the trainer's settings and schedule; None to use the optimizer's own.
        gradient_step: steps of this optimizer so far; None if they are not counted.
        terms: gradients [d] of the terms, float64, from a source without `forward`, with coefficients that replace the others; returns
            None if they are not available.
        value_gradient: returns the gradient [N] of the trainer's loss at the values, after its backward pass; None if it is not
            known.
        passes: backward passes before this one whose gradients the same step applies, as of the parts of a minibatch.
        cleared: the gradients of those passes, of other rows, have been cleared.
        by_name: whether the numbers come from variables identified by their names: then only a difference that a known mistake explains
            counts, and clipping is known only with a `max_norm`.
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
    passes: int = 0
    cleared: bool = False
