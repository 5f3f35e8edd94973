"""skrl 2: telemetry for `PPO` and `PPO_RNN`, by `attach_agent`.

The rollout is read from the memory when skrl stores its advantages. skrl adds values to rewards at time limits, and overwrites values and
returns by normalised ones if there is a value preprocessor. So rewards are copied when they arrive, and values and returns are what the
preprocessor receives. Losses are computed in its units; the columns of minibatches are converted back.

Shapes: T steps, B environments, D action dimensions, A actions, L layers and H width of a recurrent state, N rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.adapter import Adapter, last_layer, named_parameters, parameter_groups, plain_settings
from esper_telemetry.adapters.columns import (
    HEAD,
    HeadColumns,
    LossColumns,
    head_actions,
    join_columns,
    minibatch_means,
    next_values,
    policy_loss,
    value_loss,
)
from esper_telemetry.adapters.taps import SurroundingTap
from esper_telemetry.core.event_parts import Scale
from esper_telemetry.core.facts import UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks, MinibatchEnd, RolloutEnd
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.updates.extensions import ObservedSource
from esper_telemetry.updates.failure import Candidate, of_parameters
from esper_telemetry.updates.joining import joined_minibatches
from esper_telemetry.updates.update import JoinedMinibatches

REQUIRED_ATTRIBUTES = ("policy", "value", "memory", "optimizer", "_value_preprocessor", "_observation_preprocessor")
"""Attributes of an agent whose updates the adapter understands; PPO's configuration has `ratio_clip` too."""

SETTING_NAMES = {
    "gamma": "discount_factor",
    "clip": "ratio_clip",
    "num_epochs": "learning_epochs",
    "entropy_coef": "entropy_loss_scale",
    "value_coef": "value_loss_scale",
    "max_grad_norm": "grad_norm_clip",
    "target_kl": "kl_threshold",
}
"""skrl's names of settings, if they differ."""

PARTS_OF_SHARED_MODELS = {"policy_layer": "actor", "log_std_parameter": "actor", "value_layer": "critic"}
"""Names in a model that skrl's `Runner` has made for both roles; the rest of it is shared."""


class SampledMinibatch(NamedTuple):
    """A minibatch that the memory has returned: its place in the pass, its columns [N, ...] by name, and its transitions [N]."""

    place: int
    columns: Mapping[str, Tensor]
    rows: Tensor


class AgentListener(Adapter):
    """Emits the events of a learning `PPO` or `PPO_RNN` agent, from `start` to `stop`."""

    prefix = "skrl"
    ends_updates = True

    def __init__(self, telemetry: Telemetry, agent: Any) -> None:
        super().__init__(telemetry, join=self.joined)
        self._agent, self._memory, self._cfg = agent, agent.memory, agent.cfg
        self._ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self._converts_values = isinstance(agent._value_preprocessor, nn.Module)
        self._normalizer = agent._observation_preprocessor
        self._value_clip = agent.cfg.value_clip if agent.cfg.value_clip > 0 else None
        self._desired_kl = getattr(agent.scheduler, "kl_threshold", None)  # at which the scheduler aims
        self.adapts_rate = agent.scheduler is not None
        self._begun = False
        self._tracked: dict[str, list[float]] = {}
        self._samples: dict[int, SampledMinibatch] = {}
        self._sample: SampledMinibatch | None = None
        self._evaluated: tuple[Tensor, HeadColumns] | None = None
        self._last_place = -1
        self._forget_steps()

    def start(self) -> None:
        """Listen to the agent and its parts."""
        agent = self._agent
        self.follow([agent.optimizer], self._parameters())
        self.listen(agent, "act", self._after_act)
        before, after = partial(self.session.attempt, self._before_record), AgentListener._after_record
        tap = partial(SurroundingTap, agent, "record_transition", lambda **columns: before(columns["rewards"]))
        self.until_stop(tap(lambda: self.session.attempt(after, self)).remove)
        if self._cfg.rewards_shaper is not None:
            self.listen(self._cfg, "rewards_shaper", self._after_shaper)
        self.listen(agent, "_value_preprocessor", self._after_values)
        self.listen(self._memory, "set_tensor_by_name", self._after_stored, timed=True)
        self.listen(self._memory, "sample", self._after_sample)
        self.listen(self._memory, "sample_all", self._after_sample)
        for model in {id(model): model for model in (agent.policy, agent.value)}.values():
            self.listen(model, "act", self._after_model)
        if self._desired_kl is not None:
            self.listen(agent.scheduler, "step", self._after_divergence)
        self.listen(agent, "track_data", self._after_tracked)
        self.listen(agent, "update", self._after_update, timed=True)
        self.listen(agent, "post_interaction", self._after_interaction)

    # Rollouts.

    def _forget_steps(self) -> None:
        self._rewards: list[Tensor] = []
        self._shaped: list[Tensor] = []
        self._heads: list[HeadColumns] = []
        self._bootstrap: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._estimates: Tensor | None = None

    def _after_act(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._agent.training:
            if not self._begun:
                self._begun = True
                self.begin_run(plain_settings(asdict(self._cfg)), self._facts(kwargs["timesteps"]))
                self.times.begin()
            self._heads.append(self._columns(result[1]))

    def _before_record(self, rewards: Tensor) -> None:
        if self._agent.training:
            self._rewards.append(rewards.clone())

    def _after_record(self) -> None:
        if self._agent.training and self._cfg.time_limit_bootstrap and self._estimates is not None:
            self._bootstrap.append(self._estimates)

    def _after_shaper(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        self._shaped.append(result.clone())

    def _after_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The value preprocessor converted estimates to the units of rewards, or, in an update, values and returns to its own."""
        if kwargs.get("inverse"):
            self._estimates = result
        elif kwargs.get("train"):
            self._targets.append(args[0].clone() if self._converts_values else args[0])

    def _after_stored(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The memory has stored the advantages: the update begins."""
        if (args[0] if args else kwargs["name"]) == "advantages":
            steps, envs = len(self._rewards), self._memory.num_envs
            milliseconds = sum(self._tracked.get("Stats / Env stepping time (ms)", ()))
            complete = steps == self._memory.memory_size
            env_step = self.env_step + steps * envs * self._ranks
            self.begin_update(env_step, self._rollout if complete else None, environment=milliseconds / 1000)
            self._last_place = -1
            self.follow([self._agent.optimizer], self._parameters())
            self._forget_steps()

    def _rollout(self) -> RolloutEnd:
        """Return the event of the rollout, which is complete in the memory."""
        memory, cfg = self._memory, self._cfg
        column = {name: tensor.squeeze(-1) for name, tensor in memory.tensors.items() if tensor.shape[-1] == 1}
        values, returns = (target.squeeze(-1) for target in self._targets)
        rewards = torch.stack(self._rewards).squeeze(-1)
        terminated = column["terminated"]
        limits = column["truncated"] & ~terminated
        bootstrap = torch.where(limits, torch.stack(self._bootstrap).squeeze(-1), 0.0) if self._bootstrap else None
        assert self._estimates is not None
        heads = join_columns(self._heads, torch.stack)
        observations, scales = memory.tensors["observations"], {}
        if hasattr(self._normalizer, "running_variance"):
            mean, variance = self._normalizer.running_mean, self._normalizer.running_variance
            observations = self._normalizer(observations)
            scales["obs"] = Scale(mean, variance.sqrt(), self._normalizer.clip_threshold, observations)
        states = [memory.tensors[name] for name in sorted(memory.tensors) if name.startswith("rnn_policy_")]
        return RolloutEnd(
            update=self.update,
            env_step=self.env_step,
            rewards=torch.stack(self._shaped).squeeze(-1) if self._shaped else rewards,
            raw_rewards=rewards if self._shaped else None,
            values=values,
            advantages=returns - values,
            returns=returns,
            log_probs=column["log_prob"],
            ended=terminated | limits,
            terminated=terminated,
            next_values=next_values(values, self._estimates.squeeze(-1), terminated | limits, bootstrap),
            actions=head_actions(memory.tensors["actions"], (HEAD,), heads.means.keys(), values.shape),
            gamma=cfg.discount_factor,
            # [T, B, L, H] each, in which a step began
            states=torch.stack([state.permute(0, 2, 1, 3) for state in states], 2) if states else None,
            scales=scales,
            observations=observations,
            last_values=self._estimates.reshape(1, -1),
            # PPO evaluates the next observations, PPO_RNN those that were acted on
            time_limits=None if self._bootstrap and not hasattr(self._agent, "_rnn") else limits,
            seen_difference="other_statistics" if scales else None,
            **heads._asdict(),
        )

    def _columns(self, outputs: Mapping[str, Any]) -> HeadColumns:
        """Columns [N, ...] of the policy's distribution from the outputs of `act`; none of several categorical heads."""
        if "mean_actions" in outputs:
            means, log_std = outputs["mean_actions"].detach(), outputs["log_std"].detach()
            return HeadColumns(means={HEAD: means}, log_std={HEAD: log_std.expand_as(means)})
        logits = getattr(self._agent.policy.distribution(role="policy"), "logits", None)
        if logits is None or logits.shape != outputs["net_output"].shape:
            return HeadColumns()
        return HeadColumns(logits={HEAD: logits.detach()})

    # Updates.

    def _parameters(self) -> dict[str, Tensor]:
        agent = self._agent
        named = named_parameters(actor=agent.policy, critic=agent.value)
        if agent.policy is agent.value:
            named = {name.removeprefix("actor."): parameter for name, parameter in named.items()}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters by part; `lstm` has recurrent layers."""
        agent, parameters = self._agent, self._parameters()
        if agent.policy is agent.value:
            groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": []}
            for name in parameters:
                groups[PARTS_OF_SHARED_MODELS.get(name.split(".")[0], "shared")].append(name)
        else:
            groups = parameter_groups(parameters, agent.policy.parameters(), agent.value.parameters())
        cells = [name for name, part in agent.policy.named_modules() if isinstance(part, nn.RNNBase)]
        groups["lstm"] = [name for name in parameters if any(f"{cell}." in name for cell in cells)]
        return {part: names for part, names in groups.items() if names}

    def _after_sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The memory returned the minibatches of a pass; `PPO_RNN` uses the same ones in all passes."""
        names, memory, count = args[0] if args else kwargs["names"], self._memory, len(result)
        if not self.learning or "actions" not in names:
            return
        if "terminated" not in names:  # of PPO
            rows = torch.as_tensor(memory.get_sampling_indexes()).tensor_split(count)
        elif kwargs.get("sequence_length", 1) > 1:
            rows = torch.as_tensor(memory.all_sequence_indexes).tensor_split(count)
        else:
            rows = torch.arange(len(memory)).split(len(memory) // count)
        batches = [dict(zip(names, batch, strict=True)) for batch in result]
        samples = [SampledMinibatch(place, *each) for place, each in enumerate(zip(batches, rows, strict=False))]
        self._samples = {id(sample.columns["actions"]): sample for sample in samples}

    def _after_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A model evaluated a minibatch: first the policy, then, unless the KL divergence ends the pass, the critic."""
        if not self.learning:
            return
        if kwargs["role"] == "policy":
            sample = self._samples.get(id(args[0].get("taken_actions")))
            if sample is not None:
                self.begin_minibatch(self.epoch + (sample.place <= self._last_place))
                self._sample, self._last_place = sample, sample.place
                self._evaluated = result[1]["log_prob"].detach(), self._columns(result[1])
        elif self._sample is not None and self._evaluated is not None:
            (_, columns, rows), (log_probs, heads) = self._sample, self._evaluated
            self._sample = self._evaluated = None
            self.row = MinibatchEnd(
                self.epoch,
                self.step,
                log_ratio=(log_probs - columns["log_prob"]).flatten(),
                advantages=columns["advantages"].flatten(),
                values=result[0].detach().flatten(),
                old_values=columns["values"].flatten(),
                returns=columns["returns"].flatten(),
                rows=rows,
                **heads._asdict(),
            )

    @torch.no_grad()
    def joined(self, rows: Sequence[MinibatchEnd]) -> JoinedMinibatches:
        """Return all minibatches of the update; values and returns in the units of rewards, losses in skrl's."""
        joined, rollout = joined_minibatches(rows, with_critic=True), self.rollout_event
        assert joined.values is not None and joined.old_values is not None and joined.returns is not None
        names, unread = ("log_ratio", "advantages", "values", "old_values", "returns"), joined.log_ratio
        columns = LossColumns(log_probs=unread, entropy=unread, **{name: getattr(joined, name) for name in names})
        losses = {"policy": policy_loss(columns, self._cfg.ratio_clip), "value": value_loss(columns, self._value_clip)}
        joined = joined._replace(losses={name: minibatch_means(loss, joined.counts) for name, loss in losses.items()})
        if not self._converts_values:
            return joined
        if rollout is None or joined.rows is None or joined.values is None:
            return joined._replace(values=None, old_values=None, returns=None)
        values = self._agent._value_preprocessor(joined.values.unsqueeze(-1), inverse=True).squeeze(-1)
        stored, targets = (column.flatten()[joined.rows] for column in (rollout.values, rollout.returns))
        return joined._replace(values=values, old_values=stored, returns=targets)

    def _after_divergence(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._tracked.setdefault("KL / mean", []).append(float(args[0]))
        self.logged["kl/last"] = float(args[0])

    def _after_tracked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tag, value = (*args, *kwargs.values())[:2]
        self._tracked.setdefault(tag, []).append(float(value))

    def _after_update(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self.end_learning()
        self._samples = {}

    def _after_interaction(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The trainer has logged the update, if there was one."""
        if self.updating and not self.learning:
            with self.session.clock:
                self.end_update()
            self.times.begin()

    def end_fields(self) -> dict[str, Any]:
        """Log the means of what skrl has tracked since the last update."""
        tracked, self._tracked = self._tracked, {}
        for tag, values in tracked.items():  # such as "Stats / Inference time (ms)"
            self.logged[tag.replace(" / ", "/").replace("(", "").rstrip(")")] = sum(values) / len(values)
        coefficients = {"value": 2 * self._cfg.value_loss_scale, "entropy": self._cfg.entropy_loss_scale}
        return {"epochs": self._cfg.learning_epochs, "coefficients": coefficients}

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the memory, then parameters and gradients."""
        for name in ("observations", "rewards", "values", "log_prob", "returns", "advantages"):  # as they are computed
            tensor = self._memory.tensors.get(name)
            if tensor is not None:
                yield Candidate(name, tensor, environments=1)
        yield from of_parameters(self._parameters().items())

    def _facts(self, timesteps: int) -> dict[str, Any]:
        """Facts for the alarms about a run of that many steps of each environment."""
        agent, cfg, memory = self._agent, self._cfg, self._memory
        envs, kinds = memory.num_envs * self._ranks, {type(part) for part in agent.policy.modules()}
        cell = next((part for part in agent.policy.modules() if isinstance(part, nn.RNNBase)), None)
        groups, losses = self.groups(), ("policy_loss", "value_loss", "entropy_loss", "total_loss", "log_ratios")
        outcomes = ("transitions", "executed_actions", "stored_rewards")
        unchecked = dict.fromkeys(losses, "skrl keeps its losses to itself")
        unchecked |= dict.fromkeys(outcomes, "skrl keeps no copy of what its environments returned")
        if self._desired_kl is not None:
            unchecked["schedules"] = "the KL divergence sets the learning rate (KLAdaptiveLR)"
        return {
            "trainer": f"skrl {type(agent).__name__}",
            "setting_names": SETTING_NAMES,
            "value_coef_scale": 0.5,  # skrl's value loss is the mean squared error, ours half of it
            "total_steps": timesteps * envs,
            "num_envs": envs,
            "ranks": self._ranks,
            "precision": "fp16" if cfg.mixed_precision else "fp32",
            **optimizer_facts(agent.optimizer),
            "advantage_correction": 1,
            "groups": groups,
            "value_head": last_layer(groups.get("critic", ())),
            "heads": {HEAD: "continuous" if hasattr(agent.action_space, "high") else "categorical"},
            "max_grad_norm": cfg.grad_norm_clip if cfg.grad_norm_clip > 0 else None,
            "clip": cfg.ratio_clip,
            # in the units of the preprocessor, which change, if there is one
            "clip_value": None if self._converts_values else self._value_clip,
            "gamma": cfg.discount_factor,
            "gae_lambda": cfg.gae_lambda,
            "normalize_advantages": True,
            "normalize_minibatches": False,
            "num_steps": cfg.rollouts,
            "num_epochs": cfg.learning_epochs,
            "num_minibatches": cfg.mini_batches,
            "learning_rate": float(cfg.learning_rate[0]),
            "value_coef": 2 * cfg.value_loss_scale,
            "entropy_coef": cfg.entropy_loss_scale,
            "policy": "mlp" if cell is None else "gru" if isinstance(cell, nn.GRU) else "lstm",
            "lstm_size": None if cell is None else cell.hidden_size,
            "activation": "tanh" if nn.Tanh in kinds else "relu" if nn.ReLU in kinds else None,
            "normalize_observations": isinstance(self._normalizer, nn.Module),
            **dict.fromkeys(("normalize_rewards", "squashed", "correlated_noise"), False),
            "target_kl": cfg.kl_threshold or None,
            "desired_kl": self._desired_kl,
            UNCHECKED_FACT: unchecked,
        }


def attach_agent(telemetry: Telemetry, agent: Any) -> ObservedSource:
    """Make `telemetry` record every update of a `PPO` or `PPO_RNN` agent; a call of the result ends this.

        runner = Runner(env, config)
        attach_agent(telemetry, runner.agent)
        runner.run()

    Nothing that the agent computes changes: weights are bit-identical. At level OFF nothing is installed.

    Raises:
        TypeError: if `telemetry` is not a `Telemetry`, or the agent is not PPO.
    """
    missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(agent, name)]
    missing += [] if hasattr(getattr(agent, "cfg", None), "ratio_clip") else ["cfg.ratio_clip"]
    if missing or not isinstance(telemetry, Telemetry):
        raise TypeError(
            f"attach_agent takes a Telemetry and a PPO or PPO_RNN agent of skrl 2, got {type(telemetry).__name__} and "
            f"{type(agent).__name__}{f', which has no {missing[0]}' if missing else ''}"
        )
    if telemetry.level is Level.OFF:
        return ObservedSource(Hooks(), lambda: None)
    adapter = AgentListener(telemetry, agent)
    adapter.start()
    return ObservedSource(adapter.hooks, adapter.stop)
