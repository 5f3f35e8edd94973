"""`Telemetry(..., resume=True)` in a user's loop over two ranks: both continue after the same update, and each update is recorded once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from two_ranks import run_together

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.reduction import Mean


@dataclass(frozen=True, slots=True)
class Bonus(MetricGroup):
    """A group that each rank measures on its own data."""

    bonus: Mean = reports(Metric(key="my/bonus", unit="1", question="?"))


def updates(telemetry: Telemetry, rank: int, numbers: range) -> None:
    """Rank r measures 10 u + r in update u."""
    for update in numbers:
        telemetry.observe(Bonus(Mean(10.0 * update + rank, 1.0)))
        telemetry.flush(env_step=100 * update)


def gone_on(rank: int, run_dir: str, saved: bool) -> dict[str, Any]:
    """Run four updates, then resume with updates 3 to 6, from a saved state or by counting only."""
    with Telemetry(run_dir=run_dir) as telemetry:
        updates(telemetry, rank, range(1, 3))
        state = telemetry.state_dict()
        updates(telemetry, rank, range(3, 5))
    with Telemetry(run_dir=run_dir, resume=True) as telemetry:
        if saved:
            telemetry.load_state_dict(state)
        updates(telemetry, rank, range(3, 7))
        return {"state": telemetry.state_dict(), "run_dir": str(telemetry.run_dir)}


@pytest.mark.parametrize("saved", [True, False])
def test_what_is_recorded_stands_and_the_rest_is_of_both_ranks(saved: bool, tmp_path: Path) -> None:
    """The mean of 10 u and 10 u + 1."""
    run_dir = tmp_path / "run"

    first, second = run_together(gone_on, tmp_path, str(run_dir), saved)

    run = read_run(run_dir)
    assert [record.values["my/bonus"] for record in run.records] == [10 * u + 0.5 for u in range(1, 7)]
    assert [record.axes.update for record in run.records] == list(range(1, 7))
    assert run.status is RunStatus.FINISHED and run.info.resumed_from is not None
    assert run.info.resumed_from["recorded"] == 4
    assert first == second == {"state": {"update": 6, "env_step": 600, "gradient_step": 0}, "run_dir": str(run_dir)}


def refused(rank: int, run_dir: str) -> str:
    try:
        Telemetry(run_dir=run_dir, resume=True)
    except FileNotFoundError as error:
        return str(error)
    return ""


def test_what_cannot_be_resumed_is_said_on_every_rank(tmp_path: Path) -> None:
    first, second = run_together(refused, tmp_path, str(tmp_path / "nothing"))

    assert first == second and first.startswith("there is no run directory ")
