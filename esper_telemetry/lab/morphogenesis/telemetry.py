"""The event of a step of morphogenesis and its metrics: the entry point `morphogenesis` of the group `esper_telemetry.updates`.

The environment emits the event on its own hooks, which its trainer adopts: `attach` remains one call, and the trainer needs no code for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.lab.morphogenesis.metrics.environments import environment_stats
from esper_telemetry.lab.morphogenesis.metrics.hosts import each_stats, host_stats
from esper_telemetry.lab.morphogenesis.metrics.seeds import gate_stats, seed_stats
from esper_telemetry.lab.morphogenesis.snapshot import GrowthHistory, growth_event, named_seeds
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.extensions import Capture


@dataclass(frozen=True, slots=True)
class GrowthStep:
    """One step of B environments: an epoch of training of every host, with S slots for seeds in each.

    Attributes:
        last: episodes end with this step.
        horizon: steps of an episode.
        hosts: [B] each: `train_loss`, `train_accuracy`, `val_loss`, `val_accuracy`, `best` (accuracy so far), `stale` (epochs since then),
            `norm` (gradient before clipping), `growth` (parameters over those of the host alone), `score` (accuracy less the price of the
            parameters), `seeds_gain` (accuracy that all seeds add), `synergy` (what they add beyond the sum of each alone), `op` (an
            index), `decides` (there was a choice), `host_parameters` (a number), and the watchdog's `nonfinite`, `lobotomy` and
            `divergence`.
        seeds: [B, S] each: `stage` (an index), `age` and `life` (epochs in the stage and of the seed), `alpha`, `tempo` (epochs of
            blending), `curve` and `blueprint` (indices), `parameters` (a number), `progress` (accuracy since the stage began), `born`,
            `pruned`, `fossilized` (bool, in this step), and NaN where it was not measured: gradient `norm`, severities `exploding` and
            `vanishing`, `ratio` (gradient intensity over the host's), `contribution`, `shapley`; `cause` (an index, -1 where there is no
            seed that learns).
        rewards: [B] per component, weighted; their sum is the reward.
        gates: [B] per gate: -1 not asked, 0 refused, 1 passed.
        labels: names of the values of `stage`, `op`, `cause` and `curve`.
        mode: of the reward.
        history: course of the environments, this step included; None where nobody follows it.
    """

    last: bool
    horizon: int
    hosts: Mapping[str, Tensor]
    seeds: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    gates: Mapping[str, Tensor]
    labels: Mapping[str, tuple[str, ...]]
    mode: str = ""
    history: GrowthHistory | None = None


@dataclass(frozen=True, slots=True)
class GrowthUpdate:
    """T steps of the environments; an `updates.extensions.UpdateExtension`.

    Attributes:
        steps: columns as in `GrowthStep`, with T as their first dimension.
        last: per step: episodes ended with it.
        final: the last step by itself.
    """

    event_type: ClassVar[type] = GrowthStep

    steps: GrowthStep
    last: tuple[bool, ...]
    final: GrowthStep

    @classmethod
    def from_events(cls, events: Sequence[GrowthStep]) -> GrowthUpdate:
        """Stack the steps of an update."""

        def stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

        steps = GrowthStep(
            last=events[-1].last,
            horizon=events[0].horizon,
            hosts=stacked([step.hosts for step in events]),
            seeds=stacked([step.seeds for step in events]),
            rewards=stacked([step.rewards for step in events]),
            gates=stacked([step.gates for step in events]),
            labels=events[0].labels,
        )
        return cls(steps, tuple([step.last for step in events]), events[-1])

    @property
    def on_device(self) -> bool:
        """True where the hosts are not trained on the CPU."""
        return not self.steps.hosts["score"].is_cpu

    def measure(self, _: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
        """Yield the measurements of hosts, seeds and rewards; at DEBUG also of single environments and slots."""
        hosts, seeds, rewards, labels = self.steps.hosts, self.steps.seeds, self.steps.rewards, self.steps.labels
        last = torch.tensor(self.last, device=hosts["score"].device)
        yield partial(host_stats, hosts)
        yield partial(seed_stats, seeds, labels, horizon=self.steps.horizon)
        yield partial(gate_stats, self.steps.gates)
        yield partial(environment_stats, hosts, rewards, seeds["stage"], last, ops=labels["op"])
        if level >= Level.DEBUG:
            yield partial(each_stats, hosts, seeds, rewards)

    def evidence(self, _: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield nothing: every update has the event `growth`."""
        yield from ()

    def events(self, _: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield the event `growth`: the environments and their seeds after the last step."""
        if self.final.history is not None:
            yield Capture("growth", growth_event(self.final, self.final.history))

    def alarm_evidence(self, alarm: Alarm) -> dict[str, Any]:
        """Return the seeds that an alarm about seeds means, by environment and slot."""
        if not alarm.type.startswith("seed/"):
            return {}
        return {"seeds": named_seeds(self.steps.seeds, self.steps.labels, alarm.type)}
