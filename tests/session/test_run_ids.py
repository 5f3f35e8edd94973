"""Run ids are part of file names, so they must not lead out of the run directory."""

import re
from pathlib import Path

import pytest

from esper_telemetry import read_run
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.main import run as run_command
from esper_telemetry.core.record import RunInfo
from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.sinks import TensorBoardSink
from esper_telemetry.testing.sinks import journalled, record, run_in


@pytest.mark.parametrize("run_id", ["../../evil", "/tmp/evil", "..", ".hidden", "", "x'y\"*", "two words", "a\nb", "a" * 129])
def test_an_id_that_could_be_a_path_is_refused(run_id: str) -> None:
    with pytest.raises(ValueError) as refused:
        RunInfo(run_id, name="a", run_dir=None, started=0.0)

    assert str(refused.value).endswith(f"got {run_id!r}")


@pytest.mark.parametrize("run_id", ["4b4768a3c75a", "abc_1-2.3", "-x", "a" * 128])
def test_what_ids_look_like_is_taken(run_id: str) -> None:
    assert RunInfo(run_id, name="a", run_dir=None, started=0.0).run_id == run_id


def test_a_journal_that_says_so_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    journalled(run_in(run_dir), [record(1)])
    journal = run_dir / "journal.jsonl"
    journal.write_text(re.sub('"run_id":"[^"]*"', '"run_id":"../../evil"', journal.read_text()))

    with pytest.raises(ValueError, match="no line that describes the run"):
        read_run(run_dir)
    for command in (["workspace", str(run_dir), "--project", "p"], ["diagnose", str(run_dir)], ["doctor", str(run_dir)]):
        with pytest.raises(WrongUse, match="no line that describes the run"):
            run_command(command)
    with pytest.raises(ValueError, match="no line that describes the run"):
        replay(run_dir, TensorBoardSink())

    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "a", "journal.jsonl"]
