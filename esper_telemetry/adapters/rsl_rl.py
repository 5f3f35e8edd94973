"""RSL-RL 5: telemetry for PPO of `OnPolicyRunner`, by `attach_runner` or as the class path of RSL-RL's logger, `TelemetryWriter`.

The storage adds a value to the rewards at time limits, and normalises its advantages. So rewards and time limits are copied when the
environments return them, and advantages before normalisation are the returns minus the values.

Shapes: T steps, B environments, D action dimensions, I inputs and H width of a recurrent layer; N rows of a minibatch, R rows of all M.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.adapter import Adapter, named_parameters, parameter_groups, plain_settings
from esper_telemetry.adapters.columns import HEAD, EvaluatedMinibatch, evaluated_minibatches, next_values
from esper_telemetry.adapters.taps import GeneratorTap, SurroundingTap
from esper_telemetry.core.event_parts import Scale
from esper_telemetry.core.facts import UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.record import Level
from esper_telemetry.events import BeforeUpdate, Hooks, RecurrentForward, RolloutEnd
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.extensions import ObservedSource
from esper_telemetry.updates.failure import Candidate, of_parameters
from esper_telemetry.updates.update import JoinedMinibatches

try:
    from rsl_rl.utils import LogWriter
except ImportError:  # older than 5.4, which attach_runner does not need
    LogWriter = object

log = logging.getLogger("esper_telemetry")

REQUIRED_ATTRIBUTES = ("actor", "critic", "storage", "optimizer", "clip_param", "compute_returns")
"""Attributes of an algorithm whose updates the adapter understands."""

SETTING_NAMES = {
    **{name: name for name in ("learning_rate", "gamma", "entropy_coef", "max_grad_norm")},
    "gae_lambda": "lam",
    "clip": "clip_param",
    "num_epochs": "num_learning_epochs",
    "value_coef": "value_loss_coef",
    "target_kl": "desired_kl",
}
"""Their names of settings in `cfg["algorithm"]`, by ours."""

GAUSSIAN = ("GaussianDistribution", "HeteroscedasticGaussianDistribution")
"""Distributions whose parameters are means and standard deviations."""


class RunnerListener(Adapter):
    """Emits the events of a learning `OnPolicyRunner` with PPO, from `start` to `stop`."""

    prefix = "rsl_rl"
    ends_updates = True

    def __init__(self, telemetry: Telemetry, runner: Any) -> None:
        super().__init__(telemetry, join=self.joined)
        self.adapts_rate = True
        self._runner, self._alg, storage = runner, runner.alg, runner.alg.storage
        # a runner keeps the number of its last update, from 0, which is also 0 before the first one
        last = int(runner.current_learning_iteration)
        self.update = last + 1 if last > 0 or telemetry.state_dict().get("update", 0) == 1 else 0
        self._ranks = int(getattr(runner, "gpu_world_size", 1))
        self._rollout_steps = int(storage.num_transitions_per_env * storage.num_envs) * self._ranks
        self.env_step = self.update * self._rollout_steps
        self.gradient_step = self.update * runner.alg.num_learning_epochs * runner.alg.num_mini_batches
        # the models themselves, not what `torch.compile` has made of them
        self._actor: Any = getattr(runner.alg, "_raw_actor", None) or runner.alg.actor
        self._critic: Any = getattr(runner.alg, "_raw_critic", None) or runner.alg.critic
        self._cell: Any = getattr(getattr(self._actor, "rnn", None), "rnn", None)
        kinds = type(getattr(self._actor, "distribution", None)).__mro__
        self._gaussian = any(kind.__name__ in GAUSSIAN for kind in kinds)
        self._last_values: Tensor | None = None
        self._divergences: list[Tensor] = []
        self._sampled = False
        self._batch: tuple[Any, Tensor | None] | None = None
        self._evaluated: Any = None
        self._values: Tensor | None = None
        self._forget_steps()

    def start(self, iterations: int | None) -> None:
        """Begin a run of that many iterations; None if their number is not known."""
        self.stop()
        runner, alg = self._runner, self._alg
        total = None if iterations is None else self.update + iterations
        self.begin_run(plain_settings(runner.cfg), self._facts(total))
        self._forget_steps()
        self.times.begin()
        self._follow_optimizer()
        self.listen(alg, "act", self._after_act)
        self.listen(alg, "process_env_step", self._after_env_step)
        self.listen(alg.actor, "get_output_log_prob", self._after_log_probs)
        self.listen(alg.actor, "get_kl_divergence", self._after_divergence)
        self.listen(alg.critic, "forward", self._after_values)
        self.listen(alg, "update", self._after_update, timed=True)
        self.listen(runner.logger, "log", self._after_log, timed=True)
        for name in ("mini_batch_generator", "recurrent_mini_batch_generator"):
            self.until_stop(GeneratorTap(alg.storage, name, self._after_batch, self.session.failed).remove)

    def listen_to_writer(self) -> None:
        """Copy what RSL-RL's own writer receives, once there is one."""
        logger = self._runner.logger

        def after_scalar(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            self.add_scalar(*(*args, *kwargs.values())[:2])

        def after_writer(*_: Any) -> None:
            if logger.writer is not None:
                self.listen(logger.writer, "add_scalar", after_scalar)

        self.listen(logger, "init_logging_writer", after_writer)

    def add_scalar(self, tag: str, value: Any) -> None:
        """Add a number that RSL-RL logs to the current update's record, unless it repeats the number over seconds."""
        if not tag.endswith("/time"):
            self.logged[tag] = float(value)

    # Rollouts.

    def _forget_steps(self) -> None:
        """A rollout begins."""
        self._acted_at, self._environment_seconds = perf_counter(), 0.0
        self._rewards: list[Tensor] = []
        self._time_outs: list[Tensor] = []

    def _after_act(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._acted_at = perf_counter()

    def _after_env_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The environments answered; they may write the next answer into the same tensors."""
        self._environment_seconds += perf_counter() - self._acted_at
        _, rewards, _, extras = (*args, *kwargs.values())
        self._rewards.append(rewards.clone())
        if "time_outs" in extras:
            self._time_outs.append(extras["time_outs"].to(rewards.device, copy=True))

    def _after_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """Keep the critic's estimates of a minibatch or a step. The last ones before an update are of the states after the rollout."""
        if self.learning:
            self._values = result.detach()
        else:
            self._last_values = result

    def _rollout(self) -> RolloutEnd:
        """Return the event of the rollout, which is complete in the storage.

        At time limits RSL-RL bootstraps with the value of the last state acted in, not with the critic's estimate of the next state:
        `next_values` are what it adds.
        """
        alg, storage = self._alg, self._alg.storage
        values, returns = storage.values.squeeze(-1), storage.returns.squeeze(-1)
        ended = storage.dones.squeeze(-1).bool()
        rewards = raw = torch.stack(self._rewards).to(values.device)
        limits = torch.zeros_like(ended)
        if len(self._time_outs) == len(self._rewards):
            limits = torch.stack(self._time_outs).to(ended.device).bool() & ended
        if alg.rnd:  # curiosity is part of the rewards that are learned from
            rewards = storage.rewards.squeeze(-1) - alg.gamma * values * limits
        assert self._last_values is not None
        heads: dict[str, Any] = {}
        if self._gaussian and storage.distribution_params is not None:
            means, stds = storage.distribution_params
            heads = {"means": {HEAD: means}, "log_std": {HEAD: stds.log()}}
        observations, scales = self._observations(), {}
        if observations is not None and self._normalizes and hasattr(self._actor.obs_normalizer, "mean"):
            normalizer = self._actor.obs_normalizer  # it does not clip, so any bounds work
            scales = {"obs": Scale(normalizer.mean, normalizer.std, torch.inf, observations)}
        return RolloutEnd(
            update=self.update,
            env_step=self.env_step,
            rewards=rewards,
            raw_rewards=raw if alg.rnd else None,
            values=values,
            advantages=returns - values,
            returns=returns,
            log_probs=storage.actions_log_prob.squeeze(-1),
            ended=ended,
            terminated=ended & ~limits,
            next_values=next_values(values, self._last_values.clone(), ended, torch.where(limits, values, 0.0)),
            actions={HEAD: storage.actions},
            gamma=alg.gamma,
            # [T, layers, parts, B, H], in which each step began
            states=torch.stack(storage.saved_hidden_state_a, 2) if storage.saved_hidden_state_a else None,
            scales=scales,
            observations=observations,
            last_values=self._last_values.clone().reshape(1, -1),
            time_limits=limits,
            **heads,
        )

    @property
    def _normalizes(self) -> bool:
        return bool(getattr(self._actor, "obs_normalization", False))

    def _observations(self) -> Tensor | None:
        """The actor's observations of the rollout, [T, B, I]; None if a part of them is not a vector."""
        parts = [self._alg.storage.observations[name] for name in self._actor.obs_groups]
        if not parts or any(part.dim() != 3 for part in parts):
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _emit_recurrent(self, rollout: RolloutEnd) -> None:
        """Emit the event of an LSTM or a GRU of a single layer, in a quarter of the environments."""
        cell, states, observations = self._cell, rollout.states, rollout.observations
        if states is None or observations is None or not isinstance(cell, nn.LSTM | nn.GRU):
            return
        if cell.num_layers == 1:
            envs = max(1, observations.shape[1] // 4)
            with torch.no_grad():
                inputs = self._actor.obs_normalizer(observations[:, :envs])
            self.hooks.emit(RecurrentForward([cell], [inputs], [states[:, 0, :, :envs]]))

    # Updates.

    def _parameters(self) -> dict[str, Tensor]:
        return named_parameters(actor=self._actor, critic=self._critic)

    def _follow_optimizer(self) -> None:
        """Follow the optimizer; the trainer clips the actor's gradients and then the critic's."""
        parameters = {name: p for name, p in self._parameters().items() if p.requires_grad}
        names = {id(parameter): name for name, parameter in parameters.items()}
        clipped = [[names[id(p)] for p in part.parameters() if id(p) in names] for part in (self._actor, self._critic)]
        self.follow([self._alg.optimizer], parameters, clipped)

    def _after_batch(self, columns: Any, variables: Mapping[str, Any]) -> None:
        """The storage yields a minibatch; its generator keeps the number of the pass and the rows to itself."""
        if not self.learning:
            steps = (self.update + 1) * self._rollout_steps
            self.begin_update(steps, self._rollout, environment=self._environment_seconds)
            self._divergences = []
            self._sampled = self.hooks.wants(BeforeUpdate)
            if self.rollout_event is not None and self.hooks.wants(RecurrentForward):
                self.session.attempt(self._emit_recurrent, self.rollout_event)
            self._follow_optimizer()
        self.begin_minibatch(int(variables.get("epoch", variables.get("ep", 0))))
        self._batch = columns, self._rows(variables)

    def _rows(self, variables: Mapping[str, Any]) -> Tensor | None:
        """Rows of a feed-forward minibatch, or all steps of the environments of a recurrent one."""
        rows = variables.get("batch_idx")
        if isinstance(rows, Tensor):
            return rows
        start, stop, storage = variables.get("start"), variables.get("stop"), self._alg.storage
        if start is None or stop is None:
            return None
        numbers = torch.arange(storage.num_transitions_per_env * storage.num_envs, device=storage.device)
        return numbers.view(-1, storage.num_envs)[:, start:stop].flatten()

    def _after_log_probs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The actor gave the log-probabilities of a minibatch's actions; its advantages are normalised by now."""
        if self._batch is not None:
            (columns, rows), self._batch = self._batch, None
            gaussian = self._alg.actor.output_distribution_params if self._gaussian else ()
            if not self._sampled:  # nothing reads means
                gaussian = gaussian[1:]
            stored = columns.advantages, columns.old_actions_log_prob, columns.values, columns.returns
            gaussian = tuple([parameter.detach() for parameter in gaussian])
            # without its observations, whose memory the trainer uses again
            self._evaluated = self.epoch, rows, *stored, result.detach(), gaussian

    def _after_divergence(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The trainer compared the policy with the behaviour policy."""
        if self.learning:
            self._divergences.append(result.detach())

    def finish_minibatch(self) -> None:
        """Keep the models' outputs for the minibatch."""
        if self._evaluated is not None and self._values is not None:
            self.row = EvaluatedMinibatch._make((*self._evaluated, self._values))
        super().finish_minibatch()
        self._batch = self._evaluated = self._values = None

    def _after_update(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The update is over; what RSL-RL logs of it comes next."""
        if self.learning:
            self.end_learning()
            self._forget_steps()
            self.logged.update({f"Loss/{name}": value for name, value in result.items()})

    def _after_log(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self.learning:
            self.end_update()
        self.times.begin()

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters by part; `lstm` has recurrent layers."""
        parameters = self._parameters()
        groups = parameter_groups(parameters, self._actor.parameters(), self._critic.parameters())
        recurrent = [name for name in parameters if ".rnn." in name]
        return {**groups, **({"lstm": recurrent} if recurrent else {})}

    def end_fields(self) -> dict[str, Any]:
        """Log the divergences that set RSL-RL's learning rate, which it does not log."""
        alg = self._alg
        if self._divergences:
            kls = torch.stack([rows.mean() for rows in self._divergences]).tolist()
            self.logged |= {"kl/mean": sum(kls) / len(kls), "kl/last": kls[-1]}
        return {
            "epochs": alg.num_learning_epochs,
            # their value loss is the mean squared error, ours half of it
            "coefficients": {"value": 2 * float(alg.value_loss_coef), "entropy": float(alg.entropy_coef)},
        }

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the storage, then parameters and gradients."""
        storage = self._alg.storage
        rows = slice(0, storage.step or None)
        for name, part in storage.observations.items():
            yield Candidate(f"observations[{name!r}]", part[rows], environments=1)
        for name in ("rewards", "values", "actions_log_prob", "returns", "advantages"):  # as they are computed
            yield Candidate(name, getattr(storage, name)[rows], environments=1)
        yield from of_parameters(self._parameters().items())

    def joined(self, rows: Sequence[EvaluatedMinibatch]) -> JoinedMinibatches:
        """Return all minibatches of the update."""
        alg = self._alg
        clip_value = alg.clip_param if alg.use_clipped_value_loss else None
        return evaluated_minibatches(rows, clip=alg.clip_param, clip_value=clip_value)

    def _facts(self, iterations: int | None) -> dict[str, Any]:
        runner, alg, cell = self._runner, self._alg, self._cell
        env, storage, kinds = runner.env, alg.storage, {type(part) for part in self._actor.modules()}
        steps, envs, ranks = int(storage.num_transitions_per_env), int(storage.num_envs), self._ranks
        adaptive = alg.schedule == "adaptive" and alg.desired_kl is not None
        on_tensor_cores = "cuda" in str(alg.device) and torch.backends.cuda.matmul.allow_tf32
        horizon = getattr(env, "max_episode_length", None)
        spec = getattr(getattr(env, "unwrapped", None), "spec", None)
        layers = [name for name, part in self._critic.named_modules() if isinstance(part, nn.Linear)]
        return {
            "trainer": f"rsl-rl {type(alg).__name__}",
            "setting_names": {name: f'cfg["algorithm"]["{theirs}"]' for name, theirs in SETTING_NAMES.items()},
            "value_coef_scale": 0.5,  # their value loss is the mean squared error, ours half of it
            "env": str(getattr(spec, "id", None) or runner.cfg.get("experiment_name") or type(env).__name__),
            "total_steps": None if iterations is None else iterations * self._rollout_steps,
            "num_envs": envs * ranks,
            "ranks": ranks,
            "horizon": int(horizon) if isinstance(horizon, int | float) else None,
            "precision": "bf16" if alg.use_mixed_precision else "tf32" if on_tensor_cores else "fp32",
            **optimizer_facts(alg.optimizer),
            "advantage_correction": 1,
            "groups": self.groups(),
            "value_head": [f"critic.{layers[-1]}"] if layers else [],
            "heads": {HEAD: "continuous"},
            "max_grad_norm": alg.max_grad_norm,
            "clip": alg.clip_param,
            "clip_value": alg.clip_param if alg.use_clipped_value_loss else None,
            "gamma": alg.gamma,
            "gae_lambda": alg.lam,
            "normalize_advantages": True,
            "normalize_minibatches": bool(alg.normalize_advantage_per_mini_batch),
            "num_steps": steps,
            "num_epochs": alg.num_learning_epochs,
            "num_minibatches": alg.num_mini_batches,
            "learning_rate": float(alg.learning_rate),
            "value_coef": 2 * alg.value_loss_coef,
            "entropy_coef": alg.entropy_coef,
            "policy": "mlp" if cell is None else "lstm" if isinstance(cell, nn.LSTM) else "gru",
            "lstm_size": None if cell is None else cell.hidden_size,
            "activation": "tanh" if nn.Tanh in kinds else "relu" if nn.ReLU in kinds else None,
            "normalize_observations": self._normalizes,
            **dict.fromkeys(("normalize_rewards", "squashed", "correlated_noise"), False),
            **dict.fromkeys(("reward_threshold", "target_kl")),
            "desired_kl": alg.desired_kl if adaptive else None,
            UNCHECKED_FACT: self._unchecked(adaptive=adaptive),
        }

    def _unchecked(self, *, adaptive: bool) -> dict[str, str]:
        environment = "RSL-RL does not return the last observations of episodes, nor what arrived in its environments"
        losses = ("policy_loss", "value_loss", "entropy_loss", "total_loss", "log_ratios")
        reasons = dict.fromkeys(losses, "RSL-RL keeps its losses to itself")
        reasons |= dict.fromkeys(("transitions", "executed_actions"), environment)
        reasons["clipping"] = "RSL-RL clips the gradients of actor and critic apart"
        if adaptive:
            reasons["schedules"] = "the KL divergence sets the learning rate (schedule 'adaptive')"
        if not self._gaussian:
            reasons["log_probs"] = reasons["actions"] = "only Gaussian policies are shown"
        return reasons


def attach_runner(telemetry: Telemetry, runner: Any) -> ObservedSource:
    """Make `telemetry` record every update of an `OnPolicyRunner` with PPO; a call of the result ends this.

        runner = OnPolicyRunner(env, config, log_dir)
        attach_runner(telemetry, runner)
        runner.learn(1500)

    Nothing that the runner computes changes: weights are bit-identical. At level OFF nothing is installed.

    Raises:
        TypeError: if `telemetry` is not a `Telemetry`, or the runner's algorithm is not PPO.
    """
    check_runner(runner)
    if not isinstance(telemetry, Telemetry):
        raise TypeError(f"attach_runner takes a Telemetry and a runner, got {type(telemetry).__name__}")
    if telemetry.level is Level.OFF:
        return ObservedSource(Hooks(), lambda: None)
    session, adapter = session_of(telemetry), RunnerListener(telemetry, runner)

    def begin(iterations: int | None = None, *_: Any, num_learning_iterations: int | None = None, **__: Any) -> None:
        session.attempt(adapter.start, num_learning_iterations if iterations is None else iterations)
        session.attempt(lambda one: one.listen_to_writer(), adapter)

    tap = SurroundingTap(runner, "learn", begin, lambda: session.attempt(lambda one: one.stop(), adapter))

    def detach() -> None:
        adapter.stop()
        tap.remove()

    session.on_close(detach)
    return ObservedSource(adapter.hooks, detach)


def check_runner(runner: Any) -> None:
    """Raise TypeError for a runner whose algorithm is not PPO."""
    alg = getattr(runner, "alg", None)
    missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(alg, name)]
    if missing or not hasattr(runner, "logger"):
        raise TypeError(
            f"telemetry watches runners with PPO, got {type(runner).__name__} with {type(alg).__name__}, "
            f"which has no {missing[0] if missing else 'logger'}"
        )


class TelemetryWriter(LogWriter):  # type: ignore[misc] # the package has no type information
    """A log writer of RSL-RL that records every update of its runner, and forwards everything to the usual writer.

        config["logger"] = {"class_name": "esper_telemetry.adapters.rsl_rl:TelemetryWriter", "sinks": ["tensorboard"]}

    RSL-RL passes only its log directory to a writer, so the runner is searched for on the call stack. The run ends with `learn`. A
    runner that learns again in the same directory continues it.

    Args:
        log_dir: of RSL-RL. The run directory is `telemetry` in it, unless `run_dir` names another one.
        writer: the writer that RSL-RL would have: `tensorboard`, or a dictionary with its `class_name`; None for no other writer.
        settings: of `Telemetry`.

    Attributes:
        telemetry: receives the records.

    Raises:
        ModuleNotFoundError: RSL-RL is older than 5.4.
        ValueError: for another `writer`, or for invalid settings of `Telemetry`.
    """

    def __init__(self, log_dir: str, *, writer: str | dict[str, Any] | None = "tensorboard", **settings: Any) -> None:
        directory = Path(settings.pop("run_dir", None) or Path(log_dir) / "telemetry")
        self._writer = _other_writer(log_dir, writer)
        settings = {"resume": (directory / "journal.jsonl").exists(), "ranks": "alone", **settings}
        self.telemetry = Telemetry(settings.pop("sinks", ()), run_dir=directory, **settings)
        self._adapter: RunnerListener | None = None
        if self.telemetry.level > Level.OFF:
            session_of(self.telemetry).attempt(lambda one: one._attach(), self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """See RSL-RL's `LogWriter`."""
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)
        if self._adapter is not None:
            adapter = self._adapter
            session_of(self.telemetry).attempt(lambda value: adapter.add_scalar(tag, value), scalar_value)

    def store_config(self, env_cfg: Any, train_cfg: dict[str, Any]) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("store_config", env_cfg, train_cfg)

    def save_model(self, model_path: str, it: int) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_model", model_path, it)

    def save_file(self, path: str) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_file", path)

    def save_video(self, video: Path, it: int) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_video", video, it)

    def stop(self) -> None:
        """See RSL-RL's `LogWriter`."""
        if self._adapter is not None:
            session_of(self.telemetry).attempt(lambda adapter: adapter.stop(), self._adapter)
            self._adapter = None
        self.telemetry.close()
        self._pass_on("stop")

    def _attach(self) -> None:
        """Listen to the runner whose `learn` makes this writer."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            runner = frame.f_locals.get("self")
            if all(hasattr(runner, name) for name in ("alg", "logger", "learn")):
                check_runner(runner)
                self._adapter = RunnerListener(self.telemetry, runner)
                self._adapter.start(frame.f_locals.get("num_learning_iterations"))
                return
            frame = frame.f_back
        log.warning("TelemetryWriter was not made by a runner's learn(): only what RSL-RL logs is recorded")

    def _pass_on(self, name: str, *args: Any) -> None:
        method = getattr(self._writer, name, None)  # a SummaryWriter lacks RSL-RL's methods
        if method is not None:
            method(*args)


def _other_writer(log_dir: str, writer: str | dict[str, Any] | None) -> Any:
    try:
        from rsl_rl.utils.utils import resolve_class
    except ImportError as missing:
        needed = "TelemetryWriter needs RSL-RL 5.4 or newer: pip install 'esper-telemetry[rsl-rl]'"
        raise ModuleNotFoundError(needed, name="rsl_rl") from missing
    if writer is None:
        return None
    if writer == "tensorboard":
        from torch.utils import tensorboard

        make: Any = tensorboard.SummaryWriter  # untyped if TensorBoard is installed
        return make(log_dir=log_dir, flush_secs=10)  # as RSL-RL makes it
    if not isinstance(writer, dict) or "class_name" not in writer:
        raise ValueError(f"writer must be 'tensorboard', None or a dictionary with a class_name, got {writer!r}")
    kind, settings = resolve_class(writer)
    return kind(log_dir=log_dir, **settings)
