"""The equations that the columns of a sampled update allow to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.integrity.advantages import check_gae
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import UpdateData
from esper_telemetry.updates.loss_equations import loss_checks


def equation_checks(update: UpdateData, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the check of every equation whose columns the update has; `facts` are those of the run."""
    if update.rollout is not None:
        yield from _targets(update.rollout, facts)
    yield from loss_checks(update, facts)


def _targets(rollout: RolloutEnd, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    gae_lambda = facts.get("gae_lambda")
    if gae_lambda is not None:
        yield partial(
            check_gae,
            rollout.rewards,
            rollout.values,
            rollout.advantages,
            ended=rollout.ended,
            terminated=rollout.terminated,
            next_values=rollout.next_values,
            gamma=rollout.gamma,
            gae_lambda=gae_lambda,
            valid=rollout.valid,
            precision=facts.get("precision"),
        )
