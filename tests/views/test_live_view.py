"""`watch`: its pages as text, the app by its keys, and the command in a real terminal."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from journaled import WrittenRun, axes
from run_cli import run_cli
from textual.pilot import Pilot
from waiting import wait_until

from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.journal.file import compress
from esper_telemetry.views.run_parts import Series, duration
from esper_telemetry.views.run_view import open_sample, open_view
from esper_telemetry.views.watch import app as app_module
from esper_telemetry.views.watch.app import WatchApp
from esper_telemetry.views.watch.charts import (
    Line,
    WatchState,
    bars,
    chart_page,
    compact,
    cut,
    metric_name,
    range_text,
    sparkline,
    value_at,
)
from esper_telemetry.views.watch.screens import header, overview, strip, table_page


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    written = WrittenRun(tmp_path / "a")
    for kl in (0.01, 0.012, 0.01, 0.4):
        written.record(policy__kl=kl, episode__return_mean=100 * kl, perf__update_ms=6000.0)
    return written


def text_of(lines: list[Line]) -> str:
    return "\n".join(line.text.plain for line in lines)


@pytest.mark.parametrize(
    ("values", "facts", "expected"),
    [
        ({"policy__kl": 0.01}, {}, "No anomalies so far"),
        ({"policy__kl": 0.051}, {}, "ANOMALIES: PPO ⚠"),
        ({"policy__entropy_norm": 0.09, "policy__entropy_marginal_norm": 0.2}, {}, "ANOMALIES: PPO ⚠"),
        ({"policy__entropy_norm": 0.09, "policy__entropy_marginal_norm": 0.9}, {}, "No anomalies so far"),
        ({"grad__global__norm_preclip_nonfinite": 3.0}, {}, "ANOMALIES: 3 NaN grads"),
        ({"grad__actor__severity_explode": 0.5, "grad__critic__severity_explode": 0.1}, {}, "No anomalies so far"),
        ({"perf__memory__process_frac": 0.85}, {}, "ANOMALIES: MEM ⚠"),
        ({"perf__memory__device_frac": 0.9, "policy__kl": 0.06}, {}, "ANOMALIES: PPO ⚠ | MEM ⚠"),
        ({"grad__layer__actor_0_weight__zero_frac": 1.0}, {}, "ANOMALIES: 1 dead layers"),
        (
            {"grad__layer__heads_move_weight__zero_frac": 1.0},
            {"heads": {"move": "categorical", "look": "categorical"}},
            "No anomalies so far",
        ),
    ],
)
def test_the_strip_says_what_is_wrong_now(values: dict[str, float], facts: dict[str, Any], expected: str, tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "b", **facts)
    written.record(**values)

    assert strip([open_view(written.run_dir)]).plain == expected


def test_the_strip_names_the_first_cause_and_forgets_what_is_over(run: WrittenRun) -> None:
    run.alarm("policy/kl_spike")
    run.alarm("policy/ratio_explosion", cause="policy/kl_spike")
    view = open_view(run.run_dir)

    assert strip([view]).plain == "ANOMALIES: 2 alarms: policy/kl_spike | PPO ⚠"

    run.record(policy__kl=0.01, grad__global__norm_preclip_nonfinite=1.0)
    for kind in ("policy/kl_spike", "policy/ratio_explosion"):
        run.alarm(kind, event=AlarmEvent.CLEAR)
    view.refresh()
    assert strip([view]).plain == "ANOMALIES: 1 NaN grads"
    run.record(policy__kl=0.01)  # a count of zero is absent
    view.refresh()
    assert strip([view]).plain == "No anomalies so far"


def test_the_strip_counts_exploding_gradients_behind_their_alarm(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "b")
    written.record(grad__actor__severity_explode=0.5, grad__critic__severity_explode=0.1)
    written.alarm("grad/explode")

    assert strip([open_view(written.run_dir)]).plain == "ANOMALIES: 1 alarm: grad/explode | 1 exploding"


def test_the_strip_names_the_cause_of_the_incident_and_fits_the_screen(run: WrittenRun) -> None:
    """A later alarm explains the incident better. 80 columns show all, 40 omit the cause, 24 have only the first part."""
    run.alarm("policy/kl_spike")
    run.alarm("opt/update_too_large", cause="opt/update_too_large")
    view = open_view(run.run_dir)

    whole = "ANOMALIES: 2 alarms: opt/update_too_large | PPO ⚠"
    assert [strip([view], width).plain for width in (80, 40)] == [whole, "ANOMALIES: 2 alarms | PPO ⚠"]
    assert strip([view], 24).plain == "ANOMALIES: 2 alarms | 1…"


def test_the_header_shows_progress_speed_and_age(run: WrittenRun) -> None:
    """4,000 of 20,000 steps at 100 per second. The last record is from second 40, and 25 s are more than two updates."""
    view = open_view(run.run_dir)

    text = text_of(header([view], 120, now=65.0))

    assert "step 4,000 of 20,000" in text and "20%" in text and "ETA 2 m 40 s" in text and "100 steps/s" in text
    assert "◐WARN 25 s" in text and "update 60%  other 40%" in text
    assert "●OK" in text_of(header([view], 80, now=55.0)) and "○BAD" in text_of(header([view], 80, now=400.0))
    run.end(RunStatus.FAILED)
    view.refresh()
    assert "failed" in text_of(header([view], 80, now=400.0)) and "ETA" not in text_of(header([view], 80))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("count", [1, 3])
def test_no_line_is_wider_than_the_terminal(width: int, count: int, run: WrittenRun) -> None:
    run.alarm("policy/kl_spike")
    run.event("intervention", reason="someone has changed the learning rate by hand, and says so in a long sentence" * 2)
    views = [open_view(run.run_dir) for _ in range(count)]
    state = WatchState(pinned=["policy/kl"])

    lines = [*header(views, width), *overview(views, state, width), *chart_page(views, "policy/kl", state, width, 20)]

    assert max(line.text.cell_len for line in lines) <= width


def test_the_overview_shows_value_range_mark_incident_and_advice(run: WrittenRun) -> None:
    run.alarm("policy/kl_spike")

    text = text_of(overview([open_view(run.run_dir)], WatchState(), 100))

    assert "policy/kl_spike  since update 4, still active" in text
    assert "Since update 4, the policy has moved 0.4 nats." in text and "Try: Lower the learning rate." in text
    (kl,) = [line for line in text.splitlines() if line.startswith("KL divergence of the update")]
    assert kl.split()[5:] == ["0.4", "nats", "‼", "▁▁▁█", "0.002", "to", "0.02"]
    assert "How far does the policy move?" in text and "raise  policy/kl_spike (critical)" in text


def test_metrics_are_filtered_pinned_and_shown_at_the_cursor(run: WrittenRun) -> None:
    view = open_view(run.run_dir)

    filtered = [line.id for line in overview([view], WatchState(pattern="RETURN|kl$"), 100) if line.id]
    assert filtered == ["key:policy/kl", "key:episode/return_mean"]
    assert "0 metrics match '('" in text_of(overview([view], WatchState(pattern="("), 100))
    pinned = [line.id for line in overview([view], WatchState(pinned=["perf/update_ms"]), 100) if line.id]
    assert pinned[0] == "key:perf/update_ms"
    early = overview([view], WatchState(cursor=2500), 100)
    assert "0.012" in next(line.text.plain for line in early if line.id == "key:policy/kl")


def test_values_are_drawn_in_eighths_and_on_a_logarithmic_axis() -> None:
    assert bars([0.0, 1.0, None, 7.0, 8.0]) == "▁▂ ██"
    assert bars([1.0, 10.0, 100.0], log=True) == "▁▅█" and bars([1.0, 10.0, 100.0]) == "▁▁█"
    assert bars([-1.0, 1.0], log=True) == "▁█" and bars([3.0, 3.0]) == "▄▄" and bars([]) == ""
    assert value_at(Series((1, 2), (10, 20), (5.0, 6.0)), 19) == 5.0
    assert value_at(Series((1,), (10,), (5.0,)), 9) is None
    assert [compact(x) for x in (0.0, 1234567.0, 1234.5, 0.00012, -0.25)] == ["0", "1.2e6", "1,234", "0.00012", "-0.25"]
    assert [duration(x) for x in (5, 200, 7500, 273600)] == ["5 s", "3 m 20 s", "2 h 05 m", "3 d 4 h"]
    assert [range_text(*x) for x in ((0.1, None), (None, 2.0), (0.0, 1.0))] == ["> 0.1", "< 2", "0 to 1"]


def test_all_lines_have_the_time_of_the_run_and_values_hold_until_the_next() -> None:
    """Measured at steps 10 and 30 of 0 to 40. A logarithmic axis shows zeros at its lowest value."""
    sampled = Series((1, 3), (10, 30), (1.0, 2.0))

    assert sparkline(sampled, 4, (0, 40)) == " ▁▁█"
    assert bars([0.0, 1.0, 10.0], log=True) == "▁▁█" and bars([-1.0, 0.0, 99.0], log=True) == "▁▁█"


def test_a_key_of_a_template_says_which_one_it_is(run: WrittenRun) -> None:
    run.record(lstm__gate__forget__mean=0.5)
    view = open_view(run.run_dir)

    assert metric_name([view], "lstm/gate/forget/mean") == "mean of a gate (forget)"
    assert metric_name([view], "grad/global/norm_preclip", short=True) == "gradient norm before clipping"
    assert metric_name([view], "my/own") == "my/own" and cut("effective sample size", 13) == "effective…"


def test_runs_are_laid_over_each_other(run: WrittenRun, tmp_path: Path) -> None:
    other = WrittenRun(tmp_path / "other")
    for _ in range(8):
        other.record(policy__kl=0.2)
    views = [open_view(run.run_dir), open_view(other.run_dir)]

    text = text_of(chart_page(views, "policy/kl", WatchState(), 80, 24))
    rows = text.splitlines()

    assert "● a  0.4 nats" in text and "▲ other  0.2 nats" in text
    plotted = [row for row in rows if "┤" in row or row.startswith(" " * 9 + "│")]
    assert sum(row.count("●") for row in plotted) == 4 and sum(row.count("▲") for row in plotted) == 8
    assert rows[-1].split() == ["1,000", "environment", "steps", "8,000"]
    assert strip(views).plain == "ANOMALIES: ● PPO ⚠   ▲ PPO ⚠"


def table_event(count: int) -> dict[str, Any]:
    columns = {name: [float(env) for env in range(count)] for name in ("return", "length", "last_return", "last_length")}
    return {"environments": count, **columns, "episodes": [1] * count, "constant": [env == 2 for env in range(count)]}


def test_environments_are_a_table_that_is_filtered_by_number_or_text(run: WrittenRun) -> None:
    run.event("environments", **table_event(12))
    view = open_view(run.run_dir)
    (table,) = view.tables()

    head, rows = table_page(table, WatchState())
    assert head.text.plain.startswith("Env") and len(rows) == 13 and rows[-1].text.plain.startswith("Σ")
    assert [line.id for line in table_page(table, WatchState(pattern="1"))[1]] == ["row:1"]
    assert [line.id for line in table_page(table, WatchState(pattern="CONST"))[1]] == ["row:2"]
    (nothing,) = table_page(table, WatchState(pattern="99"))[1]
    assert nothing.text.plain == "No environments match '99'"
    assert "environments" not in {event.type for event in view.events}


# The app.


def screen(app: WatchApp) -> str:
    return "\n".join(app._page.render_line(y).text.rstrip() for y in range(app.size.height))


def with_app(sources: list[Path], use: Callable[[WatchApp, Pilot[None]], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def play() -> None:
        app = WatchApp([str(source) for source in sources], **options)
        async with app.run_test(size=(80, 24)) as pilot:
            app.tick()
            app.draw()
            await pilot.pause()
            await use(app, pilot)

    asyncio.run(play())


def test_keys_lead_to_charts_incidents_tables_and_back(run: WrittenRun) -> None:
    run.alarm("policy/kl_spike")
    run.event("environments", **table_event(3))

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        assert screen(app).startswith("ANOMALIES: 1 alarm: policy/kl_spike | PPO ⚠")
        await pilot.press("enter")
        assert "Incident 1: policy/kl_spike" in screen(app)
        await pilot.press("escape", "down", "enter")
        assert "episode/return_mean" in screen(app) and "1,000" in screen(app)
        await pilot.press("l", "left")
        assert "log axis" in screen(app) and "values at" in screen(app)
        await pilot.press("p", "q")
        assert "Pinned" in screen(app)
        await pilot.press("t")
        assert "Env" in screen(app) and "constant" in screen(app)
        await pilot.press("t", "question_mark")
        assert "filter metrics" in screen(app)
        await pilot.press("escape", "slash", *"clip", "enter")
        assert "0 metrics match 'clip'" in screen(app)
        await pilot.press("escape")
        assert "metrics match" not in screen(app) and app.is_running
        await pilot.press("q")
        assert not app.is_running

    with_app([run.run_dir], use)


def test_a_click_opens_the_line_below_the_mouse(run: WrittenRun) -> None:
    """A metric or a row of a table, also after scrolling. A click on a line without a page does nothing."""
    run.event("environments", **table_event(30))

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        def row_of(text: str) -> int:
            return next(y for y, line in enumerate(screen(app).splitlines()) if text in line)

        await pilot.click(app._page, offset=(5, row_of("KL divergence")))
        assert "policy/kl" in screen(app) and app._pages[-1] == ("chart", "policy/kl")
        await pilot.press("escape", "t")
        await pilot.click(app._page, offset=(5, row_of("Return")))
        await pilot.click(app._page, offset=(5, 0))
        assert app._pages[-1][0] == "table"
        await pilot.press("pagedown")
        await pilot.click(app._page, offset=(5, row_of("29 ")))
        assert app._pages[-1] == ("row", "0:environments:29")

    with_app([run.run_dir], use)


def test_a_wide_table_scrolls_beside_its_first_column(run: WrittenRun) -> None:
    run.event("environments", **table_event(3) | {"return": [1.5e5, 0.1, 0.2]})

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(40, 24)
        await pilot.press("t", "right")
        await pilot.pause()
        rows = screen(app).splitlines()
        head = next(row for row in rows if row.startswith("Env"))
        assert rows[0].startswith("ANOMALIES: ") and "Return" not in head.replace("Last return", "")
        assert next(row for row in rows if row.startswith("0")) and "150,000" not in screen(app)

    with_app([run.run_dir], use)


ENOUGH_TO_SCROLL = (
    *("policy__kl", "policy__entropy", "policy__ess_frac", "policy__surrogate_gain", "value__explained_variance", "value__loss_norm"),
    *("opt__lr", "grad__clip__coef", "episode__length_mean", "perf__telemetry_frac", "perf__memory__process_mib"),
)


def test_a_refresh_keeps_cursor_and_scroll_and_draws_what_is_new(run: WrittenRun) -> None:
    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("end")
        chosen, top = app._page.chosen, app._page.scroll_y
        assert chosen.startswith("key:") and top > 0
        run.record(policy__kl=0.01, policy__clip_frac=0.1, episode__return_mean=1.0)
        app.tick()
        app.draw()
        await pilot.pause()
        assert (app._page.chosen, app._page.scroll_y) == (chosen, top)
        assert "update 8" in screen(app)

    run.alarm("policy/kl_spike")
    for _ in range(3):
        run.record(**dict.fromkeys(ENOUGH_TO_SCROLL, 0.01))

    with_app([run.run_dir], use)


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        assert screen(app).startswith("Waiting for data...")
        written = WrittenRun(tmp_path / "late")
        app.tick()
        app.draw()
        assert screen(app).startswith("Waiting for data...") and "There is no record yet." in screen(app)
        written.record(policy__kl=0.01)
        app.tick()
        app.draw()
        assert screen(app).startswith("No anomalies so far")

    with_app([tmp_path / "late"], use, wait=True)


def test_a_sample_of_a_long_journal_has_its_end_its_alarms_and_records_over_the_run(run: WrittenRun) -> None:
    run.alarm("policy/kl_spike")
    for update in range(5, 101):
        run.event("environments", **table_event(2))
        run.record(policy__kl=float(update))
    view = open_sample(run.run_dir, 4)

    assert view.sampled and view.axes == axes(100) and view.last["policy/kl"] == 100.0
    assert [alarm.type for alarm in view.alarms] == ["policy/kl_spike"] and len(view.tables()) == 1
    updates = view.series("policy/kl").updates
    assert updates[-4:] == (97, 98, 99, 100) and updates[0] == 1 and 2 <= len(updates[:-4]) <= 4 and view.updates == 100
    run.record(policy__kl=0.5)
    assert (view.refresh(), view.last["policy/kl"], view.updates, view.sampled) == (1, 0.5, 101, True)


def test_a_long_journal_is_read_beside_the_screen(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SAMPLE_RECORDS", 4)
    for update in range(5, 101):
        run.record(policy__kl=float(update))

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "update 100" in screen(app)
        while app.views[0].sampled:
            await pilot.pause()
            app.tick()
        run.record(policy__kl=0.5)
        app.tick()
        assert app.views[0].updates == 101

    with_app([run.run_dir], use)


def test_a_run_that_replaces_another_in_its_directory_is_shown_from_its_start(run: WrittenRun) -> None:
    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        shutil.rmtree(run.run_dir)
        app.tick()
        app.draw()
        assert "update 4" in screen(app)
        WrittenRun(run.run_dir, env="Hopper").record(policy__kl=0.01)
        app.tick()
        app.draw()
        assert "update 1 " in screen(app) and "Hopper" in screen(app)

    with_app([run.run_dir], use)


def test_a_compressed_journal_of_a_run_that_is_over_is_shown(run: WrittenRun) -> None:
    run.end(RunStatus.FINISHED)
    compress(run.run_dir)

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "finished" in screen(app) and "update 4" in screen(app)

    with_app([run.run_dir], use)


def test_a_line_of_one_style_is_drawn_in_it(run: WrittenRun) -> None:
    run.end(RunStatus.FAILED)

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        parts = [(part.text, str(part.style)) for y in range(24) for part in app._page.render_line(y)]
        assert any("How far does" in text and "bold" in style for text, style in parts)
        assert any(text.startswith("Failed") and "red" in style for text, style in parts)

    with_app([run.run_dir], use)


def test_without_colours_no_colour_is_drawn(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.alarm("policy/kl_spike")
    monkeypatch.setenv("NO_COLOR", "1")

    async def use(app: WatchApp, pilot: Pilot[None]) -> None:
        styles = [part.style for y in range(24) for part in app._page.render_line(y) if part.style]
        assert styles and all(style.color is None and style.bgcolor is None for style in styles)

    with_app([run.run_dir], use)


# The command.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "watch needs a run directory"),
        (("nowhere",), "there is no run directory nowhere"),
        (("empty",), "empty is not a run directory"),
        (("a",), "watch needs a terminal"),
        (("tensorboard:nowhere",), "nowhere"),
    ],
)
def test_wrong_use_of_watch_is_one_sentence(
    arguments: tuple[str, ...], message: str, run: WrittenRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.run_dir.parent)
    Path("empty").mkdir()

    code, _, error = run_cli(["watch", *arguments], capfd)

    assert code == 2 and message in error and error.count("\n") == 1


@pytest.fixture
def tmux() -> Iterator[Callable[..., str]]:
    """Return a function that calls tmux with a separate server; the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tmux", dir="/tmp") as folder:

        def call(*arguments: str) -> str:
            done = subprocess.run(["tmux", "-S", f"{folder}/socket", *arguments], capture_output=True, text=True)
            assert arguments[0] != "new-session" or done.returncode == 0, done.stderr
            return done.stdout

        yield call
        call("kill-server")


@pytest.mark.system
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_watch_follows_a_live_run_in_a_terminal_of_80_by_24(run: WrittenRun, tmux: Callable[..., str]) -> None:
    command = f"'{sys.executable}' -m esper_telemetry watch '{run.run_dir}'; echo left with $?; sleep 60"
    tmux("new-session", "-d", "-x", "80", "-y", "24", command)

    def shows(text: str) -> str:
        def captured() -> str:
            seen = tmux("capture-pane", "-p")
            return seen if text in seen else ""

        return wait_until(captured, f"{text!r} on the screen")

    before = shows("update 4")
    assert before.splitlines()[0] == "ANOMALIES: PPO ⚠" and "KL divergence of the update" in before
    run.record(policy__kl=0.01)
    after = shows("update 5")
    assert after.splitlines()[0] == "No anomalies so far"
    row = 1 + next(y for y, line in enumerate(after.splitlines()) if "KL divergence" in line)
    for state in "Mm":  # the button goes down and up, as a terminal reports it for a mouse
        tmux("send-keys", "-l", f"\x1b[<0;5;{row}{state}")
    shows("policy/kl ")
    tmux("send-keys", "q", "q")
    shows("left with 0")
