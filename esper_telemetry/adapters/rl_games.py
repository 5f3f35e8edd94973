"""rl_games 1.6: telemetry for its PPO, continuous and discrete, as the observer of its `Runner`.

The rollout is read from the experience buffer, and the losses of minibatches from `train_result`. rl_games adds values to rewards at time
limits, and may normalise values and returns. So rewards are copied when they arrive; losses are in the normaliser's units, the columns of
minibatches are converted back.

Shapes: T steps, B environments, A actions, D action dimensions, N rows of a minibatch. A flat rollout has one environment after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.adapter import Adapter, named_parameters, plain_settings
from esper_telemetry.adapters.columns import HeadColumns, head_actions, head_names, join_columns, next_values
from esper_telemetry.adapters.taps import SurroundingTap
from esper_telemetry.core.event_parts import Scale
from esper_telemetry.core.facts import UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks, RolloutEnd
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.failure import Candidate, of_parameters
from esper_telemetry.updates.joining import joined_column, joined_heads
from esper_telemetry.updates.update import JoinedMinibatches

LIMIT = 5.0
"""Magnitude at which rl_games clips what it normalises."""

SETTING_NAMES = {
    "gae_lambda": "tau",
    "clip": "e_clip",
    "num_epochs": "mini_epochs",
    "rollout_size": "horizon_length x num_actors",
    "value_coef": "critic_coef",
    "max_grad_norm": "grad_norm",
}
"""rl_games' names of settings, if they differ."""

PARTS = {
    **dict.fromkeys(("mu", "sigma", "logits", "a_rnn", "a_layer_norm"), "actor"),
    **dict.fromkeys(("value", "critic_mlp", "critic_cnn", "c_rnn", "c_layer_norm"), "critic"),
}
"""Parts of a network by the first word of their parameters' names; others are the actor's if the network is separate, else shared."""

BATCH_COLUMNS = ("old_logp_actions", "advantages", "old_values", "returns", "rnn_masks")
"""Columns of a minibatch that are kept until the update ends."""

LOSSES = {"policy": 1.0, "value": 0.5, "entropy": -1.0}
"""Factors of the first losses in `train_result`: rl_games' value loss is the squared error."""


class Row(NamedTuple):
    """Tensors of a minibatch. Columns are computed from the tensors of all minibatches when the update ends."""

    epoch: int
    columns: dict[str, Tensor]
    heads: HeadColumns
    losses: list[Tensor]
    rows: Tensor | None


class AlgoListener(Adapter):
    """Emits the events of an `A2CAgent` or a `DiscreteA2CAgent` while it trains."""

    prefix = "rl_games"
    ends_updates = True

    def __init__(self, telemetry: Telemetry, algo: Any, hooks: Hooks) -> None:
        super().__init__(telemetry, hooks=hooks, join=self.joined)
        self._algo = algo
        self.adapts_rate = True
        count = len(algo.actions_num) if isinstance(algo.actions_num, list) else 1
        self._head_names, self._continuous = head_names(count), not algo.is_discrete
        self._output: Mapping[str, Any] | None = None
        self._count = 0
        self._forget_steps()

    def start(self) -> None:
        """Training begins: listen to the agent and its parts."""
        from rl_games.common import a2c_common  # it imports torch's function by name

        algo = self._algo
        self.update, self.env_step = int(algo.epoch_num), int(algo.frame) // algo.num_agents
        self.begin_run(plain_settings(algo.config), self._facts())
        self.times.begin()
        self.clipping_module = a2c_common
        self.follow([algo.optimizer], self._parameters())
        if not self.sees_clips:
            self.listen(algo.scaler, "unscale_", lambda *_: self.emit_gradients(float(algo.grad_norm)))  # they are truncated next
        self.listen(algo, "env_step", self._after_env_step)
        self.listen(algo, "rewards_shaper", lambda _args, _kwargs, rewards: self._shaped.append(rewards.clone()))  # values may be added
        self.listen(algo, "get_action_values", self._after_act)
        self.listen(algo, "get_masked_action_values", self._after_act)
        self.listen(algo, "get_values", self._after_last_values)
        self.listen(algo, "prepare_dataset", self._after_dataset, timed=True)
        self.listen(algo.model, "forward", self._after_model)
        self.listen(algo, "calc_gradients", self._after_gradients)
        self.listen(algo, "train_epoch", lambda *_: self.end_learning(), timed=True)
        self.listen(algo, "update_epoch", self._before_epoch, timed=True)
        if algo.writer is not None:
            self.listen(algo.writer, "add_scalar", self._after_scalar)

    # Rollouts.

    def _forget_steps(self) -> None:
        self._rewards: list[Tensor] = []
        self._shaped: list[Tensor] = []
        self._time_outs: list[Tensor] = []
        self._logits: list[HeadColumns] = []
        self._last_values: Tensor | None = None

    def _after_env_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The environments answered; they may write the next answer into the same tensors."""
        _, rewards, _, infos = result
        self._rewards.append(rewards.clone())
        if isinstance(infos, dict) and "time_outs" in infos:
            self._time_outs.append(torch.as_tensor(infos["time_outs"], device=rewards.device).bool().clone())

    def _after_act(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        if not self._continuous:
            self._logits.append(self._columns(result))

    def _after_last_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        self._last_values = result.sum(-1)

    def _after_dataset(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The rollout is complete, its advantages are in the dataset: the update begins."""
        algo, batch = self._algo, (args[0] if args else kwargs["batch_dict"])
        env_step = self.env_step + algo.horizon_length * algo.num_actors * algo.world_size
        self.begin_update(env_step, lambda: self._rollout(batch), environment=batch.get("step_time"))
        self._count = 0
        # transitions t B + b in the order of the dataset, in which an environment's steps follow one another
        rows = torch.arange(algo.horizon_length * algo.num_actors * algo.num_agents, device=algo.ppo_device)
        self._order = rows.view(algo.horizon_length, -1).t().flatten()
        self.follow([algo.optimizer], self._parameters())
        self._forget_steps()

    def _rollout(self, batch: Mapping[str, Any]) -> RolloutEnd:
        """Return the event of the rollout. At time limits rl_games adds the value of the last state acted in: `next_values` are these."""
        algo, buffer = self._algo, self._algo.experience_buffer.tensor_dict
        values = buffer["values"].sum(-1)
        steps, envs = values.shape
        returns = batch["returns"].view(envs, steps, -1).transpose(0, 1).sum(-1)
        ended = torch.cat([buffer["dones"][1:].bool(), algo.dones.unsqueeze(0).bool()])
        limits, bootstrap = torch.zeros_like(ended), None
        if len(self._time_outs) == steps:
            limits = torch.stack(self._time_outs).view_as(ended) & ended
            bootstrap = torch.where(limits, values, 0.0) if algo.value_bootstrap else None
        rewards, raw = (torch.stack(column).sum(-1) for column in (self._shaped, self._rewards))
        assert self._last_values is not None
        heads = _heads(join_columns(self._logits, torch.stack) if self._logits else self._columns(buffer))
        observations, scales = buffer["obses"], {}
        if not isinstance(observations, Tensor) or not observations.is_floating_point():
            observations = None
        elif algo.normalize_input and observations.dim() == 3:
            mean, deviation = _statistics(_model(algo).running_mean_std)
            observations = ((observations - mean) / deviation).clamp(-LIMIT, LIMIT)
            scales["obs"] = Scale(mean, deviation, LIMIT, observations)
        actions = head_actions(buffer["actions"], self._head_names, self._head_names if self._continuous else (), values.shape)
        return RolloutEnd(
            update=self.update,
            env_step=self.env_step,
            rewards=rewards,
            raw_rewards=None if torch.equal(rewards, raw) else raw,
            values=values,
            advantages=returns - values,
            returns=returns,
            log_probs=-buffer["neglogpacs"],
            ended=ended,
            terminated=ended & ~limits,
            next_values=next_values(values, self._last_values, ended, bootstrap),
            actions=actions,
            gamma=algo.gamma,
            scales=scales,
            observations=observations,
            last_values=self._last_values.reshape(1, -1),
            time_limits=limits,
            seen_difference="other_statistics" if algo.normalize_input else None,
            **heads,
        )

    def _columns(self, output: Mapping[str, Any]) -> HeadColumns:
        """Columns of the policy's distributions, from an output of the model or from the buffer; `log_std` holds standard deviations."""
        if self._continuous:
            means, deviations = ({self._head_names[0]: output[name].detach()} for name in ("mus", "sigmas"))
            return HeadColumns(means=means, log_std=deviations)
        logits = output["logits"] if isinstance(output["logits"], list) else [output["logits"]]
        return HeadColumns(logits=dict(zip(self._head_names, (column.detach() for column in logits), strict=True)))

    # Updates.

    def _parameters(self) -> dict[str, Tensor]:
        named = named_parameters(network=_model(self._algo))
        return {name.replace("network.a2c_network.", ""): p for name, p in named.items() if p.requires_grad}

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters by part; `lstm` has recurrent layers."""
        rest = "actor" if self._algo.has_central_value or _model(self._algo).a2c_network.separate else "shared"
        groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": [], "lstm": []}
        for name in self._parameters():
            groups[PARTS.get(name.split(".")[0], rest)].append(name)
            if name.split(".")[0].endswith("rnn"):
                groups["lstm"].append(name)
        return {part: names for part, names in groups.items() if names}

    def _after_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        if self.learning:
            self.begin_minibatch(self._count // len(self._algo.dataset))
            self._count += 1
            if hasattr(self._algo.model, "_orig_mod"):  # a compiled model may write the next output into the same tensors
                result = {name: x.clone() if isinstance(x, Tensor) else x for name, x in result.items()}
            self._output = result

    def before_step(self, optimizer: Any) -> None:
        """Measure gradients that are not truncated, unless the optimizer itself removes their scale."""
        if not self._algo.scaler.is_enabled():
            super().before_step(optimizer)

    def _after_gradients(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The optimizer has stepped, and the losses are in `train_result`."""
        output, self._output = self._output, None
        if output is None:
            return
        algo, batch = self._algo, (args[0] if args else kwargs["input_dict"])
        columns = {name: batch[name] for name in BATCH_COLUMNS if batch.get(name) is not None}
        columns |= {name: output[name].detach() for name in ("prev_neglogp", "values") if name in output}
        losses = [loss.detach() for loss in algo.train_result[: len(LOSSES)]]
        rows = None if algo.dataset.permute else self._order[slice(*algo.dataset.last_range)]
        self.row = Row(self.epoch, columns, self._columns(output), losses, rows)

    @torch.no_grad()
    def joined(self, rows: Sequence[Row]) -> JoinedMinibatches:
        """Return all minibatches of the update; values and returns in the units of rewards, losses in the normaliser's."""
        algo, rollout = self._algo, self.rollout_event
        epochs, parts, heads, losses, places = zip(*rows, strict=True)
        columns, named_losses = joined_heads(parts), zip(LOSSES.items(), zip(*losses, strict=True), strict=True)
        joined = JoinedMinibatches(
            epochs=epochs,
            counts=tuple([part["prev_neglogp"].shape[0] for part in parts]),
            log_ratio=columns["old_logp_actions"] - columns["prev_neglogp"],
            advantages=columns["advantages"],
            valid=columns["rnn_masks"].bool() if "rnn_masks" in columns else None,
            losses={name: scale * torch.stack(own) for (name, scale), own in named_losses if name != "value" or algo.has_value_loss},
            rows=joined_column(places),
            **_heads(join_columns(heads, torch.cat)),
        )
        if algo.has_central_value or (algo.normalize_value and (rollout is None or joined.rows is None)):
            return joined
        values, stored, targets = (columns[name].sum(-1) for name in ("values", "old_values", "returns"))
        if algo.normalize_value and rollout is not None and joined.rows is not None:
            mean, deviation = _statistics(algo.value_mean_std)
            values = values * deviation + mean
            stored, targets = (column.flatten()[joined.rows] for column in (rollout.values, rollout.returns))
        return joined._replace(values=values, old_values=stored, returns=targets)

    def _before_epoch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """rl_games has logged the last update, and collects the next rollout."""
        self.end_update()
        self.times.begin()

    def _after_scalar(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Copy a number that rl_games logs, unless it repeats the number over seconds or updates."""
        tag, value = (*args, *kwargs.values())[:2]
        value = value.detach().cpu() if isinstance(value, Tensor) else value
        if not tag.endswith(("/time", "/iter")) and np.size(value) == 1:
            self.logged[tag.removesuffix("/step")] = np.asarray(value).item()

    def end_fields(self) -> dict[str, Any]:
        """Return passes and coefficients, which schedules change."""
        coefficients = {"value": float(self._algo.critic_coef), "entropy": float(self._algo.entropy_coef)}
        return {"epochs": self._algo.mini_epochs_num, "coefficients": coefficients}

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the experience buffer, then parameters and gradients."""
        tensors = getattr(getattr(self._algo, "experience_buffer", None), "tensor_dict", {})
        for name in ("obses", "rewards", "values", "neglogpacs"):
            tensor = tensors.get(name)
            if isinstance(tensor, Tensor):
                yield Candidate(name, tensor, environments=1)
        yield from of_parameters(self._parameters().items())

    def _facts(self) -> dict[str, Any]:
        algo, model = self._algo, _model(self._algo)
        envs = algo.num_actors * algo.num_agents * algo.world_size
        steps, frames = algo.horizon_length * algo.num_actors * algo.world_size, int(algo.max_frames)
        total = int(algo.max_epochs) * steps if algo.max_epochs > 0 else frames if frames > 0 else None
        cell, kinds = getattr(model.a2c_network, "rnn_name", None), {type(part) for part in model.modules()}
        on_tensor_cores = "cuda" in str(algo.ppo_device) and torch.backends.cuda.matmul.allow_tf32
        adaptive, groups = bool(algo.is_adaptive_lr), self.groups()
        losses = ("policy_loss", "value_loss", "entropy_loss", "total_loss", "log_ratios")
        outcomes = ("transitions", "executed_actions", "stored_rewards")
        unchecked = {
            **dict.fromkeys(losses, "rl_games keeps the columns of its losses to itself"),
            **dict.fromkeys(outcomes, "rl_games keeps no copy of what its environments returned"),
            **({"schedules": "the KL divergence sets the learning rate (lr_schedule: adaptive)"} if adaptive else {}),
        }
        return {
            "trainer": f"rl_games {type(algo).__name__}",
            "setting_names": SETTING_NAMES,
            "total_steps": total,
            "num_envs": envs,
            "ranks": algo.world_size,
            "precision": "bf16" if algo.mixed_precision else "tf32" if on_tensor_cores else "fp32",
            **optimizer_facts(algo.optimizer),
            "advantage_correction": 1,
            "groups": groups,
            "value_head": [name for name in groups.get("critic", ()) if name.startswith("value.")],
            "heads": dict.fromkeys(self._head_names, "continuous" if self._continuous else "categorical"),
            "max_grad_norm": algo.grad_norm if algo.truncate_grads else None,
            "clip": algo.e_clip,
            # in the units of the normaliser, which change, if there is one
            "clip_value": algo.e_clip if algo.clip_value and not algo.normalize_value else None,
            "gamma": algo.gamma,
            "gae_lambda": algo.tau,
            "normalize_advantages": bool(algo.normalize_advantage),
            "normalize_minibatches": False,
            "num_steps": algo.horizon_length,
            "num_epochs": algo.mini_epochs_num,
            "num_minibatches": algo.num_minibatches,
            "learning_rate": float(algo.last_lr),
            "value_coef": algo.critic_coef,
            "entropy_coef": algo.entropy_coef,
            "policy": cell if algo.is_rnn else "mlp",
            "lstm_size": model.a2c_network.rnn_units if algo.is_rnn else None,
            "activation": "tanh" if nn.Tanh in kinds else "relu" if nn.ReLU in kinds else None,
            "normalize_observations": bool(algo.normalize_input),
            **dict.fromkeys(("normalize_rewards", "squashed", "correlated_noise"), False),
            "desired_kl": algo.kl_threshold if adaptive else None,
            UNCHECKED_FACT: unchecked,
        }


class TelemetryObserver:
    """An observer that records every update of the `Runner` it is given to, and passes everything on to another observer.

        runner = Runner(TelemetryObserver(telemetry, IsaacAlgoObserver()))

    Nothing that the agent computes changes: weights are bit-identical. At level OFF nothing is installed.

    Args:
        telemetry: receives the records.
        observer: that the runner would have; rl_games' default one if it is None.

    Attributes:
        hooks: emit the events.

    Raises:
        TypeError: if `telemetry` is not a `Telemetry`, or, when the agent is created, if it is not PPO.
    """

    def __init__(self, telemetry: Telemetry, observer: Any = None) -> None:
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"TelemetryObserver takes a Telemetry, got {type(telemetry).__name__}")
        if observer is None:
            from rl_games.common.algo_observer import DefaultAlgoObserver

            observer = DefaultAlgoObserver()
        self.hooks = Hooks()
        self._telemetry, self._observer = telemetry, observer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "_observer":  # a copy has no attributes yet
            raise AttributeError(name)
        method: Callable[..., Any] = getattr(self._observer, name)
        return method

    def after_init(self, algo: Any) -> None:
        """See rl_games' `AlgoObserver`: the agent is complete but for its compilation and its checkpoint."""
        self._observer.after_init(algo)
        if not hasattr(algo, "calc_gradients") or not hasattr(algo, "e_clip"):
            raise TypeError(f"TelemetryObserver watches PPO, got {type(algo).__name__}")
        if self._telemetry.level is Level.OFF:
            return
        session, adapter = session_of(self._telemetry), AlgoListener(self._telemetry, algo, self.hooks)
        start, stop = (lambda: session.attempt(AlgoListener.start, adapter)), (lambda: adapter.stop())
        tap = SurroundingTap(algo, "train", start, stop)
        session.on_close(tap.remove)


def _model(algo: Any) -> Any:
    """The model itself, not what `torch.compile` has made of it."""
    return getattr(algo.model, "_orig_mod", algo.model)


def _heads(columns: HeadColumns) -> dict[str, Any]:
    """Return the columns as fields of an event, with logarithms of standard deviations."""
    return columns._replace(log_std={head: deviation.log() for head, deviation in columns.log_std.items()})._asdict()


def _statistics(normalizer: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a `RunningMeanStd`."""
    return normalizer.running_mean.float(), (normalizer.running_var.float() + normalizer.epsilon).sqrt()
