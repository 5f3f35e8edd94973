"""An adapter for a trainer without telemetry: it listens to the methods of one object and emits events.

    python examples/custom_adapter.py

`Trainer` represents an existing PPO implementation; `TrainerAdapter` is what you write, see docs/writing_an_adapter.md.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from esper_telemetry import Level, Telemetry
from esper_telemetry.adapters.adapter import Adapter, named_parameters, parameter_groups
from esper_telemetry.adapters.columns import next_values, normalized_advantages
from esper_telemetry.events import MinibatchEnd, RolloutEnd

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
    """Learns to choose the largest of four numbers, in episodes of 16 guesses."""

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
        observations, actions, _, _, old_values, old_log_probs, advantages = (x.flatten(0, 1)[rows] for x in rollout[:7])
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


class TrainerAdapter(Adapter):
    """Emits the events of a `Trainer` from taps on that one object."""

    def __init__(self, telemetry: Telemetry, trainer: Trainer, total_steps: int) -> None:
        super().__init__(telemetry)
        parameters = named_parameters(actor=trainer.actor, critic=trainer.critic)
        groups = parameter_groups(parameters, trainer.actor.parameters(), trainer.critic.parameters())
        facts = {"clip": CLIP, "max_grad_norm": MAX_NORM, "gamma": GAMMA, "gae_lambda": LAMBDA, "groups": groups}
        facts |= {"num_envs": ENVS, "num_steps": STEPS, "num_epochs": EPOCHS, "total_steps": total_steps}
        facts |= {"normalize_advantages": True, "normalize_minibatches": True, "heads": {"action": "categorical"}}
        self.begin_run({"learning_rate": LEARNING_RATE}, facts)
        self.follow([trainer.optimizer], parameters)
        self.listen(trainer.actor, "forward", self._after_actor)
        self.listen(trainer, "collect", self._after_collect)
        self.listen(trainer, "learn_from", self._after_learn_from)

    def _after_actor(self, args: Any, kwargs: Any, logits: Tensor) -> None:
        self._logits = logits.detach()

    def _after_collect(self, args: Any, kwargs: Any, rollout: Rollout) -> None:
        self.begin_update(self.env_step + rollout.rewards.numel(), lambda: self._rollout(rollout))
        self.begin_minibatch(epoch=0)

    def _rollout(self, rollout: Rollout) -> RolloutEnd:
        return RolloutEnd(
            update=self.update,
            env_step=self.env_step,
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

    def _after_learn_from(self, args: tuple[Rollout, Tensor], kwargs: Any, minibatch: Minibatch) -> None:
        rollout, rows = args
        old_values, advantages = (column.flatten()[rows] for column in (rollout.values, rollout.advantages))
        self.hooks.emit(
            MinibatchEnd(
                self.epoch,
                self.step,
                old_values=old_values,
                returns=advantages + old_values,
                rows=rows,
                logits={"action": self._logits},
                **minibatch._asdict(),
            )
        )
        self.begin_minibatch(epoch=(self.step + 1) // (STEPS * ENVS // ROWS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=20_480)
    parser.add_argument("--run-dir", help="a new runs/custom-adapter-<time> by default")
    options = parser.parse_args()
    with Telemetry(["console"], run_dir=options.run_dir or "auto", name="custom-adapter") as telemetry:
        trainer = Trainer()
        if telemetry.level > Level.OFF:
            TrainerAdapter(telemetry, trainer, options.total_steps)
        trainer.learn(options.total_steps // (STEPS * ENVS))


if __name__ == "__main__":
    main()
