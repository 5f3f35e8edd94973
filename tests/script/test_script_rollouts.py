"""Rollouts, minibatches and distributions of scripts, identified by their numbers."""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tapping import observed, tapped
from torch import Tensor, distributions, nn
from torch.distributions import Categorical

from esper_telemetry.adapters.script.autograd_graph import LayerOutputs, graph_of
from esper_telemetry.adapters.script.loss_graph import read_loss
from esper_telemetry.adapters.script.loss_reading import LossReading, PolicyTerm
from esper_telemetry.adapters.script.network_logs import Asked, DistributionLog, EstimateLog, IndexLog, drawn_sequences
from esper_telemetry.adapters.script.observed_steps import step_parts
from esper_telemetry.adapters.script.rollout_finder import RolloutFinder
from esper_telemetry.adapters.script.script_episodes import EpisodeLog, ReturnLog
from esper_telemetry.adapters.script.script_rollouts import RecordedRollout, RowFinder, ScriptRollout, summands
from esper_telemetry.adapters.script.settings import find_discounts
from esper_telemetry.adapters.script.variables import Variables, calling_variables, stacked
from esper_telemetry.core.event_parts import RolloutActions, Transitions
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.log_probs import check_log_probs
from esper_telemetry.updates.equation_checks import collection_checks

NEVER = torch.zeros(32, 1, dtype=torch.bool)
"""No end in 32 steps of an environment."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(9)


def draws(count: int, *shape: int) -> list[Tensor]:
    return [torch.randn(shape or (32,)) for _ in range(count)]


def columns(**changes: Tensor) -> dict[str, Tensor]:
    """Return rollout columns [64, 1] whose log-probabilities are close together."""
    return {"log_probs": -0.7 - 1e-6 * torch.rand(64, 1), "advantages": torch.randn(64, 1)} | changes


def test_rows_are_found_by_the_column_whose_numbers_lie_apart_and_not_by_one_of_other_numbers() -> None:
    rollout = columns(returns=torch.arange(64.0).reshape(64, 1))
    rows = torch.randperm(64)[:16]
    own = {name: column.flatten()[rows] for name, column in rollout.items()}

    assert torch.equal(RowFinder(rollout).rows_of(own | {"returns": own["returns"] + 100.5}), rows)  # type: ignore[arg-type]
    assert RowFinder(rollout).rows_of({"advantages": own["advantages"] + 5}) is None


@pytest.mark.parametrize("pairs", [1, 32])
def test_equal_transitions_are_visited_in_turns(pairs: int) -> None:
    rollout = columns() if pairs == 32 else columns(log_probs=torch.randn(64, 1))
    for column in rollout.values():
        column[1 : 2 * pairs : 2] = column[: 2 * pairs : 2]
    finder = RowFinder(rollout)
    visits = [finder.rows_of({name: column.flatten() for name, column in rollout.items()}) for _ in range(2)]

    assert all(rows is not None and rows.sort().values.tolist() == list(range(64)) for rows in visits)


def test_each_loss_before_an_optimizer_step_has_the_heads_of_its_own_rows() -> None:
    log, weights = DistributionLog(), torch.zeros(2, requires_grad=True)
    losses = []
    for place in range(2):
        policy: Any = Categorical(logits=weights + torch.eye(2)[place].expand(5, 2))
        log.add(policy, log_probs := policy.log_prob(torch.zeros(5)))
        losses.append(log_probs.mean())

    heads = [log.take_minibatch(5, graph_of(loss)).logits for loss in losses]

    assert [{name: logits[0].argmax() for name, logits in head.items()} for head in heads] == [{"action": 0}, {"action": 1}]


class Zipped(gym.Env[Any, Any]):
    """Two environments in one that does not declare this and returns an iterator."""

    def step(self, action: object) -> Any:
        return zip(*[(0.0, 1.0, True, False, {}), (1.0, 2.0, False, False, {})], strict=True)


def test_what_an_environment_returns_as_an_iterator_is_left_to_the_script() -> None:
    with tapped() as listener:
        _, rewards, terminated, *_ = Zipped().step([0, 1])

    assert rewards == (1.0, 2.0) and terminated == (True, False)
    assert observed(listener.environments).ended.tolist() == [[True, False]]


class Refuses(dict[str, Any]):
    """A dictionary whose members are its attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_variables_of_a_script_may_refuse_attributes() -> None:
    batch = Refuses(advantages=torch.ones(3))

    def variables() -> Variables:
        return calling_variables()

    assert any(value is batch for value in variables().values())


def collected(ends: Tensor, paid: Tensor | None = None, limits: Tensor | None = None) -> Any:
    """Run environments that pay 1 unless `paid` has other rewards, and are reset at once when an episode ends."""
    cut = torch.zeros_like(ends) if limits is None else limits
    rewards = torch.ones(ends.shape) if paid is None else paid
    steps, envs = ends.shape
    columns = {"ended": ends, "reset": ends, "rewards": rewards, "time_limits": cut}
    return SimpleNamespace(steps=steps, envs=envs, in_turns=True, cut=False, received=None, **columns)


def finder_of(
    arrays: dict[str, Any],
    reading: LossReading | None = None,
    ends: Tensor = NEVER,
    *,
    paid: Tensor | None = None,
    limits: Tensor | None = None,
    indices: Sequence[Tensor] = (),
    indexed: Collection[int] = (),
    targets: tuple[str, ...] = (),
    **known: Any,
) -> RolloutFinder:
    recorded = RecordedRollout(collected(ends, paid, limits), **known)
    return RolloutFinder(Variables([arrays]), recorded, reading, indices=indices, indexed=indexed, targets=targets)


def rollout_of(arrays: dict[str, Any], reading: LossReading, ends: Tensor = NEVER, **known: Any) -> ScriptRollout:
    """Find a rollout with a discount of 0.9."""
    rollout = finder_of(arrays, reading, ends, **known).rollout(0.9)
    assert rollout is not None
    return rollout


def read(loss: Tensor, *held: Tensor) -> LossReading:
    reading = read_loss(loss, held=held)
    assert reading is not None
    return reading


def policy_of(loss: Tensor, *held: Tensor) -> PolicyTerm:
    policy = read(loss, *held).policy
    assert policy is not None
    return policy


def node(column: Tensor) -> Tensor:
    """Return the same numbers as a result of an operation with a gradient."""
    return column.clone().requires_grad_() + 0


def reading_of(log_probs: Tensor, advantages: Tensor, values: Tensor | None = None) -> LossReading:
    """Read a loss with these columns before any step; the critic's targets are advantages plus values."""
    now, new = node(log_probs), node(torch.zeros(32) if values is None else values)
    loss = -((now - log_probs).exp() * advantages).mean()
    return read(loss if values is None else loss + (new - (advantages + values)).square().mean(), now, new)


@pytest.mark.parametrize("apart", [False, True])
def test_returns_less_the_mean_value_are_not_taken_for_normalised_returns(apart: bool) -> None:
    """Returns [N] less values [N, 1] are a matrix, whose mean over the rows multiplies the ratios; the critic may have a later loss."""
    targets, critic, log_probs = draws(3)
    now, new = node(log_probs), node(critic.unsqueeze(1))
    matrix = targets - new
    loss = -((now - log_probs).exp() * matrix.detach()).mean()
    loss = loss if apart else loss + matrix.square().mean()

    rollout = rollout_of({"returns": targets, "values": critic, "p": log_probs}, read(loss, now, new))

    torch.testing.assert_close(rollout.advantages.flatten(), targets - critic.mean())
    torch.testing.assert_close(rollout.returns.flatten(), targets)


def test_columns_are_those_that_the_loss_is_computed_from_and_the_rows_are_those_that_the_script_indexed() -> None:
    """The advantages of the loss are normalised, and come from other rows than its log-probabilities."""
    targets, critic, log_probs, raw = draws(4)
    rows, others = torch.randperm(32)[:16], torch.randperm(32)[:16]
    used = (raw[others] - raw[others].mean()) / raw[others].std()
    now, new = node(log_probs[rows]), node(critic[rows])
    gain = ((now - log_probs[rows]).exp() * used).mean()
    reading = read((new - targets[rows]).square().mean() - gain, now, new)
    arrays = {"x": targets, "y": critic, "z": log_probs, "w": torch.ones(32), "a": raw}
    assert finder_of(arrays, reading).find("advantages") is None

    finder = finder_of(arrays, reading, indices=[rows, others])
    rollout = finder.rollout(0.9)

    assert rollout is not None and rollout.returns_known
    found = [one.flatten() for one in (rollout.returns, rollout.values, rollout.advantages)]
    assert all(map(torch.equal, found, (targets, critic, raw)))
    assert finder.names() == {"log_probs": "z", "values": "y", "returns": "x", "advantages": "a", "rewards": "w"}
    columns = {"log_probs": log_probs[:, None], "advantages": raw[:, None]}
    known = RowFinder(columns).rows_of({"log_probs": log_probs[rows]}, [others, rows])
    assert known is not None and torch.equal(known, rows)
    taken = RowFinder(columns).rows_of_advantages(used, rows, [rows, others])
    assert taken is not None and torch.equal(taken, others)


def test_log_probabilities_may_be_stored_as_probabilities() -> None:
    probabilities, advantages = (torch.rand(32) for _ in range(2))
    finder = finder_of({"p": probabilities, "a": advantages}, reading_of(probabilities.log(), advantages))

    assert finder.log_probs is not None
    assert torch.allclose(finder.log_probs.flatten(), probabilities.log())


@pytest.mark.parametrize("asked", [False, True])
def test_what_actions_are_drawn_from_counts_where_no_log_probabilities_are_asked_for(asked: bool) -> None:
    log, logits = DistributionLog(), torch.randn(3, 2, 4)
    for step in range(3):
        policy = Categorical(logits=logits[step])
        log.add_sample(policy, torch.zeros(2))
        log.add_sample(distributions.Normal(torch.zeros(2, 1), 1.0), torch.zeros(2, 1))  # noise
        if asked:
            log.add(policy, policy.log_prob(policy.sample()))
        log.after_env_step()

    heads = log.take_rollout(3, 2)[1].logits

    torch.testing.assert_close(heads["action"], logits.log_softmax(-1))


class MaskedChoice(Categorical):
    """A choice among the actions whose masks are 1, or among all actions if the masks are an empty list."""

    def __init__(self, logits: Tensor, masks: Any) -> None:
        self.masks = masks
        super().__init__(logits=torch.where(masks == 1, logits, -torch.inf) if len(masks) else logits)


@pytest.mark.parametrize("masks", [[], torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])])
def test_a_masked_distribution_of_the_script_is_recorded_with_its_masks(masks: Any) -> None:
    log, logits = DistributionLog(), torch.randn(2, 3, requires_grad=True)
    policy: Any = MaskedChoice(logits, masks)
    log_probs = policy.log_prob(torch.tensor([2, 2]))
    log.add(policy, log_probs)

    heads = log.take_minibatch(2, [log_probs.grad_fn])

    torch.testing.assert_close(heads.logits["action"].exp(), policy.probs.detach())
    assert bool(heads.logits["action"].isfinite().all())
    assert {name: mask.tolist() for name, mask in heads.action_masks.items()} == ({"action": (masks == 1).tolist()} if len(masks) else {})


def test_distributions_that_are_asked_after_each_step_belong_to_it() -> None:
    log = DistributionLog()
    for step in range(3):
        policy = Categorical(logits=torch.tensor([[float(step), 0.0]]))
        if step:
            log.after_env_step()
        log.add(policy, policy.log_prob(torch.zeros(1).long()))

    logits = log.take_rollout(3, 1)[1].logits["action"]
    assert (logits[:, 0, 0] - logits[:, 0, 1]).tolist() == pytest.approx([0, 1, 2])


def test_the_policy_gradient_of_negative_log_probabilities_has_its_signs() -> None:
    probabilities, advantages = torch.rand(6).requires_grad_(), torch.randn(6)
    policy = policy_of((-probabilities.log() * advantages).mean(), advantages)

    assert policy.log_probs is not None and torch.allclose(policy.log_probs, probabilities.detach().log())
    assert torch.equal(policy.advantages, advantages)


def test_one_advantage_may_serve_several_rows() -> None:
    now = torch.randn(6, 2).requires_grad_()
    policy = policy_of(-((now - now.detach()).exp() * torch.arange(6.0).reshape(6, 1)).mean())

    assert policy.advantages.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_environments_in_other_processes_are_seen_by_their_pipes() -> None:
    """Their answers may be steps, arrays, or nothing."""
    info = {"TimeLimit.truncated": True}
    answers: list[Any] = [np.zeros(3), (np.zeros(3), 2.0, False, info, None), (), ([0.5], 2.0, True, info, None)]
    with tapped() as listener:
        near, far = multiprocessing.Pipe()
        for step, answer in enumerate(answers):
            near.send(("step", step))
            assert far.recv() == ("step", step)
            far.send(answer)
            near.recv()

    steps = observed(listener.environments)
    assert steps.rewards.flatten().tolist() == [2, 2]
    assert steps.ended.flatten().tolist() == steps.time_limits.flatten().tolist() == [False, True]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (([0.5, 1.0], -1.5, True), (-1.5, [True])),
        ((torch.ones(2, 3), torch.tensor([1.0, 2]), torch.tensor([0.0, 1])), ([1, 2], [[False, True]])),
        ((3, 1.0, False, True), (1.0, [False, True])),
        (({"a": 1}, 1, np.False_, 0.3, {}), (1, [False])),
        (([0.5], 2.0, 1, {}), (2, [True])),
        ((torch.ones(2, 3), torch.tensor([4, 5]), torch.tensor([1.0, 2]), torch.tensor([False, True])), ([1, 2], [[False, True]])),
        ((0.25, [1.0, 2.0], True), (0.25, [True])),
        (([0.5], 2.0, 0.1, True, False, {}), (2, [True, False])),
        (([[1.0], [1.0, 2.0]], 1.0, False), (1, [False])),
    ],
)
def test_the_result_of_a_step_is_recognised_whatever_its_length(result: Any, expected: tuple[Any, list[Any]]) -> None:
    parts = step_parts(result)

    assert parts is not None
    _, rewards, *flags, _ = parts
    assert rewards.tolist() == np.atleast_1d(expected[0]).tolist()
    assert [flag.tolist() for flag in flags] == [np.atleast_1d(one).tolist() for one in expected[1]]


@pytest.mark.parametrize("result", [None, (1.0, 0.5), (0.7, -0.69, 1), ("0.5", "low", True), ([1.0], 0.5, {}), [[], []]])
def test_what_an_agent_returns_is_not_the_result_of_a_step(result: Any) -> None:
    """Value, log-probability and action among them."""
    assert step_parts(result) is None


@dataclass
class Own:
    """An environment of the script's own, which has no hash."""

    steps: int = 0

    def reset(self) -> list[float]:
        return [0.0]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        self.steps += 1
        return [float(self.steps)], 1.0, self.steps % 3 == 0


class Agent:
    """Another class with methods of these names."""

    @staticmethod
    def reset() -> str:
        return "reset"

    def step(self) -> str:
        return "step"


class StepsInReset(gym.Env[Any, Any]):
    """An environment whose reset takes a step, as LunarLander's."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.step(0)[0], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_an_exception_in_a_tap_ends_only_that_tap(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The script sees none of it, one warning names the function, and steps are recorded, except those that a reset takes."""
    calls = []

    def refuse(*words: object) -> None:
        calls.append(words)
        raise LookupError("unforeseen")

    monkeypatch.setattr(ReturnLog, "add_text", refuse)
    with tapped(fails=True) as listener:
        for step in range(3):
            print(step)
        envs = gym.vector.SyncVectorEnv([StepsInReset] * 3)
        envs.reset()
        envs.step(np.zeros(3, int))

    assert len(calls) == 1
    steps = observed(listener.environments)
    assert (steps.steps, steps.envs) == (1, 3), "a reset's steps are not the script's"
    (record,) = caplog.records
    assert "printed failed and is not called again" in record.getMessage() and "unforeseen" in record.getMessage()


def test_classes_of_the_script_that_step_and_reset_are_its_environments() -> None:
    env = Own()
    with tapped() as listener:
        torch.optim.SGD([torch.zeros(1)])
        assert (Agent().reset(), Agent().step()) == ("reset", "step")
        for _ in range(4):
            env.step(0)
        env.reset()
        env.step(0)

    assert not hasattr(Own.step, "tapped")
    steps = observed(listener.environments)
    assert steps.ended.flatten().tolist() == [False, False, True, True, False]
    assert steps.time_limits.flatten().tolist() == [False, False, False, True, False]


def test_steps_of_an_evaluation_with_the_same_environment_are_not_of_training() -> None:
    """A line that steps only after training has begun evaluates, unless a rollout has no other steps."""
    env = Own()

    def evaluate() -> None:
        for _ in range(8):
            env.step(0)

    with tapped() as listener:
        torch.optim.SGD([torch.zeros(1)])
        log, counts = listener.environments, []
        for update in range(4):
            for _ in range(4 if update < 2 else 0):
                env.step(0)
            counts.append(log.steps)
            log.closed = True
            log.take()
            evaluate()

    assert counts == [4, 8, 8, 16]  # the third rollout has no other steps


def test_a_script_that_ignores_a_time_limit_goes_on_with_its_episode() -> None:
    """The environment repeats the flag in each step until it is reset."""
    log, env = EpisodeLog(), Own()
    assert log.includes(env)
    for limited in (False, True, True, True):
        log.after_step(env, ([0.0], 1.0, False, limited, {}))

    assert observed(log).time_limits.flatten().tolist() == [False, True, False, False]
    assert [one.length for one in log.take()[0]] == [2]


def test_an_episode_of_the_length_at_which_the_script_ends_others_has_ended_too() -> None:
    log, env = EpisodeLog(), Own()
    assert log.includes(env)
    cuts = []
    for step in range(4):
        log.after_step(env, ([0.0], 1.0, False, False, {}))
        cuts.append(observed(log).cut)
        if step == 1:
            log.reset(env)

    assert cuts == [False, False, False, True]


def test_outputs_of_the_critic_are_the_values_where_the_first_loss_is_of_the_policy_only() -> None:
    log_probs, advantages, values, last = draws(4)
    following = torch.cat([values[1:], last[:1]])
    outputs = [following[:, None], values[:, None]]
    arrays = {"l": log_probs, "a": advantages, "x": following, "v": values}

    rollout = rollout_of(arrays, reading_of(log_probs, advantages), estimates=outputs, critic=outputs)

    assert torch.equal(rollout.values[:, 0], values)
    assert torch.equal(rollout.last_values[0], last[:1])


def test_the_latest_outputs_of_the_critic_are_the_values() -> None:
    """Earlier ones are of its passes over the previous rollout."""
    log_probs, advantages, earlier, values = draws(4)
    outputs = [earlier[:, None], values[:, None]]

    rollout = rollout_of({"l": log_probs, "a": advantages}, reading_of(log_probs, advantages), estimates=outputs, critic=outputs)

    assert torch.equal(rollout.values[:, 0], values)


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_columns_of_one_environment_after_the_other_may_have_an_axis_of_size_1(rounding: float) -> None:
    """The buffer is [B, T, 1], and is flattened to [R, 1]. Its log-probabilities may be rounded in another way than those of acting."""
    log_probs, advantages, values = draws(3, 2, 16, 1)
    log_probs[0, 3] = log_probs[0, 5]
    arrays = {"l": log_probs, "v": values, "a": advantages, "rewards": torch.ones(2, 16)}
    arrays |= {f"flat_{name}": array.reshape(32, 1) for name, array in arrays.items()}
    acted = [Asked(row, None) for row in (1 + rounding) * log_probs[..., 0].T]
    reading = reading_of(log_probs.reshape(-1), advantages.reshape(-1), values.reshape(-1))

    rollout = rollout_of(arrays, reading, NEVER.view(16, 2), acted=acted)

    assert torch.equal(rollout.advantages, advantages[..., 0].T)
    assert torch.allclose(rollout.log_probs, log_probs[..., 0].T)


def test_a_loss_over_whole_tables_of_environments_shows_their_order() -> None:
    """Tables [B, T] of a policy gradient without a ratio; the log-probabilities are those of the loss."""
    advantages, values = draws(2, 16, 2)
    flat_advantages, flat_values = advantages.T.reshape(-1), values.T.reshape(-1)
    logits = torch.stack(draws(2, 32), -1).requires_grad_()
    now, new = logits.log_softmax(-1).gather(-1, torch.arange(32).unsqueeze(1) % 2).squeeze(1), node(flat_values)
    loss = (new - (flat_advantages + flat_values)).square().mean() - (now * flat_advantages).mean()
    arrays = {"a": advantages.T, "v": values.T, "rewards": torch.ones(2, 16)}

    rollout = rollout_of(arrays, read(loss, now, new), NEVER.view(16, 2))

    assert torch.equal(rollout.advantages, advantages)
    assert torch.equal(rollout.log_probs, now.detach().view(2, 16).T)


def test_ends_of_episodes_show_the_order_of_buffers_with_equal_rewards() -> None:
    """One environment after the other; the script asks for no log-probabilities in acting."""
    log_probs, advantages, values = draws(3, 16, 2)
    ends = torch.rand(16, 2) < 0.2
    columns = {"l": log_probs, "a": advantages, "v": values, "d": ends, "rew": torch.ones(16, 2)}
    arrays = {name: column.T.reshape(-1) for name, column in columns.items()}

    rollout = rollout_of(arrays, reading_of(arrays["l"], arrays["a"], arrays["v"]), ends)

    assert torch.equal(rollout.values, values)


def test_advantages_that_a_function_keeps_to_itself_are_those_of_the_loss() -> None:
    """The only loss has the whole rollout; the last row, which the script leaves out, does not imply a value after the rollout."""
    log_probs, advantages, values = draws(3, 16, 2)
    advantages[-1] = 0.0
    arrays = {"log_probs": log_probs, "values": values, "rewards": torch.ones(16, 2)}

    rollout = rollout_of(arrays, reading_of(log_probs.reshape(-1), advantages.reshape(-1)), NEVER.view(16, 2))

    assert torch.equal(rollout.advantages, advantages)
    assert torch.equal(rollout.last_values[0], values[-1])


@pytest.mark.parametrize(
    ("tail", "expected"), [(torch.arange(40.0), True), (torch.zeros(40), False), (torch.ones(1), False), (torch.empty(0), False)]
)
def test_advantages_may_be_the_first_of_a_list_that_is_never_cleared(tail: Tensor, expected: bool) -> None:
    """A tail of zeros is the unused part of a buffer, and one more number is of the state after the rollout."""
    log_probs, advantages = draws(2)
    arrays = {"l": log_probs, "r": [*advantages.tolist(), *tail.tolist()], "history": [1.0] * 500}

    assert finder_of(arrays, reading_of(log_probs, advantages)).in_longer_array is expected


def test_the_targets_of_earlier_updates_precede_a_list_with_a_name_for_returns() -> None:
    """A list of all episodes' returns has the length of the rollout in one update."""
    log_probs, advantages, values, targets, episodes = draws(5)
    buffer = SimpleNamespace(ret_buf=targets)
    arrays = {"l": log_probs, "a": advantages, "v": values, "rets": episodes.tolist(), "buffer": buffer}

    rollout = rollout_of(arrays, reading_of(log_probs, advantages), targets=("ret_buf",), critic=[values], estimates=[values])

    assert torch.equal(rollout.returns[:, 0], targets)


def test_values_that_a_loss_does_not_reproduce_are_those_of_acting() -> None:
    log_probs, advantages, values = draws(3)
    arrays = {"l": log_probs, "a": advantages, "v": torch.cat([values, torch.ones(1)])}
    reading = reading_of(log_probs, advantages, 3 * values)

    assert torch.equal(rollout_of(arrays, reading, acting_values=values[:, None]).values[:, 0], values)


def tokens_of(steps: int, count: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Draw sequences of choices; return them with their distributions, the choices [B, T], and their log-probabilities."""
    policies = [Categorical(logits=2 * torch.randn(count, 9)) for _ in range(steps)]
    drawn = [policy.sample() for policy in policies]
    asked = [policy.log_prob(choice) for policy, choice in zip(policies, drawn, strict=True)]
    tokens = [(choice, policy.logits) for choice, policy in zip(drawn, policies, strict=True)]
    return tokens, torch.stack(drawn, 1), torch.stack(asked, 1)


@pytest.mark.parametrize(("prompt", "asked_prompt"), [(0, 0), (3, 3), (3, 0)])
def test_sequences_of_tokens_are_compared_with_what_they_were_drawn_from(prompt: int, asked_prompt: int) -> None:
    tokens, chosen, asked = tokens_of(6, 20)
    start = torch.zeros(20, prompt)
    whole, numbers = torch.cat([start.long(), chosen], 1), torch.cat([start[:, :asked_prompt], asked], 1)

    actions = drawn_sequences(tokens, whole.flatten(), numbers.flatten())

    assert actions is not None
    assert torch.equal(actions.log_probs, asked.T)
    check = check_log_probs(actions.actions, actions.log_probs, logits=actions.logits)
    assert check.matches


def test_sequences_of_a_minibatch_are_found_in_any_order_and_several_parts() -> None:
    first, second = tokens_of(6, 20), tokens_of(6, 20)
    rows = torch.randperm(40)[:10]
    chosen, asked = (torch.cat([one, other])[rows] for one, other in zip(first[1:], second[1:], strict=True))

    actions = drawn_sequences([*first[0], *second[0]], chosen.flatten(), asked.flatten())

    assert actions is not None
    assert check_log_probs(actions.actions, actions.log_probs, logits=actions.logits).matches


@pytest.mark.parametrize(("temperature", "found"), [(1.3, False), (None, True)])
def test_tokens_under_other_distributions_differ_and_a_temperature_is_left_alone(temperature: float | None, found: bool) -> None:
    """Log-probabilities from other rows of the network's outputs do not follow those of the draws."""
    tokens, chosen, _ = tokens_of(6, 40)
    logits = torch.stack([one for _, one in tokens], 1)
    own = logits.roll(-1, 1) if temperature is None else logits / temperature
    asked = own.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    actions = drawn_sequences(tokens, chosen.flatten(), asked.flatten())

    assert (actions is not None) is found
    if actions is not None:
        check = check_log_probs(actions.actions, actions.log_probs, logits=actions.logits)
        assert [one.name for one in check.hypotheses] == ["next_distribution"]


@pytest.mark.parametrize(("left_out", "named"), [([0], True), ([2], True), ([4, 5], False), ([], False)])
def test_a_mask_that_leaves_out_one_token_of_all_sequences_is_named(left_out: list[int], named: bool) -> None:
    """`step_left_out`; after the end of all sequences no token counts, and other tokens are left out of some sequences."""
    tokens, chosen, asked = tokens_of(6, 20)
    counts = torch.rand(20, 6) < 0.9
    counts[0] = True
    counts[:, left_out] = False

    actions = drawn_sequences(tokens, chosen.flatten(), asked.flatten(), counts.flatten())

    assert actions is not None
    groups = [group for check in collection_checks(actions, Facts(columns_by_name=True)) for group in check()]  # type: ignore[union-attr]
    keys = {key for group in groups if isinstance(group, MetricGroup) for key in group.values()}
    assert ("integrity/equation/minibatches_step_left_out" in keys) is named
    assert "integrity/equation/log_probs" in keys


@pytest.mark.parametrize("arrive", [True, False])
def test_heads_may_be_left_out_of_a_sum_only_if_their_actions_do_not_arrive(arrive: bool) -> None:
    """Distributions of a script may have other uses than its actions."""
    policies = {name: Categorical(logits=torch.randn(32, 2, 4)) for name in ("a", "b")}
    actions = {name: policy.sample() for name, policy in policies.items()}
    numbers, flags = torch.randn(32, 2).double(), torch.zeros(32, 2, dtype=torch.bool)
    transitions = Transitions(numbers, numbers, numbers, numbers, informative=False, sent=numbers, received=numbers)
    rollout = RolloutActions(
        policies["b"].log_prob(actions["b"]),
        actions,
        flags,
        logits={name: policy.logits for name, policy in policies.items()},
        transitions=transitions if arrive else None,
    )

    groups = [group for check in collection_checks(rollout, Facts(columns_by_name=True)) for group in check()]  # type: ignore[union-attr]
    keys = {key for group in groups if isinstance(group, MetricGroup) for key in group.values()}
    assert ("integrity/equation/log_probs_heads_left_out" in keys) is arrive


def test_tokens_are_recorded_until_an_environment_steps() -> None:
    log, policy = DistributionLog(), Categorical(logits=torch.randn(5, 3))
    log.add_sample(policy, policy.sample())
    assert len(log.take_tokens()) == 1
    assert log.take_tokens() == []
    log.after_env_step()
    log.add_sample(policy, policy.sample())
    assert log.take_tokens() == []


def test_numbers_of_which_the_loss_takes_rows_are_the_log_probabilities_that_it_does_not_show() -> None:
    log_probs, advantages, values, other = draws(4)
    rows, log = torch.randperm(32)[:16], IndexLog()
    for column in (log_probs, advantages, values + advantages):
        log.add(column, rows)
    now, new = (log_probs[rows].clone().requires_grad_() * 2 + 0.5 - 0.5).sub(log_probs[rows]), node(values[rows])
    loss = -((now - log_probs[rows]).exp() * advantages[rows]).mean() + (new - (values + advantages)[rows]).pow(2).mean()
    assert policy_of(loss, new).log_probs is None
    arrays = {"l": log_probs, "a": advantages, "v": values, "t": values + advantages, "o": other}

    finder = finder_of(arrays, read(loss, new), indices=[rows], indexed=log.sources)

    assert finder.names()["log_probs"] == "l"


def test_no_layer_has_acted_before_environments_that_are_not_known() -> None:
    assert EstimateLog().take_logits(LayerOutputs(1, 0, 2), 0, 0) is None


def test_rows_are_those_of_most_columns_where_a_script_mixes_up_one() -> None:
    rollout = {name: torch.randn(64, 1) for name in ("log_probs", "advantages", "inputs")}
    rows = torch.randperm(64)[:16]
    own = {name: column.flatten()[rows] for name, column in rollout.items()}

    for name in own:
        mixed: dict[str, Tensor | None] = {**own, name: own[name].roll(1)}
        found = RowFinder(rollout).rows_of(mixed)
        assert found is not None and torch.equal(found, rows)
    assert RowFinder(rollout).rows_of({"log_probs": own["log_probs"], "inputs": own["inputs"].roll(1)}) is None


def test_rows_with_equal_numbers_are_told_apart_by_most_columns_where_one_is_permuted() -> None:
    """The first two rows have one log-probability, and their advantages are exchanged."""
    rollout = {name: torch.randn(64, 1) for name in ("log_probs", "advantages", "inputs", "returns")}
    for name, distance in (("log_probs", 0.0), ("inputs", 1e-3), ("returns", 1e-3)):
        rollout[name][1] = rollout[name][0] + distance
    own: dict[str, Tensor | None] = {name: column.flatten() for name, column in rollout.items()}
    order = torch.cat([torch.tensor([1, 0]), 2 + torch.randperm(62)])
    found = RowFinder(rollout).rows_of({**own, "advantages": rollout["advantages"].flatten()[order]})

    assert found is not None and found.tolist() == list(range(64))


@pytest.mark.parametrize("acted", [True, False], ids=["values-while-acting", "values-later"])
def test_the_value_after_the_last_step_is_of_the_critic_and_not_of_a_policy_with_one_action(acted: bool) -> None:
    policy, critic = nn.Linear(3, 1), nn.Linear(3, 1)
    observations, log = torch.randn(33, 3), EstimateLog()
    with torch.no_grad():
        values = torch.stack([critic(observation) for observation in observations])  # a batch may round differently
        for observation in observations:
            log.after_env_step()
            log.add(policy, policy(observation))
            if acted:
                log.add(critic, critic(observation))
    if not acted:
        log.add(critic, values[-1:])
    log_probs, rewards = draws(2)
    arrays = {"r": rewards, "z": log_probs, "values": values[:-1, 0], "a": rewards + 0.9 * values[1:, 0] - values[:-1, 0]}
    rollout = rollout_of(arrays, reading_of(log_probs, arrays["a"]), paid=rewards.view(32, 1), last_estimates=log.take_last())

    assert torch.equal(rollout.last_values, values[-1:])


def test_flags_are_no_rewards_where_these_are_constant() -> None:
    log_probs, advantages = draws(2)
    arrays = {"mask": torch.ones(32), "r": torch.full((32,), 0.01), "z": log_probs, "a": advantages}

    rewards = finder_of(arrays, reading_of(log_probs, advantages)).rewards

    assert rewards is not None and torch.equal(rewards.flatten(), arrays["r"])


def test_returns_that_a_script_calls_rewards_are_none() -> None:
    log_probs, returns, values = draws(3)
    buffer = {"rewards": [1.0] * 32}
    arrays = {"rewards": returns, "v": values, "z": log_probs, "a": returns - values, "buffer": buffer}

    rewards = finder_of(arrays, reading_of(log_probs, returns - values)).rewards

    assert rewards is not None and rewards.flatten().tolist() == buffer["rewards"]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rewards_that_a_script_turns_into_returns_in_place_are_those_of_the_environment(scale: float) -> None:
    """Other arrays with the name are kept, such as rewards that a wrapper normalises by their own course."""
    paid, ended = torch.randn(32, 2), torch.rand(32, 2) < 0.1
    sums = scale * paid
    for step in reversed(range(31)):
        sums[step] += 0.9 * sums[step + 1] * ~ended[step]

    found = summands(sums, paid, ended)

    assert found is not None
    torch.testing.assert_close(found, scale * paid, rtol=1e-4, atol=1e-5)
    assert summands(paid / paid.abs().cummax(0).values, paid, ended) is None
    assert summands(scale * paid, paid, ended) is None


def test_tensors_in_dictionaries_and_objects_are_variables() -> None:
    batch, holder = {"log_probs": torch.ones(3), "size": 3}, SimpleNamespace(values=torch.zeros(3))

    found = list(Variables([{"batch": batch, "holder": holder, "steps": [torch.ones(1)]}]).tensors())

    assert [id(one) for one in found] == [id(batch["log_probs"]), id(holder.values)]


def test_the_value_after_the_last_step_is_not_implied_by_targets_that_are_the_advantages() -> None:
    log_probs, advantages, values = draws(3)
    arrays = {"rewards": torch.ones(32), "values": values, "z": log_probs, "a": advantages, "returns": advantages.clone()}
    rollout = rollout_of(arrays, reading_of(log_probs, advantages))

    assert float(rollout.last_values) == pytest.approx(float(advantages[-1] + values[-1] - 1) / 0.9)


def test_the_value_that_a_loop_from_the_last_step_leaves_behind_is_that_of_the_first_one() -> None:
    log_probs, advantages, values = draws(3)
    arrays = {"values": values, "z": log_probs, "a": advantages, "returns": advantages + values}
    last = [
        float(rollout_of(arrays | {"next_value": value}, reading_of(log_probs, advantages)).last_values)
        for value in (values[:1], float(values[1]), torch.tensor([3.0]), 3.0)
    ]

    implied = float(advantages[-1] + values[-1] - 1) / 0.9
    assert last == pytest.approx([implied, implied, 3, 3])


def test_neither_flags_nor_what_rewards_are_given_after_time_limits_are_values_of_last_states() -> None:
    log_probs, advantages, values = draws(3)
    limits = torch.arange(32).reshape(32, 1) % 10 == 9
    returns = advantages + values
    arrays = {"v": values, "a": advantages, "z": log_probs, "q": returns, "done": limits.float()}
    added = limits * (returns - 1).reshape(32, 1)
    for last, bootstraps in ((limits.float(), False), (added / 0.9, True), (added, False)):
        arrays["last"] = last
        rollout = rollout_of(arrays, reading_of(log_probs, advantages, values), limits, limits=limits)

        assert torch.equal(rollout.terminated, rollout.ended) is not bootstraps


def test_values_of_the_next_episode_are_no_values_of_last_states() -> None:
    """Values after each step are those of the next row; a script that resets first has the next episode's at a time limit, too."""
    log_probs, advantages, values, finals = draws(4)
    limits = torch.arange(32).reshape(32, 1) % 10 == 9
    following = torch.cat([values[1:], finals[:1]])
    last_states = torch.where(limits.squeeze(1), finals, following)
    arrays = {"v": values, "a": advantages, "z": log_probs, "q": advantages + values}

    for column, bootstraps in ((following, False), (last_states, True)):
        rollout = rollout_of(arrays | {"w": column}, reading_of(log_probs, advantages, values), limits, limits=limits)

        assert (rollout.time_limits is None) is bootstraps
        assert torch.equal(rollout.next_values[limits], finals[limits.squeeze(1)]) is bootstraps


def test_values_are_told_from_those_of_the_next_states_where_a_minibatch_has_both() -> None:
    """The script has computed the values of the next states first; rows of the minibatch are no first states of episodes."""
    log_probs, advantages, values, finals = draws(4)
    ends = torch.arange(32).reshape(32, 1) % 16 == 15
    following = torch.where(ends.squeeze(1), finals, torch.cat([values[1:], finals[:1]]))
    arrays = {"w": following, "v": values, "a": advantages, "z": log_probs, "q": advantages + values}
    rows = torch.arange(1, 16)

    rollout = rollout_of(arrays, reading_of(log_probs[rows], advantages[rows], values[rows]), ends)

    assert torch.equal(rollout.values.flatten(), values)


def test_returns_are_not_taken_for_advantages_where_values_hardly_vary() -> None:
    log_probs, raw = draws(2)
    values = torch.ones(32) + 1e-7 * torch.arange(32)
    used = (raw - raw.mean()) / raw.std()
    arrays = {"returns": raw + values, "v": values, "a": used, "z": log_probs}

    reading = reading_of(log_probs, used, values)
    assert reading.value is not None
    reading = reading._replace(value=reading.value._replace(returns=raw + values))
    rollout = rollout_of(arrays, reading, torch.arange(32).reshape(32, 1) == 31)

    assert torch.equal(rollout.advantages.flatten(), used)


def test_only_choices_and_gaussians_of_independent_dimensions_are_heads() -> None:
    scale = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    means = torch.zeros(3, 2, requires_grad=True)
    plain, squash = distributions.Normal(means, 1.0), distributions.TanhTransform()
    for distribution, shown in (
        (distributions.Independent(plain, 1), True),
        (distributions.MultivariateNormal(means, torch.eye(2)), True),
        (distributions.MultivariateNormal(means, scale_tril=scale), False),
        (distributions.TransformedDistribution(plain, squash), False),
        (distributions.Independent(distributions.Bernoulli(logits=means), 1), True),
        (distributions.Beta(means.exp(), 1.0), False),
    ):
        log = DistributionLog()
        log.add(distribution, log_probs := means.sum(1))
        heads = log.take_minibatch(3, [log_probs.grad_fn])
        assert bool(heads.means or heads.logits) is shown


def test_log_probabilities_without_dimensions_that_were_acted_on_with_a_graph_are_of_one_row() -> None:
    """The loss has 64 of them, of 64 steps of one environment."""
    log = DistributionLog()
    distribution = Categorical(logits=torch.zeros(2, requires_grad=True) + 0)
    log_probs = distribution.log_prob(torch.tensor(1))
    log.add(distribution, log_probs)

    assert not log.take_minibatch(64, [log_probs.grad_fn]).logits
    assert len(log.take_graphs().log_probs) == 1


def test_what_a_distribution_asks_its_parts_is_no_question_of_the_script() -> None:
    with tapped() as listener:
        means = torch.zeros(3, 2, requires_grad=True)
        policy = distributions.Independent(distributions.Normal(means, means.exp()), 1)
        log_probs = policy.log_prob(torch.zeros(3, 2))
        policy.entropy()

    graphs = listener.distributions.take_graphs()
    assert [tuple(one.shape) for one in (*graphs.log_probs, *graphs.entropies)] == [(3,), (3,)]
    assert listener.distributions.take_minibatch(3, [log_probs.grad_fn]).means.keys() == {"action"}


class Walkers:
    """Two environments without a Gymnasium class. The second one is truncated at its third step."""

    def __init__(self, flags: int) -> None:
        self.flags, self.time = flags, 0

    def reset(self) -> Tensor:
        self.time = 0
        return torch.zeros(2, 3)

    def step(self, actions: Tensor) -> Any:
        self.time += 1
        ended = torch.tensor([False, self.time == 3])
        flags = (ended,) if self.flags == 1 else (torch.zeros(2), ended)
        return (torch.ones(2, 3), torch.tensor([1.0, 2.0]), *flags, [{"TimeLimit.truncated": one} for one in ended.tolist()])


class Wrapped:
    """A Gymnasium environment within an object of another class."""

    def __init__(self) -> None:
        self.inner = gym.make("CartPole-v1")

    def reset(self) -> Any:
        return self.inner.reset(seed=0)[0]

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = self.inner.step(action)
        return observation, 100.0 * float(reward), terminated or truncated, info


class Member:
    """Not an environment: its `step` returns an action with its log-probability, value and entropy."""

    def reset(self) -> None:
        pass

    def step(self, observations: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones(4, 2))


@pytest.mark.parametrize("flags", [1, 2])
def test_environments_of_other_classes_are_found_when_the_script_acts(flags: int) -> None:
    with tapped() as listener:
        env, member, layer = Walkers(flags), Member(), nn.Linear(3, 1)
        observations = env.reset()
        for _ in range(4):
            with torch.no_grad():
                layer(observations)
            member.step(observations)
            observations = env.step(torch.zeros(2))[0]

    log = listener.environments
    steps = observed(log)
    assert log.steps == 8 and not log.hidden
    assert steps.ended.nonzero().tolist() == steps.time_limits.nonzero().tolist() == [[2, 1]]
    assert steps.rewards.tolist() == [[1.0, 2.0]] * 4
    assert [tuple(one) for one in log.take()[0]] == [(6.0, 3, 2)]
    assert not hasattr(Walkers.step, "tapped") and not hasattr(Member.step, "tapped")


def test_an_object_around_a_known_environment_is_not_recorded_as_well() -> None:
    with tapped() as listener:
        env, layer = Wrapped(), nn.Linear(4, 2)
        observation = env.reset()
        for _ in range(3):
            with torch.no_grad():
                layer(torch.as_tensor(observation))
            observation = env.step(1)[0]

    assert observed(listener.environments).rewards.tolist() == [[1.0]] * 3


def test_columns_that_a_script_shuffles_together_are_put_back_in_order() -> None:
    kept = dict(zip(("log_probs", "advantages", "values"), draws(3), strict=True))
    kept["returns"] = kept["advantages"] + kept["values"]
    order = torch.randperm(32)
    log_probs, advantages, returns = (kept[name][order] for name in ("log_probs", "advantages", "returns"))
    now, critic = node(log_probs[:16]), node(kept["values"][order[:16]])
    gain = ((now - log_probs[:16]).exp() * advantages[:16]).mean()
    reading = read((critic - returns[:16]).square().mean() - gain, now, critic)
    arrays = {"z": log_probs, "a": advantages, "q": returns, "v": kept["values"]}
    rollout = rollout_of(arrays, reading, acted=[Asked(one, None) for one in kept["log_probs"]])
    for name, column in kept.items():
        assert torch.equal(getattr(rollout, name).flatten(), column)

    log_probs[0] = log_probs[1] = kept["log_probs"][order[0]] = kept["log_probs"][order[1]]
    finder = finder_of(arrays, reading, acted=[Asked(kept["log_probs"], None)])

    assert finder.rollout(0.9) is None  # equal log-probabilities do not identify a row


def test_advantages_that_a_script_detaches_in_its_loss_have_their_sign() -> None:
    weights, values = torch.zeros(6, 3, requires_grad=True), torch.zeros(6, requires_grad=True)
    advantages = torch.arange(6.0) - 2 - values
    chosen = weights.log_softmax(-1)[:, 0]
    for sign in (1, -1):
        loss = sign * (chosen * advantages.detach()).mean() + advantages.square().mean()
        assert torch.equal(policy_of(loss, chosen, advantages).advantages, advantages.detach())

    products = -torch.arange(6.0) * chosen.sub(chosen.detach()).exp()
    assert policy_of(products.mean(), products).advantages.tolist() == [0, 1, 2, 3, 4, 5]


def test_actions_without_a_name_are_those_that_distributions_were_asked_for_in_acting() -> None:
    log_probs, advantages, actions = draws(3)
    log = DistributionLog()
    for step in range(32):  # queried after each step
        if step:
            log.after_env_step()
        log.add(object(), log_probs[step].reshape(1), actions[step].reshape(1))
    (acted, _), arrays = log.take_rollout(32, 1), {"z": log_probs, "a": advantages}
    reading = reading_of(log_probs, advantages)

    found = finder_of(arrays, reading, acted=acted).actions(None)

    assert found is not None and torch.equal(found.flatten(), actions)
    assert finder_of(arrays, reading).actions(None) is None


def test_log_probabilities_with_few_numbers_are_found_by_those_of_acting() -> None:
    log_probs, (advantages,) = torch.tensor([-0.25, -1.5]).repeat(16), draws(1)
    acted = [Asked(one.reshape(1), None) for one in log_probs]

    finder = finder_of({"z": log_probs, "a": advantages}, reading_of(log_probs, advantages), acted=acted)

    assert finder.log_probs is not None and torch.equal(finder.log_probs.flatten(), log_probs)


def test_values_are_those_of_the_critic_that_acts_where_another_one_learns() -> None:
    log_probs, advantages, values, others = draws(4)
    critic, log = nn.Linear(1, 1), EstimateLog()
    log.add(critic, values[-1].reshape(1, 1))
    log.after_env_step()
    log.add(critic, torch.ones(1, 1))
    now, new = node(log_probs), node(others)
    gain = ((now - log_probs).exp() * advantages).mean()
    reading = read((new - advantages - values).square().mean() - gain, now, new)
    arrays = {"z": log_probs, "a": advantages, "q": advantages + values, "v": values, "n": new.detach()}

    rollout = rollout_of(arrays, reading, last_estimates=log.take_last())

    assert torch.equal(rollout.values.flatten(), values)
    assert rollout.last_values.tolist() == [[1.0]]


@pytest.mark.parametrize(("bootstrap", "gae_lambda"), [(True, 0.9), (False, 0.9), (True, 1.0)])
def test_a_discount_without_a_name_is_read_from_the_advantages_whatever_the_last_value_is(bootstrap: bool, gae_lambda: float) -> None:
    rewards, values = (torch.randn(20, 3).double() for _ in range(2))
    last, advantages = torch.randn(3).double(), torch.zeros(20, 3).double()
    running, following = torch.zeros(3).double(), last * bootstrap
    for step in reversed(range(20)):
        running = rewards[step] + 0.97 * following - values[step] + 0.97 * gae_lambda * running
        advantages[step], following = running, values[step]
    never = torch.zeros(20, 3, dtype=torch.bool)
    following_values = torch.cat([values[1:], last[None]])
    rollout = ScriptRollout(rewards, values, advantages, advantages + values, rewards, never, never, following_values, last.reshape(1, 3))
    found = {"gamma": 0.97, "gae_lambda": gae_lambda}
    assert find_discounts(rollout, {}, ()) == found
    assert find_discounts(rollout, {"gamma": 0.97}, ()) == found
    normalized = rollout._replace(advantages=(advantages - advantages.mean()) / advantages.std())
    assert find_discounts(normalized, {}, ()) == found
    assert find_discounts(rollout._replace(advantages=rewards, returns=rewards), {}, ()) == {}
    assert find_discounts(rollout._replace(advantages=rewards), {}, ()) == (found if gae_lambda == 1 else {})  # returns that are sums
    assert find_discounts(None, {}, ((0.9,), (0.98, 0.9))) == {"gamma": 0.98, "gae_lambda": 0.9}
    assert find_discounts(None, {"gamma": 0.99}, ((0.98, 0.9),)) == {}


@pytest.mark.parametrize(
    ("code", "discounts"),
    [
        ("run = d + 0.97 * 0.95 * run * (1 - end)\ndelta = r + 0.97 * v2 - v", ((0.97, 0.95), (0.97,))),
        ("g, l = 0.9, 0.95\nfor t in s: a[t] = d + g * l * a[t]\nd = r + g * v2 - v", ((0.9, 0.95), (0.9,))),
        ("adv = discounted(deltas, 0.99 * 0.97)", ((0.99, 0.97),)),
        ("G = r + 0.98 * G\nloss = policy + 0.5 * value\nseen = 0.95 * seen + 0.05 * G", ((0.98,),)),
        ("loss = policy + 0.5 * value\nweight = 0.9\nclip = min(r, 0.8)", ()),
    ],
)
def test_discounts_are_numbers_of_recursions_and_not_weights_of_losses_or_averages(tmp_path: Path, code: str, discounts: Any) -> None:
    head = "from esper_telemetry.adapters.script.variables import read_source\ndef sums(r, v, v2, d, s, a, end, deltas):\n"
    lines = [*code.splitlines(), "return 0"]
    (tmp_path / "script.py").write_text(head + "".join(f"    {line}\n" for line in lines) + "found = read_source()")

    assert runpy.run_path(str(tmp_path / "script.py"))["found"].discounts == discounts


def test_numbers_in_the_source_have_the_names_of_arguments_also_in_calls_by_position(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from esper_telemetry.adapters.script.variables import read_source\n"
        "class Buffer:\n"
        "    def finish(self, gamma, lam=0.5):\n"
        "        return read_source().numbers\n"
        "def scale(factor): return 0.25 * factor\n"
        "scale(3)\n"
        "numbers = Buffer().finish(0.99, 0.9)\n"
    )

    numbers = runpy.run_path(str(tmp_path / "script.py"))["numbers"]

    assert [numbers[name] for name in ("gamma", "lam", "factor")] == [0.99, 0.9, 3]


@pytest.mark.parametrize("depth", [1, 8])
def test_a_number_that_limits_the_loop_over_acting_and_learning_counts_updates(tmp_path: Path, depth: int) -> None:
    """The network acts and learns in methods that are called through others."""
    calls = "".join(f"def at_{place}(end): return at_{place + 1}(end)\n" for place in range(depth))
    (tmp_path / "script.py").write_text(
        "from esper_telemetry.adapters.script.variables import calling_lines, read_source\n"
        f"{calls}"
        f"def at_{depth}(end): return end()\n"
        "def train(epochs, passes):\n"
        "    for _ in range(epochs):\n"
        "        acted = at_0(calling_lines)\n"
        "        for _ in range(passes):\n"
        "            found = at_0(lambda: read_source(acted))\n"
        "    return found\n"
        "counts = train(1, 2).counts_updates\n"
    )

    assert runpy.run_path(str(tmp_path / "script.py"))["counts"] == {"epochs"}


def test_any_index_is_left_to_the_script() -> None:
    with tapped() as listener:
        column, rows = torch.arange(6.0), torch.tensor([4, 1, 1])
        taken = [column[rows], column[torch.tensor(3)], column[[0, 2, 5]], column[column > 3], column[1:], column[..., None]]
        column.index_select(0, rows[:2])

    assert [one.numel() for one in taken] == [3, 1, 3, 2, 5, 6]
    assert [one.tolist() for one in listener.indices.recent(3)] == [[0, 2, 5], [4, 1, 1]]
    assert [one.tolist() for one in listener.indices.recent(2)] == [[4, 1]]
    assert not hasattr(torch.Tensor.__getitem__, "tapped")


def test_steps_in_a_tuple_are_stacked_like_those_in_a_list() -> None:
    steps = torch.arange(6.0).view(3, 2).unbind()

    assert torch.equal(stacked(steps), torch.stack(steps))  # type: ignore[arg-type]  # it is a tensor
    assert stacked((1.0, "text")) is None
