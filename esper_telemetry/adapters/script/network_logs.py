"""What a script's network computes between two of its optimizer steps: distributions, estimates, recurrent states, clipped gradients.

Shapes: T steps, B environments, N rows, K parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributions, nn

from esper_telemetry.adapters.columns import HEAD, HeadColumns, head_columns, head_names, join_columns
from esper_telemetry.adapters.script.autograd_graph import DistributionGraphs, LayerOutputs
from esper_telemetry.core.event_parts import RolloutActions
from esper_telemetry.core.tensors import gradient_norms

MAX_DISTRIBUTIONS = 64
"""Largest number of distributions recorded for one minibatch: more of them are not heads."""

MAX_DISTRIBUTION_ENTRIES = 1 << 22
"""Entries of the distributions of one rollout that are recorded."""

MAX_DRAWN_STEPS = 1 << 12
"""Steps of which the distributions that actions were drawn from are recorded."""

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
    def take(self, parameters: Mapping[str, Tensor]) -> tuple[tuple[str, ...], Tensor, float | None] | None:
        """Return names and norms [K] before clipping of the gradients of these parameters, and the limit, of one optimizer step.

        The limit is None if they were clipped in several parts. Returns None if none has a gradient.
        """
        present = {name: p for name, p in parameters.items() if p.grad is not None}
        unclipped = self._add(present.values())
        norms, own = self._norms, set(map(id, present.values()))
        self.clear()
        if not present:
            return None
        limits = [call.max_norm for call in self.calls if call.max_norm is not None and own & call.parameters]
        stacked = torch.stack([norms[id(p)] for p in present.values()])
        return tuple(present), stacked, limits[0] if len(limits) == 1 and not unclipped else None

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
