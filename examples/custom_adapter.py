"""An adapter for a trainer that knows nothing of telemetry: it wraps methods of one object and emits events.

    python examples/custom_adapter.py

`Trainer` stands for somebody's PPO; `Adapter` is what you write, see docs/writing_an_adapter.md.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from esper_telemetry import Telemetry, attach
from esper_telemetry.adapters.columns import FinishedEpisode, episodes_event, next_values, normalized_advantages
from esper_telemetry.core.tensors import gradient_norms
from esper_telemetry.events import BackwardEnd, Hooks, MinibatchEnd, OptimizerStep, RolloutEnd, RunStart, UpdateEnd

ENVS, STEPS, EPISODE, EPOCHS, ROWS = 8, 64, 16, 2, 128
GAMMA, LAMBDA, CLIP, MAX_NORM, LEARNING_RATE = 0.9, 0.95, 0.2, 0.5, 1e-2


class Rollout(NamedTuple):
    """T steps of B environments: [T, B] each, observations [T, B, 4], `last_value` [B]."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    ended: Tensor
    values: Tensor
    log_probs: Tensor
    advantages: Tensor
    last_value: Tensor


class Minibatch(NamedTuple):
    """Columns [N] of a minibatch and its losses."""

    log_ratio: Tensor
    advantages: Tensor
    values: Tensor
    losses: dict[str, Tensor]


class Trainer:
    """Learns to name the largest of four numbers, in episodes of 16 guesses."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE)

    def learn(self, updates: int) -> None:
        for _ in range(updates):
            rollout = self.collect()
            for _ in range(EPOCHS):
                for rows in torch.randperm(STEPS * ENVS).split(ROWS):
                    self.learn_from(rollout, rows)

    @torch.no_grad()
    def collect(self) -> Rollout:
        observations = torch.rand(STEPS + 1, ENVS, 4)
        policy = Categorical(logits=self.actor(observations[:-1]))
        actions, values = policy.sample(), self.critic(observations).squeeze(-1)
        rewards = (actions == observations[:-1].argmax(-1)).float()
        ended = (torch.arange(1, STEPS + 1) % EPISODE == 0).unsqueeze(1).expand(STEPS, ENVS)
        alive, advantages = (~ended).float(), torch.zeros(STEPS + 1, ENVS)
        for t in reversed(range(STEPS)):
            delta = rewards[t] + GAMMA * alive[t] * values[t + 1] - values[t]
            advantages[t] = delta + GAMMA * LAMBDA * alive[t] * advantages[t + 1]
        log_probs = policy.log_prob(actions)
        return Rollout(observations[:-1], actions, rewards, ended, values[:-1], log_probs, advantages[:-1], values[-1])

    def learn_from(self, rollout: Rollout, rows: Tensor) -> Minibatch:
        observations, actions, _, _, old_values, old_log_probs, advantages = (
            x.flatten(0, 1)[rows] for x in rollout[:7]
        )
        log_ratio = Categorical(logits=self.actor(observations)).log_prob(actions) - old_log_probs
        ratio, used, values = log_ratio.exp(), normalized_advantages(advantages), self.critic(observations).squeeze(-1)
        policy_loss = -torch.min(ratio * used, ratio.clamp(1 - CLIP, 1 + CLIP) * used).mean()
        value_loss = 0.5 * (values - advantages - old_values).square().mean()
        self.optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        self.clip()
        self.optimizer.step()
        losses = {"policy": policy_loss.detach(), "value": value_loss.detach()}
        return Minibatch(log_ratio.detach(), used, values.detach(), losses)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)


class Adapter:
    """Emits the events of a `Trainer` from wrappers around the methods of that one object."""

    def __init__(self, trainer: Trainer) -> None:
        self.hooks = Hooks()
        self._trainer = trainer
        self._original = trainer.collect, trainer.learn_from, trainer.clip
        self._update = self._env_step = self._gradient_step = self._step = 0
        modules = {"actor": trainer.actor, "critic": trainer.critic}
        self._parameters = {f"{part}.{name}": p for part, net in modules.items() for name, p in net.named_parameters()}

    def learn(self, updates: int) -> None:
        trainer: Any = self._trainer
        groups = {part: [n for n in self._parameters if n.startswith(part)] for part in ("actor", "critic")}
        facts = {"clip": CLIP, "max_grad_norm": MAX_NORM, "gamma": GAMMA, "gae_lambda": LAMBDA, "groups": groups}
        facts |= {"num_envs": ENVS, "num_steps": STEPS, "num_epochs": EPOCHS, "total_steps": updates * STEPS * ENVS}
        facts |= {"normalize_advantages": True, "normalize_minibatches": True, "heads": {"action": "categorical"}}
        self.hooks.emit(RunStart({"learning_rate": LEARNING_RATE}, facts, 0, 0, 0))
        trainer.collect, trainer.learn_from, trainer.clip = self._collect, self._learn_from, self._clip
        handle = trainer.actor.register_forward_hook(self._keep_logits)
        try:
            trainer.learn(updates)
            self._end_update()
        finally:  # the trainer is what it was, also after an exception
            handle.remove()
            del trainer.collect, trainer.learn_from, trainer.clip

    def _keep_logits(self, actor: nn.Module, inputs: Any, logits: Tensor) -> None:
        self._logits = logits.detach()

    def _collect(self) -> Rollout:
        self._end_update()  # nothing says that an update is over but the next rollout
        rollout = self._original[0]()
        self._update, self._step, self._env_step = self._update + 1, 0, self._env_step + rollout.rewards.numel()
        self.hooks.emit(
            RolloutEnd(
                update=self._update,
                env_step=self._env_step,
                rewards=rollout.rewards,
                values=rollout.values,
                advantages=rollout.advantages,
                returns=rollout.advantages + rollout.values,
                log_probs=rollout.log_probs,
                ended=rollout.ended,
                terminated=rollout.ended,
                next_values=next_values(rollout.values, rollout.last_value, rollout.ended),
                actions={"action": rollout.actions},
                gamma=GAMMA,
                logits={"action": self._logits},
            )
        )
        totals = rollout.rewards.unflatten(0, (-1, EPISODE)).sum(1)  # [episodes, B]
        episodes = [
            FinishedEpisode(float(total), EPISODE, EPISODE * (k + 1) - 1)
            for k, row in enumerate(totals)
            for total in row
        ]
        if event := episodes_event(episodes, self._env_step):
            self.hooks.emit(event)
        return rollout

    def _learn_from(self, rollout: Rollout, rows: Tensor) -> Minibatch:
        minibatch = self._original[1](rollout, rows)
        self.hooks.emit(OptimizerStep(self._epoch, self._step, self._trainer.optimizer, self._parameters))
        old_values, advantages = (column.flatten()[rows] for column in (rollout.values, rollout.advantages))
        self.hooks.emit(
            MinibatchEnd(
                self._epoch,
                self._step,
                old_values=old_values,
                returns=advantages + old_values,
                rows=rows,
                logits={"action": self._logits},
                **minibatch._asdict(),
            )
        )
        self._step += 1
        return minibatch

    def _clip(self) -> None:
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if self.hooks.wants(BackwardEnd):  # norms are worth computing where somebody listens
            norms = gradient_norms(list(gradients.values()))
            self.hooks.emit(
                BackwardEnd(self._epoch, self._step, self._parameters, tuple(gradients), norms, max_norm=MAX_NORM)
            )
        self._original[2]()

    @property
    def _epoch(self) -> int:
        return self._step // (STEPS * ENVS // ROWS)

    def _end_update(self) -> None:
        self._gradient_step += self._step
        if self._step:
            self.hooks.emit(UpdateEnd(self._update, self._env_step, self._gradient_step, LEARNING_RATE, seconds={}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=20_480)
    parser.add_argument("--run-dir", help="a new runs/custom-adapter-<time> by default")
    options = parser.parse_args()
    with Telemetry(["console"], run_dir=options.run_dir or "auto", name="custom-adapter") as telemetry:
        adapter = Adapter(Trainer())
        attach(telemetry, adapter)
        adapter.learn(options.total_steps // (STEPS * ENVS))


if __name__ == "__main__":
    main()
