"""Facts of a run: the trainer's description of the algorithm, the networks and the task. Rules, equations and views read them.

Trainers, adapters and users give facts as a mapping, and the journal keeps it. Each fact that this package reads is declared once, as a
field of `Facts`; its type says which values users may give and readers of a journal accept. All other facts are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final

from esper_telemetry.core.messages import shown
from esper_telemetry.core.requirements import require_text, require_truth

UNCHECKED_FACT: Final = "unchecked_equations"
"""Fact of a run: reasons why its trainer does not provide the inputs of equations, by their names.

Trainers and adapters add it to the facts of `RunStart`. A reason continues "could not be checked: ", and is used if no record has the
equation.
"""

UNTRACED_FACT: Final = "untraced_equations"
"""Fact of a run: what an adapter sought in a program for equations, and what it found instead, by their names.

A text continues "not traced: ", and is used if no record has the equation and `UNCHECKED_FACT` has no reason.
"""


PRECISIONS: Final[Mapping[str, str]] = {
    **{name: name for name in ("fp32", "tf32", "bf16", "fp16")},
    **dict(zip(("float32", "float64", "bfloat16", "float16"), ("fp32", "fp32", "bf16", "fp16"), strict=True)),
}
"""The fact `precision` by its own values and by torch's names of types; double precision rounds less than the bounds for fp32 allow."""


def precision_of(dtype: object) -> str | None:
    """Return the fact `precision` for a torch type or its name; None for anything else."""
    return PRECISIONS.get(str(dtype).removeprefix("torch."))


def require_precision(name: str, value: object) -> str:
    """Return the fact `precision` for a value that a user gives."""
    precision = precision_of(value)
    if precision is None:
        raise ValueError(f"{name} must be fp32, tf32, bf16 or fp16, or a float type of torch, got {shown(value)}")
    return precision


@dataclass(frozen=True, slots=True, eq=False)
class Facts(Mapping[str, Any]):
    """Facts of one run as attributes: None, or empty, if a fact is missing or has another form.

    As a mapping it holds the facts as they were given, including undeclared ones.
    """

    mapping: Mapping[str, Any] = field(default_factory=dict)  # as it was given

    trainer: str | None = None  # library and class that train; None for the bundled trainer and for loops of users
    level: str | None = None  # of the run: minimal, normal or debug
    ranks: int = 1  # processes that train together
    precision: str | None = None  # of the trainer's arithmetic: fp32, tf32, bf16 or fp16
    escalation: int | None = None  # updates at DEBUG after a critical alarm, as the user has set them
    thresholds: Mapping[str, Any] = field(default_factory=dict)  # bounds of alarms that the user has changed, by name
    unchecked_equations: Mapping[str, str] = field(default_factory=dict)  # see `UNCHECKED_FACT`
    reported_returns: bool = False  # the only returns are those that a script reports now and then
    untraced_equations: Mapping[str, str] = field(default_factory=dict)  # see `UNTRACED_FACT`
    equation_places: Mapping[str, str] = field(default_factory=dict)  # file and line in the script, by equation

    setting_names: Mapping[str, str] = field(default_factory=dict)  # the trainer's names of settings, by ours
    value_coef_scale: float = 1.0  # the trainer's coefficient of the value loss over `value_coef`

    env: str | None = None  # name of the environment
    num_envs: int | None = None  # environments of all ranks
    horizon: int | None = None  # time limit of an episode, in steps
    step_unit: str | None = None  # of a record's position in logs of other trainers, if it is not an environment step
    reward_threshold: float | None = None  # return of an episode that solves the task
    heads: Mapping[str, str] | None = None  # kind of distribution by head of the policy: categorical or continuous
    squashed: bool | None = None  # actions are kept within their bounds by a tanh
    inverts_squash: bool | None = None  # log-probabilities are computed from actions after the tanh
    correlated_noise: bool | None = None  # the noise of actions lasts for several steps
    normalize_observations: bool | None = None
    normalize_rewards: bool | None = None
    fresh_normalizer: bool | None = None  # training continues with a normaliser of observations that has seen no data

    model: str | None = None  # language for a language model
    policy: str | None = None  # mlp, lstm or gru
    activation: str | None = None  # of hidden layers: tanh or relu
    lstm_size: int | None = None  # width of the recurrent state
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # parameters' names by group: actor, critic, ...
    value_head: Sequence[str] = ()  # prefixes of the names of the parameters of the critic's last layer

    total_steps: int | None = None  # environment steps of the run
    num_steps: int | None = None  # steps of each environment in a rollout
    num_epochs: int | None = None
    num_minibatches: int | None = None  # of an epoch
    optimizer: str | None = None  # class of the optimizer
    learning_rate: float | None = None  # of the first update
    weight_decay: float | None = None  # largest of the optimizer's groups; None for 0
    learning_rate_schedule: Mapping[str, Any] | None = None  # see `core.rate_schedule`
    max_grad_norm: float | None = None
    clip: float | None = None  # of the probability ratio: half width of the trust region
    clip_value: float | None = None  # of the critic's move
    value_coef: float | None = None  # weight of half the mean squared error
    entropy_coef: float | None = None
    target_kl: float | None = None  # KL at which an update stops
    desired_kl: float | None = None  # KL by which the learning rate is adapted
    adaptive_rate: bool | None = None  # the learning rate of a log is adapted to a KL that the log does not have

    has_critic: bool = True  # without one, advantages are sums of rewards, and values are 0
    gamma: float | None = None
    gae_lambda: float | None = None
    normalize_advantages: bool | None = None
    normalize_minibatches: bool | None = None  # advantages are normalised over minibatches, not over the rollout
    advantage_std_floor: float | None = None  # added to the standard deviation, or its lower bound
    advantage_correction: int = 1  # subtracted from the number of rows in the variance of advantages
    recomputes_advantages: bool | None = None  # before each epoch (2006.05990, section 3.5): the first one is checked
    columns_by_name: bool | None = None  # columns come from variables in a script, whose names may mislead
    loss_pairs: bool | None = None  # the policy's loss has N² ratios, or products with log-probabilities, of N rows
    detached_state: bool | None = None  # in the policy's loss no gradient flows through the states of a recurrent cell
    softmax_twice: bool | None = None  # the policy's loss takes a softmax of the outputs of another softmax
    truncated_sampling: bool | None = None  # tokens are sampled from a part of the distribution (top_p, top_k, min_p)

    @classmethod
    def of(cls, facts: Mapping[str, Any] | None = None) -> Facts:
        """Return the facts of a mapping of plain values, as in a journal."""
        if isinstance(facts, Facts):
            return facts
        facts, values = dict(facts or {}), {}
        for name, kind in DECLARED.items():
            types, read = READ[kind]
            with suppress(ValueError, OverflowError):  # a text that is not a number, or a count that is not finite
                if isinstance(facts.get(name), types):
                    values[name] = read(facts[name])
        if "precision" in values:
            values["precision"] = precision_of(values["precision"])
        return cls(facts, **values)

    @property
    def own_loop(self) -> bool:
        """True if no trainer or adapter has described itself: the user's own loop reports what it calls."""
        return not (self.trainer or self.optimizer)

    @property
    def rate_follows_kl(self) -> bool:
        """True if the learning rate is adapted to the KL divergence."""
        return bool(self.desired_kl or self.adaptive_rate)

    def __getitem__(self, name: str) -> Any:
        return self.mapping[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Return the facts on an optimizer of torch."""
    decay = max((float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups), default=0.0)
    return {"optimizer": type(optimizer).__name__} | ({"weight_decay": decay} if decay else {})


DECLARED: Final = {item.name: str(item.type).removesuffix(" | None") for item in fields(Facts)[1:]}
"""Types of the declared facts by name."""

READ: Final[Mapping[str, tuple[tuple[type, ...], Callable[[Any], Any]]]] = {
    "int": ((int, float), int),
    "float": ((int, float, str), float),  # the journal spells numbers that are not finite
    "str": ((str,), str),
    "bool": ((int, float), bool),
    "Sequence[str]": ((list, tuple), tuple),
    **dict.fromkeys(("Mapping[str, str]", "Mapping[str, Sequence[str]]", "Mapping[str, Any]"), ((Mapping,), dict)),
}
"""By the type of a fact, the types of its value in a journal and the function that reads it."""


def checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a user gives, with numbers of NumPy and torch as Python numbers; undeclared facts are free.

    Raises TypeError for a fact of another type, ValueError for an unknown precision.
    """
    kinds = {require_text("the name of a fact", name): DECLARED.get(name, "") for name in facts}
    return {
        name: None if facts[name] is None else _checked_fact(name, kind, facts[name])
        for name, kind in kinds.items()
        if facts[name] is not None or not kind.startswith("Mapping")  # None is a value here, such as a missing limit
    }


def _checked_fact(name: str, kind: str, value: Any) -> Any:
    if name == "precision":
        return require_precision("fact precision", value)
    if kind in ("int", "float"):
        from esper_telemetry.core.arrays import as_number  # imported here, because it needs NumPy, which readers do without

        number = as_number(value, f"fact {name}")
        return int(number) if number.is_integer() else number
    if kind == "str":
        return require_text(f"fact {name}", value, may_be_empty=True)
    if kind == "bool":
        return require_truth(f"fact {name}", value)
    if kind.startswith("Mapping") and not isinstance(value, Mapping):
        raise TypeError(f"fact {name} must be a mapping, got {shown(value)}")
    if name == "groups" and not all(isinstance(part, list | tuple) for part in value.values()):
        raise TypeError(f"fact groups must have lists of parameters' names, got {shown(value)}")
    return value
