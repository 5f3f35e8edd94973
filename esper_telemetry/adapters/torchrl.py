"""TorchRL: telemetry for PPO with `ClipPPOLoss`, in the user's own loop (`attach_loss`) and in a `Trainer` (`attach_trainer`).

The adapter reads data at the calls of the training loop. Advantages and returns are read when the value estimator (`GAE`) has computed
them. Ratios, distributions and values are read within the loss, and gradients when they are clipped. Losses are the loss module's own.
An update ends when the estimator has computed the advantages of other data, and when training ends. A `Trainer` reports its end.

Shapes: T steps, B environments, N rows of a minibatch, R rows of all M minibatches, D action dimensions, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.adapters.adapter import Adapter, last_layer, parameter_groups, plain_settings
from esper_telemetry.adapters.columns import HEAD, HeadColumns, head_columns, minibatch_means
from esper_telemetry.adapters.taps import listen
from esper_telemetry.core.facts import UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.record import Level
from esper_telemetry.events import MinibatchEnd, RolloutEnd
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.joining import joined_column, joined_minibatches
from esper_telemetry.updates.update import JoinedMinibatches

NORMALIZERS = frozenset({"VecNorm", "VecNormV2"})
"""Transforms of environments that normalise observations and rewards."""

SETTINGS = (
    *("clip_epsilon", "clip_value", "entropy_bonus", "entropy_coeff", "critic_coeff", "loss_critic_type"),
    *("normalize_advantage", "separate_losses", "delay_actor"),
)

STD_FLOOR = 1e-4
"""Smallest standard deviation by which TorchRL divides advantages."""

TANH_BOUND = 1 - 1e-6
"""Largest action of a squashed policy that is taken through the inverse of the squash, relative to the end of its range."""

MAX_ROUNDING = 1e-4
"""Nats by which log-probabilities of the same transition may differ, apart from a common constant."""


class LossListener(Adapter):
    """Emits the events of a training loop with a `ClipPPOLoss`, from `start` to `stop`.

    Args:
        loss: the loss module.
        optimizers: of its parameters.
        estimator: computes advantages; None if the loss does so itself: then the rollout is not known.
        frame_skip: environment steps of one frame.
        settings: further facts, which take precedence over the objects' attributes.

    Attributes:
        frames: environment steps that the trainer has counted; None if it counts none.
    """

    prefix = "torchrl"

    def __init__(
        self,
        telemetry: Telemetry,
        loss: Any,
        optimizers: Sequence[Optimizer],
        estimator: Any,
        *,
        frame_skip: int,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(telemetry, join=self.joined)
        self.frames: Callable[[], int] | None = None
        self.optimizers = optimizers
        self._loss, self._estimator, self._keys = loss, estimator, loss.tensor_keys
        self._frame_skip, self._settings = frame_skip, settings
        self._seen: tuple[Tensor, ...] = ()
        self._pass = self._learned_rows = 0
        self._advantages: Tensor | None = None
        self._forget_passes()

    def start(self) -> None:
        """Listen to the loss module, the optimizers and the estimator."""
        named = {
            id(parameter): name.replace("_network_params", "").replace(".module", "")
            for name, parameter in self._loss.named_parameters()
            if parameter.requires_grad
        }
        trained = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self.follow(self.optimizers, {named.get(id(p), f"parameter_{place}"): p for place, p in enumerate(trained)})
        parts = {
            "forward": self._after_loss,
            "_maybe_normalize_advantage": self._after_advantages,
            "_log_weight": self._after_ratio,
            "_critic_loss_inputs": self._after_critic,
        }
        for name, part in parts.items():
            if hasattr(self._loss, name):
                self.listen(self._loss, name, part)
        if self._estimator is not None:
            self.listen(self._estimator, "forward", self._after_estimator, timed=True)

    def rollout(self, batch: Any) -> None:
        """A batch with advantages was collected: begin an update, or the next pass over the current data."""
        if self._is_new(batch):
            self._begin(batch)
        elif self.step or self.row is not None:
            self.finish_minibatch()
            self._pass += 1

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters by part."""
        parts = (getattr(self._loss, f"{part}_network_params", None) for part in ("actor", "critic"))
        return parameter_groups(self.parameters, *(() if part is None else part.parameters() for part in parts))

    def end_fields(self) -> dict[str, Any]:
        """Return passes and coefficients, and log what a trainer logs as tensors."""
        self.logged = {name: plain_settings(value) for name, value in self.logged.items()}
        return {"epochs": (self.epoch if self.step else self._pass) + 1, "coefficients": self._coefficients()}

    def finish_minibatch(self) -> None:
        """Count the rows that were trained on."""
        if self.stepped and self.row is not None:
            self._learned_rows += len(self.row[0].log_ratio)
        super().finish_minibatch()

    # Taps.

    def _after_estimator(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        batch = args[0] if args else kwargs.get("tensordict")
        if batch is not None and hasattr(batch, "get"):
            self.rollout(batch)

    def _forget_passes(self) -> None:
        self._log_ratio: Tensor | None = None
        self._heads = HeadColumns()
        self._critic: tuple[Any, Any] = (None, None)

    def _after_advantages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        self.finish_minibatch()
        self._forget_passes()
        self._advantages = result.detach()

    def _after_ratio(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        log_weight, distribution, *_ = result
        self._log_ratio = log_weight.detach()
        self._heads = columns_of(distribution)

    def _after_critic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._critic = result[1].detach().flatten(), result[0].detach().flatten()

    def _after_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        log_ratio, advantages, heads, (values, returns) = self._log_ratio, self._advantages, self._heads, self._critic
        self._advantages = None
        self._forget_passes()
        if log_ratio is None or advantages is None or not torch.is_grad_enabled():
            return
        if not self.updating:
            self._begin(None)
        batch: Any = args[0] if args else kwargs["tensordict"]
        places, old = batch.get("index", None), batch.get(self._keys.sample_log_prob, None)
        # a loop that asks the estimator once does not say which pass this is
        rows = self.rollout_event.rewards.numel() if self.rollout_event is not None and not self._pass else 0
        self.begin_minibatch(self._learned_rows // rows if rows else self._pass)
        event = MinibatchEnd(
            self.epoch,
            self.step,
            log_ratio=log_ratio.flatten(),
            advantages=advantages.expand_as(log_ratio).flatten(),
            values=values,
            returns=returns,
            losses={name: x.detach().mean() for name, x in result.items() if name.startswith("loss_")},
            rows=places.flatten() if isinstance(places, Tensor) else None,
            **heads.map(lambda column: column.flatten(0, -2))._asdict(),
        )
        self.row = event, old.flatten() if isinstance(old, Tensor) else None

    # Updates.

    def _begin(self, batch: Any) -> None:
        """An update begins, with a rollout if one is known."""
        self.end_update()
        self._pass = self._learned_rows = 0
        if not self.update:
            settings = {name: plain_settings(getattr(self._loss, name, None)) for name in SETTINGS}
            config = {name: value for name, value in settings.items() if value is not None}
            self.begin_run({"loss": type(self._loss).__name__, **config}, {**self._facts(batch), **self._settings})
        steps = 0 if batch is None else batch.numel() * self._frame_skip
        counted = None if batch is None or self.frames is None else self.frames()
        rollout = None if batch is None else lambda: self._rollout(batch)
        self.begin_update(self.env_step + steps if counted is None else counted, rollout)

    def _is_new(self, batch: Any) -> bool:
        """Return False for data that the estimator has seen before: loops compute advantages again in each pass."""
        columns = [batch.get(self._keys.sample_log_prob, None), batch.get(("next", self._keys.reward), None)]
        now = tuple([column for column in columns if isinstance(column, Tensor)])
        known = len(now) == len(self._seen) and all(map(torch.equal, now, self._seen))
        if not known:
            self._seen = tuple([column.detach().clone() for column in now])
        return not known

    @torch.no_grad()
    def joined(self, rows: Sequence[tuple[MinibatchEnd, Tensor | None]]) -> JoinedMinibatches:
        """Return all minibatches of the update; `rows` have places in the replay buffer, and log-probabilities at collection."""
        events, old_log_probs = zip(*rows, strict=True)
        joined = joined_minibatches(events, with_critic=True)
        numbers = self._rows_of(joined.rows, joined_column(old_log_probs))
        old_values = None
        if self.rollout_event is not None and numbers is not None and joined.values is not None:
            old_values = self.rollout_event.values.flatten()[numbers]
        return joined._replace(losses=self._losses(joined), rows=numbers, old_values=old_values)

    def _rows_of(self, index: Tensor | None, old_log_probs: Tensor | None) -> Tensor | None:
        """Transitions [R] of the rollout, t B + b, from places in the replay buffer, which follow environment by environment.

        None if the log-probabilities do not match these transitions.
        """
        rollout = self.rollout_event
        if rollout is None or index is None or old_log_probs is None or int(index.max()) >= rollout.rewards.numel():
            return None
        steps, envs = rollout.rewards.shape
        index = index.to(rollout.rewards.device)
        rows = index % steps * envs + index // steps
        difference = rollout.log_probs.flatten()[rows] - old_log_probs.to(rollout.log_probs)
        return rows if bool((difference - difference[0]).abs().max() <= MAX_ROUNDING) else None

    def _losses(self, joined: JoinedMinibatches) -> dict[str, Tensor]:
        """Losses [M] of the loss module without their weights; the critic's is always half the mean squared error."""
        present, coefficients, losses = joined.losses, self._coefficients(), {}
        if "loss_objective" in present:
            losses["policy"] = present["loss_objective"]
        if "loss_entropy" in present and coefficients["entropy"]:
            losses["entropy"] = present["loss_entropy"] / coefficients["entropy"]
        if joined.values is not None and joined.returns is not None:
            losses["value"] = minibatch_means(0.5 * (joined.values - joined.returns).square(), joined.counts)
            if is_squared(self._loss) and "loss_critic" in present and coefficients.get("value"):
                losses["value"] = present["loss_critic"] / coefficients["value"]
        return losses

    def _coefficients(self) -> dict[str, float]:
        entropy, critic = (getattr(self._loss, name, None) for name in ("entropy_coeff", "critic_coeff"))
        weights = {"entropy": 0.0 if entropy is None else float(entropy)}
        if critic is not None:  # their value loss is the mean squared error, ours half of it
            weights["value"] = 2 * float(critic)
        return weights

    # Rollouts.

    def _rollout(self, batch: Any) -> RolloutEnd:
        """Return the event of a batch with its advantages.

        Batches have environments before time; a batch without environments has one. Actions of a squashed policy are taken before the
        squash, and its log-probabilities are about actions from -1 to 1. If the estimator has normalised the advantages, they are the
        targets minus the values.
        """
        keys, loss = self._keys, self._loss

        def grid(key: Any, *before: str) -> Tensor:
            """A column of numbers as [T, B]."""
            column: Tensor = batch.get((*before, *((key,) if isinstance(key, str) else key))).detach()
            return time_major(batch, column.reshape(batch.batch_size))

        values, returns, advantages = grid(keys.value), grid(keys.value_target), grid(keys.advantage)
        if getattr(self._estimator, "average_gae", False):
            advantages = returns - values
        next_values, ended = grid(keys.value, "next"), grid(keys.done, "next").bool()
        terminated = grid(keys.terminated, "next").bool() & ended
        distribution = acting_distribution(batch, loss)
        present = [batch.get(key, None) for key in loss.actor_network.in_keys]
        inputs = [column for column in present if isinstance(column, Tensor) and column.is_floating_point()]
        vectors = bool(inputs) and all(column.dim() == batch.batch_dims + 1 for column in inputs)
        observed = [time_major(batch, column.detach()) for column in inputs] if vectors else []
        return RolloutEnd(
            update=self.update,
            env_step=self.env_step,
            rewards=grid(keys.reward, "next"),
            values=values,
            advantages=advantages,
            returns=returns,
            log_probs=grid(keys.sample_log_prob) + log_range(distribution),
            ended=ended,
            terminated=terminated,
            next_values=torch.where(terminated, 0.0, next_values),
            actions={HEAD: rollout_actions(time_major(batch, batch.get(keys.action).detach()), distribution)},
            gamma=gamma_of(loss, self._estimator) or 1.0,
            observations=None if not observed else observed[0] if len(observed) == 1 else torch.cat(observed, -1),
            last_values=next_values[-1:],
            **columns_of(distribution).map(lambda column: time_major(batch, column))._asdict(),
        )

    # Facts.

    def _facts(self, batch: Any) -> dict[str, Any]:
        """Facts for the alarms about a run, from the objects' attributes; `batch` is the first one, None if it is not known."""
        loss, estimator, optimizer = self._loss, self._estimator, self.optimizers[0]
        distribution = None if batch is None else acting_distribution(batch, loss)
        own, averaged = (bool(getattr(loss, "normalize_advantage", False)), bool(getattr(estimator, "average_gae", False)))
        critic, squashed = _number(getattr(loss, "critic_coeff", None)), is_squashed(distribution)
        facts: dict[str, Any] = {
            "trainer": "torchrl",
            "num_envs": None if batch is None else batch.batch_size[:-1].numel(),
            "num_steps": None if batch is None else batch.batch_size[-1],
            "ranks": 1,
            "precision": "fp32",
            **optimizer_facts(optimizer),
            "advantage_correction": 1,
            "advantage_std_floor": STD_FLOOR,
            "groups": self.groups(),
            "value_head": last_layer([name for name in self.parameters if name.startswith("critic.")]),
            "clip": _number(getattr(loss, "clip_epsilon", None)),
            "clip_value": _number(getattr(loss, "clip_value", None)),
            "gamma": gamma_of(loss, estimator),
            "gae_lambda": _number(getattr(estimator, "lmbda", None)),
            "normalize_advantages": own or averaged,
            "normalize_minibatches": own,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "value_coef": None if critic is None else 2 * critic,  # their loss is the mean squared error, ours half of it
            "entropy_coef": _number(getattr(loss, "entropy_coeff", None)),
            "policy": "mlp",
            "squashed": squashed,
            "inverts_squash": squashed,  # the loss module gets actions after the squash
            "recomputes_advantages": True,  # loops ask the estimator again before each pass
            UNCHECKED_FACT: _unchecked(loss, estimator),
        }
        if distribution is not None:
            facts["heads"] = {HEAD: "categorical" if hasattr(distribution, "logits") else "continuous"}
        return {name: value for name, value in facts.items() if value is not None}


def columns_of(distribution: Any) -> HeadColumns:
    """Return the columns of a categorical or a Gaussian distribution, before its squash; none of others."""
    if hasattr(distribution, "logits") and not hasattr(distribution, "dists"):
        return head_columns({HEAD: distribution})
    means, stds = getattr(distribution, "loc", None), getattr(distribution, "scale", None)
    if isinstance(means, Tensor) and isinstance(stds, Tensor):
        return HeadColumns(means={HEAD: means.detach()}, log_std={HEAD: stds.detach().log()})
    return HeadColumns()


def is_squashed(distribution: Any) -> bool:
    """Return True for a Gaussian whose actions go through a tanh."""
    return any(kind.__name__ == "TanhNormal" for kind in type(distribution).__mro__)


def is_squared(loss: Any) -> bool:
    """Return True if the critic's loss is the squared error of its estimates, which are not cut."""
    return getattr(loss, "loss_critic_type", None) == "l2" and not getattr(loss, "clip_value", None)


def log_range(distribution: Any) -> float | Tensor:
    """Return the change of a squashed policy's log-probabilities if actions range from -1 to 1, as in `RolloutEnd`."""
    if not is_squashed(distribution):
        return 0.0
    half = (torch.as_tensor(distribution.high) - torch.as_tensor(distribution.low)) / 2
    return half.expand_as(distribution.loc[..., :1, :].reshape(-1, distribution.loc.shape[-1])[0]).log().sum()


@torch.no_grad()
def acting_distribution(batch: Any, loss: Any) -> Any:
    """Return the distribution that the actions of a batch were drawn from, by its parameters in the batch; None without them."""
    actor = loss.actor_network
    if not hasattr(actor, "build_dist_from_params"):
        return None
    try:
        return actor.build_dist_from_params(batch)
    except KeyError:  # the collector has left the parameters out
        return None


def time_major(batch: Any, column: Tensor) -> Tensor:
    """Return a column [B, T, ...], or [T, ...] of one environment, as [T, B, ...]; several dimensions of environments are one."""
    dims = batch.batch_dims
    if dims == 1:
        return column.unsqueeze(1)
    return column.flatten(0, dims - 2).transpose(0, 1)


def rollout_actions(actions: Tensor, distribution: Any) -> Tensor:
    """Return actions [T, B] that are choices, [T, B, D] before a squash."""
    if hasattr(distribution, "logits"):
        one_hot = actions.dim() > 2 and actions.shape[-1] > 1
        return (actions.argmax(-1) if one_hot else actions.reshape(actions.shape[:2])).long()
    actions = actions.unsqueeze(-1) if actions.dim() == 2 else actions
    if is_squashed(distribution):
        low, high = (torch.as_tensor(getattr(distribution, name), device=actions.device) for name in ("low", "high"))
        return torch.atanh((2 * (actions - low) / (high - low) - 1).clamp(-TANH_BOUND, TANH_BOUND))
    return actions


def gamma_of(loss: Any, estimator: Any) -> float | None:
    """Return the discount of the estimator, or of the loss module; None if neither has one."""
    own = getattr(loss, "_value_estimator", None)
    known = (getattr(one, "gamma", None) for one in (estimator, own))
    return next((_number(gamma) for gamma in known if gamma is not None), None)


def environment_facts(env: Any) -> dict[str, Any]:
    """Return the facts about an environment and its transforms; empty if the collector hides it."""
    transforms = {type(transform).__name__ for transform in getattr(getattr(env, "transform", None), "transforms", ())}
    while env is not None and hasattr(env, "base_env"):
        env = env.base_env
    name = getattr(env, "env_name", None)
    name = name[0] if isinstance(name, list) and name else name
    return {
        **({"env": str(name)} if name else {}),
        "normalize_observations": not transforms.isdisjoint({"ObservationNorm", *NORMALIZERS}),
        "normalize_rewards": not transforms.isdisjoint({"RewardScaling", *NORMALIZERS}),
    }


def _unchecked(loss: Any, estimator: Any) -> dict[str, str]:
    reasons = dict.fromkeys(
        ("transitions", "executed_actions", "stored_rewards"), "batches of collectors keep no copy of what environments returned"
    )
    reasons["total_loss"] = "the loop adds the losses"
    if not is_squared(loss):
        reasons["value_loss"] = f"the critic's loss is {getattr(loss, 'loss_critic_type', 'another one')}"
    if estimator is None:
        reasons |= dict.fromkeys(("advantages", "returns", "normalized_advantages"), "the loss computes the advantages")
    return reasons


def _number(value: Any) -> float | None:
    """A number that the module may hold in single precision."""
    return None if value is None or isinstance(value, bool) else float(f"{float(value):.7g}")


def attach_loss(
    telemetry: Telemetry,
    loss: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    estimator: Any = None,
    *,
    frame_skip: int = 1,
    facts: Mapping[str, Any] | None = None,
) -> LossListener | None:
    """Make `telemetry` record every update of a loop with a `ClipPPOLoss`; returns an object whose `stop()` ends this, None at level OFF.

        attach_loss(telemetry, loss_module, optimizer, gae, facts={"total_steps": 100_000, "env": "CartPole-v1"})
        for batch in collector:
            ...  # your loop, as it is

    Nothing that the loop computes changes: weights are bit-identical. Attach before the first batch, and before `torch.compile`.

    Args:
        loss: the loss module.
        optimizer: of its parameters, or several.
        estimator: the module that computes advantages, such as `GAE`; without it call `rollout(batch)` of what is returned, after the
            advantages of a batch are computed.
        frame_skip: environment steps of one frame.
        facts: of the run, such as `total_steps`, `env`, `horizon`, `reward_threshold`.

    Raises:
        TypeError: if the arguments are not a `Telemetry` and a PPO loss.
    """
    if not isinstance(telemetry, Telemetry) or not all(hasattr(loss, name) for name in ("_log_weight", "tensor_keys")):
        raise TypeError(f"attach_loss takes a Telemetry and a ClipPPOLoss, got {type(telemetry).__name__} and {type(loss).__name__}")
    if telemetry.level is Level.OFF:
        return None
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    adapter = LossListener(telemetry, loss, optimizers, estimator, frame_skip=frame_skip, settings=facts or {})
    adapter.start()
    return adapter


def attach_trainer(telemetry: Telemetry, trainer: Any, *, facts: Mapping[str, Any] | None = None) -> LossListener | None:
    """Make `telemetry` record every update of a TorchRL `Trainer` with a `ClipPPOLoss`, such as `PPOTrainer`; see `attach_loss`.

        trainer = PPOTrainer(...)
        attach_trainer(telemetry, trainer)
        trainer.train()

    What the trainer logs joins the records under `torchrl/`.
    """
    hook = trainer._modules.get("value_estimator")
    settings = {
        "total_steps": int(trainer.total_frames),
        "num_epochs": int(trainer.num_epochs),
        "max_grad_norm": float(trainer.clip_norm) if trainer.clip_grad_norm and trainer.clip_norm is not None else None,
        "trainer": f"torchrl {type(trainer).__name__}",
        **environment_facts(getattr(trainer.collector, "env", None)),
        **(facts or {}),
    }
    adapter = attach_loss(
        telemetry,
        trainer.loss_module,
        trainer.optimizer,
        getattr(hook, "value_estimator", None),
        frame_skip=int(trainer.frame_skip),
        facts=settings,
    )
    if adapter is not None:
        session = session_of(telemetry)

        def copy_log(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            adapter.logged.update({name: value for name, value in kwargs.items() if name != "log_pbar"})

        adapter.frames = lambda: int(trainer.collected_frames)
        trainer.register_op("post_steps", lambda: session.attempt(lambda one: one.end_update(), adapter))
        session.on_close(listen(trainer, "_log", copy_log, session.failed))
    return adapter
