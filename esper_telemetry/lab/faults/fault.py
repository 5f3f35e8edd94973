"""A fault: a way to break training on purpose, as plain data and one function.

The module also contains the building blocks of faults. A change of a trainer is made at once and returns the function that undoes it. A
requirement on a trainer returns the sentence that names what is missing, or None. Changes replace attributes of the trainer's
objects, never of a class or a module, and undo only themselves, so that several faults may begin and end in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from esper_telemetry.ppo.networks import MLP, RecurrentTrunk
from esper_telemetry.ppo.trainer import PPO

# Faults replace objects of a trainer (steps, settings, parameters, environments), never attributes of a class or a module. Each change
# undoes only itself, so several may begin and end in any order.
Undo: TypeAlias = Callable[[], None]
Break: TypeAlias = Callable[[PPO, float], Undo]
Need: TypeAlias = Callable[[PPO], str | None]

WINDOW_UPDATES = 20
"""Updates after the first broken one in which an alarm still counts."""


class NotApplicableError(ValueError):
    """A fault needs something that this trainer lacks; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break training.

    Attributes:
        name: unique name, such as `lr_x100`.
        what: its effect, in one sentence.
        apply: breaks a trainer by a dose and returns the function that undoes it.
        accepts: alarm types that name it correctly.
        bound: updates after the first broken one by which the first accepted alarm is due; 0 means in that update.
        family: name shared by the doses of one kind of fault, such as `lr`; empty for a single dose.
        dose: default dose.
        doses: smallest and largest dose; equal if it is fixed.
        needs: requirements on a trainer.
        causes: accepted causes of an incident; `accepts` if empty.
        hypotheses: labels of equations and their hypotheses, such as `advantages_sign`, with which `integrity/equation` names it too.
        noisy: whether it raises an exception in training.
        core: whether metrics and alarms were designed for this fault; the others test what the alarms find beyond.
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
    hypotheses: tuple[str, ...] = ()
    noisy: bool = False
    core: bool = True

    def missing(self, trainer: PPO) -> str | None:
        """Return the sentence that says why it does not apply to this trainer, or None."""
        lacks = next((text for need in self.needs if (text := need(trainer))), None)
        return None if lacks is None else f"{self.name} does not apply to {trainer.env.name}: {lacks}"

    def checked(self, dose: float | None) -> float:
        """Return the dose, the default for None; raise ValueError outside of `doses`."""
        dose = self.dose if dose is None else dose
        low, high = self.doses
        if not low <= dose <= high:
            wanted = f"from {low:g} to {high:g}" if low < high else f"{low:g}, the only one"
            raise ValueError(f"the dose of {self.name} must be {wanted}, got {dose:g}")
        return dose

    @property
    def accepted_causes(self) -> tuple[str, ...]:
        """Accepted causes of an incident."""
        return self.causes or self.accepts


def undo_all(*undos: Undo) -> Undo:
    """Return a function that undoes all changes, the last one first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def replace_steps(trainer: PPO, **functions: Callable[..., Any]) -> Undo:
    """Replace steps of the update."""
    before = {name: getattr(trainer.steps, name) for name in functions}
    trainer.steps = replace(trainer.steps, **cast("Any", functions))

    def undo() -> None:
        trainer.steps = replace(trainer.steps, **before)

    return undo


def replace_config(trainer: PPO, **settings: Any) -> Undo:
    """Replace settings of the trainer."""
    before = {name: getattr(trainer.config, name) for name in settings}
    trainer.config = replace(trainer.config, **settings)

    def undo() -> None:
        trainer.config = replace(trainer.config, **before)

    return undo


def replace_optimizer_settings(trainer: PPO, **settings: Any) -> Undo:
    """Replace settings of the optimizer, in all parameter groups."""
    before = [{name: group[name] for name in settings} for group in trainer.optimizer.param_groups]
    for group in trainer.optimizer.param_groups:
        group.update(settings)

    def undo() -> None:
        for group, old in zip(trainer.optimizer.param_groups, before, strict=True):
            group.update(old)

    return undo


def fill_parameter(tensor: Tensor, value: float, rows: slice = slice(None)) -> Undo:
    """Overwrite rows of a parameter."""
    part = tensor.detach()[rows]
    before = part.clone()
    part.fill_(value)

    def undo() -> None:
        tensor.detach()[rows].copy_(before)

    return undo


def freeze(parameters: Iterable[torch.nn.Parameter]) -> Undo:
    """Exclude the parameters that require gradients from training."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for one in trained:
        one.requires_grad_(False)

    def undo() -> None:
        for one in trained:
            one.requires_grad_(True)

    return undo


def wrap_environment(trainer: PPO, wrap: Callable[[Any], Any]) -> Undo:
    """Put a wrapper between the trainer and its environments."""
    collector: Any = trainer.collector
    before = collector.env
    collector.env = wrap(before)

    def undo() -> None:
        collector.env = before

    return undo


def replace_observation_normalizer(trainer: PPO, other: torch.nn.Module) -> Undo:
    """Replace the normaliser of observations."""
    normalizers: Any = trainer.normalizers
    before = normalizers.observations
    normalizers.observations = other

    def undo() -> None:
        normalizers.observations = before

    return undo


# The docstrings of the requirements are the column "needs" of `list` and of docs/faults.md.


def needs_memory(trainer: PPO) -> str | None:
    """A recurrent policy."""
    return None if trainer.policy.cores() else "its policy has no memory"


def needs_lstm(trainer: PPO) -> str | None:
    """An LSTM, because a GRU lacks a forget gate."""
    kinds = {core.kind for core in trainer.policy.cores().values()}
    return None if "lstm" in kinds else "its policy has no LSTM"


def needs_restrictions(trainer: PPO) -> str | None:
    """Actions that are masked or matter only sometimes."""
    masked = hasattr(trainer.env, "action_masks")
    partly = any(spec.relevant_for is not None for spec in trainer.env.action_specs.values())
    return None if masked or partly else "it has no action masks"


def needs_several_heads(trainer: PPO) -> str | None:
    """An action of several parts."""
    return None if len(trainer.env.action_specs) > 1 else "its actions have one part"


def needs_choices(trainer: PPO) -> str | None:
    """A categorical part of the action."""
    kinds = {spec.kind for spec in trainer.env.action_specs.values()}
    return None if "categorical" in kinds else "its actions are continuous"


def needs_relu(trainer: PPO) -> str | None:
    """Hidden layers with ReLU that read the observation."""
    layers = first_layers(trainer)
    return None if layers and trainer.config.activation == "relu" else "no layer with ReLU reads its observations"


def needs_normalized_advantages(trainer: PPO) -> str | None:
    """Advantages that are declared as normalised."""
    return None if trainer.config.normalize_advantages else "its advantages are not normalised"


def needs_normalized_observations(trainer: PPO) -> str | None:
    """A running normaliser of observations."""
    return None if trainer.normalizers.observations is not None else "its observations are not normalised"


def needs_numeric_observations(trainer: PPO) -> str | None:
    """Observations that can be scaled."""
    layout = getattr(trainer.env, "observation_layout", None)
    return "its observations hold images" if layout is not None and layout.images else None


def needs_host_environments(trainer: PPO) -> str | None:
    """Environments that are stepped as arrays."""
    env: object = trainer.collector.env
    return "its environments step on a device" if hasattr(env, "device") else None


def needs_several_environments(trainer: PPO) -> str | None:
    """More than one environment."""
    return None if trainer.env.num_envs > 1 else "it has only one environment"


def needs_scheduled_rate(trainer: PPO) -> str | None:
    """A learning rate that does not follow the KL."""
    return None if trainer.config.desired_kl is None else "its learning rate follows the KL"


def needs_several_minibatches(trainer: PPO) -> str | None:
    """More than one minibatch in a pass."""
    return None if trainer.config.num_minibatches > 1 else "it takes one minibatch per pass"


def first_layers(trainer: PPO) -> list[MLP]:
    """Return the hidden layers of every trunk that read the observations; none after convolutions."""
    trunks = trainer.policy.named_trunks().values()
    readers = [trunk.encoder if isinstance(trunk, RecurrentTrunk) else trunk for trunk in trunks]
    return [reader for reader in readers if isinstance(reader, MLP) and len(reader.layers)]
