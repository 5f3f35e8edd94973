"""The page of a run: its content, that it is escaped, and that a browser draws it without a network."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from journaled import SPOILED, learning, lines_of, write
from run_cli import run_cli
from screenshots import CHROMEDRIVER, CHROMIUM, browser, eventually

from esper_telemetry import Telemetry
from esper_telemetry.core.record import Axes, Record, RunStatus
from esper_telemetry.sinks.pages import REPORT_NAME
from esper_telemetry.views.report import report_html, report_markdown
from esper_telemetry.views.report_charts import MAX_POINTS, TIMELINE_POINTS, thinned
from esper_telemetry.views.run_parts import Series
from esper_telemetry.views.run_view import open_view

EVIL = "</script><img src=x onerror=alert(1)>"


def charts_of(page: str) -> dict[str, Any]:
    """Return the numbers of a page; raise for anything that is not strict JSON."""
    (text,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page)
    charts: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not a number in JSON"))
    return charts


@pytest.mark.system
def test_the_page_says_what_went_wrong_since_when_and_what_to_try(tmp_path: Path) -> None:
    view = open_view(write(tmp_path / "run", lines_of(learning(40, SPOILED))), judged=True)
    incident = view.incidents[0]

    page = report_html([view])

    body = page[page.index("<main>") :]
    for part in (incident.cause, incident.advice[:40], f"since update {incident.since}", "Does it learn?", "Equations"):
        assert part in body
    chart = charts_of(page)["charts"][0]
    assert chart["bars"][0]["cause"] == incident.cause
    assert [bar["begin"] for bar in chart["bars"]] == chart["marks"]


def test_text_of_a_run_is_shown_and_never_run(tmp_path: Path) -> None:
    records = [Record(1, Axes(1, 10, 1, 1e9), {"policy/kl": 0.01})]
    lines = lines_of(records, name=EVIL, config={"note": EVIL, EVIL: 1}, notes=EVIL, versions={EVIL: EVIL})

    page = report_html([open_view(write(tmp_path / "run", lines), judged=True)])

    assert EVIL not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert page.count("</script>") == page.count("<script")
    assert "<img" not in report_markdown([open_view(tmp_path / "run", judged=True)])


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("status", [None, RunStatus.FAILED])
def test_a_run_of_no_or_one_update_has_a_page(tmp_path: Path, updates: int, status: RunStatus | None) -> None:
    view = open_view(write(tmp_path / "run", lines_of(learning(updates), status)), judged=True)

    page, text = report_html([view]), report_markdown([view])

    assert charts_of(page)["runs"]
    assert ("failed" in text.lower()) == (status is RunStatus.FAILED)


def test_a_long_line_is_thinned_without_losing_its_peak() -> None:
    values = [0.0] * 10_000
    values[7123] = 5.0
    steps = tuple(range(1, 10_001))

    few = thinned(Series(steps, steps, tuple(values)), MAX_POINTS)

    assert len(few.values) <= MAX_POINTS < TIMELINE_POINTS
    assert few.values[few.updates.index(7124)] == 5.0


@pytest.mark.system
def test_the_command_writes_one_file_for_one_run_or_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / name, lines_of(learning(20), name=name)) for name in ("first", "second")]
    both = tmp_path / "both.html"

    code, out, _ = run_cli(["report", runs[0]], capsys)
    run_cli(["report", *runs, "-o", both], capsys)

    assert (code, out.split(" ")[0]) == (0, str(runs[0] / REPORT_NAME))
    assert 'href="#run-2"' in both.read_text() and len(charts_of(both.read_text())["charts"][0]["lines"]) == 2
    assert '<section class="comparison">' in both.read_text()
    assert both.stat().st_size < 5e6
    assert run_cli(["report", runs[0], "--format", "markdown"], capsys)[1].startswith("## ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "needs a run directory or --from"),
        (("nowhere",), "there is no run directory nowhere"),
        (("--from", "nonsense:x"), "got 'nonsense:x'"),
        (("nowhere", "-o", "nowhere/report.html"), "the directory nowhere does not exist"),
    ],
)
def test_a_report_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)

    code, out, error = run_cli(["report", *arguments], capsys)

    assert (code, out, error.count("\n")) == (2, "", 1)
    assert reason in error
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_another_trainer_have_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{256 * n},0.01,{float(n)}" for n in range(1, 41)]
    Path("progress.csv").write_text("\n".join(["time/total_timesteps,train/approx_kl,rollout/ep_rew_mean", *rows]))

    code, _, _ = run_cli(["report", "--from", "csv:progress.csv"], capsys)

    page = Path(REPORT_NAME).read_text()
    assert code == 0
    assert "stable-baselines3" in page.lower() and "train/approx_kl" in page
    assert {"policy/kl", "episode/return_mean_100"} <= set(charts_of(page)["runs"][0])


@pytest.mark.parametrize(
    ("level", "spoiled", "status", "code"),
    [
        ("warn", False, RunStatus.FINISHED, 0),
        ("critical", True, RunStatus.FINISHED, 3),
        ("critical", False, RunStatus.FAILED, 3),
        ("warn", False, RunStatus.KILLED, 3),
    ],
)
def test_diagnose_fails_on_an_alarm_of_that_level_and_on_a_failed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, spoiled: bool, status: RunStatus, code: int
) -> None:
    path = write(tmp_path / "run", lines_of(learning(30, SPOILED if spoiled else None), status))

    assert run_cli(["diagnose", path, "--fail-on", level], capsys)[0] == code
    assert run_cli(["diagnose", path], capsys)[0] == 0


def test_telemetry_writes_the_page_when_it_is_closed(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run", report=True) as telemetry:
        telemetry.log({"policy/kl": 0.01})
        telemetry.flush(env_step=100)

    page = (tmp_path / "run" / REPORT_NAME).read_text()
    assert "<dd>finished</dd>" in page
    assert "policy/kl" in charts_of(page)["runs"][0]


@pytest.fixture(scope="module")
def chromium() -> Any:
    """A browser without a network. If it is missing, these tests are skipped, except in continuous integration."""
    if not (Path(CHROMIUM).exists() and Path(CHROMEDRIVER).exists()) and os.environ.get("CI") != "true":
        pytest.skip(f"the page is looked at with Chromium, and {CHROMIUM} or {CHROMEDRIVER} is missing")
    with browser(1200, 900, "--host-resolver-rules=MAP * ~NOTFOUND") as driver:
        yield driver


@pytest.mark.system
def test_a_browser_without_network_draws_the_page_on_a_screen_a_phone_and_paper(tmp_path: Path, chromium: Any) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_html([open_view(write(tmp_path / "run", lines_of(learning(40, SPOILED))), judged=True)]))

    chromium.get(path.as_uri())
    drawn = chromium.find_elements("css selector", ".plot svg.main-svg")
    bands = chromium.find_elements("css selector", ".plot path[fill-rule]")
    layers = chromium.find_element("css selector", "[data-height]")
    chromium.execute_script("arguments[0].scrollIntoView()", layers)
    eventually(lambda: layers.find_elements("css selector", ".heatmaplayer image"), what="a picture of the layers")
    assert "encoder_weight" in layers.text
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True})
    narrow = "return document.documentElement.scrollWidth <= 390 && document.querySelector('.plot svg').clientWidth < 390"
    eventually(lambda: chromium.execute_script(narrow), what="a page as wide as a phone")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    dark = chromium.execute_script("return getComputedStyle(document.body).backgroundColor")
    pdf = chromium.execute_cdp_cmd("Page.printToPDF", {})["data"]

    assert drawn and bands
    assert dark == "rgb(15, 19, 24)"
    assert len(pdf) > 50_000
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []
