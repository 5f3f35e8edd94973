"""TorchRL: telemetry for PPO with `ClipPPOLoss`, in a loop of the user's own (`attach_loss`) and in a `Trainer` (`attach_trainer`).

The loss module is asked by nobody but the training loop, so everything is read where it passes: advantages and returns where the value
estimator (`GAE`) has computed them, ratios, distributions and values within the loss, gradients where they are clipped. All taps stand on
these objects, and a loop needs no other line. Losses are the loss module's own.

An update is over when the estimator has computed advantages of other data, and when training ends. A `Trainer` says so itself.

Shapes: T steps, B environments, N rows of a minibatch, R rows of all M minibatches, D action dimensions, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import EpisodeCounter, HeadColumns, join_columns, numbers_by_key
from esper_telemetry.adapters.taps import Listener, listen, listen_to_clipping
from esper_telemetry.adapters.torchrl.facts import (
    config_of,
    environment_facts,
    facts_of,
    gamma_of,
    groups_of,
    is_squared,
    nonfinite_candidates,
    parameters_of,
)
from esper_telemetry.adapters.torchrl.rollouts import columns_of, rollout_event
from esper_telemetry.core import tensors as ops
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.record import Level
from esper_telemetry.events import BackwardEnd, Hooks, OptimizerStep, Remover, RolloutEnd, RunStart, UpdateStart
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.joining import joined_column
from esper_telemetry.updates.update import JoinedMinibatches

PREFIX = "torchrl"
"""First segment of the keys of what a `Trainer` logs itself."""


MAX_ROUNDING = 1e-4
"""Nats by which log-probabilities of the same transition differ, after a constant that all of them have."""


class Row(NamedTuple):
    """A minibatch as the loss module has evaluated it.

    Attributes:
        epoch: pass over the rollout, from 0.
        log_ratio, advantages: [N], the latter as they multiply the ratio.
        heads: the policy's distribution.
        values, returns: [N], of the critic now and its targets; None without a critic.
        old_log_probs: [N].
        losses: by name, 0-d.
        places: [N], place of each row in the replay buffer; None where it has none.
    """

    epoch: int
    log_ratio: Tensor
    advantages: Tensor
    heads: HeadColumns
    values: Tensor | None
    returns: Tensor | None
    old_log_probs: Tensor | None
    losses: Mapping[str, Tensor]
    places: Tensor | None


class Parts:
    """What a minibatch has shown so far, between the calls of the loss module's parts."""

    def __init__(self) -> None:
        self.advantages: Tensor | None = None
        self.log_ratio: Tensor | None = None
        self.heads = HeadColumns()
        self.values: Tensor | None = None
        self.returns: Tensor | None = None


class LossListener:
    """Emits the events of a training loop with a `ClipPPOLoss`, from `start` to `stop`.

    Args:
        loss: the loss module.
        optimizers: of its parameters.
        estimator: computes advantages; None where the loss does so itself, then the rollout is not known.
        frame_skip: environment steps of one frame.
        settings: further facts, and those that replace what is read from the objects.

    Attributes:
        hooks: emits the events, also to listeners of your own.
        frames: environment steps that the trainer has counted; None where it counts none.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        loss: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        estimator: Any,
        *,
        frame_skip: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.hooks = Hooks()
        self.frames: Callable[[], int] | None = None
        self._telemetry, self._session = telemetry, session_of(telemetry)
        self._loss, self._optimizers, self._estimator = loss, tuple(optimizers), estimator
        self._frame_skip, self._settings = frame_skip, dict(settings or {})
        self._keys = loss.tensor_keys
        self._taps: list[Remover] = []
        self._started = False
        self._update = self._env_step = self._gradient_step = 0
        self._counter: EpisodeCounter | None = None
        self._seen: tuple[Tensor, ...] = ()
        self._logged: dict[str, Any] = {}
        self._times = PhaseTimes()
        self._gamma = 1.0
        self._record = UpdateRecorder(self._session, self, self._joined)
        self._begin()

    def _begin(self) -> None:
        self._updating = self._stepped = self._emitted = False
        self._epoch = self._step = self._learned_rows = self._last_epoch = 0
        self._open: Row | None = None
        self._rollout: RolloutEnd | None = None
        self._parts = Parts()

    def start(self) -> None:
        """Listen."""
        loss, failed = self._loss, self._session.failed
        names = {id(parameter): name for name, parameter in parameters_of(loss).items()}
        trained = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = {names.get(id(p), f"parameter_{place}"): p for place, p in enumerate(trained)}
        self._ids = {*map(id, trained)}
        parts = {
            "forward": self._after_loss,
            "_maybe_normalize_advantage": self._after_advantages,
            "_log_weight": self._after_ratio,
            "_critic_loss_inputs": self._after_critic,
        }
        self._taps = [self._listen(loss, name, part) for name, part in parts.items() if hasattr(loss, name)]
        if self._estimator is not None:
            self._taps.append(self._listen(self._estimator, "forward", self._after_estimator))
        for optimizer in self._optimizers:
            before = optimizer.register_step_pre_hook(self._contained(self._before_step))
            after = optimizer.register_step_post_hook(self._contained(self._after_step))
            self._taps += [before.remove, after.remove]
        clipping = listen_to_clipping(self, failed)
        if clipping is not None:
            self._taps.append(clipping)

    def stop(self) -> None:
        """Listen to nothing any more; emit what is open first."""
        while self._taps:
            self._taps.pop()()
        self._session.attempt(lambda listener: listener.end_update(), self)

    def rollout(self, batch: Any) -> None:
        """A batch was collected, and has its advantages; called by loops whose estimator is not known."""
        if self._is_new(batch):
            self.end_update()
            self._begin_update(batch)
        elif self._step or self._open is not None:
            self._finish_minibatch()
            self._epoch += 1

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Add what a trainer logs to the record of the update under way."""
        self._logged.update(numbers)

    def end_update(self) -> None:
        """Write the record of the update under way, if there is one."""
        self._finish_minibatch()
        if not self._updating:
            return
        self._updating = False
        self._times.end("update")
        self._gradient_step += self._step
        logged = {name: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for name, x in self._logged.items()}
        self._telemetry.log(numbers_by_key(PREFIX, logged))
        self._logged = {}
        self._record.end(
            (self._update, self._env_step, self._gradient_step),
            self._optimizers,
            self._parameters,
            lambda: groups_of(self._loss, self._parameters),
            self._times,
            epochs=(self._last_epoch if self._step else self._epoch) + 1,
            coefficients=self._coefficients(),
        )
        self._begin()

    # Taps.

    def _after_estimator(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        batch = args[0] if args else kwargs.get("tensordict")
        if batch is not None and hasattr(batch, "get"):
            with self._session.clock:
                self.rollout(batch)

    def _after_advantages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        self._finish_minibatch()
        self._parts = Parts()
        self._parts.advantages = result.detach()

    def _after_ratio(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        log_weight, distribution, *_ = result
        self._parts.log_ratio = log_weight.detach()
        self._parts.heads = columns_of(distribution)

    def _after_critic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._parts.returns, self._parts.values = result[0].detach(), result[1].detach()

    def _after_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The loss of a minibatch is computed."""
        parts, self._parts = self._parts, Parts()
        if parts.log_ratio is None or parts.advantages is None or not torch.is_grad_enabled():
            return
        if not self._updating:
            self._begin_update(None)
        batch: Any = args[0] if args else kwargs["tensordict"]
        places, old = batch.get("index", None), batch.get(self._keys.sample_log_prob, None)
        losses = {name: result.get(name).detach() for name in result.keys() if name.startswith("loss_")}  # noqa: SIM118
        self._open = Row(
            epoch=self._epoch,
            log_ratio=parts.log_ratio.flatten(),
            advantages=parts.advantages.expand_as(parts.log_ratio).flatten(),
            heads=parts.heads.map(lambda column: column.flatten(0, -2)),
            values=None if parts.values is None else parts.values.flatten(),
            returns=None if parts.returns is None else parts.returns.flatten(),
            old_log_probs=old.flatten() if isinstance(old, Tensor) else None,
            losses=losses,
            places=places.flatten() if isinstance(places, Tensor) else None,
        )
        self._emitted = False

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for parameters that an optimizer of this loss trains, while a minibatch is open."""
        return self._open is not None and any(id(parameter) in self._ids for parameter in parameters)

    def before_clip(self, max_norm: float, norms: Tensor | None) -> None:
        """Gradients are about to be clipped."""
        self._emit_gradients(float(max_norm))

    def _before_step(self, optimizer: Any) -> None:
        self._emit_gradients(None)

    def _after_step(self, optimizer: Any) -> None:
        """An optimizer took a step; of several the minibatch has one each."""
        if self._open is None:
            return
        self._stepped = True
        if self.hooks.wants(OptimizerStep):
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parameters = {name: p for name, p in self._parameters.items() if id(p) in own}
            self.hooks.emit(OptimizerStep(self._epoch, self._step, optimizer, parameters))
        if len(self._optimizers) == 1:
            self._finish_minibatch()

    # Updates.

    def _begin_update(self, batch: Any) -> None:
        """An update begins, with a rollout where one is known."""
        self._times.end("rollout")
        self._update += 1
        self._updating = True
        if not self._started:
            self._started = True
            self._gamma = gamma_of(self._loss, self._estimator) or 1.0
            facts = facts_of(self._loss, self._optimizers, self._estimator, batch, self._parameters) | self._settings
            self.hooks.emit(RunStart(config_of(self._loss), facts, 0, 0, 0))
        if batch is not None:
            steps = batch.numel() * self._frame_skip
            self._env_step = self._env_step + steps if self.frames is None else max(self.frames(), self._env_step)
            self._session.attempt(lambda listener: listener._emit_rollout(batch), self)
        if self._rollout is None:
            self.hooks.emit(UpdateStart(self._update, self._env_step))
        self._times.begin()

    def _emit_rollout(self, batch: Any) -> None:
        self._rollout = rollout = rollout_event(
            batch,
            self._loss,
            self._estimator,
            gamma=self._gamma,
            update=self._update,
            env_step=self._env_step,
        )
        self.hooks.emit(rollout)
        if self._counter is None:
            self._counter = EpisodeCounter(rollout.ended.shape[1], complete=True)
        episodes = self._counter.episodes(rollout.rewards, rollout.ended, self._env_step)
        if episodes is not None:
            self.hooks.emit(episodes)

    def _is_new(self, batch: Any) -> bool:
        """Return False for the data that the estimator has seen before, whose advantages it computes once more in each pass."""
        columns = [batch.get(self._keys.sample_log_prob, None), batch.get(("next", self._keys.reward), None)]
        now = tuple([column for column in columns if isinstance(column, Tensor)])
        known = len(now) == len(self._seen) and all(map(torch.equal, now, self._seen))
        if not known:
            self._seen = tuple([column.detach().clone() for column in now])
        return not known

    def _finish_minibatch(self) -> None:
        """The open minibatch is done; one that led to no step is left out."""
        row, self._open = self._open, None
        if row is not None and self._stepped:
            if not row.epoch and self._rollout is not None:  # a loop that asks the estimator once
                row = row._replace(epoch=self._learned_rows // self._rollout.rewards.numel())
            self._last_epoch, self._learned_rows = row.epoch, self._learned_rows + len(row.log_ratio)
            self._record.minibatch(row)
            self._step += 1
        self._stepped = False

    @torch.no_grad()
    def _emit_gradients(self, max_norm: float | None) -> None:
        """Emit the norms of all gradients, once per minibatch; where nothing is clipped, `max_norm` is None."""
        if self._open is None or self._emitted:
            return
        self._emitted = True
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if gradients:
            norms = ops.gradient_norms(list(gradients.values()))
            self.hooks.emit(BackwardEnd(self._epoch, self._step, self._parameters, tuple(gradients), norms, max_norm))

    @torch.no_grad()
    def _joined(self, rows: Sequence[Row]) -> JoinedMinibatches:
        """Return all minibatches of the update."""
        fields: Any = Row._make(zip(*rows, strict=True))  # each field of all minibatches
        counts = tuple(map(len, fields.log_ratio))
        values, returns = joined_column(fields.values), joined_column(fields.returns)
        numbers = self._rows_of(joined_column(fields.places), joined_column(fields.old_log_probs))
        old_values = None
        if self._rollout is not None and numbers is not None and values is not None:
            old_values = self._rollout.values.flatten()[numbers]
        return JoinedMinibatches(
            epochs=fields.epoch,
            counts=counts,
            log_ratio=torch.cat(fields.log_ratio),
            advantages=torch.cat(fields.advantages),
            valid=None,
            losses=self._losses(fields.losses, values, returns, counts),
            rows=numbers,
            values=values,
            old_values=old_values,
            returns=returns,
            **join_columns(fields.heads, torch.cat)._asdict(),
        )

    def _rows_of(self, index: Tensor | None, old_log_probs: Tensor | None) -> Tensor | None:
        """Transitions [R] of the rollout, t B + b, from places in the replay buffer, which follow environment by environment; None where
        log-probabilities say that these are others.
        """
        rollout = self._rollout
        if rollout is None or index is None or old_log_probs is None or int(index.max()) >= rollout.rewards.numel():
            return None
        steps, envs = rollout.rewards.shape
        index = index.to(rollout.rewards.device)
        rows = index % steps * envs + index // steps
        difference = rollout.log_probs.flatten()[rows] - old_log_probs.to(rollout.log_probs)
        return rows if bool((difference - difference[0]).abs().max() <= MAX_ROUNDING) else None

    def _losses(
        self,
        losses: Sequence[Mapping[str, Tensor]],
        values: Tensor | None,
        returns: Tensor | None,
        counts: Sequence[int],
    ) -> dict[str, Tensor]:
        """Losses [M] of the loss module without their weights; half the mean squared error of the critic, whatever its loss is."""
        coefficients, joined = self._coefficients(), {}
        present = {name: torch.stack([part[name].mean() for part in losses]) for name in losses[0]}
        if "loss_objective" in present:
            joined["policy"] = present["loss_objective"]
        if "loss_entropy" in present and coefficients.get("entropy"):
            joined["entropy"] = present["loss_entropy"] / coefficients["entropy"]
        if values is not None and returns is not None:
            errors = 0.5 * (values - returns).square()
            joined["value"] = torch.stack([part.mean() for part in errors.split(list(counts))])
            if is_squared(self._loss) and "loss_critic" in present and coefficients.get("value"):
                joined["value"] = present["loss_critic"] / coefficients["value"]
        return joined

    def _coefficients(self) -> dict[str, float]:
        """Weights of the losses now; of a critic with another loss than the squared error there is none."""
        entropy, critic = (getattr(self._loss, name, None) for name in ("entropy_coeff", "critic_coeff"))
        weights = {"entropy": 0.0 if entropy is None else float(entropy)}
        if critic is not None:  # their value loss is the mean squared error, ours half of it
            weights["value"] = 2 * float(critic)
        return weights

    def _listen(self, owner: object, name: str, listener: Listener) -> Remover:
        return listen(owner, name, listener, self._session.failed)

    def _contained(self, function: Callable[[Any], None]) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                function(optimizer)
            except Exception as error:  # a bug of ours must not reach the trainer
                self._session.failed(function, error)

        return hook


def attach_loss(
    telemetry: Telemetry,
    loss: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    estimator: Any = None,
    *,
    frame_skip: int = 1,
    facts: Mapping[str, Any] | None = None,
) -> LossListener | None:
    """Make `telemetry` record every update of a loop with a `ClipPPOLoss`; returns what ends this by `stop()`, None at level OFF.

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
        TypeError: for something else than a `Telemetry` and a PPO loss.
    """
    if not isinstance(telemetry, Telemetry) or not all(hasattr(loss, name) for name in ("_log_weight", "tensor_keys")):
        raise TypeError(
            f"attach_loss takes a Telemetry and a ClipPPOLoss, got {type(telemetry).__name__} and {type(loss).__name__}"
        )
    if telemetry.level is Level.OFF:
        return None
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    listener = LossListener(telemetry, loss, optimizers, estimator, frame_skip=frame_skip, settings=facts)
    session = session_of(telemetry)
    session.search_on_failure(lambda: nonfinite_candidates(loss))
    session.on_close(listener.stop)
    listener.start()
    return listener


def attach_trainer(
    telemetry: Telemetry, trainer: Any, *, facts: Mapping[str, Any] | None = None
) -> LossListener | None:
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
    listener = attach_loss(
        telemetry,
        trainer.loss_module,
        trainer.optimizer,
        getattr(hook, "value_estimator", None),
        frame_skip=int(trainer.frame_skip),
        facts=settings,
    )
    if listener is not None:
        session = session_of(telemetry)

        def end() -> None:
            session.attempt(lambda one: one.end_update(), listener)

        def copy_log(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            listener.log({name: value for name, value in kwargs.items() if name != "log_pbar"})

        listener.frames = lambda: int(trainer.collected_frames)
        trainer.register_op("post_steps", end)
        session.on_close(listen(trainer, "_log", copy_log, session.failed))
    return listener
