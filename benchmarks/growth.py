"""Processor time and memory of the readers of a run, by the number of its updates and of its keys.

python benchmarks/growth.py [--updates 1000 10000] [--only diagnose report] [--journals DIR] [--save]

The journals repeat the records of a short run of the bundled trainer, with about 120 keys; one has 2,000 keys. Each command runs in a new
process, imports included. The first report also writes the cache of columns, which `report, again` and the commands after it read.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from results import Row, save

from esper_telemetry import PPO, Axes, PPOConfig, Record, RunStatus, Telemetry, attach, make_env, read_run
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel
from esper_telemetry.journal.lines import JournalEvent, encode_alarm, encode_end, encode_event, encode_record, encode_run, to_json
from esper_telemetry.journal.record_columns import COLUMNS_NAME

BASE_UPDATES = 100
KEYS, MANY_KEYS = 120, 2000
MANY_KEYS_UPDATES = 1000
INCIDENT_UPDATES = 500
OUTCOME_UPDATES = 1000

FIRST_SCREEN = """
from esper_telemetry.views.watch.app import WatchApp
WatchApp([sys.argv[1]]).views[0].diagnosis.summary
os._exit(0)
"""
ALL_UPDATES = """
from esper_telemetry.views.run_view import open_view
open_view(sys.argv[1], max_points=400).diagnosis.summary
"""
PANDAS = """
from esper_telemetry import read_run
frame = read_run(sys.argv[1]).to_pandas()
assert len(frame)
"""
FIRST_FLUSH = """
from esper_telemetry import Telemetry
telemetry = Telemetry([], run_dir=sys.argv[1], resume=True, offload=False)
telemetry.log({"my/value": 1.0})
begun = time.process_time()
telemetry.flush(env_step=10**9)
print(time.process_time() - begun)
os._exit(0)
"""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "diagnose": ("-m", "esper_telemetry", "diagnose", "{run}"),
    "watch, first screen": ("-c", FIRST_SCREEN, "{run}"),
    "report": ("-m", "esper_telemetry", "report", "{run}", "-o", "{scratch}/report.html"),
    "report, again": ("-m", "esper_telemetry", "report", "{run}", "-o", "{scratch}/report.html"),
    "watch, all updates": ("-c", ALL_UPDATES, "{run}"),
    "pandas": ("-c", PANDAS, "{run}"),
    "compare": ("-m", "esper_telemetry", "compare", "{run}"),
    "doctor": ("-m", "esper_telemetry", "doctor", "{run}"),
    "resume, first flush": ("-c", FIRST_FLUSH, "{copy}"),
    "replay to TensorBoard": ("-m", "esper_telemetry", "replay", "{copy}", "--to", "tensorboard:{scratch}/tb"),
    "doctor with TensorBoard": ("-m", "esper_telemetry", "doctor", "{copy}", "--sink", "tensorboard:{scratch}/tb"),
}
GOALS: Mapping[str, str] = {
    "diagnose": "5 s, 400 MB",
    "watch, first screen": "2 s, 400 MB",
    "report": "10 s, 400 MB",
    "doctor": "20 s, 400 MB",
    "resume, first flush": "1 s",
    "replay to TensorBoard": "120 s",
    "doctor with TensorBoard": "60 s",
}


@dataclass(frozen=True)
class Cost:
    """What a command took: processor time, which on an idle machine is the time that passes, and peak memory."""

    seconds: float
    megabytes: float


def make_journal(base: Path, run_dir: Path, updates: int, keys: int) -> None:
    """Write a journal of so many updates, which repeats the records of a run, with incidents and outcomes."""
    run, draw = read_run(base), random.Random(1)
    always = [key for key in run.records[0].values if key.startswith(("episode/", "alarm/", "telemetry/"))]
    others = [key for key in dict.fromkeys(key for record in run.records for key in record.values) if key not in always]
    kept = {*always, *draw.sample(others, min(len(others), keys - len(always)))}
    more = [f"my/group_{number % 10}/key_{number}" for number in range(keys - len(kept))]
    outcome = next((event for event in reversed(run.events) if event.type == "outcome"), None)
    run_dir.mkdir(parents=True)
    with (run_dir / "journal.jsonl").open("wb") as file:
        file.write(to_json(encode_run(replace(run.info, run_id=run_dir.name, name=run_dir.name))))
        for update in range(1, updates + 1):
            record = run.records[update % len(run.records)]
            axes = Axes(update, 256 * update, 16 * update, 1.7e9 + 0.2 * update)
            scale = 1 + 0.01 * draw.random()
            values = {key: scale * value for key, value in record.values.items() if key in kept}
            values |= {key: draw.gauss(0, 1) for key in more}
            file.write(to_json(encode_record(Record(update, axes, values, record.histograms))))
            since_incident = update % max(INCIDENT_UPDATES, updates // 200)
            if since_incident in (100, 140):
                event = AlarmEvent.RAISE if since_incident == 100 else AlarmEvent.CLEAR
                number = update // max(INCIDENT_UPDATES, updates // 200) + 1
                about = (update, axes, "policy/kl_spike", event, 0.6, AlarmLevel.WARN, "policy/kl", 0.2, 0.1)
                alarm = Alarm(*about, since=update, incident=number, cause="policy/kl_spike", text="The policy moved.")
                file.write(to_json(encode_alarm(alarm)))
            if outcome is not None and update % OUTCOME_UPDATES == 0:
                data = {**outcome.data, "updates": update}
                file.write(to_json(encode_event(JournalEvent("outcome", data, update, axes))))
        file.write(to_json(encode_end(RunStatus.FINISHED, seq=updates + 1)))


def make_base(run_dir: Path) -> None:
    """Train for `BASE_UPDATES` updates."""
    with Telemetry([], run_dir=run_dir) as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(num_steps=32, anneal_learning_rate=False))
        attach(telemetry, trainer)
        trainer.learn(total_steps=BASE_UPDATES * 8 * 32)


def cost_of(command: tuple[str, ...], names: Mapping[str, str]) -> Cost:
    """Return what a command takes in a new process; a time that a program prints replaces the time of the process."""
    words = [sys.executable, *(word.format_map(names) if word.startswith(("{", "tensorboard")) else word for word in command)]
    if command[0] == "-c":
        words[2] = f"import os, sys, time\n{command[1]}"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.DEVNULL)
        status, peak = Path(f"/proc/{process.pid}/status"), 0.0
        while True:
            pid, _, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            # the usage of a child begins with the memory of this process
            lines = status.read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))])
            time.sleep(0.02)
        output.seek(0)
        seconds = float(output.read()) if command[1] == FIRST_FLUSH else usage.ru_utime + usage.ru_stime
    return Cost(seconds, peak)


def measure(journals: Path, lengths: list[int], only: list[str]) -> Iterator[tuple[str, int, int, Cost]]:
    """Yield each command with updates, keys and cost."""
    base = journals / "base"
    if not base.exists():
        make_base(base)
    for updates, keys in [*((length, KEYS) for length in lengths), (MANY_KEYS_UPDATES, MANY_KEYS)]:
        run = journals / f"run_{updates}_{keys}"
        if not run.exists():
            make_journal(base, run, updates, keys)
        shutil.rmtree(run / COLUMNS_NAME, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=journals) as scratch:
            copy = Path(scratch) / "copy"
            for name, command in COMMANDS.items():
                if only and name not in only:
                    continue
                if "{copy}" in command and not copy.exists():
                    copy.mkdir()
                    shutil.copy(run / "journal.jsonl", copy)
                yield name, updates, keys, cost_of(command, {"run": str(run), "scratch": scratch, "copy": str(copy)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--only", nargs="+", default=[], choices=COMMANDS)
    parser.add_argument("--journals", type=Path, help="a directory that keeps the journals for the next call")
    parser.add_argument("--save", action="store_true", help="put the figures into docs/benchmarks.json")
    options = parser.parse_args()
    costs: dict[str, dict[int, Cost]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, updates, keys, cost in measure(options.journals or Path(directory), options.updates, options.only):
            what = f"{name}, {updates:,} updates" + (f" of {keys:,} keys" if keys != KEYS else "")
            before = costs.setdefault(name, {}) if keys == KEYS else {}
            growth = ""
            if shorter := [length for length in before if length < updates]:
                last = max(shorter)
                exponents = (
                    math.log(after / earlier, updates / last)
                    for after, earlier in ((cost.seconds, before[last].seconds), (cost.megabytes, before[last].megabytes))
                )
                growth = "time ^{:.2f}, memory ^{:.2f}".format(*exponents)
            before[updates] = cost
            figures = f"{cost.seconds:.1f} s, {cost.megabytes:.0f} MB"
            print(what, figures, growth, sep="; ", flush=True)
            rows.append(Row(what, figures, growth, GOALS.get(name, "") if updates == max(options.updates) else ""))
    if options.save:
        save("growth", rows)


if __name__ == "__main__":
    main()
