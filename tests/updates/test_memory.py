"""A recurrent or factored policy, attached: memory, heads and masks are measured on valid rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from esper_telemetry import PPO, Level, PPOConfig, Record, Telemetry, attach, make_env
from esper_telemetry.core.containment import Containment
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.events import MinibatchEnd, RecurrentForward, RolloutEnd
from esper_telemetry.metrics.integrity import MaskViolation
from esper_telemetry.metrics.lstm.gates import cell_weights, gates_of
from esper_telemetry.pipeline.sampling import INITIAL_PERIOD
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_protocol import Environment
from esper_telemetry.updates.groups import measure
from esper_telemetry.updates.joining import RolloutHistory, joined_minibatches
from esper_telemetry.updates.update import Update, in_grid

STATES = {f"lstm/{part}/{name}" for part in "hc" for name in ("rms", "absmax", "mean", "env_rms/max")}
RESETS = {"lstm/reset_rate", "lstm/chunk_no_reset_frac", "lstm/age/mean", "lstm/age/max", "lstm/c_growth"}
GATES = {f"lstm/gate/{gate}/{name}" for gate in "ifo" for name in ("mean", "sat_lo", "sat_hi")}
CELL = {"lstm/cand/sat", "lstm/cell_log_gain", *(f"lstm/timescale/{n}" for n in ("median", "p90", "frac_beyond_bptt"))}
THROUGH_TIME = {"lstm/bptt/h0_grad_norm"}
"""Absent because no sequence began with memory."""
REPLAYED = {"lstm/staleness", "lstm/staleness_first"}


def masked_cartpole() -> Environment:
    return make_env("CartPole-v1", num_envs=4, seed=0, mask_velocity=True)


def cue_recall() -> Environment:
    return CueRecall(8, seed=0)


def trainer(make: Callable[[], Environment], **settings: Any) -> PPO:
    config = PPOConfig(num_steps=32, num_epochs=2, num_minibatches=2, lstm_size=8, hidden_sizes=(8,), **settings)
    return PPO(make(), config)


def recorded(source: PPO, *, level: str = "normal", updates: int = 3) -> list[dict[str, float]]:
    records: list[Record] = []
    with Telemetry([records.append], run_dir=None, offload=False, level=level) as telemetry:
        attach(telemetry, source)
        source.learn(updates * 32 * source.env.num_envs)
    return [dict(record.values) for record in records]


@cache
def records_of(make: Callable[[], Environment], *, level: str = "normal", updates: int = 3, **settings: Any) -> list[dict[str, float]]:
    """Values of the records of a run, which several tests read."""
    return recorded(trainer(make, **settings), level=level, updates=updates)


def starting(values: dict[str, float], prefix: str) -> set[str]:
    return {key for key in values if key.startswith(prefix)}


@pytest.mark.system
@pytest.mark.parametrize(("make", "layers"), [(masked_cartpole, 1), (cue_recall, 2)])
def test_an_lstm_reports_its_memory(make: Callable[[], Environment], layers: int) -> None:
    records = records_of(make, policy="lstm", lstm_layers=layers, updates=1 + INITIAL_PERIOD)

    for values in records[::INITIAL_PERIOD]:
        assert starting(values, "lstm/") - THROUGH_TIME == STATES | RESETS | GATES | CELL | REPLAYED
        assert 0 < values["lstm/h/rms"] < 1
        assert 0 < values["lstm/gate/f/mean"] < 1
        assert values["lstm/timescale/median"] > 1
    for values in records[1:INITIAL_PERIOD]:
        assert not (GATES | REPLAYED) & values.keys()
        assert values["integrity/ratio_init"] < 1e-5


@pytest.mark.system
@pytest.mark.parametrize("layers", [1, 2])
def test_a_gru_has_one_part_and_two_gates(layers: int) -> None:
    records = records_of(masked_cartpole, policy="gru", lstm_layers=layers, updates=1 + INITIAL_PERIOD)

    states = {key for key in STATES if "/h/" in key} | RESETS - {"lstm/c_growth"}
    gates = {f"lstm/gate/{gate}/{name}" for gate in "rz" for name in ("mean", "sat_lo", "sat_hi")}
    for values in records[::INITIAL_PERIOD]:
        assert starting(values, "lstm/") - THROUGH_TIME == states | gates | CELL | REPLAYED
    assert starting(records[1], "lstm/") == states


def test_a_policy_reports_neither_memory_nor_heads_nor_masks_that_it_lacks() -> None:
    last = records_of(masked_cartpole)[-1]

    assert not starting(last, "lstm/")
    assert not {"policy/head/action/kl", "integrity/mask_violation"} & last.keys()


def test_minimal_reports_the_reset_rate_and_never_computes_gates() -> None:
    last = records_of(cue_recall, policy="lstm", level="minimal")[-1]

    assert starting(last, "lstm/") == {"lstm/reset_rate"}


def test_the_reset_rate_is_that_of_the_task() -> None:
    """Episodes of ten steps: 32 steps have three beginnings, some four. Memory is at most nine steps old.

    The first rollout begins in the middle of episodes, without memory.
    """
    _, *records = records_of(cue_recall, policy="lstm")

    for values in records:
        assert 3 / 32 <= values["lstm/reset_rate"] <= 4 / 32
        assert values["lstm/chunk_no_reset_frac"] == 0
        assert values["lstm/age/max"] == 9


def test_memory_that_is_never_reset_shows_at_once() -> None:
    """The first rollout begins without memory once in each environment: 1 of 32. Later none resets, and ages grow."""
    source = trainer(cue_recall, policy="lstm")
    source.steps = replace(source.steps, resets=lambda ended: ended & False)

    records = recorded(source)

    assert [values["lstm/reset_rate"] for values in records] == [1 / 32, 0, 0]
    assert [values["lstm/age/max"] for values in records] == [31, 63, 95]


@pytest.mark.parametrize("policy", ["lstm", "gru"])
def test_gates_are_those_of_the_weights_that_collected(policy: str) -> None:
    """Gates computed in the event lead from each stored state to the next."""
    source = trainer(masked_cartpole, policy=policy, lstm_layers=2)
    worst: list[float] = []

    def check(event: RecurrentForward) -> None:
        for cell, inputs, states in zip(event.cells, event.inputs, event.states, strict=True):
            gates = gates_of(cell_weights(cell), inputs, *states.unbind(1), *([None] if policy == "gru" else []))
            goes_on = states[1:, 0].any(-1, keepdim=True)
            worst.append(float(((gates.h[:-1] - states[1:, 0]) * goes_on).abs().max()))

    source.hooks.on(RecurrentForward, check)
    source.learn(3 * 128)

    assert len(worst) >= 6
    assert max(worst) < 1e-5


def test_a_factored_policy_reports_its_heads() -> None:
    first, *_, last = records_of(cue_recall, policy="lstm")

    for head in ("op", "arg"):
        for name in ("kl", "logratio/std", "ratio/min", "ratio/max", "clip_frac", "blame", "entropy", "decision_frac"):
            assert f"policy/head/{head}/{name}" in last
        assert f"policy/head/{head}/action_shift_js" not in first
        assert 0 <= last[f"policy/head/{head}/action_shift_js"] <= 1
    assert last["policy/head/op/blame"] + last["policy/head/arg/blame"] == pytest.approx(1)
    assert last["policy/head/arg/decision_frac"] < last["policy/head/op/decision_frac"] == 1
    shifts = [last[f"policy/head/{head}/action_shift_js"] for head in ("op", "arg")]
    assert last["policy/action_shift_js"] == max(shifts)


def test_the_joint_entropy_leaves_out_irrelevant_rows() -> None:
    """A row's entropy is `op`'s, plus `arg`'s if it is relevant, so it is weighted by the share of such rows."""
    last = records_of(cue_recall, policy="lstm")[-1]
    op, arg = (last[f"policy/head/{head}/entropy"] for head in ("op", "arg"))

    assert last["policy/entropy"] == pytest.approx(op + last["policy/head/arg/decision_frac"] * arg, rel=1e-6)


def test_forbidden_actions_are_counted_where_they_matter() -> None:
    """Masks that allow nothing forbid every action of a valid row. `arg` is relevant in every second row."""
    rollouts: list[RolloutEnd] = []
    source = trainer(cue_recall)
    source.hooks.on(RolloutEnd, rollouts.append)
    source.learn(1)
    second = (torch.arange(32) % 2 == 1).unsqueeze(-1).expand(32, 8)
    event = replace(
        rollouts[0],
        action_masks={"arg": torch.zeros(32, 8, 3, dtype=torch.bool)},
        relevance={"arg": second},
        valid=torch.arange(8).expand(32, 8) < 5,
    )

    history = RolloutHistory()
    rollout, context = history.take(event, categorical=["arg"], layers=())
    groups: list[MetricGroup | Postponed] = []
    for part in measure(Update(rollout=rollout, context=context), Facts(), Level.NORMAL):
        Containment().measure(part.functions, groups.append)
    (values,) = [group.values() for group in groups if isinstance(group, MaskViolation)]

    assert values == {"integrity/mask_violation": 16 * 5}
    _, later = history.take(event, categorical=["arg"], layers=())
    counted = later.previous_choices["arg"].counted
    assert counted is not None and counted.sum() == 16 * 5


def test_rewards_are_reported_as_the_environment_gives_them() -> None:
    last = records_of(masked_cartpole, policy="lstm", normalize_rewards=True)[-1]

    assert last["reward/mean"] == 1
    assert last["reward/std"] == 0


def minibatch(rows: int) -> MinibatchEnd:
    """A minibatch of two heads, one of which is masked and not always relevant."""
    column = torch.randn(rows)
    return MinibatchEnd(
        epoch=0,
        step=1,
        log_ratio=2 * column,
        advantages=column,
        values=column,
        old_values=column,
        returns=column,
        losses={},
        logits={"a": torch.randn(rows, 3), "b": torch.randn(rows, 2)},
        action_masks={"a": torch.ones(rows, 3, dtype=torch.bool)},
        head_log_ratios={"a": column, "b": column},
        relevance={"a": torch.arange(rows) % 3 > 0},
    )


def test_minibatches_of_several_sizes_are_padded_in_every_part() -> None:
    rows = joined_minibatches([minibatch(5), minibatch(4)], with_critic=False)
    assert rows.valid is None
    grid = in_grid(rows)

    assert grid.valid is not None and grid.valid.sum(-1).tolist() == [5, 4]
    for part in (grid.head_log_ratios["a"], grid.head_log_ratios["b"], grid.relevance["a"]):
        assert part.shape == (2, 5)
    assert grid.action_masks["a"].shape == (2, 5, 3)


@pytest.mark.parametrize("level", ["minimal", "normal", "debug"])
def test_nothing_is_reported_that_is_not_finite(level: str) -> None:
    last = records_of(cue_recall, policy="lstm", level=level)[-1]

    assert all(torch.isfinite(torch.tensor(value)) for value in last.values())


def test_states_travel_with_the_rollout() -> None:
    source = trainer(masked_cartpole, policy="lstm")
    rollouts: list[RolloutEnd] = []
    forwards: list[RecurrentForward] = []
    source.hooks.on(RolloutEnd, rollouts.append)
    source.hooks.on(RecurrentForward, forwards.append)
    source.learn(1)

    (rollout,), (forward,) = rollouts, forwards
    assert rollout.states is not None
    assert rollout.states.shape == (32, 1, 2, 4, 8)
    assert torch.equal(forward.states[0], rollout.states[:, 0, :, :2])
    assert forward.inputs[0].shape == (32, 2, 4)


RANKS = {f"repr/{name}" for name in ("effective_rank", "srank", "pca99", "feature_rank")}


@pytest.mark.parametrize("shared", [False, True])
def test_the_features_before_the_first_step_are_measured(shared: bool) -> None:
    """Eight units: at most eight dimensions, and none dormant in a new tanh layer."""
    first, second, *_ = records_of(masked_cartpole, policy="lstm", shared_trunk=shared)

    assert starting(first, "repr/") >= RANKS | {"repr/dormant_frac", "repr/dead_frac"}
    assert all(1 <= first[key] <= 8 for key in RANKS - {"repr/feature_rank"})
    assert first["repr/dead_frac"] == 0
    assert not RANKS & second.keys()


def test_a_trunk_of_dead_units_shows_at_once() -> None:
    source = trainer(masked_cartpole, activation="relu")
    with torch.no_grad():
        for name, parameter in source.policy.actor.named_parameters():
            parameter.fill_(-10.0) if "bias" in name else parameter.zero_()

    first = recorded(source, updates=1)[0]

    assert first["repr/dormant_frac"] == first["repr/dead_frac"] == 1


def test_ratios_that_left_the_clip_range_are_measured() -> None:
    first = records_of(masked_cartpole, learning_rate=0.1)[0]

    assert first["repr/excess_ratio/high"] > 0
    assert 0 < first["repr/excess_ratio/low"] < 0.8
