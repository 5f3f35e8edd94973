"""Masks, relevance and rows without a transition: forbidden choices are never made, and masked values affect nothing, not even NaN."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_builders import equal, weights
from short_trainings import learned
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, RolloutEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Step
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Rollout

SPECS = {
    "op": ActionSpec("categorical", 3),
    "arg": ActionSpec("categorical", 4, given="op", relevant_for=(1, 2)),
    "size": ActionSpec("continuous", 2, given="arg", relevant_for=(0, 1)),
}
"""`arg` is relevant unless op = 0; `size` is relevant if `arg` is and is 0 or 1."""


class Restricted:
    """Four environments with random observations. op is limited at random, and arg by the chosen op."""

    name, num_envs, observation_shape, action_specs = "Restricted", 4, (3,), SPECS

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.received_actions: list[dict[str, Any]] = []
        self.offered: list[dict[str, Any]] = []

    def reset(self, seed: int | None = None) -> Any:
        self._offer()
        return self.rng.normal(size=(4, 3)).astype(np.float32)

    def action_masks(self) -> Mapping[str, Any]:
        return self.masks

    def step(self, actions: Any) -> Any:
        self.received_actions.append({name: action.copy() for name, action in actions.items()})
        self.offered.append(self.masks)
        self._offer()
        ends = self.rng.random(4) < 0.1
        observations = self.rng.normal(size=(4, 3)).astype(np.float32)
        return Step(observations, self.rng.normal(size=4).astype(np.float32), ends, np.zeros(4, bool))

    def _offer(self) -> None:
        op = self.rng.random((4, 3)) < 0.4
        op[np.arange(4), self.rng.integers(3, size=4)] = True
        arg = self.rng.random((4, 3, 4)) < 0.4
        arg[..., 2] |= ~arg.any(-1)
        arg[:, 0] = False  # no choice is allowed if it is irrelevant
        self.masks = {"op": op, "arg": arg}

    def close(self) -> None:
        """Nothing to free."""


def restricted(**changes: Any) -> PPO:
    return PPO(Restricted(), PPOConfig(**{"num_steps": 16, "hidden_sizes": (8,), "num_minibatches": 2, **changes}))


def test_only_what_is_allowed_is_chosen_and_the_irrelevant_is_zero() -> None:
    trainer = restricted()
    env: Any = trainer.env

    trainer.learn(640)

    rows = np.arange(4)
    for masks, action in zip(env.offered, env.received_actions, strict=True):
        op, arg, size = (action[name] for name in SPECS)
        matters = op > 0
        assert masks["op"][rows, op].all()
        assert masks["arg"][rows, op, arg][matters].all()
        assert (arg[~matters] == 0).all()
        assert ((size == 0).all(-1) == ~(matters & (arg < 2))).all()
    assert {int(value) for action in env.received_actions for value in action["arg"]} == {0, 1, 2, 3}


@pytest.mark.system
@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_log_probabilities_add_up_over_the_relevant_heads(policy: str) -> None:
    emitted = learned(restricted(policy=policy), 640, RolloutEnd, MinibatchEnd)

    for event in emitted.of(RolloutEnd)[-1:]:  # tensors of earlier rollouts have been overwritten
        assert torch.allclose(event.log_probs, sum(event.head_log_probs.values()), atol=1e-6)
        assert list(event.head_log_probs) == ["op", "arg", "size"]
        assert {name: tuple(logits.shape) for name, logits in event.logits.items()} == {"op": (16, 4, 3), "arg": (16, 4, 4)}
        log_prob = event.logits["op"].log_softmax(-1).gather(-1, event.actions["op"].unsqueeze(-1)).squeeze(-1)
        assert torch.allclose(log_prob, event.head_log_probs["op"], atol=1e-6)
        assert event.means["size"].shape == (16, 4, 2)
        for name, relevance in event.relevance.items():
            assert (event.head_log_probs[name][~relevance] == 0).all()
        assert torch.equal(event.relevance["arg"], event.actions["op"] > 0)
    for event in emitted.of(MinibatchEnd):
        assert torch.allclose(event.log_ratio, sum(event.head_log_ratios.values()), atol=1e-5)
        assert event.step > 0 or event.log_ratio.abs().max() < 1e-5
        for name, mask in event.action_masks.items():
            assert (event.logits[name][~mask] < -1e30).all() and event.logits[name].isfinite().all()


def policy_and_rows(seed: int = 0) -> tuple[ActorCritic, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return a policy, and each head's scores, masks and relevance of 16 rows. arg has one choice in the first four."""
    generator = torch.Generator().manual_seed(seed)
    policy = restricted().policy
    scores = {name: torch.randn(16, spec.size, generator=generator) for name, spec in SPECS.items()}
    masks = {name: torch.rand(16, SPECS[name].size, generator=generator) < 0.6 for name in ("op", "arg")}
    masks["op"][:, 0] = masks["arg"][:, 0] = True
    masks["arg"][:4, 1:] = False
    relevance = {name: torch.rand(16, generator=generator) < 0.5 for name in ("arg", "size")}
    return policy, scores, masks, relevance


ACTIONS = {"op": torch.zeros(16, dtype=torch.int64), "arg": torch.zeros(16, dtype=torch.int64), "size": torch.ones(16, 2)}


def test_the_joint_entropy_counts_relevant_heads_over_allowed_choices() -> None:
    """Compared with torch.distributions, row by row."""
    policy, scores, masks, relevance = policy_and_rows()
    expected = torch.zeros(16)
    for name in ("op", "arg"):
        logits = scores[name].masked_fill(~masks[name], -torch.inf)
        probabilities = logits.softmax(-1)
        entropy = -torch.where(masks[name], probabilities * logits.log_softmax(-1), 0.0).sum(-1)
        expected += entropy * relevance.get(name, torch.ones(16))
    expected += relevance["size"] * torch.distributions.Normal(0.0, 1.0).entropy() * 2

    entropy = policy.entropy(policy.normalize(scores, masks), relevance)

    assert torch.allclose(entropy, expected.mean(), atol=1e-6)


def test_a_forced_choice_is_certain_and_moves_nothing() -> None:
    policy, scores, masks, relevance = policy_and_rows()
    relevance["arg"][:] = True
    scores = {name: score.requires_grad_() for name, score in scores.items()}

    normalized = policy.normalize(scores, masks)
    parts = policy.log_probs(normalized, ACTIONS, relevance)
    (add_up(parts) + policy.entropy(normalized, relevance)).backward()

    gradient = scores["arg"].grad
    assert gradient is not None and gradient.isfinite().all()
    assert (parts["arg"][:4] == 0).all() and (gradient[:4] == 0).all() and (gradient[4:] != 0).any()
    assert policy.head("arg").entropy(normalized["arg"][:4]) == 0


def add_up(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(parts.values())).sum()


@given(seed=st.integers(0, 1000), poison=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
@settings(max_examples=25, deadline=None)
def test_masked_content_has_no_influence(seed: int, poison: float) -> None:
    """Scores of forbidden choices and actions of irrelevant heads may have any value."""
    results = []
    for poisoned in (False, True):
        policy, scores, masks, relevance = policy_and_rows(seed)
        actions = {name: action.clone() for name, action in ACTIONS.items()}
        if poisoned:
            for name, mask in masks.items():
                scores[name][~mask] = poison
            actions["size"][~relevance["size"]] = poison
            actions["arg"][~relevance["arg"]] = 99
        leaves = {name: score.requires_grad_() for name, score in scores.items()}
        normalized = policy.normalize(leaves, masks)
        log_prob = policy.log_prob(normalized, actions, relevance)
        entropy = policy.entropy(normalized, relevance)
        (log_prob.sum() + entropy).backward()
        results.append([log_prob.detach(), entropy.detach(), *(leaf.grad for leaf in leaves.values())])

    for clean, other in zip(*results, strict=True):
        assert clean is not None and other is not None
        assert torch.equal(clean, other) and other.isfinite().all()


def test_training_without_the_masks_breaks_the_identity() -> None:
    trainer = restricted()
    trainer.steps = replace(trainer.steps, action_masks=lambda masks: {})
    emitted = learned(trainer, 64, MinibatchEnd)

    assert emitted.events[0].log_ratio.abs().max() > 0.1


def test_a_mask_that_allows_nothing_is_named() -> None:
    trainer = restricted()
    env: Any = trainer.env
    env.masks["op"][2] = False

    with pytest.raises(ValueError, match=r"mask of 'op' allows no choice at \(step, environment\) \(0, 2\)"):
        trainer.learn(64)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (ActionSpec("categorical", 2, given="later"), "'arg' must be given an earlier categorical part, got 'later'"),
        (ActionSpec("categorical", 2, relevant_for=(1,)), r"'arg' has relevant_for=\(1,\) without a part"),
    ],
)
def test_a_part_depends_on_an_earlier_one(spec: ActionSpec, sentence: str) -> None:
    env = Restricted()
    env.action_specs = {"op": SPECS["op"], "arg": spec, "later": SPECS["op"]}

    with pytest.raises(ValueError, match=sentence):
        PPO(env, PPOConfig())


POISONS = st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30])


def with_resets(rollout: Rollout) -> Rollout:
    """Return the rollout as if every row after an end were a reset, as in Gymnasium's NEXT_STEP mode."""
    valid = torch.ones_like(rollout.ended)
    for t in range(1, len(valid)):
        valid[t] = ~(rollout.ended[t - 1] & valid[t - 1])
    memory = rollout.recurrence
    if memory is not None:
        fresh = memory.fresh.copy()
        fresh[1:] |= ~valid[:-1].numpy()
        memory = replace(memory, fresh=fresh, valid=valid.numpy())
    return replace(
        rollout,
        ended=rollout.ended & valid,
        terminated=rollout.terminated & valid,
        valid=valid,
        transitions=int(valid.sum()),
        recurrence=memory,
    )


def poisoned(rollout: Rollout, poison: float) -> Rollout:
    """Write an invalid value into every row without a transition, and into every irrelevant part of an action."""
    assert rollout.valid is not None
    lost = ~rollout.valid

    def spoil(column: Tensor, where: Tensor) -> Tensor:
        shape = where.shape + (1,) * (column.dim() - where.dim())
        if column.dtype == torch.bool:
            return column & ~where.view(shape)
        return torch.where(where.view(shape), torch.tensor(poison if column.is_floating_point() else 99), column).to(column.dtype)

    columns: dict[str, Any] = {
        name: spoil(getattr(rollout, name), lost) for name in ("observations", "log_probs", "rewards", "values", "next_values")
    }
    idle = {name: lost | ~rollout.relevance[name] if name in rollout.relevance else lost for name in rollout.actions}
    columns["actions"] = {name: spoil(action, idle[name]) for name, action in rollout.actions.items()}
    for name in ("head_log_probs", "action_masks", "relevance", "scores"):
        columns[name] = {part: spoil(column, lost) for part, column in getattr(rollout, name).items()}
    return replace(rollout, **columns)


def updated(settings: dict[str, Any], seed: int, poison: float | None) -> list[Tensor]:
    trainer: PPO = restricted(seed=seed, num_epochs=2, entropy_coef=0.01, **settings)
    rollout = with_resets(trainer.collector.collect())
    assert rollout.valid is not None and not rollout.valid.all()
    trainer._update(rollout if poison is None else poisoned(rollout, poison))
    return weights(trainer)


@pytest.mark.parametrize(
    "chosen", [{}, {"shared_trunk": True, "normalize_minibatches": True}, {"policy": "lstm"}, {"policy": "gru", "clip_value": 0.2}], ids=str
)
@given(seed=st.integers(0, 1000), poison=POISONS)
@settings(max_examples=6, deadline=None)
def test_an_update_takes_no_notice_of_what_is_masked(chosen: dict[str, Any], seed: int, poison: float) -> None:
    clean, poisoned = updated(chosen, seed, None), updated(chosen, seed, poison)

    assert equal(clean, poisoned) and all(weight.isfinite().all() for weight in poisoned)
