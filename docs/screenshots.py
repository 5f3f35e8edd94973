"""Takes the pictures of the README and the guides: TensorBoard and MLflow, showing a run, in headless Chromium.

make demo && .venv/bin/python docs/screenshots.py runs/cartpole_v1-*
make demo-fault && .venv/bin/python docs/screenshots.py --alarms runs/lr_x100-*
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver

IMAGES = Path(__file__).with_name("images")
CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"
PATIENCE_SECONDS = 60.0
DRAWING_SECONDS = 5.0
GROUP = "metrics-card-group-toolbar"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

Answer = TypeVar("Answer")


@contextmanager
def served(program: str, *arguments: str, alive: str = "/") -> Iterator[str]:
    """The address of a web server of this environment on a free port of this machine, as long as the block lasts."""
    port = free_port()
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            eventually(lambda: answers(f"http://127.0.0.1:{port}{alive}"), what=f"{program} on port {port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Waits for a server that was asked to end, and ends it and what it started where it does not."""
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A Chromium without a window, with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.binary_location = CHROMIUM
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def eventually(question: Callable[[], Answer], *, what: str, seconds: float = PATIENCE_SECONDS) -> Answer:
    """The first answer that is true; raises TimeoutError without one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := question():
            return answer
        time.sleep(0.2)
    raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")


def answers(url: str) -> bool:
    """Whether something serves the page."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def take_tensorboard(run_dir: Path, picture: Path) -> None:
    """The headline values, on which TensorBoard opens; other groups are closed."""
    settings = {
        "timeSeriesSettingsPaneOpened": False,
        "stepSelectorEnabled": False,
        "sideBarWidthInPercent": 12,
        "scalarSmoothing": 0.0,
        "ignoreOutliers": False,
        "paginationSize": 12,
    }
    with served("tensorboard", "--logdir", str(run_dir / "tensorboard")) as address, browser(1750, 1750) as driver:
        driver.get(address)
        driver.execute_script("localStorage.setItem('_tb_global_settings', arguments[0])", json.dumps(settings))
        driver.get(f"{address}/#timeseries")
        driver.refresh()
        open_families(driver, {"0_overview"})
        time.sleep(DRAWING_SECONDS)
        driver.save_screenshot(str(picture))


def open_families(driver: Any, wanted: Collection[str]) -> None:
    """Opens these groups of charts in TensorBoard's time series and closes all others."""
    for group in eventually(lambda: driver.find_elements("css selector", GROUP), what="TensorBoard's groups"):
        name = group.find_element("css selector", ".group-title").text
        is_open = group.find_element("css selector", "mat-icon").get_attribute("svgicon").startswith("expand_less")
        if is_open != (name in wanted):
            driver.execute_script("arguments[0].querySelector('button').click()", group)


def take_alarms(run_dir: Path, picture: Path) -> None:
    """The incidents of a run, as TensorBoard's page of texts shows them."""
    with served("tensorboard", "--logdir", str(run_dir / "tensorboard")) as address, browser(1400, 1000) as driver:
        driver.get(f"{address}/#text")
        time.sleep(2 * DRAWING_SECONDS)
        part = {"x": 350, "y": 0, "width": 1050, "height": 760, "scale": 1}  # without the list of runs
        taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": part})
        picture.write_bytes(base64.b64decode(taken["data"]))


def take_mlflow(run_dir: Path, picture: Path) -> None:
    """Some charts of the run."""
    with served("mlflow", "server", *mlflow_store(run_dir), alive="/health") as address, browser(1400, 1250) as driver:
        driver.get(address)
        driver.execute_script(
            "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');"
            "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
        )
        experiment, run = mlflow_ids(run_dir)
        driver.get(f"{address}/#/experiments/{experiment}/runs")
        driver.refresh()
        training = "//*[text()='Model training']"
        eventually(lambda: driver.find_elements("xpath", training), what="MLflow's menu")[0].click()
        driver.get(f"{address}/#/experiments/{experiment}/runs/{run}/model-metrics")
        search = "input[placeholder='Search metric charts']"
        (box,) = eventually(lambda: driver.find_elements("css selector", search), what="MLflow's charts")
        box.send_keys("return_mean|policy/kl$|policy/clip_frac$|policy/entropy_norm$|value/expl")
        time.sleep(DRAWING_SECONDS)
        driver.save_screenshot(str(picture))


def mlflow_store(run_dir: Path) -> tuple[str, ...]:
    """Arguments that make MLflow's server show the run."""
    return ("--backend-store-uri", f"sqlite:///{run_dir.absolute()}/mlflow.db", "--workers", "1")


def mlflow_ids(run_dir: Path) -> tuple[str, str]:
    """Experiment and id of the only run in the run directory's store."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.absolute()}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run.info.experiment_id, run.info.run_id


def main() -> None:
    """Takes the pictures of the run directory on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run with TensorBoard and MLflow in it")
    parser.add_argument("--alarms", action="store_true", help="show the incidents of a broken run, in TensorBoard")
    options = parser.parse_args()
    run_dir = options.run_dir
    IMAGES.mkdir(exist_ok=True)
    if options.alarms:
        take_alarms(run_dir, IMAGES / "alarms.png")
        print(f"{IMAGES}/alarms.png shows {run_dir}")
        return
    take_tensorboard(run_dir, IMAGES / "tensorboard.png")
    take_mlflow(run_dir, IMAGES / "mlflow.png")
    print(f"{IMAGES}/tensorboard.png and mlflow.png show {run_dir}")


if __name__ == "__main__":
    main()
