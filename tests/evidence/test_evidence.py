"""The evidence behind a record: the steps and the worst transitions of an update, what was not finite, every layer's gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.environments import CueRecall
from esper_telemetry.events import BackwardEnd, MinibatchEnd, RolloutEnd
from esper_telemetry.evidence import Captures, flight_of, layer_table, stability_report
from esper_telemetry.evidence.captures import QUIET, exploded, not_finite
from esper_telemetry.record import Level
from esper_telemetry.summary import Gradients, GradientSample, Minibatches, Rollout, Snapshot
from esper_telemetry.summary.numerics import nonfinite_in
from esper_telemetry.wiring import update as wiring_update


def minibatches(log_ratio: list[float], **named: Any) -> Minibatches:
    rows = len(log_ratio)
    return Minibatches(
        epochs=(0, 0),
        counts=(2, rows - 2),
        log_ratio=torch.tensor(log_ratio),
        advantages=torch.arange(float(rows)),
        valid=named.pop("valid", None),
        losses={},
        logits={},
        action_masks={},
        log_std={},
        **named,
    )


def rollout(log_probs: Tensor, **named: Any) -> Rollout:
    """Of T steps in B environments; what is not given is zero."""
    zeros = torch.zeros_like(log_probs)
    flags = zeros.bool()
    given = {name: named.pop(name, zeros) for name in ("rewards", "values", "advantages", "returns", "next_values")}
    return Rollout(**given, log_probs=log_probs, ended=flags, terminated=flags, gamma=0.99, valid=None, **named)


def test_the_worst_rows_lead_and_masked_ones_never_do() -> None:
    """Rows 0 and 1 are of step 0, the others of step 1; row 2, the largest, does not count."""
    valid = torch.tensor([True, True, False, True, True])
    snapshot = Snapshot(minibatches=minibatches([0.1, -3.0, 9.0, 0.5, -0.2], valid=valid))

    worst = flight_of(snapshot, {}, rows=3).worst

    assert [(row.log_ratio, row.step, row.advantage) for row in worst] == [
        (-3.0, 0, 1.0),
        (0.5, 1, 3.0),
        (pytest.approx(-0.2), 1, 4.0),
    ]
    assert worst[0].time is None and worst[0].heads == {}


def test_a_ratio_that_is_no_number_is_worse_than_any() -> None:
    worst = flight_of(Snapshot(minibatches=minibatches([0.1, 5.0, math.nan])), {}).worst

    assert math.isnan(worst[0].log_ratio) and worst[1].log_ratio == 5.0


def test_a_row_knows_its_place_its_actions_and_its_log_probabilities() -> None:
    """Transition 5 of three environments is step 1 of environment 2; -1.5 then, -1.5 + 2 now, of which 1.75 is the slot's."""
    snapshot = Snapshot(
        rollout=rollout(
            torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.5]]),
            acted={"op": torch.tensor([[0, 0, 0], [0, 0, 3]]), "slot": torch.tensor([[0, 0, 0], [0, 0, 7]])},
            head_log_probs={"op": torch.full((2, 3), -0.5), "slot": torch.full((2, 3), -1.0)},
        ),
        minibatches=minibatches(
            [0.0, 2.0, 0.0],
            rows=torch.tensor([0, 5, 3]),
            head_log_ratios={"op": torch.tensor([0.0, 0.25, 0.0]), "slot": torch.tensor([0.0, 1.75, 0.0])},
        ),
    )

    row = flight_of(snapshot, {}, rows=1).worst[0]

    assert (row.time, row.env, row.old_log_prob, row.new_log_prob) == (1, 2, -1.5, 0.5)
    assert {name: (h.action, h.old_log_prob, h.new_log_prob) for name, h in row.heads.items()} == {
        "op": (3, -0.5, -0.25),
        "slot": (7, -1.0, 0.75),
    }


def test_the_report_names_the_first_tensor_in_forward_order() -> None:
    """Two values are not finite; the losses behind them are not either, and come later."""
    values = torch.tensor([[1.0, math.nan], [-4.0, math.inf]])
    losses = {"value": torch.tensor([math.nan, 2.0])}
    snapshot = Snapshot(rollout=rollout(torch.zeros(2, 2), values=values), minibatches=minibatches([0.0, 0.0, 0.0]))
    snapshot.minibatches.losses.update(losses)  # type: ignore[union-attr]  # a plain dictionary here

    report = stability_report(snapshot)

    assert report.first == "values"
    assert [(o.name, o.nan, o.infinite, o.indices) for o in report.offenders] == [
        ("values", 1, 1, ((0, 1), (1, 1))),
        ("loss value", 1, 0, ((0,),)),
    ]
    assert report.largest["values"] == 4.0 and report.largest["loss value"] == 2.0


def test_a_healthy_update_has_no_offender() -> None:
    report = stability_report(Snapshot(rollout=rollout(torch.zeros(2, 2))))

    assert (report.first, report.offenders) == ("", ())


def test_what_is_not_finite_counts_wherever_it_is() -> None:
    """A reward, two log-ratios of which one does not count, a loss and two norms: five."""
    snapshot = Snapshot(
        rollout=rollout(torch.zeros(2, 2), rewards=torch.tensor([[0.0, math.nan], [0.0, 0.0]])),
        minibatches=minibatches([math.inf, 0.0, math.nan], valid=torch.tensor([True, True, False])),
        gradients=(Gradients((0, 0), ("w",), (3,), torch.tensor([[math.nan], [math.inf]]), None, None),),
    )
    snapshot.minibatches.losses["value"] = torch.tensor([math.nan, 1.0])  # type: ignore[union-attr, index]  # a dictionary here

    assert nonfinite_in(snapshot).values() == {"numerics/nonfinite": 5.0}
    assert nonfinite_in(Snapshot(rollout=rollout(torch.zeros(2, 2)))).values() == {"numerics/nonfinite": 0.0}


def test_every_layer_has_a_line() -> None:
    """Entries 3, -4, 0 and NaN: norm 5, mean -1/3, a quarter zero, one in each of three bins and one not finite."""
    sample = GradientSample(
        names=("w", "b"),
        numels=(4, 2),
        minibatches=(torch.tensor([3.0, -4.0, 0.0, math.nan, 1e-7, 20.0]),),
    )

    w, b = layer_table(Snapshot(sample=sample))

    assert (w.norm, w.min, w.max, w.zero_frac, w.nan) == (5.0, -4.0, 3.0, 0.25, 1)
    assert w.mean == pytest.approx(-1 / 3)
    assert (w.decades[0], w.decades[13], w.decades[17]) == (1, 2, 1)
    assert (b.small_frac, b.large_frac, b.nan, b.infinite) == (0.5, 0.5, 0, 0)
    assert layer_table(Snapshot()) == ()


EXPLODED = {"policy/ratio/max": 11.0, "policy/ess_frac_min": 0.7}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"policy/ratio/max": 11.0, "policy/ess_frac_min": 0.9}, False),
        (EXPLODED, True),
        ({"policy/ratio/max": 1.1, "policy/ess_frac_min": 0.5}, True),
    ],
)
def test_what_calls_for_the_flight_recorder(values: dict[str, float], expected: bool) -> None:
    assert exploded(values) is expected


def test_what_calls_for_the_stability_report() -> None:
    assert not_finite({"numerics/nonfinite": 1.0})
    assert not_finite({"grad/global/norm_preclip_nonfinite": 2.0})
    assert not not_finite({"numerics/nonfinite": 0.0, "grad/health": 1.0})


def test_normal_writes_evidence_once_in_a_while_minimal_never_and_debug_always() -> None:
    snapshot = Snapshot(minibatches=minibatches([0.0, 0.1, 0.2]))

    def written(level: Level) -> list[list[str]]:
        captures = Captures(level)
        return [[c.type for c in captures.of(snapshot, EXPLODED, {})] for _ in range(QUIET + 1)]

    assert written(Level.NORMAL) == [["flight"], *[[]] * (QUIET - 1), ["flight"]]
    assert written(Level.MINIMAL) == [[]] * (QUIET + 1)
    assert written(Level.DEBUG) == [["stability", "flight"]] * (QUIET + 1)


def cartpole(**settings: Any) -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=2, **settings))


def recall(**settings: Any) -> PPO:
    config = PPOConfig(policy="lstm", num_steps=32, num_epochs=2, num_minibatches=2, lstm_size=8, **settings)
    return PPO(CueRecall(8, seed=0), config)


def pendulum(**settings: Any) -> PPO:
    return PPO(make_env("Pendulum-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=2, **settings))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("make", [cartpole, recall, pendulum])
def test_a_real_run_finds_its_worst_transitions_again(tmp_path: Path, make: Any, offload: bool) -> None:
    """The recorder's rows against what the trainer's own events say of the same transitions."""
    source = make()
    rollouts: list[RolloutEnd] = []
    found: list[MinibatchEnd] = []
    norms: list[float] = []
    source.hooks.on(RolloutEnd, rollouts.append)
    source.hooks.on(MinibatchEnd, found.append)
    source.hooks.on(BackwardEnd, lambda event: norms.append(float(event.norms.double().norm())))

    with Telemetry(run_dir=tmp_path, offload=offload, level="debug") as telemetry:
        attach(telemetry, source)
        source.learn(1)

    (flight,) = (event.data for event in read_run(tmp_path).events if event.type == "evidence/flight")
    largest = max(float(event.log_ratio.abs().max()) for event in found)
    row = flight["worst"][0]
    place = row["time"], row["env"]
    assert abs(row["log_ratio"]) == pytest.approx(largest)
    assert row["old_log_prob"] == pytest.approx(float(rollouts[0].log_probs[place]))
    assert {head: shift["action"] for head, shift in row["heads"].items()} == {
        head: actions[place].tolist() for head, actions in rollouts[0].actions.items()
    }
    assert [step["norm"] for step in flight["steps"]] == pytest.approx(norms, rel=1e-5)
    assert row["step"] in range(len(flight["steps"])) and len(flight["worst"]) == 16


def test_debug_writes_the_table_and_the_histograms_of_gradients(tmp_path: Path) -> None:
    source = cartpole()
    with Telemetry(run_dir=tmp_path, offload=False, level="debug") as telemetry:
        attach(telemetry, source)
        source.learn(1)

    run = read_run(tmp_path)
    (table,) = (event.data["layers"] for event in run.events if event.type == "evidence/gradients")
    parameters = dict(source.policy.named_parameters())
    assert {line["name"]: line["entries"] for line in table} == {name: p.numel() for name, p in parameters.items()}
    histograms = run.records[0].histograms
    assert sum(histograms["grad/decades"].counts) == sum(p.numel() for p in parameters.values())
    assert sum(histograms["grad/layer/value_weight/decades"].counts) == parameters["value.weight"].numel()


@pytest.mark.parametrize("most", [1 << 20, 10])
def test_large_networks_have_a_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """What is too large to travel is measured where it is, once, and only its first gradient goes on."""
    monkeypatch.setattr(wiring_update, "MOST_ENTRIES", most)
    source = cartpole()
    with Telemetry(run_dir=tmp_path, level="debug", offload=False) as telemetry:
        attach(telemetry, source)
        source.learn(1)
    run = read_run(tmp_path)
    (table,) = [event.data["layers"] for event in run.events if event.type == "evidence/gradients"]

    assert [line["name"] for line in table] == list(dict(source.policy.named_parameters()))
    assert sum(line["zero_frac"] * line["entries"] for line in table) == pytest.approx(
        run.records[0].values["grad/zero_frac"] * sum(line["entries"] for line in table)
    )


def test_normal_keeps_quiet_while_all_is_well(tmp_path: Path) -> None:
    source = cartpole()
    with Telemetry(run_dir=tmp_path, offload=False) as telemetry:
        attach(telemetry, source)
        source.learn(600)

    assert [event for event in read_run(tmp_path).events if event.type.startswith("evidence")] == []


def test_a_reward_that_is_no_number_leaves_its_place_in_the_journal(tmp_path: Path) -> None:
    source = cartpole(watchdog=True)
    spoilt = source.steps.rewards

    def spoil(rewards: Tensor) -> Tensor:
        rewards = spoilt(rewards).clone()
        rewards[5, 2] = math.nan
        return rewards

    object.__setattr__(source.steps, "rewards", spoil)
    with Telemetry(run_dir=tmp_path, offload=False) as telemetry:
        attach(telemetry, source)
        source.learn(1)

    reports = [event.data for event in read_run(tmp_path).events if event.type == "evidence/stability"]
    assert reports[0]["first"] == "rewards"
    assert reports[0]["offenders"][0]["indices"] == [[5, 2]]
