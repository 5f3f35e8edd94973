"""Terms of a loss, as its graph shows them.

Shapes: N rows of the minibatch, A actions, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script.autograd_graph import ROUNDING, LayerOutputs


class PolicyTerm(NamedTuple):
    """The policy's term of a loss.

    Attributes:
        log_ratio: [N]; None for a policy gradient without a ratio.
        advantages: [N], as they multiply the ratio, or the log-probability.
        clip: range of the ratio around 1; None if it is not clipped.
        loss: 0-d, without its weight; None if the graph does not keep its rows.
        weight: of the loss.
        valid: [N], bool: rows that count; None if every row does.
        edge: edge of the graph at which gradients of the log-ratio, or of the log-probability, continue.
        log_probs: [N], of the actions now; None if the graph does not show them.
        inverted: the loss has the ratio of the old policy to the new one; `log_ratio` is new to old.
        attached: edge at which gradients of the advantages continue, of their negatives if `negated`; None if, correctly, detached.
        reshaped: this term or a related one multiplies a function of the ratio other than a clip: the loss is not PPO's.
        stored: [N], log-probabilities at collection, if the ratio is not their exponential difference.
        log_ratios: [N, D], if each action dimension has its own ratio; `log_ratio` and `log_probs` are the sums.
        by_row: the loss adds a term of each row; `edge` is of the first one.
        pairs: the ratio is [N, N], of each new log-probability to each old one, or of all actions in each row, and `log_ratio` is a mean
            of it; or a product of each log-probability and each advantage is.
    """

    log_ratio: Tensor | None
    advantages: Tensor
    clip: float | None
    loss: Tensor | None
    weight: float
    valid: Tensor | None
    edge: GradientEdge
    log_probs: Tensor | None
    inverted: bool = False
    attached: GradientEdge | None = None
    negated: bool = False
    reshaped: bool = False
    log_ratios: Tensor | None = None
    by_row: bool = False
    pairs: bool = False
    stored: Tensor | None = None

    def preferred(self, other: PolicyTerm) -> PolicyTerm:
        """Return the term that has a ratio and is not reshaped, or the first if they are equal.

        If the other term is reshaped, the loss is not PPO's, and the returned term is marked as reshaped too.
        """
        first, second = sorted((self, other), key=lambda one: (one.log_ratio is None, one.reshaped))
        return first._replace(loss=None, clip=None, reshaped=True) if second.reshaped else first

    @property
    def old_log_probs(self) -> Tensor | None:
        """[N], of the actions at collection. Without a ratio, a rollout is used once, before the policy changes."""
        if self.log_ratio is None or self.log_probs is None:
            return self.log_probs if self.log_ratio is None else None
        return self.log_probs - self.log_ratio if self.stored is None else self.stored


class ValueTerm(NamedTuple):
    """The critic's term of a loss.

    Attributes:
        values, returns: [N], current estimates, and their targets; `values` is None if the graph does not show them.
        old_values: [N], around which the values are clipped; None without a clip.
        clip: range of the values; None without one.
        kind: "squared", "Huber" or "absolute".
        edge: edge of the graph at which gradients of the values continue.
        loss: 0-d, without a weight: half the mean squared error, or the mean of a Huber loss.
        weight: of the loss; 0 for a critic that the loss leaves out.
        attached: edge at which gradients of the targets continue; None if, correctly, detached.
    """

    values: Tensor | None
    returns: Tensor | None
    old_values: Tensor | None
    clip: float | None
    kind: str
    edge: GradientEdge
    loss: Tensor | None = None
    weight: float = 0.0
    attached: GradientEdge | None = None


class EntropyTerm(NamedTuple):
    """The entropy's term of a loss.

    Attributes:
        entropies: [N], [N, D] or their mean; [N, A] of a softmax that the script computes itself, to be summed over choices.
        loss: 0-d, the negative mean over rows, without its weight.
        weight: of the loss; negative if entropy is penalised, 0 if it was computed and left out.
        edge: edge at which gradients of the entropies continue, of their negatives if `negated`; None without exactly one.
    """

    entropies: Tensor
    loss: Tensor
    weight: float
    edge: GradientEdge | None
    negated: bool = False

    def goes_with(self, other: EntropyTerm) -> bool:
        """Return whether the loss has the sum of both, as of two heads."""
        same = self.entropies.shape == other.entropies.shape and self.negated == other.negated
        return same and math.isclose(self.weight, other.weight, rel_tol=ROUNDING)

    def plus(self, other: EntropyTerm) -> EntropyTerm:
        """Return the sum."""
        return self._replace(entropies=self.entropies + other.entropies, loss=self.loss + other.loss, edge=None)


class PenaltyTerm(NamedTuple):
    """A divergence of the policy from the policy at collection, or an estimate of it, in a loss.

    Attributes:
        edges: of its parts, which are not linear in the outputs of the network.
        slopes: of the loss at these edges.
        weight: of the divergence; negative if the loss rewards it.
    """

    edges: Sequence[GradientEdge]
    slopes: Sequence[Tensor]
    weight: float

    @classmethod
    def of(cls, parts: Sequence[tuple[GradientEdge, Tensor, float | None]]) -> PenaltyTerm | None:
        """Return the penalty of some parts. The weight is of a part that is a divergence, if there is one, and of a log-ratio otherwise."""
        if not parts:
            return None
        edges, slopes, weights = zip(*parts, strict=True)
        known = [weight for weight in weights if weight is not None]
        weight = known[0] if known else -sum(float(slope.sum()) for slope in slopes)
        return cls(edges, slopes, weight) if weight else None


class LossReading(NamedTuple):
    """The terms of a loss.

    Attributes:
        total: 0-d, the loss itself; its negative if it is maximised.
        complete: the loss lacks other terms.
        left_out: the critic's estimates of these rows, if the loss does not depend on them; None otherwise.
        inputs: [N, ...], the network's inputs in these rows; None if the graph does not keep them.
        logits: [N, A], of a policy that computes its log-probabilities itself.
        actions: [N], whose log-probabilities it takes.
        source: of the logits.
        climbed: the optimizer maximises the loss; the terms belong to its negative.
        heads: distributions of its rows, if the script has used any for the log-probabilities.
        leaves: parameters that it depends on.
        penalty: on the divergence from the policy at collection, if any.
        taken: no optimizer applies the gradient, and the script itself does.
    """

    policy: PolicyTerm | None
    value: ValueTerm | None
    entropy: EntropyTerm | None
    total: Tensor
    complete: bool
    inputs: Tensor | None = None
    logits: Tensor | None = None
    actions: Tensor | None = None
    source: LayerOutputs | None = None
    left_out: ValueTerm | None = None
    climbed: bool = False
    heads: HeadColumns = HeadColumns()
    leaves: Sequence[Tensor] = ()
    penalty: PenaltyTerm | None = None
    taken: bool = False

    def columns(self) -> dict[str, Tensor | None]:
        """Return the columns [N] of a minibatch that its rollout has too, by role, with the current values."""
        policy, value = self.policy, self.value or self.left_out
        return {
            "log_probs": None if policy is None else policy.old_log_probs,
            "returns": None if value is None else value.returns,
            "values": None if value is None else value.values,
            "advantages": None if policy is None else policy.advantages,
        }

    @property
    def is_cleared(self) -> bool:
        """True if the script has cleared the gradients of its backward pass: no optimizer step can apply them."""
        if self.taken:
            return False
        can_be_zero = self.policy is not None and not bool(self.policy.advantages.any())
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        return not (can_be_zero or any(bool(gradient.any()) for gradient in gradients))

    @property
    def is_whole(self) -> bool:
        """True if the loss includes the policy's and the critic's terms, or leaves the critic out, and no other ones."""
        return self.complete and self.penalty is None and (self.value or self.left_out) is not None
