"""The evidence of a record: the steps and the worst transitions of an update, non-finite tensors, every layer's gradient."""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_run import learned, rollout
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, make_env, read_run
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.containment import Containment
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, Level, Record
from esper_telemetry.events import BackwardEnd, MinibatchEnd, RolloutEnd
from esper_telemetry.journal.lines import plain
from esper_telemetry.metrics.gradients.norms import gradient_norms
from esper_telemetry.metrics.integrity import RowsRepeated
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.recording import recorder as recorder_module
from esper_telemetry.updates.evidence import AlarmedUpdate, evidence_of, first_nonfinite, flight_of, layer_table, stability_report
from esper_telemetry.updates.groups import measure, nonfinite_in
from esper_telemetry.updates.update import BackwardGradients, GradientSample, JoinedMinibatches, Update


def minibatches(log_ratio: list[float], **named: Any) -> JoinedMinibatches:
    rows = len(log_ratio)
    return JoinedMinibatches(
        epochs=(0, 0),
        counts=(2, rows - 2),
        log_ratio=torch.tensor(log_ratio),
        advantages=torch.arange(float(rows)),
        valid=named.pop("valid", None),
        losses={},
        **named,
    )


def test_the_worst_rows_lead_and_masked_ones_never_do() -> None:
    """Rows 0 and 1 are of step 0, the others of step 1. Row 2, the largest, is masked."""
    valid = torch.tensor([True, True, False, True, True])
    update = Update(minibatches=minibatches([0.1, -3.0, 9.0, 0.5, -0.2], valid=valid))

    worst = flight_of(update, Facts(), rows=3).worst

    assert [(row.log_ratio, row.step, row.advantage) for row in worst] == [(-3.0, 0, 1.0), (0.5, 1, 3.0), (pytest.approx(-0.2), 1, 4.0)]
    assert worst[0].time is None and worst[0].heads == {}


def test_a_ratio_that_is_no_number_is_worse_than_any() -> None:
    worst = flight_of(Update(minibatches=minibatches([0.1, 5.0, math.nan])), Facts()).worst

    assert math.isnan(worst[0].log_ratio) and worst[1].log_ratio == 5.0


def test_a_row_knows_its_place_its_actions_and_its_log_probabilities() -> None:
    """Transition 5 of three environments is step 1 of environment 2. Log-probability -1.5, now -1.5 + 2; the slot has 1.75 of it."""
    update = Update(
        rollout=rollout(
            torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.5]]),
            actions={"op": torch.tensor([[0, 0, 0], [0, 0, 3]]), "slot": torch.tensor([[0, 0, 0], [0, 0, 7]])},
            head_log_probs={"op": torch.full((2, 3), -0.5), "slot": torch.full((2, 3), -1.0)},
        ),
        minibatches=minibatches(
            [0.0, 2.0, 0.0],
            rows=torch.tensor([0, 5, 3]),
            head_log_ratios={"op": torch.tensor([0.0, 0.25, 0.0]), "slot": torch.tensor([0.0, 1.75, 0.0])},
        ),
    )

    row = flight_of(update, Facts(), rows=1).worst[0]

    assert (row.time, row.env, row.old_log_prob, row.new_log_prob) == (1, 2, -1.5, 0.5)
    assert {name: (h.action, h.old_log_prob, h.new_log_prob) for name, h in row.heads.items()} == {
        "op": (3, -0.5, -0.25),
        "slot": (7, -1.0, 0.75),
    }


def test_the_report_names_the_first_tensor_in_forward_order() -> None:
    """Two values are not finite. The losses are not finite either, but come later in the forward pass."""
    values = torch.tensor([[1.0, math.nan], [-4.0, math.inf]])
    losses = {"value": torch.tensor([math.nan, 2.0])}
    update = Update(rollout=rollout(torch.zeros(2, 2), values=values), minibatches=minibatches([0.0, 0.0, 0.0]))
    update.minibatches.losses.update(losses)  # type: ignore[union-attr]  # a plain dictionary here

    report = stability_report(update)

    assert report.first == "values"
    assert [(o.name, o.nan, o.infinite, o.indices) for o in report.offenders] == [
        ("values", 1, 1, ((0, 1), (1, 1))),
        ("loss value", 1, 0, ((0,),)),
    ]
    assert report.largest["values"] == 4.0 and report.largest["loss value"] == 2.0


def test_a_tensor_of_an_earlier_minibatch_comes_first() -> None:
    """The advantages of the first minibatch are NaN, and so are the losses, the gradients, and the log-ratios of the next minibatch."""
    update = Update(minibatches=minibatches([0.0, 0.0, math.nan, math.nan]))
    update.minibatches.advantages[1] = math.nan  # type: ignore[union-attr]

    report = stability_report(update)

    assert [one.name for one in report.offenders] == ["normalized advantages", "log_ratio"]
    sentence = " The first non-finite tensor is normalized advantages, in 1 of 4 entries."
    assert first_nonfinite({"stability": asdict(report)}) == sentence and first_nonfinite({}) == ""
    earlier = asdict(stability_report(update._replace(origin="x, assigned in a.py:3, in 2 of 4 entries")))
    assert first_nonfinite({"stability": earlier}) == " The first non-finite tensor is x, assigned in a.py:3, in 2 of 4 entries."


def test_rows_of_passes_that_a_trainer_does_not_count_are_not_repetitions() -> None:
    """Two permutations of four rows in four minibatches of one pass; the same rows twice are repetitions."""

    def repeated(rows: list[int]) -> float:
        zeros = torch.zeros(8)
        joined = JoinedMinibatches((0,) * 4, (2,) * 4, zeros, zeros, None, {}, rows=torch.tensor(rows))
        update = Update(rollout=rollout(torch.zeros(2, 2)), minibatches=joined)
        groups: list[MetricGroup | Postponed] = []
        for part in measure(update, Facts(), Level.NORMAL):
            Containment().measure(part.functions, groups.append)
        (values,) = [group.values() for group in groups if isinstance(group, RowsRepeated)]
        return values["integrity/rows_repeated"]

    assert repeated([0, 1, 2, 3, 3, 1, 0, 2]) == 0
    assert repeated([0, 1, 0, 1, 2, 3, 2, 3]) == 0.5


def test_a_healthy_update_has_no_offender() -> None:
    report = stability_report(Update(rollout=rollout(torch.zeros(2, 2))))

    assert (report.first, report.offenders) == ("", ())


def test_what_is_not_finite_counts_wherever_it_is() -> None:
    """A reward, two log-ratios of which one is masked, a loss and two norms: five."""
    update = Update(
        rollout=rollout(torch.zeros(2, 2), rewards=torch.tensor([[0.0, math.nan], [0.0, 0.0]])),
        minibatches=minibatches([math.inf, 0.0, math.nan], valid=torch.tensor([True, True, False])),
        gradients=(BackwardGradients((0, 0), ("w",), (3,), torch.tensor([[math.nan], [math.inf]]), None),),
    )
    update.minibatches.losses["value"] = torch.tensor([math.nan, 1.0])  # type: ignore[union-attr, index]  # a dictionary here

    assert nonfinite_in(update).values() == {"numerics/nonfinite": 5.0}
    assert nonfinite_in(Update(rollout=rollout(torch.zeros(2, 2)))).values() == {"numerics/nonfinite": 0.0}


def test_every_layer_has_a_line() -> None:
    """Entries 3, -4, 0 and NaN: norm 5, mean -1/3, a quarter zero, one in each of three bins and one not finite."""
    sample = GradientSample(names=("w", "b"), numels=(4, 2), minibatches=(torch.tensor([3.0, -4.0, 0.0, math.nan, 1e-7, 20.0]),))

    w, b = layer_table(Update(sample=sample))

    assert (w.norm, w.min, w.max, w.zero_frac, w.nan) == (5.0, -4.0, 3.0, 0.25, 1)
    assert w.mean == pytest.approx(-1 / 3)
    assert (w.decades[0], w.decades[13], w.decades[17]) == (1, 2, 1)
    assert (b.small_frac, b.large_frac, b.nan, b.infinite) == (0.5, 0.5, 0, 0)
    assert layer_table(Update()) == ()


AXES = Axes(update=7, env_step=700, gradient_step=14, wall_time=1.0)
HISTOGRAM = Histogram((0.0, 0.5, 1.0), (3.0, 1.0))


def alarm(kind: str, key: str = "policy/kl") -> Alarm:
    return Alarm(7, AXES, kind, AlarmEvent.RAISE, 0.9, AlarmLevel.CRITICAL, key, since=7)


def evidence(kind: str, update: Update | None = None, key: str = "policy/kl", **named: Any) -> dict[str, Any]:
    """Return the evidence of an alarm of that type in update 7, as JSON."""
    values = named.pop("values", {"policy/kl": 0.3, "policy/ratio/max": 11.0, "value/bias": 0.1})
    record = Record(7, AXES, values, named.pop("histograms", {}))
    updates = () if update is None else (update,)
    alarmed = AlarmedUpdate(record, updates, Facts(), named.pop("pairs", {}), **named)
    choice = next((rule for rule in alarm_rules() if rule.type == kind), None)
    pieces = evidence_of(alarm(kind, key), alarmed, choice)
    loaded: dict[str, Any] = json.loads(json.dumps(plain(pieces)))
    return loaded


def test_an_alarm_brings_the_metrics_that_it_reads_the_deciding_one_first() -> None:
    pieces = evidence(
        "policy/ratio_explosion", key="policy/ratio/max", values={"policy/ess_frac_min": 0.5, "policy/ratio/max": 11.0, "my/number": 1.0}
    )

    assert list(pieces["values"].items()) == [("policy/ratio/max", 11.0), ("policy/ess_frac_min", 0.5)]
    assert pieces.keys() == {"values"}


def test_an_alarm_of_the_policy_brings_the_steps_and_the_worst_transitions() -> None:
    pieces = evidence("policy/kl_spike", Update(minibatches=minibatches([0.1, -3.0, math.nan, 0.5])))

    assert [row["log_ratio"] for row in pieces["worst"]] == ["nan", -3.0, 0.5, pytest.approx(0.1)]
    assert [step["step"] for step in pieces["steps"]] == [0, 1]


def test_an_alarm_of_the_numbers_brings_the_first_tensor_that_is_not_finite() -> None:
    values = torch.tensor([[1.0, math.nan]])
    pieces = evidence("numerics/nonfinite", Update(rollout=rollout(torch.zeros(1, 2), values=values)))

    assert pieces["stability"]["first"] == "values"
    assert pieces["stability"]["offenders"][0]["indices"] == [[0, 1]]


def test_an_alarm_of_the_gradient_says_what_spoils_its_health() -> None:
    """Other alarms have other causes."""
    assert evidence("grad/vanish", health_cause="vanish")["health_cause"] == "vanish"
    assert "health_cause" not in evidence("grad/vanish")
    assert "health_cause" not in evidence("policy/kl_spike", health_cause="vanish")


def test_a_run_whose_gradients_explode_says_so_with_the_alarm(tmp_path: Path) -> None:
    """Norms of 1 for thirty updates, then one of 1e6."""
    with Telemetry(run_dir=tmp_path / "run", facts={"max_grad_norm": 0.5}) as telemetry:
        for update in range(1, 33):
            norm = torch.tensor([1.0 if update < 31 else 1e6])
            telemetry.observe(gradient_norms(norm, ["w"], max_norm=0.5))
            telemetry.flush(env_step=update)

    raised = [alarm for alarm in read_run(tmp_path / "run").alarms if alarm.type == "grad/explode"]
    assert raised and raised[0].evidence["health_cause"] == "explode"


def test_an_alarm_of_the_gradient_brings_a_line_for_each_tensor_in_every_update() -> None:
    """Norms of w are 1 and 3 over two steps; one norm of b is not finite."""
    part = BackwardGradients((0, 0), ("w", "b"), (3, 1), torch.tensor([[1.0, math.inf], [3.0, 2.0]]), None)
    pieces = evidence("grad/explode", Update(gradients=(part,)), pairs={"a": {"cause": "starved"}, "b": {"cause": "ok"}})

    assert pieces["layers"] == [
        {"name": "w", "entries": 3, "norm_first": 1.0, "norm_mean": 2.0, "norm_max": 3.0},
        {"name": "b", "entries": 1, "norm_first": None, "norm_mean": 2.0, "norm_max": 2.0},
    ]
    assert pieces["pairs"] == {"a": {"cause": "starved"}}


def test_an_alarm_of_the_memory_brings_the_histograms_of_the_gates() -> None:
    histograms = {"lstm/gate/f/hist": HISTOGRAM, "adv/raw/hist": HISTOGRAM}
    pieces = evidence("lstm/forget_closed", histograms=histograms)

    assert pieces["histograms"] == {"lstm/gate/f/hist": {"edges": [0.0, 0.5, 1.0], "counts": [3.0, 1.0]}}


@pytest.mark.parametrize("kind", [kind.type for kind in alarm_rules()])
def test_evidence_stays_small_however_large_the_update(kind: str) -> None:
    """2000 steps of 300 tensors and 16000 rows, all non-finite: some tens of kilobytes for every type of alarm."""
    steps, names = 2000, tuple(f"encoder.block.{index}.weight" for index in range(300))
    part = BackwardGradients((0,) * steps, names, (1000,) * 300, torch.full((steps, 300), math.nan), None)
    rows = torch.full((16_000,), math.nan)
    batch = minibatches([0.0, 0.0, 0.0])._replace(epochs=(0,) * steps, counts=(8,) * steps, log_ratio=rows, advantages=rows)
    spoilt = torch.full((2000, 8), math.nan)
    update = Update(rollout=rollout(spoilt, rewards=spoilt, values=spoilt), minibatches=batch, gradients=(part,))
    values = {f"grad/layer/encoder_block_{index}_weight/zero_frac": 1.0 for index in range(300)}

    pieces = evidence(kind, update, values=values, histograms={f"lstm/gate/{n}/hist": HISTOGRAM for n in range(50)})

    assert len(json.dumps(pieces)) < 50_000


def of_env(env: str = "CartPole-v1", **settings: Any) -> PPO:
    return PPO(make_env(env, num_envs=4), PPOConfig(num_steps=32, num_epochs=2, **settings))


def recall(**settings: Any) -> PPO:
    config = PPOConfig(policy="lstm", num_steps=32, num_epochs=2, num_minibatches=2, lstm_size=8, **settings)
    return PPO(CueRecall(8, seed=0), config)


@pytest.mark.parametrize(
    ("make", "offload"),
    [(of_env, False), (recall, False), (partial(of_env, "Pendulum-v1"), False), pytest.param(recall, True, marks=pytest.mark.system)],
)
def test_a_real_run_finds_its_worst_transitions_again(tmp_path: Path, make: Any, offload: bool) -> None:
    """The evidence is compared with the trainer's own events of the same transitions."""
    source = make()
    rollouts: list[RolloutEnd] = []
    events: list[MinibatchEnd] = []
    norms: list[float] = []
    source.hooks.on(RolloutEnd, rollouts.append)
    source.hooks.on(MinibatchEnd, events.append)
    source.hooks.on(BackwardEnd, lambda event: norms.append(float(event.norms.double().norm())))

    run = learned(source, tmp_path, offload=offload, level="debug")

    (flight,) = (event.data for event in run.events if event.type == "evidence/flight")
    largest = max(float(event.log_ratio.abs().max()) for event in events)
    row = flight["worst"][0]
    place = row["time"], row["env"]
    assert abs(row["log_ratio"]) == pytest.approx(largest)
    assert row["old_log_prob"] == pytest.approx(float(rollouts[0].log_probs[place]))
    assert {head: shift["action"] for head, shift in row["heads"].items()} == {
        head: actions[place].tolist() for head, actions in rollouts[0].actions.items()
    }
    assert [step["norm"] for step in flight["steps"]] == pytest.approx(norms, rel=1e-5)
    assert row["step"] in range(len(flight["steps"])) and len(flight["worst"]) == 16


@pytest.mark.parametrize("most", [1 << 20, 10])
def test_debug_writes_the_table_and_the_histograms_of_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A sample that is too large to send is measured in process, once, and only its first gradient is sent."""
    monkeypatch.setattr(recorder_module, "MAX_TRAVELLING_ENTRIES", most)
    source = of_env()
    run = learned(source, tmp_path, level="debug")

    (table,) = (event.data["layers"] for event in run.events if event.type == "evidence/gradients")
    sizes = {name: parameter.numel() for name, parameter in source.policy.named_parameters()}
    assert {line["name"]: line["entries"] for line in table} == sizes
    (record,) = run.records
    zeros = sum(line["zero_frac"] * line["entries"] for line in table)
    assert zeros == pytest.approx(record.values["grad/zero_frac"] * sum(sizes.values()))
    assert sum(record.histograms["grad/decades"].counts) == sum(sizes.values())
    assert sum(record.histograms["grad/layer/value_weight/decades"].counts) == sizes["value.weight"]


def test_a_reward_that_is_no_number_leaves_its_place_in_the_journal(tmp_path: Path) -> None:
    source = of_env(watchdog=True)
    spoilt = source.steps.rewards

    def spoil(rewards: Tensor) -> Tensor:
        rewards = spoilt(rewards).clone()
        rewards[5, 2] = math.nan
        return rewards

    object.__setattr__(source.steps, "rewards", spoil)
    run = learned(source, tmp_path, level="debug")

    reports = [event.data for event in run.events if event.type == "evidence/stability"]
    assert reports[0]["first"] == "rewards"
    assert reports[0]["offenders"][0]["indices"] == [[5, 2]]
