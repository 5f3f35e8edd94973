"""One step of each sampled update of the bundled trainer is recomputed: its gradient, its clip and the change of the weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_run import learned
from torch import Tensor

from esper_telemetry.core.minibatch_objective import MinibatchObjective
from esper_telemetry.equations.equation import EQUATION_KEY, FITTED_KEY
from esper_telemetry.events import BackwardEnd
from esper_telemetry.pipeline.sampling import Sampling
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.ppo_objective import UpdateSteps
from esper_telemetry.recording import step_probe
from esper_telemetry.updates.steps import PolicyPass

CHECKED = ("gradient", "clipping", "optimizer_step")
CHECKED_KEYS = tuple(EQUATION_KEY + name for name in CHECKED)
SMALL = {"num_steps": 32, "num_minibatches": 4, "num_epochs": 3, "entropy_coef": 0.01}


def trainer(env: str = "CartPole-v1", **changes: Any) -> PPO:
    return PPO(make_env(env, num_envs=4), PPOConfig(**{**SMALL, **changes}))


def records(source: PPO, run_dir: Path, *, updates: int = 3, level: str = "debug", offload: bool = False) -> Sequence[Mapping[str, float]]:
    return [record.values for record in learned(source, run_dir, updates * 128, level=level, offload=offload).records]


def named(values: Mapping[str, float]) -> set[str]:
    labels = {key.removeprefix(EQUATION_KEY) for key in values if key.startswith(EQUATION_KEY)}
    return {label for label in labels - set(CHECKED) if label.startswith(CHECKED)}


def negative(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()


Change = Callable[[UpdateSteps], UpdateSteps]

MISTAKES: Mapping[str, Change] = {
    "gradient_policy_sign": lambda steps: replace(steps, policy_loss=negative),
    "gradient_value_doubled": lambda steps: replace(steps, value_loss=lambda v, r, old: (v - r).square().mean()),
    "gradient_value_summed": lambda steps: replace(steps, value_loss=lambda v, r, old: 0.5 * (v - r).square().sum()),
    "gradient_value_missing": lambda steps: replace(steps, value_loss=lambda v, r, old: 0.5 * (v.detach() - r).square().mean()),
    "gradient_entropy_sign": lambda steps: replace(steps, entropy_loss=lambda entropy: entropy),
    "gradient_entropy_weight": lambda steps: replace(steps, entropy_loss=lambda entropy: -7 * entropy),
    "optimizer_step_learning_rate": lambda steps: replace(steps, learning_rate=lambda rate: 3 * rate),
}

ALIKE = {"gradient_value_missing": {"gradient_target_old_values"}}
"""A critic without a gradient never moves."""


@pytest.mark.system
@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_changed_step_of_the_update_is_named(mistake: str, trunk: bool, tmp_path: Path) -> None:
    source = trainer(shared_trunk=trunk)
    source.steps = MISTAKES[mistake](source.steps)

    for values in records(source, tmp_path, updates=2):
        assert mistake in named(values) <= {mistake} | ALIKE.get(mistake, set())


def test_a_fitted_rate_is_the_one_that_was_used(tmp_path: Path) -> None:
    source = trainer(learning_rate=1e-3)
    source.steps = MISTAKES["optimizer_step_learning_rate"](source.steps)

    values = records(source, tmp_path, updates=1)[0]

    assert values[FITTED_KEY + "optimizer_step_learning_rate"] == pytest.approx(3e-3, rel=1e-2)


def test_the_event_is_wanted_up_to_the_step_after_the_one_that_is_checked(tmp_path: Path) -> None:
    """The eleventh of twelve steps is checked, and its weights are read before the twelfth. The next update is not sampled."""
    source, wanted = trainer(), []
    source.hooks.on(BackwardEnd, lambda event: wanted.append(source.hooks.wants(MinibatchObjective)))

    records(source, tmp_path, updates=2, level="normal")

    assert wanted[:24] == [True] * 11 + [False] * 13


@pytest.mark.system
def test_an_expensive_pass_is_taken_in_one_sample_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample, here every second update, checks steps. Every pass is treated as expensive, so the next pass is two samples later."""
    monkeypatch.setattr(Sampling, "adopt", lambda self, every, *, late: setattr(self, "every", min(every, 2)))
    monkeypatch.setattr(step_probe, "EXPENSIVE_PASS_SECONDS", 0.0)
    monkeypatch.setattr(step_probe, "EXPENSIVE_PASS_PERIOD", 2)

    at_normal = records(trainer(), tmp_path / "normal", updates=12, level="normal")
    at_debug = records(trainer(), tmp_path / "debug", updates=2)

    sampled = [EQUATION_KEY + "gradient" in values for values in at_normal if EQUATION_KEY + "optimizer_step" in values]
    assert len(sampled) > 2
    assert sampled == [place % 2 == 0 for place in range(len(sampled))]
    assert all(EQUATION_KEY + "gradient" in values for values in at_debug)


def no_pass(*arguments: object) -> None:
    raise AssertionError("the policy itself passes the minibatch")


@pytest.mark.system
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"shared_trunk": True},
        {"policy": "lstm"},
        pytest.param({"clip_value": 0.2}, marks=pytest.mark.slow),
    ],
)
def test_a_worker_recomputes_the_gradient_with_a_copy_of_the_policy(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process = records(trainer(**changes), tmp_path / "in_process")
    monkeypatch.setattr(PolicyPass, "loss", no_pass)

    in_worker = records(trainer(**changes), tmp_path / "worker", offload=True)

    for one, other in zip(in_process, in_worker, strict=True):
        assert [one[key] for key in CHECKED_KEYS] == pytest.approx([other[key] for key in CHECKED_KEYS], abs=1e-6)
        assert named(one) == named(other) == set()


@pytest.mark.system
@pytest.mark.parametrize("mistake", ["gradient_policy_sign", pytest.param("gradient_value_summed", marks=pytest.mark.slow)])
def test_a_worker_names_what_explains_a_gradient(mistake: str, tmp_path: Path) -> None:
    source = trainer()
    source.steps = MISTAKES[mistake](source.steps)

    for values in records(source, tmp_path, offload=True):
        assert mistake in named(values) <= {mistake} | ALIKE.get(mistake, set())


@pytest.mark.system
def test_a_policy_that_cannot_be_copied_passes_the_minibatch_itself(tmp_path: Path) -> None:
    source = trainer()
    source.policy.of_the_script = lambda: None  # type: ignore[assignment]  # modules take any attribute

    assert all(set(CHECKED_KEYS) <= values.keys() for values in records(source, tmp_path, offload=True))
