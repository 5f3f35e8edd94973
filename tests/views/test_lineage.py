"""The registry says where a metric comes from and who reads it, and the code agrees."""

import importlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from journaled import WrittenRun

from esper_telemetry.alarms.metric_entries import metric_entries
from esper_telemetry.alarms.verdict.run_outcome import OutcomeJudge
from esper_telemetry.core.metric import RELEASES, Derived, catalogue, declared, groups, released
from esper_telemetry.core.record import Axes, Level, Record, template_of
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.lab.morphogenesis.views import VIEWS
from esper_telemetry.views.metrics_page import emitter, entry_values, readers
from esper_telemetry.views.panels import STRIP
from esper_telemetry.views.run_view import open_view

ENTRIES = {entry.metric.key: entry for entry in metric_entries()}


def resolved(name: str) -> Any:
    """Import `package.module.Class.attribute` or `package.module.function`."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_every_metric_has_an_emitter_that_exists() -> None:
    """`tests/updates/test_every_key.py` compares it with the calls of real runs."""
    for key in ENTRIES:
        made = emitter(key)
        assert made.field in resolved(made.group).__dataclass_fields__
        assert made.functions, key
        assert all(map(callable, map(resolved, made.functions)))
        assert all(map(resolved, made.called_in))


def test_every_key_that_is_named_is_declared() -> None:
    for entry in ENTRIES.values():
        inputs = emitter(entry.metric.key).inputs
        keys = [*readers(entry).metrics, *(name for name in inputs if "/" in name)]
        assert {template_of(key, ENTRIES) for key in keys} <= ENTRIES.keys()


LABELS = {"{group}": "actor", "{layer}": "l", "{head}": "h", "{pair}": "p"}
DERIVED = {metric.key: group for group in groups() if issubclass(group, Derived) for _, metric in declared(group)}
MEASURED = [key for key in ENTRIES if key not in DERIVED and not key.endswith("_nonfinite")]


def derived_values(keys: Collection[str], **added: float) -> dict[str, list[float | None]]:
    """Return the derived values of 30 records with these keys, by key. Histories, which are named after their source, are left out."""
    history, rows = RunHistory({"groups": {"actor": []}, "max_grad_norm": 0.5}), []
    for update in range(30):
        values = dict(added)
        for key in keys:
            place, name = MEASURED.index(key), key
            for label, text in LABELS.items():
                name = name.replace(label, text)
            values[name] = 2 + math.sin(update * (3 + place % 7) + place)
        rows.append(history.derive(values, Level.DEBUG))
    names = dict.fromkeys(key for row in rows for key in row if not template_of(key, DERIVED).startswith("{key}/"))
    return {key: [row.get(key) for row in rows] for key in names}


@pytest.mark.system
def test_derived_metrics_are_computed_from_the_keys_they_name() -> None:
    """Their values change if one of these keys is missing, and do not depend on other keys."""
    sources = {key for group in DERIVED.values() for key in group.sources} & set(MEASURED)
    whole = derived_values(MEASURED)
    assert derived_values(sources) == whole and len(sources) >= 20

    measured: dict[type[Derived], set[str]] = {}
    for key in sources:
        part = derived_values(sources - {key})
        for name in whole:
            if part.get(name) != whole[name]:
                measured.setdefault(DERIVED[template_of(name, DERIVED)], set()).add(key)
    assert measured == {group: set(group.sources) & set(MEASURED) for group in measured} and len(measured) == 11

    flawed = derived_values(sources, **{f"grad/{name}/norm_preclip_nonfinite": 1.0 for name in ("actor", "global")})
    assert flawed["grad/actor/severity_explode"][-1] == 1.0 and flawed["grad/health"][-1] == 0.0


class ReadValues(dict[str, float]):
    def __init__(self, values: dict[str, float], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def __getitem__(self, key: str) -> float:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def test_the_first_line_of_watch_reads_the_keys_it_names(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "a")
    written.record(
        grad__global__norm_preclip_nonfinite=1.0,
        grad__actor__severity_explode=0.9,
        grad__layer__a__severity_explode=0.9,
        grad__layer__a__zero_frac=1.0,
        policy__kl=0.01,
        policy__entropy_norm=0.2,
        policy__entropy_marginal_norm=0.9,
        perf__memory__process_frac=0.9,
        perf__memory__device_frac=0.9,
    )
    written.alarm("grad/explode")
    for part in (one for one in STRIP if one.keys):  # the others read the outcome, alarms and bounds
        view, seen = open_view(written.run_dir), set[str]()
        view.last = ReadValues(view.last, seen)
        part.item(view)
        assert {template_of(key, ENTRIES) for key in seen} == set(part.keys), part.name


def test_the_outcome_reads_the_keys_it_names() -> None:
    named = {key for key, entry in ENTRIES.items() if "outcome of the run" in readers(entry).verdicts}
    seen: set[str] = set()
    judge = OutcomeJudge({"normalize_rewards": False})
    for update in range(1, 4):
        values = ReadValues({key: 1.0 for key in named if key != "numerics/nonfinite"}, seen)
        judge.add(Record(update, Axes(update, update, update, 0.0), values))

    assert named == seen & ENTRIES.keys() and "episode/return_mean" in named


def test_panels_draw_the_keys_that_name_them(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "a")
    written.record(policy__kl_max=0.01)
    (panel,) = open_view(written.run_dir).panels()

    assert [line.key for chart in panel.charts for line in chart.lines] == ["policy/kl_max"]
    assert f"panel {panel.name!r}" in readers(ENTRIES["policy/kl_max"]).live


def test_views_of_morphogenesis_name_metrics_that_there_are() -> None:
    keys = {key for view in VIEWS for key in getattr(view, "keys", ())}

    assert "seed/exploding" in keys and keys <= ENTRIES.keys()


def test_the_record_of_exploding_seeds_is_that_of_the_review() -> None:
    """Emitter, fields, readers, audience, time and age of one metric, read from the code by hand."""
    values = entry_values(ENTRIES["seed/exploding"])

    assert values["emitter"] == {
        "group": "esper_telemetry.lab.morphogenesis.metrics.seeds.SeedGradients",
        "field": "exploding",
        "functions": ("esper_telemetry.lab.morphogenesis.metrics.seeds.seed_stats",),
        "called_in": ("esper_telemetry.lab.morphogenesis.growth_telemetry",),
        "inputs": ("seeds", "labels", "horizon"),
    }
    assert values["readers"] == {
        "alarms": ("seed/explode",),
        "metrics": (),
        "live": ("panel 'growth'", "table 'growth'", "first line of watch (seed_gradients)"),
        "verdicts": (),
    }
    assert values["audience"] == ["operator", "automation", "developer", "researcher"]
    assert (values["when"], values["since"], values["changes"]) == ("every update", "0.1.0", [])
    assert (values["type"], values["default"]) == ("float", "absent") and values["precision"].startswith("float64")


def test_numbers_of_released_metrics_are_still_there() -> None:
    assert released().keys() <= {metric.number for metric in catalogue()}
    first = ("policy/kl", "perf/memory/device_mib", "policy/action_effect")
    assert {entry_values(ENTRIES[key])["since"] for key in first} == set(RELEASES)
