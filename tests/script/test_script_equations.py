"""Equations of scripts: transitions, first minibatches, and gradients from the script's own graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equation_values import equation_values, rollout_end
from mistakes.corpus import edited
from tapping import new_listener, observed
from test_script_runs import CATEGORICAL, python, run_of
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional

from esper_telemetry import read_run
from esper_telemetry.adapters.script.autograd_graph import graph_of, leaves_in
from esper_telemetry.adapters.script.loss_graph import read_loss
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.rollout_finder import RolloutFinder
from esper_telemetry.adapters.script.script_episodes import EpisodeLog
from esper_telemetry.adapters.script.script_minibatches import left_out, loss_terms
from esper_telemetry.adapters.script.script_optimizers import ScriptOptimizers
from esper_telemetry.adapters.script.script_rollouts import RecordedRollout
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.minibatch_objective import MinibatchObjective
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.events import UpdateEnd
from esper_telemetry.updates.update import JoinedMinibatches, Update

STALE = (
    ("            next_obs = torch.Tensor(next_obs)\n", "            next_obs, waiting = waiting, torch.Tensor(next_obs)\n"),
    ("next_done = torch.zeros(args.num_envs)\n", "next_done = torch.zeros(args.num_envs)\n    waiting = next_obs\n"),
)
MATCHING = ("stored_rewards", "executed_actions", "replayed_log_probs", "values", "clipping", "advantages", "log_probs")


@pytest.mark.system
def test_a_script_that_clears_no_gradient_and_acts_on_stale_observations(tmp_path: Path) -> None:
    """Both mistakes are named in every update, and unaffected equations match, because only an explained difference counts."""
    source = edited(CATEGORICAL, (*STALE, ("                optimizer.zero_grad()\n", "")))

    first = run_of(tmp_path, source, "--total_timesteps=768").records[0].values

    assert EQUATION_KEY + "gradient_not_cleared" in first
    assert EQUATION_KEY + "transitions_stale" in first
    assert {name: first[EQUATION_KEY + name] < 2e-4 for name in MATCHING} == dict.fromkeys(MATCHING, True)


TWO_NETWORKS = """
import gymnasium as gym, numpy as np, torch
from torch import nn
env, size = gym.make("CartPole-v1"), 64
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.l1 = nn.Linear(4, n)
    def forward(self, x):
        return self.l1(x)
actor, critic = Net(2), Net(1)
optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (actor, critic)]
o, _ = env.reset(seed=0)
for update in range(3):
    s, a, r = [], [], []
    for _ in range(size):
        action = torch.distributions.Categorical(logits=actor(torch.tensor(o))).sample().item()
        s.append(o); a.append(action)
        o, reward, end, cut, _ = env.step(action)
        r.append(reward)
        if end or cut:
            o, _ = env.reset()
    s, a, adv = torch.tensor(np.array(s)), torch.tensor(a), torch.randn(size)
    with torch.no_grad():
        old_log_prob = actor(s).log_softmax(-1)[torch.arange(size), a]
    for _ in range(4):
        ratio = (actor(s).log_softmax(-1)[torch.arange(size), a] - old_log_prob).exp()
        for loss, optimizer in ((-(ratio * adv).mean(), optimizers[0]), (critic(s).square().mean(), optimizers[1])):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


def test_a_script_with_two_networks_and_no_known_rollout(tmp_path: Path) -> None:
    """The parameters of its networks have the same names. The optimizers' steps are checked without a rollout."""
    run = run_of(tmp_path, TWO_NETWORKS)

    assert len(run.records) == 3
    assert run.records[0].values[EQUATION_KEY + "optimizer_step"] < 1e-3
    assert not any(alarm.type.startswith("integrity/") for alarm in run.alarms)


REPLACED_ROWS = """
import gymnasium as gym, numpy as np, torch
from torch import nn
env, size, rng, gamma, lam = gym.make("Pendulum-v1", max_episode_steps=400), 96, np.random.default_rng(1), 0.9, 0.95
vf_coef, ent_coef, clip_coef = 0.5, ENTROPY_COEF, 0.2
torch.manual_seed(0)
actor, critic, log_std = nn.Linear(3, 1), nn.Linear(3, 1), nn.Parameter(torch.zeros(1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters(), log_std], lr=1e-3)
o, _ = env.reset(seed=0)
for update in range(3):
    s, a, r, v = [], [], [], []
    for _ in range(size):
        x = torch.tensor(o, dtype=torch.float32)
        with torch.no_grad():
            s.append(x); a.append(torch.normal(actor(x), log_std.exp())); v.append(critic(x)[0])
        o, reward, end, cut, _ = env.step(a[-1].clamp(-2, 2).numpy())
        r.append(reward / 10)
        if cut:
            o, _ = env.reset()
    with torch.no_grad():
        last, s, a, v = critic(torch.tensor(o, dtype=torch.float32))[0], torch.stack(s), torch.stack(a), torch.stack(v)
        old = torch.distributions.Normal(actor(s), log_std.exp()).log_prob(a).sum(-1)
    advantages, total = torch.zeros(size), 0.0
    for t in reversed(range(size)):
        total = r[t] + gamma * (last if t == size - 1 else v[t + 1]) - v[t] + gamma * lam * total
        advantages[t] = total
    returns = advantages + v
    for _ in range(3 * size // 40):
        i = rng.integers(0, size, 40)
        log_prob = torch.distributions.Normal(actor(s[i]), log_std.exp()).log_prob(a[i]).sum(-1)
        ratio = (log_prob - old[i]).exp()
        policy = -torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i]).mean()
        value = 0.5 * (critic(s[i])[:, 0] - returns[i]).square().mean()
        loss = policy + vf_coef * value
        if ent_coef:
            loss = loss + ent_coef * log_prob.mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_rows_and_entropies_of_a_script_that_counts_no_passes(coefficient: float, tmp_path: Path) -> None:
    """Without log-probabilities in acting, actions are still known. A bonus of 0 leaves out only its own equation."""
    values = run_of(tmp_path, REPLACED_ROWS.replace("ENTROPY_COEF", str(coefficient))).records[0].values

    assert EQUATION_KEY + "minibatches_with_replacement" in values
    assert (EQUATION_KEY + "entropy_loss_sample" in values) == bool(coefficient)
    assert values[EQUATION_KEY + "advantages"] < 1e-4 and values[EQUATION_KEY + "total_loss"] < 1e-4


CLEARS = "            optimizer.zero_grad()\n"


@pytest.mark.parametrize("uncleared", [None, 0, 1])
def test_gradients_of_two_optimizers_are_checked_in_turns(uncleared: int | None, tmp_path: Path) -> None:
    """Both are known from the second update on, which checks the actor; the third checks the critic. An uncleared gradient is named."""
    clears = f"            optimizer is optimizers[{uncleared}] or optimizer.zero_grad()\n" if uncleared is not None else CLEARS
    (tmp_path / "script.py").write_text(edited(TWO_NETWORKS, (("range(3)", "range(5)"), (CLEARS, clears))))

    command = ["-m", "esper_telemetry", "run", "--level", "debug", "--run-dir", "run", "script.py"]
    result = python(tmp_path, *command, cores=1)

    assert result.code == 0, result.stderr
    first, *later = [record.values for record in read_run(tmp_path / "run").records]
    assert EQUATION_KEY + "gradient" not in first
    assert [values[EQUATION_KEY + "gradient"] > 1e-3 for values in later] == [turn == uncleared for turn in (0, 1, 0, 1)]
    assert [EQUATION_KEY + "gradient_not_cleared" in values for values in later] == [turn == uncleared for turn in (0, 1, 0, 1)]


class Minibatch:
    """Eight rows of a policy and a critic with one layer each, and the variables of a script with the clipped surrogate."""

    def __init__(self, *, square: float = 0.5, extra: float = 0.0) -> None:
        torch.manual_seed(1)
        self.agent = nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)})
        states, actions = torch.randn(8, 3), torch.arange(8) % 2
        logits = self.agent["actor"](states).log_softmax(-1)
        newlogprob = logits[torch.arange(8), actions]
        logratio = newlogprob - newlogprob.detach().roll(1)
        entropy = -(logits.exp() * logits).sum(-1)
        newvalue, mb_returns, mb_advantages = self.agent["critic"](states).view(-1), torch.randn(8), torch.randn(8)
        ratio = logratio.exp()
        pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(0.8, 1.2)).mean()
        v_loss = square * (newvalue - mb_returns).square().mean()
        self.loss = loss = pg_loss + 0.25 * v_loss - 0.01 * entropy.mean() + extra * newvalue.mean()
        names = {"logratio": logratio, "newvalue": newvalue, "entropy": entropy, "loss": loss, "agent": self.agent}
        columns = {"mb_advantages": mb_advantages, "mb_returns": mb_returns, "vf_coef": 0.25, "ent_coef": 0.01}
        self.variables = Variables([{**names, **columns}])
        self.parameters = list(self.agent.parameters())

    def terms(self, started: Tensor) -> tuple[list[str], dict[str, float], Tensor]:
        """Return the names of the terms, their weights, and the sum of their weighted gradients."""
        reading = read_loss(started, held=self.variables.tensors())
        terms = loss_terms(started, reading, self.variables, self.parameters)
        assert terms is not None and all(p.grad is None for p in self.parameters)
        gradients, weights = terms
        return [*gradients], dict(weights), torch.stack([weights[name] * g for name, g in gradients.items()]).sum(0)

    def backward(self) -> Tensor:
        self.loss.backward()
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters])


@pytest.mark.parametrize(("square", "weight"), [(0.5, 0.25), (1.0, 0.5)])
def test_terms_of_a_loss_add_up_to_its_gradient_whatever_factor_the_value_loss_has(square: float, weight: float) -> None:
    minibatch = Minibatch(square=square)

    names, weights, total = minibatch.terms(minibatch.loss / 4)

    assert names == ["policy", "value", "entropy"]
    assert [4 * one for one in weights.values()] == pytest.approx([1.0, weight, 0.01])
    assert torch.allclose(4 * total, minibatch.backward().double(), atol=1e-7)


def test_the_gradient_of_a_loss_that_is_climbed_is_that_of_its_terms_with_the_other_sign() -> None:
    minibatch = Minibatch()
    reading = read_loss(-minibatch.loss, held=minibatch.variables.tensors(), climbed=True)

    terms = loss_terms(-minibatch.loss, reading, minibatch.variables, minibatch.parameters)

    assert terms is not None and [*terms.gradients] == ["policy", "value", "entropy"]
    total = torch.stack([weight * terms.gradients[name] for name, weight in terms.coefficients.items()]).sum(0)
    assert torch.allclose(-total, minibatch.backward().double(), atol=1e-7)


def test_a_maximising_optimizer_is_found_before_the_first_update() -> None:
    minibatch = Minibatch()
    optimizers = [torch.optim.SGD(minibatch.parameters, lr=0.1, maximize=climbs) for climbs in (False, True)]
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, maximize=True)
    leaves = leaves_in(graph_of(minibatch.loss))

    answers = [ScriptOptimizers().climb(leaves, [one]) for one in (*optimizers, other)]

    assert answers == [False, True, False]


class StepwiseA2C:
    """A2C that keeps the graphs of its steps. Its advantages may be attached in the policy loss, and the critic stopped."""

    def __init__(self, *, gaussian: bool, attached: bool = False, stopped: bool = False) -> None:
        torch.manual_seed(2)
        self.agent = nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)})
        log_std = nn.Parameter(torch.zeros(2))
        self.parameters = [*self.agent.parameters(), log_std]
        log_probs, entropies, self.outputs, values = [], [], [], []
        for _ in range(5):
            states = torch.randn(4, 3)
            output, estimate = self.agent["actor"](states), self.agent["critic"](states)
            gaussians = Independent(Normal(output, log_std.exp()), 1)
            distribution: Any = gaussians if gaussian else Categorical(logits=output)
            log_probs.append(distribution.log_prob(distribution.sample()))
            entropies.append(distribution.entropy())
            self.outputs.append(estimate)
            values.append(estimate.squeeze(-1))
        self.values, self.returns, self.log_probs = torch.stack(values), torch.randn(5, 4), torch.stack(log_probs)
        advantages = self.returns - self.values
        detached = advantages.detach()
        policy = -(self.log_probs * (advantages if attached else detached)).mean()
        value = (detached if stopped else advantages).pow(2).mean()
        self.entropies = torch.stack(entropies)
        self.loss = policy + 0.5 * value - 0.01 * self.entropies.mean()

    def read(self) -> LossReading:
        """Read the terms of the loss; only the last estimates are known."""
        held = [self.values, self.returns, self.log_probs]
        reading = read_loss(self.loss, held=held, values=self.outputs[-2:])
        assert reading is not None and reading.complete and reading.entropy is not None
        return reading

    def terms(self) -> dict[str, Tensor]:
        """Return gradients of the terms and of alternatives."""
        variables = Variables([{"agent": self.agent, "values": self.values}])
        terms = loss_terms(self.loss, self.read(), variables, self.parameters)
        assert terms is not None and terms.coefficients == pytest.approx({"policy": 1, "value": 1, "entropy": 0.01})
        return dict(terms.gradients)

    def backward(self) -> Tensor:
        gradients = torch.autograd.grad(self.loss, self.parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients]).double()


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_the_terms_of_a2c_are_known_where_it_keeps_the_graphs_of_its_steps(gaussian: bool, attached: bool) -> None:
    """Advantages that are not detached are seen in the gradient."""
    a2c = StepwiseA2C(gaussian=gaussian, attached=attached)

    terms, entropy = a2c.terms(), a2c.read().entropy

    assert entropy is not None and {*terms} == {"policy", "value", "entropy"} | ({"advantages_attached"} if attached else set())
    torch.testing.assert_close(entropy.entropies, a2c.entropies.detach())
    total = terms["advantages_attached" if attached else "policy"] + terms["value"] + 0.01 * terms["entropy"]
    torch.testing.assert_close(total, a2c.backward(), atol=1e-7, rtol=1e-5)
    assert not attached or not torch.allclose(terms["advantages_attached"], terms["policy"], atol=1e-3)


@pytest.mark.parametrize(
    "error",
    [
        lambda estimates, targets: functional.mse_loss(targets, estimates),
        lambda estimates, targets: functional.mse_loss(estimates, targets),
        lambda estimates, targets: (targets - estimates).square().mean(),
        lambda estimates, targets: (estimates - targets).pow(2).mean(),
    ],
)
def test_targets_that_are_not_detached_are_seen_in_the_gradient(error: Callable[[Tensor, Tensor], Tensor]) -> None:
    """One-step targets r + gamma V(s'), of the same estimates."""
    critic, rewards = nn.Linear(3, 1), torch.randn(8)
    estimates = critic(torch.randn(9, 3)).squeeze(-1)
    targets = rewards + 0.9 * estimates[1:]
    loss = error(estimates[:-1], targets)

    reading = read_loss(loss, held=[estimates, targets], values=[estimates])
    assert reading is not None and reading.value is not None and reading.value.values is not None and reading.value.returns is not None
    terms = loss_terms(loss, reading, Variables([{"critic": critic}]), [*critic.parameters()])

    torch.testing.assert_close(reading.value.values, estimates[:-1].detach())
    torch.testing.assert_close(reading.value.returns, targets.detach())
    gradients = torch.autograd.grad(loss, [*critic.parameters()])
    assert terms is not None and {*terms.gradients} == {"value", "targets_attached"}
    total = terms.coefficients["value"] * terms.gradients["targets_attached"]
    torch.testing.assert_close(total, torch.cat([one.flatten() for one in gradients]).double(), atol=1e-7, rtol=1e-5)


def test_estimates_that_no_loss_depends_on_are_known_step_by_step() -> None:
    a2c = StepwiseA2C(gaussian=False, stopped=True)

    reading = a2c.read()

    assert reading.value is None and reading.left_out is not None and reading.left_out.values is not None
    torch.testing.assert_close(reading.left_out.values, a2c.values.detach().reshape(-1))


def test_a_loss_with_other_terms_is_taken_as_a_whole() -> None:
    minibatch = Minibatch(extra=0.3)

    names, _, total = minibatch.terms(minibatch.loss)

    assert names == ["policy"]
    assert torch.allclose(total, minibatch.backward().double(), atol=1e-7)


def test_parameters_that_an_optimizer_lacks_are_those_of_the_loss_and_those_with_a_gradient() -> None:
    minibatch = Minibatch()
    actor, critic = (list(minibatch.agent[name].parameters()) for name in ("actor", "critic"))
    loss = minibatch.agent["actor"](torch.ones(1, 3)).sum()
    bare = nn.Parameter(torch.ones(1))
    assert not left_out(loss, minibatch.variables, actor) and not left_out(minibatch.loss, minibatch.variables, actor, critic)
    assert len(left_out(minibatch.loss, minibatch.variables, actor)) == len(critic)
    assert [*left_out(loss * bare, Variables([{"log_std": bare}]), actor)] == ["log_std"]
    minibatch.backward()
    assert [*left_out(loss, minibatch.variables, actor)] == ["critic.weight", "critic.bias"]


def test_the_rollout_of_one_environment_is_found_as_a_list_and_as_a_column() -> None:
    """Three steps, the second of which ends its episode in the environment. The script does not keep flags."""
    ends = torch.tensor([[False], [True], [False]])
    columns: dict[str, Any] = {
        "rewards": [1.0, 2.0, 3.0],
        "values": torch.tensor([[4.0], [5], [6]]),
        "next_value": torch.tensor([7.0]),
        "adv": torch.zeros(3),
        "advantages": np.array([0.5, 0.25, 0.125]),
        "logprobs": [torch.tensor(-1.0), torch.tensor(-2.0), torch.tensor(-3.0)],
        "actions": np.array([[1], [0], [1]]),
        "obs": np.arange(6.0).reshape(3, 2),
    }
    paid = torch.tensor([[1.0], [2], [3]])
    flags = {"ended": ends, "reset": ends, "time_limits": torch.zeros_like(ends)}
    steps: Any = SimpleNamespace(steps=3, envs=1, rewards=paid, in_turns=True, cut=False, received=None, **flags)
    finder = RolloutFinder(Variables([columns]), RecordedRollout(steps))
    rollout = finder.rollout()

    assert rollout is not None and rollout.rewards.flatten().tolist() == [1, 2, 3]
    assert rollout.log_probs.shape == (3, 1)
    assert rollout.ended.flatten().tolist() == [False, True, False]
    assert rollout.next_values.flatten().tolist() == [5, 0, 7]
    actions, observations = finder.actions(None), finder.observations(None)
    assert actions is not None and actions.shape == (3, 1, 1)
    assert observations is not None and observations.shape == (3, 1, 2)
    assert RolloutFinder(Variables([columns]), RecordedRollout()).rollout() is None


def test_the_rollout_of_environments_that_are_not_known_is_found_by_names() -> None:
    """Two steps of two environments. `dones` marks steps that begin an episode, and `next_done` the state after the last step."""
    columns = {
        **{name: torch.randn(2, 2) for name in ("rewards", "values", "advantages", "logprobs")},
        "dones": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        "next_done": torch.tensor([1.0, 0.0]),
        "next_value": torch.tensor([[3.0, 4.0]]),
    }

    rollout = RolloutFinder(Variables([columns]), RecordedRollout()).rollout()

    assert rollout is not None and rollout.ended.tolist() == [[False, True], [True, False]]
    assert rollout.last_values.tolist() == [[3.0, 4.0]]


class Space:
    low, high = np.array([-1.0]), np.array([1.0])


class Walkers:
    """Two environments that step together."""

    num_envs = 2
    single_action_space = Space()


def test_steps_are_compared_with_what_was_stored_and_bounds_hold_where_actions_reach_them() -> None:
    """Two steps of two environments. The second one ends its episode in the first step, and returns its last observation."""
    log, env = EpisodeLog(), Walkers()
    returned, sent = np.array([[[1.0, 2], [3, 4.5]], [[5, 6], [7, 8.5]]]), torch.tensor([[[0.5], [3]], [[-2], [0]]])
    assert log.includes(env)
    for step in range(2):
        ends = np.array([False, step == 0])
        infos = {"final_obs": np.array([None, np.array([9.0, 9])], dtype=object)} if step == 0 else {}
        result = (returned[step], np.ones(2), ends, np.zeros(2, bool), infos)
        log.after_step(env, result, sent[step].clamp(-1, 1).numpy())

    stored = torch.cat([torch.zeros(1, 2, 2), torch.tensor(returned[:1])]).float()
    collected = observed(log)
    steps = collected.transitions(stored, sent)
    assert steps is not None and steps.sent is not None and steps.received is not None
    assert torch.equal(steps.inputs[1], steps.outcomes[0])
    assert steps.finals.isnan().tolist() == [[True, False], [True, True]]
    assert (steps.sent == steps.received).tolist() == [[True, False], [False, True]]
    bounds = collected.bounds(sent)
    assert bounds is not None and bounds.tolist() == [[-1], [1]]
    assert collected.bounds(sent / 2) is None
    assert collected.transitions(stored[..., :1], sent) is None
    log.take()
    assert log.collected() is None


def first_minibatch(
    *, log_ratio: float | Tensor, new: Tensor, values: Tensor, ended: Tensor | None = None, policy: str = "mlp"
) -> set[str]:
    """Return the differing equations of `values` and `replayed_log_probs`, and their explanations, in one minibatch of all rows."""
    zeros, rows = torch.zeros(values.shape), torch.arange(values.numel())
    ends = {} if ended is None else {"ended": ended, "terminated": ended}
    rollout = rollout_end(values.shape, values=values, returns=values, **ends)
    columns: dict[str, Any] = {"rows": rows, "values": new.flatten(), "old_values": values.flatten(), "returns": values.flatten()}
    minibatches = JoinedMinibatches(
        (0,), (len(rows),), (torch.as_tensor(log_ratio) + zeros).flatten(), zeros.flatten(), None, {}, **columns
    )
    update = Update(rollout=rollout, minibatches=minibatches, sampled=True)
    return {
        name
        for name, value in equation_values(update, Facts(columns_by_name=True, policy=policy)).items()
        if name.startswith(("values", "replayed_log_probs")) and (value > 1e-4 or any(word in name for word in ("observation", "memory")))
    }


def test_values_of_a_first_minibatch_alone_may_be_in_other_units_but_not_beside_log_probabilities() -> None:
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))
    after = torch.cat([values[:1] * 0, values[:-1]])

    assert first_minibatch(log_ratio=0.0, new=values, values=values) == set()
    assert first_minibatch(log_ratio=0.0, new=3 * values + 1, values=values) == set()
    assert first_minibatch(log_ratio=1e-3, new=values, values=values) == set()
    assert first_minibatch(log_ratio=0.5, new=3 * values + 1, values=values) == {"values", "replayed_log_probs"}
    assert first_minibatch(log_ratio=0.0, new=after, values=values) == {"values", "values_observation_after"}


def test_the_rows_that_differ_say_how_a_memory_is_reset_in_training() -> None:
    """Twelve steps of two environments, in each of which an episode ends with the fifth."""
    values = torch.randn(12, 2, generator=torch.Generator().manual_seed(2))
    ended = torch.zeros(12, 2, dtype=torch.bool)
    ended[4] = True
    first = (torch.arange(12) < 5).unsqueeze(1).expand(12, 2)

    def names(differs: Tensor, policy: str) -> set[str]:
        found = first_minibatch(log_ratio=0.1 * differs, new=values, values=values, ended=ended, policy=policy)
        return found - {"replayed_log_probs"}

    assert names(first, "lstm") == {"replayed_log_probs_memory_zero", "replayed_log_probs_other_memory"}
    assert names(~first, "lstm") == {"replayed_log_probs_memory_not_reset"}
    assert names(torch.arange(12).view(12, 1).expand(12, 2) >= 4, "lstm") == {"replayed_log_probs_memory_reset_early"}
    assert names(torch.ones_like(first), "lstm") == names(first, "mlp") == set()


def test_returns_of_normalised_advantages_are_named_where_a_script_does_not_say_its_discount() -> None:
    draw = torch.Generator().manual_seed(4)
    values, raw = torch.randn(32, 2, generator=draw), 3 * torch.randn(32, 2, generator=draw) + 1

    def names(advantages: Tensor) -> set[str]:
        columns = {"values": values, "advantages": advantages, "returns": advantages + values, "next_values": values.roll(-1, 0)}
        rollout = rollout_end((32, 2), **columns)
        results = equation_values(Update(rollout=rollout, sampled=True), Facts(columns_by_name=True))
        return {name for name in results if "returns_" in name}

    assert names((raw - raw.mean()) / raw.std()) == {"returns_normalized"}
    assert names(raw) == set()


def test_a_single_step_without_a_ratio_is_no_mistake_beside_a_setting_of_the_clip() -> None:
    """A2C's loss, in a script that also has PPO's settings. With two steps it would be a mistake."""
    draw = torch.Generator().manual_seed(3)
    logits, advantages = torch.randn(8, 1, 3, generator=draw), torch.randn(8, 1, generator=draw)
    actions, log_probs = torch.zeros(8, 1, dtype=torch.long), logits.log_softmax(-1)[..., 0]
    rollout = rollout_end((8, 1), advantages=advantages, returns=advantages, log_probs=log_probs, actions={"action": actions})

    def differs(counts: tuple[int, ...]) -> bool:
        losses = torch.stack([-part.mean() for part in (log_probs * advantages).flatten().split(counts)])
        minibatches = JoinedMinibatches(
            *((0,) * len(counts), counts, torch.zeros(8), advantages.flatten(), None, {"policy": losses}),
            logits={"action": logits.flatten(0, 1)},
            rows=torch.arange(8),
        )
        update = Update(rollout=rollout, minibatches=minibatches, sampled=True)
        return "policy_loss_log_prob" in equation_values(update, Facts(columns_by_name=True, clip=0.2))

    assert not differs((8,))
    assert differs((4, 4))


class OwnSteps:
    """A script that takes steps of optimizers with three weights each.

    Attributes:
        announced: objectives of steps that are to be checked.
    """

    def __init__(self) -> None:
        self.listener, self.announced = new_listener(), list[MinibatchObjective]()
        self.listener.hooks.on(MinibatchObjective, self.announced.append)

    def step(self, optimizer: torch.optim.Optimizer, **settings: float) -> None:
        (weights,) = optimizer.param_groups[0]["params"]
        loss = -((weights - weights.detach()).exp() * torch.arange(3.0)).mean()
        self.listener.before_backward(loss)
        loss.backward()
        self.listener.before_step(optimizer, partial(Variables, [{**settings, "loss": loss}]))
        self.listener.after_step(optimizer)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.5)


@pytest.mark.system
def test_an_optimizer_with_another_rate_than_the_settings_say_is_noticed() -> None:
    """Not in its first update, when the rate may still change, and not if another setting gives its rate."""
    own = optimizer()

    def rates(**settings: float) -> list[float | None]:
        script = OwnSteps()
        for _ in range(2):
            script.step(own, lr=0.1, **settings)
            script.listener.end_update()
        return [one.learning_rate for one in script.announced]

    assert rates() == [None, 0.1]
    assert rates(critic_lr=0.5) == [None, None]


def test_the_learning_rate_of_an_update_is_the_policys_if_the_critic_steps_first() -> None:
    policy, critic, script = optimizer(), torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.9), OwnSteps()
    rates: list[float] = []
    script.listener.hooks.on(UpdateEnd, lambda event: rates.append(event.learning_rate))

    def fit() -> None:
        (weights,) = critic.param_groups[0]["params"]
        loss = (weights - torch.arange(3.0)).square().mean()
        script.listener.before_backward(loss)
        loss.backward()
        script.listener.before_step(critic, partial(Variables, [{"v_loss": loss, "v_opt": critic}]))
        script.listener.after_step(critic)

    for _ in range(3):
        fit()
        script.step(policy)
        script.listener.end_update()

    assert rates == [0.5, 0.5, 0.5]


@pytest.mark.system
@pytest.mark.parametrize(("in_turns", "due"), [(True, [1, 2, 1]), (False, [1, 6, 1])])
def test_of_two_optimizers_each_is_checked_whether_they_take_turns_or_not(in_turns: bool, due: list[int]) -> None:
    optimizers, script = [optimizer(), optimizer()], OwnSteps()
    for _ in range(4):
        for place in [0, 1] * 4 if in_turns else [0] * 4 + [1] * 4:
            script.step(optimizers[place])
        script.listener.end_update()

    last = [one.steps for one in script.announced if one.step == 7]
    assert [steps - 2 for steps in last if steps is not None][1:] == [due[1], due[2], due[1]]
