"""A script as a source of events.

A script is listened to, never rewritten. An update begins with the first optimizer step after environment steps, and ends with the next
environment step or with the script. Minibatches are read from the graphs of their losses before each backward pass (`loss_graph`), the
rollout from the script's variables (`rollout_finder`), and settings by their names. Telemetry begins with the first step whose loss has a
policy's term, so that other scripts leave no trace.
"""

from __future__ import annotations

import multiprocessing.process
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from esper_telemetry.adapters.columns import HEAD, FinishedEpisode, HeadColumns, episodes_event
from esper_telemetry.adapters.script import settings
from esper_telemetry.adapters.script import variables as names
from esper_telemetry.adapters.script.acting import Acting, ActingLog, change_of
from esper_telemetry.adapters.script.autograd_graph import (
    detaches_states,
    graph_of,
    leaves_in,
    nodes_below,
    nonfinite_result,
    takes_softmax_twice,
)
from esper_telemetry.adapters.script.environment_search import IN_CHILDREN, NO_STEP
from esper_telemetry.adapters.script.loss_graph import joined, read_loss
from esper_telemetry.adapters.script.loss_reading import LossReading, ValueTerm
from esper_telemetry.adapters.script.network_logs import (
    Asked,
    ClipLog,
    DistributionLog,
    EstimateLog,
    IndexLog,
    LstmLog,
    RecordedLstm,
    drawn_sequences,
)
from esper_telemetry.adapters.script.observed_steps import step_parts
from esper_telemetry.adapters.script.rollout_finder import RolloutFinder
from esper_telemetry.adapters.script.script_episodes import EPISODE_TAGS, EpisodeLog, ReturnLog, ScalarLog
from esper_telemetry.adapters.script.script_minibatches import (
    LossTerms,
    ScriptMinibatch,
    ScriptMinibatches,
    left_out,
    loss_terms,
    without_graph,
)
from esper_telemetry.adapters.script.script_optimizers import ScriptOptimizers, parameters_of
from esper_telemetry.adapters.script.script_rollouts import RecordedRollout, ScriptRollout
from esper_telemetry.adapters.script.traced_updates import TracedUpdates
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.adapters.taps import ErrorHandler, reraise
from esper_telemetry.core.event_parts import RolloutActions
from esper_telemetry.core.facts import UNCHECKED_FACT, UNTRACED_FACT, optimizer_facts
from esper_telemetry.core.minibatch_objective import MinibatchObjective
from esper_telemetry.equations.replayed_outputs import FIRST_DIFFERENCE
from esper_telemetry.events import BackwardEnd, Hooks, OptimizerStep, RecurrentForward, RolloutEnd, RunStart, UpdateEnd, UpdateStart
from esper_telemetry.updates.failure import Candidate, nonfinite_local

DEFAULT_GAMMA = 0.99
"""Discount factor that is assumed if a script's own factor is unknown."""

GRADIENTS = "gradients"
CLIPPED_GRADIENTS = "gradients before and after clipping"
RATIOS, POLICY_LOSSES = "probability ratios", "policy losses"
ROLLOUTS, DISTRIBUTIONS, LOSSES, EPISODES, MEMORY = "rollouts", "distributions", "losses", "episodes", "memory"
SCALARS = "scalars"


NO_ENTROPY = "the loss has no entropy term"
NO_LOG_PROBS = dict.fromkeys(("log_probs", "replayed_log_probs", "log_ratios"), "the loss does not keep the log-probabilities")
"""Why equations cannot be checked if a script's own density is a sum of several terms, by name."""

SAME_CLIP = 1e-5
"""Largest difference between a clip range and its setting."""

MAX_EARLY_VALUES = 256
"""Losses of the critic before the first loss of a policy that are kept."""

MAX_OTHER_LOSSES = 256
"""Losses without a policy's term after which a script is assumed not to use a policy gradient."""


WHAT_TO_ADD = (
    "A loss of a policy is a mean over log-probabilities of at least two actions times their advantages, or over ratios: collect several "
    "steps for each step of the optimizer, or report from the loop (docs/own_loop.md)"
)
"""How a program without a loss of a policy can be measured."""


class ScriptListener:
    """Emits the events of a script that trains by PPO; nothing before its first step that looks like one of PPO.

    Args:
        begin: called once, before the first event.
        log: receives numbers for the record of the current update.
        on_error: receives the reader of losses and its exception. Only the reading is lost.

    Attributes:
        hooks: where to listen.
        findings: parts of an update that are measured so far, in words and in order.
        updates: that have ended.
        lstm_count: modules of that type, and recurrent cells, that the script has made.
        open: an update is under way.
        counts_only: only steps of environments and optimizers are recorded now.
        traced_updates: which updates are traced.
        asks_for_traces: returns True while the next updates should be traced at any cost.
        origin: first variable that was not finite when a loss or a gradient was not; None on an accelerator, which would be awaited.
        value_loss_alone: place of a loss with an error of values before the first one of a policy; empty without any.
    """

    def __init__(
        self, begin: Callable[[ScriptListener], None], log: Callable[[Mapping[str, float]], None], on_error: ErrorHandler = reraise
    ) -> None:
        self.hooks = Hooks()
        self.findings: dict[str, None] = {}
        self.updates = 0
        self.lstm_count = 0
        self.value_loss_alone = self._loss_place = ""
        self._stepped: set[str] = set()  # classes of the optimizers that have stepped without a loss of a policy
        self._softmax_twice = self._loss_pairs = self._detached_state = False
        self.origin: Candidate | None = None
        self.open = self.counts_only = False
        self.traced_updates = TracedUpdates()
        self.asks_for_traces: Callable[[], bool] = bool
        self.clips, self.distributions, self.lstm = ClipLog(), DistributionLog(), LstmLog()
        self.estimates, self.acting = EstimateLog(), ActingLog()
        self.environments, self.scalars, self.indices = EpisodeLog(), ScalarLog(), IndexLog()
        self.returns = ReturnLog()
        self._begin, self._log, self._on_error = begin, log, on_error
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._started = False
        self._readings: list[LossReading] = []
        self._policy_leaves = frozenset[int]()  # of a policy whose critic has separate losses
        self._other_losses = 0
        self._minibatches = ScriptMinibatches()
        self._collected_at: object = None
        self._env_step = self._gradient_step = self._step = self._epoch = 0
        self._seconds = 0.0
        self._optimizers = ScriptOptimizers()
        self._early_values: list[tuple[object, ValueTerm]] = []  # of the critic, before the first step of a policy
        self._facts: Mapping[str, Any] = {}
        self._config: Mapping[str, Any] = {}
        self._source = names.Source({})
        self._acted_at: list[tuple[str, int]] = []  # lines of the frames when the network first acted
        self._stated: Mapping[str, float] = {}
        self._coefficients: dict[str, float] = {}
        self._read_weights: dict[str, float] = {}  # of the loss itself, if no setting has them
        self._other_clip: dict[str, float] = {}  # of the loss itself, if the setting has another
        # of the current optimizer step, with the losses whose gradients it applies, and the number of passes since the last step
        self._call: tuple[Optimizer, Variables, list[LossReading], int] | None = None
        # of an update whose rollout waits for the first loss of the policy
        self._recorded: tuple[RecordedRollout, Variables] | None = None
        self._announced: Optimizer | None = None
        self._shown = False
        self._stepping = False  # an optimizer takes a step: only it knows which passes of its closure count
        self._scales: object = None
        self._passes = 1  # backward passes of the announced step so far
        self._last_part: Tensor | None = None  # advantages of the last pass
        self._unapplied = 0  # backward passes since the last step
        self._accumulates = False  # several passes of policy gradients without a ratio came before the last step
        self._collects_later = False  # the update has begun, and its rollout waits for its first step

    @property
    def listens(self) -> bool:
        """True in the script's own process and thread, False in copies of the process and in other threads."""
        return os.getpid() == self._pid and threading.get_ident() == self._thread

    @property
    def missing(self) -> list[str]:
        """Descriptions of the parts of an update that were searched for but are not measured."""
        ratios = POLICY_LOSSES if POLICY_LOSSES in self.findings else RATIOS
        episodes = [] if self.environments.steps else [EPISODES]  # none may have ended yet
        wanted = [GRADIENTS, ratios, ROLLOUTS, DISTRIBUTIONS, LOSSES, *episodes, *([MEMORY] if self.lstm_count else [])]
        return [what for what in wanted if not any(finding.startswith(what) for finding in self.findings)]

    @property
    def unseen(self) -> str:
        """What is known of an environment that was not seen, and what to add; empty if one was stepped."""
        if self.environments.steps:
            return ""
        children = len(getattr(multiprocessing.process, "_children", ()))  # `active_children` would also join those that have ended
        return f"no environment was seen: {IN_CHILDREN if children else NO_STEP}"

    @property
    def seen(self) -> str:
        """What was seen of a program without a loss of a policy, and what to add; empty if it was nothing."""
        found = [f"steps of {', '.join(sorted(self._stepped))}"] if self._stepped else []
        found += [f"{self.environments.steps:,} steps of {self.environments.kinds}"] if self.environments.steps else []
        found += [f"{self.distributions.draws:,} draws of actions"] if self.distributions.draws else []
        found += [f"a squared error in {self.value_loss_alone}"] if self.value_loss_alone else []
        acts = self.environments.steps or self.distributions.draws
        return (f"; what was seen: {', '.join(found)}" if found else "") + (f". {WHAT_TO_ADD}" if acts else "")

    @property
    def hides_episodes(self) -> bool:
        """True if the script itself misses the episodes."""
        return "final_info" in self._source.words and self.environments.hidden and not self.scalars.tags & EPISODE_TAGS

    def before_step(self, optimizer: Optimizer, calling_variables: Callable[[], Variables]) -> None:
        """An optimizer is about to take a step with the gradients that are there."""
        if not self.traced_updates.includes_this:
            self._count_step(optimizer, calling_variables)
            return
        variables = calling_variables()
        readings, self._readings = self._readings, []
        passes, self._unapplied = self._unapplied, 0
        self._stepping = True
        if not self._started:
            if not any(reading.policy is not None for reading in readings):
                self._stepped.add(type(optimizer).__name__)
                self._early_values += [(self._data_of(variables), reading.value) for reading in readings if reading.value]
                self._early_values = self._early_values[-MAX_EARLY_VALUES:]
                self.clips.clear()
                return
            self._start(optimizer, variables, readings)
        if not self.open or (self._data_of(variables) != self._collected_at and not self._collects_later):
            self.end_update()
            self._begin_update(variables, readings)
        elif self._collects_later:
            self._collect(variables, joined(readings), announced=True)
        self._find_rollout(variables, joined(readings))
        policies = [one.policy for one in readings if one.policy is not None]
        self._accumulates = len(policies) + passes - len(readings) > 1 and policies[-1].log_ratio is None
        self._call = optimizer, variables, readings, passes
        self._optimizers.add(optimizer, variables, readings, is_first=self._step == 0)
        self._epoch = self._minibatches.pass_of(variables, self._step)
        is_read = self._shown or self._passes == self._optimizers.passes(optimizer) or self.clips.calls
        is_due = self._announced is None or (self._announced is optimizer and not is_read)
        if is_due and self.hooks.wants(MinibatchObjective):
            # the script may have clipped the gradients of an unexpected number of passes itself: this ends the check
            self._emit_objective(optimizer, variables)
        if self._shown and self._announced in (None, optimizer):
            self.clips.clear()
        else:
            self._emit_gradients(optimizer)

    def before_backward(self, loss: Tensor, *, taken: bool = False) -> None:
        """A backward pass is about to begin: read the loss, and show a sample the minibatch's objective.

        Args:
            taken: the script gets the gradients themselves. If no optimizer has the parameters, it changes them by its own rule.
        """
        if not self.traced_updates.includes_this:
            self.acting.before_backward()
            if loss.is_cpu and not bool(loss.isfinite().all()):
                self.seek_origin(loss, graph_of(loss))
                self.origin = self.origin or Candidate("loss", loss.detach().clone())
            return
        if self._stepping or (not self._started and self._other_losses > MAX_OTHER_LOSSES):
            return
        self.acting.before_backward()
        self._readings = [one for one in self._readings if not one.is_cleared]
        graph = graph_of(loss)
        leaves = leaves_in(graph)
        self._optimizers.add_pass(leaves)
        variables = names.calling_variables()
        outputs, values = self.distributions.take_graphs(), self.estimates.take_graphs()
        self.seek_origin(loss, graph)
        reading = None
        if loss.requires_grad:
            climbed = self._optimizers.climb(leaves, () if self.updates else variables.values())
            try:
                held = variables.tensors()
                reading = read_loss(loss, held=held, outputs=outputs, values=values, climbed=climbed, graph=graph)
            except Exception as error:  # a graph that the reader was not made for
                self._on_error(read_loss, error)
        if reading is not None:
            if reading.policy is None and not self._started and self.environments.steps:
                self.value_loss_alone = names.calling_place()
            if reading.policy is not None:
                if not self._loss_place:
                    self._softmax_twice = takes_softmax_twice(graph)
                    parts = [part for module in variables.modules() for part in module.modules() if isinstance(part, nn.RNNCellBase)]
                    self._detached_state = detaches_states(graph, {id(cell.weight_hh) for cell in parts})
                self._loss_pairs = self._loss_pairs or reading.policy.pairs
                self._loss_place = names.calling_place()
                heads = self.distributions.take_minibatch(len(reading.policy.advantages), graph)
                reading = reading._replace(heads=heads if heads.logits or heads.means else reading.heads)
                if not self.open:
                    self._policy_leaves = frozenset(map(id, leaves) if reading.value is None else ())
            own = taken and not self._optimizers.reached(leaves, variables.values())
            self._readings.append(without_graph(reading)._replace(leaves=leaves, taken=own))
            self._unapplied += 1
        elif not self._started:
            self._other_losses += 1
        if self._started and reading is not None and self._data_of(variables) != self._collected_at:
            if self._unapplied == 1 or not self._collects_later:
                self.end_update()
                self._begin_update(variables, self._readings, waits=self._accumulates)
            self._collected_at = self._data_of(variables)
        if reading is not None and reading.policy is not None:
            self._find_rollout(variables, joined(self._readings))
        if self.open and self.hooks.wants(MinibatchObjective):
            self._announce(loss, reading, variables, self._optimizers.reached(leaves))

    def _announce(self, loss: Tensor, reading: LossReading | None, variables: Variables, optimizers: list[Optimizer]) -> None:
        """Show a sample the objective of a minibatch, with gradients of the script's graph, which reach the `optimizers`."""
        policy = None if reading is None else reading.policy
        advantages = None if policy is None else policy.advantages
        if self._announced is not None:
            if self._announced in optimizers or not self._optimizers.several:
                own = parameters_of(self._announced)
                is_cleared = all(one.grad is None or not bool(one.grad.any()) for one in own)
                # parts of a minibatch have other rows, unlike a pass that a script repeats or takes only to measure it
                part, is_part = self._last_part, False
                if part is not None and advantages is not None and self._optimizers.passes(self._announced) > 1:
                    is_part = part.shape != advantages.shape or not torch.equal(part, advantages)
                self._passes, self._last_part = 1 if is_cleared and not is_part else self._passes + 1, advantages
                terms = partial(self._terms_of, self._announced, loss, reading, variables)
                # if the gradients of earlier passes are read already, an announcement without terms ends the check
                shown = None if self._shown else terms
                self._emit_objective(self._announced, variables, terms=shown, cleared=is_cleared)
            return
        if len(optimizers) > 1 and policy is not None and policy.attached is not None:
            own_path = self._optimizers.reached(leaves_in(nodes_below(policy.edge.node)))
            optimizers = [one for one in optimizers if one not in own_path]  # those of the critic
        optimizer = optimizers[0] if len(optimizers) == 1 else None  # whose parameters the gradient reaches
        is_part = self._optimizers.several or (optimizer is not None and self._optimizers.passes(optimizer) > 1)
        if optimizer is None or (policy is None and not is_part):
            return
        self._announced, self._passes, self._last_part = optimizer, 1, advantages
        others = [parameter for one in self._optimizers.known for parameter in parameters_of(one)]
        more = left_out(loss, variables, parameters_of(optimizer), others) if self.updates else {}
        if reading is not None and self.updates:
            reading = self._with_left_out(reading)
        terms = partial(self._terms_of, optimizer, loss, reading, variables)
        self._emit_objective(optimizer, variables, terms=None if more else terms, more=more)
        self._scales = variables.find_instance(GradScaler)

    def _terms_of(self, optimizer: Optimizer, loss: Tensor, reading: LossReading | None, variables: Variables) -> LossTerms | None:
        parameters, passes = list(self._optimizers.named_parameters(optimizer).values()), self._optimizers.passes(optimizer)
        return loss_terms(loss, reading, variables, parameters, self._weights(), in_parts=passes > 1)

    def _with_left_out(self, reading: LossReading) -> LossReading:
        """Return a reading with the critic's term that its loss leaves out, unless the critic has separate losses.

        Its targets are the mean return, because any targets show that the term is missing.
        """
        value, rollout = reading.left_out, self._minibatches.rollout
        if value is None or value.values is None or rollout is None or self._minibatches.critic_apart:
            return reading
        mean = rollout.returns.mean().to(value.values)
        return reading._replace(value=value._replace(returns=mean.expand_as(value.values)))

    def _weights(self) -> dict[str, float]:
        """Weights of the losses `value` and `entropy` in this update, by the settings."""
        weights = {name: self._facts.get(f"{name}_coef") for name in ("value", "entropy")} | self._coefficients
        return {name: weight for name, weight in weights.items() if weight is not None}

    def after_backward(self) -> None:
        """The backward pass has ended: gradients of a script that clips with its own function are available now, scaled ones later."""
        announced = self._announced
        if announced is None or self._shown or self._optimizers.clips.get(announced) or self._scales is not None:
            return
        if self._passes == self._optimizers.passes(announced):
            self._emit_gradients(announced)

    def before_clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        """Gradients are about to be clipped together."""
        if not self.traced_updates.includes_this:
            return
        self.clips.before_clip(parameters, max_norm)
        if self._announced is not None and not self._shown:
            self._emit_gradients(self._announced)

    def _emit_objective(
        self, optimizer: Optimizer, variables: Variables, terms: Any = None, more: Mapping[str, Tensor] = {}, *, cleared: bool = False
    ) -> None:
        rate = self._stated.get("learning_rate")
        self.hooks.emit(
            MinibatchObjective(
                epoch=self._epoch,
                step=self._step,
                steps=self._optimizers.steps_with_turns(self.updates) if self._optimizers.several else None,
                forward=None,
                coefficients={},
                parameters={**self._optimizers.named_parameters(optimizer), **more},
                optimizer=optimizer,
                max_norm=self._optimizers.max_norm(optimizer, variables),
                learning_rate=self._optimizers.rate_of_settings(optimizer, variables, rate) if self.updates else None,
                gradient_step=self._optimizers.steps_of(optimizer),
                terms=terms,
                by_name=True,
                passes=max(0, self._passes - 1),
                cleared=cleared,
            )
        )

    def before_acting(self, inputs: Tensor) -> None:
        """The network has received its inputs for the next step of the environments."""
        self.environments.decisions += 1
        self._acted_at = self._acted_at or names.calling_lines()
        self.seek_origin(inputs)

    def seek_origin(self, numbers: Tensor, graph: Collection[Any] = ()) -> None:
        """Find the first operation or variable that is not finite if these numbers are not: inputs, a loss with its graph, or norms."""
        if self.origin is None and numbers.is_cpu and not bool(numbers.isfinite().all()):
            variables = names.calling_variables()
            self.origin = nonfinite_result(numbers, graph, variables) or nonfinite_local(variables.from_outside())

    def _emit_gradients(self, optimizer: Optimizer) -> None:
        parameters = self._optimizers.named_parameters(optimizer)
        gradients = self.clips.take(parameters)
        if gradients is not None:
            own, norms, max_norm = gradients
            self._shown = self._shown or self._announced in (None, optimizer)
            self.findings[CLIPPED_GRADIENTS if max_norm else GRADIENTS] = None
            self.seek_origin(norms)
            trained = self._optimizers.trained
            trained |= parameters  # an update's passes may belong to several optimizers
            self.hooks.emit(BackwardEnd(self._epoch, self._step, trained, own, norms, max_norm))

    def after_step(self, optimizer: Optimizer) -> None:
        """It has taken the step."""
        self._optimizers.count_step(optimizer)
        if not self.traced_updates.includes_this:
            self._step += 1
            self._gradient_step += 1
            if not self.counts_only:
                self.distributions.after_optimizer_step()
                self.estimates.take_graphs()
                self.indices.take(0)
            return
        (stepping, variables, readings, passes), self._call = self._call or (None, Variables([]), [], 1), None
        if self._announced in (None, optimizer):
            self._announced, self._passes, self._shown = None, 1, False
        self._stepping = False
        step = self._step if stepping is optimizer else 0
        self._optimizers.after_step(optimizer, self.clips.take_calls(parameters_of(optimizer)), passes, step)
        if stepping is not optimizer:
            return
        self.hooks.emit(OptimizerStep(self._epoch, self._step, optimizer, self._optimizers.named_parameters(optimizer)))
        for reading in readings:
            self._add_reading(reading, variables)
        self._emit_minibatches()
        self._step += 1
        self._gradient_step += 1

    def _count_step(self, optimizer: Optimizer, variables: Callable[[], Variables]) -> None:
        """Begin an update that is not traced with its first step."""
        if self.open:
            self._optimizers.keep_rate(optimizer)
            return
        self.open, self._step = True, 0
        self._optimizers.add_rates(optimizer, Variables([]), (), is_first=True)
        counted = variables().find(names.GLOBAL_STEP, names.as_integer) or self.environments.steps
        self._env_step = max(counted, self._env_step)
        finished, self._seconds = self.environments.take()
        self._emit_episodes(finished)
        self.hooks.emit(UpdateStart(self.updates + 1, self._env_step, traced=False))
        self.counts_only = not self.traced_updates.includes_next  # the next rollout begins with the choice of an action

    def end_update(self) -> None:
        """End the update: the environments continue, or the script is over. Nothing happens between updates."""
        if not self.open:
            return
        if self._recorded is not None:  # an update of the critic only
            self._find_rollout(self._recorded[1], None, waits=False)
        self._emit_minibatches(all_of_them=True)
        self.open = self._collects_later = False
        self.updates += 1
        if not self.environments.steps:  # the only returns are those that the script reports
            self._emit_episodes([])
        scalars = self.scalars.take()
        if scalars:
            self.findings[SCALARS] = None
            self._log(scalars)
        self.hooks.emit(
            UpdateEnd(
                update=self.updates,
                env_step=self._env_step,
                gradient_step=self._gradient_step,
                learning_rate=self._optimizers.learning_rate,
                seconds={"environment": self._seconds} if self._seconds else {},
                epochs=self._epoch + 1,
                coefficients=self._read_weights | self._coefficients | self._other_clip,
                learning_rates=self._optimizers.end_update(self._step, self._facts.get("groups", {})),
            )
        )

    def before_env_step(self) -> None:
        """The environments continue: end the update, unless passes over several rollouts come before its step."""
        if not self._collects_later and self.open:
            self.end_update()
            self.traced_updates.end_update(raised=self.asks_for_traces() or self.origin is not None)
            self.counts_only = not self.traced_updates.includes_this
            self.environments.sums_inner = not self.counts_only or self.environments.inner_differ

    def after_env_step(self, env: Any, result: Any, action: Any, seconds: float = 0.0, *, foreign: bool = False) -> None:
        """The script has called `step` of an environment, or of a `foreign` object; the result shows whether it is one."""
        if not self.environments.trains_at(names.calling_line()) or (self.counts_only and self.environments.counts(env, result)):
            self.environments.seconds += seconds
            return
        parts = step_parts(result)
        if parts is None:
            return
        self.environments.seconds += seconds
        if self.environments.includes(env):
            traced = self.traced_updates.includes_this
            self.environments.after_step(env, parts, action, foreign=foreign, traced=traced)
            for log in (self.distributions, self.estimates, self.acting) if traced else ():
                log.after_env_step()

    def _start(self, optimizer: Optimizer, variables: Variables, readings: Sequence[LossReading]) -> None:
        self._started = self.environments.closed = True
        self._begin(self)
        self._stated = settings.stated_numbers(variables)
        self._source = names.read_source(self._acted_at)
        variables = variables.with_constants(self._source.numbers)
        groups = self._optimizers.begin(optimizer, variables)
        facts = {**self.environments.facts(), **settings.find_facts(variables, self.clips.max_norm, readings, self._source.counts_updates)}
        facts |= optimizer_facts(optimizer)
        parts = [part for module in variables.modules() for part in module.modules()]
        is_recurrent = any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in parts)
        is_lstm = any(isinstance(part, nn.LSTM | nn.LSTMCell) for part in parts)
        facts["policy"] = "lstm" if is_lstm else "gru" if is_recurrent else "mlp"
        if groups:
            facts["groups"] = groups
        self._config, self._facts = settings.find_config(variables), facts

    def _announce_run(
        self, variables: Variables, rollout: ScriptRollout | None, found: Mapping[str, str], first: LossReading | None
    ) -> None:
        """Emit `RunStart`; the first rollout may show unnamed settings. `found` are variables by role."""
        lines = self._source.lines
        found = {role.replace("log_probs", "log-probabilities"): name for role, name in found.items()}
        places = {role: lines[name] for role, name in found.items() if name in lines}
        traced = {role: f"in `{name}`" * bool(name) for role, name in found.items()}
        traced |= {role: f"{traced[role]} ({place})" for role, place in places.items()}
        traced |= {} if first is None or first.entropy is None else {"entropy": ""}
        size = 0 if rollout is None else rollout.rewards.numel()
        known, rate, facts = variables.with_constants(self._source.numbers), self._optimizers.first_rate, self._facts
        rows = len(first.policy.advantages) if first is not None and first.policy is not None else 0
        if rows and size > rows and size % rows == 0:  # minibatches that the script does not count
            facts = {"num_minibatches": size // rows, **facts}
        schedule = settings.find_schedule(known, facts, rate, size, sets_rate=self._source.sets_rate)
        facts = {**facts, **schedule}
        if not {"gamma", "gae_lambda"} <= facts.keys():
            facts = {**settings.find_discounts(rollout, facts, self._source.discounts), **facts}
        unchecked = settings.unchecked_equations(facts, {} if rollout is None else traced)
        untraced = settings.untraced_equations(traced, self._loss_place, rollout is not None, self.unseen)
        left_out = {"entropy_loss": NO_ENTROPY} if first is not None and first.complete and first.entropy is None else {}
        if first is not None and first.policy is not None and first.policy.log_ratio is None and first.policy.log_probs is None:
            left_out |= NO_LOG_PROBS
        unchecked |= left_out
        facts = self._facts = {
            **facts,
            UNCHECKED_FACT: unchecked,
            UNTRACED_FACT: {name: text for name, text in untraced.items() if name not in left_out},
            "equation_places": settings.equation_places(places, self._loss_place, self._source.clears),
            "softmax_twice": self._softmax_twice,
            "detached_state": self._detached_state,
            "loss_pairs": self._loss_pairs,
            "reported_returns": not self.environments.steps,
        }
        self.hooks.emit(RunStart(self._config, facts, update=0, env_step=0, gradient_step=0))

    def _data_of(self, variables: Variables) -> object:
        """Identify the training data of updates: by the environments' steps, the script's counter, draws, or outputs without a graph."""
        counted = self.environments.steps or variables.find(names.GLOBAL_STEP, names.as_integer)
        return counted or self.distributions.draws or self.estimates.without_graph

    def _begin_update(self, variables: Variables, readings: Sequence[LossReading], *, waits: bool = False) -> None:
        """Begin an update, perhaps one whose rollout `waits` for all losses of its optimizer step."""
        self.open, self._step = True, 0
        self._minibatches.begin()
        early, self._early_values = self._early_values, []
        for data, value in early:
            if data == self._data_of(variables):
                self._minibatches.add_value(value)
        self._other_clip = {}
        self._collected_at = self._data_of(variables)
        weights = settings.find_coefficients(variables)
        constant = all(weight == self._facts.get(f"{name}_coef") for name, weight in weights.items())
        self._coefficients = {} if constant else weights
        first = joined(readings)
        announced = (first is None or waits) and self.updates > 0
        self._collects_later = announced and waits
        if announced:  # the critic is trained first, or parts of the rollout: other losses show the columns
            self.hooks.emit(UpdateStart(self.updates + 1, max(self._env_step, self.environments.steps)))
        if not self._collects_later:
            self._collect(variables, first, announced=announced)

    def _collect(self, variables: Variables, first: LossReading | None, *, announced: bool) -> None:
        """Take what was recorded since the last update began, and find the rollout if the first loss of the policy is known."""
        self._collects_later, steps = False, self.environments.collected()
        size = (0, 0) if steps is None else (steps.steps, steps.envs)
        acted, heads = self.distributions.take_rollout(*size)
        recorded = RecordedRollout(
            steps,
            acted,
            heads,
            draws=self.distributions.take_draws(*size),
            critic=self.estimates.of_critic(self._policy_leaves, *size) if self._policy_leaves else [],
            acting_values=self.estimates.acting_values(*size),
            estimates=self.estimates.take(),
            last_estimates=self.estimates.take_last(),
            announced=announced,
        )
        self._recorded = recorded, variables
        if first is not None or not announced:
            self._find_rollout(variables, first, waits=False)

    def _find_rollout(self, variables: Variables, first: LossReading | None, *, waits: bool = True) -> None:
        """Find the rollout of the update that has begun, and emit it, unless that is done or `waits` for the first loss of a policy."""
        if self._recorded is None or (waits and first is None):
            return
        (recorded, _), self._recorded = self._recorded, None
        collected, acted, heads = recorded.steps, recorded.acted, recorded.heads
        steps, envs = (0, 0) if collected is None else (collected.steps, collected.envs)
        logits = self.estimates.take_logits(None if first is None else first.source, steps, envs)
        known = next(iter(heads.logits.values()), None) if logits is None and len(heads.logits) == 1 else logits
        if known is not None and collected is not None and not acted:  # in the order of time; the script may store another
            acted = [Asked(row, None) for row in collected.log_probs(known) or ()]
        if logits is not None and first is not None and not (heads.logits or heads.means):
            spreads = {head: std[0].expand_as(logits).clone() for head, std in first.heads.log_std.items()}
            heads = HeadColumns(means={HEAD: logits}, log_std=spreads) if spreads else HeadColumns({HEAD: logits})
        recorded = recorded._replace(acted=acted, heads=heads)
        finder, rollout, observations, actions = self._found(variables, recorded, first)
        tokens, columns = self.distributions.take_tokens(), {} if first is None else first.columns()
        chosen, log_probs = None if first is None else first.actions, columns.get("log_probs")
        if rollout is None and actions is None and chosen is not None and log_probs is not None:
            policy = None if first is None else first.policy
            actions = drawn_sequences(tokens, chosen, log_probs, None if policy is None else policy.valid)
        size = 0 if rollout is None else rollout.rewards.numel()
        counted = variables.find(names.GLOBAL_STEP, names.as_integer) or self.environments.steps
        self._env_step = counted if counted > self._env_step else self._env_step + size
        if UNCHECKED_FACT not in self._facts:
            found = finder.names()
            self._facts = self._facts if rollout is None else {**self._facts, "has_critic": finder.has_critic}
            found |= {} if observations is None else {"observations": ""}
            found |= {} if actions is None or not actions.actions else {"actions": ""}
            found |= {"distributions in acting": ""} if heads.logits or heads.means else {}
            self._announce_run(variables, rollout, found, first)
        finished, self._seconds = self.environments.take()
        self._emit_episodes(finished)
        lstm, acting = self.lstm.take(finder.steps, finder.envs), self.acting.take(finder.steps, finder.envs)
        self._minibatches.begin_rollout(rollout, observations, acting, heads)
        if rollout is None:
            if actions is not None or not recorded.announced:
                self.hooks.emit(UpdateStart(self.updates + 1, self._env_step, actions))
        else:
            seen = None if first is None else self._seen_difference(finder, first, acting, variables, observations)
            if seen is None and lstm is not None and lstm.trained_from_zero and bool(lstm.states[0].any()):
                seen = "memory_zero"
            elif seen is None and lstm is not None and not lstm.states[1:].any() and not rollout.ended[:-1].all():
                seen = "memory_empty"
            self._emit_rollout(rollout, actions, lstm, seen, None if collected is None else collected.raw_rewards)

    def _found(
        self, variables: Variables, recorded: RecordedRollout, first: LossReading | None
    ) -> tuple[RolloutFinder, ScriptRollout | None, Tensor | None, RolloutActions | None]:
        """Return the finder of the rollout, the rollout, its observations and its actions; None if it fails, which costs a warning."""
        policy = None if first is None else first.policy
        chosen = self.distributions.chosen if first is None or first.actions is None else first.actions
        try:
            finder = RolloutFinder(
                variables,
                recorded._replace(has_critic=self.estimates.has_critic(self._policy_leaves)),
                first,
                indices=[] if policy is None else self.indices.recent(len(policy.advantages)),
                indexed=self.indices.sources,
                targets=self._minibatches.targets,
            )
            discounts = self._source.discounts
            rollout = finder.rollout(self._facts.get("gamma", discounts[0][0] if discounts else None))
            observations = finder.observations(None if first is None else first.inputs)
            drawn = None if policy is None or policy.log_ratio is not None else recorded.actions_drawn
            actions, found, ended = finder.actions(chosen) if drawn is None else drawn, finder.log_probs, finder.ended
            if found is None or ended is None:
                return finder, rollout, observations, None
            acted = recorded.with_distributions(found, ended, finder.rewards, actions=actions, observations=observations)
            return finder, rollout, observations, acted
        except Exception as error:  # arrays that the finder was not made for
            self._on_error(RolloutFinder, error)
            return RolloutFinder(Variables([]), RecordedRollout()), None, None, None

    def _emit_episodes(self, finished: Sequence[FinishedEpisode]) -> None:
        episodes = episodes_event(self.returns.take(finished), self._env_step)
        if episodes is not None:
            self.findings[EPISODES] = None
            self.hooks.emit(episodes)

    def _seen_difference(
        self, finder: RolloutFinder, first: LossReading, acting: Acting | None, variables: Variables, observations: Tensor | None
    ) -> str | None:
        """Return what the advantages of the first minibatch are, or the hypothesis why it has other log-probabilities than acting; None
        if neither was observed.
        """
        if finder.in_longer_array:
            return "uncleared"
        ratio = None if first.policy is None else first.policy.log_ratio
        if ratio is None or float(ratio.abs().max()) < FIRST_DIFFERENCE:
            return None
        if self.distributions.draws_again:
            return "drawn_again"
        rows = finder.first_rows()
        if rows is None:
            return None
        acted, chosen = finder.acted_actions, self.distributions.chosen
        if acted is not None and chosen is not None and chosen.numel() == len(rows) * acted.shape[-1]:
            taken, own = acted.flatten(0, 1)[rows.to(acted.device)].double(), chosen.reshape(len(rows), -1).to(acted.device).double()
            if not torch.allclose(taken, own) and (change := change_of(taken, own)) is not None:
                return change
        if acting is None:
            return None
        optimizers = {*self._optimizers.known, *(value for value in variables.values() if isinstance(value, Optimizer))}
        trained = [parameter for one in optimizers for parameter in parameters_of(one)]
        return acting.difference(first.inputs, rows, observations, trained, variables.modules())

    def _emit_rollout(
        self,
        rollout: ScriptRollout,
        actions: RolloutActions | None,
        lstm: RecordedLstm | None,
        seen_difference: str | None,
        raw_rewards: Tensor | None,
    ) -> None:
        assert actions is not None  # a rollout has log-probabilities
        columns = ("actions", "bounds", "observations", "transitions", "logits", "means", "log_std", "range_use")
        self.hooks.emit(
            RolloutEnd(
                update=self.updates + 1,
                env_step=self._env_step,
                gamma=float(self._facts.get("gamma", DEFAULT_GAMMA)),
                states=None if lstm is None else lstm.states,
                seen_difference=seen_difference,
                raw_rewards=None if raw_rewards is None else raw_rewards.to(rollout.rewards),
                **{**rollout._asdict(), **{name: getattr(actions, name) for name in columns}},
            )
        )
        self.findings[ROLLOUTS] = None
        if lstm is not None:
            self.findings[MEMORY] = None
            if self.hooks.wants(RecurrentForward) and isinstance(lstm.module, nn.LSTM) and lstm.module.num_layers == 1:
                states = lstm.states[:, 0, :, : lstm.inputs.shape[1]]
                self.hooks.emit(RecurrentForward([lstm.module], [lstm.inputs], [states]))

    def _add_reading(self, reading: LossReading, variables: Variables) -> None:
        policy = reading.policy
        if policy is None:
            if reading.value is not None:
                self._minibatches.add_value(reading.value, variables)
            return
        self._read_weights = {name: weight for name, weight in settings.read_coefficients(reading).items() if name not in self._weights()}
        if policy.clip is not None and abs(policy.clip - self._facts.get("clip", policy.clip)) > SAME_CLIP:
            self._other_clip = {"clip": policy.clip}
        count = len(policy.advantages)
        self.distributions.after_optimizer_step()
        heads = reading.heads
        if not (heads.logits or heads.means) and reading.logits is not None and len(reading.logits) == count:
            heads = HeadColumns(logits={HEAD: reading.logits})
        self.findings[POLICY_LOSSES if policy.log_ratio is None else RATIOS] = None
        if heads.logits or heads.means or self._minibatches.knows_distributions:
            self.findings[DISTRIBUTIONS] = None
        indices = [*self.indices.take(count), *variables.indices(count)]
        minibatch = ScriptMinibatch(self._epoch, self._step, policy, reading._replace(heads=heads), indices)
        self._minibatches.add(minibatch, None if self.updates else variables.integers())

    def _emit_minibatches(self, *, all_of_them: bool = False) -> None:
        """Emit the minibatches of which all losses are known; their passes are known at the end of the first update."""
        if self.updates or all_of_them:
            has_bonus = bool(self._stated.get("entropy_coef"))
            for minibatch in self._minibatches.take(self._weights(), has_bonus=has_bonus, all_of_them=all_of_them):
                if minibatch.losses:
                    self.findings[LOSSES] = None
                self.hooks.emit(minibatch)
