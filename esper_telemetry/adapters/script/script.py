"""A script as a source of events: what the taps see, put in the order in which it belongs.

An update begins with the first optimizer step after environment steps, and ends with the next environment step, or where the script
ends. Everything else is read off the script's variables at its optimizer steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.adapters.script import aliases
from esper_telemetry.adapters.script.distributions import Distributions, ScriptHead
from esper_telemetry.adapters.script.episodes import Environments
from esper_telemetry.adapters.script.found import (
    Ratio,
    ScriptRollout,
    ScriptRows,
    find_columns,
    find_config,
    find_facts,
    find_losses,
    find_names,
    find_ratio,
    find_rollout,
    groups_of,
    half_square,
    integer,
)
from esper_telemetry.adapters.script.frames import Names
from esper_telemetry.adapters.script.gradients import ScriptGradients
from esper_telemetry.adapters.script.memory import Remembered, ScriptMemory
from esper_telemetry.adapters.script.scalars import EPISODES, Scalars
from esper_telemetry.events import (
    BackwardEnd,
    EpisodeEnd,
    Hooks,
    MinibatchEnd,
    OptimizerStep,
    RecurrentForward,
    RolloutEnd,
    RunStart,
    UpdateEnd,
)

GAMMA = 0.99
"""Of scripts that do not say theirs."""


class ScriptStep(NamedTuple):
    """An optimizer step under way."""

    optimizer: Optimizer
    names: Names
    ratio: Ratio | None


class ScriptListener:
    """What happens in a script that trains by PPO; emits nothing before it takes a step that looks like one of PPO.

    Args:
        begin: called once, before the first event.
        log: takes numbers for the record of the update under way.

    Attributes:
        hooks: where to listen.
        found: what has been found so far, in words.
        updates: that have ended.
    """

    def __init__(self, begin: Callable[[ScriptListener], None], log: Callable[[Mapping[str, float]], None]) -> None:
        self.hooks = Hooks()
        self.found: dict[str, None] = {}
        self.updates = 0
        self.gradients = ScriptGradients()
        self.distributions = Distributions()
        self.memory = ScriptMemory()
        self.environments = Environments()
        self.scalars = Scalars()
        self.memories = 0
        self._begin, self._log = begin, log
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._started = self._open = False
        self._parameters: dict[int, str] = {}
        self._ratio: object = None
        self._collected_at: object = None
        self._env_step = self._gradient_step = self._step = self._epoch = 0
        self._rate = 0.0
        self._factor: float | None = None
        self._under_way: ScriptStep | None = None

    @property
    def open(self) -> bool:
        """Whether an update is under way."""
        return self._open

    @property
    def listens(self) -> bool:
        """Whether whoever calls is the script itself, and not a copy of its process or another of its threads."""
        return os.getpid() == self._pid and threading.get_ident() == self._thread

    def before_step(self, optimizer: Optimizer, names: Names) -> None:
        """An optimizer is about to take a step with the gradients that are there."""
        ratio = find_ratio(names)
        if not self._started:
            if ratio is None:
                self.gradients.forget()
                return
            self._start(optimizer, names)
        if not self._open or self._is_new(names):
            self._end_update()
            self._begin_update(names)
        self._under_way = ScriptStep(optimizer, names, ratio)
        self._rate = float(optimizer.param_groups[0]["lr"]) if self._step == 0 else self._rate
        self._epoch = names.find(aliases.EPOCH, integer) or 0
        self._emit_gradients(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """It has taken it."""
        step, self._under_way = self._under_way, None
        if step is None or step.optimizer is not optimizer:
            return
        parameters = self._named(optimizer)
        self.hooks.emit(OptimizerStep(self._epoch, self._step, optimizer, parameters))
        if step.ratio is not None and step.ratio.source is not self._ratio:
            self._ratio = step.ratio.source
            self._emit_minibatch(step.names, step.ratio)
        self._step += 1
        self._gradient_step += 1

    def between_steps(self) -> None:
        """The environments go on: an update is over."""
        self._end_update()

    def end(self, *, whole: bool) -> None:
        """The script is over; an update that it did not leave by an exception is whole."""
        if whole:
            self._end_update()

    def _start(self, optimizer: Optimizer, names: Names) -> None:
        self._started = self.environments.closed = True
        self._begin(self)
        self._parameters = find_names(names, parameters_of(optimizer))
        facts = find_facts(names, self.gradients.max_norm)
        facts["optimizer"] = type(optimizer).__name__
        facts["policy"] = "lstm" if self.memories else "mlp"
        groups = groups_of(self._parameters.values())
        if groups:
            facts["groups"] = groups
        self.hooks.emit(RunStart(find_config(names), facts, update=0, env_step=0, gradient_step=0))
        self._gamma = float(facts.get("gamma", GAMMA))

    def _is_new(self, names: Names) -> bool:
        """Whether other data are learned from than in the step before, where no environment tells."""
        return self._place(names) != self._collected_at

    def _place(self, names: Names) -> object:
        """How far the environments have come, else the script's own counter."""
        return self.environments.steps or names.find(aliases.GLOBAL_STEP, integer)

    def _begin_update(self, names: Names) -> None:
        self._open, self._step = True, 0
        self._collected_at = self._place(names)
        collected = find_rollout(names)
        size = 0 if collected is None else collected.rewards.numel()
        counted = names.find(aliases.GLOBAL_STEP, integer) or self.environments.steps
        self._env_step = counted if counted > self._env_step else self._env_step + size
        self._emit_episodes()
        if collected is None:
            return
        steps, envs = collected.rewards.shape
        heads = self.distributions.acted(steps, envs)
        remembered = self.memory.take(steps, envs)
        self.hooks.emit(self._rollout(collected, heads, remembered))
        self._note("rollouts")
        if remembered is not None:
            self._note("memory")
            self._emit_recurrence(remembered)

    def _rollout(
        self, found: ScriptRollout, heads: Mapping[str, ScriptHead], remembered: Remembered | None
    ) -> RolloutEnd:
        return RolloutEnd(
            update=self.updates + 1,
            env_step=self._env_step,
            rewards=found.rewards,
            values=found.values,
            advantages=found.advantages,
            returns=found.returns,
            log_probs=found.log_probs,
            ended=found.ended,
            terminated=found.ended,
            next_values=found.next_values,
            actions=actions_of(found.actions, heads),
            gamma=self._gamma,
            logits={name: head.logits for name, head in heads.items() if head.logits is not None},
            means={name: head.mean for name, head in heads.items() if head.mean is not None},
            log_std={name: head.log_std for name, head in heads.items() if head.log_std is not None},
            states=None if remembered is None else remembered.states,
        )

    def _emit_recurrence(self, remembered: Remembered) -> None:
        if self.hooks.wants(RecurrentForward) and remembered.module.num_layers == 1:
            states = remembered.states[:, 0, :, : remembered.inputs.shape[1]]
            self.hooks.emit(RecurrentForward([remembered.module], [remembered.inputs], [states]))

    def _emit_episodes(self) -> None:
        ended, self._seconds = self.environments.take()
        if not ended:
            return
        self._note("episodes")
        returns, lengths, times = zip(*ended, strict=True)
        self.hooks.emit(EpisodeEnd(self._env_step, returns, lengths, times))

    def _emit_gradients(self, optimizer: Optimizer) -> None:
        parameters = self._named(optimizer)
        found = self.gradients.take(parameters)
        if found is None:
            return
        self._note("gradients before and after clipping" if found.max_norm else "gradients")
        self.hooks.emit(
            BackwardEnd(
                self._epoch,
                self._step,
                parameters=parameters,
                names=found.names,
                norms=found.norms,
                max_norm=found.max_norm,
            )
        )

    def _emit_minibatch(self, names: Names, ratio: Ratio) -> None:
        rows = ratio.log_ratio.numel()
        columns, heads = find_columns(names, rows), self.distributions.learned(rows)
        if columns.advantages is None:
            return
        self._note("probability ratios")
        if heads:
            self._note("distributions")
        self.hooks.emit(
            self._minibatch(ratio.log_ratio, columns, columns.advantages, self._losses(names, columns), heads)
        )

    def _minibatch(
        self,
        log_ratio: Tensor,
        columns: ScriptRows,
        advantages: Tensor,
        losses: Mapping[str, Tensor],
        heads: Mapping[str, ScriptHead],
    ) -> MinibatchEnd:
        return MinibatchEnd(
            self._epoch,
            self._step,
            log_ratio=log_ratio,
            advantages=advantages,
            values=columns.values,
            old_values=columns.old_values,
            returns=columns.returns,
            losses=losses,
            logits={name: head.logits for name, head in heads.items() if head.logits is not None},
            log_std={name: head.log_std for name, head in heads.items() if head.log_std is not None},
            means={name: head.mean for name, head in heads.items() if head.mean is not None},
            rows=columns.rows,
        )

    def _losses(self, names: Names, columns: ScriptRows) -> dict[str, Tensor]:
        losses = find_losses(names)
        if losses:
            self._note("losses")
        if self._factor is None:
            self._factor = half_square(losses, columns)
        if "value" in losses:
            losses["value"] = losses["value"] * self._factor
        return losses

    def _end_update(self) -> None:
        if not self._open:
            return
        self._open = False
        self.updates += 1
        scalars = self.scalars.take()
        if scalars:
            self._note("scalars")
            self._log(scalars)
        self.hooks.emit(
            UpdateEnd(
                update=self.updates,
                env_step=self._env_step,
                gradient_step=self._gradient_step,
                learning_rate=self._rate,
                seconds={"environment": self._seconds} if self._seconds else {},
                epochs=self._epoch + 1,
            )
        )

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's parameters by name; those that were not there in the beginning by their number."""
        known = self._parameters
        return {
            known.get(id(parameter), f"parameter_{len(known) + place}"): parameter
            for place, parameter in enumerate(parameters_of(optimizer))
        }

    def _note(self, what: str) -> None:
        self.found[what] = None

    @property
    def missing(self) -> list[str]:
        """What is looked for and was not found, in words."""
        wanted = ["gradients", "probability ratios", "rollouts", "distributions", "losses", "episodes"]
        wanted += ["memory"] if self.memories else []
        return [what for what in wanted if not any(known.startswith(what) for known in self.found)]

    @property
    def blind(self) -> bool:
        """Whether the script misses the episodes itself."""
        return self.environments.hidden and not self.scalars.tags & set(EPISODES)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Everything that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def actions_of(actions: Tensor | None, heads: Mapping[str, ScriptHead]) -> dict[str, Tensor]:
    """Actions [T, B] or [T, B, D] of the heads: whole where there is one, by their last dimension where there are several."""
    if actions is None or not heads:
        return {}
    parts: Iterable[Tensor] = [actions] if len(heads) == 1 else actions.unbind(-1) if actions.dim() == 3 else []
    found = {}
    for (name, head), part in zip(heads.items(), parts, strict=False):
        if head.logits is None:
            found[name] = part if part.dim() == 3 else part.unsqueeze(-1)
        else:
            found[name] = (part.squeeze(-1) if part.dim() == 3 else part).to(torch.long)
    return found
