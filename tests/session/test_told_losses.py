"""Records that the journal could not store are counted at the end, and no message claims that it is complete."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_telemetry import ConsoleSink, Telemetry
from esper_telemetry.core.supervisor import ProcessSupervisor
from esper_telemetry.pipeline.run_recorder import RecordTotals
from esper_telemetry.pipeline.worker import WorkerPipeline
from esper_telemetry.telemetry import session_of


@pytest.mark.skipif(sys.platform != "linux", reason="a directory in use can be removed")
def test_a_run_directory_that_is_deleted_meanwhile_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[object] = []
    with Telemetry([taken.append, ConsoleSink()], run_dir=tmp_path / "run") as telemetry:
        for update in range(1, 4):
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=update)
        gone = (tmp_path / "run").rename(tmp_path / "gone")  # at once, because a process may still write into it
        shutil.rmtree(gone, ignore_errors=True)

    messages = [record.getMessage() for record in caplog.records]
    out = capsys.readouterr().out
    assert any("3 of 3 records are not in the journal, because the journal was deleted" in text for text in messages)
    assert "3 of 3 records are not in the journal" in out
    assert "has every number" not in out and "no alarm was raised" not in out


def tear(journal: Path) -> None:
    """Like another writer: the next record becomes part of its line."""
    with journal.open("ab") as file:
        file.write(b"half a line")


def move(journal: Path) -> None:
    journal.parent.rename(journal.parent.with_name("elsewhere"))


@pytest.mark.skipif(sys.platform != "linux", reason="a file in use can be moved")
@pytest.mark.parametrize(
    ("change", "sentence", "state"),
    [
        (tear, "1 of 3 records cannot be read from the journal, because lines of it are damaged; console has 2", "lacks records"),
        (lambda journal: os.truncate(journal, 0), "3 of 3 records cannot be read from the journal", "cannot be read"),
        (move, "3 of 3 records cannot be read from the journal", "cannot be read"),
    ],
    ids=["torn", "emptied", "moved"],
)
def test_a_journal_that_another_program_changes_is_not_called_complete(
    change: Callable[[Path], None], sentence: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with Telemetry([ConsoleSink()], run_dir=run_dir) as telemetry:
        for update in range(1, 4):
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=update)
            if update == 2:
                telemetry.state_dict()
                change(run_dir / "journal.jsonl")

    out = capsys.readouterr().out
    assert sentence in out
    assert f"(journal.jsonl in it {state})" in out
    assert ("esper-telemetry diagnose" in out) == (state == "lacks records")


@pytest.mark.system
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker")
def test_a_worker_that_cannot_be_ended_costs_the_journal_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that waits for a network file system survives SIGKILL; here `kill` does nothing."""
    telemetry = Telemetry(run_dir=tmp_path, offload=True, close_timeout=0.4)
    telemetry.log({"my/number": 1.0})
    telemetry.flush(env_step=1)
    telemetry.state_dict()
    pipeline = session_of(telemetry)._recorder.pipeline  # type: ignore[union-attr]
    assert isinstance(pipeline, WorkerPipeline)
    supervisor, pid = pipeline._supervisor, pipeline.pid
    os.kill(pid, 19)
    monkeypatch.setattr(ProcessSupervisor, "kill", lambda self: None)
    monkeypatch.setattr("esper_telemetry.core.supervisor.MAX_REAP_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        telemetry.log({"my/number": 2.0})
        telemetry.flush(env_step=2)
        telemetry.close()

    assert supervisor.pid is None
    messages = [record.getMessage() for record in caplog.records]
    assert any("cannot be ended: nothing is recorded from here on" in text for text in messages)
    assert any("1 of 2 records are not in the journal" in text for text in messages)
    os.kill(pid, 9)


@pytest.mark.parametrize(
    ("totals", "taken", "sentence"),
    [
        (RecordTotals(21, 0), {}, ""),
        (RecordTotals(21, 21), {}, "21 of 21 records are not in the journal, because the disk did not take them; 21 are lost"),
        (
            RecordTotals(21, 13),
            {"console": 8, "tensorboard": 10},
            "13 of 21 records are not in the journal, because the disk did not take them; 11 are lost (console has 8, tensorboard has 10)",
        ),
        (
            RecordTotals(3, 3, is_deleted=True),
            {"wandb": 3},
            "3 of 3 records are not in the journal, because the journal was deleted, but wandb has 3",
        ),
    ],
)
def test_the_sentence_counts_what_exists_nowhere(totals: RecordTotals, taken: dict[str, int], sentence: str) -> None:
    assert totals.loss(taken) == sentence
