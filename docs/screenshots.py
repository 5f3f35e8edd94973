"""Train a healthy and a broken run, and take the pictures of the README and the guides, in headless Chromium.

python docs/screenshots.py                     # all of them, some minutes
python docs/screenshots.py report watch        # some of them
python docs/screenshots.py --runs DIR          # of the runs DIR/healthy and DIR/broken, which are created if they are missing
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from selenium import webdriver

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.core.files import replace_file
from esper_telemetry.views.compare import comparison
from esper_telemetry.views.compare.compared_runs import read_compared
from esper_telemetry.views.compare.comparison_page import comparison_page
from esper_telemetry.views.report import report_html
from esper_telemetry.views.run_view import open_view
from esper_telemetry.views.watch.app import WatchApp

IMAGES = Path(__file__).with_name("images")
CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"
PATIENCE_SECONDS = 60.0
DRAWING_SECONDS = 5.0
FAULT = "lr_x100"
FRAMES_BEFORE, FRAMES_AFTER, FRAME_MS, LAST_FRAME_MS = 8, 4, 350, 4000
"""Updates of the animation before and after the first alarm, and the duration of a picture."""
WATCH_TITLE = f"esper-telemetry watch runs/{FAULT}"
COLOURS = 64
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
def browser(width: int = 1280, height: int = 900, *flags: str) -> Iterator[Any]:
    """Start a headless Chromium with a separate profile and more flags."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.binary_location = CHROMIUM
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def eventually(question: Callable[[], Answer], *, what: str, seconds: float = PATIENCE_SECONDS) -> Answer:
    """Return the first answer that is true; raises TimeoutError without one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := question():
            return answer
        time.sleep(0.2)
    raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")


def answers(url: str) -> bool:
    """Return whether a server answers at the address."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a free port of this machine."""
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
    """The page of the run, at the address that training prints, without the assistant next to it."""
    with served("mlflow", "server", *mlflow_store(run_dir), alive="/health") as address, browser(1400, 1200) as driver:
        driver.get(address)
        driver.execute_script(
            "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');"
            "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
        )
        experiment, run = mlflow_ids(run_dir)
        driver.get(f"{address}/#/experiments/{experiment}/runs/{run}?workflowType=machine_learning")
        driver.refresh()
        eventually(lambda: driver.find_elements("xpath", "//*[text()='Description']"), what="MLflow's page of the run")
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


def take_report(run_dir: Path, picture: Path) -> None:
    """The first screens of the page of a run."""
    page = run_dir / "report.html"
    replace_file(page, report_html([open_view(run_dir, judged=True)]))
    take_page(page, picture, 1000, 1150)


def take_comparison(run_dirs: Sequence[Path], picture: Path) -> None:
    """The page that compares runs."""
    with tempfile.TemporaryDirectory() as place:
        page = Path(place, "comparison.html")
        page.write_text(comparison_page(comparison([read_compared(str(run_dir)) for run_dir in run_dirs])))
        take_page(page, picture, 1000, 940)


def take_page(page: Path, picture: Path, width: int, height: int) -> None:
    """A page of this machine, without a network."""
    with browser(width, height, "--host-resolver-rules=MAP * ~NOTFOUND") as driver:
        driver.get(page.absolute().as_uri())
        eventually(lambda: driver.find_elements("css selector", "svg.main-svg"), what="the charts")
        time.sleep(1)
        driver.save_screenshot(str(picture))


def take_watch(run_dir: Path, picture: Path) -> None:
    """The terminal, 110 columns wide."""

    async def drawn() -> str:
        app = WatchApp([str(run_dir)])
        async with app.run_test(size=(110, 40)) as pilot:
            await pilot.pause(2.0)
            return app.export_screenshot(title=WATCH_TITLE)

    picture.write_bytes(rasterized([asyncio.run(drawn())], 1100)[0])


def take_animation(run_dir: Path, picture: Path) -> None:
    """The terminal while a run goes wrong, and then the evidence of its first incident, 100 columns wide."""
    from PIL import Image

    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    alarm = next(line for line in map(json.loads, lines) if line["kind"] == "alarm")
    begin, end = alarm["axes"]["update"] - FRAMES_BEFORE, alarm["axes"]["update"] + FRAMES_AFTER
    copied = list(paced(lines, begin, time.time()))

    async def drawn(place: Path) -> list[str]:
        journal = place / "journal.jsonl"
        journal.write_text("".join(text for update, text in copied if update < begin))
        app, screens = WatchApp([str(place)]), []
        async with app.run_test(size=(100, 30)) as pilot:
            for update in range(begin, end + 1):
                with journal.open("a") as file:
                    file.writelines(text for other, text in copied if other == update)
                app.tick()
                app.draw()
                await pilot.pause(0.2)
                screens.append(app.export_screenshot(title=WATCH_TITLE))
            await pilot.press("enter")
            await pilot.pause(0.5)
            return [*screens, app.export_screenshot(title=WATCH_TITLE)]

    with tempfile.TemporaryDirectory() as place:
        run_copy = Path(place, run_dir.name)
        run_copy.mkdir()
        images = [Image.open(io.BytesIO(one)).convert("RGB") for one in rasterized(asyncio.run(drawn(run_copy)), 900)]
    every = Image.new("RGB", (images[0].width, 3 * images[0].height))
    for row, image in enumerate((images[0], images[FRAMES_BEFORE], images[-1])):
        every.paste(image, (0, row * image.height))
    palette = every.quantize(COLOURS)
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    last_ms = [2 * LAST_FRAME_MS // 3, LAST_FRAME_MS]
    durations = [*[FRAME_MS] * (len(images) - len(last_ms)), *last_ms]
    first.save(picture, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def paced(lines: Iterable[str], begin: int, now: float) -> Iterator[tuple[int, str]]:
    """Yield the lines of a journal but its end with their updates, as if update `begin` were over now and each took a second."""
    update = 0
    for line in map(json.loads, lines):
        if axes := line.get("axes"):
            update = axes["update"]
            axes["wall_time"] = now + update - begin
        if line["kind"] != "end":
            yield update, json.dumps(line) + "\n"


def rasterized(screens: Sequence[str], width: int) -> list[bytes]:
    """Return SVG pictures of terminals as PNG, so many pixels wide."""
    pictures = []
    with tempfile.TemporaryDirectory() as place, browser(width, width) as driver:
        page = Path(place, "terminal.html")
        for screen in screens:
            page.write_text(f"<body style='margin:0'>{screen}</body>", encoding="utf-8")
            driver.get(page.as_uri())
            height = driver.execute_script("return document.querySelector('svg').getBoundingClientRect().height")
            part = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": part, "captureBeyondViewport": True})
            pictures.append(base64.b64decode(taken["data"]))
    return pictures


def seeds(place: Path) -> list[Path]:
    """Ten short runs, five of them with a learning rate three times as large."""
    usual = PPOConfig().learning_rate
    for seed, factor in itertools.product(range(1, 6), (1, 3)):
        run_dir = place / f"x{factor}-s{seed}"
        if not run_dir.exists():
            with Telemetry([], run_dir=run_dir) as telemetry:
                config = PPOConfig(seed=seed, num_steps=64, learning_rate=factor * usual)
                trainer = PPO(make_env("CartPole-v1", num_envs=8, seed=seed), config)
                attach(telemetry, trainer)
                trainer.learn(total_steps=10_240)
    return sorted(place.iterdir())


def trained(place: Path, *command: str) -> Path:
    """Return a finished run of that command, an existing one if there is any."""
    if place.exists():
        return place
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    arguments = [sys.executable, "-m", *command, "--run-dir", str(place)]
    subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL)
    return place


def main() -> None:
    """Take the pictures that the command line names, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=[[], *PICTURES], metavar="PICTURE", help=", ".join(PICTURES))
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps of each run")
    parser.add_argument("--runs", type=Path, help="directory of the runs; a temporary one by default")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    sinks = ("--total-steps", str(options.steps), "--sink", "tensorboard", "--sink", "mlflow")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        place = options.runs or Path(temporary)
        healthy = trained(Path(place, "healthy"), "esper_telemetry", "train", "--env", "CartPole-v1", *sinks)
        broken = trained(Path(place, "broken"), "esper_telemetry.lab.faults", "demo", "--fault", FAULT, *sinks)
        for name in options.pictures or PICTURES:
            picture = IMAGES / f"{name}.{'gif' if name == 'watch_live' else 'png'}"
            PICTURES[name](healthy, broken, picture)
            print(f"{picture} ({picture.stat().st_size / 1e3:.0f} kB)")


PICTURES: Final[Mapping[str, Callable[[Path, Path, Path], None]]] = {
    "tensorboard": lambda healthy, _, picture: take_tensorboard(healthy, picture),
    "mlflow": lambda _, broken, picture: take_mlflow(broken, picture),
    "alarms": lambda _, broken, picture: take_alarms(broken, picture),
    "report": lambda _, broken, picture: take_report(broken, picture),
    "comparison": lambda healthy, _, picture: take_comparison(seeds(healthy.with_name("compared")), picture),
    "watch": lambda _, broken, picture: take_watch(broken, picture),
    "watch_live": lambda _, broken, picture: take_animation(broken, picture),
}
"""Functions of the healthy run, the broken run and the file of the picture."""


if __name__ == "__main__":
    main()
