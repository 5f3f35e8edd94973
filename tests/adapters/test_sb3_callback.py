"""`TelemetryCallback` leaves no trace in weights, saved models or loggers, after training and after exceptions."""

import copy
import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_models
import torch
from adapter_runs import assert_identical
from gymnasium.wrappers import RecordEpisodeStatistics, RescaleAction
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.adapters.taps import Tap, listen
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.testing import MemorySink
from esper_telemetry.views.compare.compared_runs import read_compared

pytestmark = pytest.mark.sb3


class CallAfter(BaseCallback):
    def __init__(self, function: Any, after: int) -> None:
        super().__init__()
        self._function, self._after = function, after

    def _on_step(self) -> bool:
        return not (self.n_calls == self._after and self._function(self.model) is False)


@pytest.mark.parametrize("in_processes", [False, True])
def test_changes_of_the_environment_are_settings(in_processes: bool, tmp_path: Path) -> None:
    """Pendulum's torques of up to 2 are rescaled, and its gravity is changed; recording wrappers do not count."""

    def facts(name: str, make: Any) -> dict[str, str]:
        env = make_vec_env(make, 1, vec_env_cls=SubprocVecEnv if in_processes else None)
        sb3_models.recorded_run(PPO("MlpPolicy", VecNormalize(env), **sb3_models.MINIBATCHES), tmp_path / name)
        env.close()
        return dict(read_compared(str(tmp_path / name)).settings)

    plain = facts("plain", lambda: RecordEpisodeStatistics(gym.make("Pendulum-v1", render_mode="rgb_array")))
    changed = facts("changed", lambda: RescaleAction(gym.make("Pendulum-v1", g=5.0), np.int64(-1), np.int64(1)))

    differing = {name: plain.get(name) for name in {**plain, **changed} if plain.get(name) != changed.get(name)}
    assert differing == {"env_arguments": None, "env_wrappers": '"VecNormalize"', "action_space": '"Box(-2.0, 2.0, (1,), float32)"'}
    assert changed["env"] == plain["env"] == '"Pendulum-v1"'
    assert changed["env_wrappers"] == '"RescaleAction(min_action=-1, max_action=1), VecNormalize"'
    assert changed["env_arguments"] == '"g=5.0"'


def test_a_model_is_saved_and_a_policy_pickled_and_copied_while_it_listens(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    def save(model: Any) -> None:
        assert len(sb3_models.taps_of(model)) >= 2
        model.save(tmp_path / "model")
        stream = io.BytesIO()
        torch.save(model.policy, stream)
        saved["copy"] = copy.deepcopy(model.policy)
        saved["weights"] = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
        stream.seek(0)
        saved["pickled"] = torch.load(stream, weights_only=False)

    for name in ("ppo", "recurrent", "maskable"):
        model = sb3_models.MODELS[name]()
        learn(model, tmp_path / name, CallAfter(save, 40))
        loaded = type(model).load(tmp_path / "model", env=model.get_env(), device="cpu")
        for policy in (loaded.policy, saved["pickled"], saved["copy"]):
            assert all(torch.equal(policy.state_dict()[key], tensor) for key, tensor in saved["weights"].items())
            assert not any(isinstance(value, Tap) for module in policy.modules() for value in vars(module).values())
        observation = model.get_env().reset()
        assert (loaded.predict(observation, deterministic=True)[0] == saved["copy"].predict(observation, deterministic=True)[0]).all()
        loaded.learn(128)
        assert sb3_models.taps_of(loaded) == []


def learn(model: Any, run_dir: Path, *others: BaseCallback) -> None:
    with Telemetry([], run_dir=run_dir, offload=False) as telemetry:
        model.learn(256, callback=[TelemetryCallback(telemetry), *others])


def records_of(model: Any, steps: int, *others: BaseCallback, **settings: Any) -> Any:
    sink = MemorySink()
    with Telemetry([sink], run_dir=None) as telemetry:
        model.learn(steps, callback=[TelemetryCallback(telemetry, **settings), *others], reset_num_timesteps=False)
    return sink.records


def fail(_: Any) -> None:
    raise OSError("the simulator is gone")


def test_an_exception_in_the_environment_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = sb3_models.ppo()

    with pytest.raises(OSError, match="simulator"):
        learn(model, tmp_path / "run", CallAfter(fail, 40))

    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert [record.axes.env_step for record in run.records if not record.partial] == [128]
    assert sb3_models.taps_of(model) == []
    model.learn(128)


def test_an_exception_in_an_update_leaves_a_partial_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer fails in its sixth step: the first update has all four steps, the second is a partial record."""
    model = sb3_models.ppo(n_epochs=1)
    steps = iter(range(100))
    step = model.policy.optimizer.step

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 5:
            raise FloatingPointError("no step")
        return step(*args, **kwargs)

    monkeypatch.setattr(model.policy.optimizer, "step", failing)
    with pytest.raises(FloatingPointError, match="no step"):
        learn(model, tmp_path / "run")

    records = read_run(tmp_path / "run").records
    assert [(record.axes.update, record.axes.env_step, record.partial) for record in records] == [(1, 128, False), (2, 256, True)]
    assert "policy/kl" in records[1].values
    assert EQUATION_KEY + "minibatches" in records[0].values
    assert EQUATION_KEY + "minibatches_one_minibatch" not in records[1].values  # the pass was not complete
    assert sb3_models.taps_of(model) == []


def test_padding_is_left_out_of_units_and_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Minibatches of 50 of 128 rows begin and end within sequences, which RecurrentPPO pads to the longest."""
    run = sb3_models.recorded_run(sb3_models.recurrent(batch_size=50), tmp_path, steps=256, level="debug")

    assert all("repr/dormant_frac" in record.values for record in run.records)
    assert all("repr/effective_rank" in record.values for record in run.records)
    assert "failed" not in capfd.readouterr().err


def test_nan_logits_are_traced_to_their_source(tmp_path: Path) -> None:
    model = sb3_models.ppo()

    def poison(model: Any) -> None:
        with torch.no_grad():
            model.policy.action_net.weight.fill_(torch.nan)

    with pytest.raises(ValueError, match="nan"):
        learn(model, tmp_path / "run", CallAfter(poison, 40))

    failure = next(event for event in read_run(tmp_path / "run").events if event.type == "failure")
    assert "action_net.weight" in failure.data["first_nonfinite"]


def test_detach_and_the_end_of_a_with_block_remove_all_taps() -> None:
    model = sb3_models.ppo()
    with Telemetry([MemorySink()], run_dir=None) as telemetry:
        with pytest.raises(OSError), TelemetryCallback(telemetry) as callback:
            model.learn(256, callback=[callback, CallAfter(fail, 40)])
        assert sb3_models.taps_of(model) == []
        callback.detach()


def test_another_callback_may_stop_training() -> None:
    model = sb3_models.ppo()

    records = records_of(model, 1024, CallAfter(lambda _: False, 70))

    assert [record.axes.env_step for record in records] == [128, 256]
    assert sb3_models.taps_of(model) == []


@pytest.mark.parametrize("reset", [True, False])
def test_learning_again_goes_on_in_the_same_run(reset: bool) -> None:
    sink, model = MemorySink(), sb3_models.ppo()

    with Telemetry([sink], run_dir=None) as telemetry:
        callback = TelemetryCallback(telemetry)
        for _ in range(2):
            model.learn(256, callback=callback, reset_num_timesteps=reset)

    assert [record.axes.update for record in sink.records] == [1, 2, 3, 4]
    assert [record.axes.env_step for record in sink.records] == [128, 256, 384, 512]
    assert [record.axes.gradient_step for record in sink.records] == [8, 16, 24, 32]


def test_a_loaded_model_goes_on_counting(tmp_path: Path) -> None:
    model = sb3_models.ppo()
    model.learn(256)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", env=sb3_models.cartpole(), device="cpu")

    axes = records_of(loaded, 256)[0].axes
    assert (axes.update, axes.env_step, axes.gradient_step) == (3, 384, 24)


def test_updates_of_a2c_share_records_without_losing_anything() -> None:
    """Five updates of 128 transitions share records in pairs, the last alone. Sums and means are the same as in single records."""
    weights, records = [], []
    for together in (1, 2):
        model = sb3_models.a2c()
        records.append(records_of(model, 640, updates_per_record=together))
        weights.append(model.policy.state_dict())
    alone, shared = ([record.values for record in each] for each in records)

    axes = [record.axes for record in records[1]]
    assert [(at.update, at.env_step, at.gradient_step) for at in axes] == [(2, 256, 2), (4, 512, 4), (5, 640, 5)]
    assert_identical(*weights)
    for key in ("reward/mean", "adv/raw/mean", "policy/entropy", "loss/policy", "loss/value"):
        values = [record[key] for record in alone]
        means = [(values[0] + values[1]) / 2, (values[2] + values[3]) / 2, values[4]]
        assert [record[key] for record in shared] == pytest.approx(means, rel=1e-5, abs=1e-7), key
    assert sum(record["episode/count"] for record in shared) == sum(record["episode/count"] for record in alone) > 0
    assert all(record["integrity/gae_identity"] < 1e-6 for record in shared)


def test_a2c_has_a_record_for_2048_transitions() -> None:
    """2176 transitions are seventeen updates of 128."""
    axes = [record.axes for record in records_of(sb3_models.a2c(), 2176)]

    assert [(at.update, at.env_step) for at in axes] == [(16, 2048), (17, 2176)]


def test_two_telemetries_side_by_side_see_the_same() -> None:
    sinks, model = (MemorySink(), MemorySink()), sb3_models.ppo()

    with Telemetry([sinks[0]], run_dir=None) as first, Telemetry([sinks[1]], run_dir=None) as second:
        model.learn(256, callback=[TelemetryCallback(first), TelemetryCallback(second)])

    one, other = ([{k: v for k, v in r.values.items() if k.startswith(("policy/", "grad/"))} for r in s.records] for s in sinks)
    assert one == other and len(one) == 2
    assert sb3_models.taps_of(model) == []


def test_their_logger_tensorboard_and_callbacks_receive_the_same(tmp_path: Path) -> None:
    """The scalars and steps are the same with and without telemetry, even with an evaluation by the same policy in between."""

    def scalars(name: str, telemetry: Telemetry | None) -> dict[str, list[tuple[int, float]]]:
        model = sb3_models.ppo()
        model.set_logger(configure(str(tmp_path / name), ["tensorboard", "csv"]))
        ours = [] if telemetry is None else [TelemetryCallback(telemetry)]
        model.learn(384, callback=[EvalCallback(sb3_models.cartpole(1), eval_freq=20, n_eval_episodes=1, verbose=0), *ours])
        assert [type(output).__name__ for output in model.logger.output_formats] == ["TensorBoardOutputFormat", "CSVOutputFormat"]
        model.logger.close()
        events = EventAccumulator(str(tmp_path / name)).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "fps" not in tag}

    sink = MemorySink()
    with Telemetry([sink], run_dir=None) as telemetry:
        with_telemetry = scalars("telemetry", telemetry)

    assert with_telemetry == scalars("bare", None)
    mirrored = [record.values for record in sink.records]
    expected = dict(with_telemetry["train/loss"])  # each update's line is logged with the next rollout
    assert [values["sb3/train/loss"] for values in mirrored[:-1]] == pytest.approx(list(expected.values()), rel=1e-6)
    assert all("sb3/eval/mean_reward" in values and "sb3/rollout/ep_rew_mean" in values for values in mirrored)
    assert all(values["integrity/ratio_init"] <= 1e-6 for values in mirrored)


def test_an_unsupported_model_is_refused_in_one_sentence() -> None:
    with pytest.raises(TypeError, match="takes a Telemetry, got str"):
        TelemetryCallback("runs/a")  # type: ignore[arg-type]
    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="got SAC, which has no rollout_buffer"):
        SAC("MlpPolicy", "Pendulum-v1", device="cpu").learn(10, callback=TelemetryCallback(telemetry))


def test_taps_go_in_any_order_and_put_back_what_was_there() -> None:
    model, calls = sb3_models.ppo(), []
    policy: Any = model.policy
    policy.forward = lambda *args: "mine"  # a user's wrapper
    first = listen(policy, "forward", lambda args, kwargs, result: calls.append(("first", result)))
    second = listen(policy, "forward", lambda args, kwargs, result: calls.append(("second", result)))

    policy.forward(torch.zeros(1, 4))
    first()
    policy.forward(torch.zeros(1, 4))
    second()
    second()

    assert calls == [("first", "mine"), ("second", "mine"), ("second", "mine")]
    assert policy.forward(torch.zeros(1, 4)) == "mine"
    assert sb3_models.taps_of(model) == []
