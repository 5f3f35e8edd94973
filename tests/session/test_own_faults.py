"""A fault in telemetry's own code costs its update, with a warning; training, its weights and its exceptions do not change."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.pipeline.in_process import InProcessPipeline
from esper_telemetry.pipeline.response import AlarmResponse
from esper_telemetry.pipeline.run_recorder import RunRecorder
from esper_telemetry.pipeline.sampling import Sampling
from esper_telemetry.pipeline.window import OpenUpdate, Window
from esper_telemetry.recording.recorder import UpdateRecorder

ROLLOUT = 32
ROLLOUTS = 5


def weights(telemetry: Telemetry | None) -> torch.Tensor:
    """Return the weights after a short training."""
    trainer = PPO(make_env("CartPole-v1", num_envs=2), PPOConfig(num_steps=16, num_epochs=1, num_minibatches=2))
    if telemetry is not None:
        attach(telemetry, trainer)
    trainer.learn(ROLLOUTS * ROLLOUT)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.policy.parameters()])


@pytest.fixture(scope="module")
def untouched() -> torch.Tensor:
    return weights(None)


def break_second_call(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second call of a method raise."""
    method, calls = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise RuntimeError(f"{name} is broken")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *[(UpdateRecorder, name) for name in ("_begin", "_joined", "_take_episodes", "take")],
        *[(AlarmResponse, name) for name in ("begin_update", "call", "end_update")],
        *[(Sampling, name) for name in ("begin", "learn")],
        (OpenUpdate, "flush"),
        (Window, "send"),
        (InProcessPipeline, "record"),
        (RunRecorder, "record"),
    ],
)
def test_training_continues_without_the_update(
    owner: type, name: str, tmp_path: Path, untouched: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_second_call(owner, name, monkeypatch)

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        trained = weights(telemetry)

    assert torch.equal(trained, untouched)
    assert caplog.text.count(f"{name} is broken") == 1 and "training continues" in caplog.text
    run = read_run(tmp_path / "run")
    assert run.status == "finished" and len(run.records) >= run.records[-1].axes.update - 1 >= ROLLOUTS - 1


@pytest.mark.parametrize("name", ["_record_rest", "_end_journal"])
def test_a_run_whose_end_fails_ends_as_without_telemetry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("the end is broken")

    telemetry = Telemetry(run_dir=tmp_path / "run", offload=False)
    monkeypatch.setattr(type(telemetry._session), name, broken)

    with pytest.raises(ZeroDivisionError), telemetry:
        weights(telemetry)
        1 / 0  # noqa: B018  # the user's own mistake

    assert "the end is broken" in caplog.text


def test_a_flush_that_fails_leaves_nothing_for_the_next_one_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_second_call(OpenUpdate, "flush", monkeypatch)
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        for update in range(1, 4):
            telemetry.log({f"my/number_{update}": 1.0})
            telemetry.flush(env_step=10 * update)

    numbers = [{key for key in record.values if key.startswith("my/")} for record in read_run(tmp_path / "run").records]
    assert numbers == [{"my/number_1"}, {"my/number_3"}]
    assert "1 update has no record, because telemetry failed" in caplog.text
