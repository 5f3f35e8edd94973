"""Two ranks report the values that one process reports for the whole update."""

import pickle
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from halves import half, recorded, updates
from observed_groups import HALVES, OF_ITS_OWN, WHOLE, observed
from two_ranks import run_together

from esper_telemetry import Telemetry, read_run
from esper_telemetry.core.metric import Derived, catalogue, declared, groups
from esper_telemetry.core.record import template_of
from esper_telemetry.metrics.statistics import Quantiles

TIMED = ("perf/memory", "perf/telemetry", "telemetry/queue_depth", "telemetry/errors")
SAMPLED = ("repr/dormant", "repr/dead", "repr/effective", "repr/srank", "repr/pca99", "repr/feature_rank")
"""Measured on rows that each rank samples on its own."""
PAIRED = {"adv/sign_flip_frac", "telemetry/undefined"}
"""Metrics that pair the rows of minibatches with rollout rows, which differ in these halves, and the count of such metrics."""
OF_EACH_RANK = {
    "obs/rms_max": "of the window of rank 0",
    "obs/rms_median": "as above",
    "obs/rms_ratio": "as above",
    "integrity/actions/neighbours": "pairs of environments next to each other on one rank",
    "integrity/actions_variance/neighbours": "as above",
    "policy/head/action/range_used": "the mean of the ranks' standard deviations",
    "seed/largest/environment": "counted among the environments of the rank that has the largest gradient",
}
"""Keys that ranks measure on their own rows and then combine, and how."""
EQUATIONS = ("integrity/equation/", "integrity/equation_tolerance/", "integrity/fitted/", "policy/action_effect")
"""Rank 0 reports its own rows: rounding differs, equations that pair rows are not checked (see `PAIRED`), and half of the rows
may be too few to show an effect.
"""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("CartPole-v1", {}),
    "continuous": ("Pendulum-v1", {}),
    "recurrent": ("CartPole-v1", {"policy": "lstm", "lstm_size": 16}),
    "shared": ("CartPole-v1", {"shared_trunk": True, "entropy_coef": 0.01}),
    "masked": ("cue-recall", {}),
    "growing": ("morphogenesis", {}),
}


def record_halves(rank: int, directory: str) -> bool:
    """Record a rank's halves of every run in the directory."""
    for name in RUNS:
        snapshots, facts = pickle.loads((Path(directory) / f"{name}.pickle").read_bytes())
        recorded(Path(directory) / name, [half(snapshot, rank) for snapshot in snapshots], facts | {"ranks": 2})
    return True


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the updates of every run, and the journals that two ranks recorded."""
    directory = tmp_path_factory.mktemp("together")
    for name, (env, settings) in RUNS.items():
        (directory / f"{name}.pickle").write_bytes(pickle.dumps(updates(env, **settings)))
    assert run_together(record_halves, directory, str(directory)) == [True, True]
    return directory


def is_quantile(key: str) -> bool:
    """Return True for quantiles, which several ranks know only to one bin."""
    return key.rpartition("/")[2] in {*Quantiles.statistics, "median"}


def merged_keys(values: Iterable[str]) -> set[str]:
    """Return the keys that both two ranks and one process report for all rows."""
    return {key for key in values if key not in PAIRED and not key.startswith(EQUATIONS)}


@pytest.mark.system
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_report_what_one_process_reports(together: Path, tmp_path: Path, name: str) -> None:
    recorded(tmp_path, *pickle.loads((together / f"{name}.pickle").read_bytes()))
    ours, alone = read_run(together / name).records, read_run(tmp_path).records

    assert len(ours) == len(alone) >= 4
    for record, expected in zip(ours, alone, strict=True):
        assert replace(record.axes, wall_time=0.0) == replace(expected.axes, wall_time=0.0)
        assert merged_keys(record.values) == merged_keys(expected.values)
        assert record.histograms == expected.histograms
        exact = {
            k: expected.values[k]
            for k in merged_keys(expected.values)
            if k not in OF_EACH_RANK and not (k.startswith(TIMED + SAMPLED) or is_quantile(k) or "/lag_" in k)
        }
        assert len(exact) > 80
        found = {key: record.values[key] for key in exact}
        assert found == pytest.approx(exact, rel=1e-9, abs=1e-12)


def record_part(run_dir: Path, part: slice) -> None:
    with Telemetry(run_dir=run_dir, detect=False, level="debug") as telemetry:
        telemetry.observe(*observed(part))
        telemetry.flush(env_step=1)


def record_half(rank: int, directory: str) -> bool:
    record_part(Path(directory), HALVES[rank])
    return True


def test_two_ranks_report_what_one_process_observes_of_their_rows(tmp_path: Path) -> None:
    assert run_together(record_half, tmp_path, str(tmp_path / "together")) == [True, True]
    record_part(tmp_path / "alone", WHOLE)
    (ours,), (alone,) = read_run(tmp_path / "together").records, read_run(tmp_path / "alone").records

    expected = {key: value for key, value in alone.values.items() if not key.startswith(("perf/", "telemetry/"))}
    assert len(expected) > 25
    assert expected.items() >= {"grad/global/norm_preclip": 13.0, "grad/clip/freq": 1.0}.items()
    assert {key: ours.values.get(key) for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.system
def test_whatever_ranks_merge_is_compared_or_says_why_not(together: Path, tmp_path: Path) -> None:
    record_part(tmp_path, WHOLE)
    known = {metric.key: metric for metric in catalogue()}
    records = [record for run in (*map(together.joinpath, RUNS), tmp_path) for record in read_run(run).records]
    compared = {template_of(key, known) for record in records for key in (*record.values, *record.histograms)}
    merged = [kind for kind in groups() if not issubclass(kind, Derived) and not getattr(kind, "replicated", False)]
    keys = {metric.key for kind in merged for _, metric in declared(kind) if not metric.when_positive}

    language = {key for key in keys if key.startswith("lm/")}  # tests/metrics/test_language.py
    assert keys - compared - language == OF_ITS_OWN.keys()
