"""Corrections and remarks for logs: negative divergences, undefined fits, adaptive rates.

A measured run defines its numbers. For a log, the definitions are inferred from the values: `correct` removes values that a rule would
misread, and `remarks_on` reports problems that rules, which see one update after the other, cannot detect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final, NamedTuple

from esper_telemetry.core.messages import number, percent
from esper_telemetry.importers.trainers import (
    BEFORE,
    ENTROPY,
    FIT,
    KL,
    KL_K1,
    REFERENCE_KL,
    RETURN,
    RETURN_100,
    REWARD,
    STD,
    TOKEN_ENTROPY,
    VALUE_LOSS,
)

RATE_STEP: Final = 1.5
"""Factor of the KL-adaptive schedules of RSL-RL, skrl, rl_games and Sample Factory."""
MIN_RATE_STEPS: Final = 4
MIN_ROWS: Final = 10
FITTED_SHARE: Final = 1e-3
"""Share of the largest value loss below which returns vary too little for a fit of them to mean anything."""
USEFUL_FIT: Final = 0.5
COLLAPSED_NATS: Final = 1e-3
"""Entropy of a policy that takes one action with a probability of 0.9999."""
ESCAPE_ROWS: Final = 3
"""Rows after a collapsed phase in which the divergence from the collapsed policy is meaningless."""
UNEXPLAINED_FIT: Final = 0.05
FALLEN_SHARE: Final = 0.3
"""Share of the improvement whose permanent loss is worth a remark; the outcome requires a half."""
NOISE_ERRORS: Final = 4.0
FAR_FROM_REFERENCE: Final = 5.0
"""Nats per token; trained models stay below 1 (TRL's and verl's published runs)."""
SAME_SHARE: Final = 0.1
"""Share of the largest score by which advantages may differ from scores: they are means over tokens, scores over answers."""
NORM_GROWTH: Final = 30.0


class Remark(NamedTuple):
    """A clause on a run.

    Attributes:
        update: the first update for which it holds.
        text: the clause.
        alarm: type of the alarm that it raises, if the run is wrong and an alarm covers it.
        key: the deciding metric of this alarm.
        value: its value.
        until: the last update for which the clause holds.
    """

    update: int
    text: str
    alarm: str = ""
    key: str = ""
    value: float | None = None
    until: float = math.inf


Rows = Sequence[tuple[int, dict[str, float]]]
"""Number of the update, and its values."""


def adaptive_rate(rates: Sequence[float]) -> bool:
    """Return whether a learning rate changes by factors of 1.5, like schedules that follow the KL divergence."""
    changes = [abs(math.log(other / one, RATE_STEP)) for one, other in pairwise(rates) if one > 0 and other > 0]
    steps = [change for change in changes if change > 1e-6]
    whole = [step for step in steps if step > 0.5 and abs(step - round(step)) < 0.05]
    return len(whole) >= MIN_RATE_STEPS and 2 * len(whole) >= len(steps)


def correct(rows: Rows, sources: dict[str, str]) -> None:
    """Remove values that rules would misread from the rows and sources."""
    kls = [values[KL] for _, values in rows if KL in values]
    if kls and min(kls) < -1e-6 - 1e-4 * max(map(abs, kls)):  # a divergence is not negative
        for _, values in rows:
            if KL in values:
                values.setdefault(KL_K1, values.pop(KL))
        sources.setdefault(KL_K1, sources.pop(KL).partition(" (")[0] + " (negative at times, so an estimate of the divergence)")
    if unused_divergence(rows):
        for key in (KL, KL_K1):
            sources.pop(key, None)
            for _, values in rows:
                values.pop(key, None)
    highest, collapsed = 0.0, -math.inf
    for place, (_, values) in enumerate(rows):
        loss = values.get(VALUE_LOSS, math.nan)
        highest = max(highest, loss) if loss < math.inf else highest
        if values.get(FIT, 1.0) < USEFUL_FIT and loss < FITTED_SHARE * highest:
            del values[FIT]
        if 0 < place - collapsed <= ESCAPE_ROWS:
            values.pop(KL, None)
        if 0 <= values.get(ENTROPY, math.inf) < COLLAPSED_NATS and STD not in sources:
            collapsed = place


def remarks_on(rows: Rows, means: Mapping[str, Sequence[float]], was_zero: bool) -> list[Remark]:
    """Return remarks on problems that no rule can detect in a log.

    Args:
        rows: corrected.
        means: logged means of advantages and scores of a language model.
        was_zero: the divergence was 0 in every update, and was taken out.
    """
    found = [_collapse(rows), _unexplained(rows), _fall(rows), _constant(rows), *_language(rows, means)]
    if was_zero:
        text = (
            "the KL divergence is exactly 0 in every update although the policy changes: it is measured before the only gradient step "
            "of each batch"
        )
        found.append(Remark(rows[0][0], text))
    elif _is_zero(rows) and _changes(rows) is False:
        text = "the KL divergence has been exactly 0, and the entropy has not changed: the policy is frozen"
        found.append(Remark(rows[0][0], text, "policy/kl_stall", KL_K1, 0.0))
    return [remark for remark in found if remark]


def _is_zero(rows: Rows) -> bool:
    kls = [values[key] for _, values in rows for key in (KL, KL_K1) if key in values]
    return len(kls) >= MIN_ROWS and not any(kls)


def _changes(rows: Rows) -> bool | None:
    """Return whether the spread of actions changes by more than its rounding; None if it is not logged."""
    for key in (ENTROPY, TOKEN_ENTROPY, STD):
        values = [own[key] for _, own in rows if key in own]
        if len(values) >= MIN_ROWS:
            return max(values) - min(values) > 1e-4 * max(map(abs, values))
    return None


def unused_divergence(rows: Rows) -> bool:
    """Return whether all divergences are 0 though the policy changes."""
    return _is_zero(rows) and _changes(rows) is True


def _collapse(rows: Rows) -> Remark | None:
    """A policy over a few actions that does the same in every state, judged only by its entropy."""
    entropies = [(update, values[ENTROPY]) for update, values in rows if ENTROPY in values]
    if any(STD in values for _, values in rows) or any(value < 0 for _, value in entropies):
        return None
    low = [(update, value) for update, value in entropies if value < COLLAPSED_NATS]
    if len(low) < MIN_ROWS:
        return None
    (first, _), (last, _), usual = low[0], low[-1], median(value for _, value in low)
    text = f"the policy has done the same in every state, until update {last:,}: its entropy is {number(usual)} nats"
    return Remark(first, text, "policy/entropy_collapse", ENTROPY, usual, last)


def _unexplained(rows: Rows) -> Remark | None:
    """A critic that explains nothing in any update."""
    fits = [values[FIT] for _, values in rows if FIT in values]
    if len(fits) < 2 * MIN_ROWS or sum(abs(fit) < UNEXPLAINED_FIT for fit in fits) < 0.95 * len(fits):
        return None
    text = f"the critic has explained nothing of the returns: its explained variance is {number(median(fits))} (median)"
    return Remark(rows[0][0], text, "value/never_fits", FIT, median(fits))


def _fall(rows: Rows) -> Remark | None:
    """A permanent loss of part of the improvement."""
    key = RETURN_100 if any(RETURN_100 in values for _, values in rows) else RETURN
    points = [(update, values[key]) for update, values in rows if key in values]
    width = max(3, len(points) // 20)
    if len(points) < 2 * MIN_ROWS + width:
        return None
    returns = [value for _, value in points]
    levels = [fmean(returns[place : place + width]) for place in range(len(returns) - width + 1)]
    top = max(range(len(levels)), key=levels.__getitem__)
    best, last, first = levels[top], levels[-1], levels[0]
    noise = median(abs(other - one) for one, other in pairwise(returns))
    lost = best - last
    if best <= first or top < width or lost < FALLEN_SHARE * (best - first) or lost < NOISE_ERRORS * noise or lost < 0.1 * abs(best):
        return None
    since = points[min(top + width, len(points) - 1)][0]
    share = percent(lost / (best - first))
    text = f"the return has fallen from {number(best)} to {number(last)}: {share} of the improvement is lost"
    return Remark(since, text, "task/return_drop", key, last)


def _constant(rows: Rows) -> Remark | None:
    """The same return in every episode."""
    returns = [values[key] for _, values in rows for key in (RETURN_100, RETURN) if key in values and REWARD not in values]
    if len(returns) < 2 * MIN_ROWS or min(returns) != max(returns) or returns[0] > 0:
        return None
    text = f"every episode has had a return of exactly {number(returns[0])}, so there is nothing to learn from"
    return Remark(rows[0][0], text, "reward/constant", RETURN, returns[0])


def _language(rows: Rows, means: Mapping[str, Sequence[float]]) -> Iterator[Remark]:
    """Groups of one answer, and a policy that has left its reference or whose gradients have grown."""
    advantages, scores = means.get("advantages", ()), means.get("scores", ())
    scale = max(map(abs, scores), default=0.0)
    apart = [abs(one - other) for one, other in zip(advantages, scores, strict=False)]
    if len(apart) >= MIN_ROWS and scale > 0 and max(apart) <= SAME_SHARE * scale:
        text = (
            "advantages have equalled scores: there is one answer per prompt and no baseline, so each answer is made more likely by as "
            "much as its score (sample several answers per prompt: rollout.n, num_generations)"
        )
        yield Remark(rows[0][0], text, "lm/grouping", "lm/reward/mean", scores[-1])
    reference = [(update, values[REFERENCE_KL]) for update, values in rows if REFERENCE_KL in values]
    far = [update for update, value in reference if value > FAR_FROM_REFERENCE]
    nats = median(value for _, value in reference[-MIN_ROWS:]) if reference else 0.0
    if len(far) >= MIN_ROWS and nats > FAR_FROM_REFERENCE:
        distance = f"by a KL divergence of {number(nats)} nats per token"
        yield Remark(far[0], f"the policy has left its reference {distance}; raise beta or lower the learning rate")
    norms = [(update, values[BEFORE]) for update, values in rows if BEFORE in values and TOKEN_ENTROPY in values]
    if len(norms) >= 4 * MIN_ROWS:
        usual, late = (median(value for _, value in norms[: len(norms) // 2]), median(value for _, value in norms[-MIN_ROWS:]))
        if usual > 0 and late > NORM_GROWTH * usual:
            text = f"gradient norms have grown from {number(usual)} to {number(late)}"
            yield Remark(norms[-MIN_ROWS][0], text, "grad/slow_growth", BEFORE, late)
