"""The learning-rate schedule among the facts of a run, for the bundled trainer, scripts and Stable-Baselines3 models."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.adapters.script.settings import find_schedule, unchecked_equations
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.core.facts import UNCHECKED_FACT
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT
from esper_telemetry.equations.equation import equations
from esper_telemetry.events import MinibatchStart
from esper_telemetry.views.equation_table import EquationRow, equation_rows


def schedules(run_dir: Path) -> EquationRow:
    """The run's row for schedules, after checking that it differs exactly if an alarm was raised."""
    run = read_run(run_dir)
    (row,) = [row for row in equation_rows(run.info, run.records) if row.equation.name == "schedules"]
    assert set(run.info.facts[UNCHECKED_FACT]) <= set(equations())
    assert (row.state == "differs") == any(alarm.type == "integrity/equation" for alarm in run.alarms)
    return row


def trained(
    run_dir: Path, *, totals: tuple[int, ...] = (640,), on_minibatch: Callable[[PPO], None] | None = None, **settings: Any
) -> EquationRow:
    config = PPOConfig(num_steps=16, num_epochs=2, num_minibatches=2, hidden_sizes=(8,), seed=1, **settings)
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=4, seed=1), config)
        attach(telemetry, trainer)
        if on_minibatch is not None:
            trainer.hooks.on(MinibatchStart, lambda _: on_minibatch(trainer))
        for total in totals:
            trainer.learn(total)
    return schedules(run_dir)


@pytest.mark.system
def test_a_rate_that_a_hook_sets_is_the_one_that_is_compared(tmp_path: Path) -> None:
    def anneal(trainer: PPO) -> None:
        trainer.optimizer.param_groups[0]["lr"] = trainer.config.learning_rate * (1 - trainer.env_steps / 448)

    row = trained(tmp_path, on_minibatch=anneal)

    assert row.state == "differs" and [one.name for one in row.explanations] == ["negative"]


@pytest.mark.system
@pytest.mark.parametrize("anneal", [True, False])
def test_the_bundled_trainer_keeps_its_schedule(anneal: bool, tmp_path: Path) -> None:
    row = trained(tmp_path / "run", anneal_learning_rate=anneal)

    assert row.state == "matches"
    assert row.updates >= 10


@pytest.mark.system
def test_a_trainer_that_learns_again_begins_another_schedule(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", totals=(640, 1280)).state == "matches"


@pytest.mark.system
def test_a_rate_that_follows_the_kl_has_no_schedule(tmp_path: Path) -> None:
    row = trained(tmp_path / "run", desired_kl=0.01)

    assert (row.state, row.reason) == ("unchecked", "the KL sets the learning rate (desired_kl)")


ARGS = {"num_envs": 4, "num_steps": 16, "update_epochs": 2, "num_minibatches": 2}


def script_facts(**settings: Any) -> Mapping[str, Any]:
    return find_schedule(Variables([ARGS | settings]), {"total_steps": 640, "num_epochs": 2}, 1e-3)


def test_a_script_that_anneals_falls_to_an_end_that_is_not_known_and_another_keeps_its_rate() -> None:
    annealed, constant = (script_facts(anneal_lr=anneal)[SCHEDULE_FACT] for anneal in (True, False))

    assert (annealed["initial"], annealed["final"], annealed["final_is_set"], annealed["counts"]) == (1e-3, 0.0, False, {"num_epochs": 2})
    assert (constant["initial"], constant["final"]) == (1e-3, 1e-3)


def test_a_number_of_updates_stands_for_steps_and_a_straight_scheduler_for_a_setting() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1e-3)
    schedulers = {updates: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates) for updates in (10, 12)}

    def found(**settings: Any) -> Mapping[str, Any]:
        return find_schedule(Variables([{"num_updates": 10} | settings]), {}, 1e-3, 64)

    flag, same, other = found(anneal_lr=True), found(s=schedulers[10]), found(s=schedulers[12])

    assert (flag[SCHEDULE_FACT]["total_steps"], flag[SCHEDULE_FACT]["final"]) == (640, 0.0)
    assert same[SCHEDULE_FACT]["final"] == pytest.approx(1e-4) and same[SCHEDULE_FACT]["final_is_set"]
    assert other == {}
    assert found() == {}


def test_a_script_that_does_not_say_is_not_checked_and_the_reason_says_so() -> None:
    assert script_facts() == {}
    assert unchecked_equations({"gamma": 0.99}) == {
        "schedules": "the settings do not say whether the learning rate is annealed (anneal_lr) or in how many steps",
        "advantages": "the settings do not say gae_lambda",
    }
    assert "advantages" not in unchecked_equations({"gamma": 0.99}, {"advantages": ""})  # no discount fits them: a lead
    noise = unchecked_equations({"gamma": 0.99, "gae_lambda": 0.95, "mean_noise": 0.5})
    assert noise["replayed_log_probs"] == "training adds noise to the means of actions (rpo_alpha = 0.5)"


@pytest.mark.sb3
@pytest.mark.parametrize("kind", ["constant", "linear", "function"])
def test_a_model_of_stable_baselines3(kind: str, tmp_path: Path) -> None:
    """Telemetry does not call a schedule function, which might count its calls."""
    from stable_baselines3 import PPO as Model  # noqa: N811  # the bundled trainer has the same name
    from stable_baselines3.common.utils import LinearSchedule

    from esper_telemetry.adapters.sb3 import TelemetryCallback

    calls: list[float] = []

    def function(remaining: float) -> float:
        calls.append(remaining)
        return 1e-3 * remaining

    rates: dict[str, Any] = {"constant": 1e-3, "linear": LinearSchedule(1e-3, 1e-4, 1.0), "function": function}

    def learn(callback: Any) -> int:
        calls.clear()
        model = Model("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=1, learning_rate=rates[kind], seed=1)
        model.learn(640, callback=callback)
        model.learn(320, callback=callback)
        return len(calls)

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        with_telemetry = learn(TelemetryCallback(telemetry))
    row = schedules(tmp_path / "run")

    assert row.state == ("unchecked" if kind == "function" else "matches")
    assert with_telemetry - learn(None) <= 4  # the first rate, for the config and the facts of each `learn`


def stateful_rates() -> dict[str, Any]:
    count = 0

    def counts(remaining: float) -> float:
        nonlocal count
        count += 1
        return 1e-3 / count

    steps = iter((1e-3, 5e-4))
    return {"counts": counts, "iterator": lambda remaining: next(steps), "method": steps.__next__}


@pytest.mark.sb3
def test_only_a_function_without_a_trace_is_a_formula() -> None:
    from esper_telemetry.adapters.sb3.sb3_facts import is_formula

    initial = 1e-3
    formulas = (lambda left: initial * left, lambda left: max(0.0, 2 * left - 1), lambda left, rate=1e-3: rate)

    assert all(map(is_formula, formulas))
    assert not any(map(is_formula, stateful_rates().values()))
