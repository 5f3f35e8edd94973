"""Continuous heads: their probabilities equal torch.distributions, and their actions stay within bounds."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ppo_builders import pendulum
from torch import Tensor
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.action_distributions import Gaussian, Squash, StateDependentGaussian, make_head
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, TensorStep

ROWS, D, FEATURES = 64, 3, 5
SPEC = ActionSpec("continuous", D, low=(-2.0, 0.0, -1.0), high=(2.0, 1.0, 5.0))
KINDS: list[dict[str, Any]] = [{}, {"squash": True}, {"state_dependent_std": True}, {"squash": True, "state_dependent_std": True}]


def head(*, squashed: bool, state_dependent: bool, spec: ActionSpec = SPEC) -> Gaussian:
    """Return a head in float64 whose scores differ between rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gaussian = make_head("move", spec, FEATURES, PPOConfig(log_std=-0.5, state_dependent_std=state_dependent, squash=squashed))
        assert isinstance(gaussian, Gaussian)
        torch.nn.init.normal_(gaussian.linear.weight, std=0.2)
    return gaussian.double()


def theirs(ours: Gaussian, scores: Tensor) -> Independent[Normal]:
    """Return torch's Gaussian for these scores."""
    described = ours.description(scores)
    return Independent(Normal(described["means"], described["log_std"].exp()), 1)


def assert_near(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left.detach(), right.detach(), rtol=0.0, atol=1e-6)


def drawn(ours: Gaussian) -> tuple[Tensor, Tensor]:
    """Return scores [N, width] and draws [N, D]."""
    generator = torch.Generator().manual_seed(1)
    scores = ours(torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64))
    return scores, ours.sample(scores, ours.noise((ROWS,), generator).double())


@pytest.mark.parametrize("state_dependent", [False, True])
def test_probability_and_entropy_are_those_of_torch(state_dependent: bool) -> None:
    ours = head(squashed=False, state_dependent=state_dependent)
    scores, actions = drawn(ours)

    expected = theirs(ours, scores)

    assert_near(ours.log_prob(scores, actions), expected.log_prob(actions))
    assert_near(ours.entropy(scores), expected.entropy().mean())
    assert isinstance(ours, StateDependentGaussian) == state_dependent
    assert (scores.std(0)[-D:] > 0.1).all()


@pytest.mark.parametrize("state_dependent", [False, True])
def test_a_squashed_probability_is_that_of_torch_for_the_tanh(state_dependent: bool) -> None:
    """Our head takes the draw u, torch's distribution the action tanh(u). The entropy is the Gaussian's, before the tanh."""
    ours = head(squashed=True, state_dependent=state_dependent)
    scores, draws = drawn(ours)

    expected = TransformedDistribution(theirs(ours, scores), [TanhTransform(cache_size=1)])

    assert_near(ours.log_prob(scores, draws), expected.log_prob(draws.tanh()))
    assert_near(ours.entropy(scores), theirs(ours, scores).entropy().mean())


def test_stretching_to_the_bounds_shifts_every_log_probability_alike() -> None:
    """It therefore cancels in the ratio: log((high - low) / 2) per dimension, here log 2 + log ½ + log 3 = log 3."""
    ours = head(squashed=True, state_dependent=False)
    scores, draws = drawn(ours)
    low, high = torch.tensor([SPEC.low, SPEC.high], dtype=torch.float64)
    stretch = AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)

    expected = TransformedDistribution(theirs(ours, scores), [TanhTransform(cache_size=1), stretch])

    assert ours.squash is not None
    assert_near(ours.log_prob(scores, draws) - math.log(3), expected.log_prob(ours.squash(draws)))


@pytest.mark.parametrize("state_dependent", [False, True])
def test_gradients_of_a_squashed_probability_are_those_of_torch(state_dependent: bool) -> None:
    ours = head(squashed=True, state_dependent=state_dependent)
    scores, draws = drawn(ours)
    draws = draws.detach()
    scores = scores.detach().requires_grad_()
    means, log_std = ours.split(scores) if isinstance(ours, StateDependentGaussian) else (scores, ours.log_std)
    expected = TransformedDistribution(Independent(Normal(means, log_std.exp()), 1), [TanhTransform(cache_size=1)])

    (mine,) = torch.autograd.grad(ours.log_prob(scores, draws).sum(), scores)
    (other,) = torch.autograd.grad(expected.log_prob(draws.tanh()).sum(), scores)

    assert_near(mine, other)


def test_a_probability_far_out_stays_finite_with_its_gradient() -> None:
    """1 - tanh²(200) is 0 in any precision, but its logarithm, -2·200 + 2 log 2, is finite."""
    squash = Squash("move", ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)))
    draws = torch.tensor([[200.0], [-200.0], [0.0]], requires_grad=True)

    slope = squash.log_slope(draws)
    slope.sum().backward()

    assert slope.tolist() == pytest.approx([-400 + 2 * math.log(2)] * 2 + [0.0], rel=1e-6)
    assert draws.grad is not None and draws.grad.flatten().tolist() == [-2.0, 2.0, 0.0]


@pytest.mark.parametrize("squashed", [False, True])
@pytest.mark.parametrize("state_dependent", [False, True])
def test_acting_in_numpy_draws_what_torch_draws(squashed: bool, state_dependent: bool) -> None:
    ours = head(squashed=squashed, state_dependent=state_dependent).float()
    generator = torch.Generator().manual_seed(2)
    scores, noise = ours(torch.randn(ROWS, FEATURES, generator=generator)).detach(), ours.noise((ROWS,), generator)

    assert_near(torch.from_numpy(ours.sampler()(scores.numpy(), noise.numpy())), ours.sample(scores, noise))


def test_irrelevant_rows_have_no_entropy() -> None:
    """One row of four counts: its entropy, divided by the number of all rows."""
    ours = head(squashed=False, state_dependent=True)
    scores = drawn(ours)[0][:4]

    entropy = ours.entropy(scores, torch.tensor([False, True, False, False]))

    assert float(entropy.detach()) == pytest.approx(float(theirs(ours, scores).entropy()[1].detach()) / 4)


def test_the_spread_begins_where_the_settings_say_and_is_held_within_its_range() -> None:
    ours = make_head("move", SPEC, FEATURES, PPOConfig(log_std=-0.5, state_dependent_std=True))

    begins = ours.description(ours(torch.zeros(1, FEATURES)))["log_std"]
    log_std = ours.description(torch.tensor([[0.0, 0.0, 0.0, -99.0, 0.5, 99.0]]))["log_std"]

    assert begins.tolist() == [[-0.5] * D]
    assert log_std.tolist() == [[-5.0, 0.5, 2.0]]


finite = st.floats(-(2.0**100), 2.0**100, width=32)
anything = st.floats(width=32, allow_nan=False)


@pytest.mark.system
@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.float32, (2, 4), elements=finite), arrays.arrays(np.float32, (5, 4), elements=anything))
def test_a_squashed_action_never_leaves_its_bounds(ends: np.ndarray[Any, Any], draws: np.ndarray[Any, Any]) -> None:
    low, high = np.sort(ends, 0)
    squash = Squash("move", ActionSpec("continuous", 4, low=tuple(low.tolist()), high=tuple(high.tolist())))

    for actions in (squash.as_numpy(draws), squash(torch.from_numpy(draws)).numpy()):
        assert np.isfinite(actions).all()
        assert (low <= actions).all() and (actions <= high).all()
    far = squash.as_numpy(np.full(4, 50, np.float32))
    assert (np.abs(far - high) <= 1e-6 * (np.abs(low) + np.abs(high)) + 1e-40).all()


class Stateless:
    """Tensor environments with constant observations. They record the actions, and pay for them."""

    name, observation_shape, device = "stateless", (3,), torch.device("cpu")

    def __init__(self, num_envs: int, specs: dict[str, ActionSpec], pay: Callable[[Any], Tensor]) -> None:
        self.num_envs, self.action_specs, self.pay = num_envs, specs, pay
        self.received_actions: list[dict[str, Tensor]] = []

    def reset(self, seed: int | None = None) -> Tensor:
        return torch.ones(self.num_envs, 3)

    def step(self, actions: Any) -> TensorStep:
        self.received_actions.append({name: action.clone() for name, action in actions.items()})
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return TensorStep(self.reset(), self.pay(actions), never, never)

    def close(self) -> None:
        """Nothing to free."""

    def received(self, name: str) -> Tensor:
        return torch.stack([actions[name] for actions in self.received_actions])


def target() -> Stateless:
    """Eight environments that pay for actions near 0.7, clipped to [-2, 2]."""
    spec = ActionSpec("continuous", 1, low=(-2.0,), high=(2.0,))
    return Stateless(8, {"action": spec}, lambda actions: -(actions["action"][:, 0].clamp(-2, 2) - 0.7).square())


@pytest.mark.parametrize("squash", [True, False])
def test_the_draw_is_stored_uncut_and_it_or_its_tanh_is_acted_on(squash: bool) -> None:
    env = target()
    trainer = PPO(env, PPOConfig(num_steps=32, squash=squash, log_std=1.0))

    stored = trainer.collector.collect().actions["action"]

    torch.testing.assert_close(env.received("action"), 2 * stored.tanh() if squash else stored, rtol=0, atol=1e-6 if squash else 0)
    assert stored.abs().max() > 2.5


@pytest.mark.system
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *(("mlp", kind) for kind in KINDS[1:]),
        *(pytest.param("lstm", kind, marks=pytest.mark.slow) for kind in KINDS[1:-1]),
        ("lstm", KINDS[-1]),
    ],
    ids=str,
)
def test_continuous_heads_learn_a_constant(settings: dict[str, Any], policy: str) -> None:
    """The reward is -(action - 0.7)² in bounds of [-2, 2]. A policy that stays at its start gets about -1 or less."""
    trainer = PPO(target(), PPOConfig(
        num_steps=32, num_epochs=4, num_minibatches=4, hidden_sizes=(16,), lstm_size=8, policy=policy, seed=1,
        learning_rate=3e-3, gamma=0.0, anneal_learning_rate=False, **settings
    ))  # fmt: skip

    trainer.learn(32 * 8 * 30)

    assert float(trainer.collector.collect().rewards.mean()) > -0.3


@pytest.mark.parametrize("high", [math.inf, 1.0])
def test_without_finite_bounds_there_is_nothing_to_squash_into(high: float) -> None:
    spec = ActionSpec("continuous", 1, low=(-math.inf,), high=(high,))

    with pytest.raises(ValueError, match=r"squash needs finite bounds, but the action part 'move' has low=\[-inf\]"):
        make_head("move", spec, FEATURES, PPOConfig(squash=True))


def test_a_checkpoint_of_a_squashed_policy_fits_no_other(tmp_path: Any) -> None:
    path = pendulum(squash=True).save(tmp_path / "squashed.pt")

    with pytest.raises(ValueError, match=r"its heads is .*continuous, squashed"):
        pendulum().load(path)
    pendulum(squash=True).load(path)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_squashed_parts_may_depend_on_others(on_device: bool, state_dependent_std: bool) -> None:
    """An amount is relevant for the second of two ways only. Else it is stored as 0, which the squash maps to the middle: [2, 0]."""
    amount = ActionSpec("continuous", 2, given="way", relevant_for=(1,), low=(0.0, -1.0), high=(4.0, 1.0))
    env = Stateless(5, {"way": ActionSpec("categorical", 2), "amount": amount}, lambda actions: torch.ones(5))
    config = PPOConfig(num_steps=20, seed=1, squash=True, state_dependent_std=state_dependent_std, log_std=1.0)
    trainer = PPO(env, config)
    collector = TensorCollector(env, trainer.policy, 20, seed=1) if on_device else trainer.collector

    rollout = collector.collect()

    amounts, matters = rollout.actions["amount"], rollout.relevance["amount"]
    expected = torch.tensor([2.0, 0.0]) + torch.tensor([2.0, 1.0]) * amounts.tanh()
    torch.testing.assert_close(env.received("amount"), expected, rtol=0, atol=1e-5)
    assert 0 < int(matters.sum()) < matters.numel()
    assert not amounts[~matters].any() and torch.equal(rollout.head_log_probs["amount"] != 0, matters)
