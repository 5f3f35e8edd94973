"""Every type of alarm is raised by a fault of a real run, from a recorded journal or from training in the test."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from healthy_run import judged, raised
from recorded_runs import alarms_of, load, names, texts

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.alarms import Thresholds
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.events import BackwardEnd, Hooks, MinibatchEnd, RolloutEnd, UpdateEnd
from esper_telemetry.lab.faults.data import stuck_normalizer
from esper_telemetry.lab.faults.fault import change_env_steps
from esper_telemetry.lab.faults.fault_catalogue import schedule
from esper_telemetry.ppo.environments.environment_protocol import Step
from esper_telemetry.ppo.ppo_objective import generalized_advantages
from esper_telemetry.ppo.rollout import Rollout
from esper_telemetry.testing import FailingSink

PAGE = Path(__file__).parents[2] / "docs" / "alarms.md"


class FalsifiedEvents(Hooks):
    """Trainer hooks that report altered events."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self._change = change

    def emit(self, event: object) -> None:
        super().emit(self._change(event))


def cartpole(**settings: Any) -> PPO:
    """A small, fast run."""
    common: dict[str, Any] = {"num_steps": 16, "num_epochs": 1, "num_minibatches": 1, "hidden_sizes": (8,), "seed": 1}
    return PPO(make_env("CartPole-v1", num_envs=4, seed=1), PPOConfig(**{**common, **settings}))


def recall(**settings: Any) -> PPO:
    """A memory task with restricted choices."""
    common: dict[str, Any] = {"num_steps": 16, "num_epochs": 1, "hidden_sizes": (8,), "seed": 1}
    return PPO(make_env("cue-recall", num_envs=4, seed=1), PPOConfig(**{**common, **settings}))


def recall_lstm() -> PPO:
    """A policy with memory."""
    return recall(policy="lstm", lstm_size=8, num_minibatches=1)


@torch.no_grad()
def shut_output_gates(trainer: PPO) -> None:
    """The gates are packed as [i, f, g, o]."""
    for core in trainer.policy.cores().values():
        for cell in core.cells:
            cell.get_parameter("bias_ih_l0")[3 * core.size :] = -10.0


def pendulum(num_steps: int = 64) -> PPO:
    """Continuous actions. A time limit ends episodes after 200 steps."""
    settings: dict[str, Any] = {"num_steps": num_steps, "num_epochs": 1, "num_minibatches": 1, "hidden_sizes": (8,)}
    return PPO(make_env("Pendulum-v1", num_envs=4, seed=1), PPOConfig(**settings, seed=1))


def breaking(trainer: PPO, at_update: int, harm: Callable[[PPO], object]) -> PPO:
    """The trainer, damaged before that update."""

    def act(event: UpdateEnd) -> None:
        if event.update == at_update - 1:
            harm(trainer)

    trainer.hooks.on(UpdateEnd, act, last=True)
    return trainer


def falsified(trainer: PPO, kind: type, at_update: int, change: Callable[[Any], Any]) -> PPO:
    """The trainer, whose events of one kind are altered from that update on."""
    rollouts = [0]

    def altered(event: Any) -> Any:
        rollouts[0] += isinstance(event, RolloutEnd)
        return change(event) if isinstance(event, kind) and rollouts[0] >= at_update else event

    trainer.hooks = FalsifiedEvents(altered)
    return trainer


def shifted_masks(event: RolloutEnd) -> RolloutEnd:
    return replace(event, action_masks={head: mask.roll(1, 0) for head, mask in event.action_masks.items()})


def likelier(event: RolloutEnd) -> RolloutEnd:
    """In every second environment, replace the sampled action by the most likely one."""

    def mixed(actions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(actions.shape[1]) % 2 == 0, logits.argmax(-1), actions)

    return replace(event, actions={head: mixed(event.actions[head], event.logits[head]) for head in event.actions})


def same_rows(event: MinibatchEnd) -> MinibatchEnd:
    return event._replace(rows=torch.arange(len(event.log_ratio)))


def endless(trainer: PPO) -> None:
    """Leave out the ends of episodes."""

    def change(step: Step, _: Any) -> Step:
        return step._replace(terminated=step.terminated & False, truncated=step.truncated & False)

    change_env_steps(trainer, change)


def shorter_traces(trainer: PPO) -> None:
    """Advantages with another λ than the settings."""

    def advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> torch.Tensor:
        return generalized_advantages(rollout, gamma, gae_lambda / 2)

    trainer.steps = replace(trainer.steps, advantages=advantages)


def new_optimizer(trainer: PPO) -> None:
    """Reset the optimizer's moments, as recreating the optimizer does."""
    for state in trainer.optimizer.state.values():
        for moment in ("step", "exp_avg", "exp_avg_sq"):
            state[moment].zero_()


def equal_advantages(trainer: PPO) -> None:
    trainer.steps = replace(trainer.steps, advantages=lambda rollout, gamma, lam: torch.ones_like(rollout.values))


@torch.no_grad()
def shrunk(trainer: PPO) -> None:
    """Standard deviations close to zero."""
    for name, parameter in trainer.policy.named_parameters():
        if "log_std" in name:
            parameter.fill_(-7.0)


def other_normalizer(trainer: PPO) -> PPO:
    """The trainer with a normaliser whose standard deviation is 10,000 times too small from the first update on."""
    stuck_normalizer(trainer, 1e-4)
    return trainer


def unbootstrapped(event: RolloutEnd) -> RolloutEnd:
    """A critic without errors, and returns that leave out the value after a time limit."""
    values = torch.full_like(event.returns, -100.0) + torch.linspace(-1, 1, len(event.returns)).unsqueeze(-1)
    cut = event.ended & ~event.terminated
    return replace(event, values=values, returns=torch.where(cut, event.rewards, values))


class Growing:
    """Reports gradients that grow by a tenth in every update."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, event: BackwardEnd) -> BackwardEnd:
        self.factor *= 1.1 if event.step == 0 else 1.0
        return event._replace(norms=event.norms * self.factor)


LIVE: dict[str, tuple[Callable[[], PPO], int]] = {
    "integrity/equation": (lambda: breaking(cartpole(num_steps=64), 3, shorter_traces), 6),
    "integrity/actions": (lambda: falsified(cartpole(), RolloutEnd, 1, likelier), 40),
    "integrity/mask_violation": (lambda: falsified(recall(), RolloutEnd, 4, shifted_masks), 6),
    "integrity/buffer_age": (lambda: falsified(cartpole(), RolloutEnd, 4, lambda event: replace(event, update=event.update - 1)), 6),
    "integrity/rows_repeated": (
        lambda: falsified(
            cartpole(num_minibatches=4), MinibatchEnd, 4, lambda event: event._replace(rows=torch.arange(len(event.log_ratio)))
        ),
        6,
    ),
    "telemetry/missing_metric": (lambda: falsified(cartpole(), MinibatchEnd, 8, lambda event: event._replace(logits={}, losses={})), 14),
    "opt/state_lost": (lambda: breaking(cartpole(), 5, new_optimizer), 8),
    "adv/degenerate": (lambda: breaking(cartpole(), 6, equal_advantages), 12),
    "opt/negative_rate": (lambda: falsified(cartpole(), UpdateEnd, 2, lambda event: replace(event, learning_rate=-1e-3)), 3),
    "norm/off": (lambda: other_normalizer(cartpole(normalize_observations=True)), 4),
    "lstm/gate_closed": (lambda: breaking(recall_lstm(), 4, shut_output_gates), 12),
    "lstm/empty": (lambda: falsified(recall_lstm(), RolloutEnd, 1, lambda event: replace(event, states=event.states * 0)), 8),
    "policy/std_collapse": (lambda: breaking(pendulum(), 5, shrunk), 10),
    "value/never_fits": (lambda: falsified(cartpole(), RolloutEnd, 1, lambda event: replace(event, values=event.values - 200)), 34),
    "value/limit_bias": (lambda: falsified(pendulum(200), RolloutEnd, 1, unbootstrapped), 12),
    "grad/slow_growth": (lambda: falsified(cartpole(), BackwardEnd, 1, Growing()), 102),
    "task/no_episodes": (lambda: breaking(cartpole(num_steps=64), 6, endless), 50),
}
"""By type: a trainer with a fault, and the number of updates within which the alarm is due."""

SAMPLED = {"integrity/equation", "integrity/actions", "opt/state_lost", "lstm/gate_closed"}
"""Types that need sampled updates, which all are at DEBUG; the others use what NORMAL measures in every update."""

SLOW: dict[str, tuple[Callable[[], PPO], str, float, int, int]] = {
    "grad/interference": (lambda: cartpole(shared_trunk=True, hidden_sizes=(1,), seed=4), "ent0_strong", 1e4, 25, 45),
    "grad/noise_dominated": (lambda: cartpole(num_epochs=4), "lr", 1e4, 45, 85),
    "opt/rms_spike": (lambda: cartpole(num_epochs=4, num_minibatches=4), "adam_beta2", 8, 25, 40),
    "grad/oscillation": (cartpole, "lr_period6", 10, 20, 45),
}
"""By type: a trainer, its fault, the dose, the first broken update, and the number of updates within which the alarm is due.

With rewards of ten thousand for one action, critic and actor pull the one unit that they share in opposite directions. With a learning
rate ten thousand times too large, weights jump and each gradient contradicts the previous one.
"""

EVERYTHING = Thresholds().with_changes({"grad/noise_dominated": "on"})
"""Includes alarms that are off by default."""


def watched(run_dir: Path, trainer: PPO, updates: int, level: str = "debug") -> dict[str, int]:
    """Types that are raised while that many updates are trained, with their updates."""
    with Telemetry(run_dir=run_dir, level=level, detect=False, offload=False) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(trainer.config.num_steps * trainer.env.num_envs * updates)
    run = read_run(run_dir)
    return raised(judged(run.records, run.info.facts, EVERYTHING))


@pytest.mark.system
@pytest.mark.parametrize("kind", LIVE)
def test_a_fault_that_is_trained_here_is_reported(kind: str, tmp_path: Path) -> None:
    make, updates = LIVE[kind]

    assert kind in watched(tmp_path / "run", make(), updates, "debug" if kind in SAMPLED else "normal")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_a_fault_of_gradients_is_reported_once_it_has_lasted(kind: str, tmp_path: Path) -> None:
    make, fault, dose, breaks, updates = SLOW[kind]
    trainer = make()
    schedule(trainer, fault, dose, at_update=breaks)

    assert watched(tmp_path / "run", trainer, updates)[kind] >= breaks


@pytest.mark.system
def test_backends_that_fail_for_long_raise_an_alarm() -> None:
    """Retries after one, two and four seconds: the third failure follows after about three seconds."""
    trainer, kinds = cartpole(), set[str]()
    ends = time.monotonic() + 60

    def act(event: UpdateEnd) -> None:
        if "telemetry/delivery" in kinds or time.monotonic() > ends:
            trainer.stop()

    with Telemetry([FailingSink(fail_in={"write"})], run_dir=None, offload=False, close_timeout=0.1) as telemetry:
        telemetry.on_alarm(lambda alarm: kinds.add(alarm.type))
        attach(telemetry, trainer)
        trainer.hooks.on(UpdateEnd, act, last=True)
        trainer.learn(10**9)

    assert "telemetry/delivery" in kinds


@pytest.mark.system
def test_an_exceeded_budget_raises_an_alarm(tmp_path: Path) -> None:
    """At NORMAL with every update sampled, telemetry takes longer than such a small update; in a run 1000 times as large it matters."""
    with Telemetry(run_dir=tmp_path / "run", budget=1.0, offload=False) as telemetry:
        attach(telemetry, trainer := cartpole())
        trainer.learn(16 * 4 * 45)
    run = read_run(tmp_path / "run")
    large = [
        replace(record, values={key: value * (1000 if key.endswith("_ms") else 1) for key, value in record.values.items()})
        for record in run.records
    ]

    for records, told in ((run.records, False), (large, True)):
        assert ("telemetry/overhead" in raised(judged(records, run.info.facts))) is told


def test_too_many_alarms_of_a_real_run_are_one_alarm() -> None:
    """A learning rate a hundred times too large raises more than ten types."""
    run = load("acrobot-lr_x100-100-s3")

    assert "telemetry/storm" in raised(judged(run.records, run.facts, Thresholds().with_changes({"storm": 10.0})))


@pytest.mark.parametrize("name", names())
def test_a_recorded_run_is_silent_until_it_breaks(name: str) -> None:
    assert alarms_of(name)
    assert "before" not in alarms_of(name)


def test_the_page_quotes_the_alarms_of_recorded_runs() -> None:
    """The table has a text for each type of alarm; `recorded_runs.py table` prints it."""
    quoted = dict(re.findall(r"^\| `(\w+/\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))

    assert quoted == texts()
    assert quoted.keys() == {rule.type for rule in alarm_rules()}
