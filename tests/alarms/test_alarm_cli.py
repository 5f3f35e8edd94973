"""`train --threshold` and `--no-detect`."""

from pathlib import Path

import pytest
from scripted import ScriptedAlarm, scripted
from two_ranks import run_together

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms import Thresholds
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.main import run
from esper_telemetry.core.record import Level
from esper_telemetry.telemetry import session_of

SHORT = ("train", "--env", "CartPole-v1", "--total-steps", "3072", "--run-dir", "run", "--preset", "none")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--threshold", "kl_spyke_low=1"], "kl_spyke_low"),
        (["--threshold", "adv_norm=1", "--no-detect"], "--threshold adv_norm=1 is for alarms, which --no-detect switches off"),
    ],
)
def test_a_threshold_that_does_not_exist_is_named_and_nothing_is_created(tmp_path: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        run([*SHORT, *options])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
@pytest.mark.usefixtures("one_core")
def test_a_threshold_raises_what_it_makes_worth_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """Every KL exceeds this bound; the command's last lines report the alarm."""
    assert run([*SHORT, "--threshold", "kl_spike_low=1e-9", "--threshold", "kl_spike_high=1e-8"]) == 0

    assert "policy/kl_spike" in {alarm.type for alarm in read_run("run").alarms}
    printed = capsys.readouterr().out
    assert "what went wrong" in printed and "$ esper-telemetry diagnose" in printed


@pytest.mark.system
@pytest.mark.usefixtures("one_core")
def test_nothing_is_looked_for_with_no_detect() -> None:
    assert run([*SHORT, "--no-detect"]) == 0

    journal = read_run("run")
    assert journal.alarms == ()
    assert not [key for record in journal.records for key in record.values if key.startswith("alarm/")]


def test_thresholds_of_another_kind_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="detect takes True, False or Thresholds, got 'no'"):
        Telemetry(run_dir=tmp_path / "run", detect="no")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    Telemetry(run_dir=tmp_path / "run", detect=Thresholds()).close()


def together(rank: int, run_dir: str) -> list[int]:
    """The level of six updates on this rank."""
    levels = []
    with Telemetry(run_dir=run_dir, detect=scripted({2: ScriptedAlarm("policy/kl_spike", remaining=2)})) as telemetry:
        for update in range(1, 7):
            telemetry.flush(env_step=update)
            levels.append(int(session_of(telemetry).update_level))
    return levels


@pytest.mark.system
def test_ranks_raise_the_level_together(tmp_path: Path) -> None:
    """Update 2 raises the level, the exchange of update 3 tells all ranks, and the requested two updates follow."""
    first, second = run_together(together, tmp_path, str(tmp_path / "run"))

    usual, raised = Level.NORMAL, Level.DEBUG
    assert first == second == [usual, usual, usual, raised, raised, usual]
    assert [alarm.axes.update for alarm in read_run(tmp_path / "run").alarms] == [2]
