"""No value in the data makes telemetry raise: whole updates of NaN, infinities, constants, single rows and empty tensors."""

import math
import warnings
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.record import Level
from esper_telemetry.events import RolloutEnd, UpdateEnd
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.metrics.actions import ActionTotal
from esper_telemetry.metrics.gradients.actor_critic import LeafGradients
from esper_telemetry.metrics.lstm.gates import lstm_weights
from esper_telemetry.metrics.lstm.states import state_ages, state_size
from esper_telemetry.metrics.optimizer import AdamState
from esper_telemetry.pipeline.window import Window
from esper_telemetry.updates.evidence import captures, flight_of, layer_table, stability_report
from esper_telemetry.updates.groups import measure
from esper_telemetry.updates.update import (
    ActionChoices,
    BackwardGradients,
    CollectedRows,
    Episodes,
    GradientSample,
    JoinedMinibatches,
    Layer,
    Normalizer,
    RecurrentState,
    RolloutContext,
    TrainingProgress,
    Update,
)

KINDS = ("normal", "constant", "zero", "huge", "tiny", "nan", "infinite", "mixed")
FACTS = Facts(
    clip=0.2,
    clip_value=0.2,
    max_grad_norm=0.5,
    value_coef=0.5,
    entropy_coef=0.01,
    num_steps=4,
    groups={"actor": ["a"], "critic": ["b"], "shared": ["c"], "head:choice": ["a"], "gone": ["d"]},
    value_head=["b"],
    activation="relu",
    normalize_minibatches=False,
)


class Numbers:
    """Draws tensors with one kind of invalid values."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def __call__(self, *shape: int) -> Tensor:
        kind = self._draw(st.sampled_from(KINDS))
        x = torch.randn(shape, generator=self._generator)
        match kind:
            case "constant":
                return torch.full(shape, 0.1)
            case "zero":
                return torch.zeros(shape)
            case "huge":
                return x * 1e30
            case "tiny":
                return x * 1e-30
            case "nan" | "infinite":
                return torch.full(shape, math.nan if kind == "nan" else -math.inf)
            case "mixed":
                odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e38])
                places = torch.rand(shape, generator=self._generator) < 0.3
                return torch.where(places, odd[torch.randint(5, shape, generator=self._generator)], x)
        return x

    def flags(self, *shape: int) -> Tensor:
        """Draw flags: all, none or some."""
        share = self._draw(st.sampled_from([0.0, 0.5, 1.0]))
        return torch.rand(shape, generator=self._generator) < share

    def size(self, *options: int) -> int:
        return self._draw(st.sampled_from(options))


@st.composite
def updates_of_anything(draw: st.DrawFn) -> Update:
    """Draw a whole update: T steps in B environments, M minibatches of a few rows, K gradients."""
    x = Numbers(draw)
    steps, envs = x.size(1, 2, 5), x.size(1, 3)
    counts = tuple(x.size(1, 2, 4) for _ in range(x.size(1, 2)))
    numels = tuple(x.size(1, 6) for _ in range(3))
    end = UpdateEnd(3, 99, 9, float(x(1)), {}, coefficients={"value": 0.5, "entropy": 0.01})
    return Update(
        rollout=rollout(x, steps, envs),
        context=context(x, steps, envs),
        episodes=episodes(x),
        minibatches=minibatches(x, counts, steps * envs),
        features=x(min(sum(counts), counts[0]), 4),
        collected=collected(x, sum(counts)),
        gradients=(gradients(x, len(counts), numels),),
        progress=TrainingProgress(end, envs * steps, 0.0, collected=2, sample_every=1),
        sample=sample(x, numels),
    )


def rollout(x: Numbers, steps: int, envs: int) -> RolloutEnd:
    return RolloutEnd(
        update=3,
        env_step=99,
        rewards=x(steps, envs),
        values=x(steps, envs),
        advantages=x(steps, envs),
        returns=x(steps, envs),
        log_probs=x(steps, envs),
        next_values=x(steps, envs),
        ended=x.flags(steps, envs),
        terminated=x.flags(steps, envs),
        actions={"choice": torch.randint(0, 3, (steps, envs)), "move": x(steps, envs, 2)},
        gamma=0.99,
        valid=x.flags(steps, envs),
        raw_rewards=x(steps, envs),
        action_masks={"choice": x.flags(steps, envs, 3)},
        relevance={"choice": x.flags(steps, envs), "move": x.flags(steps, envs)},
        log_std={"move": x(steps, envs, 2)},
        bounds={"move": torch.tensor([[-1.0, -math.inf], [1.0, math.inf]])},
    )


def context(x: Numbers, steps: int, envs: int) -> RolloutContext:
    size = state_size(x(steps, 2, 2, envs, 4))
    return RolloutContext(
        previous_choices={"choice": ActionChoices(torch.randint(0, 3, (steps, envs)), x.flags(steps, envs))},
        mean_actions={"move": ActionTotal(x(2).double(), torch.tensor(0.0))},
        memory=RecurrentState(size, state_ages(size.empty, None), (layer(x, steps, envs),)),
        normalizers={"obs": Normalizer(x(4), x(4).abs(), (x(4), x(4).abs()), torch.tensor(0.0), 0)},
    )


def layer(x: Numbers, steps: int, envs: int) -> Layer:
    return Layer(lstm_weights(torch.nn.LSTM(3, 4)), x(steps, envs, 3), x(steps, envs, 4), x(steps, envs, 4))


def episodes(x: Numbers) -> Episodes:
    returns = tuple(x(x.size(0, 1, 3)).tolist())
    return Episodes(returns, tuple(range(1, len(returns) + 1)), returns)


def minibatches(x: Numbers, counts: tuple[int, ...], transitions: int) -> JoinedMinibatches:
    rows = sum(counts)
    valid = x.flags(rows) if x.size(0, 1) else None
    masks = x.flags(rows, 3)
    masks[:, 0] = True
    return JoinedMinibatches(
        epochs=tuple(range(len(counts))),
        counts=counts,
        log_ratio=x(rows),
        advantages=x(rows),
        valid=valid,
        losses={name: x(len(counts)) for name in ("policy", "value")},
        logits={"choice": x(rows, 3)},
        action_masks={"choice": masks},
        log_std={"move": x(rows, 2)},
        head_log_ratios={"choice": x(rows), "move": x(rows)},
        relevance={"choice": x.flags(rows)},
        rows=torch.arange(rows) % transitions,
        values=x(rows),
        old_values=x(rows),
        returns=x(rows),
        means={"move": x(rows, 2)},
    )


def collected(x: Numbers, rows: int) -> CollectedRows:
    return CollectedRows(
        advantages=x(rows),
        actions={"choice": torch.zeros(rows, dtype=torch.long)},
        logits={"choice": x(rows, 3)},
        means={"move": x(rows, 2)},
        log_std={"move": x(rows, 2)},
    )


def gradients(x: Numbers, steps: int, numels: tuple[int, ...]) -> BackwardGradients:
    leaves = LeafGradients(x(steps).abs(), x(steps).abs(), x(steps))
    return BackwardGradients(tuple(range(steps)), ("a", "b", "c"), numels, x(steps, 3).abs(), 0.5, leaves)


def sample(x: Numbers, numels: tuple[int, ...]) -> GradientSample:
    entries = sum(numels)
    return GradientSample(
        ("a", "b", "c"),
        numels,
        minibatches=(x(entries), x(entries)),
        shards=(x(entries), x(entries)),
        samples=(2, 1),
        actor=x(numels[2]),
        critic=x(numels[2]),
        states=(adam_state(x, numels),),
        state_names=("a", "b", "c"),
        previous_steps=torch.tensor([0.0, 5.0, 2.0], dtype=torch.float64),
        initial_norm=x().abs(),
    )


def adam_state(x: Numbers, numels: tuple[int, ...]) -> AdamState:
    entries, column = sum(numels), torch.ones(len(numels), dtype=torch.float64)
    return AdamState(
        shapes=tuple((numel,) for numel in numels),
        weights=x(entries),
        gradient=x(entries),
        exp_avg=x(entries),
        exp_avg_sq=x(entries).abs(),
        step=column * float(x.size(0, 1, 100)),
        lr=1e-3 * column,
        beta1=0.9 * column,
        beta2=0.999 * column,
        eps=1e-5 * column,
    )


def as_tuple(found: MetricGroup | Postponed | Iterable[MetricGroup | Postponed]) -> tuple[MetricGroup | Postponed, ...]:
    return (found,) if isinstance(found, MetricGroup | Postponed) else tuple(found)


def recorded(updates: Iterable[Update]) -> list[dict[str, float]]:
    """Return the values of the updates' records; the evidence is computed on the way."""
    series, result = RunHistory(FACTS), []
    for update in updates:
        window = Window()
        for measurements, epochs in measure(update, FACTS, Level.DEBUG):
            for measurement in measurements:  # called directly, because a run would contain the exceptions
                for group in as_tuple(measurement()):
                    window.add(group, epochs, None)
        values = window.send().finish(Level.DEBUG)
        record = dict(values.values) | series.derive(values.unreported | values.values, Level.DEBUG)
        list(captures(update, FACTS))
        assert flight_of(update, FACTS) and stability_report(update) and layer_table(update) is not None
        result.append(record)
    return result


@pytest.mark.system
@given(st.lists(updates_of_anything(), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_whatever_an_update_holds_it_becomes_a_record_of_finite_numbers(updates: list[Update]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for record in recorded(updates):
            assert all(math.isfinite(value) for value in record.values()), record


def test_an_update_of_nothing_is_a_record_of_nothing() -> None:
    """Without distributions, losses or gradients, the rest is still measured."""
    bare = JoinedMinibatches((0,), (2,), torch.zeros(2), torch.ones(2), None, {})

    assert recorded([Update()])[0].keys() <= {"telemetry/undefined"}
    assert recorded([Update(minibatches=bare)])[0]["policy/kl"] == 0.0
