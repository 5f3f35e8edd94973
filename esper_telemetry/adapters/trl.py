"""`TelemetryCallback`, the callback that makes TRL's `GRPOTrainer` emit events.

An update is what is learned from one batch of completions: `steps_per_generation` times `num_iterations` passes, with one record. That is
the unit in which rewards, groups and the first pass at the weights of collection come, and with `num_iterations` above 1 the only one in
which ratios before the first step differ from those after it. Where several batches feed one optimizer step, they share a record.

Environment steps count completions: a completion is an episode with one reward, their number is known without asking the device, and runs
whose completions grow or shrink stay comparable. Tokens are `lm/tokens`.

The trainer is found on the stack when training begins: transformers gives its callbacks the model and the optimizer, not the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, Self

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "TelemetryCallback needs trl: pip install 'esper-telemetry[trl]'", name=missing.name
    ) from missing

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.adapters.completions import CompletionsEnd, CompletionsUpdate, TokensEnd, TokensUpdate
from esper_telemetry.adapters.taps import Listener, listen
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.metric import segment
from esper_telemetry.core.rates import rate_fields
from esper_telemetry.core.record import Level
from esper_telemetry.core.tensors import gradient_norms
from esper_telemetry.events import (
    BackwardEnd,
    EpisodeEnd,
    Hooks,
    MinibatchEnd,
    OptimizerStep,
    Remover,
    RunStart,
    UpdateEnd,
    UpdateStart,
)
from esper_telemetry.session import TelemetrySession
from esper_telemetry.telemetry import Telemetry, attach, session_of

METHODS = (
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_calculate_rewards",
)
"""Methods of a trainer that the callback listens to."""

SETTINGS = (
    *("beta", "num_iterations", "epsilon", "epsilon_high", "delta", "loss_type", "scale_rewards", "num_generations"),
    *("temperature", "top_p", "top_k", "min_p", "max_completion_length", "mask_truncated_completions"),
    *("importance_sampling_level", "top_entropy_quantile", "use_vllm", "vllm_importance_sampling_correction"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "max_steps", "seed"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "bf16", "fp16"),
)

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that clip the ratio as PPO does."""


MAX_CHECKED_PARAMETERS = 1 << 24
"""Parameters up to which sampled updates check steps of the optimizer, for which they copy its state."""


class Progress(NamedTuple):
    """Updates, completions and optimizer steps so far, as `events.RunStart` has them."""

    update: int
    env_step: int
    gradient_step: int


class Pass(NamedTuple):
    """One forward pass with its loss: its tokens, and the advantages that multiply their ratios, [B, T]."""

    tokens: TokensEnd
    advantages: Tensor


class TrainerListener:
    """Emits the events of a trainer that learns until `stop`; `session` handles exceptions of the listeners.

    Attributes:
        progress: progress by now, the update under way included.
    """

    def __init__(self, session: TelemetrySession, trainer: Any, hooks: Hooks, before: Progress) -> None:
        self.progress = before
        self._session, self._trainer, self._hooks = session, trainer, hooks
        self._parameters = trained_parameters(trainer)
        self._small = sum(parameter.numel() for parameter in self._parameters.values()) <= MAX_CHECKED_PARAMETERS
        self._ends = end_tokens(trainer)
        pad = getattr(_tokenizer(trainer), "pad_token_id", None)
        known = [] if self._ends is None else self._ends.tolist()
        self._pads_with_end = pad in known
        closing = (
            known if pad is None else [*known, pad]
        )  # a completion that ends with padding is not cut, as TRL counts
        self._closing = torch.tensor(closing, device=trainer.accelerator.device)
        self._whole = samples_whole_distribution(trainer)
        self._rewards: Tensor | None = None
        self._forward: tuple[Tensor, Tensor | None] | None = None
        self._passes: list[Pass] = []
        self._open = False
        self._rates: dict[str, Any] = {"learning_rate": 0.0}
        self._first_step = before.gradient_step
        self._times = PhaseTimes()
        self._taps = [
            self._listen("_calculate_rewards", self._after_rewards),
            self._listen("_generate_and_score_completions", self._after_generation),
            self._listen("_get_per_token_logps_and_entropies", self._after_forward),
            self._listen("_compute_loss", self._after_loss),
            self._listen("training_step", self._after_backward),
        ]

    def stop(self) -> None:
        """Emit what is open and listen to nothing any more."""
        while self._taps:
            self._taps.pop()()
        self._session.attempt(lambda listener: listener._end_update(), self)

    def step_begins(self) -> None:
        """Completions may be generated from now on."""
        self._times.end("update")

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Emit the step and the passes that it was taken for."""
        step = self._step
        self._rates = rate_fields([optimizer], self._parameters, dict)
        inner = getattr(optimizer, "optimizer", optimizer)
        self._times.end("update")
        if self._small:
            self._hooks.emit(OptimizerStep(self._epoch, step, inner, self._parameters))
        passes, self._passes = self._passes, []
        stored = [part for part in passes if part.tokens.old is not None]
        if stored and len(stored) == len(passes):  # without them every ratio is 1 by construction and says nothing
            self._hooks.emit(_minibatch(self._epoch, step, stored))
        self.progress = self.progress._replace(gradient_step=self.progress.gradient_step + 1)

    @property
    def _step(self) -> int:
        """Optimizer steps in this update so far."""
        return self.progress.gradient_step - self._first_step

    @property
    def _epoch(self) -> int:
        """Passes over the completions so far."""
        args = self._trainer.args
        passes = self._step * args.gradient_accumulation_steps
        return int(min(passes // max(1, args.steps_per_generation), self._trainer.num_iterations - 1))

    def _after_rewards(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rewards: Tensor) -> None:
        if self._trainer.model.training:
            self._rewards = rewards.detach()

    def _after_generation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        trainer, rewards = self._trainer, self._rewards
        if not trainer.model.training or rewards is None:
            return
        self._rewards = None
        if self._open and self._step:
            self._end_update()
        self._times.end("rollout", environment=0.0)
        if not self._open:
            self._open, self._first_step = True, self.progress.gradient_step
            self.progress = self.progress._replace(update=self.progress.update + 1)
        self.progress = self.progress._replace(env_step=self.progress.env_step + len(rewards))
        self._hooks.emit(UpdateStart(self.progress.update, self.progress.env_step))
        local = rewards
        count, rank = len(batch["completion_ids"]), trainer.accelerator.process_index
        if len(rewards) > count:  # those of all processes, in their order
            local = rewards[rank * count : (rank + 1) * count]
        event = self._completions(args[0] if args else kwargs["inputs"], batch, local)
        self._hooks.emit(event)
        totals = event.total_rewards.tolist()
        lengths = event.lengths.tolist()
        scored = [(total, int(length)) for total, length in zip(totals, lengths, strict=True) if total == total]
        if scored:
            returns, steps = zip(*scored, strict=True)
            self._hooks.emit(EpisodeEnd(self.progress.env_step, returns, steps))

    def _completions(self, inputs: list[Any], batch: Mapping[str, Any], rewards: Tensor) -> CompletionsEnd:
        """Return the event of completions whose `rewards` are [B, functions]."""
        trainer, mask = self._trainer, batch["completion_mask"]
        ids = batch["completion_ids"]
        prompts: dict[str, int] = {}
        numbers = [prompts.setdefault(str(row.get("prompt")), len(prompts)) for row in inputs]
        centred = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
        masked_all = bool(getattr(trainer, "mask_truncated_completions", False))
        lengths, truncated = mask.sum(-1), None
        if self._ends is not None:
            ends = torch.isin(ids, self._ends)
            lengths = (ends.cumsum(-1) - ends.long() == 0).sum(-1) if masked_all else lengths
            last = ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
            truncated = ~torch.isin(last, self._closing)
        names = [segment(name) for name in trainer.reward_func_names]
        unique = {f"{name}_{index}" if name in names[:index] else name: index for index, name in enumerate(names)}
        return CompletionsEnd(
            prompts=torch.tensor(numbers, device=rewards.device),
            lengths=lengths,
            rewards={name: rewards[:, index] for name, index in unique.items()},
            weights=tuple(float(weight) for weight in trainer.reward_weights),
            truncated=truncated,
            advantages=batch["advantages"].detach() if centred else None,
            group_size=trainer.num_generations,
        )

    def _after_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: tuple[Any, ...]) -> None:
        if result[0].requires_grad:
            self._forward = result[0].detach(), None if result[1] is None else result[1].detach()

    def _after_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Tensor) -> None:
        forward, self._forward = self._forward, None
        if forward is None or not self._trainer.model.training:
            return
        batch: Mapping[str, Tensor] = kwargs["inputs"] if "inputs" in kwargs else args[1]
        log_probs, entropy = forward
        mask = batch["completion_mask"]
        tools = batch.get("tool_mask")
        ends = None
        if self._ends is not None and tools is None:
            ends = torch.isin(batch["completion_ids"], self._ends)
            if self._pads_with_end:  # behind a completion that stopped without an end token these are padding
                ends = ends & mask.bool()
        tokens = TokensEnd(
            step=self._step,
            log_probs=log_probs,
            mask=(mask if tools is None else mask * tools).bool(),
            entropy=entropy,
            old=batch.get("old_per_token_logps"),
            reference=batch.get("ref_per_token_logps"),
            sampling=batch.get("sampling_per_token_logps"),
            ends=ends,
            whole=self._whole,
        )
        self._hooks.emit(tokens)
        advantages = batch["advantages"].detach()
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        self._passes.append(Pass(tokens, advantages.expand_as(log_probs)))

    def _after_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Any) -> None:
        """Emit the gradients of all passes of a step; they are clipped later."""
        if not self._trainer.accelerator.sync_gradients or not self._hooks.wants(BackwardEnd):
            return
        trained = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not trained:  # sharded by a library that keeps gradients to itself
            return
        limit = self._trainer.args.max_grad_norm
        norms = gradient_norms(list(trained.values()))
        self._hooks.emit(
            BackwardEnd(self._epoch, self._step, self._parameters, tuple(trained), norms, limit if limit else None)
        )

    def _end_update(self) -> None:
        if not self._open:
            return
        self._open, self._passes = False, []
        seconds, cpu_seconds = self._times.take()
        epochs = self._trainer.num_iterations
        self._hooks.emit(
            UpdateEnd(*self.progress, seconds=seconds, cpu_seconds=cpu_seconds, epochs=epochs, **self._rates)
        )

    def _listen(self, name: str, listener: Listener) -> Remover:
        def timed(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            with self._session.clock:
                listener(args, kwargs, result)

        return listen(self._trainer, name, timed, self._session.failed)


def _minibatch(epoch: int, step: int, passes: list[Pass]) -> MinibatchEnd:
    """Return the tokens of the passes of one optimizer step as one minibatch."""
    tokens = [part.tokens for part in passes]
    ratios = [one.log_probs - one.old for one in tokens if one.old is not None]
    return MinibatchEnd(
        epoch,
        step,
        log_ratio=torch.cat([ratio.flatten() for ratio in ratios]),
        advantages=torch.cat([part.advantages.flatten() for part in passes]),
        valid=torch.cat([one.mask.flatten() for one in tokens]),
    )


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed where it is not installed
    """Telemetry for `GRPOTrainer` of TRL: one record per batch of completions.

        with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
            GRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, callbacks=[TelemetryCallback(telemetry)]).train()

    The callback listens to methods of one trainer while that learns and alters nothing: weights are bit-identical with it and without.
    What TRL logs joins the record under `trl/`. It detaches when training ends, when `telemetry` is closed, and on `detach()`.

    Args:
        telemetry: receives the records; stays open when training ends.

    Attributes:
        telemetry: as above.
        hooks: emits the events, also to listeners of your own.
        extensions: classes that join the events of completions and tokens.

    Raises:
        TypeError: for something else than a `Telemetry`; when training begins, for a trainer without the methods of `GRPOTrainer`.
    """

    extensions = (CompletionsUpdate, TokensUpdate)

    def __init__(self, telemetry: Telemetry) -> None:
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"TelemetryCallback takes a Telemetry, got {type(telemetry).__name__}")
        self.telemetry = telemetry
        self._session = session_of(telemetry)
        self.hooks = Hooks()
        self._listener: TrainerListener | None = None
        self._logs: dict[str, float] = {}
        self._attached = False
        self._updates = 0

    @property
    def updates(self) -> int:
        """Updates of the trainer so far."""
        return self._updates if self._listener is None else self._listener.progress.update

    def detach(self) -> None:
        """Listen to nothing any more; harmless before and after training, twice, and after an exception."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._updates = listener.progress.update
            listener.stop()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # a trainer that is copied keeps one callback: a run has one writer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer and listen to it."""
        self.detach()
        if self.telemetry.level is Level.OFF:
            return
        trainer = _calling_trainer(self)
        lacking = [name for name in METHODS if not hasattr(trainer, name)]
        if lacking:
            raise TypeError(
                f"TelemetryCallback watches GRPOTrainer, got {type(trainer).__name__}, which has no {lacking[0]}"
            )
        self._attempt(lambda: self._start(trainer, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the time before it towards the update."""
        if self._listener is not None:
            self._attempt(self._listener.step_begins)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step."""
        listener = self._listener
        if listener is not None:
            self._attempt(lambda: listener.after_optimizer_step(kwargs["optimizer"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the numbers that TRL logs for the next record."""
        if self._listener is not None:
            self._attempt(lambda: self._logs.update(logs or {}))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last record."""
        if self._listener is not None:
            self._attempt(self.detach)

    def _start(self, trainer: Any, state: Any) -> None:
        if not self._attached:
            self.hooks.on(UpdateEnd, self._log_numbers)
            attach(self.telemetry, self)
            self._session.on_close(self.detach)
            self._attached = True
        before = progress_of(trainer, int(state.global_step))
        self.hooks.emit(RunStart(config_of(trainer), facts_of(trainer, int(state.max_steps)), *before))
        self._listener = TrainerListener(self._session, trainer, self.hooks, before)

    def _log_numbers(self, _: UpdateEnd) -> None:
        """Log single numbers under keys that every backend takes: `rewards/f/mean` becomes `trl/rewards/f/mean`."""
        logs, self._logs = self._logs, {}
        parts = {name: [segment(part) for part in str(name).split("/") if part] for name in logs}
        self.telemetry.log(
            {"/".join(["trl", *parts[name]]): float(value) for name, value in logs.items() if isinstance(value, Real)}
        )

    def _attempt(self, function: Callable[[], None]) -> None:
        """Call a function on telemetry's clock; what it raises costs its events and a warning."""
        with self._session.clock:
            self._session.attempt(lambda call: call(), function)


def _calling_trainer(callback: TrainerCallback) -> Any:
    """Return the trainer whose handler calls the callback, from the stack; None where no caller has it."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None)
        if handler is not None and any(one is callback for one in handler.callbacks):
            return caller
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


def trained_parameters(trainer: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by the names of the model without its wrappers."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def end_tokens(trainer: Any) -> Tensor | None:
    """Return the ids of end tokens; None where the trainer names none."""
    ids = getattr(trainer, "eos_token_ids", None) or [getattr(_tokenizer(trainer), "eos_token_id", None)]
    known = [one for one in ids if isinstance(one, int)]
    return torch.tensor(known, device=trainer.accelerator.device) if known else None


def _tokenizer(trainer: Any) -> Any:
    processor = getattr(trainer, "_tokenizer", None) or trainer.processing_class
    return getattr(processor, "tokenizer", processor)


def samples_whole_distribution(trainer: Any) -> bool:
    """Return whether no setting keeps unlikely tokens from being sampled."""
    args = trainer.args
    top_p, top_k, min_p = (getattr(args, name, None) for name in ("top_p", "top_k", "min_p"))
    penalty = getattr(args, "repetition_penalty", None)
    return (
        (top_p is None or top_p >= 1) and (not top_k or top_k < 0) and not min_p and (penalty is None or penalty == 1)
    )


def generation_passes(trainer: Any) -> int:
    """Return the forward passes that learn from one batch of completions."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def progress_of(trainer: Any, steps: int) -> Progress:
    """Return the progress after that many optimizer steps, as a trainer that goes on from a checkpoint has it."""
    generations = -(-steps * trainer.args.gradient_accumulation_steps // generation_passes(trainer))
    shared = max(1, trainer.args.gradient_accumulation_steps // generation_passes(trainer))
    return Progress(-(-generations // shared), generations * completions_per_generation(trainer), steps)


def completions_per_generation(trainer: Any) -> int:
    """Return the completions of one batch, in all processes."""
    args = trainer.args
    size = getattr(args, "generation_batch_size", None)
    return int(size or args.per_device_train_batch_size * args.steps_per_generation * trainer.accelerator.num_processes)


def config_of(trainer: Any) -> dict[str, Any]:
    """Return a trainer's settings as plain values."""
    values = {name: getattr(trainer.args, name) for name in SETTINGS if hasattr(trainer.args, name)}
    plain = {
        name: value if isinstance(value, bool | int | float | str | type(None)) else str(value)
        for name, value in values.items()
    }
    name = getattr(getattr(trainer.model, "config", None), "_name_or_path", "")
    rewards = ", ".join(trainer.reward_func_names)
    return {"algorithm": type(trainer).__name__, "model": str(name), "reward_functions": rewards, **plain}


def facts_of(trainer: Any, max_steps: int) -> dict[str, Any]:
    """Return what alarms need to know of a run of that many optimizer steps, as plain values."""
    args = trainer.args
    accumulated, passes = args.gradient_accumulation_steps, generation_passes(trainer)
    loss = getattr(args, "loss_type", "grpo")
    trained = trained_parameters(trainer)
    dtypes = {parameter.dtype for parameter in trained.values()}
    low = dtypes & {torch.bfloat16, torch.float16} or args.bf16 or args.fp16
    stored = accumulated % passes != 0 or bool(args.use_vllm and args.vllm_importance_sampling_correction)
    return {
        "trainer": f"trl {type(trainer).__name__}",
        "model": "language",
        "total_steps": -(-max_steps * accumulated // passes) * completions_per_generation(trainer),
        "ranks": trainer.accelerator.num_processes,
        "precision": "bf16" if low else "fp32",
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        "groups": {"actor": list(trained)},
        "max_grad_norm": args.max_grad_norm or None,
        "clip": args.epsilon if loss in CLIPPED_LOSSES else None,
        "normalize_minibatches": False,
        "num_epochs": trainer.num_iterations,
        "num_minibatches": max(1, args.steps_per_generation // accumulated),
        "ratio_constructed": not stored,
        "truncated_sampling": not samples_whole_distribution(trainer),
        "temperature": args.temperature,
        "beta": trainer.beta,
    }
