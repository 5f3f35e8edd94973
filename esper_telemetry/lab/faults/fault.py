"""A fault: a way to break training on purpose, as plain data and one function.

The module also contains the building blocks of faults. A change of a trainer is made at once and returns the function that undoes it. A
requirement on a trainer (`NEEDS`) has the sentence that names what is missing. Changes replace attributes of the trainer's
objects, never of a class or a module, and undo only themselves, so that several faults may begin and end in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from esper_telemetry.ppo.environments.environment_protocol import Array, Step
from esper_telemetry.ppo.networks import MLP, RecurrentTrunk
from esper_telemetry.ppo.trainer import PPO

Undo: TypeAlias = Callable[[], None]
Break: TypeAlias = Callable[[PPO, float], Undo]


class Need(NamedTuple):
    """A requirement on a trainer: its text, what a trainer without it lacks, and the condition."""

    text: str
    lack: str
    holds: Callable[[PPO], object]


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
        needs: requirements on a trainer, keys of `NEEDS`.
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
    needs: tuple[str, ...] = ()
    hypotheses: tuple[str, ...] = ()
    noisy: bool = False
    core: bool = True

    def missing(self, trainer: PPO) -> str | None:
        """Return the sentence that says why it does not apply to this trainer, or None."""
        lacks = next((need.lack for need in map(NEEDS.__getitem__, self.needs) if not need.holds(trainer)), None)
        return None if lacks is None else f"{self.name} does not apply to {trainer.env.name}: {lacks}"

    def checked(self, dose: float | None) -> float:
        """Return the dose, the default for None; raise ValueError outside of `doses`."""
        dose = self.dose if dose is None else dose
        low, high = self.doses
        if not low <= dose <= high:
            wanted = f"from {low:g} to {high:g}" if low < high else f"{low:g}, the only one"
            raise ValueError(f"the dose of {self.name} must be {wanted}, got {dose:g}")
        return dose


def undo_all(*undos: Undo) -> Undo:
    """Return a function that undoes all changes, the last one first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def replace_steps(trainer: PPO, **functions: Callable[..., Any]) -> Undo:
    """Replace steps of the update."""
    return _replace_fields(trainer, "steps", functions)


def replace_config(trainer: PPO, **settings: Any) -> Undo:
    """Replace settings of the trainer."""
    return _replace_fields(trainer, "config", settings)


def _replace_fields(trainer: Any, name: str, values: Mapping[str, Any]) -> Undo:
    def put(fields: Mapping[str, Any]) -> None:
        setattr(trainer, name, replace(getattr(trainer, name), **fields))

    before = {field: getattr(getattr(trainer, name), field) for field in values}
    put(values)
    return partial(put, before)


def shorten_adam_memory(optimizer: torch.optim.Optimizer) -> Undo:
    """Set Adam's beta2 to 0.9."""
    before = [group["betas"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["betas"] = (group["betas"][0], 0.9)

    def undo() -> None:
        for group, betas in zip(optimizer.param_groups, before, strict=True):
            group["betas"] = betas

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


def replace_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Replace an attribute of an object of the trainer."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return partial(setattr, owner, name, before)


StepChange: TypeAlias = Callable[[Step, Mapping[str, Array]], Step]
"""From a step and its actions to the changed step."""


class StepFilter:
    """Environments whose steps are changed on their way to the trainer; other attributes are passed through."""

    def __init__(self, change: StepChange, env: Any) -> None:
        self._env, self._change = env, change

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Return a changed step."""
        return self._change(self._env.step(actions), actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def change_env_steps(trainer: PPO, change: StepChange) -> Undo:
    """Change the steps of the trainer's environments."""
    return replace_attribute(trainer.collector, "env", StepFilter(change, trainer.collector.env))


def first_layers(trainer: PPO) -> list[MLP]:
    """Return the hidden layers of every trunk that read the observations; none after convolutions."""
    trunks = trainer.policy.named_trunks().values()
    readers = [trunk.encoder if isinstance(trunk, RecurrentTrunk) else trunk for trunk in trunks]
    return [reader for reader in readers if isinstance(reader, MLP) and len(reader.layers)]


def _kinds(trainer: PPO) -> set[str]:
    """Return the kinds of the parts of an action."""
    return {spec.kind for spec in trainer.env.action_specs.values()}


def _restricts(trainer: PPO) -> bool:
    partly = any(spec.relevant_for is not None for spec in trainer.env.action_specs.values())
    return partly or hasattr(trainer.env, "action_masks")


def _has_images(trainer: PPO) -> bool:
    layout = getattr(trainer.env, "observation_layout", None)
    return layout is not None and bool(layout.images)


NEEDS = {
    "memory": Need("A recurrent policy", "its policy has no memory", lambda one: one.policy.cores()),
    "lstm": Need(
        "An LSTM, because a GRU lacks a forget gate",
        "its policy has no LSTM",
        lambda one: "lstm" in {core.kind for core in one.policy.cores().values()},
    ),
    "restrictions": Need("Actions that are masked or matter only sometimes", "it has no action masks", _restricts),
    "several heads": Need("An action of several parts", "its actions have one part", lambda one: len(one.env.action_specs) > 1),
    "choices": Need("A categorical part of the action", "its actions are continuous", lambda one: "categorical" in _kinds(one)),
    "relu": Need(
        "Hidden layers with ReLU that read the observation",
        "no layer with ReLU reads its observations",
        lambda one: first_layers(one) and one.config.activation == "relu",
    ),
    "normalized advantages": Need(
        "Advantages that are declared as normalised", "its advantages are not normalised", lambda one: one.config.normalize_advantages
    ),
    "normalized observations": Need(
        "A running normaliser of observations", "its observations are not normalised", lambda one: one.normalizers.observations is not None
    ),
    "numeric observations": Need("Observations that can be scaled", "its observations hold images", lambda one: not _has_images(one)),
    "host environments": Need(
        "Environments that are stepped as arrays", "its environments step on a device", lambda one: not hasattr(one.collector.env, "device")
    ),
    "several environments": Need("More than one environment", "it has only one environment", lambda one: one.env.num_envs > 1),
    "scheduled rate": Need(
        "A learning rate that does not follow the KL", "its learning rate follows the KL", lambda one: one.config.desired_kl is None
    ),
    "several minibatches": Need(
        "More than one minibatch in a pass", "it takes one minibatch per pass", lambda one: one.config.num_minibatches > 1
    ),
}
"""Requirements on a trainer by name."""
