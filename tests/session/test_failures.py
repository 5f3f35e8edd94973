"""If an exception ended a run, every view begins with the exception and the first tensor that is not finite."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_env import Broken
from run_cli import run_cli
from torch import nn

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record, RunInfo
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_event, encode_record, encode_run
from esper_telemetry.sinks.pages import IncidentCards
from esper_telemetry.testing import MemorySink
from esper_telemetry.testing.sinks import journalled
from esper_telemetry.updates.failure import failure_data


def axes_of(update: int) -> Axes:
    return Axes(update=update, env_step=100 * update, gradient_step=10 * update, wall_time=1e9)


AXES = axes_of(6)
NAN_OBSERVATIONS = {
    "exception": "ValueError",
    "message": "Expected parameter logits:\ntensor([[nan]])",
    "first_nonfinite": "observations[2, 0] = nan",
    "nonfinite": {"tensor": "observations", "count": 3, "size": 32, "environments": [2]},
}
SENTENCE = (
    "The run failed at update 7: ValueError: Expected parameter logits:; "
    "the first non-finite tensor is observations (3 of 32 values, environments 2)"
)


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return a command's stdout with lines joined by spaces."""
    return " ".join(run_cli(arguments, capsys).out.split())


def journal(directory: Path, status: RunStatus | None, failure: dict[str, Any] | None = None) -> Path:
    """Write a run of six healthy updates that ended with this failure."""
    path = directory / "run"
    book = Journal.create(path)
    book.write(encode_run(RunInfo("r1", "run", path, 1e9)))
    for update in range(1, 7):
        book.write(encode_record(Record(update, axes_of(update), {"policy/kl": 0.01, "loss/value": 1.0})))
    if failure is not None:
        book.write(encode_event(JournalEvent("failure", failure, seq=7, axes=AXES)))
    if status is not None:
        book.write(encode_end(status, seq=8))
    book.close()
    return path


def test_a_failure_raises_the_alarm_that_fits_and_one_of_its_own() -> None:
    """The cause of the incident is the tensor, or the exception if no tensor is known."""
    numeric = Detectors().failure(7, AXES, NAN_OBSERVATIONS).alarms
    other = Detectors().failure(7, AXES, {"exception": "KeyError", "message": "'joint 7'", "first_nonfinite": ""}).alarms

    assert [(alarm.type, alarm.cause) for alarm in numeric] == [
        ("numerics/nonfinite", "numerics/nonfinite"),
        ("run/failed", "numerics/nonfinite"),
    ]
    assert numeric[0].value == 3
    assert numeric[1].text.startswith(SENTENCE + ". Try: ")
    assert [(alarm.type, alarm.cause) for alarm in other] == [("run/failed", "run/failed")]
    assert other[0].text.startswith("The run failed at update 7: KeyError: 'joint 7'. Try: ")


def test_a_run_that_goes_on_after_its_failure_clears_the_alarms() -> None:
    detectors = Detectors()
    detectors.failure(7, AXES, NAN_OBSERVATIONS)
    record = Record(8, AXES, {"numerics/nonfinite": 0.0})

    over = {alarm.type for alarm in detectors.step(record).alarms if alarm.event is AlarmEvent.CLEAR}

    assert over == {"run/failed", "numerics/nonfinite"}


def test_diagnose_begins_with_the_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path, RunStatus.FAILED, NAN_OBSERVATIONS)

    text = output(["diagnose", str(path)], capsys)
    diagnosis = json.loads(output(["diagnose", str(path), "--json"], capsys))

    assert text.startswith(f"run: 6 updates, failed {SENTENCE}.")
    assert "incident 1, update 6: numerics/nonfinite" in text
    assert "raised an alarm" in text and "Unexplained" not in text
    assert diagnosis["ending"] == f"{SENTENCE}."
    assert diagnosis["failure"]["nonfinite"]["environments"] == [2]
    assert [incident["cause"] for incident in diagnosis["incidents"]] == ["numerics/nonfinite"]
    assert SENTENCE in output(["doctor", str(path)], capsys)


@pytest.mark.parametrize(
    ("status", "failure", "said"),
    [
        (RunStatus.FAILED, None, "The run failed after update 6 without an exception in its journal"),
        (RunStatus.KILLED, None, "The run was killed after update 6"),
        (RunStatus.FAILED, {"exception": "KeyError", "message": ""}, "The run failed at update 7: KeyError."),
        (RunStatus.FINISHED, None, "Too short to tell"),
    ],
)
def test_no_failed_run_is_called_healthy(
    status: RunStatus, failure: dict[str, Any] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal(tmp_path, status, failure)

    text = output(["diagnose", str(path)], capsys)

    assert text.startswith(f"run: 6 updates, {status} {said}")
    assert ("Too short to tell" in text) == (status is RunStatus.FINISHED)


def test_pages_of_sinks_begin_with_the_failure() -> None:
    earlier = Alarm(3, AXES, "policy/kl_spike", AlarmEvent.RAISE, 1.0, AlarmLevel.CRITICAL, "policy/kl", incident=1, text="KL.")
    incidents = IncidentCards([earlier, *Detectors().failure(7, AXES, NAN_OBSERVATIONS).alarms])

    assert incidents.page().splitlines()[2].startswith("**The run failed at update 7: ValueError")


def test_an_exception_in_the_search_leaves_the_users_own() -> None:
    def broken() -> Any:
        raise RuntimeError("the device is lost")

    assert failure_data(ValueError("nan"), broken) == {"exception": "ValueError", "message": "nan", "first_nonfinite": ""}


def test_infinite_features_are_the_fault_and_have_their_line() -> None:
    """The logarithm of 0 is an infinite input of a network, whose output may still be finite."""

    def features() -> None:
        distance = torch.tensor([2.0, 0.0]).log()
        output = torch.tensor([torch.nan])
        raise ValueError(f"{len(distance) + len(output)}")

    with pytest.raises(ValueError) as raised:
        features()

    line = features.__code__.co_firstlineno + 1
    assert failure_data(raised.value)["first_nonfinite"] == "distance[1] = -inf"
    assert failure_data(raised.value)["nonfinite"]["tensor"] == f"distance, assigned in test_failures.py:{line}"


def test_masks_are_not_taken_for_the_fault() -> None:
    """Negative infinity marks forbidden actions; a KeyError says nothing about tensors."""

    def masked() -> None:
        logits, added = torch.tensor([1.0, -torch.inf]), torch.tensor([0.0, -torch.inf])
        raise ValueError(f"{len(logits) + len(added)}")

    def unrelated() -> None:
        unused = torch.tensor([torch.nan])
        raise KeyError(len(unused))

    for function, error in ((masked, ValueError), (unrelated, KeyError)):
        with pytest.raises(error) as raised:
            function()
        assert failure_data(raised.value)["first_nonfinite"] == ""


def own_loop(run_dir: Path, poison: str) -> None:
    """Run a loop with `watch` that fails in its third update."""
    actor = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(actor.parameters(), lr=0.1)
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        telemetry.watch(actor, optimizer)
        for update in range(5):
            obs = torch.rand(8, 4)
            if update == 2 and poison == "obs":
                obs[2, :3] = torch.nan
            if update == 2 and poison == "parameters":
                with torch.no_grad():
                    actor.weight[0, 0] = torch.nan
            if update == 2 and poison == "crash":
                raise OSError("the simulator is gone")
            weight_t = torch.rand(8) / (0 if update == 1 and poison == "variable" else 1)
            policy = torch.distributions.Categorical(logits=actor(obs), validate_args=True)
            (weight_t * policy.log_prob(torch.zeros(8))).sum().backward()
            optimizer.step()
            telemetry.flush(env_step=8 * (update + 1))


@pytest.mark.parametrize(
    ("poison", "error", "named"),
    [
        ("obs", ValueError, "(3 of 32 values)"),
        ("parameters", ValueError, "weight (1 of 8 values)"),
        ("variable", ValueError, "weight_t, assigned in test_failures.py:"),
        ("crash", OSError, "OSError: the simulator is gone."),
    ],
)
def test_an_own_loop_names_its_tensor(
    poison: str, error: type[Exception], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error):
        own_loop(tmp_path / "run", poison)

    text = output(["diagnose", str(tmp_path / "run")], capsys)

    assert f"/run: 2 updates, failed The run failed at update 3: {error.__name__}" in text
    assert named in text.partition("Could not be")[0]
    assert "checks passed" in text and "Unexplained" not in text
    alarms = [alarm for alarm in read_run(tmp_path / "run").alarms if alarm.event is AlarmEvent.RAISE]
    assert ("The first non-finite tensor is weight_t, assigned in" in alarms[0].text) is (poison == "variable")
    assert [alarm.type for alarm in alarms] == (["run/failed"] if poison == "crash" else ["numerics/nonfinite", "run/failed"])


@pytest.mark.sb3
@pytest.mark.parametrize("fault", ["observation", "reward", "crash"])
def test_stable_baselines3_names_its_tensor(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The third of eight environments breaks in the third rollout."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    from esper_telemetry.adapters.sb3 import TelemetryCallback

    env = DummyVecEnv([partial(Broken, fault, place) for place in range(8)])
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, device="cpu", seed=3)
    memory = MemorySink()
    with pytest.raises(KeyError if fault == "crash" else ValueError), Telemetry([memory], run_dir=tmp_path / "run") as telemetry:
        model.learn(8 * 16 * 8, callback=TelemetryCallback(telemetry))

    text = output(["diagnose", str(tmp_path / "run")], capsys)

    assert ("raised an alarm" in text) is (fault != "crash") and "Unexplained" not in text
    if fault == "observation":
        assert "The run failed at update 3: ValueError: Expected parameter logits" in text
        assert "the first non-finite tensor is observations (3 of 32 values, environments 2)." in text
        assert [alarm.type for alarm in memory.alarms] == ["numerics/nonfinite", "run/failed"]
    elif fault == "reward":
        assert "failed The run failed at update" in text
        assert "numerics/nonfinite" in text
    else:
        assert "/run: 2 updates, failed The run failed at update 3: KeyError: 'the simulator lost joint 7'." in text
        assert [alarm.type for alarm in memory.alarms][-1:] == ["run/failed"]


def test_gradients_alone_name_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exploding gradients are a symptom, so advice would be a guess. The run that also has losses gets a full diagnosis."""
    for name, more in (("alone", {}), ("explained", {"policy/kl": 0.01, "loss/value": 1.0})):
        norms = [1.0 + 0.01 * (update % 5) if update < 35 else 1e4 * update for update in range(1, 41)]
        keys = ("grad/global/norm_preclip", "grad/global/norm_preclip_max")
        records = [Record(update, axes_of(update), {**dict.fromkeys(keys, norm), **more}) for update, norm in enumerate(norms, 1)]
        journalled(RunInfo("r1", "run", tmp_path / name, 1e9, facts={"max_grad_norm": 0.5}), records)

    alone = output(["diagnose", str(tmp_path / "alone")], capsys)
    diagnosis = json.loads(output(["diagnose", str(tmp_path / "alone"), "--json"], capsys))

    assert "Only gradients were recorded, so the cause is unknown" in alone
    assert "Unexplained" not in alone
    assert "Try:" not in alone
    assert diagnosis["gradients_alone"]
    assert diagnosis["incidents"] and {incident["cause"] for incident in diagnosis["incidents"]} == {None}
    assert "Only gradients" not in output(["diagnose", str(tmp_path / "explained")], capsys)
