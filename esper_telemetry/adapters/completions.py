"""Events of language models that learn from completions, and their metrics. Adapters of trainers for language models emit them.

This module does not import a trainer's library, because the worker process imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.reduction import Mean
from esper_telemetry.events import EpisodeEnd, MinibatchEnd
from esper_telemetry.metrics.language import (
    RatioOrigin,
    calibration,
    completion_stats,
    group_stats,
    reference_kl,
    reward_components,
    sampling_mismatch,
    sequence_ratio,
    token_stats,
)
from esper_telemetry.updates.extensions import Capture

MAX_TEXT = 400
"""Characters of a prompt or of a completion in the evidence of an alarm."""


class CompletionSample(NamedTuple):
    """A completion whose text is shown: `kind` is best, worst or longest, `tokens` its length."""

    kind: str
    reward: float
    tokens: int
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class CompletionsEnd:
    """B completions that were generated and scored.

    Attributes:
        prompts: [B], numbers that are equal for equal prompts.
        lengths: [B] in tokens.
        rewards: by reward function [B]; NaN if it gave none.
        weights: of the reward functions, in their order.
        truncated: [B], bool; None if end tokens are not known.
        advantages: [B]; None if they are not the weighted rewards minus their group's mean, up to a positive scale.
        group_size: completions that the trainer compares with each other, one after another.
        turns: [B], passages that the model wrote; None if it wrote everything.
        samples: for the evidence of alarms.
    """

    prompts: Tensor
    lengths: Tensor
    rewards: Mapping[str, Tensor]
    weights: tuple[float, ...]
    truncated: Tensor | None = None
    advantages: Tensor | None = None
    group_size: int | None = None
    turns: Tensor | None = None
    samples: tuple[CompletionSample, ...] = ()

    @property
    def total_rewards(self) -> Tensor:
        """Weighted sum over reward functions [B]; NaN if none gave a reward."""
        rewards = torch.stack(tuple(self.rewards.values()), -1).double()
        weights = torch.tensor(self.weights, dtype=torch.float64, device=rewards.device)
        return torch.where(rewards.isnan().all(-1), torch.nan, (rewards * weights).nansum(-1))

    def with_samples(self, text: Callable[[int], tuple[str, str]]) -> CompletionsEnd:
        """Return the event with the best, the worst and the longest completion; `text` returns prompt and completion of a place."""
        rewards, lengths = self.total_rewards.tolist(), self.lengths.tolist()
        places = [place for place, reward in enumerate(rewards) if reward == reward]
        if not places:
            return self
        best, worst = (pick(places, key=lambda place: rewards[place]) for pick in (max, min))
        chosen = {"best": best, "worst": worst, "longest": max(places, key=lambda place: lengths[place])}
        samples = [CompletionSample(kind, rewards[one], int(lengths[one]), *text(one)) for kind, one in chosen.items()]
        return replace(self, samples=tuple(samples))

    def episodes(self, env_step: int) -> EpisodeEnd | None:
        """Return the event of the scored completions, each an episode; None without any."""
        pairs = zip(self.total_rewards.tolist(), self.lengths.tolist(), strict=True)
        scored = [(total, length) for total, length in pairs if total == total]
        return EpisodeEnd(env_step, *zip(*scored, strict=True)) if scored else None


def _shortened(text: str) -> str:
    """Return a text without secrets and without the middle of a long one."""
    text, half = masked(text), MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


@dataclass(frozen=True, slots=True)
class CompletionsUpdate:
    """The completions of an update; an `updates.extensions.UpdateExtension`."""

    event_type: ClassVar[type] = CompletionsEnd

    generations: tuple[CompletionsEnd, ...]

    @classmethod
    def from_events(cls, events: Sequence[CompletionsEnd]) -> CompletionsUpdate:
        """Return the completions of an update."""
        return cls(tuple(events))

    @property
    def on_device(self) -> bool:
        """True if the tensors are not on the CPU."""
        return not self.generations[0].lengths.is_cpu

    def measure(self, facts: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
        """Yield lengths, rewards and groups; also each reward function separately at DEBUG, or if there are several."""
        for event in self.generations:
            yield partial(completion_stats, event.lengths, event.truncated, turns=event.turns)
            yield partial(
                group_stats, event.total_rewards, event.prompts, event.lengths, advantages=event.advantages, size=event.group_size
            )
            if len(event.rewards) > 1 or level >= Level.DEBUG:
                yield partial(reward_components, event.rewards, event.lengths)

    def evidence(self, facts: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield nothing."""
        yield from ()

    def alarm_evidence(self, alarm: Alarm) -> dict[str, Any]:
        """Return samples of the completions."""
        samples = self.generations[-1].samples
        texts = ("prompt", "completion")
        return {"samples": [one._asdict() | {name: _shortened(getattr(one, name)) for name in texts} for one in samples]}


@dataclass(frozen=True, slots=True)
class TokensEnd:
    """The tokens of one training forward pass, [B, T] each.

    Attributes:
        step: optimizer step within the update, from 0.
        log_probs: of the tokens, before the step.
        mask: True for tokens that are trained on.
        entropy: of the distribution of each token.
        old: log-probabilities at collection, or [B] of whole completions if the ratio is theirs; None if every ratio is 1 by construction.
        reference: log-probabilities under the reference model.
        sampling: the sampling engine's log-probabilities; NaN if it gave none.
        ends: True for end tokens; None if the mask does not follow from them.
        whole: the tokens are sampled from the whole distribution, not from its most likely part.
    """

    step: int
    log_probs: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    sampling: Tensor | None = None
    ends: Tensor | None = None
    whole: bool = True

    @property
    def log_ratio(self) -> Tensor | None:
        """Logarithms of the ratios, [B, T] of tokens or [B, 1] of completions; None if they are 1 by construction."""
        if self.old is None or self.old.dim() > 1:
            return None if self.old is None else self.log_probs - self.old
        return (self.log_probs * self.mask).sum(-1, keepdim=True) - self.old.unsqueeze(-1)

    def counted(self, log_ratio: Tensor) -> Tensor:
        """Return which ratios count, in the shape of `log_ratio`."""
        return self.mask if log_ratio.shape == self.mask.shape else self.mask.any(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class TokensUpdate:
    """The forward passes of an update; an `updates.extensions.UpdateExtension`."""

    event_type: ClassVar[type] = TokensEnd

    passes: tuple[TokensEnd, ...] = ()

    @classmethod
    def from_events(cls, events: Sequence[TokensEnd]) -> TokensUpdate:
        """Return the passes of an update."""
        return cls(tuple(events))

    @property
    def on_device(self) -> bool:
        """True if the tensors are not on the CPU."""
        return not self.passes[0].log_probs.is_cpu

    def measure(self, facts: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
        """Yield the metrics of tokens. Comparisons with collection use only the passes for which they are valid."""
        for event in self.passes:
            log_probs, mask, log_ratio, step = event.log_probs, event.mask, event.log_ratio, event.step
            yield partial(token_stats, log_probs, mask, entropy=event.entropy, ends=event.ends)
            yield partial(_origin, event)
            if event.entropy is not None and step == 0 and event.whole:
                yield partial(calibration, log_probs, event.entropy, mask)
            if event.sampling is not None and step == 0:  # at the weights of collection, regardless of what was stored
                yield partial(sampling_mismatch, log_probs, event.sampling, mask)
            if event.reference is not None:
                yield partial(reference_kl, log_probs, event.reference, mask)
            if log_ratio is not None and step > 0:
                if log_ratio.shape != mask.shape:  # of completions
                    log_ratio = (log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
                yield partial(sequence_ratio, log_ratio, mask)

    def evidence(self, facts: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield nothing."""
        yield from ()


def _origin(event: TokensEnd) -> MetricGroup:
    return RatioOrigin(Mean(float(event.old is None), 1.0))


def minibatch_of(passes: Sequence[tuple[TokensEnd, Tensor]], epoch: int, step: int, *, per_completion: bool = False) -> MinibatchEnd | None:
    """Return the minibatch of the passes that an optimizer step was taken for; None if their ratios are 1 by construction.

    Args:
        passes: with the advantages, [B, T] or [B, 1], that multiply the ratios.
        epoch, step: of the minibatch.
        per_completion: the loss has one ratio per completion, of the mean log-ratio of its tokens (GSPO, arXiv 2507.18071).
    """
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for tokens, advantages in passes:
        ratio = tokens.log_ratio
        if ratio is None:
            return None
        valid = tokens.counted(ratio)
        if per_completion:
            ratio = (ratio * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
            valid, advantages = valid.any(-1, keepdim=True), advantages[:, :1]
        columns.append((ratio.flatten(), advantages.expand_as(ratio).flatten(), valid.flatten()))
    if not columns:
        return None
    ratios, used, counted = map(torch.cat, zip(*columns, strict=True))
    return MinibatchEnd(epoch, step, ratios, used, valid=counted)
