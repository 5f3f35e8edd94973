"""`Telemetry` over two ranks: they report one merged run, agree on samples and evidence, resume together, and never wait in vain."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from two_ranks import run_together

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import Counts, Last, Max, Mean, Moments, Sum
from esper_telemetry.metrics.advantages import advantage_stats
from esper_telemetry.pipeline import rank_exchange as peers
from esper_telemetry.telemetry import session_of
from esper_telemetry.updates.update import JoinedMinibatches, Update


@dataclass(frozen=True, slots=True)
class Bonus(MetricGroup):
    """A group that each rank measures on its own data."""

    bonus: Mean | None = reports(
        Metric(key="my/bonus", unit="1", question="?"), Metric(key="my/bonus_max", unit="1", question="?", over="max")
    )
    seen: Sum | None = reports(Metric(key="my/seen", unit="1", question="?"))
    largest: Max | None = reports(Metric(key="my/largest", unit="1", question="?"))
    spread: Moments | None = reports(Metric(key="my/std", unit="1", question="?", of="std"))


@dataclass(frozen=True, slots=True)
class Norm(MetricGroup):
    """A group that is the same on every rank."""

    replicated: ClassVar[bool] = True
    norm: Sum = reports(Metric(key="my/norm", unit="1", question="?"))


@dataclass(frozen=True, slots=True)
class Episode(MetricGroup):
    """A group that only one rank observes."""

    name: str = label()
    length: Mean = reports(Metric(key="my/{name}/length", unit="1", question="?"))


@dataclass(frozen=True, slots=True)
class Histogram(MetricGroup):
    """A group that ranks may disagree about."""

    counts: Counts = reports(Metric(key="my/counts", unit="1", question="?"))
    last: Last | None = reports(Metric(key="my/last", unit="1", question="?"))


def loop(rank: int, run_dir: str) -> dict[str, Any]:
    """Run three updates of a user's loop; return what this rank knows about the run."""
    telemetry = Telemetry(run_dir=run_dir, name="mine")
    for update in range(1, 4):
        for value in (1.0, 3.0) if rank == 0 else (5.0, 7.0):
            telemetry.observe(Bonus(Mean(value, 1.0 + rank), Sum(1.0), Max(value)))
        telemetry.observe(Norm(Sum(4.0)))
        telemetry.observe(advantage_stats(torch.arange(100.0) + 100 * rank))
        if update == 2 and rank == 1:
            telemetry.observe(Episode("short", Mean(12.0, 2.0)))
            telemetry.observe(Histogram(Counts(torch.ones(2000), tuple(float(edge) for edge in range(2001)))))
        telemetry.log({"my/schedule": 10.0 * update + rank})
        telemetry.flush(env_step=100 * update)
    telemetry.close()
    return {"run_dir": str(telemetry.run_dir), "ranks": session_of(telemetry).ranks, "run": telemetry.run is not None}


@pytest.mark.system
def test_ranks_of_a_loop_of_ones_own_report_as_one(tmp_path: Path) -> None:
    """Minibatch 1 is (1 + 2·5) / 3 over both ranks, minibatch 2 is (3 + 2·7) / 3. An episode of one rank is reported unchanged."""
    first, second = run_together(loop, tmp_path, str(tmp_path / "run"))

    assert first == {"run_dir": str(tmp_path / "run"), "ranks": 2, "run": True}
    assert second == first | {"run": False}
    run = read_run(tmp_path / "run")
    assert [record.axes.env_step for record in run.records] == [100, 200, 300]
    for update, record in enumerate(run.records, 1):
        values = record.values
        assert values["my/bonus"] == pytest.approx((1 + 3 + 5 * 1 + 7 * 1) / (2 + 2 * 2))
        assert values["my/bonus_max"] == pytest.approx(max((1 + 5) / 3, (3 + 7) / 3))
        assert (values["my/seen"], values["my/largest"], values["my/norm"]) == (4.0, 7.0, 4.0)
        assert values["my/schedule"] == 10.0 * update
        assert values["adv/raw/mean"] == 99.5 and values["adv/raw/max"] == 199.0
        assert values["adv/raw/p95"] == pytest.approx(0.95 * 199, abs=200 / 64)
        assert values.get("my/short/length") == (6.0 if update == 2 else None)
        assert ("my/counts" in record.histograms) == (update == 2)


def disagree(rank: int, run_dir: str) -> str:
    """Observe a histogram whose edges differ between ranks."""
    edges = (0.0, 1.0, 2.0 + rank)
    telemetry = Telemetry(run_dir=run_dir)
    telemetry.observe(Histogram(Counts(torch.ones(2), edges)))
    try:
        telemetry.flush(env_step=1)
    except RuntimeError as error:
        telemetry.close("failed")
        return str(error)
    return ""


@pytest.mark.system
def test_ranks_that_measure_differently_end_with_a_sentence_on_both(tmp_path: Path) -> None:
    first, second = run_together(disagree, tmp_path, str(tmp_path / "run"))

    assert first == second
    assert "ranks 0 and 1 measure my/counts in different ways" in first
    assert "the edges (0.0, 1.0, 2.0)" in first and "the edges (0.0, 1.0, 3.0)" in first


def stopped(rank: int, run_dir: str, reason: str) -> int:
    """Return the update after which this rank stops: rank 1 asks for it in update 2, or rank 0 has a critical alarm of update 2."""
    with Telemetry(run_dir=run_dir) as telemetry:
        for update in range(1, 6):
            if update == 2 and rank == 1 and reason == "request":
                telemetry.request_stop()
            telemetry.log({"loss/value": float("nan") if update == 2 and reason == "alarm" else 1.0})
            telemetry.flush(env_step=update)
            if telemetry.should_stop():
                return update
            assert not telemetry.should_stop(alarms=False)
    return 0


@pytest.mark.parametrize(("reason", "update"), [("request", 2), ("alarm", 3), ("none", 0)])
def test_all_ranks_stop_after_the_same_update(tmp_path: Path, reason: str, update: int) -> None:
    """A request travels with the numbers of its update; an alarm is raised after its update was exchanged."""
    assert run_together(stopped, tmp_path, str(tmp_path / "run"), reason) == [update, update]


def partly(rank: int, run_dir: str) -> None:
    """Observe some fields, and some rows, on one rank only."""
    with Telemetry(run_dir=run_dir) as telemetry:
        for update in range(1, 3):
            telemetry.observe(Bonus(seen=Sum(1.0), bonus=Mean(2.0, 1.0)) if rank else Bonus(seen=Sum(1.0)))
            if rank:
                telemetry.observe(Bonus(seen=Sum(5.0), bonus=Mean(8.0, 1.0)))
            telemetry.flush(env_step=update)


def test_fields_and_rows_of_one_rank_only_are_merged_with_what_there_is(tmp_path: Path) -> None:
    assert run_together(partly, tmp_path, str(tmp_path / "run")) == [None, None]

    first, second = read_run(tmp_path / "run").records
    assert [first.values[key] for key in ("my/seen", "my/bonus", "my/bonus_max")] == [7.0, 5.0, 8.0]
    assert second.values["my/seen"] == 7.0


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
    assert [(record.axes.update, record.values["my/bonus"]) for record in run.records] == [(u, 10 * u + 0.5) for u in range(1, 7)]
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
    """Only rank 0 looks for the run."""
    first, second = run_together(refused, tmp_path, str(tmp_path / "nothing"))

    assert first == second and first.startswith("there is no run directory ")


def alone(rank: int, run_dir: str) -> int:
    """Open telemetry on rank 0 only, and declare this; rank 0 does not wait for the other rank."""
    if rank:
        return 0
    with Telemetry(run_dir=run_dir, ranks="alone") as telemetry:
        telemetry.observe(Bonus(seen=Sum(1.0)))
        telemetry.flush(env_step=1)
        return session_of(telemetry).ranks


def test_one_rank_may_report_alone(tmp_path: Path) -> None:
    assert run_together(alone, tmp_path, str(tmp_path / "run")) == [1, 0]
    assert read_run(tmp_path / "run").records[0].values["my/seen"] == 1.0


def without_the_other(rank: int) -> str:
    """Create no Telemetry on rank 1. The test shortens the wait of a minute."""
    if rank:
        return ""
    peers.MEETING_TIMEOUT = timedelta(seconds=2)  # type: ignore[misc]  # in this process, which ends with this function
    try:
        Telemetry(run_dir=None)
    except RuntimeError as error:
        return str(error)
    return "made"


@pytest.mark.system
def test_a_rank_without_telemetry_is_missed_and_named(tmp_path: Path) -> None:
    first, _ = run_together(without_the_other, tmp_path)

    assert "not all 2 ranks made a Telemetry within 2 s" in first and "ranks='alone'" in first


EXPLODED = torch.tensor([0.0, 5.0, -0.1, 0.1])


def jumping(log_ratio: torch.Tensor) -> Update:
    """An update of one minibatch."""
    return Update(
        minibatches=JoinedMinibatches(
            epochs=(0,), counts=(len(log_ratio),), log_ratio=log_ratio, advantages=torch.ones(len(log_ratio)), valid=None, losses={}
        )
    )


def update(rank: int, run_dir: str) -> list[int]:
    """Run one update whose ratios explode in different places; return the sampling periods before and after."""
    telemetry = Telemetry(run_dir=run_dir)
    session_of(telemetry).start(facts={"ranks": 2, "clip": 0.2})
    found = [session_of(telemetry).sampling.every]
    session_of(telemetry).sampling.proposed = 4 if rank == 0 else 32
    session_of(telemetry).submit(jumping(EXPLODED + rank))
    telemetry.flush(env_step=4)
    telemetry.close()
    return [*found, session_of(telemetry).sampling.every]


@pytest.mark.system
def test_ranks_look_closely_as_often_as_the_first_one_can_afford(tmp_path: Path) -> None:
    assert run_together(update, tmp_path, str(tmp_path / "run")) == [[8, 4], [8, 4]]


def test_evidence_is_of_the_first_rank_and_says_so(tmp_path: Path) -> None:
    """Rank 1 has a log-ratio of 6: the record has it, but the evidence shows rank 0's transitions."""
    run_together(update, tmp_path, str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    (alarm,) = [alarm for alarm in run.alarms if alarm.type == "policy/kl_spike"]

    assert run.records[0].values["policy/logratio/absmax"] == 6.0
    assert alarm.evidence["rank"] == 0
    assert [row["log_ratio"] for row in alarm.evidence["worst"]] == pytest.approx([5.0, 0.1, -0.1, 0.0])
