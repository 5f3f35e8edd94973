"""Replay of a rollout: the policy's outputs before and after an update, and no effect on training."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ppo_builders import EventLog, equal, weights
from short_trainings import learned
from torch import Tensor

from esper_telemetry.core.event_parts import Activations, Copy, Outputs, PolicyReplay, StateGradients
from esper_telemetry.events import AfterUpdate, BeforeUpdate, MinibatchEnd, RolloutEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.networks import MLP, Core, RecurrentTrunk
from esper_telemetry.ppo.trainer_replay import TrainerReplay, unroll

POLICIES = [("CartPole-v1", "mlp"), ("CartPole-v1", "lstm"), ("cue-recall", "gru"), ("cue-recall", "lstm")]


def trainer(env: str, policy: str, **settings: Any) -> PPO:
    """Two epochs of two minibatches of two environments; episodes end within rollouts."""
    small: dict[str, Any] = {"num_steps": 24, "num_epochs": 2, "num_minibatches": 2, "learning_rate": 0.02}
    config = PPOConfig(policy=policy, hidden_sizes=(8, 6), encoder_sizes=(8,), lstm_size=5, **small | settings)
    return PPO(make_env(env, num_envs=4, seed=0), config)


def ask(source: PPO, event: type, question: Callable[[PolicyReplay], Any]) -> list[Any]:
    """Return the policy's answers in each of three updates."""
    answers: list[Any] = []
    source.hooks.on(event, lambda e: answers.append(question(e.policy)))
    source.learn(3 * 24 * 4)
    return answers


def both(policy: PolicyReplay) -> tuple[Outputs, Outputs]:
    return policy.stored(), policy.outputs()


@pytest.mark.parametrize(("env", "policy"), POLICIES)
def test_before_an_update_training_says_what_was_acted_on_and_after_it_something_else(env: str, policy: str) -> None:
    source, before = trainer(env, policy), list[tuple[Outputs, Outputs]]()
    source.hooks.on(BeforeUpdate, lambda event: before.append(both(event.policy)))
    after = ask(source, AfterUpdate, both)

    for stored, now in before:
        for head, logits in now.logits.items():
            assert torch.softmax(stored.logits[head], -1) == pytest.approx(torch.softmax(logits, -1), abs=1e-5)
        assert (stored.memory is None) == (policy == "mlp")
        if stored.memory is not None:
            assert stored.memory == pytest.approx(now.memory, abs=1e-5)
    for stored, now in after:
        assert all(len(logits) == len(now.features) for logits in now.logits.values())
        assert any((now.logits[head] - logits).abs().max() > 1e-4 for head, logits in stored.logits.items())


def test_rows_that_are_no_transitions_are_not_shown() -> None:
    """CartPole's environments lose a row whenever an episode ends."""
    source = trainer("CartPole-v1", "lstm", num_steps=64)
    transitions: list[int] = []
    source.hooks.on(RolloutEnd, lambda e: transitions.append(256 if e.valid is None else int(e.valid.sum())))

    answers = ask(source, BeforeUpdate, lambda policy: len(policy.outputs().logits["action"]))

    assert min(transitions) < 256
    assert answers == transitions


@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_rows_of_minibatches_are_those_of_the_rollout(policy: str) -> None:
    emitted = learned(trainer("CartPole-v1", policy), 1, RolloutEnd, MinibatchEnd)
    rollout, minibatches = emitted.events[0], emitted.of(MinibatchEnd)

    for minibatch in minibatches:
        assert torch.equal(rollout.values.flatten()[minibatch.rows], minibatch.old_values)
        assert torch.equal(rollout.returns.flatten()[minibatch.rows], minibatch.returns)
    first_epoch = torch.cat([minibatch.rows for minibatch in minibatches if minibatch.epoch == 0])
    assert sorted(first_epoch.tolist()) == rollout.valid.flatten().nonzero().flatten().tolist()


def everything(policy: PolicyReplay) -> tuple[Outputs, Outputs | None, Activations, StateGradients | None, Copy]:
    copy = policy.copy()
    copy.network(copy.observations).sum().backward()
    return policy.outputs(), policy.without_memory(), policy.activations(), policy.state_gradients(), copy


@pytest.mark.parametrize(("env", "policy"), POLICIES)
def test_asking_for_everything_leaves_no_trace(env: str, policy: str) -> None:
    before = torch.get_rng_state()
    watched, alone = trainer(env, policy), trainer(env, policy)

    ask(watched, BeforeUpdate, everything)
    ask(alone, AfterUpdate, lambda policy: None)

    assert equal(weights(watched), weights(alone))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in watched.policy.parameters())


@pytest.mark.parametrize(("policy", "shared"), [("lstm", True), ("lstm", False), ("gru", True)])
def test_gradients_at_the_first_state_are_those_of_the_fused_pass(policy: str, shared: bool) -> None:
    """The loss of the two environments of a minibatch that begin with memory, computed on the training grid."""
    source = trainer("cue-recall", policy, shared_trunk=shared, entropy_coef=0.1)

    def question(replay: PolicyReplay) -> tuple[Tensor, Tensor] | None:
        assert isinstance(replay, TrainerReplay)
        gradients, batch = replay.state_gradients(), replay._batch
        assert batch.sequences is not None
        if gradients is None:
            return None
        stored = batch.sequences.states["actor"].clone().requires_grad_()
        fresh = replay._rollout.recurrence.fresh[0]  # type: ignore[union-attr]  # this policy has a memory
        envs = [env for env in range(4) if not fresh[env]][:2]
        parts = [batch.sequences.environments()[env] for env in envs]
        part = batch.whole(parts)
        assert part.sequences is not None
        part.sequences.states["actor"] = stored  # type: ignore[index]  # a dict, in which the leaf takes the place of a copy
        outputs = source.policy.trunks(part.observations, part.grid())
        (gradient,) = torch.autograd.grad(source._loss_of_actor()(part, outputs[0]), [stored])
        part.sequences.states["actor"] = stored.detach()  # type: ignore[index]
        return gradients.first, gradient[:, 0, envs]

    answers = [answer for answer in ask(source, BeforeUpdate, question) if answer is not None]

    assert answers
    for first, expected in answers:
        assert first.abs().max() > 1e-6
        assert first == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_layers_respond_in_order_and_the_last_before_its_nonlinearity() -> None:
    (activations, *_) = ask(trainer("CartPole-v1", "lstm"), BeforeUpdate, lambda policy: policy.activations())

    sizes = {name: layer.shape[1] for name, layer in activations.layers.items()}
    assert sizes == {"encoder_0": 8, "core": 5, "decoder_0": 8, "decoder_1": 6}
    assert activations.last.tanh() == pytest.approx(activations.layers["decoder_1"], abs=1e-6)


def test_a_policy_without_memory_has_nothing_to_forget() -> None:
    answers = ask(trainer("CartPole-v1", "mlp"), BeforeUpdate, lambda policy: (policy.without_memory(), policy.state_gradients()))

    assert set(answers) == {(None, None)}


def test_the_first_step_of_an_episode_does_the_same_without_memory() -> None:
    """In the first row of an episode the memory is empty."""
    source = trainer("cue-recall", "lstm")
    rollouts = EventLog().listen(source, RolloutEnd)

    answers = ask(source, BeforeUpdate, lambda policy: (policy.stored_part(), policy.without_memory()))

    for event, (stored, without) in zip(rollouts.events, answers, strict=True):
        begins = (event.states == 0).flatten(1, 3).all(-1) if event.states.dim() == 4 else (event.states == 0).all(-1)
        fresh = begins.flatten(1, 2).all(1).t().flatten()
        same = torch.isclose(stored.logits["op"], without.logits["op"], atol=1e-5).all(-1)
        assert fresh.any() and same[fresh].all()


STEPS, ENVS, SIZE = 6, 3, 5


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("begins", [[], [(2, 0)], [(0, 1), (3, 2), (3, 0), (5, 1)]])
def test_features_and_gradients_are_those_of_single_steps(kind: str, begins: list[tuple[int, int]]) -> None:
    torch.manual_seed(1)
    trunk = RecurrentTrunk(MLP(4, [4], "tanh"), Core(kind, 4, SIZE, 2), MLP(SIZE, [7], "tanh"))
    observations = torch.randn(STEPS, ENVS, 4)
    fresh = np.zeros((STEPS, ENVS), bool)
    for when, env in begins:
        fresh[when, env] = True
    first = torch.randn(trunk.core.state_shape(ENVS)).requires_grad_()
    weights = torch.randn(STEPS * ENVS, 7)

    features, outputs = unroll(trunk, observations, first, fresh)
    state, rows = first, []
    for x, new in zip(observations, torch.from_numpy(fresh), strict=True):
        row, state = trunk.step(x, state.masked_fill(new[:, None], 0.0))
        rows.append(row)
    last = outputs[-1].detach().requires_grad_()
    expected = torch.cat(rows)

    torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)
    at_first, at_outputs = torch.autograd.grad((weights * features).sum(), [first, outputs])
    (step_by_step,) = torch.autograd.grad((weights * expected).sum(), first)
    (own,) = torch.autograd.grad((weights[-ENVS:] * trunk.decoder(last)).sum(), last)
    torch.testing.assert_close(at_first, step_by_step, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(at_outputs[-1], own, atol=1e-6, rtol=1e-5)
