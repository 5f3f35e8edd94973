"""Losses and gradients of a Stable-Baselines3 model: norms at the clip, norms of heads, gradients at the trunk and of parts of a minibatch.

**Norms before clipping** are taken by `adapters.taps`. Trainers that clip differently are observed at `policy.parameters`.

**The two losses are separated inside the backward pass**: gradients arrive at the outputs of the two heads first. From there, a
separate pass takes each to the trunk's output, without a change of the graph below. A loss that is computed elsewhere is not affected.

The losses follow Stable-Baselines3 2.9, whose `train` keeps them to itself. Shapes: N rows of a minibatch, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn

from esper_telemetry.adapters.columns import LossColumns, loss_columns, normalized_advantages
from esper_telemetry.adapters.sb3.sb3_facts import ActionHeads, groups_of, minibatches_of, schedule_of
from esper_telemetry.adapters.taps import Listener, without_trace
from esper_telemetry.core.event_parts import FirstMinibatch, Shard
from esper_telemetry.core.minibatch_objective import LossRows, MinibatchForward, MinibatchObjective
from esper_telemetry.events import HeadsBackward, Hooks, Remover, TrunkBackward
from esper_telemetry.updates.pickles import policy_copy

LIBRARIES = ("stable_baselines3.", "sb3_contrib.")
"""Prefixes of the modules whose policies evaluate actions correctly."""

HEAD_PARAMETERS = ("action_net", "log_std")
"""Parameters that belong only to the actor's heads."""

MAX_PADDING = 1e-8
"""Entries of a minibatch's mask up to which rows are padding, as RecurrentPPO reads it."""


@torch.no_grad()
def head_norms(policy: Any, heads: ActionHeads) -> Tensor | None:
    """L2 norms of the gradients of the heads, each of which has rows of the last layer, `action_net`: [H] in float64; None for one head."""
    layer = getattr(policy, "action_net", None)
    if len(heads.names) == 1 or not isinstance(layer, nn.Linear):
        return None
    counts, weight = heads.score_counts(layer.out_features), layer._parameters.get("weight")  # not a parametrised one
    if not counts or weight is None or weight.grad is None:
        return None
    squares = weight.grad.double().square().sum(1)
    if layer.bias is not None and layer.bias.grad is not None:
        squares += layer.bias.grad.double().square()
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(squares.device)
    return squares.new_zeros(len(counts)).index_add_(0, owners, squares).sqrt_()


class TrunkListener:
    """Emits `TrunkBackward` and `HeadsBackward` for one forward pass at a time, from the features to the heads and back.

    Args:
        heads: whose scores are the outputs of `action_net`.
        place: returns epoch and step of the minibatch, and its mask of padding.
        attempt: calls a function with an argument and handles its exceptions.
    """

    def __init__(
        self,
        policy: Any,
        heads: ActionHeads,
        hooks: Hooks,
        place: Callable[[], tuple[int, int, Tensor | None]],
        attempt: Callable[..., object],
    ) -> None:
        self._policy, self._hooks, self._place, self._attempt = policy, hooks, place, attempt
        self._heads = heads
        self._shared = groups_of(policy).get("shared", [])
        self._latent: Tensor | None = None
        self._clear()

    def taps(self, listen: Callable[[object, str, Listener], Remover]) -> list[Remover]:
        """Return taps on the heads, and on the features that they share."""
        heads = {"actor": self._policy.action_net, "critic": self._policy.value_net}
        taps = [listen(network, "forward", partial(self._after_head, head)) for head, network in heads.items()]
        if self._shared:
            taps.append(listen(self._policy.features_extractor, "forward", lambda _, __, result: self._clear(result)))
        return taps

    def _after_head(self, head: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """A head, `actor` or `critic`, read the trunk's output."""
        # the first minibatch is enough if nothing is shared, or if such a pass goes through time
        first_only = not self._shared or hasattr(self._policy, "lstm_actor")
        skipped = not torch.is_grad_enabled() or (first_only and self._place()[1] > 0)
        if skipped or not self._hooks.wants(TrunkBackward) or not result.requires_grad:
            return
        if head == "actor":
            self._latent = args[0]
        output = self._features if self._shared and self._features is not None else args[0]
        self._outputs[head] = self._awaited[head] = output
        result.register_hook(lambda gradient: self._attempt(partial(self._receive, head, result), gradient))

    def _clear(self, features: Tensor | None = None) -> None:
        self._features = features
        self._latent = None
        self._outputs: dict[str, Tensor] = {}
        self._awaited: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def _receive(self, head: str, scores: Tensor, gradient: Tensor) -> None:
        """Take the gradient of a head's scores to the trunk's output."""
        output = self._awaited.pop(head, None)
        if output is None:  # the pass below calls this hook again
            return
        if output.requires_grad:
            options: dict[str, bool] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            (at_output,) = torch.autograd.grad(scores, output, gradient, **options)
        else:
            at_output = torch.zeros_like(output)
        self._gradients[head] = at_output.detach()
        if head == "actor" and len(self._heads.names) > 1 and self._hooks.wants(HeadsBackward):
            self._emit_heads(scores, gradient)
        if len(self._gradients) == 2:
            self._emit()

    def _emit_heads(self, scores: Tensor, gradient: Tensor) -> None:
        """Emit the gradient of each head's columns of the scores, at the input of `action_net`."""
        output, counts = self._latent, self._heads.score_counts(scores.shape[-1])
        if output is None or not output.requires_grad or not counts:
            return
        columns = torch.eye(len(counts)).repeat_interleave(torch.tensor(counts), 1).to(gradient)  # [heads, scores]
        gradients = [torch.autograd.grad(scores, output, gradient * own, retain_graph=True)[0] for own in columns]
        groups = groups_of(self._policy)
        own = (name for name in (*groups.get("shared", ()), *groups["actor"]) if name.split(".")[0] not in HEAD_PARAMETERS)
        named = dict(self._policy.named_parameters())
        epoch, step, _ = self._place()
        by_head = dict(zip(self._heads.names, gradients, strict=True))
        self._hooks.emit(HeadsBackward(epoch, step, output, by_head, {name: named[name] for name in own}))

    def _emit(self) -> None:
        actor, critic = self._outputs["actor"], self._outputs["critic"]
        outputs = (actor,) if actor is critic else (actor, critic)
        named = dict(self._policy.named_parameters())
        shared = [named[name] for name in self._shared]
        gradients, (epoch, step, mask) = self._gradients, self._place()
        valid = None if mask is None else mask > MAX_PADDING
        self._clear()
        self._hooks.emit(TrunkBackward(epoch, step, outputs, gradients["actor"], gradients["critic"], shared, valid))


def advantages_as_used(model: Any, advantages: Tensor, valid: Tensor | None) -> Tensor:
    """Factors [N] of the ratio: the advantages, normalised over the minibatch if the model does so."""
    single_row = len(advantages) < 2 and hasattr(model, "clip_range") and valid is None
    if not model.normalize_advantage or single_row:
        return advantages
    return normalized_advantages(advantages, valid)


def clip_of(model: Any, name: str = "clip_range") -> float | None:
    """Range of the ratio, or of the critic's estimates (`clip_range_vf`), at this point of training; None without one."""
    schedule = getattr(model, name, None)
    return None if schedule is None else float(schedule(model._current_progress_remaining))


def shard_gradients(model: Any, samples: Any, count: int) -> list[Shard]:
    """Gradient of the loss of each of `count` parts of a minibatch, by a copy of the policy; fewer if it has fewer samples."""
    whole, policy = advantages_as_used(model, samples.advantages, _valid_rows(samples)), policy_copy(model.policy)
    with without_trace(policy):
        return [Shard(size, _gradient(model, policy, part, used)) for size, part, used in _parts(samples, whole, count)]


def minibatch_forward(model: Any, samples: Any) -> MinibatchForward:
    """Return the pass of a minibatch through the model's policy."""
    advantages = advantages_as_used(model, samples.advantages, _valid_rows(samples))
    clips = {"clip": clip_of(model), "clip_value": clip_of(model, "clip_range_vf")}
    return MinibatchForward(model.policy, partial(loss_rows, samples=samples, advantages=advantages, **clips))


@contextmanager
def loss_rows(policy: Any, *, samples: Any, advantages: Tensor, clip: float | None, clip_value: float | None) -> Iterator[LossRows]:
    """Pass a minibatch through the policy without side effects; padding is left out.

    The method of the policy's class is called, because a trainer may have replaced the object's method.
    """
    valid = _valid_rows(samples)
    with without_trace(policy):
        values, log_probs, entropy = _evaluate(policy, samples, partial(type(policy).evaluate_actions, policy))
        entropy, unmasked = _entropies(policy, samples, log_probs, entropy)
        columns = {
            "log_ratio": log_probs - samples.old_log_prob,
            "log_probs": log_probs,
            "values": values.flatten(),
            "entropy": entropy,
            "advantages": advantages,
            "old_values": samples.old_values,
            "returns": samples.returns,
            "raw_advantages": samples.advantages,
        }
        # Stable-Baselines3 takes only the squared error of the clipped value
        of_rows = partial(LossRows, clip=clip, clip_value=clip_value, clip_maximum=False)
        if valid is None:
            yield of_rows(**columns, unmasked_entropy=unmasked)
            return
        counted, padding = (of_rows(**{name: c[rows] for name, c in columns.items()}) for rows in (valid, ~valid))
        yield replace(counted, padding=None if bool(valid.all()) else padding)


def _entropies(policy: Any, samples: Any, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the entropies [N] of a minibatch's distributions, and those without action masks if the policy returns these.

    If a user's policy class makes a known mistake, the entropies come from the library's class. Other entropies with the same
    log-probabilities are treated as intended.
    """
    evaluate = _library_evaluation(policy)
    if entropy is None:
        return -log_probs, None
    if evaluate is None or getattr(type(policy), "evaluate_actions", None) is evaluate:
        return entropy, None
    _, same, right = _evaluate(policy, samples, partial(evaluate, policy))
    if right is None or not torch.allclose(same, log_probs) or torch.allclose(entropy, right):
        return entropy, None
    if "action_masks" in samples._fields:
        _, _, unmasked = _evaluate(policy, samples._replace(action_masks=None), partial(evaluate, policy))
        if unmasked is not None and torch.allclose(entropy, unmasked):
            return right, entropy
    is_mistake = any(torch.allclose(entropy, wrong) for wrong in (-log_probs, log_probs, -right))
    return right if is_mistake else entropy, None


def _library_evaluation(policy: Any) -> Callable[..., Evaluation] | None:
    """Return the `evaluate_actions` of a policy's library class; None if the policy does not derive from the library."""
    kinds = (kind for kind in type(policy).__mro__ if kind.__module__.startswith(LIBRARIES))
    return next((kind.evaluate_actions for kind in kinds if hasattr(kind, "evaluate_actions")), None)


def first_minibatch_event(model: Any, samples: Any, trained: Tensor) -> FirstMinibatch:
    """Return the event of an update's first minibatch, for which the trainer has computed the log-probabilities `trained` [N]."""
    valid = _valid_rows(samples)
    evaluate, own_policy = _library_evaluation(model.policy), cache(policy_copy)

    def counted(column: Tensor) -> Tensor:
        return column if valid is None else column[valid]

    def passes(name: str) -> Tensor | None:
        changed = _mistaken(samples, name)
        if changed is None or evaluate is None:
            return None
        policy = own_policy(model.policy)
        with torch.no_grad(), without_trace(policy):
            return counted(_evaluate(policy, changed, partial(evaluate, policy))[1])

    return FirstMinibatch(counted(samples.old_log_prob), counted(trained), passes)


def _mistaken(samples: Any, name: str) -> Any:
    """Return a minibatch as training with this mistake reads it; None if the mistake does not apply."""
    if name == "mask_missing" and "action_masks" in samples._fields:
        return samples._replace(action_masks=None)
    if "lstm_states" not in samples._fields:
        return None
    starts, states = samples.episode_starts, samples.lstm_states
    if name == "memory_zero":
        return samples._replace(lstm_states=type(states)(*(tuple(map(torch.zeros_like, pair)) for pair in states)))
    flags = {"memory_not_reset": torch.zeros_like(starts), "memory_empty": torch.ones_like(starts)}
    return samples._replace(episode_starts=flags[name]) if name in flags else None


def objective_event(
    model: Any, samples: Any, parameters: Mapping[str, Tensor], value_gradients: Sequence[Tensor], **counts: Any
) -> MinibatchObjective:
    """Return the event of a minibatch that `train` has taken from the buffer, with these `counts` of it.

    `value_gradients` is a list to which the gradients of the loss at the values, [N, 1], are added in the backward pass.
    """
    valid = _valid_rows(samples)

    def value_gradient() -> Tensor | None:
        whole = torch.stack([one.flatten() for one in value_gradients]).sum(0) if value_gradients else None
        return whole if whole is None or valid is None else whole[valid]

    # their value loss is the mean squared error, ours half of it
    sign = -1.0 if model.policy.optimizer.param_groups[0].get("maximize") else 1.0
    coefficients = {"policy": sign, "value": sign * 2 * float(model.vf_coef), "entropy": sign * float(model.ent_coef)}
    schedule, in_use = schedule_of(model), model.policy.optimizer.param_groups[0]["lr"]
    logged = model.logger.name_to_value.get("train/learning_rate", in_use)
    rate = logged if schedule is None else schedule(model._current_progress_remaining)
    return MinibatchObjective(
        **counts,
        steps=getattr(model, "n_epochs", 1) * minibatches_of(model),
        forward=partial(minibatch_forward, model, samples),
        coefficients=coefficients,
        parameters=parameters,
        optimizer=model.policy.optimizer,
        max_norm=model.max_grad_norm,
        learning_rate=float(rate),
        value_gradient=value_gradient,
    )


def _parts(samples: Any, advantages: Tensor, count: int) -> Iterator[tuple[int, Any, Tensor]]:
    """Parts with the number of independent samples in each, rows or whole sequences, and their advantages."""
    recurrent = "lstm_states" in samples._fields
    sample_count = samples.lstm_states.pi[0].shape[1] if recurrent else len(advantages)
    length = len(advantages) // sample_count
    count = max(1, min(count, sample_count))
    for start, stop in pairwise([sample_count * part // count for part in range(count + 1)]):
        rows, sequences = slice(start * length, stop * length), slice(start, stop)
        columns = zip(samples._fields, samples, strict=True)
        part = type(samples)(*(_cut(name, value, rows, sequences) for name, value in columns))
        yield stop - start, part, advantages[rows]


def _cut(name: str, value: Any, rows: slice, sequences: slice) -> Any:
    """Rows of a column of a minibatch; of recurrent states, [layers, sequences, H] each, the sequences."""
    if name == "lstm_states":
        return type(value)(*(tuple(state[:, sequences].contiguous() for state in pair) for pair in value))
    return {key: entry[rows] for key, entry in value.items()} if isinstance(value, dict) else value[rows]


def _gradient(model: Any, policy: Any, samples: Any, advantages: Tensor) -> Tensor:
    """[d]: all gradients of the loss, concatenated; zero for parameters that are frozen or not reached."""
    values, log_probs, entropy = _evaluate(policy, samples, policy.evaluate_actions)
    columns = LossColumns(
        log_ratio=log_probs - samples.old_log_prob,
        log_probs=log_probs,
        advantages=advantages,
        values=values.flatten(),
        old_values=samples.old_values,
        returns=samples.returns,
        entropy=-log_probs if entropy is None else entropy,
    )
    losses = loss_columns(columns, clip_of(model), clip_of(model, "clip_range_vf"))
    valid = _valid_rows(samples)
    if valid is None:
        losses = {name: column.mean(-1) for name, column in losses.items()}
    else:  # padding is left out of means and of their gradients
        losses = {name: torch.where(valid, column, 0.0).sum(-1) / valid.sum(-1) for name, column in losses.items()}
    loss: Tensor = losses["policy"] + 2 * model.vf_coef * losses["value"] + model.ent_coef * losses["entropy"]
    parameters = list(policy.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
    return torch.cat([(next(gradients) if p.requires_grad else torch.zeros_like(p)).flatten() for p in parameters])


Evaluation: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


def _evaluate(policy: Any, samples: Any, evaluate: Callable[..., Evaluation]) -> Evaluation:
    """Values [N, 1], log-probabilities [N] and entropies [N] of a minibatch, as `train` computes them."""
    actions, fields = samples.actions, samples._fields
    if isinstance(policy.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    memory = [samples.lstm_states, samples.episode_starts] if "lstm_states" in fields else []
    masks = {"action_masks": samples.action_masks} if "action_masks" in fields else {}
    return evaluate(samples.observations, actions, *memory, **masks)


def _valid_rows(samples: Any) -> Tensor | None:
    """[N], bool; None without padding."""
    mask = getattr(samples, "mask", None)
    return None if mask is None else mask > MAX_PADDING
