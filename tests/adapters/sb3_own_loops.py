"""Stable-Baselines3 PPO with a user's own training loop, and the mistakes that such loops contain.

A mistake replaces one part of the loop: computing the loss of a minibatch, or taking the optimizer step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_


def cartpole(seed: int) -> Any:
    return make_vec_env("CartPole-v1", 4, seed=seed)


@dataclass
class Minibatch:
    """Columns of a minibatch after the forward pass, [N] each; `model` holds the settings."""

    model: Any
    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    raw_advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    entropy: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.log_prob - self.old_log_prob).exp()

    def policy(self, advantages: Tensor | None = None, ratio: Tensor | None = None) -> Tensor:
        a = self.advantages if advantages is None else advantages
        r = self.ratio if ratio is None else ratio
        return -torch.min(a * r, a * r.clamp(0.8, 1.2)).mean()

    def value(self, target: Tensor | None = None) -> Tensor:
        return F.mse_loss(self.values, self.returns if target is None else target)

    def bonus(self) -> Tensor:
        return float(self.model.ent_coef) * self.entropy.mean()

    def loss(self, policy: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        first = self.policy() if policy is None else policy
        second = self.value() if value is None else value
        return first + float(self.model.vf_coef) * second - self.bonus()


Loss = Callable[[Minibatch], Tensor]
Step = Callable[[Any, Tensor], None]


def clip_norm(model: Any, share: float = 1.0) -> None:
    torch.nn.utils.clip_grad_norm_(model.policy.parameters(), share * model.max_grad_norm)


def step_with(model: Any, loss: Tensor, clip: Callable[[Any], object]) -> None:
    model.policy.optimizer.zero_grad()
    loss.backward()
    clip(model)
    model.policy.optimizer.step()


def right_step(model: Any, loss: Tensor) -> None:
    step_with(model, loss, clip_norm)


class OwnLoopPPO(PPO):
    """PPO whose loop calls `make_loss` for each minibatch's loss and `take_step` for the step."""

    make_loss: Loss = staticmethod(Minibatch.loss)
    take_step: Step = staticmethod(right_step)
    sets_rate = True

    def train(self) -> None:
        self.policy.set_training_mode(True)
        if self.sets_rate:
            self._update_learning_rate(self.policy.optimizer)
        for _ in range(self.n_epochs):
            for data in self.rollout_buffer.get(self.batch_size):
                discrete = isinstance(self.action_space, spaces.Discrete)
                actions = data.actions.long().flatten() if discrete else data.actions
                values, log_prob, entropy = self.policy.evaluate_actions(data.observations, actions)
                assert entropy is not None
                used = (data.advantages - data.advantages.mean()) / (data.advantages.std() + 1e-8)
                columns = (log_prob, data.old_log_prob, used, data.advantages, values.flatten())
                minibatch = Minibatch(self, *columns, data.old_values, data.returns, entropy)
                type(self).take_step(self, type(self).make_loss(minibatch))
        self._n_updates += self.n_epochs


class PaddedRecurrentPPO(RecurrentPPO):  # type: ignore[misc]  # sb3-contrib has no types
    """RecurrentPPO whose loop leaves the padding mask out of one term of the loss."""

    padded = "policy"

    def train(self) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        for _ in range(self.n_epochs):
            for data in self.rollout_buffer.get(self.batch_size):
                mask = data.mask > 1e-8
                arguments = (data.actions.long().flatten(), data.lstm_states, data.episode_starts)
                values, log_prob, entropy = self.policy.evaluate_actions(data.observations, *arguments)
                counted = data.advantages[mask]
                used = (data.advantages - counted.mean()) / (counted.std() + 1e-8)
                ratio = (log_prob - data.old_log_prob).exp()
                terms = {
                    "policy": -torch.min(used * ratio, used * ratio.clamp(0.8, 1.2)),
                    "value": self.vf_coef * (data.returns - values.flatten()).square(),
                    "entropy": -self.ent_coef * entropy,
                }
                means = [term.mean() if name == self.padded else term[mask].mean() for name, term in terms.items()]
                right_step(self, torch.stack(means).sum())
        self._n_updates += self.n_epochs


def never_cleared(model: Any, loss: Tensor) -> None:
    loss.backward()
    clip_norm(model)
    model.policy.optimizer.step()


def clipped_after(model: Any, loss: Tensor) -> None:
    step_with(model, loss, lambda model: None)
    clip_norm(model)


def clip_each(model: Any) -> None:
    for parameter in model.policy.parameters():
        torch.nn.utils.clip_grad_norm_(parameter, model.max_grad_norm)


def clip_and_clear(model: Any) -> None:
    clip_norm(model)
    model.policy.optimizer.zero_grad(set_to_none=False)


def stepped_twice(model: Any, loss: Tensor) -> None:
    right_step(model, loss)
    model.policy.optimizer.step()


def decayed_by_hand(model: Any, loss: Tensor) -> None:
    right_step(model, loss)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.mul_(0.999)


def new_optimizer(model: Any, loss: Tensor) -> None:
    """The optimizer loses its state at every step."""
    model.policy.optimizer.state.clear()
    right_step(model, loss)


def put_back(model: Any, loss: Tensor) -> None:
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    right_step(model, loss)
    with torch.no_grad():
        for parameter, old in zip(model.policy.parameters(), before, strict=True):
            parameter.copy_(old)


def standardized(column: Tensor) -> Tensor:
    return (column - column.mean()) / (column.std() + 1e-8)


def unclipped(b: Minibatch) -> Tensor:
    return b.loss(-(b.advantages * b.ratio).mean())


def huber(b: Minibatch) -> Tensor:
    return b.loss(value=2 * F.smooth_l1_loss(b.values, b.returns))


def dual_clipped(b: Minibatch) -> Tensor:
    single = torch.min(b.advantages * b.ratio, b.advantages * b.ratio.clamp(0.8, 1.2))
    return b.loss(-torch.where(b.advantages < 0, torch.max(single, 3 * b.advantages), single).mean())


def clipped_maximum(b: Minibatch) -> Tensor:
    near = b.old_values + (b.values - b.old_values).clamp(-0.2, 0.2)
    return b.loss(value=torch.max((b.values - b.returns).square(), (near - b.returns).square()).mean())


def clipped_minimum(b: Minibatch) -> Tensor:
    near = b.old_values + (b.values - b.old_values).clamp(-0.2, 0.2)
    return b.loss(value=torch.min((b.values - b.returns).square(), (near - b.returns).square()).mean())


def with_penalty(b: Minibatch) -> Tensor:
    squares = [p.square().sum() for p in b.model.policy.parameters()]
    return b.loss() + 0.005 * torch.stack(squares).sum()


LOSS_MISTAKES: Mapping[str, Loss] = {
    "policy_sign": lambda b: b.loss(-b.policy()),
    "policy_missing": lambda b: b.loss(b.policy().detach()),
    "value_missing": lambda b: b.loss(value=b.value().detach()),
    "policy_summed": lambda b: b.loss(len(b.values) * b.policy()),
    "no_clip": unclipped,
    "no_minimum": lambda b: b.loss(-(b.advantages * b.ratio.clamp(0.8, 1.2)).mean()),
    "maximum": lambda b: b.loss(-torch.max(b.advantages * b.ratio, b.advantages * b.ratio.clamp(0.8, 1.2)).mean()),
    "ratio_inverted": lambda b: b.loss(b.policy(ratio=1 / b.ratio)),
    "no_ratio": lambda b: b.loss(b.policy(ratio=(b.log_prob - b.log_prob.detach()).exp())),
    "probability_difference": lambda b: b.loss(b.policy(ratio=b.log_prob - b.old_log_prob)),
    "advantages_raw": lambda b: b.loss(b.policy(b.raw_advantages)),
    "advantages_centred": lambda b: b.loss(b.policy(b.raw_advantages - b.raw_advantages.mean())),
    "advantages_std_alone": lambda b: b.loss(b.policy(b.raw_advantages / (b.raw_advantages.std() + 1e-8))),
    "advantages_broadcast": lambda b: b.loss(b.policy(b.advantages.unsqueeze(1))),
    "advantages_reversed": lambda b: b.loss(b.policy(b.advantages.flip(0))),
    "advantages_shifted": lambda b: b.loss(b.policy(b.advantages.roll(1))),
    "advantages_negated": lambda b: b.loss(b.policy(-b.advantages)),
    "advantages_attached": lambda b: b.loss(b.policy(standardized(b.returns - b.values))),
    "returns_for_advantages": lambda b: b.loss(b.policy(b.returns)),
    "target_advantages": lambda b: b.loss(value=b.value(b.raw_advantages)),
    "target_normalized": lambda b: b.loss(value=b.value(b.advantages)),
    "target_old_values": lambda b: b.loss(value=b.value(b.old_values)),
    "target_moving": lambda b: b.loss(value=b.value(b.raw_advantages + b.values.detach())),
    "target_shifted": lambda b: b.loss(value=b.value(b.returns.roll(1))),
    "target_following": lambda b: b.loss(value=b.value(b.returns.roll(-1))),
    "target_normalized_returns": lambda b: b.loss(value=b.value((b.returns - b.returns.mean()) / b.returns.std())),
    "value_absolute": lambda b: b.loss(value=F.l1_loss(b.values, b.returns)),
    "value_root": lambda b: b.loss(value=b.value().sqrt()),
    "value_clip_minimum": clipped_minimum,
    "values_broadcast": lambda b: b.loss(value=(b.values.unsqueeze(1) - b.returns).square().mean()),
    "entropy_of_sample": lambda b: b.loss() + b.bonus() + b.model.ent_coef * b.log_prob.mean(),
    "entropy_of_sample_sign": lambda b: b.loss() + b.bonus() - b.model.ent_coef * b.log_prob.mean(),
    "weight_penalty": with_penalty,
}
"""Losses by the hypothesis that explains their gradient; `tests/equations` has signs, weights and missing terms."""

LOSS_VARIANTS: Mapping[str, Loss] = {
    "dual_clip": dual_clipped,
    "value_huber": huber,
    "value_clipped": clipped_maximum,
    "kl_penalty": lambda b: b.loss() + 0.5 * (b.old_log_prob - b.log_prob).mean(),
}
"""Published losses by the hypothesis that recognises them."""

STEP_MISTAKES: Mapping[str, Step] = {
    "gradient_not_cleared": never_cleared,
    "clipping_not_clipped": clipped_after,
    "clipping_value": partial(step_with, clip=lambda model: clip_grad_value_(model.policy.parameters(), 0.01)),
    "clipping_each_tensor": partial(step_with, clip=clip_each),
    "clipping_norm": partial(step_with, clip=partial(clip_norm, share=0.1)),
    "clipping_cleared": partial(step_with, clip=clip_and_clear),
    "optimizer_step_twice": stepped_twice,
    "optimizer_step_weight_decay": decayed_by_hand,
    "optimizer_step_state_cleared": new_optimizer,
    "optimizer_step_no_step": put_back,
}
"""Steps by equation and hypothesis."""
