"""The environment: one step is an operation on seeds and an epoch of training, in all environments at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.events import Hooks
from esper_telemetry.lab.morphogenesis import feedback
from esper_telemetry.lab.morphogenesis.colony import Colony, ColonyResult
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthHistory, GrowthStep
from esper_telemetry.lab.morphogenesis.kinds import Op, Stage
from esper_telemetry.lab.morphogenesis.slots import (
    ALIVE,
    EFFECTIVE,
    GATES,
    LEARNING,
    ActionOutcome,
    Slots,
    act,
    action_masks,
    advanceable,
    among,
    specs,
)
from esper_telemetry.lab.morphogenesis.training import OPTIMIZERS, make_task
from esper_telemetry.ppo.environments.environment_protocol import TensorStep


class Morphogenesis:
    """B hosts that learn a task while a controller adds seeds to them, as tensors with a leading environment axis.

    An episode is at most `horizon` epochs of training of a new host. It ends in a terminal state, since the observation includes the time.
    Its `score` is the validation accuracy minus the price of the seeds' parameters.

    Args:
        num_envs: B.
        task: `synthetic`, `digits` or `text`.
        slots: places for seeds, S, one after each hidden layer; at most four.
        horizon: epochs of an episode.
        patience: the episode of a host ends early if the watchdog finds it broken. It also ends early if the host has not improved for this
            many epochs and no seed is between germination and fossilisation. None: every episode has `horizon` epochs.
        reward: `shaped`, `basic` or `sparse`.
        strict: let gates require more.
        optimizer: optimizer of hosts and seeds, `adam` or `sgd`.
        gamma: discount factor of the shaping, equal to the controller's.
        seed: seed of the hosts, the seeds and the minibatches.
        device: device of the tensors.

    Attributes:
        hooks: emit `telemetry.GrowthStep` for every step.
        score: [B], of the last episodes that ended; NaN before.

    Raises:
        ValueError: an invalid setting.
        ImportError: the data of the task are not installed.
    """

    name = "morphogenesis"

    def __init__(
        self,
        num_envs: int = 16,
        *,
        task: str = "synthetic",
        slots: int = 2,
        horizon: int = 32,
        patience: int | None = None,
        reward: str = "shaped",
        strict: bool = False,
        optimizer: str = "adam",
        gamma: float = 0.99,
        seed: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        counts = (("num_envs", num_envs, 1), ("slots", slots, 1), ("horizon", horizon, 2), ("patience", patience, 1))
        for name, value, least in counts:
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if slots > feedback.MAX_SLOTS:
            raise ValueError(f"slots must be at most {feedback.MAX_SLOTS}, got {slots}")
        for name, chosen, known in (("reward", reward, feedback.REWARDS), ("optimizer", optimizer, OPTIMIZERS)):
            if chosen not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {chosen!r}")
        self.num_envs, self.device, self.horizon, self.slot_count = num_envs, torch.device(device), horizon, slots
        self.hooks = Hooks()
        self.action_specs = specs(slots)
        self.observation_names = feedback.feature_names(slots)
        self.observation_shape = (len(self.observation_names),)
        self._seed, self._reward, self._gamma, self._strict = seed, reward, gamma, strict
        self._patience = patience
        self._generator = torch.Generator(self.device).manual_seed(0 if seed is None else seed)
        self.colony = Colony(make_task(task), num_envs, slots, optimizer=optimizer, generator=self._generator)
        self.score = torch.full((num_envs,), torch.nan, device=self.device)
        self._growth = GrowthHistory.fresh(num_envs, self.device)
        self._slots = Slots.empty(num_envs, slots, self.device)
        # Both restart at seeds that do not learn, and so with every episode.
        self._history = feedback.CauseHistory.fresh(num_envs, slots, self.device)
        self._severities = torch.zeros(feedback.SUSTAINED_EPOCHS, num_envs, slots, device=self.device)
        zero = torch.zeros(num_envs, device=self.device)
        self._epoch = zero.long()
        self._host = feedback.HostState(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero.long())
        self._begin(self._everywhere())

    @property
    def slots(self) -> Slots:
        """State of the slots before the next step."""
        return self._slots

    @property
    def host(self) -> feedback.HostState:
        """State of the hosts before the next step."""
        return self._host

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin new episodes; return the observations [B, features]."""
        seed = seed if self._seed is None else self._seed
        if seed is not None:
            self._generator.manual_seed(seed)
        self._begin(self._everywhere())
        return self._observe(torch.zeros_like(self._slots.alpha))

    def action_masks(self) -> dict[str, Tensor]:
        """Return the masks of the next action; WAIT is always allowed."""
        return action_masks(self._slots, tokens=self.colony.task.tokens)

    def would_advance(self) -> Tensor:
        """Return the seeds that would pass their next gate, [B, S]."""
        return advanceable(self._slots, self._host.val_accuracy, strict=self._strict)

    @torch.no_grad()
    def step(self, actions: Mapping[str, Tensor]) -> TensorStep:
        """Take one action per head, [B] each; an impossible one becomes WAIT."""
        slots, before = self._slots, feedback.potentials(self._slots)
        masks = self.action_masks() if self.hooks.wants(GrowthStep) else {}
        weights = slots.alpha
        outcome = act(slots, actions, self._host.val_accuracy, strict=self._strict)
        self.colony.drop(outcome.pruned)
        self.colony.plant(slots, outcome.born)
        slots.move_weights()
        velocity = slots.alpha - weights
        result = self.colony.train(slots)
        gradients = self._measure(result)
        pruned = self._roll_back(result, outcome)
        self._epoch = self._epoch + 1
        self._host = self._host_state(result, outcome)
        last = self._ended(result)
        components = self._reward_components(result, outcome, velocity)
        faded = slots.tick(self._host.val_accuracy)
        self.colony.drop(faded)
        components["shaping"] = feedback.shaping(before, feedback.potentials(slots), self._gamma, last=last)
        score = self._host.val_accuracy - self.colony.task.price * self._host.parameters
        components["final"] = torch.where(last, score, 0.0)
        self.score = torch.where(last, score, self.score)
        rewards = {name: weight * components[name] for name, weight in feedback.REWARDS[self._reward].items()}
        reward = torch.stack([*rewards.values()]).sum(0)
        if self.hooks.wants(GrowthStep):
            hosts = {**self._host_columns(result, masks), "ended": last}
            seeds = {**self._seed_columns(result, outcome, outcome.pruned | pruned | faded), **gradients}
            self._growth = self._growth.after(hosts, seeds, reward)
            self.hooks.emit(
                GrowthStep(
                    last=bool(last.all()),
                    horizon=self.horizon,
                    hosts=hosts,
                    seeds=seeds,
                    rewards=rewards,
                    gates={gate.name: outcome.gates[:, place] for place, gate in enumerate(GATES)},
                    labels={**feedback.LABELS, "parameter": tuple(self.colony.network.seed.shapes)},
                    mode=self._reward,
                    history=self._growth,
                )
            )
        if last.any():
            self._begin(last)
        return TensorStep(self._observe(velocity * ~last.unsqueeze(1)), reward, last, torch.zeros_like(last))

    def close(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizers, slots, histories and the state of the random generator."""
        return {
            "colony": self.colony.state_dict(),
            "slots": self._slots.tensors(),
            "host": self._host._asdict(),
            "history": list(self._history),
            "severities": self._severities,
            "epoch": self._epoch,
            "layout": feedback.VERSION,
            "score": self.score,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise ValueError if its observations have another layout."""
        if state["layout"] != feedback.VERSION:
            raise ValueError(f"observations are laid out by version {feedback.VERSION}, got a state of version {state['layout']}")
        self.colony.load_state_dict(state["colony"])
        self._slots = Slots(**{name: tensor.to(self.device) for name, tensor in state["slots"].items()})
        host = {name: torch.as_tensor(part, device=self.device) for name, part in state["host"].items()}
        host["epoch"] = host["epoch"].expand(self.num_envs)  # states of earlier versions have one number for all
        self._host = feedback.HostState(**host)
        self._history = feedback.CauseHistory(*(tensor.to(self.device) for tensor in state["history"]))
        self._severities = state.get("severities", torch.zeros_like(self._severities)).to(self.device)
        self._epoch = torch.as_tensor(state["epoch"], device=self.device).expand(self.num_envs)
        self.score = state["score"].to(self.device)
        self._generator.set_state(state["generator"])

    @torch.no_grad()
    def _begin(self, where: Tensor) -> None:
        """Begin episodes with new hosts and dormant slots in the selected environments [B]."""
        self._epoch = self._epoch.masked_fill(where, 0)
        self._growth = self._growth.next_episode(where)
        self._slots.restart(where)
        self.colony.reset(where)
        loss, accuracy = (part[:, 0] for part in self.colony.validate(self._slots))
        zero = torch.zeros_like(loss)
        op = zero.long() + Op.WAIT
        fresh = feedback.HostState(zero, loss, accuracy, loss, accuracy, accuracy, zero, zero, zero, zero, op)
        self._host = feedback.HostState(*(torch.where(where, new, old) for new, old in zip(fresh, self._host, strict=True)))

    def _everywhere(self) -> Tensor:
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def _ended(self, result: ColonyResult) -> Tensor:
        """Return the episodes that end with this epoch, [B]."""
        ended = self._epoch == self.horizon
        if self._patience is None:
            return ended
        growing = among(self._slots.stage, ALIVE[:-1]).any(1)
        return ended | result.verdict.panic | ((self._host.stale >= self._patience) & ~growing)

    def _measure(self, result: ColonyResult) -> dict[str, Tensor]:
        """Store the measurements of the epoch in the slots; return the columns of the event about single gradients, [B, S] each."""
        slots, epoch = self._slots, result.epoch
        learning = among(slots.stage, LEARNING) & ~slots.leaving
        entries, host_entries = self.colony.parameters(slots), self.colony.network.host.size
        # gradients per root of the parameter count, and their intensity ratio, -1 if either lacks a gradient
        seed = epoch.seed_norm / entries.clamp(min=1).sqrt()
        host = (epoch.host_norm / host_entries**0.5).unsqueeze(1).expand_as(seed)
        ratio = torch.where((entries > 0) & (host > 0), seed / host.clamp(min=1e-30), -1.0)
        smooth = torch.where(slots.ratio < 0, ratio, torch.lerp(ratio, slots.ratio, feedback.INTENSITY_DECAY))
        contribution = feedback.contributions(result.accuracy)
        effective = among(slots.stage, EFFECTIVE) & (slots.alpha > 0)
        severities = {"exploding": feedback.exploding(epoch.seed_peak), "vanishing": feedback.vanishing(epoch.seed_norm)}
        slots.set(learning, norm=epoch.seed_norm, ratio=smooth, **severities)
        slots.set(torch.ones_like(effective), contribution=torch.where(effective, contribution, -1.0))
        self._history, cause = feedback.diagnose(self._history, ratio, seed, host, epoch.upstream, counted=learning, alpha=slots.alpha)
        present = self.colony.tensors(slots) & learning.unsqueeze(-1)
        severity = torch.where(learning, feedback.exploding(epoch.seed_norm), 0.0)
        self._severities = torch.cat([self._severities[1:], severity.unsqueeze(0)])
        sustained = torch.where(learning, self._severities.amin(0), torch.nan)
        health = feedback.tensor_health(epoch.tensor_norm, epoch.tensor_peak, present)
        return {**health, "sustained": sustained, "cause": cause}

    def _roll_back(self, result: ColonyResult, outcome: ActionOutcome) -> Tensor:
        """Snapshot the stable hosts and restore the broken ones; return the seeds [B, S] that this prunes."""
        slots, panic = self._slots, result.verdict.panic
        # A host whose loss rises keeps older weights. A seed that has just fossilised must be in them: a roll-back does not prune it.
        self.colony.snapshot(result.verdict.stable | (~panic & outcome.fossilized.any(1)))
        lost = panic.unsqueeze(1) & among(slots.stage, ALIVE[:-1])
        if panic.any():
            self.colony.roll_back(panic, panic.unsqueeze(1) & (slots.stage != Stage.FOSSILIZED))
        slots.enter(lost, Stage.PRUNED, self._host.val_accuracy)
        slots.empty_out(lost)
        return lost

    def _host_state(self, result: ColonyResult, outcome: ActionOutcome) -> feedback.HostState:
        old, accuracy = self._host, result.accuracy[:, 0]
        best = torch.maximum(old.best, accuracy)
        return feedback.HostState(
            epoch=self._epoch / self.horizon,
            train_loss=result.epoch.loss,
            train_accuracy=result.epoch.accuracy,
            val_loss=result.loss[:, 0],
            val_accuracy=accuracy,
            best=best,
            delta=accuracy - old.val_accuracy,
            stale=torch.where(accuracy > old.best, 0.0, old.stale + 1),
            norm=result.epoch.host_norm,
            parameters=self.colony.parameters(self._slots).sum(1) / self.colony.network.host.size,
            op=outcome.op,
        )

    def _reward_components(self, result: ColonyResult, outcome: ActionOutcome, velocity: Tensor) -> dict[str, Tensor]:
        """Return the components of the reward that do not depend on the end of the episode."""
        slots, host = self._slots, self._host
        return {
            "accuracy_delta": host.delta,
            "attribution": feedback.attribution(slots, host.val_accuracy),
            "rent": feedback.rent(host.parameters),
            "alpha_shock": velocity.square().sum(1),
            "op_cost": feedback.op_cost(outcome.op),
            "fossil_bonus": (outcome.fossilized * slots.contribution.clamp(min=0)).sum(1),
            "rollback": result.verdict.panic.float(),
        }

    def _observe(self, velocity: Tensor) -> Tensor:
        return feedback.observe(self._host, self._slots, velocity, self.horizon)

    def _host_columns(self, result: ColonyResult, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns of the event about the hosts, [B] each, from the action masks before the step."""
        host, slots, accuracy, verdict = self._host, self._slots, result.accuracy, result.verdict
        alone = torch.where(among(slots.stage, EFFECTIVE), slots.contribution.clamp(min=-1), 0.0).sum(1)
        seeds_gain = accuracy[:, 0] - accuracy[:, -1]
        return {
            **{name: getattr(host, name) for name in ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "best", "stale")},
            "norm": host.norm,
            "growth": 1 + host.parameters,
            "score": host.val_accuracy - self.colony.task.price * host.parameters,
            "seeds_gain": seeds_gain,
            "synergy": seeds_gain - alone,
            "op": host.op,
            "decides": masks["op"].sum(1) > 1,
            "host_parameters": torch.full_like(host.val_loss, self.colony.network.host.size),
            "nonfinite": verdict.nonfinite,
            "lobotomy": verdict.lobotomy,
            "divergence": verdict.divergence,
        }

    def _seed_columns(self, result: ColonyResult, outcome: ActionOutcome, pruned: Tensor) -> dict[str, Tensor]:
        """Return the columns of the event about the seeds, [B, S] each, without the columns about single gradients."""
        slots, effective = self._slots, self._slots.contribution > -1
        return {
            **{name: getattr(slots, name) for name in ("stage", "age", "life", "alpha", "tempo", "curve", "blueprint")},
            "parameters": self.colony.parameters(slots),
            "progress": torch.where(slots.life > 0, self._host.val_accuracy.unsqueeze(1) - slots.anchor, torch.nan),
            "born": outcome.born,
            "pruned": pruned,
            "fossilized": outcome.fossilized,
            "norm": torch.where(slots.norm != -1, slots.norm, torch.nan),
            "ratio": torch.where(slots.ratio >= 0, slots.ratio, torch.nan),
            "contribution": torch.where(effective, slots.contribution, torch.nan),
            "shapley": torch.where(effective, feedback.shapley_values(result.accuracy), torch.nan),
        }
