"""One metric with everything that is known of it.

Every declared metric as data: what documentation, dashboards and the wiring test are made from.

What to try when a metric is not normal that no alarm reads: by itself it is a hint, and often another metric tells more.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from esper_telemetry.alarms.registry import NONFINITE, alarms_reading
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.core.derived import Derived
from esper_telemetry.core.families import chapter_of
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, declared
from esper_telemetry.core.metric_names import name_of
from esper_telemetry.core.record import Level, MetricInfo
from esper_telemetry.history.derive import histories
from esper_telemetry.sinks.console import COLUMNS

DECLARING_PACKAGES = tuple(
    f"esper_telemetry.{name}" for name in ("metrics", "history", "alarms", "lab.morphogenesis.metrics")
)
"""The packages whose modules declare metrics."""


@lru_cache(maxsize=1)
def catalogue() -> tuple[Metric, ...]:
    """All metrics that the package declares, by number.

    Raises:
        ValueError: where two metrics share a key or a number, or one has no number.
    """
    found = tuple(
        sorted(_declared_in(map(importlib.import_module, DECLARING_PACKAGES)), key=lambda metric: metric.number)
    )
    _check_unique("key", [metric.key for metric in found])
    _check_unique("number", [metric.number for metric in found])
    _check_numbered(found)
    return found


def groups() -> tuple[type, ...]:
    """The types that declare metrics, measured and derived, in the order of their modules."""
    return tuple(_groups(map(importlib.import_module, DECLARING_PACKAGES)))


def _declared_in(packages: Iterable[ModuleType]) -> Iterator[Metric]:
    for group in _groups(packages):
        for _, metric in declared(group):
            yield metric


def _groups(packages: Iterable[ModuleType]) -> Iterator[type]:
    for package in packages:
        for module in _modules(package):
            for item in vars(module).values():
                if _is_group(item) and item.__module__ == module.__name__:
                    yield item


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(info.name)


def _is_group(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, MetricGroup | Derived) and item not in (MetricGroup, Derived)


def _check_unique(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"two metrics have the {what} {value!r}")
        seen.add(value)


def _check_numbered(found: Iterable[Metric]) -> None:
    for metric in found:
        if not metric.number:
            raise ValueError(f"{metric.key} has no number")


FAR = "Lower the learning rate or the number of epochs; set target_kl. The head with the largest `policy/head/{head}/blame` moved most."
RARE = "Rare actions make extreme ratios: judge beside `policy/ess_frac`, and keep action probabilities away from 0 (entropy_coef)."
SPIKY = "Clip or normalise rewards; use more steps per update."
MOVES = "Lower the learning rate or the number of epochs; where values are clipped, match clip_value to the scale of the returns."
LAYER = "Compare with its group's severity; look for dead units (`repr/dormant_frac`), saturated activations or outliers in its inputs."
LOOSE = (
    "Clipping no longer holds the policy: fewer epochs, a lower learning rate, target_kl; see `repr/effective_rank`."
)
FADING = "Open the forget gate (bias 1), train on shorter sequences, or give the policy what it has to remember."
BARE = "Look up the key without this ending: what to try stands there."

BEHIND = "The backend is slower than the run, or away: fewer keys (max_keys), or let `esper-telemetry replay` send the rest later."
ADVICE = {
    "policy/kl_last": FAR,
    "policy/kl_exact": FAR,
    "policy/kl_post": FAR,
    "policy/head/{head}/kl": FAR,
    "policy/head/{head}/kl_exact": FAR,
    "policy/logratio/std": FAR,
    "policy/head/{head}/logratio/std": FAR,
    "policy/greedy_agreement": FAR,
    "policy/logratio/absmax": RARE,
    "policy/ratio/std": RARE,
    "policy/head/{head}/ratio/min": RARE,
    "policy/logp/min": RARE,
    "policy/head/{head}/std/min": "Raise entropy_coef or bound log standard deviations from below; check that rewards reward variety.",
    "policy/head/{head}/bound_frac": "Scale actions to their bounds, squash them (squash=True), or lower the initial standard deviation.",
    "adv/raw/kurtosis": SPIKY,
    "adv/raw/pos_frac": "The critic is biased: look at `value/bias_over_std`.",
    "adv/sign_flip_frac": "The mean advantage is far from 0, so the critic is biased: look at `value/bias_over_std`.",
    "reward/nonfinite": "Fix the environment or its wrappers: a reward has to be a number.",
    "norm/{normalizer}/clip_frac": "Look for outliers or a constant dimension; raise the limit of the normaliser, or warm it up.",
    "value/clip_frac": MOVES,
    "value/move_over_std": MOVES,
    "value/bias_truncated": "Bootstrap time limits with the value of the final observation, not with that of the next episode's first.",
    "value/bias_terminated": "Do not bootstrap where an episode terminates: check that the environment tells terminated from truncated.",
    "value/nrmse": "Look at `value/explained_variance` and `value/bias`: noise, a lagging critic and a wrong scale look alike here.",
    "grad/layer/{layer}/severity_explode": LAYER,
    "grad/layer/{layer}/severity_vanish": LAYER,
    "grad/sign/pos_frac": "Centre and scale the inputs; look for features or targets that are always positive.",
    "grad/pair/{pair}/intensity_ratio": "The journal names the cause (`evidence/pairs`): disconnected, dormant, saturated, or a fast host.",
    "grad/pair/{pair}/connected": "Look for detach(), no_grad or requires_grad=False between the module and the loss.",
    "grad/pair/{pair}/zero_frac": "Look for dead units inside the module and for a gate in front of it that is shut.",
    "opt/eps_dominated_frac": "Gradients are tiny next to Adam's eps: lower eps (1e-8), or find why they vanish.",
    "lstm/{part}/mean": "States drift to one side: check resets, and centre the inputs of the memory.",
    "lstm/timescale/frac_beyond_bptt": "Train on longer sequences (num_steps), or accept that so much memory is not trained.",
    "lstm/cell_log_gain": FADING,
    "lstm/bptt/h0_grad_norm": FADING,
    "lstm/staleness_first": "Acting and training begin with different states: store the state that was acted on, and reset both alike.",
    "repr/drift_cos": "The trunk moves under the heads: lower the learning rate or the number of epochs.",
    "repr/excess_ratio/high": LOOSE,
    "repr/excess_ratio/low": LOOSE,
    "env/rollbacks": "Lower the learning rate of the hosts' task; see `seed/exploding` for who broke them, `env/rollback` for how.",
    "perf/d2h_copies": "Telemetry promises one: report what you observe.",
    "telemetry/{sink}/lag_records": BEHIND,
    "telemetry/{sink}/lag_seconds": BEHIND,
    "telemetry/{sink}/errors": "`status.json` in the run directory says what the backend answered; `esper-telemetry doctor` what it lacks.",
    "telemetry/metric_errors": "A bug of this package: please report the warning in the console, which names the metric function.",
    "{key}/drift": BARE,
    "{key}/robust_z": BARE,
    "{key}/trend/mk_z": BARE,
    "{key}/period/p": "An oscillation: compare `/period/length` with episodes and schedules; lower the learning rate.",
    "{key}/acf1": "Below 0 updates undo each other: lower the learning rate, use larger batches.",
    "{key}/cusum": BARE,
    "{key}/page_hinkley": BARE,
    "{key}/lr_response": "Updates do not follow the schedule: check that it sets the optimizer's learning rate.",
}
"""By key; every metric with bounds has advice here or from an alarm (tested)."""


REDUCTIONS = {
    "Mean": "mean",
    "Sum": "sum",
    "Min": "minimum",
    "Max": "maximum",
    "Moments": "merged moments",
    "Ess": "merged sums",
    "Counts": "histogram",
    "Quantiles": "quantile",
    "Last": "last value",
}
"""By the type of the field, whose name its annotation begins with."""

ON_CONSOLE = {key for column in COLUMNS for key in column.keys}
VERIFIED = Path(__file__).with_name("verified.json")
"""Tests by key, as `docs/glossary.py` finds them."""
PRIORITIES = ("critical", "high", "normal", "detail")


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One line of the registry.

    Attributes:
        metric: as it is declared.
        name: what people call it.
        category: its family's title.
        priority: `critical` decides whether a run is wrong for certain, `high` is a headline, `normal` has bounds or feeds an alarm,
            `detail` is read beside others.
        reduction: how the rows of an update become one number.
        alarms: those that read it.
        sinks: by sink, in which form it is carried.
        series: the endings under which it has a history, `{key}/ema` for one.
        verified: tests that check its value: cases of exact arithmetic, and files.
    """

    metric: Metric
    name: str
    category: str
    priority: str
    reduction: str
    alarms: tuple[AlarmRule, ...]
    sinks: dict[str, str]
    series: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        """What to try when the value is not normal; empty where nobody knows what is."""
        return self.alarms[0].action if self.alarms else ADVICE.get(self.metric.key, "")

    def info(self) -> MetricInfo:
        """The description that travels in the journal."""
        return replace(
            self.metric.info(),
            name=self.name,
            category=self.category,
            priority=self.priority,
            headline=_headline(self.metric.key),
            reduction=self.reduction,
            alarms=", ".join(alarm.type for alarm in self.alarms),
            action=self.action,
            series=", ".join(self.series),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for programs."""
        info = self.info()
        described = {item.name: getattr(info, item.name) for item in fields(info)}
        lists = {
            "alarms": [alarm.type for alarm in self.alarms],
            "series": list(self.series),
            "verified": list(self.verified),
        }
        return {"key": self.metric.key, **described, **lists, "sinks": self.sinks}


@lru_cache(maxsize=1)
def registry() -> tuple[MetricEntry, ...]:
    """Every declared metric, by number."""
    reductions, tests = dict(_reductions()), json.loads(VERIFIED.read_text(encoding="utf-8"))
    return tuple(_entry(metric, reductions[metric.key], tests.get(metric.key, ())) for metric in catalogue())


def _entry(metric: Metric, reduction: str, tests: Iterable[str]) -> MetricEntry:
    alarms = alarms_reading(metric.key)
    return MetricEntry(
        metric=metric,
        name=name_of(metric.key),
        category=chapter_of(metric.key).title,
        priority=_priority(metric, alarms),
        reduction=metric.info(reduction).reduction,
        alarms=alarms,
        series=histories(metric.key),
        verified=tuple(tests),
        sinks=_sinks(metric, histogram=reduction == REDUCTIONS["Counts"] or metric.of == "histogram"),
    )


def _headline(key: str) -> int:
    """The key's place among the first of its family, from 1; 0 for none."""
    first = chapter_of(key).first
    return first.index(key) + 1 if key in first else 0


def _reductions() -> Iterator[tuple[str, str]]:
    """Each key with the reduction of the field that holds it."""
    for group in groups():
        for item, metric in declared(group):
            kind = str(item.type).partition(" ")[0]
            yield metric.key, _reduction(kind, derived=issubclass(group, Derived))


def _reduction(kind: str, *, derived: bool) -> str:
    """By the name of a type; other reductions than the basic ones are means of what ranks join in their own way."""
    if derived:
        return "from other values"
    return "one value" if kind in ("float", "Tensor") else REDUCTIONS.get(kind, "mean")


def _priority(metric: Metric, alarms: tuple[AlarmRule, ...]) -> str:
    if metric.key.endswith(NONFINITE):
        return "normal"
    decides = [alarm for alarm in alarms if alarm.inputs[0] == metric.key]
    if any(alarm.hard for alarm in decides):
        return "critical"
    if metric.level is Level.MINIMAL or decides:
        return "high"
    return "normal" if alarms or metric.warn or metric.critical else "detail"


def _sinks(metric: Metric, *, histogram: bool) -> dict[str, str]:
    """In which form each of our sinks carries a metric; the journal always has it."""
    scalar = "at level debug, or with details" if "{layer}" in metric.key else "scalar"
    carried = {"journal": "histogram" if histogram else "scalar"}
    for sink in ("tensorboard", "wandb", "mlflow"):
        carried[sink] = scalar
    if histogram:
        carried |= {"tensorboard": "histogram", "wandb": "histogram", "mlflow": "quantiles p05, p50 and p95"}
    return carried | ({"console": "column"} if metric.key in ON_CONSOLE else {})
