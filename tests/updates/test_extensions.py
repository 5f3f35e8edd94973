"""A plugin's events become columns of the update, metrics of its record and evidence, in process and in the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from esper_telemetry import Level, Telemetry, attach, read_run
from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.reduction import Mean
from esper_telemetry.events import Hooks, UpdateEnd
from esper_telemetry.updates import extensions
from esper_telemetry.updates.extensions import Capture, update_extensions


@dataclass(frozen=True)
class Visit:
    """A step, with the number of new states that it saw."""

    new: Tensor


@dataclass(frozen=True, slots=True)
class Novelty(MetricGroup):
    new: Mean = reports(Metric(key="my/novelty", question="How many states were new?", unit="states"))


@dataclass(frozen=True, slots=True)
class Visits:
    event_type: ClassVar[type] = Visit

    new: Tensor

    @classmethod
    def from_events(cls, events: Sequence[Visit]) -> Visits:
        return cls(torch.stack([event.new for event in events]))

    @property
    def on_device(self) -> bool:
        return False

    def measure(self, facts: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
        yield lambda: Novelty(Mean(self.new.sum(), len(self.new)))

    def evidence(self, facts: Mapping[str, Any]) -> Iterator[Capture]:
        yield Capture("visits", {"new": self.new.tolist()})


class BrokenVisits(Visits):
    @classmethod
    def from_events(cls, events: Sequence[Visit]) -> Visits:
        raise IndexError("a bug")


class Explorer:
    """A source of visits: in update n its steps see n and 3n new states."""

    def __init__(self) -> None:
        self.hooks = Hooks()

    def learn(self, updates: int) -> None:
        for update in range(1, updates + 1):
            for factor in (1, 3):
                self.hooks.emit(Visit(torch.tensor(float(factor * update))))
            self.hooks.emit(UpdateEnd(update, 8 * update, update, 1e-3, {}))


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points of installed plugins."""
    entries = [EntryPoint("visits", f"{__name__}:Visits", extensions.GROUP)]
    monkeypatch.setattr(extensions, "entry_points", lambda group: entries)
    update_extensions.cache_clear()
    yield entries
    update_extensions.cache_clear()


def explored(run_dir: Path, **options: Any) -> Explorer:
    source = Explorer()
    with Telemetry(run_dir=run_dir, **options) as telemetry:
        attach(telemetry, source)
        source.learn(3)
    return source


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.system)])
def test_events_of_a_plugin_are_measured_with_the_update(tmp_path: Path, offload: bool) -> None:
    """Means of n and 3n. Episodes are counted because there were steps."""
    explored(tmp_path, offload=offload)

    records = read_run(tmp_path).records
    assert [record.values["my/novelty"] for record in records] == [2.0, 4.0, 6.0]
    assert all(record.values["episode/count"] == 0 for record in records)


def test_evidence_of_a_plugin_is_kept_at_debug(tmp_path: Path) -> None:
    explored(tmp_path, offload=False, level="debug")

    captures = [event.data for event in read_run(tmp_path).events if event.type == "evidence/visits"]
    assert captures == [{"new": [1.0, 3.0]}, {"new": [2.0, 6.0]}, {"new": [3.0, 9.0]}]


def test_a_plugin_that_raises_costs_its_record_and_a_warning(
    tmp_path: Path, entries: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    entries[:] = [EntryPoint("visits", f"{__name__}:BrokenVisits", extensions.GROUP)]
    explored(tmp_path, offload=False)

    assert len(read_run(tmp_path).records) == 3
    assert len([record for record in caplog.records if "IndexError: a bug" in record.getMessage()]) == 1


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path: Path, entries: list[EntryPoint], caplog: pytest.LogCaptureFixture) -> None:
    entries.append(EntryPoint("gone", "no_such_package:Thing", extensions.GROUP))
    explored(tmp_path, offload=False)

    assert [record.values["my/novelty"] for record in read_run(tmp_path).records] == [2.0, 4.0, 6.0]
    assert any("gone = no_such_package:Thing" in record.getMessage() for record in caplog.records)


def test_growth_is_a_plugin_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    update_extensions.cache_clear()

    assert "GrowthUpdate" in [kind.__name__ for kind in update_extensions()]
