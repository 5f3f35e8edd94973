"""Precision and compilation change the speed of an update, but its results only by rounding."""

import math
from typing import Any

import pytest
import seeing_env  # noqa: F401  # registers the environments
import torch
from ppo_builders import EventLog, cartpole, equal, pendulum, weights
from short_trainings import learned, mean_return
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, TrunkBackward
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.rollout import flatten

NOISY_IMPORT = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Warnings of torch's compiler at its first use."""


def spotlight(**settings: Any) -> PPO:
    env = make_env("SpotlightParts-v0", num_envs=4, seed=1)
    return PPO(env, PPOConfig(**{"num_steps": 32, "num_epochs": 2, "hidden_sizes": (16,), "seed": 0, **settings}))


KINDS: list[Any] = [
    pytest.param(cartpole, {}, id="vector"),
    pytest.param(cartpole, {"shared_trunk": True, "entropy_coef": 0.01}, id="shared"),
    pytest.param(cartpole, {"policy": "lstm"}, id="lstm"),
    pytest.param(pendulum, {"squash": True, "state_dependent_std": True}, id="squashed"),
    pytest.param(spotlight, {}, id="image"),
]


@pytest.mark.parametrize(("make", "settings"), KINDS)
def test_bf16_acts_and_trains_alike(make: Any, settings: dict[str, Any]) -> None:
    """The first minibatch has the probabilities of collection to three digits; the bound for bf16 is 2e-2."""
    trainer = make(precision="bf16", **settings)
    emitted = learned(trainer, 1, MinibatchEnd)

    assert emitted.events[0].log_ratio.abs().max() < 5e-3
    assert all(math.isfinite(float(loss)) for event in emitted.events for loss in event.losses.values())
    assert trainer.facts(1)["precision"] == "bf16"
    assert all(weight.dtype == torch.float32 for weight in trainer.policy.parameters())


@pytest.mark.parametrize(("make", "settings"), KINDS)
def test_bf16_is_close_to_fp32_and_not_the_same(make: Any, settings: dict[str, Any]) -> None:
    """The trunk's features lose a few digits: the significand has 8 bits instead of 24."""
    fine, coarse = make(**settings), make(precision="bf16", **settings)
    rollout = fine.collector.collect()
    batch = flatten(rollout, rollout.values, rollout.values)

    exact, rounded = (trainer.policy.trunks(batch.observations, batch.grid())[0] for trainer in (fine, coarse))

    assert rounded.dtype == torch.float32
    assert 1e-5 < (exact - rounded).abs().max() < 0.05


def test_a_memory_stays_in_float32() -> None:
    trainer = cartpole(precision="bf16", policy="lstm")
    core = trainer.policy.cores()["actor"]
    steps, state = torch.randn(5, 2, 4), torch.zeros(core.state_shape(2))

    with trainer.policy.autocast():
        inside = core(steps.bfloat16().float(), state)

    outside = core(steps.bfloat16().float(), state)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert inside[0].dtype == torch.float32


@pytest.mark.system
def test_bf16_learns_cartpole() -> None:
    """A policy that does not learn balances for about 22 steps."""
    trainer = cartpole(precision="bf16", num_steps=64, num_epochs=4, learning_rate=2.5e-3)

    assert mean_return(trainer, 12_000, episodes=30) > 60


def again(event: TrunkBackward) -> None:
    """Compute the gradients of one loss alone before the joint backward pass."""
    torch.autograd.grad(event.outputs, list(event.shared), [event.actor] * len(event.outputs), retain_graph=True)


@pytest.mark.system
@NOISY_IMPORT
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(cartpole, {"shared_trunk": True, "entropy_coef": 0.01}, id="shared"),
        pytest.param(
            pendulum, {"squash": True, "state_dependent_std": True, "precision": "bf16"}, id="squashed-bf16", marks=pytest.mark.slow
        ),
    ],
)
def test_a_compiled_update_is_the_update(make: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole's minibatches differ in size, because NEXT_STEP wastes rows. A hook may back up through the trunk twice."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # without a process pool, which outlives the test
    plain, fast = make(**settings), make(compile=True, **settings)
    emitted = EventLog().listen(fast, MinibatchEnd)
    if settings.get("shared_trunk"):
        fast.hooks.on(TrunkBackward, again)

    with torch._dynamo.config.patch(assume_static_by_default=False):  # compiles once for all sizes of minibatches
        for trainer in (plain, fast):
            trainer.learn(300)

    assert close(weights(plain), weights(fast))
    assert not equal(weights(make(**settings)), weights(fast))
    assert len(emitted.events) == plain.gradient_steps


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(left, right, strict=True))


@NOISY_IMPORT
@pytest.mark.system
def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(ValueError, match=r"compile needs a C\+\+ compiler on the CPU"):
        cartpole(compile=True)
