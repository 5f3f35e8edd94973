"""Memory is the same in acting, valuing and training, and is cleared at every end of an episode."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_builders import EventLog, cartpole, pendulum, random_rollout
from short_trainings import learned
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, RolloutEnd
from esper_telemetry.ppo import PPO
from esper_telemetry.ppo.networks import MLP, Core, RecurrentTrunk
from esper_telemetry.ppo.rollout import RolloutRecurrence, flatten, pack

KINDS = ("lstm", "gru")


def trunk(kind: str, layers: int, size: int = 8) -> RecurrentTrunk:
    torch.manual_seed(0)
    network = RecurrentTrunk(MLP(3, (5,), "tanh"), Core(kind, 5, size, layers), MLP(size, (4,), "tanh"))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=size**-0.5)
    return network


def step_by_step(core: RecurrentTrunk, observations: Tensor, fresh: Tensor, state: Tensor) -> Tensor:
    """Return features [T, B, H], computed one step and one environment at a time."""
    columns = []
    for env in range(observations.shape[1]):
        memory, outputs = state[:, :, env : env + 1], []
        for t in range(len(observations)):
            memory = torch.zeros_like(memory) if fresh[t, env] else memory
            features, memory = core.step(observations[t, env : env + 1], memory)
            outputs.append(features)
        columns.append(torch.cat(outputs))
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("kind", "shared"), [("lstm", True), ("lstm", False), ("gru", False)])
@pytest.mark.parametrize("layers", [1, 2])
@given(flags=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=7))
@settings(max_examples=15, deadline=None)
def test_sequences_in_columns_equal_a_loop_over_steps(kind: str, shared: bool, layers: int, flags: list[list[bool]]) -> None:
    """Resets at any step, stored initial states, three environments; a column holds one sequence or several."""
    fresh = torch.tensor(flags)
    core = trunk(kind, layers)
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(len(flags), 3, 3, generator=generator)
    state = torch.randn(*core.core.state_shape(3), generator=generator)
    state[:, :, fresh[0]] = 0
    grid = RolloutRecurrence({"actor": state}, fresh.numpy(), state, None).sequences().grid(shared=shared)

    rows = core(observations.transpose(0, 1).flatten(0, 1), grid, grid.states["actor"])

    expected = step_by_step(core, observations, fresh, state)
    assert torch.allclose(rows.view(3, len(flags), -1).transpose(0, 1), expected, atol=1e-6)


@given(seed=st.integers(0, 1000), shared=st.booleans(), noise=st.sampled_from([1.0, 1e3, 1e6]))
@settings(max_examples=20, deadline=None)
def test_what_an_earlier_episode_held_has_no_influence(seed: int, shared: bool, noise: float) -> None:
    """An environment's episode begins at t = 2. Earlier steps and the stored state do not change any later bit."""
    core = trunk("lstm", 1)
    generator = torch.Generator()
    fresh = np.zeros((5, 2), bool)
    fresh[2, 0] = True
    results = []
    for scale in (0.0, noise):
        observations = torch.randn(5, 2, 3, generator=generator.manual_seed(seed))
        state = torch.zeros(core.core.state_shape(2))
        observations[:2, 0] *= scale
        state[:, :, 0] = scale
        inputs = observations.transpose(0, 1).flatten(0, 1).requires_grad_()
        grid = RolloutRecurrence({"actor": state}, fresh, state, None).sequences().grid(shared=shared)
        rows = core(inputs, grid, grid.states["actor"]).view(2, 5, -1)
        rows[0, 2:].sum().backward()
        assert inputs.grad is not None
        results.append((rows.detach(), inputs.grad.view(2, 5, -1)))

    (clean, _), (noisy, gradient) = results
    assert torch.equal(clean[0, 2:], noisy[0, 2:]) and torch.equal(clean[1], noisy[1])
    assert not torch.equal(clean[0, :2], noisy[0, :2])
    assert (gradient[0, :2] == 0).all() and (gradient[1] == 0).all() and (gradient[0, 2:] != 0).any()


def test_gradients_are_those_of_columns_of_one_run() -> None:
    gradients = []
    for shared in (False, True):
        core = trunk("lstm", 2)
        fresh = np.random.default_rng(0).random((20, 3)) < 0.3
        state = torch.randn(*core.core.state_shape(3), generator=torch.Generator().manual_seed(0))
        state[:, :, fresh[0]] = 0
        grid = RolloutRecurrence({"actor": state}, fresh, state, None).sequences().grid(shared=shared)
        rows = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        core(rows, grid, grid.states["actor"]).square().sum().backward()
        gradients.append([parameter.grad for parameter in core.parameters()])

    for alone, together in zip(*gradients, strict=True):
        assert alone is not None and together is not None and torch.allclose(alone, together, rtol=1e-4, atol=1e-5)


def test_runs_share_columns_while_there_is_room() -> None:
    """Room for 6, separators of 1. The carried 3 and 1 are on top. Then 5 is alone, 4 follows the 1, and 2 follows the 3."""
    columns, offsets = pack(np.array([3, 2, 5, 1, 4]), np.array([True, False, False, True, False]), 6)

    assert columns.tolist() == [0, 0, 2, 1, 1]
    assert offsets.tolist() == [0, 4, 0, 0, 2]


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_rows_that_are_no_transitions_have_no_influence_even_nan(seed: int) -> None:
    """Features of a batch with invalid rows full of NaN equal a loop that clears the memory there."""
    core = trunk("lstm", 1)
    rollout = random_rollout(12, 3, seed=seed, invalid=True)
    assert rollout.valid is not None
    valid, ended = rollout.valid.numpy(), rollout.ended.numpy()
    fresh = np.concatenate([np.ones((1, 3), bool), ended[:-1] | ~valid[:-1]])
    observations = torch.randn(12, 3, 3, generator=torch.Generator().manual_seed(seed))
    expected = step_by_step(core, observations, torch.from_numpy(fresh), torch.zeros(core.core.state_shape(3)))
    observations = observations.masked_fill(~rollout.valid.unsqueeze(-1), torch.nan)
    states = {"actor": torch.zeros(core.core.state_shape(3))}
    memory = RolloutRecurrence(states, fresh, states["actor"], valid)
    batch = flatten(replace(rollout, observations=observations, recurrence=memory), rollout.rewards, rollout.rewards)
    grid = batch.grid()
    assert grid is not None

    features = core(batch.observations, grid, grid.states["actor"])

    rows = expected.transpose(0, 1).flatten(0, 1)[rollout.valid.t().flatten()]
    assert torch.allclose(features, rows, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_numpy_equals_one_in_torch(kind: str) -> None:
    core = trunk(kind, 2, 64).core
    inputs, state = torch.randn(30, 8, 5), torch.randn(core.state_shape(8))
    advance, moving = core.as_numpy(), state.numpy().copy()

    ours = np.stack([advance(row, moving).copy() for row in inputs.numpy()])

    with torch.no_grad():
        theirs, after = core(inputs, state)
    assert np.allclose(ours, theirs.numpy(), atol=1e-6)
    assert np.allclose(moving, after.numpy(), rtol=1e-6, atol=1e-6)


def recurrent(**changes: Any) -> PPO:
    return cartpole(**{"policy": "lstm", "lstm_size": 16, "num_minibatches": 2, "learning_rate": 0.01, **changes})


def largest_first_ratio(trainer: PPO) -> float:
    emitted = learned(trainer, 1500, MinibatchEnd)
    return float(max(event.log_ratio.abs().max() for event in emitted.events if event.step == 0))


def test_training_from_an_empty_state_breaks_the_identity() -> None:
    trainer = recurrent()
    trainer.steps = replace(trainer.steps, initial_state=lambda states: {name: torch.zeros_like(state) for name, state in states.items()})

    assert largest_first_ratio(trainer) > 1e-4


def test_memory_that_is_never_cleared_stays_consistent_and_crosses_episodes() -> None:
    """The identity cannot show this fault, because acting and training share it."""
    trainer = pendulum(policy="lstm", lstm_size=16, num_minibatches=2)
    trainer.steps = replace(trainer.steps, resets=np.zeros_like)
    emitted = EventLog().listen(trainer, RolloutEnd)

    assert largest_first_ratio(trainer) < 1e-5

    after_ends = [event.states.movedim(3, 1)[1:][event.ended[:-1]] for event in emitted.events]
    assert (torch.cat(after_ends) != 0).any(-1).all()


def test_memory_is_empty_at_every_beginning_and_carried_over_rollouts() -> None:
    trainer = recurrent()
    events: list[tuple[Tensor, Tensor]] = []

    def keep(event: RolloutEnd) -> None:
        assert event.states is not None
        cleared = event.ended if event.valid is None else event.ended | ~event.valid
        events.append((event.states.movedim(3, 1).clone(), cleared.clone()))

    trainer.hooks.on(RolloutEnd, keep)
    trainer.learn(1500)

    for (states, cleared), (following, _) in itertools.pairwise(events):
        assert (states[1:][cleared[:-1]] == 0).all()
        assert (following[0][cleared[-1]] == 0).all()
        assert (following[0][~cleared[-1]] != 0).any(-1).all()
    assert (events[0][0][0] == 0).all()


def test_estimating_the_last_state_does_not_move_the_memory() -> None:
    """A rollout begins in the state after the last step of the previous rollout."""
    trainer = pendulum(policy="lstm", shared_trunk=True, num_minibatches=2)
    first = trainer.collector.collect()
    assert first.recurrence is not None
    last, ended = first.recurrence.after[-1].clone(), first.ended[-1].clone()

    second = trainer.collector.collect()

    assert second.recurrence is not None
    assert torch.equal(second.recurrence.states["actor"], last.masked_fill(ended[:, None], 0.0))


def test_after_a_limit_the_next_value_is_that_of_the_last_observation_with_its_memory() -> None:
    """Pendulum is cut after 200 steps. The value of its last state uses the memory after that step."""
    trainer = pendulum(policy="lstm", num_steps=256, num_minibatches=1, lstm_size=16, shared_trunk=True)
    collector: Any = trainer.collector
    rollout = collector.collect()
    memory = rollout.recurrence
    assert memory is not None and collector._limited[0].time == 199
    actor = trainer.policy.actor
    assert isinstance(actor, RecurrentTrunk)

    with torch.no_grad():
        features, _ = actor.step(torch.from_numpy(collector._limited[0].observations), memory.after[199])
        expected = trainer.policy.values(features)

    assert torch.allclose(rollout.next_values[199], expected, atol=1e-5)
    assert torch.equal(rollout.next_values[100], rollout.values[101])


def test_minibatches_hold_whole_environments_once_per_pass() -> None:
    trainer = pendulum(policy="lstm", num_minibatches=2)
    rollout = random_rollout(32, 4)
    flags = rollout.ended.roll(1, 0).numpy()
    states = {"actor": torch.zeros(1, 2, 4, 8)}
    rollout = replace(rollout, recurrence=RolloutRecurrence(states, flags, states["actor"], None))
    batch = flatten(rollout, rollout.rewards, rollout.values)

    parts = list(trainer.steps.minibatches(batch, 3, torch.Generator().manual_seed(0)))

    assert [len(part) for part in parts] == [64, 32, 32]
    rows = torch.cat([part.values for part in parts])
    assert torch.equal(rows.sort().values, batch.values.sort().values)


def test_a_recurrent_policy_needs_an_environment_for_every_minibatch() -> None:
    with pytest.raises(ValueError, match="must not exceed the 4 environments, got 5"):
        cartpole(policy="lstm", num_minibatches=5)


def test_the_facts_name_the_parameters_of_the_memory() -> None:
    groups = recurrent(shared_trunk=True).facts(1000)["groups"]

    assert groups["lstm"] == [f"actor.core.cells.0.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    assert set(groups["lstm"]) < set(groups["shared"])
    assert "lstm" not in cartpole().facts(1000)["groups"]
