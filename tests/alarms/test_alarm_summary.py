"""The summary at the end of a run: what went wrong, where everything is, and the commands that open it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from healthy_run import record
from scripted import ScriptedAlarm, scripted

from esper_telemetry import Telemetry
from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.sinks import MLflowSink, TensorBoardSink, end_block
from esper_telemetry.telemetry import session_of
from esper_telemetry.views.verdict_text import Summary

SCRIPT = {
    2: ScriptedAlarm("policy/kl_spike"),
    3: ScriptedAlarm("grad/explode", severity=0.4),
    4: ScriptedAlarm("policy/kl_spike", AlarmEvent.CLEAR, 0.0),
}


def loop(
    run_dir: Path | None, sinks: Sequence[Any], error: type[BaseException] | None = None, script: Mapping[int, ScriptedAlarm] = SCRIPT
) -> Telemetry:
    """A user's own loop, which finishes or raises that exception."""
    with suppress(KeyboardInterrupt), Telemetry(sinks, run_dir=run_dir, detect=scripted(script), offload=False) as telemetry:
        for update in range(1, 6):
            telemetry.flush(env_step=update)
        if error is not None:
            raise error
    return telemetry


def said(run_dir: Path, script: Mapping[int, ScriptedAlarm], capsys: pytest.CaptureFixture[str]) -> str:
    Summary().show(session_of(loop(run_dir, (), script=script)).run_end(RunStatus.FINISHED))
    return capsys.readouterr().out


def test_the_summary_names_the_cause_what_came_with_it_and_where_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(tmp_path, SCRIPT, capsys).splitlines()

    start = lines.index("what went wrong")
    assert lines[start + 1 : start + 4] == [
        "  policy/kl_spike, since update 2, ended at update 4",
        "    Since update 2 policy/kl has been too large. Try a lower learning rate.",
        "    with it came grad/explode (still active)",
    ]
    opens = [line.split("$ ")[1] for line in lines if "$ " in line]
    assert opens == [f"esper-telemetry {view} {tmp_path}" for view in ("report", "watch", "diagnose")] + [
        f"esper-telemetry compare {tmp_path} OTHER_RUN"
    ]


def test_commands_that_need_the_extra_views_are_named_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_block, "find_spec", lambda package: None)

    lines = said(tmp_path, SCRIPT, capsys).splitlines()

    assert [line.split("$ ")[1] for line in lines if "$ " in line] == [f"esper-telemetry diagnose {tmp_path}"]
    assert any("pip install 'esper-telemetry[views]'" in line for line in lines)


def test_a_run_in_which_nothing_went_wrong_has_nothing_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "wrong" not in said(tmp_path, {}, capsys)


@pytest.mark.parametrize(("spread", "shown"), [(0.02, "undefined: returns vary by 0.5%"), (0.4, "-126%")])
def test_a_solved_task_with_constant_returns_has_no_explained_variance(
    spread: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = Summary()
    summary.observe(record(1, {"value/explained_variance": -1.26, "ret/mean": -4.0, "ret/std": spread}))

    with Telemetry() as telemetry:
        pass
    summary.show(session_of(telemetry).run_end(RunStatus.FINISHED))

    assert f"returns explained by the critic | {shown} " in capsys.readouterr().out.replace("│", "|")


@pytest.mark.system
def test_a_loop_of_ones_own_with_the_console_ends_with_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop(tmp_path / "a", ["console", TensorBoardSink()])

    lines = capsys.readouterr().out.splitlines()
    block = lines[lines.index("what went wrong") :]
    assert block[1] == "  policy/kl_spike, since update 2, ended at update 4"
    assert f"  TensorBoard  $ tensorboard --logdir {tmp_path}/a" in block
    assert any("http://localhost:6006/#custom_scalars" in line for line in block)
    assert "resume" not in "".join(block)


def test_a_loop_that_was_interrupted_is_told_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop(tmp_path, ["console"], KeyboardInterrupt)

    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"resume with: Telemetry(run_dir='{tmp_path}', resume=True), and the model of your last checkpoint"


def test_a_loop_without_the_console_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop(tmp_path, [])

    assert capsys.readouterr().out == ""


@pytest.mark.system
def test_a_run_without_a_directory_names_the_backends_that_have_a_place_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(None, ["console", TensorBoardSink(tmp_path / "there"), MLflowSink()])

    block = capsys.readouterr().out.split("where it is\n")[1]
    assert f"$ tensorboard --logdir {tmp_path}/there" in block
    assert "mlflow" not in block.lower() and "esper-telemetry" not in block
