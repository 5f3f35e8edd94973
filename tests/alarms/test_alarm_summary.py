"""The last words of a run in which something went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import ScriptedAlarm, scripted

from esper_telemetry import Telemetry
from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.telemetry import session_of
from esper_telemetry.views.outcome import Summary

SCRIPT = {
    2: ScriptedAlarm("policy/kl_spike"),
    3: ScriptedAlarm("grad/explode", severity=0.4),
    4: ScriptedAlarm("policy/kl_spike", AlarmEvent.CLEAR, 0.0),
}


def said(run_dir: Path, script: dict[int, ScriptedAlarm], capsys: pytest.CaptureFixture[str]) -> str:
    with Telemetry(run_dir=run_dir, detect=scripted(script), offload=False) as telemetry:
        for update in range(1, 6):
            telemetry.flush(env_step=update)
    Summary().show(session_of(telemetry).run_end(RunStatus.FINISHED))
    return capsys.readouterr().out


def test_the_summary_names_the_cause_what_came_with_it_and_where_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(tmp_path, SCRIPT, capsys).splitlines()

    start = lines.index("what went wrong")
    assert lines[start + 1 : start + 4] == [
        "  policy/kl_spike, since update 2, still so at the end",
        "    Since update 2 policy/kl has been too large. Try a lower learning rate.",
        "    with it came grad/explode",
    ]
    opens = [line.split("$ ")[1] for line in lines if "$ " in line]
    assert opens == [f"esper-telemetry {view} {tmp_path}" for view in ("report", "watch", "diagnose")] + [
        f"esper-telemetry compare {tmp_path} OTHER_RUN"
    ]


def test_a_run_in_which_nothing_went_wrong_has_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "wrong" not in said(tmp_path, {}, capsys)
