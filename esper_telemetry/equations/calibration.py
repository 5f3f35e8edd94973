"""Tests that a rollout's actions were drawn from their stored distributions.

Given everything before it, an action follows the stored distribution. So sums of f(a) - E f are martingales for any policy and any
environment. Each sum becomes a standard score: by Freedman's inequality for choices, exactly for Gaussians. A score of `Z_BOUND` has a
probability below 3e-11 in a rollout, so thousands of updates with hundreds of scores do not cause a false alarm. Scores of several
rollouts can be added (`ActionTotals`).

Shapes: T steps, B environments, A choices, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.log_probs import cut_bounds

Z_BOUND = 7.0
"""Standard score above which chance is ruled out. The largest of 2,000 simulated rollouts of 8 to 4,096 steps is 4.4."""

Z_EXPLAINED = 4.5
"""Standard score below which a hypothesis explains the actions: 99 % of simulated rollouts stay below 3.3."""

UNLIKELY_NATS = 8.0
"""Nats at which log-probabilities are clipped in a sum: one action of tiny probability is not evidence on its own."""

TAILS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Magnitudes of z; draws of a Gaussian beyond each of them are counted."""

TIE_SHARE = 1e-6
"""Allowed share of draws that rounding to float32 makes equal to the largest one, times |a| / std: about ten times the real share."""

MAX_ATANH = 4.0
"""Magnitude of a pre-tanh action above which float32 loses its digits; larger actions count only as being beyond this bound."""

MAX_CLASSES = 64
"""Largest number of choices that are counted one by one."""


@dataclass(frozen=True, slots=True)
class ActionInputs:
    """Actions of a rollout and their stored distributions, by head; float64 except `counted`.

    Attributes:
        actions: per head [T, B], choices in int64, or [T, B, D].
        log_probs: per categorical head [T, B, A], normalised; forbidden choices far below 0.
        means, std: per Gaussian head [T, B, D].
        counted: per head [T, B], bool: rows that are valid and in which the head took part.
        bounds: per bounded head [2, D].
    """

    actions: Mapping[str, Tensor]
    log_probs: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    std: Mapping[str, Tensor]
    counted: Mapping[str, Tensor]
    bounds: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, actions: Callable[[Tensor], Tensor], distributions: Callable[[Tensor], Tensor]) -> ActionInputs:
        """Return the inputs with other rows of the actions and of the distributions."""
        parts = {name: getattr(self, name) for name in ("log_probs", "means", "std")}
        return replace(
            self,
            actions={head: actions(part) for head, part in self.actions.items()},
            counted={head: actions(part) for head, part in self.counted.items()},
            **{name: {head: distributions(x) for head, x in part.items()} for name, part in parts.items()},
        )


Scores = dict[str, Tensor]
"""Standard scores by the name of the test, each [n]."""


def scores(inputs: ActionInputs) -> list[Scores]:
    """Return the scores of every head, under the hypothesis that its actions were drawn from its distributions."""
    return [
        *(categorical_scores(inputs.log_probs[h], inputs.actions[h], inputs.counted[h]) for h in inputs.log_probs),
        *({**gaussian_scores(z_of(inputs, h), inputs.counted[h]), **_end_scores(inputs, h)} for h in inputs.means),
    ]


def z_of(inputs: ActionInputs, head: str) -> Tensor:
    """Return (a - mean) / std, [T, B, D]."""
    return (inputs.actions[head] - inputs.means[head]) / inputs.std[head]


def largest(parts: list[Scores], *, without: tuple[str, ...] = ()) -> float:
    """Return the largest magnitude of all scores, except for the tests `without`."""
    numbers = [z.abs().max() for part in parts for name, z in part.items() if name not in without and z.numel()]
    return float(torch.stack(numbers).max()) if numbers else 0.0


def categorical_scores(log_probs: Tensor, actions: Tensor, counted: Tensor) -> Scores:
    """Return the scores of choices [T, B] under log-probabilities [T, B, A]; rows that are not counted are left out.

    `likelihood`: log-probability of the choices; `classes` [A]: number of each choice; `mode`: number of likeliest choices; `repeat`:
    choices equal to the previous step's choice; `neighbours`: choices equal to the previous environment's choice.
    """
    result = {name: bounded_score(*terms) for name, terms in categorical_terms(log_probs, actions, counted).items()}
    p = log_probs.exp()
    if p.shape[-1] <= MAX_CLASSES:
        residuals = torch.nn.functional.one_hot(actions, p.shape[-1]) - p
        classes = _by_class(residuals, p * (1 - p), counted.unsqueeze(-1).expand_as(p))
        result["classes"] = torch.cat([bounded_score(*columns) for columns in classes])
    return result


class Terms(NamedTuple):
    """Martingale differences, their variances given the past, their largest magnitude, and the rows that count."""

    residuals: Tensor
    variances: Tensor
    bound: float
    counted: Tensor


def categorical_terms(log_probs: Tensor, actions: Tensor, counted: Tensor) -> dict[str, Terms]:
    """Return the terms of the tests of `categorical_scores`, except for the tests of single choices."""
    p = log_probs.exp()
    f = log_probs.clamp(min=-UNLIKELY_NATS)
    mean = (p * f).sum(-1)
    variance = ((p * f.square()).sum(-1) - mean.square()).clamp(min=0.0)
    taken = f.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def agreement(rows: Tensor, drawn: Tensor, others: Tensor, at: Tensor) -> Terms:
        share = rows.gather(-1, others.unsqueeze(-1)).squeeze(-1)
        return Terms((drawn == others).to(share) - share, share * (1 - share), 1.0, at)

    return {
        "likelihood": Terms(taken - mean, variance, UNLIKELY_NATS, counted),
        "mode": agreement(p, actions, p.argmax(-1), counted),
        "repeat": agreement(p[1:], actions[1:], actions[:-1], counted[1:]),
        "neighbours": agreement(p[:, 1:], actions[:, 1:], actions[:, :-1], counted[:, 1:]),
    }


def gaussian_terms(z: Tensor, counted: Tensor) -> dict[str, Terms]:
    """Return the terms of the tests of `gaussian_scores`, except for the means; entries of z that do not count are 0."""
    at = counted.unsqueeze(-1).expand_as(z)
    z = torch.where(at, z, 0.0).clamp(-1e6, 1e6)
    ones = torch.ones_like(z)
    # (z² - 1) / √2 has the moments of a variable with bounded terms of this size (Laurent and Massart 2000, lemma 1)
    return {
        "spread": Terms((z.square() - 1) / math.sqrt(2.0), ones, 3 * math.sqrt(2.0), at),
        "repeat": Terms(z[1:] * z[:-1], z[:-1].square(), 1.0, at[1:]),
        "neighbours": Terms(z[:, 1:] * z[:, :-1], z[:, :-1].square(), 1.0, at[:, 1:]),
    }


def _by_class(residuals: Tensor, variances: Tensor, counted: Tensor) -> list[Terms]:
    columns = zip(residuals.unbind(-1), variances.unbind(-1), counted.unbind(-1), strict=True)
    return [Terms(residual, variance, 1.0, at) for residual, variance, at in columns]


def bounded_score(residuals: Tensor, variances: Tensor, bound: float, counted: Tensor) -> Tensor:
    """Return z [1] with P(|sum| as large) <= 2 exp(-z²/2), for martingale differences of magnitude `bound` (Freedman 1975, theorem 1.6)."""
    total = torch.where(counted, residuals, 0.0).sum()
    variance = torch.where(counted, variances, 0.0).sum() + bound * total.abs() / 3
    return (total / variance.clamp(min=1e-12).sqrt()).reshape(1)


def gaussian_scores(z: Tensor, counted: Tensor) -> Scores:
    """Return the scores of z [T, B, D] under a standard normal distribution; rows that are not counted are left out.

    `mean` and `spread` [D]: mean and variance of each dimension; `tails`: draws beyond each of `TAILS`; `repeat`: correlation with
    the previous step; `neighbours`: correlation with the previous environment.
    """
    at = counted.unsqueeze(-1)
    z = torch.where(at, z, 0.0).clamp(-1e6, 1e6)
    count = counted.sum().clamp(min=1).double()
    sizes = torch.tensor(TAILS, dtype=z.dtype, device=z.device).view(-1, 1)
    beyond = (z.abs().flatten(0, 1).unsqueeze(0) > sizes.unsqueeze(1)).sum(1).double()
    return {
        "tails": binomial_score(beyond, 2 * torch.special.ndtr(-sizes).expand_as(beyond), count).flatten(),
        "mean": z.sum((0, 1)) / count.sqrt(),
        "spread": chi_square_score(z.square().sum((0, 1)), count),
        "repeat": _product_score(z[1:], z[:-1]),
        "neighbours": _product_score(z[:, 1:], z[:, :-1]),
    }


def binomial_score(hits: Tensor, share: Tensor, count: Tensor) -> Tensor:
    """Return z with P(as many hits, or as few) <= exp(-z²/2), for `count` draws with these mean probabilities of a hit (Chernoff 1952)."""
    rate, share = hits / count, share.clamp(1e-12, 1 - 1e-12)
    divergence = torch.xlogy(rate, rate / share) + torch.xlogy(1 - rate, (1 - rate) / (1 - share))
    return (rate - share).sign() * (2 * count * divergence.clamp(min=0.0)).sqrt()


def _end_scores(inputs: ActionInputs, head: str) -> Scores:
    """Return the scores [2 D] of the smallest and the largest draw: how many others equal it exactly, and how extreme it is."""
    counted, actions = inputs.counted[head], inputs.actions[head][inputs.counted[head]]
    count = counted.sum().double()
    if not len(actions):
        return {}
    ends = torch.stack([actions.amin(0), actions.amax(0)])
    ties = (actions == ends.unsqueeze(1)).sum(1).double() - 1
    ordered = actions.sort(0).values
    inside = (ordered[1:] == ordered[:-1]) & (ordered[1:] != ends[0]) & (ordered[1:] != ends[1])
    # coarse numbers, such as bfloat16, are equal everywhere and not only at the ends
    rounding = TIE_SHARE * actions.abs().amax(0) / inputs.std[head][counted].amin(0) + 2 * inside.double().mean(0)
    edges = (ends.unsqueeze(1) - inputs.means[head][counted]) / inputs.std[head][counted]
    # the distribution function at the largest draw is uniform, so its negative logarithm is exponential
    extent = -torch.special.log_ndtr(torch.stack([-edges[0], edges[1]])).sum(1)
    return {"ties": binomial_score(ties, rounding.expand_as(ties), count).clamp(min=0.0).flatten(), "extent": (2 * extent).sqrt().flatten()}


def chi_square_score(total: Tensor, count: Tensor) -> Tensor:
    """Return the standard score of a chi-square with `count` degrees of freedom (Wilson and Hilferty 1931)."""
    spread = 2.0 / (9.0 * count)
    return ((total / count).pow(1 / 3) - (1 - spread)) / spread.sqrt()


def _product_score(own: Tensor, other: Tensor) -> Tensor:
    """Score [1] of Σ own · other, if `own` is independent given `other`."""
    return ((own * other).sum() / (other.square().sum() + 1.0).sqrt()).reshape(1)


# Hypotheses: each returns its largest score, which is small if it explains the actions; None if it does not apply.


def deterministic(inputs: ActionInputs) -> float | None:
    """0 if every action is the most likely choice, or the mean."""
    for head, log_probs in inputs.log_probs.items():
        chosen = log_probs.gather(-1, inputs.actions[head].unsqueeze(-1)).squeeze(-1)
        if bool((inputs.counted[head] & (chosen < log_probs.amax(-1) - 1e-6)).any()):
            return None
    for head in inputs.means:
        if bool((z_of(inputs, head).abs().amax(-1)[inputs.counted[head]] > 1e-3).any()):
            return None
    return 0.0


def independent(inputs: ActionInputs) -> float | None:
    """Score of the actions' agreement with the distributions, minus the agreement of the same actions in another order."""
    if deterministic(inputs) is not None:
        return None
    numbers = [_independent_choices(inputs, head) for head in inputs.log_probs]
    numbers += [_independent_numbers(inputs, head) for head in inputs.means]
    return None if not numbers or any(x is None for x in numbers) else max(x for x in numbers if x is not None)


def _independent_choices(inputs: ActionInputs, head: str) -> float | None:
    log_probs, actions, counted = inputs.log_probs[head], inputs.actions[head], inputs.counted[head]
    own = categorical_scores(log_probs, actions, counted)
    if largest([own], without=("repeat", "neighbours")) <= Z_BOUND:
        return None  # only their order in time, or among environments, is wrong
    allowed = (log_probs > -1e4).to(log_probs)
    chosen = torch.nn.functional.one_hot(actions, log_probs.shape[-1]).to(log_probs)
    share = (chosen * counted.unsqueeze(-1)).sum((0, 1)) / (allowed * counted.unsqueeze(-1)).sum((0, 1)).clamp(min=1.0)
    fixed = (allowed * share).clamp(min=1e-12)
    fixed = fixed / fixed.sum(-1, keepdim=True)
    f = log_probs.clamp(min=-UNLIKELY_NATS)
    mean = (fixed * f).sum(-1)
    variance = ((fixed * f.square()).sum(-1) - mean.square()).clamp(min=0.0)
    order = bounded_score((chosen * f).sum(-1) - mean, variance, UNLIKELY_NATS, counted)
    step = _step_scores(log_probs.exp(), actions, counted, fixed)
    return largest([{**categorical_scores(fixed.log(), actions, counted), **step, "order": order}], without=("mode",))


def _independent_numbers(inputs: ActionInputs, head: str) -> float | None:
    actions, means, counted = inputs.actions[head], inputs.means[head], inputs.counted[head]
    rows, predicted = actions[counted], means[counted]
    if len(rows) < 8:
        return None
    centred = actions - rows.mean(0)
    spread = rows.std(0).clamp(min=1e-12)
    order = {name: z for name, z in gaussian_scores(centred / spread, counted).items() if name in ("repeat", "neighbours")}
    unit = torch.tensor([[-1.0], [1.0]], dtype=rows.dtype, device=rows.device).expand(2, rows.shape[-1])
    uniform = [_uniform_score(rows, bounds) for bounds in (inputs.bounds.get(head), unit)]
    best = min([score for score in uniform if score is not None], default=torch.inf)
    related = float(_slope_score(rows, predicted, 0.0).abs().max())
    if max(best, related) <= Z_EXPLAINED:
        return max(best, related, largest([order]))
    if not bool((_slope_score(rows, predicted, 1.0) > Z_BOUND).any()):
        return None
    slopes = [_slope_score(rows, predicted, 0.0)]
    if bool(counted.all()) and len(means) >= 8:
        slopes.append(_slope_score(actions.mean(1), means.mean(1), 0.0))
    return max(largest([order]), *(float(slope.abs().max()) for slope in slopes))


def _slope_score(rows: Tensor, predicted: Tensor, slope: float) -> Tensor:
    """Standard score [D] of how far the slope of rows [N, D] against their prediction falls below `slope`."""
    deviation, centred = predicted - predicted.mean(0), rows - rows.mean(0)
    size = deviation.square().sum(0).clamp(min=1e-24)
    return (slope - (centred * deviation).sum(0) / size) * size.sqrt() / rows.std(0).clamp(min=1e-12)


MAX_AT_BOUNDS = 0.01
"""Share of uniform draws that may equal their bounds exactly."""


def _uniform_score(rows: Tensor, bounds: Tensor | None) -> float | None:
    """Largest score of the moments of actions [N, D] under a uniform distribution between their bounds."""
    if bounds is None or not bool(bounds.isfinite().all()):
        return None
    low, high = bounds
    place = (rows - low) / (high - low) - 0.5
    at_bounds = (place.abs() > 0.5 - 1e-6).double().mean()
    if bool((place.abs() > 0.5 + 1e-6).any()) or at_bounds > MAX_AT_BOUNDS:
        return None
    count = math.sqrt(len(rows))
    first = place.mean(0) * count * math.sqrt(12)
    second = (place.square().mean(0) - 1 / 12) * count / math.sqrt(1 / 80 - 1 / 144)
    return float(torch.stack([first.abs(), second.abs()]).max())


def permuted(inputs: ActionInputs) -> float | None:
    """Smallest score of the environments in another order, the same in all steps."""
    envs = next(iter(inputs.actions.values())).shape[1]
    if envs < 2:
        return None
    place = torch.arange(envs)
    orders = [_best_order(inputs), place.roll(1), place.roll(-1), place.flip(0)]
    numbers = [
        largest(scores(inputs.map(lambda x: x, lambda x, order=order: x[:, order])))  # type: ignore[misc]
        for order in orders
        if order is not None and bool((order != place).any())
    ]
    return min(numbers)


def shuffled(inputs: ActionInputs) -> float | None:
    """Score of actions that come from the same step's distributions in permuted environments."""
    envs = next(iter(inputs.actions.values())).shape[1]
    if envs < 2:
        return None
    mixture = _of_other_envs(inputs)
    if mixed(inputs) is not None and _likelihood(inputs, _with_chance(inputs)) > _likelihood(inputs, mixture):
        return None
    parts = scores(replace(inputs, log_probs=mixture, means={}))
    for head, log_probs in inputs.log_probs.items():
        parts.append(_step_scores(log_probs.exp(), inputs.actions[head], inputs.counted[head], log_probs.exp()))
    for head in inputs.means:
        counted, at = inputs.counted[head], inputs.counted[head].unsqueeze(-1)
        residual = torch.where(at, inputs.actions[head] - inputs.means[head], 0.0).sum(1, keepdim=True)
        size = torch.where(at, inputs.std[head].square(), 0.0).sum(1, keepdim=True).clamp(min=1e-30).sqrt()
        parts += [gaussian_scores(residual / size, counted.any(1, keepdim=True)), _end_scores(inputs, head)]
    return largest(parts, without=("neighbours",))


MIXED_SHARE = (0.02, 0.95)
"""Shares of random choices between which a mixture of a policy and chance is told from both."""

MIXTURE_STEPS = 50
"""Steps of expectation and maximisation by which the share is fitted."""

LIKELIER_NATS = 3.0
"""Log-likelihood by which one mixture explains choices better than another one."""


def mixed(inputs: ActionInputs) -> float | None:
    """Score of choices of which a share is drawn from a uniform distribution; the share has the largest likelihood."""
    if inputs.means:
        return None
    mixtures = _with_chance(inputs)
    own = _likelihood(inputs, mixtures)
    if (
        not mixtures
        or _likelihood(inputs, _of_other_envs(inputs)) > own + LIKELIER_NATS
        or _likelihood(inputs, _shares(inputs)) > own - LIKELIER_NATS
    ):
        return None
    return largest(scores(replace(inputs, log_probs=mixtures)))


def _with_chance(inputs: ActionInputs) -> dict[str, Tensor]:
    """Log-probabilities [T, B, A] of the mixtures of each head's distribution and chance; empty if one is nearly either of them."""
    mixtures = dict[str, Tensor]()
    for head, log_probs in inputs.log_probs.items():
        allowed = (log_probs > -1e4).to(log_probs)
        parts = log_probs.exp(), allowed / allowed.sum(-1, keepdim=True)
        own, random = (one.gather(-1, inputs.actions[head].unsqueeze(-1)).squeeze(-1)[inputs.counted[head]] for one in parts)
        share = torch.tensor(0.5, dtype=own.dtype, device=own.device)
        for _ in range(MIXTURE_STEPS):
            share = (share * random / (share * random + (1 - share) * own)).mean()
        if not MIXED_SHARE[0] < float(share) < MIXED_SHARE[1]:
            return {}
        mixtures[head] = torch.lerp(*parts, share).log()
    return mixtures


def _of_other_envs(inputs: ActionInputs) -> dict[str, Tensor]:
    """Log-probabilities [T, B, A] of the choices of any environment in the same step."""
    return {
        head: (x.logsumexp(1, keepdim=True) - math.log(x.shape[1])).expand_as(x) for head, x in inputs.log_probs.items() if x.shape[1] > 1
    }


def _shares(inputs: ActionInputs) -> dict[str, Tensor]:
    """Log-probabilities [T, B, A] of choices that do not depend on the policy: their shares in the rollout."""
    rows = {head: (x, inputs.actions[head][inputs.counted[head]]) for head, x in inputs.log_probs.items()}
    counts = {head: torch.bincount(chosen, minlength=x.shape[-1]).to(x) for head, (x, chosen) in rows.items()}
    return {head: (count / count.sum()).log().expand_as(inputs.log_probs[head]) for head, count in counts.items()}


def _likelihood(inputs: ActionInputs, log_probs: Mapping[str, Tensor]) -> float:
    """Log-likelihood of the choices that count; -inf without distributions."""
    taken = [x.gather(-1, inputs.actions[head].unsqueeze(-1)).squeeze(-1)[inputs.counted[head]].sum() for head, x in log_probs.items()]
    return float(torch.stack(taken).sum()) if taken else -math.inf


def _step_scores(p: Tensor, actions: Tensor, counted: Tensor, expected: Tensor) -> Scores:
    """Return the score of each choice's count in a step, weighted by its probability under the policies [T, B, A] in that step.

    `expected` [T, B, A] are the probabilities of the hypothesis; the order of the environments does not matter.
    """
    at = counted.unsqueeze(-1)
    share = torch.where(at, p, 0.0).sum(1) / counted.sum(1, keepdim=True).clamp(min=1)
    weight = (share - share.mean(0)).unsqueeze(1)
    chosen = torch.nn.functional.one_hot(actions, p.shape[-1]).to(p)
    residual, variance = weight * (chosen - expected), weight.square() * expected * (1 - expected)
    total = torch.where(at, residual, 0.0).sum((0, 1))
    spread = torch.where(at, variance, 0.0).sum((0, 1)) + total.abs() * weight.abs().max() / 3
    return {"step": total / spread.clamp(min=1e-12).sqrt()}


def _best_order(inputs: ActionInputs) -> Tensor | None:
    """For each environment, the environment whose distributions fit its actions best, [B]; None if two share one."""
    envs = next(iter(inputs.actions.values())).shape[1]
    if envs > MAX_CLASSES:
        return None
    total = torch.zeros(envs, envs, dtype=torch.float64)
    for head, log_probs in inputs.log_probs.items():
        index = inputs.actions[head].unsqueeze(1).expand(-1, envs, -1)  # [T, environment of the distribution, of the action]
        total += log_probs.clamp(min=-UNLIKELY_NATS).gather(-1, index).sum(0).T
    for head in inputs.means:
        z = (inputs.actions[head].unsqueeze(1) - inputs.means[head].unsqueeze(2)) / inputs.std[head].unsqueeze(2)
        total += (-0.5 * z.square() - inputs.std[head].unsqueeze(2).log()).sum((0, -1)).T
    order = total.argmax(1)
    return order if len(order.unique()) == envs else None


def displaced(inputs: ActionInputs, steps: int) -> float | None:
    """Score of actions drawn from the distributions of the step `steps` later."""
    if len(next(iter(inputs.actions.values()))) < 8:
        return None
    early, late = slice(None, -1), slice(1, None)
    mine, theirs = (late, early) if steps < 0 else (early, late)
    return largest(scores(inputs.map(lambda x: x[mine], lambda x: x[theirs])))


def repeated(inputs: ActionInputs) -> float | None:
    """Score of the actions that differ from the previous step's actions, provided that they differ less often than expected."""
    numbers: list[float] = []
    excess = 0.0
    for head, log_probs in inputs.log_probs.items():
        actions, counted = inputs.actions[head], inputs.counted[head]
        before = actions[:-1]
        score = categorical_scores(log_probs, actions, counted)["repeat"]
        excess = max(excess, float(score))
        changed = counted[1:] & (actions[1:] != before)
        others = log_probs[1:].scatter(-1, before.unsqueeze(-1), -1e9).log_softmax(-1)
        numbers.append(largest([categorical_scores(others, actions[1:], changed)], without=("repeat", "neighbours")))
        if bool((actions == actions[0, 0]).all()):
            return None  # always the same action
    for head, means in inputs.means.items():
        actions, counted = inputs.actions[head], inputs.counted[head]
        same = (actions[1:] == actions[:-1]).all(-1) & counted[1:]
        bounds = inputs.bounds.get(head)
        if bounds is not None:  # actions that are clipped there are equal by chance
            same &= ((actions[1:] != bounds[0]) & (actions[1:] != bounds[1])).all(-1)
        excess = max(excess, Z_BOUND + 1 if int(same.sum()) > 2 + 0.02 * int(counted.sum()) else 0.0)
        z = (actions - means) / inputs.std[head]
        numbers.append(largest([gaussian_scores(z[1:], counted[1:] & ~same)], without=("repeat", "neighbours")))
    return max(numbers) if excess > Z_BOUND and deterministic(inputs) is None else None


def same_noise(inputs: ActionInputs) -> float | None:
    """Score of the actions of each environment on its own, provided that neighbours agree more often than expected."""
    parts = scores(inputs)
    envs = next(iter(inputs.actions.values())).shape[1]
    if envs < 2 or max(float(part["neighbours"]) for part in parts) <= Z_BOUND:
        return None
    alone = [inputs.map(lambda x, b=b: x[:, b : b + 1], lambda x, b=b: x[:, b : b + 1]) for b in range(min(envs, 16))]  # type: ignore[misc]
    return max(largest(scores(one)) for one in alone)


SAME_Z = 1e-3
"""Largest difference of equal noise, in standard deviations, after the rounding of actions and means."""


def constant_noise(inputs: ActionInputs) -> float | None:
    """0 if the noise of Gaussian actions is the same in all steps."""
    noise = [z_of(inputs, head)[inputs.counted[head]] for head in inputs.means]
    if not noise or inputs.log_probs or any(len(z) < 2 for z in noise) or deterministic(inputs) is not None:
        return None
    return 0.0 if all(bool(((z - z[0]).abs() <= SAME_Z * (1 + z[0].abs())).all()) for z in noise) else None


def cut_at_bounds(inputs: ActionInputs) -> float | None:
    """Score of Gaussian actions; an action at a bound counts only as being beyond it."""
    numbers = []
    for head in inputs.means:
        counted = inputs.counted[head]
        bounds = cut_bounds(inputs.actions[head][counted], inputs.bounds.get(head))
        if bounds is None:
            continue
        low, high = ((bound - inputs.means[head]) / inputs.std[head] for bound in bounds)
        numbers.append(_censored_score(z_of(inputs, head), low, high, counted))
    return max(numbers) if numbers and not inputs.log_probs else None


def squashed(inputs: ActionInputs) -> float | None:
    """Score of the inverse tanh of the actions; an action that float32 cannot resolve counts only as being beyond a bound."""
    numbers = []
    for head, means in inputs.means.items():
        counted, bounds = inputs.counted[head], inputs.bounds.get(head)
        scaled = [inputs.actions[head]]
        if bounds is not None and bool(bounds.isfinite().all()):
            scaled.append(2 * (inputs.actions[head] - bounds[0]) / (bounds[1] - bounds[0]) - 1)
        low, high = ((bound - means) / inputs.std[head] for bound in (-MAX_ATANH, MAX_ATANH))
        scores = [
            _censored_score((actions.atanh() - means) / inputs.std[head], low, high, counted)
            for actions in (one.clamp(-1 + 1e-12, 1 - 1e-12) for one in scaled if bool((one[counted].abs() <= 1).all()))
        ]
        if not scores:
            return None
        numbers.append(min(scores))
    return max(numbers) if numbers and not inputs.log_probs else None


def _censored_score(z: Tensor, low: Tensor, high: Tensor, counted: Tensor) -> float:
    """Largest score of z [T, B, D] clipped at `low` and `high`: of the mean, of the squares, and of the number of clipped entries."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=z.dtype), 1.0)
    at = counted.unsqueeze(-1)
    below, above = z <= low + 1e-6, z >= high - 1e-6
    share_below, share_above = normal.cdf(low).clamp(min=1e-12), normal.cdf(-high).clamp(min=1e-12)
    density_low, density_high = normal.log_prob(low).exp(), normal.log_prob(high).exp()
    first = torch.where(below, -density_low / share_below, torch.where(above, density_high / share_above, z))
    tails = torch.where(below, 1 + (low * -density_low) / share_below, 1 + high * density_high / share_above)
    second = torch.where(below | above, tails, z.square()) - 1
    numbers = []
    for sums in (first, second / math.sqrt(2.0)):  # the variances of these are at most 1
        cut = torch.where(at, sums.nan_to_num(0.0, 0.0, 0.0), 0.0)
        numbers.append(float((cut.sum((0, 1)) / counted.sum().double().sqrt()).abs().max()))
    for hit, share in ((below, share_below), (above, share_above)):
        residual = hit.to(share) - share
        parts = _by_class(residual, share * (1 - share), at.expand_as(share))
        numbers += [float(bounded_score(*columns).abs()) for columns in parts]
    return max(numbers)


def coloured_noise(inputs: ActionInputs) -> float | None:
    """Score of Gaussian noise minus the previous step's noise times a correlation above 0."""
    if inputs.log_probs or repeated(inputs) is not None or same_noise(inputs) is not None:
        return None
    numbers = []
    for head in inputs.means:
        z, counted = z_of(inputs, head), inputs.counted[head]
        before, after = z[:-1], z[1:]
        correlation = (before * after).sum((0, 1)) / before.square().sum((0, 1)).clamp(min=1e-12)
        if not bool((correlation > 0.05).all()) or bool((correlation >= 0.9999).any()):
            return None
        fresh = (after - correlation * before) / (1 - correlation.square()).sqrt()
        numbers.append(largest([gaussian_scores(fresh, counted[1:] & counted[:-1])]))
    return max(numbers) if numbers else None
