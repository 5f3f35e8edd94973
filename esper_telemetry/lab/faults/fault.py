"""What is known of a way to break training on purpose: plain data and one function.

The changes that faults are made of; each is done at once and returns the function that takes it back.

What a fault needs of a trainer: functions that return the sentence that says what is missing, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from esper_telemetry.ppo.networks.mlp import MLP
from esper_telemetry.ppo.networks.recurrent import RecurrentTrunk
from esper_telemetry.ppo.trainer import PPO

# Faults replace what a trainer holds (steps, settings, parameters, environments), never what a class or a module defines, and each change
# takes back itself alone: so several may come and go in any order.
Undo: TypeAlias = Callable[[], None]
Break: TypeAlias = Callable[[PPO, float], Undo]
Need: TypeAlias = Callable[[PPO], str | None]

WINDOW = 20
"""Updates after the first broken one in which an alarm still counts."""


class NotApplicableError(ValueError):
    """A fault needs what this trainer does not have; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break training.

    Attributes:
        name: what people call it, `lr_x100`.
        what: what it does, in one sentence.
        apply: breaks a trainer by a dose and returns the function that mends it.
        accepts: types of alarms that name it rightly.
        bound: updates after the first broken one by which the first of them is due; 0: in that update.
        family: name under which doses of one kind of fault are found, `lr`; its own name where there is one of the kind.
        dose: how much, by default.
        doses: the least and the most that make sense; the same twice where there is nothing to choose.
        needs: what a trainer must have; each returns the sentence that says what is missing, or None.
        causes: types that an incident may rightly be put down to; the accepted ones unless said otherwise.
        noisy: it raises an exception in training, as it would in life.
        core: one of those that metrics were designed with; the others were added to see what these cannot name.
    """

    name: str
    what: str
    apply: Break
    accepts: tuple[str, ...]
    bound: int
    family: str = ""
    dose: float = 1.0
    doses: tuple[float, float] = (1.0, 1.0)
    needs: tuple[Need, ...] = ()
    causes: tuple[str, ...] = ()
    noisy: bool = False
    core: bool = True

    def missing(self, trainer: PPO) -> str | None:
        """Why it does not apply to this trainer, in one sentence; None where it does."""
        lacks = next((text for need in self.needs if (text := need(trainer))), None)
        return None if lacks is None else f"{self.name} does not apply to {trainer.env.name}: {lacks}"

    def checked(self, dose: float | None) -> float:
        """The dose, the default for None; raises ValueError outside of the range that makes sense."""
        dose = self.dose if dose is None else dose
        low, high = self.doses
        if not low <= dose <= high:
            wanted = f"from {low:g} to {high:g}" if low < high else f"{low:g}, the only one"
            raise ValueError(f"the dose of {self.name} must be {wanted}, got {dose:g}")
        return dose

    @property
    def named_by(self) -> tuple[str, ...]:
        """Types that an incident may rightly be put down to."""
        return self.causes or self.accepts


def together(*undos: Undo) -> Undo:
    """Takes all back, the last one first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def steps(trainer: PPO, **functions: Callable[..., Any]) -> Undo:
    """Replaces steps of the update."""
    before = {name: getattr(trainer.steps, name) for name in functions}
    trainer.steps = replace(trainer.steps, **cast("Any", functions))

    def undo() -> None:
        trainer.steps = replace(trainer.steps, **before)

    return undo


def config(trainer: PPO, **settings: Any) -> Undo:
    """Replaces settings of the trainer."""
    before = {name: getattr(trainer.config, name) for name in settings}
    trainer.config = replace(trainer.config, **settings)

    def undo() -> None:
        trainer.config = replace(trainer.config, **before)

    return undo


def optimizer(trainer: PPO, **settings: Any) -> Undo:
    """Replaces settings of the optimizer, in all groups of parameters."""
    before = [{name: group[name] for name in settings} for group in trainer.optimizer.param_groups]
    for group in trainer.optimizer.param_groups:
        group.update(settings)

    def undo() -> None:
        for group, old in zip(trainer.optimizer.param_groups, before, strict=True):
            group.update(old)

    return undo


def parameter(tensor: Tensor, value: float, rows: slice = slice(None)) -> Undo:
    """Overwrites rows of a parameter."""
    part = tensor.detach()[rows]
    before = part.clone()
    part.fill_(value)

    def undo() -> None:
        tensor.detach()[rows].copy_(before)

    return undo


def frozen(parameters: Iterable[torch.nn.Parameter]) -> Undo:
    """Takes parameters out of training, as far as they were in it."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for one in trained:
        one.requires_grad_(False)

    def undo() -> None:
        for one in trained:
            one.requires_grad_(True)

    return undo


def environment(trainer: PPO, wrap: Callable[[Any], Any]) -> Undo:
    """Puts a wrapper between the trainer and its environments."""
    collector: Any = trainer.collector
    before = collector.env
    collector.env = wrap(before)

    def undo() -> None:
        collector.env = before

    return undo


def observation_normalizer(trainer: PPO, other: torch.nn.Module) -> Undo:
    """Puts another normaliser in the place of that of observations."""
    normalizers: Any = trainer.normalizers
    before = normalizers.observations
    normalizers.observations = other

    def undo() -> None:
        normalizers.observations = before

    return undo


def memory(trainer: PPO) -> str | None:
    """A recurrent policy."""
    return None if trainer.policy.cores() else "its policy has no memory"


def lstm(trainer: PPO) -> str | None:
    """An LSTM: a GRU has no forget gate."""
    kinds = {core.kind for core in trainer.policy.cores().values()}
    return None if "lstm" in kinds else "its policy has no LSTM"


def restrictions(trainer: PPO) -> str | None:
    """Actions that are masked or matter only sometimes."""
    masked = hasattr(trainer.env, "action_masks")
    partly = any(spec.relevant_for is not None for spec in trainer.env.action_specs.values())
    return None if masked or partly else "it has no action masks"


def several_heads(trainer: PPO) -> str | None:
    """An action of several parts."""
    return None if len(trainer.env.action_specs) > 1 else "its actions have one part"


def choices(trainer: PPO) -> str | None:
    """A categorical part of the action."""
    kinds = {spec.kind for spec in trainer.env.action_specs.values()}
    return None if "categorical" in kinds else "its actions are continuous"


def relu(trainer: PPO) -> str | None:
    """Hidden layers with ReLU that read the observation."""
    layers = first_layers(trainer)
    return None if layers and trainer.config.activation == "relu" else "no layer with ReLU reads its observations"


def normalized_advantages(trainer: PPO) -> str | None:
    """Advantages that are said to be normalised."""
    return None if trainer.config.normalize_advantages else "its advantages are not normalised"


def normalized_observations(trainer: PPO) -> str | None:
    """A running normaliser of observations."""
    return None if trainer.normalizers.observations is not None else "its observations are not normalised"


def numbers(trainer: PPO) -> str | None:
    """Observations that can be scaled."""
    layout = getattr(trainer.env, "observation_layout", None)
    return "its observations hold images" if layout is not None and layout.images else None


def on_the_host(trainer: PPO) -> str | None:
    """Environments that are stepped as arrays."""
    env: object = trainer.collector.env
    arrays = not hasattr(env, "device")
    return None if arrays else "its environments step on a device"


def several_environments(trainer: PPO) -> str | None:
    """More than one environment side by side."""
    return None if trainer.env.num_envs > 1 else "it has one environment only"


def scheduled_rate(trainer: PPO) -> str | None:
    """A learning rate that does not follow the KL."""
    return None if trainer.config.desired_kl is None else "its learning rate follows the KL"


def several_minibatches(trainer: PPO) -> str | None:
    """More than one minibatch in a pass."""
    return None if trainer.config.num_minibatches > 1 else "it takes one minibatch per pass"


def first_layers(trainer: PPO) -> list[MLP]:
    """The hidden layers that read the observations, of every trunk; those behind convolutions are none."""
    trunks = trainer.policy.named_trunks().values()
    readers = [trunk.encoder if isinstance(trunk, RecurrentTrunk) else trunk for trunk in trunks]
    return [reader for reader in readers if isinstance(reader, MLP) and len(reader.layers)]
