"""Scripts for Stable-Baselines3 without telemetry: `run` attaches `TelemetryCallback` and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_script_runs import SCRIPTS, python, script_stderr, telemetry_lines, with_telemetry

from esper_telemetry import RunStatus, read_run
from esper_telemetry.core.record import AlarmEvent

pytestmark = pytest.mark.sb3
MODEL = str(SCRIPTS / "sb3_model.py")


@pytest.mark.parametrize("callback", ["none", "function", "list", "object", "nested"])
def test_it_is_attached_beside_every_form_of_callback(callback: str, tmp_path: Path) -> None:
    """Prints, weights and random numbers are unchanged. The script's callback is prepared once and called as often."""
    plain = python(tmp_path, MODEL, f"--callback={callback}")
    result = with_telemetry(tmp_path, MODEL, f"--callback={callback}")

    assert (result.code, result.stdout, script_stderr(result)) == (0, plain.stdout, plain.stderr)
    assert "weights" in plain.stdout
    run = read_run(tmp_path / "run")
    assert [record.axes.env_step for record in run.records] == [128, 256, 384, 512]
    assert {"policy/kl", "value/explained_variance", "grad/actor/norm_preclip"} <= run.records[-1].values.keys()
    first, *block, last = telemetry_lines(result)
    assert first.endswith(f"sb3_model.py: attached TelemetryCallback to PPO; journal in {tmp_path / 'run'}")
    assert "esper-telemetry: where it is" in block
    assert last.endswith(f"4 updates; the verdict on them: esper-telemetry diagnose {tmp_path / 'run'}")


def test_a_model_that_learns_again_goes_on_and_another_has_a_run_of_its_own(tmp_path: Path) -> None:
    result = with_telemetry(tmp_path, MODEL, "--again", "--second", "--callback=list")

    runs = [read_run(tmp_path / name) for name in ("run", "run-2")]
    assert [[record.axes.env_step for record in run.records] for run in runs] == [
        [128 * update for update in range(1, 9)],
        [128 * update for update in range(1, 5)],
    ]
    assert [run.status for run in runs] == [RunStatus.FINISHED] * 2
    attached = [line for line in telemetry_lines(result) if "attached TelemetryCallback" in line]
    assert [line.rpartition(" ")[2] for line in attached] == [str(tmp_path / name) for name in ("run", "run-2")]


def test_a_learning_rate_of_a_tenth_is_named(tmp_path: Path) -> None:
    """The alarm does not name the gradients, which are an effect."""
    with_telemetry(tmp_path, MODEL, "--learning-rate=0.1", "--steps=2560")

    raised = [alarm for alarm in read_run(tmp_path / "run").alarms if alarm.event is AlarmEvent.RAISE]
    assert raised[0].incident == 1
    causes = {alarm.cause for alarm in raised if alarm.incident == 1}
    assert causes & {"opt/update_too_large", "policy/kl_spike"}
    diagnosed = python(tmp_path, "-m", "esper_telemetry", "diagnose", "run").stdout
    assert "learning rate" in " ".join(diagnosed.partition("incident 2")[0].split())


def test_a_script_with_a_callback_of_its_own_is_left_alone(tmp_path: Path) -> None:
    result = with_telemetry(tmp_path, str(SCRIPTS / "sb3_own.py"))

    assert result.code == 0
    assert not (tmp_path / "run").exists()
    assert len(read_run(tmp_path / "own").records) == 2
    assert telemetry_lines(result)[-1].endswith("sb3_own.py: the script has its own TelemetryCallback; nothing was added")


def test_a_model_of_sb3_contrib_that_fails_is_named(tmp_path: Path) -> None:
    result = with_telemetry(tmp_path, str(SCRIPTS / "sb3_broken.py"))

    assert result.code == 1
    assert result.stderr.rstrip().splitlines()[-1] != ""
    assert "attached TelemetryCallback to RecurrentPPO" in telemetry_lines(result)[0]
    text = " ".join(python(tmp_path, "-m", "esper_telemetry", "diagnose", "run").stdout.split())
    assert "/run: 2 updates, failed The run failed at update 3: ValueError: Expected parameter" in text
    assert "the first non-finite tensor is observations (3 of 32 values, environments 2)." in text
