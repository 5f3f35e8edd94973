"""The trainer as a whole: properties of every run."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from ppo_builders import SMALL, EventLog, cartpole, equal, pendulum, weights
from short_trainings import learned
from torch import Tensor

from esper_telemetry import events
from esper_telemetry.events import (
    AfterUpdate,
    BackwardEnd,
    BeforeUpdate,
    EpisodeEnd,
    EvaluationEnd,
    HeadsBackward,
    MinibatchEnd,
    MinibatchStart,
    OptimizerStep,
    RecurrentForward,
    Rollback,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
    UpdateStart,
)
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Step
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.ppo_objective import generalized_advantages
from esper_telemetry.ppo.rollout import Rollout
from esper_telemetry.updates.joining import joined_minibatches

MINIBATCH = (MinibatchStart, TrunkBackward, BackwardEnd, OptimizerStep, MinibatchEnd)
EVENTS = (RunStart, RolloutEnd, RecurrentForward, EpisodeEnd, BeforeUpdate, *MINIBATCH, AfterUpdate, UpdateEnd)
Make = Callable[..., PPO]


@pytest.mark.parametrize(("make", "policy"), [(cartpole, "mlp"), (pendulum, "mlp"), (cartpole, "lstm"), (pendulum, "gru")])
def test_the_same_seed_gives_the_same_weights(make: Make, policy: str) -> None:
    first, second, other = (make(seed, policy=policy, num_minibatches=2) for seed in (3, 3, 4))
    for trainer in (first, second, other):
        torch.rand(17)  # other users of torch's generator must not affect the trainer
        trainer.learn(600)

    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(other))


@pytest.mark.parametrize("settings", [{}, {"watchdog": True}, {"stop_on_nonfinite": True}], ids=str)
@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_watching_changes_nothing(make: Make, settings: dict[str, Any]) -> None:
    watched, alone = make(**settings), make()
    EventLog().listen(watched, *EVENTS)

    watched.learn(600)
    alone.learn(600)

    assert equal(weights(watched), weights(alone))


def test_events_come_in_their_order() -> None:
    """Two epochs of four minibatches."""
    emitted = learned(cartpole(), 64, *EVENTS)

    minibatch = [TrunkBackward, BackwardEnd, OptimizerStep, MinibatchEnd]
    before = [RunStart, RolloutEnd, EpisodeEnd, BeforeUpdate]
    after = [AfterUpdate, UpdateEnd]
    assert [type(event) for event in emitted.events] == [*before, MinibatchStart, *minibatch * 8, *after]
    assert [(e.epoch, e.step) for e in emitted.of(MinibatchEnd)] == [(step // 4, step) for step in range(8)]


def recall(**settings: Any) -> PPO:
    return PPO(CueRecall(4, seed=0), PPOConfig(**settings))


@pytest.mark.parametrize("make", [cartpole, pendulum, recall])
def test_joined_minibatches_are_the_minibatches(make: Make) -> None:
    """One head, a continuous one, several with masks."""
    trainer = make(num_steps=16, num_epochs=2, num_minibatches=2)
    parts: list[MinibatchEnd] = EventLog().listen(trainer, MinibatchEnd).events
    trainer.learn(1)

    joined = joined_minibatches(parts, with_critic=True)
    assert joined.epochs == (0, 0, 1, 1)
    assert joined.counts == tuple(len(part.log_ratio) for part in parts)
    for name in ("log_ratio", "advantages", "rows", "values", "old_values", "returns"):
        assert torch.equal(getattr(joined, name), torch.cat([getattr(part, name) for part in parts]))
    assert joined.losses.keys() == parts[0].losses.keys()
    assert all(value.tolist() == [part.losses[loss].item() for part in parts] for loss, value in joined.losses.items())
    for name in ("logits", "means", "action_masks", "relevance", "head_log_ratios"):
        columns = getattr(joined, name)
        assert all(torch.equal(columns[head], torch.cat([getattr(part, name)[head] for part in parts])) for head in columns)
    for head, log_std in joined.log_std.items():
        expected = [part.log_std[head].expand(len(part.log_ratio), -1) for part in parts]
        assert torch.equal(log_std, torch.cat(expected))


def test_nothing_is_computed_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks no event is built, and without a bonus no entropy is computed."""
    trainer = cartpole()
    monkeypatch.setattr(trainer.hooks, "emit", fail)
    monkeypatch.setattr(trainer.policy, "entropy", fail)

    trainer.learn(300)


def fail(*arguments: Any, **named: Any) -> None:
    raise AssertionError


def test_events_keep_their_tensors_until_the_update_ends() -> None:
    trainer = cartpole()
    emitted = EventLog().listen(trainer, RolloutEnd, MinibatchEnd)
    copies: list[list[Tensor]] = []
    for event_type in (RolloutEnd, MinibatchEnd):
        trainer.hooks.on(event_type, lambda event: copies.append([tensor.clone() for tensor in tensors(event)]))

    def compare(_: UpdateEnd) -> None:
        assert len(copies) == 9
        assert all(equal(tensors(event), copy) for event, copy in zip(emitted.events, copies, strict=True))
        copies.clear()
        emitted.events.clear()

    trainer.hooks.on(UpdateEnd, compare)
    trainer.learn(600)


def tensors(event: Any) -> list[Tensor]:
    names = getattr(event, "_fields", None) or [field.name for field in fields(event)]
    values = [getattr(event, name) for name in names]
    return [value for value in values if isinstance(value, Tensor)]


def test_the_facts_name_every_parameter_once() -> None:
    for shared_trunk in (False, True):
        trainer = cartpole(shared_trunk=shared_trunk)
        groups = trainer.facts(1000)["groups"]
        owned = [*groups["actor"], *groups["critic"], *groups.get("shared", [])]

        assert sorted(owned) == sorted(name for name, _ in trainer.policy.named_parameters())
        assert groups["head:action"] == ["heads.action.linear.weight", "heads.action.linear.bias"]
        assert ("shared" in groups) == shared_trunk


def test_the_facts_hold_what_detectors_need() -> None:
    expected = {"precision": "fp32", "max_grad_norm": None, "num_envs": 2, "total_steps": 1000, "heads": {"action": "continuous"}}

    assert expected.items() <= pendulum(max_grad_norm=None).facts(1000).items()


def test_norms_are_those_before_clipping() -> None:
    trainer = cartpole(max_grad_norm=1e-3)
    clipped: list[bool] = []

    def check(event: BackwardEnd) -> None:
        norms = [event.parameters[name].grad.norm() for name in event.names]  # type: ignore[union-attr] # there are gradients
        clipped.append(torch.allclose(torch.stack(norms), event.norms))
        assert event.max_norm == 1e-3

    trainer.hooks.on(BackwardEnd, check)
    trainer.learn(100)

    assert clipped == [True] * 8


def test_the_entropy_is_computed_only_where_it_counts() -> None:
    names = []
    for coefficient in (0.0, 0.01):
        emitted = learned(pendulum(entropy_coef=coefficient), 64, MinibatchEnd)
        names.append(set(emitted.events[-1].losses))

    assert names == [{"policy", "value"}, {"policy", "value", "entropy"}]


@pytest.mark.system
def test_a_stopped_trainer_ends_after_the_update() -> None:
    trainer = cartpole()
    trainer.hooks.on(UpdateEnd, lambda event: trainer.stop() if event.update == 2 else None)

    trainer.learn(10_000)
    assert trainer.updates == 2

    trainer.learn(10_000)
    assert trainer.updates > 10


def test_a_replaced_step_is_used() -> None:
    """Advantages of zero do not change the actor."""
    trainer = cartpole()
    trainer.steps = replace(trainer.steps, normalize=torch.zeros_like)
    before = [parameter.clone() for parameter in trainer.policy.actor.parameters()]

    trainer.learn(200)

    assert equal(before, list(trainer.policy.actor.parameters()))


class Forever:
    """Two environments that pay 1 forever, cut every 4 steps, with constant observations."""

    name, num_envs, observation_shape = "Forever", 2, (1,)

    def __init__(self) -> None:
        self.action_specs = {"action": ActionSpec("categorical", 2)}
        self.count = 0

    def reset(self, seed: int | None = None) -> Any:
        return np.zeros((2, 1), np.float32)

    def step(self, actions: Any) -> Any:
        self.count += 1
        cut = np.full(2, self.count % 4 == 0)
        zeros = np.zeros((2, 1), np.float32)
        return Step(zeros, np.ones(2, np.float32), np.zeros(2, bool), cut, None, zeros if cut.any() else None)

    def close(self) -> None:
        """Nothing to free."""


def without_bootstrap(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """The common mistake of treating a time limit as a terminal state."""
    cut = replace(rollout, next_values=rollout.next_values.masked_fill(rollout.ended, 0.0))
    return generalized_advantages(cut, gamma, gae_lambda)


@pytest.mark.system
@pytest.mark.parametrize("policy", ["mlp", "lstm"])
@pytest.mark.parametrize("bootstrap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_time_limit_does_not_lower_the_value(bootstrap: bool, policy: str) -> None:
    """γ = 0.9: an endless reward of 1 is worth 1 / (1 - γ) = 10. With episodes that end after 4 steps it is at most 3.44."""
    settings: dict[str, Any] = {"num_steps": 32, "gamma": 0.9, "learning_rate": 0.01, "hidden_sizes": (8,), "gae_lambda": 0.9}
    trainer = PPO(Forever(), PPOConfig(**settings, policy=policy, lstm_size=8, num_minibatches=2))
    if not bootstrap:
        trainer.steps = replace(trainer.steps, advantages=without_bootstrap)
    emitted = learned(trainer, 5120, RolloutEnd)

    value = emitted.events[-1].values.mean().item()
    assert value == pytest.approx(10, abs=0.7) if bootstrap else value < 3.5


def test_every_documented_event_is_emitted() -> None:
    """Only other trainers begin an update without a rollout."""
    classes = {name: value for name, value in vars(events).items() if getattr(value, "__module__", "") == events.__name__}
    documented = {value for name, value in classes.items() if isinstance(value, type) and name[0] != "_"} - {events.Hooks}

    assert len(documented) <= 16
    assert documented - {UpdateStart} == {*EVENTS, EvaluationEnd, HeadsBackward, Rollback}


# The rollout acts in NumPy, the update runs in torch. Before the first step of an update they must agree.

NORMALIZED: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def seeing(name: str, **settings: Any) -> PPO:
    return PPO(make_env(f"seeing_env:{name}-v0", num_envs=4, seed=1), PPOConfig(**{**SMALL, "num_steps": 16, **settings}))


def recall_on_the_device(**settings: Any) -> PPO:
    trainer = PPO(CueRecall(8, seed=1), PPOConfig(**{**SMALL, "num_steps": 16, **settings}))
    trainer.collector = TensorCollector(CueRecall(8, seed=1), trainer.policy, 16, 0)
    return trainer


SETTINGS: list[dict[str, Any]] = [
    {},
    {"shared_trunk": True},
    NORMALIZED,
    {"policy": "lstm"},
    {"policy": "gru"},
    {"policy": "lstm", "shared_trunk": True, **NORMALIZED},
    {"policy": "gru", "shared_trunk": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_the_first_minibatch_finds_the_probabilities_and_values_of_collection(make: Any, settings: dict[str, Any]) -> None:
    expect_identity(make(num_minibatches=2, lstm_size=16, **settings), bound=1e-5 if "policy" in settings else 2e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["Spotlight", "SpotlightParts"])
def test_the_first_minibatch_of_images_finds_them_too(name: str, settings: dict[str, Any]) -> None:
    expect_identity(seeing(name, num_minibatches=2, lstm_size=16, **settings), bound=1e-5, value_bound=1e-5, updates=2)


@pytest.mark.parametrize(("squash", "state_dependent"), [(True, False), (False, True), (True, True)])
def test_the_first_minibatch_of_other_gaussians_finds_them_too(squash: bool, state_dependent: bool) -> None:
    expect_identity(pendulum(squash=squash, state_dependent_std=state_dependent), bound=1e-5)


def test_the_first_minibatch_of_a_rollout_on_the_device_finds_them_too() -> None:
    expect_identity(recall_on_the_device(policy="lstm", lstm_size=8, num_minibatches=2), bound=1e-5)


def expect_identity(trainer: PPO, *, bound: float, value_bound: float = 1e-4, updates: int = 8) -> None:
    emitted = learned(trainer, updates * trainer.config.num_steps * trainer.env.num_envs, MinibatchEnd)

    first = [event for event in emitted.events if event.step == 0]
    assert len(first) >= updates
    assert max(event.log_ratio.abs().max().item() for event in first) < bound
    assert max((event.values - event.old_values).abs().max().item() for event in first) < value_bound
