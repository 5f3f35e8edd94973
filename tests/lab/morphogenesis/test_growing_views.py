"""Views of morphogenesis: the journal's event, the environments table, details, the status strip, and names of seeds in alarms."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import tiny
from rich.console import Console
from test_growing_alarms import explode

from esper_telemetry import PPOConfig, Telemetry, attach
from esper_telemetry.core.record import Axes, RunInfo
from esper_telemetry.events import UpdateEnd
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.lab.morphogenesis.controllers import ScriptedRun
from esper_telemetry.lab.morphogenesis.growth_telemetry import STATUSES, GrowthHistory, GrowthStep, worst_epoch
from esper_telemetry.lab.morphogenesis.kinds import Op, Stage
from esper_telemetry.lab.morphogenesis.views import (
    environment_detail,
    environments_table,
    momentum,
    seed_gradients,
    slot_text,
    stalled,
    triangles,
)
from esper_telemetry.views.run_view import RunView, open_view

BROKEN_AFTER = 3


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunView, list[GrowthStep]]:
    """A run of six updates whose seeds explode in the fourth, read up to that update."""
    run_dir = tmp_path_factory.mktemp("growth") / "run"
    run, steps = ScriptedRun(tiny(4), PPOConfig(policy="oracle", num_steps=16)), list[GrowthStep]()
    run.hooks.on(GrowthStep, steps.append)
    run.hooks.on(UpdateEnd, lambda event: explode(run) if event.update == BROKEN_AFTER else None)
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, run)
        run.learn((BROKEN_AFTER + 1) * 16 * 4)
    return open_view(run_dir), steps


@pytest.mark.system
def test_the_event_shows_hosts_and_seeds_after_the_last_step(exploded: tuple[RunView, list[GrowthStep]]) -> None:
    view, steps = exploded
    data, last = view.latest["growth"].data, steps[-1]

    assert view.latest["growth"].axes == view.axes and "growth" not in {event.type for event in view.events}
    assert data["hosts"]["accuracy"] == pytest.approx(last.hosts["val_accuracy"].tolist(), rel=1e-3)
    assert data["seeds"]["stage"] == last.seeds["stage"].tolist()
    assert [row[-1] for row in data["trend"]["accuracy"]] == pytest.approx(data["hosts"]["accuracy"], rel=1e-2)
    paid = sum(part for step in steps[-32:] for part in step.rewards.values())  # an episode is two updates
    assert data["course"]["paid"] == pytest.approx(paid.tolist(), rel=1e-3)  # type: ignore[union-attr]  # a tensor
    ops = torch.stack([step.hosts["op"] for step in steps], 1)
    assert data["course"]["ops"] == ops[:, -5:].tolist()
    assert [row[Op.WAIT] for row in data["course"]["op_counts"]] == (ops == Op.WAIT).sum(1).tolist()
    born = sum(int(step.seeds["born"].sum()) for step in steps)
    assert sum(kind[0] for row in data["course"]["fates"] for kind in row) == born > 0


def test_an_exploding_seed_is_named_in_alarm_table_and_detail(exploded: tuple[RunView, list[GrowthStep]]) -> None:
    view, _ = exploded
    alarm = next(one for one in view.alarms if one.type == "seed/explode")
    worst = alarm.evidence["seeds"][0]
    assert worst.keys() >= {"environment", "slot", "stage", "blueprint"} and worst["exploding"] >= 0.5
    assert f"environment {worst['environment']}, slot {worst['slot']}, stage {worst['stage']}" in alarm.text

    table = environments_table(view)
    assert table is not None and len(table.rows) == 4 and len(table.columns) == 3 + 2 + 13
    data = view.latest["growth"].data
    texts = {(env, slot): slot_text(data, env, slot).plain for env in range(4) for slot in range(2)}
    assert "▲" in texts[worst["environment"], worst["slot"]]
    assert all(text in "  ".join(str(cell.text) for cell in table.rows[env]) for (env, _), text in texts.items())
    item, signed = seed_gradients(view), sum("▲" in text or "▼" in text for text in texts.values())
    assert item is not None and item.text == f"{signed} seed grads"
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(environment_detail(view, worst["environment"]))
    assert "▲ EXPLODING" in console.export_text()


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, [*range(1, 33)]), (1e9, [0] * 16 + [16] * 16)])
def test_the_view_moves_while_an_update_is_under_way(
    seconds: float, shown: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of 16 epochs. A reader of the journal sees each epoch, or the last update's epochs during a long pause."""
    monkeypatch.setattr("esper_telemetry.recording.recorder.PROGRESS_SECONDS", seconds)
    run, views, seen = ScriptedRun(tiny(4), PPOConfig(policy="oracle", num_steps=16)), list[RunView](), list[int]()

    def look(_: GrowthStep) -> None:
        views[:] = views or [open_view(tmp_path / "run")]
        views[0].refresh()
        table = environments_table(views[0])
        seen.append(0 if table is None else int(table.title.split()[-3]))

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(GrowthStep, look)
        run.learn(2 * 16 * 4)

    assert seen == shown
    view = open_view(tmp_path / "run")
    assert view.latest["growth"].axes == view.axes and view.updates == 2
    assert len(view.latest["growth"].data["trend"]["accuracy"][0]) == 40


def with_event(data: dict[str, Any]) -> RunView:
    view = RunView(RunInfo("a", "a", None, 0.0), "a")
    view.latest["growth"] = JournalEvent("growth", data, axes=Axes(1, 1, 1, 0.0))
    return view


def test_cells_follow_the_state_of_a_slot(exploded: tuple[RunView, list[GrowthStep]]) -> None:
    data = copy.deepcopy(dict(exploded[0].latest["growth"].data))
    seeds = {"blueprint": 2, "age": 7, "alpha": 0.52, "tempo": 2, "curve": 3, "exploding": 0.0, "vanishing": 0.0}
    expected = {
        Stage.DORMANT: ("─", "dim"),
        Stage.GERMINATED: ("Germi:mlp e7", "bright_blue"),
        Stage.TRAINING: ("Train:mlp e7", "cyan"),
        Stage.BLENDING: ("Blend:mlp ⌢▸▸▸ 0.5", "yellow"),
        Stage.FOSSILIZED: ("Foss:mlp ⌢▸▸▸", "green"),
    }
    for stage, (text, style) in expected.items():
        for name, value in (seeds | {"stage": int(stage)}).items():
            data["seeds"][name][0][0] = value
        cell = slot_text(data, 0, 0)
        assert (cell.plain, str(cell.style)) == (text, style)
    data["seeds"]["exploding"][0][0] = data["seeds"]["vanishing"][0][0] = 0.5
    assert slot_text(data, 0, 0).plain == "Foss:mlp ⌢▸▸▸ ▲▼"


def test_rows_say_what_is_wrong(exploded: tuple[RunView, list[GrowthStep]]) -> None:
    """A rolled-back row shows only its seeds. Missing values are dashes, and a stalled environment is counted."""
    data = copy.deepcopy(dict(exploded[0].latest["growth"].data))
    data["rollbacks"] = ["divergence", "", "", ""]
    data["seeds"]["stage"][0] = [int(Stage.FOSSILIZED), int(Stage.DORMANT)]
    data["hosts"]["loss"][1] = None
    data["course"]["status"] = [STATUSES.index("stalled")] * 2 + [STATUSES.index("ok")] * 2
    view = with_event(data)

    table = environments_table(view)
    assert table is not None
    failure = f"⚠ CATASTROPHIC FAILURE - ROLLED BACK (divergence)  {slot_text(data, 0, 0).plain}  ─"
    assert str(table.rows[0][1].text) == failure and len(table.rows[0]) == 2
    assert str(table.rows[1][9].text) == "─" and "STALL" in str(table.rows[1][2].text)
    item = stalled(view)
    assert item is not None and item == ("2 stalled", "warn")
    assert [momentum(stale, "stalled").plain for stale in (5, 6, 16)] == ["5", "!6", "x16"]


def test_a_status_changes_when_it_was_due_three_times() -> None:
    """Environment 0 improves. Environment 1 stops at epoch 1; this is noticed after 10 epochs and changes its status 2 epochs later."""
    history = GrowthHistory.fresh(5, torch.device("cpu"))
    seeds = {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("born", "fossilized", "pruned")}
    seeds["blueprint"] = torch.zeros(5, 1, dtype=torch.int64)
    statuses = []
    for epoch in range(1, 15):
        hosts = {
            "val_accuracy": torch.tensor([0.5 + 0.01 * epoch, 0.4, 0.3, 0.3, 0.3]),
            "stale": torch.tensor([0.0, epoch - 1.0, 1.0, 1.0, 1.0]),
            "op": torch.zeros(5, dtype=torch.int64),
        }
        history = history.after(hosts, seeds, torch.zeros(5))
        statuses.append([STATUSES[index] for index in history.status[:2].tolist()])

    assert statuses[1] == ["init", "init"] and statuses[2] == ["excellent", "ok"]
    assert [status for _, status in statuses[10:14]] == ["ok", "ok", "ok", "stalled"]


@pytest.mark.parametrize(
    ("exploding", "vanishing", "signs"),
    [
        ([0.9, 0.0], [0.0, 1.0], "▲"),
        ([0.9, 0.6], [0.0, 0.7], "▲▼"),
        ([0.1, 0.2], [0.0, 0.7], "▼"),
        ([0.1, torch.nan], [0.0, torch.nan], ""),
    ],
)
def test_both_signs_are_those_of_one_epoch(exploding: list[float], vanishing: list[float], signs: str) -> None:
    """A seed that explodes and then dies shows ▲. Layers that diverge in one epoch show ▲▼."""
    steps = len(exploding)
    seeds = {
        "exploding": torch.tensor(exploding).view(steps, 1, 1),
        "vanishing": torch.tensor(vanishing).view(steps, 1, 1),
        "stage": torch.full((steps, 1, 1), int(Stage.FOSSILIZED)),
        "life": torch.full((steps, 1, 1), 20),
    }

    worst = worst_epoch(seeds, torch.tensor([30]))

    assert triangles(worst["exploding"].item(), worst["vanishing"].item()).plain == signs


def test_every_roll_back_of_an_update_is_in_its_row(tmp_path: Path) -> None:
    """Host 1 breaks in epochs 5 and 16 of 16, when its seed has fossilised, and host 2 in epoch 5. The alarm names both."""
    run = ScriptedRun(tiny(4), PPOConfig(policy="oracle", num_steps=16))
    epochs = iter(range(1, 17))

    def break_hosts(_: GrowthStep) -> None:
        epoch = next(epochs)
        run.env.colony.hosts[{4: [1, 2], 15: [1]}.get(epoch, [])] = torch.nan
        if epoch == 15:
            run.env.slots.set(torch.tensor([[False] * 2, [True, False], *[[False] * 2] * 2]), stage=Stage.FOSSILIZED, life=9)

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(GrowthStep, break_hosts)
        run.learn(16 * 4)
    view = open_view(tmp_path / "run")

    assert view.latest["growth"].data["rollbacks"] == ["", "nonfinite 2x", "nonfinite", ""]
    table = environments_table(view)
    assert table is not None
    assert ["ROLLED BACK" in str(row[1].text) for row in table.rows] == [False, True, True, False]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(environment_detail(view, 1))
    detail = console.export_text()
    assert "rolled back (nonfinite 2x)" in detail and "▲ EXPLODING (nonfinite)" in detail
    alarm = next(one for one in view.alarms if one.type == "env/rollback")
    assert "3 times in the last update (3 nonfinite), in environments 1 and 2" in alarm.text
    reasons = {"nonfinite": 2, "lobotomy": 0, "divergence": 0}
    assert alarm.evidence["hosts"][0] == {"environment": 1, **reasons} and len(alarm.evidence["hosts"]) == 2


def test_a_journal_without_the_event_has_no_table(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        telemetry.log({"seed/active": 1.0})
        telemetry.flush(env_step=1)
    view = open_view(tmp_path / "run")

    assert environments_table(view) is None and seed_gradients(view) is None and stalled(view) is None
