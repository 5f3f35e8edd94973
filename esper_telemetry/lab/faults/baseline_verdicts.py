"""What all judges say of kept runs: the detectors, with several thresholds if asked, and the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.lab.faults.baselines import BASELINES
from esper_telemetry.lab.faults.course import DESCRIPTION
from esper_telemetry.lab.faults.judging import ByDetectors, Judged, judged, kept


@dataclass(frozen=True, slots=True)
class Opinions:
    """What is said of one run.

    Attributes:
        detectors: by the detectors.
        baselines: by each baseline.
        scaled: by the detectors with all thresholds multiplied by a factor.
    """

    detectors: Judged
    baselines: Mapping[str, Judged] = field(default_factory=dict)
    scaled: Mapping[float, Judged] = field(default_factory=dict)


def opinions(run_dir: Path, factors: Sequence[float] = ()) -> Opinions:
    """What all judges say of the run in a directory; raises ValueError where there is none of the fault bed."""
    run = kept(run_dir)
    usual = Thresholds()
    return Opinions(
        judged(run, partial(ByDetectors, thresholds=usual)),
        {name: judged(run, make) for name, make in BASELINES.items()},
        {factor: judged(run, partial(ByDetectors, thresholds=usual.scaled(factor))) for factor in factors},
    )


def all_opinions(run_dirs: Sequence[Path], pool: Executor, factors: Sequence[float] = ()) -> Iterator[Opinions]:
    """Of all runs, in order."""
    yield from pool.map(opinions, run_dirs, [tuple(factors)] * len(run_dirs), chunksize=4)


def kept_runs(directory: Path) -> list[Path]:
    """The runs in a directory, by name; raises ValueError where there is none."""
    found = sorted(path.parent for path in directory.glob(f"*/{DESCRIPTION}") if not path.parent.name.endswith(".part"))
    if not found:
        raise ValueError(f"{directory} holds no runs of the fault bed")
    return found
