"""The backends' pages, from real servers in a real browser."""

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backends_read import journal_points, mlflow_run, quantile_points
from command_line import Finished, trained_in_fork
from screenshots import CHROMEDRIVER, CHROMIUM, GROUP, browser, eventually, mlflow_store, served

from esper_telemetry import read_run
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.sinks.layout import overview_names

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A browser for all pages. Without one these tests are skipped, except in continuous integration."""
    if not (Path(CHROMIUM).exists() and Path(CHROMEDRIVER).exists()) and os.environ.get("CI") != "true":
        pytest.skip(f"the pages are looked at with Chromium, and {CHROMIUM} or {CHROMEDRIVER} is missing")
    with browser(1400, 1600) as driver:
        yield driver


@pytest.fixture(scope="module")
def tensorboard(finished: Finished) -> Iterator[str]:
    with served("tensorboard", "--logdir", str(finished.run_dir / "tensorboard")) as address:
        yield address


@pytest.fixture(scope="module")
def mlflow(finished: Finished) -> Iterator[str]:
    with served("mlflow", "server", *mlflow_store(finished.run_dir), alive="/health") as address:
        yield address


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of Trackio's dashboard, and the run in its database: with a learning rate that raises an alarm at once."""
    pytest.importorskip("trackio")
    run_dir = tmp_path_factory.mktemp("trackio") / "run"
    options = ("--env", "CartPole-v1", "--total-steps", "5500", "--seed", "1", "--learning-rate", "0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(run_dir.parent / "database"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        command = trained_in_fork(run_dir, *options, "--run-dir", str(run_dir), "--sink", "trackio:walker")
        assert command.code == 0, command
        with served("python", "-c", TRACKIO_DASHBOARD) as address:
            yield address, run_dir


TRACKIO_DASHBOARD = """
import sys, trackio
trackio.show("walker", host=sys.argv[2], server_port=int(sys.argv[4]), open_browser=False)
"""
"""`trackio show`, which has no option for its port."""


def texts(page: Any, selector: str) -> list[str]:
    elements = eventually(lambda: page.find_elements("css selector", selector), what=selector)
    return [element.text for element in elements]


def fetched(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.load(answer)


def test_tensorboard_shows_a_group_of_charts_for_each_family(page: Any, tensorboard: str, finished: Finished) -> None:
    families = {key.partition("/")[0] for key in journal_points(finished.run_dir)}

    page.get(f"{tensorboard}/#timeseries")

    assert texts(page, f"{GROUP} .group-title") == sorted(families | {"0_overview", "axis"})


def test_tensorboard_draws_the_returns_over_environment_steps(page: Any, tensorboard: str) -> None:
    """The last label of the axis is near the last step, about 5,950."""
    page.get(f"{tensorboard}/?tagFilter=episode%2Freturn_mean%24#timeseries")
    page.refresh()

    def largest_label() -> float:
        labels = page.execute_script(X_LABELS)
        return max((float(label.strip().replace(",", "").replace("k", "e3")) for label in labels), default=0.0)

    assert eventually(lambda: 4000 <= largest_label() <= 7000, what="an axis that ends at 5,950 steps")
    assert [name.replace("\n", "") for name in texts(page, "scalar-card .tag")] == ["episode/return_mean"]


X_LABELS = "return [...document.querySelectorAll('scalar-card .x-axis text')].map(label => label.textContent)"


def test_tensorboard_answers_questions_in_custom_scalars(page: Any, tensorboard: str) -> None:
    page.get(f"{tensorboard}/#custom_scalars")

    def said() -> bool:
        text = page.execute_script(ALL_TEXT)
        return all(question in text for question in QUESTIONS) and FIRST_CHART in text

    assert eventually(said, what=" and ".join([*QUESTIONS, FIRST_CHART]))


def test_tensorboard_compares_runs_by_their_settings_and_returns(page: Any, tensorboard: str) -> None:
    page.get(f"{tensorboard}/#hparams")

    def columns() -> bool:
        words = page.execute_script(ALL_TEXT).split()
        return {"CartPole-v1", "learning_rate", "episode/return_mean_100"} <= set(words)

    assert eventually(columns, what="a table with settings and returns")


FIRST_CHART = "Mean return of the last 100 episodes (episode/return_mean_100) [return]"
QUESTIONS = ("Is it learning?", "Is the policy moving too far?", "Is the critic useful?", "What dominates the gradient?")
ALL_TEXT = """
const text = node => [...node.childNodes].map(
  child => (child.nodeType == 3 ? child.data : '') + text(child)).join(' ') + (node.shadowRoot ? text(node.shadowRoot) : '');
return text(document.body);
"""
"""The text of the page, including its shadow trees, in which TensorBoard hides its older dashboards."""


def test_tensorboard_describes_every_metric(tensorboard: str, finished: Finished) -> None:
    info = read_run(finished.run_dir).info

    (tags,) = fetched(f"{tensorboard}/data/plugin/scalars/tags").values()

    described = info.describe("policy/kl")
    assert described is not None
    assert described.question.split("?")[0] in tags["policy/kl"]["description"]
    assert [tag for tag, shown in tags.items() if not shown["description"] and not tag.startswith("axis/")] == []


def test_mlflow_shows_the_run_as_finished_with_its_metrics(page: Any, mlflow: str, finished: Finished) -> None:
    info = mlflow_run(finished.run_dir).info

    page.get(f"{mlflow}/#/experiments/{info.experiment_id}/runs/{info.run_id}")

    info_of_run = read_run(finished.run_dir).info
    points = journal_points(finished.run_dir)
    numbers = len(points) + len(quantile_points(finished.run_dir)) + len(points.keys() & overview_names(info_of_run))
    expected = {info_of_run.name, "Finished", f"Metrics ({numbers + 2})"}
    assert eventually(lambda: expected <= set(lines(page)), what="the page of the run")


def test_mlflow_draws_the_metrics_by_family(page: Any, mlflow: str, finished: Finished) -> None:
    info = mlflow_run(finished.run_dir).info

    page.get(f"{mlflow}/#/experiments/{info.experiment_id}/runs/{info.run_id}/model-metrics")

    def shown() -> bool:
        text = lines(page)
        groups = ["0_overview", "adv", "adv/raw", "episode", "grad/global", "policy", "value"]
        return "01 return" in text and [line for line in text if line in groups] == groups

    assert eventually(shown, what="groups of charts, the overview first")


def test_trackio_opens_on_the_overview(page: Any, trackio: tuple[str, Path]) -> None:
    address, run_dir = trackio
    info, keys = read_run(run_dir).info, journal_points(run_dir).keys()
    names = sorted(name.partition("/")[2] for key, name in overview_names(info).items() if key in keys)

    page.get(f"{address}/?project=walker")

    assert eventually(lambda: names[-1] in lines(page), what="the last chart of the overview")
    assert [line for line in lines(page) if re.fullmatch(r"\S.* \(\d+\)", line)][1] == f"0_overview ({len(names)})"
    assert [line for line in lines(page) if line in names] == names
    assert not [line for line in lines(page) if line.startswith("layer (")]


def test_trackio_lists_the_alarms_and_the_outcome(page: Any, trackio: tuple[str, Path]) -> None:
    address, run_dir = trackio
    run = read_run(run_dir)
    raised = [alarm for alarm in run.alarms if alarm.event is AlarmEvent.RAISE]

    page.get(f"{address}/reports?project=walker")

    eventually(lambda: any("Declining: " in line for line in lines(page)), what="the outcome")
    assert raised
    for alarm in raised:
        assert f"{alarm.type} {alarm.text} {alarm.axes.env_step} " in "\n".join(lines(page))


def lines(page: Any) -> list[str]:
    text: str = page.find_element("tag name", "body").text
    return text.splitlines()
