"""Records of a script between two of its optimizer steps: distributions, recurrent states, gradients, episodes, scalars.

Shapes: T steps, B environments, N rows, K parameters.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributions, nn

from esper_telemetry.adapters.columns import HEAD, FinishedEpisode, HeadColumns, cast_change, head_columns, head_names, join_columns
from esper_telemetry.adapters.environment_facts import environment_facts
from esper_telemetry.adapters.script.autograd_graph import DistributionGraphs, LayerOutputs
from esper_telemetry.core.event_parts import RolloutActions, Transitions
from esper_telemetry.core.metric import segment
from esper_telemetry.core.tensors import gradient_norms
from esper_telemetry.equations.transitions import MAX_CHECKSUM_ENTRIES, checksums, informative

MAX_DISTRIBUTIONS = 64
"""Largest number of distributions recorded for one minibatch: more of them are not heads."""

MAX_DISTRIBUTION_ENTRIES = 1 << 22
"""Entries of the distributions of one rollout that are recorded."""

SAME_LOG_PROB, ALIKE = 1e-3, 0.9
"""Largest difference between log-probabilities that are the same, and correlation of those that differ by a temperature."""

MAX_ESTIMATES = 8
"""Outputs of layers with one unit that are kept."""

MIN_ESTIMATE_ROWS, MAX_ESTIMATE_ROWS = 8, 1 << 18
"""Rows of such outputs, as of a whole rollout."""

MAX_INDICES = 32
"""Indexings of tensors before an optimizer step that are kept."""

MAX_GATE_ENVS = 4
"""Environments whose LSTM inputs are recorded, for the gates."""

MAX_STATE_ENTRIES = 1 << 24
"""Entries of the recurrent states of one rollout that are recorded."""

REPORTED_RETURN = re.compile(
    r"(?P<label>return|rewards?|scores?|(?:\b|_|ep|avg|mean)ret)\b(?:[^\n;,|:=]{0,40}[:=]\s*|\s+)[\[(]?(?P<number>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)
"""A word for the return of episodes in a printed line, and the number after it."""

MAX_REPORTED = 4
"""Such words of one line."""

MAX_RECENT_RETURNS = 100
"""Returns of episodes with which reported ones are compared."""

SAME_RETURN = 0.02
"""Largest difference between a reported return and an environment's, as a share of the largest return."""

MAX_TAGS = 256
"""Different tags of a script's scalars that are copied."""

MAX_DRAWN_STEPS = 1 << 12
"""Steps of which the distributions that actions were drawn from are recorded."""

MAX_STEP_PARTS = 6
"""Parts of what an environment's `step` returns, at most."""

MAX_END_STEPS = 1 << 14
"""Steps of an environment whose ends are recorded: more than a rollout has."""

MAX_STEP_ENTRIES = 1 << 22
"""Entries of the observations of one rollout that are copied: 32 megabytes in double precision."""

EPISODE_TAGS = {"charts/episodic_return", "episodic_return", "charts/episode_reward"}
"""Tags of single episodes' returns."""


class Asked(NamedTuple):
    """Log-probabilities that a distribution was asked for, the actions, if they are a tensor, and its parameters, if they are known."""

    log_probs: Tensor
    actions: Tensor | None
    columns: HeadColumns | None = None

    def copied(self) -> Asked:
        """Return the same without a graph, with a copy of the actions, whose memory a script may use again."""
        actions = None if self.actions is None else self.actions.clone()
        return Asked(self.log_probs.detach(), actions, self.columns)


class DistributionLog:
    """Records the results of the script's distributions. Results before a step of the environments belong to the rollout. Results
    with a graph before a loss belong to the minibatch.

    Attributes:
        chosen: actions [N, ...] of the last log-probabilities with a graph; None if they are not a tensor.
        draws: number of draws so far.
        draws_again: these actions were drawn after the last step of the environments.
        has_tokens: no environment has stepped, so that choices may be tokens of sequences.
    """

    def __init__(self) -> None:
        self.draws_again = False
        self._draws_since_step: deque[Tensor] = deque(maxlen=MAX_DISTRIBUTIONS)
        self._recent: deque[Asked] = deque(maxlen=MAX_DISTRIBUTIONS)
        self._entropies: deque[Tensor] = deque(maxlen=MAX_DISTRIBUTIONS)
        self._drawn: deque[Any] = deque(maxlen=MAX_DISTRIBUTIONS)
        self._last_draw: Tensor | None = None
        self._draws_by_step: list[Tensor] = []
        self._drawn_from: list[HeadColumns] = []
        self._acted: list[Asked] = []
        self._entries = self.draws = self._token_entries = 0
        self._tokens: list[tuple[Tensor, Tensor]] = []
        self.has_tokens = True
        self.chosen: Tensor | None = None

    def add(self, distribution: Any, log_probs: Tensor, actions: Any = None) -> None:
        """Record log-probabilities of actions that a distribution has returned, and its parameters if it is one over rows."""
        chosen = actions.detach() if isinstance(actions, Tensor) else None
        if log_probs.requires_grad:
            self.chosen, self.draws_again = chosen, any(actions is draw for draw in self._draws_since_step)
        self._recent.append(Asked(log_probs, chosen, _columns_of(distribution)))

    def add_sample(self, distribution: Any, draw: Tensor) -> None:
        """Record choices that were drawn from a distribution, for a script that asks for no log-probabilities in acting.

        Draws of a Gaussian may be noise that the script scales itself.
        """
        self.draws += 1
        self._draws_since_step.append(draw)
        if isinstance(distribution, distributions.Categorical):
            self._drawn.append(distribution)
            self._last_draw = draw
            if self.has_tokens and distribution.logits.dim() == 2 and draw.shape == distribution.logits.shape[:1]:
                self.add_tokens(draw, distribution.logits)

    def add_tokens(self, choices: Tensor, logits: Tensor) -> None:
        """Record one choice for each of several sequences [B], and their distributions [B, V], of a program without environments."""
        self._token_entries += logits.numel()
        if self._token_entries <= MAX_DISTRIBUTION_ENTRIES:
            self._tokens.append((choices.detach().reshape(-1), logits.detach()))

    def take_tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Return the choices since the last call with their distributions; empty if they were too many."""
        tokens, entries = self._tokens, self._token_entries
        self._tokens, self._token_entries = [], 0
        return tokens if entries <= MAX_DISTRIBUTION_ENTRIES else []

    def add_entropy(self, entropies: Tensor) -> None:
        """Record entropies that a distribution has returned."""
        if entropies.requires_grad:
            self._entropies.append(entropies)

    def after_env_step(self) -> None:
        """The environments have taken a step: the distributions recorded before it were acted on."""
        columns = [column for one in self._recent for column in one.columns or ()]
        self._entries += sum(part.numel() for column in columns for part in column.values())
        if self._entries <= MAX_DISTRIBUTION_ENTRIES:
            self._acted += [one.copied() for one in self._recent]
            is_known = bool(self._acted) and self._acted[-1].columns is not None
            if not is_known and len(self._drawn_from) < MAX_DRAWN_STEPS:
                self._drawn_from += [one for one in map(_columns_of, self._drawn) if one is not None]
        if self._last_draw is not None and len(self._draws_by_step) < MAX_DRAWN_STEPS:
            self._draws_by_step.append(self._last_draw)
        self._last_draw = None
        self._tokens, self.has_tokens = [], False
        self._drawn.clear()
        self._draws_since_step.clear()
        self._recent.clear()
        self._entropies.clear()

    def take_graphs(self) -> DistributionGraphs:
        """Return what was recorded with a graph: log-probabilities of the minibatch, and entropies since the last call."""
        entropies = list(self._entropies)
        self._entropies.clear()
        return DistributionGraphs([one.log_probs for one in self._recent if one.log_probs.requires_grad], entropies)

    def take_minibatch(self, rows: int, nodes: Container[Any]) -> HeadColumns:
        """Return the heads with that many rows whose log-probabilities are among these nodes of a loss; empty without any.

        Other results with a graph may belong to the next loss, of other rows, before the same optimizer step.
        """
        taken = [one for one in self._recent if one.log_probs.requires_grad and one.log_probs.grad_fn in nodes]
        heads = [_as_rows(head, rows) for one in taken for head in _heads_in(one.columns)]
        heads = [head for head in heads if _rows(head) == rows]
        asked = None if heads or not taken else taken[0].log_probs
        # else it is a loss of steps that were acted on with a graph
        if asked is None or (len(asked) if asked.dim() else 1) == rows:
            left = [one for one in self._recent if all(one is not other for other in taken)]
            self._recent = deque(left, maxlen=MAX_DISTRIBUTIONS)
        return _merge(heads)

    def after_optimizer_step(self) -> None:
        """End the minibatch: later results are of another minibatch, or of acting."""
        self._recent.clear()
        self._drawn.clear()

    def take_draws(self, steps: int, envs: int) -> Tensor | None:
        """Return the choices that were drawn before the steps since the last call, [T, B, 1]; None if they do not fit the rollout."""
        draws, self._draws_by_step = self._draws_by_step, []
        whole = bool(draws) and len(draws) == steps and all(one.numel() == envs for one in draws)
        return torch.stack([one.reshape(envs, 1) for one in draws]) if whole else None

    def take_rollout(self, steps: int, envs: int) -> tuple[list[Asked], HeadColumns]:
        """Return the results in acting since the last call, and the heads of the rollout, [T, B, ...] each, if they fit it."""
        asked, drawn, complete = self._acted, self._drawn_from, self._entries <= MAX_DISTRIBUTION_ENTRIES
        self._acted, self._drawn_from, self._entries = [], [], 0
        if steps > 1 and len(asked) % steps and not len(asked) % (steps - 1):  # asked after each step, not before
            last = [one.copied() for one in self._recent if one.log_probs.shape == asked[-1].log_probs.shape]
            asked += last[: len(asked) // (steps - 1)]
        heads = [_as_rows(head, envs) for one in [one.columns for one in asked if one.columns] or drawn for head in _heads_in(one)]
        at_once = [one.columns for one in self._recent if one.columns is not None and not one.log_probs.requires_grad]
        if complete and at_once and not heads and all(_rows(head) == steps * envs != envs for head in at_once):
            return asked, _merge([head.map(lambda column: column.reshape(steps, envs, -1)) for head in at_once])
        count = len(heads) // steps if steps else 0
        series = [heads[place : steps * count : count] for place in range(count)]
        shapes = [{tuple(column.shape) for part in head for column in part.values()} for head in heads[: steps * count]]
        regular = all(shape == shapes[place % count] for place, shape in enumerate(shapes)) if count else False
        if not complete or not regular or any(_rows(head) != envs for head in heads[: steps * count]):
            return asked, HeadColumns()
        return asked, _merge([join_columns(columns, torch.stack) for columns in series])


def drawn_sequences(
    tokens: Sequence[tuple[Tensor, Tensor]], chosen: Tensor, log_probs: Tensor, valid: Tensor | None = None
) -> RolloutActions | None:
    """Return the recorded sequences of choices that a loss has, [T, B]. None if it has others, or nearly the same log-probabilities as when
    they were drawn, as with a temperature.

    Args:
        tokens: of `DistributionLog.take_tokens`.
        chosen, log_probs: [N] of the loss, sequence by sequence.
        valid: [N], bool: entries that count in the loss; None if all do.
    """
    if not tokens or len({one.shape for _, one in tokens}) > 1:
        return None
    choices, logits = map(torch.stack, zip(*tokens, strict=True))
    for parts in (count for count in range(1, len(choices)) if len(choices) % count == 0):  # of the sequences, one after another
        steps = len(choices) // parts
        count = parts * choices.shape[1]
        own, asked = (_sequences(column, count, steps) for column in (chosen, log_probs))
        if own is None or asked is None or own.shape != asked.shape or len(own) * choices.numel() > MAX_DISTRIBUTION_ENTRIES:
            continue
        drawn, odds = (one.unflatten(0, (parts, steps)).transpose(0, 1).flatten(1, 2) for one in (choices, logits))
        same = (own.unsqueeze(1) == drawn.t()).all(-1)
        acted = odds.log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
        distances = (asked.unsqueeze(1) - acted.t()).abs().amax(-1)  # equal sequences may have different prompts
        in_order = torch.equal(own, drawn.t())
        rows = torch.arange(len(own), device=own.device) if in_order else distances.where(same, math.inf).argmin(1)
        together = torch.corrcoef(torch.stack([asked.flatten(), acted[:, rows].t().flatten()]).double())[0, 1]
        if bool(same.any(1).all()) and (float(distances.gather(1, rows[:, None]).max()) <= SAME_LOG_PROB or not together > ALIKE):
            ended = torch.zeros_like(own.t(), dtype=torch.bool).index_fill_(0, torch.tensor([steps - 1], device=own.device), True)
            counts = None if valid is None else _sequences(valid, count, steps)
            counts = None if counts is None or counts.shape != own.shape else counts.t()
            return RolloutActions(asked.t(), {HEAD: own.t()}, ended, logits={HEAD: odds[:, rows]}, valid=counts, drawn=True)
    return None


def _sequences(column: Tensor, count: int, steps: int) -> Tensor | None:
    """Return the entries [N] of a loss as sequences [B, T]: the last ones of each of `count` sequences, or some whole ones, else None."""
    length, rest = divmod(column.numel(), count)
    if not rest and length >= steps:
        return column.reshape(count, length)[:, -steps:]
    return None if column.numel() % steps else column.reshape(-1, steps)


def _columns_of(distribution: Any) -> HeadColumns | None:
    """Parameters [N, ...] over rows of a choice, of choices between 0 and 1, or of a Gaussian with independent dimensions, else None."""
    base = distribution.base_dist if isinstance(distribution, distributions.Independent) else distribution
    is_choice = isinstance(distribution, distributions.Categorical)
    if isinstance(base, distributions.Bernoulli) and base.logits.dim():
        odds = base.logits if base is not distribution or base.logits.dim() > 1 else base.logits.unsqueeze(-1)
        return head_columns({"": odds.reshape(-1, odds.shape[-1])})
    is_joint = isinstance(distribution, distributions.MultivariateNormal)
    if is_joint and bool(distribution.scale_tril.tril(-1).any()):
        return None
    if not (is_joint or is_choice or isinstance(base, distributions.Normal)):
        return None
    columns = head_columns({"": distribution})
    parameters = [*columns.logits.values(), *columns.means.values(), *columns.log_std.values()]
    if parameters[0].dim() < 1:
        return None
    if any(column.dim() != 2 for column in parameters):  # [N, A] of [T, b, A] and of [A] too
        columns = columns.map(lambda column: column.reshape(-1, column.shape[-1]))
    return columns


def _as_rows(columns: HeadColumns, rows: int) -> HeadColumns:
    """The same with one number in each of that many rows, if a Gaussian was given them as one row."""
    alone = _rows(columns) == 1 != rows and bool(columns.means) and next(iter(columns.means.values())).shape[1] == rows
    return columns.map(lambda column: column.reshape(rows, 1)) if alone else columns


def _heads_in(columns: HeadColumns | None) -> list[HeadColumns]:
    """Each of several choices [N, K, 2] as columns of its own; other columns as they are."""
    odds = None if columns is None else next(iter(columns.logits.values()), None)
    if columns is None or odds is None or odds.dim() < 3:
        return [] if columns is None else [columns]
    return [HeadColumns({"": part}) for part in odds.unbind(1)]


def _rows(columns: HeadColumns) -> int:
    """N of the columns of one head."""
    return len(next(iter((columns.logits or columns.means).values())))


def _merge(heads: Sequence[HeadColumns]) -> HeadColumns:
    """Heads in the order in which they were recorded, under the names of `head_names`; logits of masked actions become finite."""
    named = list(zip(head_names(len(heads)), heads, strict=True))
    logits, *others = ({name: column for name, own in named for column in own[part].values()} for part in range(len(HeadColumns._fields)))
    finite = {name: column.clamp(min=torch.finfo(column.dtype).min) for name, column in logits.items()}
    return HeadColumns(finite, *others)


class LastEstimate(NamedTuple):
    """An output [B] of the acting network after the last step of the environments, and the same one before it, if there is one.

    The output may be the critic's or the policy's. The output before the step decides between them.
    """

    output: Tensor
    before: Tensor | None


class EstimateLog:
    """Keeps the last outputs of layers with few units, such as a critic: scripts release them after computing the targets.

    Attributes:
        without_graph: number of outputs without a graph, which collect data.
    """

    def __init__(self) -> None:
        self.without_graph = 0
        self._single = set[int]()  # weights of layers with one unit
        self._outputs: deque[tuple[int, Tensor]] = deque(maxlen=MAX_ESTIMATES)
        self._with_graph: deque[Tensor] = deque(maxlen=MAX_ESTIMATES)
        self._before_step: dict[nn.Module, Tensor] = {}
        self._after_step: deque[tuple[nn.Module, Tensor]] = deque(maxlen=MAX_ESTIMATES)
        self._acted: dict[int, list[Tensor]] = {}  # outputs at each step by the weight of their layer
        self._entries = 0

    def add(self, layer: nn.Module, output: Tensor) -> None:
        """Record an output [..., K]."""
        self.without_graph += not output.requires_grad
        if len(self._after_step) < MAX_ESTIMATES or not output.requires_grad:  # training step by step has many
            self._after_step.append((layer, output))
        if output.shape[-1] != 1:
            return
        self._single.add(_weight_of(layer))
        if MIN_ESTIMATE_ROWS <= output.numel() <= MAX_ESTIMATE_ROWS:
            self._outputs.append((_weight_of(layer), output.detach()))
        if output.requires_grad and output.numel() > 1:
            self._with_graph.append(output)

    def has_critic(self, policy: Collection[int]) -> bool:
        """Return True if a layer has one unit, as a critic's last one, and the policy does not have its weights."""
        return not self._single.issubset(policy)

    def after_env_step(self) -> None:
        """The environments have taken a step: later outputs are of the states that it led to."""
        if self._after_step:
            self._before_step = {layer: output.detach() for layer, output in self._after_step}
            self._entries += sum(output.numel() for output in self._before_step.values())
            for layer, output in self._before_step.items() if self._entries <= MAX_DISTRIBUTION_ENTRIES else ():
                self._acted.setdefault(_weight_of(layer), []).append(output.clone())
            self._after_step.clear()

    def take_last(self) -> list[LastEstimate]:
        """Return the outputs since the last step of the environments, each column of a layer as one."""
        last = [
            LastEstimate(column, before[:, place] if before is not None and len(before) == len(column) else None)
            for layer, output in self._after_step
            if not output.requires_grad
            for before in (_rows_by_unit(self._before_step.get(layer)),)
            for place, column in enumerate(_rows_by_unit(output).unbind(1))
        ]
        self._after_step.clear()
        return last

    def take_logits(self, source: LayerOutputs | None, steps: int, envs: int) -> Tensor | None:
        """Return the outputs of a layer that were acted on since the last call, [T, B, A]; None if they do not fit the rollout."""
        acted = None if source is None else self._acted_on(source.weight, steps, envs)
        self._acted, self._entries = {}, 0
        return None if acted is None or source is None else acted[..., source.start : source.stop]

    def acting_values(self, steps: int, envs: int) -> Tensor | None:
        """Return the outputs in acting, [T, B], of the only layer with one unit; None without any, or of several."""
        acted = [one for one in (self._acted_on(weight, steps, envs) for weight in self._acted) if one is not None and one.shape[-1] == 1]
        return acted[0].squeeze(-1) if len(acted) == 1 else None

    def of_critic(self, policy: Collection[int], steps: int, envs: int) -> list[Tensor]:
        """Return the outputs of layers with one unit in acting, [T, B], and of many rows, unless the policy has their weights."""
        acted = [self._acted_on(weight, steps, envs) for weight in self._acted if weight not in policy]
        alone = [one.squeeze(-1) for one in acted if one is not None and one.shape[-1] == 1]
        return alone + [output for weight, output in self._outputs if weight not in policy]

    def _acted_on(self, weight: int, steps: int, envs: int) -> Tensor | None:
        recorded = [_rows_by_unit(one) for one in self._acted.get(weight, ())]
        if len(recorded) == steps - 1:  # asked after each step of the environments
            recorded += [_rows_by_unit(output) for layer, output in self._after_step if _weight_of(layer) == weight][:1]
        whole = bool(recorded) and len(recorded) == steps and all(len(one) == envs for one in recorded)
        return torch.stack(recorded) if whole else None

    def take(self) -> list[Tensor]:
        """Return the outputs of many rows since the last call."""
        outputs = [output for _, output in self._outputs]
        self._outputs.clear()
        return outputs

    def take_graphs(self) -> list[Tensor]:
        """Return the outputs with a graph since the last call."""
        outputs = list(self._with_graph)
        self._with_graph.clear()
        return outputs


def _weight_of(layer: nn.Module) -> int:
    return id(layer._parameters.get("weight"))


def _rows_by_unit(output: Any) -> Any:
    return None if output is None else output.detach().reshape(-1, output.shape[-1])


class IndexLog:
    """Records the rows by which a script indexes its tensors before an optimizer step."""

    def __init__(self) -> None:
        self._recent: deque[Any] = deque(maxlen=MAX_INDICES)
        self.sources: deque[int] = deque(maxlen=MAX_INDICES)  # addresses of the tensors

    def add(self, source: Tensor, index: object) -> None:
        """Record rows of a tensor, as whole numbers or as a mask."""
        is_vector = isinstance(index, Tensor | np.ndarray | list) and getattr(index, "ndim", 1) == 1
        if is_vector and len(index) > 1 and source.dim():  # type: ignore[arg-type]
            self._recent.append(index)
            self.sources.append(source.data_ptr())

    def take(self, count: int) -> list[Tensor]:
        """Return the result of `recent`, and forget it."""
        taken = self.recent(count)
        self._recent.clear()
        self.sources.clear()
        return taken

    def recent(self, count: int) -> list[Tensor]:
        """Return copies of the distinct vectors of that many whole numbers, the latest first."""
        taken: list[Tensor] = []
        for index in reversed(self._recent):
            if len(index) != count or (isinstance(index, list) and not all(isinstance(one, int) for one in index)):
                continue
            rows = torch.as_tensor(index)
            if rows.dtype in (torch.long, torch.int32) and not any(torch.equal(rows, other) for other in taken):
                taken.append(rows.long().clone())
        return taken


class RecordedLstm(NamedTuple):
    """A rollout of an LSTM or of a recurrent cell.

    Attributes:
        states: before each step, [T, layers, parts, B, H], with 2 parts of an LSTM.
        inputs: [T, b, I], in the first b environments.
        trained_from_zero: the first pass of training begins with states of zeros.
    """

    module: nn.LSTM | nn.RNNCellBase
    states: Tensor
    inputs: Tensor
    trained_from_zero: bool = False


class LstmLog:
    """Records the steps of the first LSTM, or recurrent cell, that is stepped without gradients."""

    def __init__(self) -> None:
        self._module: nn.LSTM | nn.RNNCellBase | None = None
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._entries = 0
        self._trained_from_zero: bool | None = None

    def add(self, module: nn.Module, arguments: tuple[object, ...]) -> None:
        """Record the arguments of a call of one step without gradients, and the states of the first call with them."""
        if not isinstance(module, nn.LSTM | nn.RNNCellBase):
            return
        inputs, states, *_ = (*arguments, None, None)
        is_cell = isinstance(module, nn.RNNCellBase)
        if is_cell and states is not None:
            states = tuple([part.unsqueeze(0) for part in (states if isinstance(states, tuple) else (states,))])
        if torch.is_grad_enabled():
            if self._trained_from_zero is None and module is self._module:
                self._trained_from_zero = not (isinstance(states, tuple) and any(bool(part.any()) for part in states))
            return
        if not isinstance(inputs, Tensor) or not isinstance(states, tuple) or inputs.dim() != (2 if is_cell else 3):
            return
        is_step = is_cell or (inputs.shape[1 if module.batch_first else 0] == 1 and not module.bidirectional)
        if not is_step or self._module not in (None, module):
            return
        self._module, self._trained_from_zero = module, None
        entries = len(states) * states[0].numel()
        if self._entries + entries <= MAX_STATE_ENTRIES:
            self._entries += entries
            rows = inputs.reshape(-1, inputs.shape[-1])[:MAX_GATE_ENVS]
            self._steps.append((torch.stack([part.detach() for part in states], 1), rows.detach().clone()))

    def take(self, steps: int, envs: int) -> RecordedLstm | None:
        """Return the records of a rollout's T steps since the last call; None if they do not fit it."""
        recorded, self._steps, self._entries = self._steps[: steps + 2], [], 0
        from_zero, self._trained_from_zero = self._trained_from_zero, None
        # another call may estimate the value after the last step
        is_whole = steps <= len(recorded) <= steps + 1 and all(states.shape[2] == envs for states, _ in recorded)
        if self._module is None or not recorded or not is_whole:
            return None
        states, inputs = (torch.stack(column) for column in zip(*recorded[:steps], strict=True))
        return RecordedLstm(self._module, states, inputs, bool(from_zero))


class StepGradients(NamedTuple):
    """Norms [K] of the gradients of one optimizer step before clipping, names of their parameters, and the limit."""

    names: tuple[str, ...]
    norms: Tensor
    max_norm: float | None


class ClipCall(NamedTuple):
    """A call that clips gradients: `id` of its parameters, and the limit of their norm, None if it clips by value."""

    parameters: frozenset[int]
    max_norm: float | None


class ClipLog:
    """Records calls that clip gradients, and the norms before the first one, until the optimizer of these gradients takes its step.

    Attributes:
        max_norm: to which the script clipped last; None if it has not.
        calls: since the last step of the optimizer of their gradients.
    """

    def __init__(self) -> None:
        self.max_norm: float | None = None
        self.calls: list[ClipCall] = []
        self._norms: dict[int, Tensor] = {}

    @torch.no_grad()
    def before_clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        """Record gradients that are about to be clipped together. Gradients that were already clipped in this step keep their norms."""
        self._add(parameters)
        self.calls.append(ClipCall(frozenset(map(id, parameters)), max_norm))
        self.max_norm = self.max_norm if max_norm is None else max_norm

    def clear(self) -> None:
        """Forget the norms: they are recorded, or the step is not PPO's."""
        self._norms = {}

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> StepGradients | None:
        """Return the norms of these parameters; None if none has a gradient. The limit is None if they were clipped in several parts."""
        present = {name: p for name, p in parameters.items() if p.grad is not None}
        unclipped = self._add(present.values())
        norms, own = self._norms, set(map(id, present.values()))
        self.clear()
        if not present:
            return None
        limits = [call.max_norm for call in self.calls if call.max_norm is not None and own & call.parameters]
        stacked = torch.stack([norms[id(p)] for p in present.values()])
        return StepGradients(tuple(present), stacked, limits[0] if len(limits) == 1 and not unclipped else None)

    def take_calls(self, parameters: Sequence[Tensor]) -> list[ClipCall]:
        """Return the calls for some of these parameters, whose optimizer has taken its step, and forget them."""
        own = set(map(id, parameters))
        taken = [call for call in self.calls if own & call.parameters]
        self.calls = [call for call in self.calls if not own & call.parameters]
        return taken

    def _add(self, parameters: Any) -> bool:
        """Add the norms that are missing; return True if any was."""
        gradients = {id(p): p.grad for p in parameters if p.grad is not None and id(p) not in self._norms}
        if gradients:
            self._norms.update(zip(gradients, gradient_norms(list(gradients.values())).unbind(), strict=True))
        return bool(gradients)


class _Running:
    """Return and length of the current episodes in one environment, or in several that step together.

    Attributes:
        env: weak reference to it, which is of class `kind`.
        index: number of the environment, in the order in which they were stepped first.
        last_call: its last step since the rollout began; None without one.
        inner: `id` of the environments in it, in the order of their rows.
    """

    def __init__(self, env: Any, size: int, index: int) -> None:
        self.env, self.kind = _reference(env), type(env)
        self.width = 0  # entries of an observation that are recorded
        self.index = index
        self.last_call: EnvCall | None = None
        self.inner: list[int] = []
        self.returns = np.zeros(size)
        self.lengths = np.zeros(size, dtype=int)
        self._over: Any = None  # [size], bool: of the last step, if any was
        self._limited = False  # the last step was at a time limit, and no reset came after it
        mode = str(getattr(env, "metadata", {}).get("autoreset_mode", "")).upper()
        self._resets_next = "NEXT_STEP" in mode or "NEXTSTEP" in mode

    def count(self, rewards: Any, ended: Any) -> list[tuple[float, int]]:
        """Add a step, [size] each, and return the episodes that ended; the step after an end may be a reset, which does not count."""
        over, self._over = np.zeros(len(ended), dtype=bool) if self._over is None else self._over, None
        self.returns += np.where(over, 0.0, rewards)
        self.lengths += ~over
        ended = ended & ~over
        finished = [(float(self.returns[i]), int(self.lengths[i])) for i in np.flatnonzero(ended)]
        self.returns[ended], self.lengths[ended] = 0.0, 0
        self._over = ended if self._resets_next and ended.any() else None
        return finished

    def goes_on(self, flags: Any) -> bool:
        """Return True for a step [2, 1] that repeats a time limit: the script ignores limits, and has not reset the environment."""
        repeated, self._limited = self._limited, flags.shape[1] == 1 and bool(flags[1, 0])
        return repeated and self._limited

    def adds(self, rewards: Any, *flags: Any) -> bool:
        """Add a step at which no episode ends, and that is like the steps before; return False, without adding it, for any other step."""
        if self.last_call is not None or self._over is not None or self._limited:
            return False
        one = isinstance(rewards, int | float | np.number)
        if one:
            fits = len(self.returns) == 1 and all(isinstance(flag, bool | np.bool_) and not flag for flag in flags)
        else:
            fits = all(isinstance(part, np.ndarray) and part.shape == self.returns.shape for part in (rewards, *flags))
            fits = fits and not any(flag.dtype != bool or flag.any() for flag in flags)
        if fits:
            self.returns += rewards
            self.lengths += 1
        return fits

    def restart(self) -> None:
        """Restart all of them."""
        self.returns[:], self.lengths[:], self._over, self._limited = 0.0, 0, None, False


@dataclass
class EnvCall:
    """A step of b environments together.

    Attributes:
        env: index of the environment that was called.
        flags: [2, b], bool: terminated, truncated.
        rewards: [b].
        returned, received: observations and actions [b, n], in the entries of which checksums are taken; None for anything but numbers.
        finals: last observations [n] of episodes by place, if the environment shows them.
        reset_to: [1, n], what a single environment returned when it was reset afterwards: the observation to be acted on next.
        cut: the script has ended the episode.
        cast: see `Transitions`.
        raw: [b], rewards of the environments within, before wrappers changed them; None if they are not known.
        decision: number of calls of the network before it.
    """

    env: int
    flags: Any
    rewards: Any
    returned: Any
    received: Any
    finals: dict[int, Any]
    reset_to: Any = None
    cut: bool = False
    cast: float = 0.0
    raw: Any = None
    decision: int = 0


MIN_REPEATS, MIN_DECISIONS = 1.5, 4
"""Steps for each call of the network from which the program repeats actions, and number of such calls."""


def without_repeats(calls: Sequence[EnvCall]) -> list[EnvCall]:
    """Return one call for each decision if the program repeats each action for several steps, with the sum of their rewards."""
    groups: dict[tuple[int, int], list[EnvCall]] = {}
    for call in calls:
        groups.setdefault((call.env, call.decision), []).append(call)
    repeats = (
        np.array_equal(one.received, own[0].received) and not last.flags.any()
        for own in groups.values()
        for last, one in itertools.pairwise(own)
    )
    few = len({call.decision for call in calls}) < MIN_DECISIONS or len(calls) < MIN_REPEATS * len(groups)
    if few or any(call.received is None for call in calls) or not all(repeats):
        return [*calls]
    return [
        replace(
            own[-1],
            flags=np.any([one.flags for one in own], 0),
            rewards=np.sum([one.rewards for one in own], 0),
            raw=None if any(one.raw is None for one in own) else np.sum([one.raw for one in own], 0),
            finals={place: final for one in own for place, final in one.finals.items()},
            cast=max(one.cast for one in own),
        )
        for own in groups.values()
    ]


class ObservedSteps:
    """What the environments returned in a rollout of T steps of B environments.

    Args:
        calls: the same number of each environment, several ones of one row each.
        space: of the actions.

    Attributes:
        steps, envs: T, B.
        in_turns: the environments took their steps together, or in turns.
        ended: [T, B], bool: steps that ended an episode.
        time_limits: [T, B], bool: those by truncation.
        reset: [T, B], bool: steps after which the script acted on the first observation of another episode.
        rewards: [T, B], float64.
        raw_rewards: [T, B], float64, before wrappers changed them; None if they have not, or these are not known.
        received: [T, B, n], float64, actions that the environments received; None for anything but numbers.
        cut: the script has ended the episode of the last step, perhaps only the rollout's part of it.
    """

    def __init__(self, calls: Sequence[EnvCall], space: Any) -> None:
        self.cut = calls[-1].cut
        column = {env: place for place, env in enumerate(sorted({call.env for call in calls}))}
        counts = Counter[int]()
        self._calls, self._space = calls, space
        self._places: list[tuple[int, int]] = []  # step and first environment of each call
        for call in calls:
            self._places.append((counts[call.env], column[call.env]))
            counts[call.env] += 1
        self.steps, self.envs = max(counts.values()), len(calls[0].rewards) if len(column) == 1 else len(column)
        self.in_turns = self._places == sorted(self._places)
        terminated, truncated = (self._grid([call.flags[place] for call in calls]) for place in (0, 1))
        self.ended, self.time_limits = (torch.from_numpy(terminated | truncated), torch.from_numpy(truncated & ~terminated))
        self.reset = torch.zeros_like(self.ended)
        for (step, env), call in zip(self._places, calls, strict=True):
            self.reset[step, [env] if call.reset_to is not None else [env + place for place in call.finals]] = True
        self.rewards = torch.from_numpy(self._grid([call.rewards for call in calls]))
        raw, received = (self._grid([getattr(call, name) for call in calls]) for name in ("raw", "received"))
        self.received = None if received is None else torch.from_numpy(received)
        self.raw_rewards = None if raw is None or (raw == self.rewards.numpy()).all() else torch.from_numpy(raw)

    @classmethod
    def of(cls, calls: Sequence[EnvCall], space: Any) -> ObservedSteps | None:
        """Return the steps of these calls; None unless all environments took the same number of steps."""
        sizes = {(call.env, len(call.rewards)) for call in calls}
        whole = len({env for env, _ in sizes}) == len(sizes) and (len(sizes) == 1 or {size for _, size in sizes} == {1})
        counts = Counter(call.env for call in calls)
        return cls(calls, space) if 0 < len(calls) < MAX_END_STEPS and whole and len({*counts.values()}) == 1 else None

    def _grid(self, rows: Sequence[Any]) -> Any:
        """Return the rows of each call, [b, ...], as [T, B, ...]; None if they differ in shape."""
        if any(one is None or one.shape[1:] != rows[0].shape[1:] for one in rows):
            return None
        table = np.zeros((self.steps, self.envs, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for (step, env), one in zip(self._places, rows, strict=True):
            table[step, env : env + len(one)] = one
        return table

    def log_probs(self, logits: Tensor) -> list[Tensor] | None:
        """Return the log-probabilities [B] of the choices that the environments received in each step; None if they are no choices."""
        if self.received is None or self.received.shape != (*logits.shape[:2], 1):
            return None
        chosen = self.received.to(logits.device).long()
        if int(chosen.min()) < 0 or int(chosen.max()) >= logits.shape[-1]:
            return None
        return list(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1))

    def bounds(self, actions: Tensor) -> Tensor | None:
        """Return the bounds [2, D] of the actions; None unless the environments received the stored ones [T, B, D], perhaps cut there."""
        if getattr(self._space, "low", None) is None or not np.isfinite([self._space.low, self._space.high]).all():
            return None
        low, high = (np.asarray(bound, dtype=np.float64).reshape(-1) for bound in (self._space.low, self._space.high))
        sent, arrived = actions.detach().cpu().double().numpy(), None if self.received is None else self.received.numpy()
        if arrived is None or arrived.shape != sent.shape or len(low) != sent.shape[-1]:
            return None
        pairs = ((sent, arrived), (sent.clip(low, high), arrived), (sent, arrived.clip(low, high)))
        same = any(np.allclose(*pair, atol=1e-6) for pair in pairs)
        return torch.from_numpy(np.stack([low, high])) if same else None

    def transitions(self, stored: Tensor, actions: Tensor | None) -> Transitions | None:
        """Return the steps with the stored observations [T, B, ...] and actions [T, B, D]; None if these are of another shape."""
        calls, observations = self._calls, stored.detach().cpu()
        size = observations[0, 0].numel()
        table = self._grid([call.returned if call.reset_to is None else call.reset_to for call in calls])
        width = len(range(0, size, -(-size // MAX_CHECKSUM_ENTRIES)))
        if table is None or table.shape != (*stored.shape[:2], width):
            return None
        outcomes = torch.from_numpy(table).to(observations.dtype if observations.is_floating_point() else torch.float64)
        whole = outcomes.trunc()
        ends = torch.full(outcomes.shape[:2], torch.nan, dtype=torch.float64)
        for (step, env), call in zip(self._places, calls, strict=True):
            for place, final in (call.finals if call.reset_to is None else {0: call.returned[0]}).items():
                ends[step, env + place] = checksums(torch.from_numpy(final).to(outcomes).reshape(1, 1, -1))[0, 0]
        sent = None if actions is None else actions.detach().cpu().double().reshape(*ends.shape, -1)
        received = self.received
        if sent is None or received is None or received.shape != sent.shape:
            sent = received = None
        return Transitions(
            inputs=checksums(observations),
            outcomes=checksums(outcomes),
            finals=ends,
            rewards=self.rewards,
            informative=informative(observations),
            sent=None if sent is None else checksums(sent),
            received=None if received is None else checksums(received),
            cast=max(call.cast for call in calls),
            whole=None if torch.equal(whole, outcomes) else checksums(whole),
        )


def _rows_of(value: Any, envs: int) -> Any:
    """A copy [B, n] of some entries of each of B rows, float64; None for anything but numbers."""
    numbers = as_numbers(value)
    if numbers is None or numbers.size % envs:
        return None
    rows = numbers.reshape(envs, -1)
    return rows[:, :: -(-rows.shape[1] // MAX_CHECKSUM_ENTRIES)].astype(np.float64)


def as_numbers(value: Any) -> Any:
    """Return an array on the host; None for anything but numbers."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:  # parts of different shapes
        return None
    return array if array.dtype.kind in "fiub" and array.size else None


def _reference(env: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one to an object of a class that allows no other."""
    try:
        return weakref.ref(env)
    except TypeError:
        return lambda: env


def _cast_by(env: Any) -> float:
    """Largest change of an observation by the dtype in which Gymnasium's `SyncVectorEnv` joins those of its environments."""
    returned = getattr(getattr(env, "unwrapped", env), "_env_obs", ())
    dtype = getattr(getattr(env, "single_observation_space", None), "dtype", None)
    return max((cast_change(one, dtype) for one in returned), default=0.0)


class EpisodeLog:
    """Records the steps of environments, and counts episodes there: scripts written for Gymnasium 0.29 see none under 1.x.

    It records the environments that the script has stepped before its first optimizer step. A later one replaces one that is gone: a
    script may make an environment for each episode.

    Attributes:
        steps: environment steps so far.
        hidden: episodes ended, and the environments report them in a way that scripts for Gymnasium 0.29 do not read.
        closed: no further environments join.
        inside, resetting: a step, or a reset, of an environment is in progress.
        inner_rewards: rewards in the current step of the innermost environments within the stepped one, by `id`.
        inner_steps: of such environments so far.
        sums_inner: record these rewards; else they are assumed to be those that the stepped environment returns.
        inner_differ: they have differed from those.
        stepped: object of a class of the script whose `step` is in progress: it may reset itself.
        resets: of the environments so far.
        seconds: spent in environments since the rollout began.
        decisions: calls of the network so far, by which actions may have been chosen.
    """

    def __init__(self) -> None:
        self.steps = self.decisions = 0
        self.inside = self.resetting = False
        self.stepped: Any = None
        self.resets = 0
        self.inner_rewards: dict[int, float] = {}
        self.inner_steps = 0
        self.sums_inner, self.inner_differ = True, False
        self.hidden = False
        self.closed = False
        self.seconds = 0.0
        self._running: dict[int, _Running] = {}  # by `id`: environments may be without a hash
        self._finished: list[FinishedEpisode] = []
        self._calls: list[EnvCall] = []
        self._count = self._entries = 0  # calls in the rollout, and entries of their observations
        self._last_count = 0  # calls in the rollout before
        self._cut_lengths: set[int] = set()  # of episodes that the script has ended within rollouts
        self._reported = False

    @property
    def kinds(self) -> str:
        """Names of the classes of the environments, without wrappers."""
        known = ((one.kind, one.env()) for one in self._running.values())
        return ", ".join(sorted({(kind if env is None else type(getattr(env, "unwrapped", env))).__name__ for kind, env in known}))

    @property
    def busy(self) -> bool:
        """True if steps are taken by environments, not by the script."""
        return self.inside or self.resetting

    def includes(self, env: Any) -> bool:
        """Return True for an environment of training; one that is stepped before training begins becomes one."""
        if self._of(env) is None and not self.closed:
            index = 1 + max((one.index for one in self._running.values()), default=-1)
            self._running[id(env)] = _Running(env, getattr(env, "num_envs", 1), index)
        return self._of(env) is not None

    def _of(self, env: Any) -> _Running | None:
        """Return the entry of an environment: a new one takes the place of the first of its class that no longer exists."""
        running = self._running.get(id(env))
        if running is not None and running.env() is env:
            return running
        gone = (one for one in self._running.values() if one.kind is type(env) and one.env() is None)
        first = min(gone, key=lambda one: one.index, default=None)
        if first is not None:
            first.env = _reference(env)
            others = [one for one in self._running.values() if one is not first]
            self._running = {-1 - one.index if (own := one.env()) is None else id(own): one for one in others} | {id(env): first}
        return first

    def counts(self, env: Any, result: Any) -> bool:
        """Count a step of an environment of Gymnasium within its episodes, as most steps are; return False for any other step."""
        running = self._running.get(id(env))
        if running is None or running.env() is not env or self.sums_inner or type(result) is not tuple or len(result) != 5:
            return False
        _, rewards, terminated, truncated, infos = result
        is_plain = type(infos) is dict and infos.keys().isdisjoint(("episode", "final_info"))
        if is_plain and running.adds(rewards, terminated, truncated):
            self.steps += len(running.returns)
            self._count += 1
            return True
        return False

    def after_step(self, env: Any, result: Any, action: Any = None, *, foreign: bool = False, traced: bool = True) -> None:
        """Record a step. Its result has observations, rewards, terminations, truncations and infos, or `done` instead of both flags.

        Args:
            foreign: the environment is not of a class of Gymnasium, whose reports of episodes scripts may miss.
            traced: keep the step itself; else only its episodes are counted.
        """
        if len(result) == 4:
            result = _with_two_flags(result)
        observations, rewards, *both, infos = result
        running = self._running[id(env)]
        flags = np.stack([np.asarray(one, dtype=bool).reshape(-1) for one in both])
        size, ended = flags.shape[1], flags[0] | flags[1]
        if len(running.returns) != size:  # several environments of a class that does not say so
            running = self._running[id(env)] = _Running(env, size, running.index)
        paid = np.array(rewards, dtype=np.float64).reshape(size)
        raw = self._raw_rewards(running, size) if self.sums_inner else None
        self.inner_differ = self.inner_differ or (raw is not None and not np.array_equal(raw, paid))
        if running.last_call is not None and running.last_call.cut:
            running.last_call.flags[1] = True
        if running.goes_on(flags):
            flags[1], ended = False, flags[0]
        if traced and len(self._calls) < MAX_END_STEPS:
            rows = _rows_of(observations, size) if self._entries <= MAX_STEP_ENTRIES else None
            self._entries += 0 if rows is None else rows.size
            finals: Any = infos.get("final_obs", infos.get("final_observation", ())) if isinstance(infos, Mapping) else ()
            places = () if rows is None or len(finals) != size else np.flatnonzero(ended)
            last = {int(place): final for place in places if (final := _rows_of(finals[place], 1)) is not None}
            width = running.width = 0 if rows is None else rows.shape[1]
            last = {place: final[0] for place, final in last.items() if final.shape[1] == width}
            received = None if rows is None else _rows_of(action, size)
            running.last_call = EnvCall(running.index, flags, paid, rows, received, last, None, False, _cast_by(env), raw, self.decisions)
            self._calls.append(running.last_call)
        self.steps += size
        self._count += 1
        counted = running.count(paid if raw is None else raw, ended)
        reported = _reported_episodes(infos)
        self._reported = self._reported or reported is not None
        self.hidden = self.hidden or (bool(counted) and not foreign and "final_info" not in infos)
        episodes = (reported or []) if self._reported else counted
        self._finished += [FinishedEpisode(*episode, self._count - 1) for episode in episodes]

    def add_inner_step(self, env: Any, result: Any) -> None:
        """Record the step of an environment within the stepped one, which steps no other one itself."""
        self.inner_steps += 1
        reward = result[1] if isinstance(result, tuple) and len(result) > 3 else None
        if isinstance(reward, int | float | np.number):
            self.inner_rewards[id(env)] = self.inner_rewards.get(id(env), 0.0) + float(reward)

    def _raw_rewards(self, running: _Running, size: int) -> Any:
        """Return the rewards [size] of the environments in the stepped one; None without any, or if all have been 0 so far."""
        rewards, self.inner_rewards = self.inner_rewards, {}
        if len(rewards) == size and not running.inner and any(rewards.values()):
            running.inner = [*rewards]
        known = running.inner and rewards.keys() <= {*running.inner}
        return np.array([rewards.get(one, 0.0) for one in running.inner]) if known else None

    def reset(self, env: Any, result: Any = None) -> None:
        """Restart all episodes of an environment, which returned that. The script itself has ended the current episode."""
        running = self._of(env)
        if running is None:
            return
        call, self.resets = running.last_call, self.resets + 1
        # an episode that a rollout's end cuts has a partial return, unless it is the whole rollout
        for total, length in zip(running.returns.tolist(), running.lengths.tolist(), strict=True):
            if length and (call is not None or length >= self._last_count):
                self._finished.append(FinishedEpisode(total, length, max(0, self._count - 1)))
        if call is not None and running.lengths.any():
            call.cut = True
            self._cut_lengths |= {*running.lengths.tolist()}
        running.restart()
        if call is not None and call.returned is not None and len(running.returns) == 1 and not hasattr(env, "num_envs"):
            rows = _rows_of(result[0] if isinstance(result, tuple) else result, 1)
            call.reset_to = rows if rows is not None and rows.shape == call.returned.shape else call.reset_to

    @property
    def recorded(self) -> int:
        """Number of steps in the rollout that have been recorded."""
        return len(self._calls)

    def show(self, result: Any, *, reset: bool = False) -> None:
        """Replace the last recorded observation by that in the result of a wrapper, of the same step or of the `reset` after it."""
        call = self._calls[-1] if self._calls else None
        parts = (result[0] if isinstance(result, tuple) else result,) if reset else step_parts(result)
        rows = None if call is None or call.returned is None or parts is None else _rows_of(parts[0], len(call.rewards))
        if call is None or rows is None:
            return
        if not reset:
            call.returned = rows
        elif rows.shape == call.returned.shape:
            call.reset_to = rows

    def begins(self, env: Any, result: Any, steps: int) -> bool:
        """Record the result of a method that may be the reset of an environment; return False if it is not one.

        A reset returns an observation. A method that is called again within an episode after a single step only shows the state.

        Args:
            steps: number of steps when the method was called last.
        """
        running = self._of(env)
        if running is None:  # an environment that does not train
            return True
        size = len(running.returns)
        rows = _rows_of(result[0] if isinstance(result, tuple) and result else result, size)
        width = 0 if rows is None else rows.shape[1]
        is_observation = width == running.width or (running.width == 0 and width > 0)
        if not is_observation or (running.lengths.any() and self.steps - steps <= size):
            return False
        self.reset(env, result)
        return True

    def collected(self) -> ObservedSteps | None:
        """Return the steps since the last `take`; None unless all environments took the same number of steps."""
        envs = [running.env() for running in self._running.values()]
        spaces = [getattr(env, "single_action_space", getattr(env, "action_space", None)) for env in envs]
        observed = ObservedSteps.of(without_repeats(self._calls), spaces[0] if spaces else None)
        if observed is not None:  # a script that always ends episodes at one length has ended the last one there, too
            lengths = {length for running in self._running.values() for length in running.lengths.tolist()}
            observed.cut |= lengths == self._cut_lengths and len(lengths) == 1
        return observed

    def facts(self) -> dict[str, Any]:
        """Return the facts of the environment that the script stepped first."""
        first = min(self._running.values(), key=lambda one: one.index, default=None)
        found: dict[str, Any] = {} if first is None else environment_facts(first.env())
        return {**found, "normalize_observations": True} if "NormalizeObs" in found.get("env_wrappers", "") else found

    def take(self) -> tuple[list[FinishedEpisode], float]:
        """Return the episodes that ended since the last call, and the seconds that were spent in environments."""
        episodes, seconds = self._finished, self.seconds
        self._last_count = self._count
        self._finished, self.seconds, self._count, self._calls, self._entries = [], 0.0, 0, [], 0
        for running in self._running.values():
            running.last_call = None
        return episodes, seconds


def step_parts(result: Any) -> tuple[Any, ...] | None:
    """Return observations, rewards, one or two flags and information of what an environment's `step` returned; None of other results.

    Flags are logical, or only zeros and ones. Other numbers are rewards, usually the second part, and what is left are observations.
    A dictionary or an instance of a dataclass has logical flags.
    """
    named = named_parts(result)
    result = result if named is None or not any(map(is_flag, named)) else named
    if not isinstance(result, tuple | list) or not 3 <= len(result) <= MAX_STEP_PARTS:
        return None
    if len(result) == 5 and isinstance(result[4], dict):  # the usual case: environments of Gymnasium
        first, amount, *ends, information = result
        if isinstance(amount, int | float | np.number) and all(isinstance(one, bool | np.bool_) for one in ends):
            return first, np.asarray([amount]), *(np.asarray([one], dtype=bool) for one in ends), information
        arrays = isinstance(amount, np.ndarray) and all(isinstance(one, np.ndarray) and one.dtype == bool for one in ends)
        if arrays and amount.ndim == 1 and amount.dtype.kind in "fiu" and ends[0].shape == ends[1].shape == amount.shape:
            return first, amount, *ends, information
    columns = {place: column for place, one in enumerate(result) if place and (column := as_numbers(one)) is not None}
    infos = next((one for one in result if _is_information(one)), None)
    # without information, numbers may be an agent's: actions, log-probabilities, values
    kinds = "fiub" if infos is not None else "fb" if len(result) == 3 else "b"
    binary = [one for one in columns if columns[one].dtype.kind in kinds and _is_binary(columns[one])]
    logical = [place for place in binary if columns[place].dtype.kind == "b"]
    flags = [one for one in logical if one > 1] or logical or [one for one in binary if one > 1]
    sizes = {columns[place].size for place in flags}
    if len(sizes) != 1 or len(flags) > 2:
        return None
    first = as_numbers(result[0])
    paid = [place for place, column in columns.items() if place not in flags and column.size in sizes]
    if flags[0] == 1 and first is not None and first.ndim <= 1 and first.size in sizes:  # what follows a flag is no reward
        paid = []
    elif not paid and sizes == {1}:  # environments of a batch may share a flag
        rows = len(first) if first is not None and first.ndim > 1 else 0
        paid = [place for place, column in columns.items() if place not in flags and column.shape == (rows,)]
    columns[0] = None if paid else first
    if not paid and (columns[0] is None or columns[0].size not in sizes):
        return None
    # whole numbers may be of the state
    real = (place for place in paid if columns[place].dtype.kind == "f" and place < flags[0])
    reward = next(real, paid[0]) if paid else 0
    seen = next((place for place in range(len(result)) if place not in (reward, *flags)), reward)
    return (
        result[seen],
        columns[reward].reshape(-1),
        *(np.broadcast_to(columns[one].reshape(-1).astype(bool), columns[reward].size) for one in flags),
        {} if infos is None else infos,
    )


def unflagged_step(result: object) -> list[Any] | None:
    """Return observations, rewards, flags and information of a step that returned an observation and a reward, perhaps with information.

    An observation of None is the end of the episode. A third part that is 0 or 1 is the flag. Returns None of other results.
    """
    parts = [one for one in result if not isinstance(one, Mapping)] if isinstance(result, tuple | list) and len(result) <= 4 else []
    if not 2 <= len(parts) <= 3:
        return None
    for seen, reward, kinds in ((parts[0], parts[1], "fiu"), (parts[1], parts[0], "f")):
        paid, shown = as_numbers(reward), as_numbers(seen)
        if paid is None or paid.ndim > 1 or paid.dtype.kind not in kinds or getattr(reward, "requires_grad", False):
            continue
        over = np.full(paid.size, seen is None) if len(parts) == 2 else as_numbers(parts[2])
        if over is None or over.shape not in (paid.shape, (paid.size,)) or not _is_binary(over):
            continue
        if seen is None or (shown is not None and shown.ndim and (not paid.ndim or len(shown) == len(paid))):
            return [seen, paid.reshape(-1), over.reshape(-1).astype(bool), {}]
    return None


def named_parts(result: object) -> tuple[Any, ...] | None:
    """Return the values of a dictionary, or of an instance of a dataclass; None of others."""
    if isinstance(result, Mapping):
        return tuple(result.values())
    if is_dataclass(result) and not isinstance(result, type):
        return tuple(getattr(result, field.name) for field in fields(result))
    return None


def is_flag(part: object) -> bool:
    """Return True for a logical part, not only a number that is 0 or 1."""
    return isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) in ("bool", "torch.bool")


def _is_binary(column: np.ndarray[Any, Any]) -> bool:
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def _is_information(part: Any) -> bool:
    each = part if isinstance(part, list | tuple) else [part]
    return bool(each) and all(isinstance(one, Mapping) for one in each)


def _with_two_flags(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The result of a step of an environment of Gym before 0.26, with the flags of Gymnasium."""
    observations, rewards, done, infos = result
    each = (infos,) if isinstance(infos, Mapping) else infos if isinstance(infos, Sequence) else ()
    marks = [one.get("TimeLimit.truncated", False) for one in each if isinstance(one, Mapping)]
    ended, cut = (np.asarray(flags, dtype=bool).reshape(-1) for flags in (done, marks))
    cut = cut if cut.size in (1, ended.size) else np.zeros_like(ended)
    return observations, rewards, ended & ~cut, ended & cut, infos


def _reported_episodes(infos: Any) -> list[tuple[float, int]] | None:
    """Episodes that `RecordEpisodeStatistics` reports, with rewards from before other wrappers; None without it."""
    if not isinstance(infos, Mapping):
        return None
    if "episode" not in infos and isinstance(infos.get("final_info"), Mapping):
        infos = infos["final_info"]
    episode = infos.get("episode")
    if not isinstance(episode, Mapping) or "r" not in episode or "l" not in episode:
        return None
    returns, lengths = np.atleast_1d(episode["r"]), np.atleast_1d(episode["l"])
    which = np.atleast_1d(infos.get("_episode", np.ones(len(returns), dtype=bool)))
    return [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(which)]


class ReturnLog:
    """Returns of episodes that a script prints or writes itself. They are used if they differ from the environments' returns."""

    def __init__(self) -> None:
        self._reported: dict[str, list[float]] = {}
        self._own: deque[float] = deque(maxlen=MAX_RECENT_RETURNS)

    def add_text(self, text: str) -> None:
        """Record the first number after each word for a return in a printed line."""
        for match in islice(REPORTED_RETURN.finditer(text), MAX_REPORTED):
            self.add(match["label"], float(match["number"]))

    def add(self, label: str, number: float) -> None:
        """Record a number whose name shows that it is a return."""
        if math.isfinite(number) and len(self._reported.setdefault(label.lower(), [])) < MAX_RECENT_RETURNS:
            self._reported[label.lower()].append(number)

    def take(self, episodes: Sequence[FinishedEpisode]) -> list[FinishedEpisode]:
        """Return the episodes that ended in a rollout: these, unless the script reports other returns since the last call."""
        self._own += [one.returned for one in episodes]
        reported, self._reported = self._reported, {}
        sure = {label: numbers for label, numbers in reported.items() if "reward" not in label}
        numbers = max((sure if self._own else reported).values(), key=len, default=[])
        low, high = (min(self._own), max(self._own)) if self._own else (math.inf, -math.inf)
        margin = SAME_RETURN * max(abs(low), abs(high)) if self._own else 0.0
        if not numbers or all(low - margin <= one <= high + margin for one in numbers):
            return [*episodes]
        length = round(sum(one.length for one in episodes) / len(episodes)) if episodes else 1
        return [FinishedEpisode(one, length, 0) for one in numbers]


class ScalarLog:
    """Means of the values of each tag that a script has written to its SummaryWriter since the last record.

    Attributes:
        tags: that the script has written.
    """

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, tag: Any, value: Any) -> None:
        """Record a scalar; anything except a finite number is ignored."""
        if not isinstance(tag, str) or (tag not in self.tags and len(self.tags) >= MAX_TAGS):
            return
        self.tags.add(tag)
        number = float(value.item() if hasattr(value, "item") else value)  # an array with one entry too
        if math.isfinite(number):
            total, count = self._sums.get(tag, (0.0, 0))
            self._sums[tag] = (total + number, count + 1)

    def take(self) -> dict[str, float]:
        """Return means by key, `script/losses/value_loss` for `losses/value_loss`, and reset them."""
        sums, self._sums = self._sums, {}
        return {
            "/".join(["script", *(segment(part) for part in tag.split("/") if part)]): total / count for tag, (total, count) in sums.items()
        }
