"""Contents of a run in the journal and in the three backends, with each backend's own numbers, in the order of writing."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_until

from esper_telemetry import Record, read_run
from esper_telemetry.core.metric import catalogue
from esper_telemetry.core.record import Histogram, template_of
from esper_telemetry.sinks.layout import OVERVIEW, by_tag

AXES = ("axis/update", "axis/env_step", "axis/gradient_step", "axis/wall_time")
BACKENDS = ("tensorboard", "wandb:walker", "mlflow")


class Point(NamedTuple):
    """One number of a backend, with its position on the x-axis and its time."""

    step: int
    wall_time: float
    value: float


BACKEND_SECONDS = 240.0
"""Longest wait for backends, which share the machine with the other tests."""


def cursors(run_dir: Path) -> dict[str, dict[str, Any]]:
    file = run_dir / "cursors.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def all_backends_have(records: int, run_dir: Path) -> bool:
    cursor = cursors(run_dir)
    return all(name in cursor and cursor[name]["records"] >= records for name in BACKENDS)


def all_backends_closed(run_dir: Path) -> bool:
    cursor = cursors(run_dir)
    return all(name in cursor and cursor[name]["closed"] for name in BACKENDS)


def shown(record: Record) -> dict[str, float]:
    """The values that backends show at NORMAL: all except details, which only the journal holds."""
    return {key: value for key, value in record.values.items() if not is_detail(key)}


def shown_histograms(record: Record) -> Mapping[str, Histogram]:
    visible = {key: histogram for key, histogram in record.histograms.items() if not is_detail(key)}
    return by_tag(replace(record, histograms=visible))


@cache
def is_detail(key: str) -> bool:
    """Return True if a key belongs to a single layer or equation, or to the history of another key."""
    template = template_of(key, {metric.key: metric for metric in catalogue()})
    if key.startswith(("integrity/equation", "integrity/actions")):
        return True
    return "{layer}" in template or template.startswith("{key}/")


def journal_points(run_dir: Path) -> dict[str, list[Point]]:
    """By key, the numbers that every backend must hold."""
    points: dict[str, list[Point]] = {}
    for record in read_run(run_dir).records:
        axes = record.axes
        for key, value in shown(record).items():
            points.setdefault(key, []).append(Point(axes.env_step, axes.wall_time, value))
    return points


def axis_points(run_dir: Path) -> dict[str, list[Point]]:
    """The axes that backends store as numbers, because environment steps are their x-axis."""
    axes = [record.axes for record in read_run(run_dir).records]
    return {f"axis/{name}": [Point(a.env_step, a.wall_time, getattr(a, name)) for a in axes] for name in ("update", "gradient_step")}


def quantile_points(run_dir: Path) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {}
    for record in read_run(run_dir).records:
        for key, histogram in shown_histograms(record).items():
            for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
                value = histogram.quantile(share)
                assert value is not None
                points.setdefault(f"{key}_{name}", []).append(Point(record.axes.env_step, record.axes.wall_time, value))
    return points


def journal_histograms(run_dir: Path) -> dict[str, list[tuple[int, list[float]]]]:
    """By key, the step and the counts of every histogram, without the empty bins at both ends."""
    histograms: dict[str, list[tuple[int, list[float]]]] = {}
    for record in read_run(run_dir).records:
        for key, histogram in shown_histograms(record).items():
            histograms.setdefault(key, []).append((record.axes.env_step, list(histogram.counts)))
    return histograms


def tensorboard_histograms(run_dir: Path) -> dict[str, list[tuple[int, list[float]]]]:
    """By tag, the step and the counts of every histogram in the event files."""
    everything = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return {
        tag: [(event.step, list(event.histogram_value.bucket)) for event in everything.Histograms(tag)]
        for tag in everything.Tags()["histograms"]
    }


def tensorboard_points(run_dir: Path) -> dict[str, list[Point]]:
    everything = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = {tag: [Point(*event) for event in _in_order(everything.Scalars(tag))] for tag in everything.Tags()["scalars"]}
    return without_overview(points)


def without_overview(by_name: dict[str, Any]) -> dict[str, Any]:
    """Remove the names of the overview, after checking that each equals the key whose title it ends with."""
    keys = {key.replace("/", " "): key for key in by_name} | {title: key for key, title in OVERVIEW.items()}
    repeated = {name: keys[name.partition(" ")[2]] for name in by_name if name.startswith("0_overview/")}
    assert {name: by_name[name] for name in repeated} == {name: by_name[key] for name, key in repeated.items()}
    return {name: value for name, value in by_name.items() if name not in repeated}


def _in_order(events: Any) -> list[tuple[int, float, float]]:
    return [(event.step, event.wall_time, event.value) for event in events]


def mlflow_client(place: Path | str) -> Any:
    """A client of the database in a directory, or of a server. The import takes seconds."""
    from mlflow import MlflowClient

    return MlflowClient(place if isinstance(place, str) else f"sqlite:///{place}/mlflow.db")


def mlflow_points(run_dir: Path) -> dict[str, list[Point]]:
    """By key, the whole history of every metric; times in seconds."""
    client = mlflow_client(run_dir)
    run_id = mlflow_run(run_dir).info.run_id
    histories = {key: client.get_metric_history(run_id, key) for key in mlflow_run(run_dir).data.metrics}
    points = {key: sorted(Point(m.step, m.timestamp / 1000, m.value) for m in ms) for key, ms in histories.items()}
    return without_overview(points)


def mlflow_run(run_dir: Path) -> Any:
    """The only run in the run directory's store."""
    client = mlflow_client(run_dir)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


def wandb_entries(run_dir: Path) -> list[dict[str, Any]]:
    """All entries of the offline run, as `wandb leet inspect` prints them, once its end is on disk.

    A resumed run has a folder with the same id for each part; their names begin with the time.
    """
    (run_id,) = {file.stem for file in run_dir.glob("wandb/offline-run-*/run-*.wandb")}
    files = sorted(run_dir.glob(f"wandb/offline-run-*/{run_id}.wandb"))
    return [entry for file in files for entry in wait_until(partial(_complete, file), f"the end of {file.name}", BACKEND_SECONDS)]


def _complete(file: Path) -> list[dict[str, Any]]:
    entries = _inspected(file)
    return entries if any(entry["type"] == "exit" for entry in entries) else []


def _inspected(file: Path) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def wandb_rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [entry["history"]["item"] for entry in entries if entry["type"] == "history"]
    return [without_overview({key: value for key, value in row.items() if not key.startswith("_")}) for row in rows]


def wandb_exit_codes(entries: list[dict[str, Any]]) -> list[int]:
    return [int(entry["exit"].get("exit_code", 0)) for entry in entries if entry["type"] == "exit"]


def wandb_exit_code(entries: list[dict[str, Any]]) -> int:
    (code,) = wandb_exit_codes(entries)
    return code


def assert_the_same_numbers_in_all_four(run_dir: Path) -> None:
    """Assert that each backend holds every key of every record exactly once, at its step and time, and no other keys."""
    expected = {**journal_points(run_dir), **axis_points(run_dir)}
    assert_same_points(tensorboard_points(run_dir), rounded(expected))
    assert_same_points(mlflow_points(run_dir), {**expected, **quantile_points(run_dir)})
    assert tensorboard_histograms(run_dir) == journal_histograms(run_dir)
    records = read_run(run_dir).records
    assert wandb_rows(wandb_entries(run_dir)) == [{**shown(record), **axes_row(record), **histograms_row(record)} for record in records]


def assert_same_points(found: Mapping[str, list[Point]], expected: Mapping[str, list[Point]]) -> None:
    """Assert the same keys, with equal steps and values, and with times equal to a millisecond."""
    assert found.keys() == expected.keys()
    for key, points in expected.items():
        assert [(p.step, p.value) for p in found[key]] == [(p.step, p.value) for p in points], key
        assert all(abs(a.wall_time - b.wall_time) < 1e-3 for a, b in zip(found[key], points, strict=True)), key


def rounded(points: Mapping[str, list[Point]]) -> dict[str, list[Point]]:
    """The same in single precision, which is TensorBoard's format."""
    return {key: [p._replace(value=float(np.float32(p.value))) for p in ps] for key, ps in points.items()}


def axes_row(record: Record) -> dict[str, float]:
    axes = record.axes
    return dict(zip(AXES, (axes.update, axes.env_step, axes.gradient_step, axes.wall_time), strict=True))


def histograms_row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, histogram in shown_histograms(record).items():
        row |= {f"{key}._type": "histogram", f"{key}.bins": list(histogram.edges)}
        row[f"{key}.values"] = list(histogram.counts)
    return row
