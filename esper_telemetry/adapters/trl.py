"""`TelemetryCallback`, the callback that makes TRL's `GRPOTrainer` and `RLOOTrainer` emit events.

An update is the training on one batch of completions: `steps_per_generation` times `num_iterations` passes, with one record.
Rewards, groups and the first pass at the weights of collection belong to one batch. With `num_iterations` above 1, only a whole
batch has ratios before the first step and after it. If several batches feed one optimizer step, they share a record.

Environment steps count completions: a completion is an episode with one reward. Their number is known without waiting for the
device, and runs stay comparable if the length of completions changes. Tokens are `lm/tokens`.

The trainer is found on the stack when training begins: transformers gives its callbacks the model and the optimizer, not the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("TelemetryCallback needs trl: pip install 'esper-telemetry[trl]'", name=missing.name) from missing

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.adapter import Adapter, plain_settings
from esper_telemetry.adapters.completions import CompletionsEnd, CompletionsUpdate, TokensEnd, TokensUpdate, minibatch_of
from esper_telemetry.core.metric import segment
from esper_telemetry.core.rate_schedule import rate_fields
from esper_telemetry.core.record import Level
from esper_telemetry.events import BackwardEnd, Hooks, UpdateStart
from esper_telemetry.metrics.language import turns_of
from esper_telemetry.telemetry import Telemetry, session_of

TAPS = {
    "_calculate_rewards": "_after_rewards",
    "_generate_and_score_completions": "_after_generation",
    "_get_per_token_logps_and_entropies": "_after_forward",
    "_compute_loss": "_after_loss",
    "training_step": "_after_backward",
}
"""Methods of a trainer, and of the listener that is called after each."""

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


class TrainerListener(Adapter):
    """Emits the events of a learning trainer on the callback's hooks, from `start` to `stop`."""

    prefix = "trl"

    def __init__(self, callback: TelemetryCallback) -> None:
        self.extensions, self._shows_texts = callback.extensions, callback.shows_texts
        super().__init__(callback.telemetry, hooks=callback.hooks)

    def start(self, trainer: Any, state: Any) -> None:
        """Listen to a trainer that begins to learn."""
        self._trainer = trainer
        self.update, self.env_step, self.gradient_step = progress_of(trainer, int(state.global_step))
        self.optimizers, self.parameters = [trainer.optimizer], trained_parameters(trainer)
        self.emits_steps = sum(p.numel() for p in self.parameters.values()) <= MAX_CHECKED_PARAMETERS
        self._ends = end_tokens(trainer)
        pad = getattr(_tokenizer(trainer), "pad_token_id", None)
        known = [] if self._ends is None else self._ends.tolist()
        self._pads_with_end = pad in known
        # a completion that ends with padding is not cut, as TRL counts
        closing = known if pad is None else [*known, pad]
        self._closing = torch.tensor(closing, device=trainer.accelerator.device)
        self._whole = samples_whole_distribution(trainer)
        self._rewards: Tensor | None = None
        self._forward: tuple[Tensor, Tensor | None] | None = None
        self._passes: list[tuple[TokensEnd, Tensor]] = []  # with the advantages [B, 1 or T] that multiply the ratios
        self._rates: dict[str, Any] = {"learning_rate": 0.0}
        self.begin_run(config_of(trainer), facts_of(trainer, int(state.max_steps)))
        self.times.begin()
        for name, listener in TAPS.items():
            self.listen(trainer, name, getattr(self, listener), timed=True)
        self._scales = trainer.accelerator.scaler is not None  # with fp16; gradients are divided before they are clipped
        if self._scales:
            self.listen(trainer.accelerator, "unscale_gradients", lambda *_: self._emit_unclipped(), timed=True)

    def end_fields(self) -> dict[str, Any]:
        """Return passes, and the rates of the last step, before the scheduler has changed them."""
        self._passes = []
        return {"epochs": self._trainer.num_iterations, **self._rates}

    def after_optimizer_step(self, optimizer: Any) -> None:
        """Emit the step and the passes that it was taken for."""
        self._rates = rate_fields([optimizer], self.parameters, dict)
        self.times.end("update")
        self.after_step(getattr(optimizer, "optimizer", optimizer))
        passes, self._passes = self._passes, []
        minibatch = minibatch_of(passes, self.epoch, self.step)
        if minibatch is not None:
            self.hooks.emit(minibatch)
        self.finish_minibatch()

    def _after_rewards(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rewards: Tensor) -> None:
        if self._trainer.model.training:
            self._rewards = rewards.detach()

    def _after_generation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        trainer, rewards = self._trainer, self._rewards
        if not trainer.model.training or rewards is None:
            return
        self._rewards = None
        if self.updating and not self.step:  # several batches of completions feed one step
            self.times.end("rollout", environment=0.0)
            self.env_step += len(rewards)
            self.hooks.emit(UpdateStart(self.update, self.env_step))
        else:
            self.end_learning(timed=False)
            self.begin_update(self.env_step + len(rewards), environment=0.0)
        local = rewards
        count, rank = len(batch["completion_ids"]), trainer.accelerator.process_index
        if len(rewards) > count:  # from all processes, in their order
            local = rewards[rank * count : (rank + 1) * count]
        inputs = args[0] if args else kwargs["inputs"]
        event = self._completions(inputs, batch, local)
        if self._shows_texts:
            event = event.with_samples(partial(self._text, inputs, batch["completion_ids"], event.lengths))
        self.hooks.emit(event)
        episodes = event.episodes(self.env_step)
        if episodes is not None:
            self.hooks.emit(episodes)

    def _text(self, inputs: list[Any], ids: Tensor, lengths: Tensor, place: int) -> tuple[str, str]:
        """The prompt and the text of a completion."""
        text = _tokenizer(self._trainer).decode(ids[place, : int(lengths[place])].tolist())
        return str(inputs[place].get("prompt")), str(text)

    def _completions(self, inputs: list[Any], batch: Mapping[str, Any], rewards: Tensor) -> CompletionsEnd:
        """Return the event of completions whose `rewards` are [B, functions]."""
        trainer, mask, ids = self._trainer, batch["completion_mask"], batch["completion_ids"]
        prompts: dict[str, int] = {}
        numbers = [prompts.setdefault(str(row.get("prompt")), len(prompts)) for row in inputs]
        centred = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
        if "old_logps" in batch:  # RLOO puts the KL into the rewards, and may normalise over all groups
            centred = not (trainer.beta or trainer.normalize_advantages or trainer.reward_clip_range)
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
            turns=None if (tools := batch.get("tool_mask")) is None else turns_of(mask * tools),
        )

    def _after_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: tuple[Any, ...]) -> None:
        if result[0] is not None and result[0].requires_grad:  # Unsloth returns none
            self._forward = result[0].detach(), None if result[1] is None else result[1].detach()

    def _after_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Tensor) -> None:
        forward, self._forward = self._forward, None
        if forward is None or not self._trainer.model.training:
            return
        batch: Mapping[str, Tensor] = kwargs["inputs"] if "inputs" in kwargs else args[1]
        (log_probs, entropy), mask, tools = forward, batch["completion_mask"], batch.get("tool_mask")
        ends = None
        if self._ends is not None and tools is None:
            ends = torch.isin(batch["completion_ids"], self._ends)
            if self._pads_with_end:  # after a completion that stopped without an end token they are padding
                ends = ends & mask.bool()
        tokens = TokensEnd(
            step=self.step,
            log_probs=log_probs,
            mask=(mask if tools is None else mask * tools).bool(),
            entropy=entropy,
            old=batch.get("old_per_token_logps", batch.get("old_logps")),
            reference=batch.get("ref_per_token_logps"),
            sampling=batch.get("sampling_per_token_logps"),
            ends=ends,
            whole=self._whole,
        )
        self.hooks.emit(tokens)
        advantages = batch["advantages"].detach()
        self._passes.append((tokens, advantages.unsqueeze(1) if advantages.dim() == 1 else advantages))

    def _after_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Any) -> None:
        """Emit the gradients of all passes of a step; they are clipped later."""
        settings = self._trainer.args
        if self._trainer.accelerator.sync_gradients:
            passes = self.step * settings.gradient_accumulation_steps // max(1, settings.steps_per_generation)
            self.begin_minibatch(int(min(passes, self._trainer.num_iterations - 1)))
            if not self._scales:
                self._emit_unclipped()

    def _emit_unclipped(self) -> None:
        if self.hooks.wants(BackwardEnd):
            self.emit_gradients(self._trainer.args.max_grad_norm or None)


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed if it is not installed
    """Telemetry for `GRPOTrainer` and `RLOOTrainer` of TRL: one record per batch of completions.

        with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
            GRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, callbacks=[TelemetryCallback(telemetry)]).train()

    The callback listens to methods of one trainer while it learns. It does not change training: weights are bit-identical with and
    without it. Numbers that TRL logs are in the record under `trl/`. It detaches when training or `telemetry` ends, and on `detach()`.

    Args:
        telemetry: receives the records; stays open when training ends.
        samples: keep prompt and text of the best, the worst and the longest completion as evidence of alarms.

    Attributes:
        telemetry: as above.
        hooks: emits the events, also to listeners of your own.
        extensions: classes that join the events of completions and tokens.

    Raises:
        TypeError: if `telemetry` is not a `Telemetry`; when training begins, for a trainer without the methods of `GRPOTrainer`.
    """

    extensions = (CompletionsUpdate, TokensUpdate)

    def __init__(self, telemetry: Telemetry, *, samples: bool = True) -> None:
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"TelemetryCallback takes a Telemetry, got {type(telemetry).__name__}")
        self.telemetry, self.hooks, self.shows_texts = telemetry, Hooks(), samples
        self._listener: TrainerListener | None = None

    @property
    def updates(self) -> int:
        """Updates of the trainer so far."""
        return 0 if self._listener is None else self._listener.update

    def detach(self) -> None:
        """Stop listening. It can be called at any time and repeatedly, also after an exception."""
        if self._listener is not None:
            self._listener.stop()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # a trainer that is copied keeps one callback: a run has one writer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer and listen to it."""
        self.detach()
        if self.telemetry.level is Level.OFF:
            return
        trainer = _calling_trainer(self)
        lacking = [name for name in TAPS if not hasattr(trainer, name)]
        if lacking:
            raise TypeError(f"TelemetryCallback watches GRPOTrainer, got {type(trainer).__name__}, which has no {lacking[0]}")
        self._attempt(self._start, trainer, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the time before it towards the update: completions may be generated from now on."""
        if self._listener is not None and self._listener.listening:
            self._attempt(self._listener.times.end, "update")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step."""
        if self._listener is not None and self._listener.listening:
            self._attempt(self._listener.after_optimizer_step, kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the numbers that TRL logs for the next record: `rewards/f/mean` becomes `trl/rewards/f/mean`."""
        if self._listener is not None and self._listener.listening:
            parts = {name: [segment(part) for part in str(name).split("/") if part] for name in logs or {}}
            self._listener.logged |= {"/".join(parts[name]): value for name, value in (logs or {}).items()}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last record."""
        self._attempt(self.detach)

    def _start(self, trainer: Any, state: Any) -> None:
        self._listener = self._listener or TrainerListener(self)
        self._listener.start(trainer, state)

    def _attempt(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on telemetry's clock. If it raises, its events are lost and a warning is logged."""
        session = session_of(self.telemetry)
        with session.clock:
            session.attempt(lambda given: (function(*given), None)[1], arguments)


def _calling_trainer(callback: TrainerCallback) -> Any:
    """Return the trainer whose handler calls the callback, from the stack; None if no caller has it."""
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
    """Return the ids of end tokens; None if the trainer names none."""
    ids = getattr(trainer, "eos_token_ids", None) or [getattr(_tokenizer(trainer), "eos_token_id", None)]
    known = [one for one in ids if isinstance(one, int)]
    return torch.tensor(known, device=trainer.accelerator.device) if known else None


def _tokenizer(trainer: Any) -> Any:
    processor = getattr(trainer, "_tokenizer", None) or trainer.processing_class
    return getattr(processor, "tokenizer", processor)


def samples_whole_distribution(trainer: Any) -> bool:
    """Return whether tokens are sampled from the whole distribution, including unlikely ones."""
    args = trainer.args
    top_p, top_k, min_p = (getattr(args, name, None) for name in ("top_p", "top_k", "min_p"))
    penalty = getattr(args, "repetition_penalty", None)
    return (top_p is None or top_p >= 1) and (not top_k or top_k < 0) and not min_p and (penalty is None or penalty == 1)


def generation_passes(trainer: Any) -> int:
    """Return the forward passes that learn from one batch of completions."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def progress_of(trainer: Any, steps: int) -> tuple[int, int, int]:
    """Return updates, completions and steps after that many optimizer steps, for a trainer that continues from a checkpoint."""
    generations = -(-steps * trainer.args.gradient_accumulation_steps // generation_passes(trainer))
    shared = max(1, trainer.args.gradient_accumulation_steps // generation_passes(trainer))
    return -(-generations // shared), generations * completions_per_generation(trainer), steps


def completions_per_generation(trainer: Any) -> int:
    """Return the completions of one batch, in all processes."""
    args = trainer.args
    size = getattr(args, "generation_batch_size", None)
    return int(size or args.per_device_train_batch_size * args.steps_per_generation * trainer.accelerator.num_processes)


def config_of(trainer: Any) -> dict[str, Any]:
    """Return a trainer's settings as plain values."""
    plain = {name: plain_settings(getattr(trainer.args, name)) for name in SETTINGS if hasattr(trainer.args, name)}
    name = getattr(getattr(trainer.model, "config", None), "_name_or_path", "")
    rewards = ", ".join(trainer.reward_func_names)
    return {"algorithm": type(trainer).__name__, "model": str(name), "reward_functions": rewards, **plain}


def facts_of(trainer: Any, max_steps: int) -> dict[str, Any]:
    """Return the facts for the alarms about a run of that many optimizer steps, as plain values."""
    args = trainer.args
    accumulated, passes = args.gradient_accumulation_steps, generation_passes(trainer)
    loss = getattr(args, "loss_type", "grpo")
    trained = trained_parameters(trainer)
    dtypes = {parameter.dtype for parameter in trained.values()}
    precisions = {"fp16": args.fp16 or torch.float16 in dtypes, "bf16": args.bf16 or torch.bfloat16 in dtypes}
    return {
        "trainer": f"trl {type(trainer).__name__}",
        "model": "language",
        "total_steps": -(-max_steps * accumulated // passes) * completions_per_generation(trainer),
        "ranks": trainer.accelerator.num_processes,
        "precision": next((name for name, used in precisions.items() if used), "fp32"),
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        "groups": {"actor": list(trained)},
        "max_grad_norm": args.max_grad_norm or None,
        "clip": args.epsilon if loss in CLIPPED_LOSSES else None,
        "normalize_minibatches": False,
        "num_epochs": trainer.num_iterations,
        "num_minibatches": max(1, args.steps_per_generation // accumulated),
        "truncated_sampling": not samples_whole_distribution(trainer),
        "temperature": args.temperature,
        "beta": trainer.beta,
    }
