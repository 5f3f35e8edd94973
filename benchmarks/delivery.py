"""Cost of a record: time of the thread that makes it, against `wandb.log` of the same numbers; time of the sink process; bytes on disk.

python benchmarks/delivery.py [--records 2000] [--keys 100] [--per-second 40]

All contenders write the same dict in turn, so other load on the machine affects them alike. Before each call the processor's caches are
filled with other data, as after an update of a trainer:

    journal       one line of the journal, and a check of the sinks' progress: the cost of a record in its thread
    log, flush    `Telemetry.log` and `Telemetry.flush` in a user's loop whose records a worker process makes (`offload=True`)
    wandb.log     an offline run in this process
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results import Row, save

from esper_telemetry import Axes, Record, RunInfo, RunStatus, Telemetry
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.sinks import as_sink

SINKS = ("tensorboard", "wandb:bench?mode=offline", "mlflow")
WARM_UP_SECONDS = 15.0
"""First records, which are not measured, because the worker and the clients start during them."""
SOMETHING_ELSE = 4 << 20
"""Numbers that fill the caches between two calls: 32 MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--per-second", type=float, default=40.0)
    parser.add_argument("--save", action="store_true", help="put the medians into docs/benchmarks.json")
    options = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        measure(Path(directory), options)


def measure(directory: Path, options: argparse.Namespace) -> None:
    import wandb

    settings = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
    theirs = wandb.init(mode="offline", dir=str(directory), settings=settings)
    run_dir = directory / "run"
    journal = Journal.create(run_dir)
    journal.write(encode_run(RunInfo("bench", "bench", run_dir, time.time())))
    deliveries = Deliveries(journal, [as_sink(sink) for sink in SINKS])
    telemetry = Telemetry(SINKS, run_dir=directory / "loop", offload=True)
    warm_up = int(WARM_UP_SECONDS * options.per_second)
    rows = numbers(options.records + warm_up, options.keys)

    def journalled(update: int) -> None:
        deliveries.stats()
        journal.write(encode_record(Record(update, Axes(update, update * 128, update, time.time()), rows[update - 1])))

    def looped(update: int) -> None:
        telemetry.log(rows[update - 1])
        telemetry.flush(env_step=update * 128)

    contenders: dict[str, Callable[[int], object]] = {
        "journal": journalled,
        "log, flush": looped,
        "wandb.log": lambda update: theirs.log(rows[update - 1]),
    }
    times = in_turn(contenders, len(rows), 1.0 / options.per_second)
    times = {name: taken[warm_up:] for name, taken in times.items()}
    child = deliveries.child_pid
    took = cost_of(child) if child is not None else {}
    journal.write(encode_end(RunStatus.FINISHED, seq=10**9))
    report = deliveries.close(600.0)
    telemetry.close()
    theirs.finish()
    show(times, took, report.complete, run_dir, len(rows) * options.keys, save_rows=options.save)


def numbers(records: int, keys: int) -> list[dict[str, float]]:
    draw = random.Random(1)
    return [{f"my/group_{key % 10}/key_{key}": draw.gauss(0.0, 1.0) for key in range(keys)} for _ in range(records)]


def in_turn(contenders: dict[str, Callable[[int], object]], records: int, pause: float) -> dict[str, list[float]]:
    """Return the seconds of each call by contender; the order rotates from record to record."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    something_else = np.zeros(SOMETHING_ELSE)
    for update in range(1, records + 1):
        order = order[1:] + order[:1]
        for name in order:
            something_else += 1.0
            begun = time.perf_counter()
            contenders[name](update)
            times[name].append(time.perf_counter() - begun)
        time.sleep(pause)
    return times


def cost_of(pid: int) -> dict[str, float]:
    """Return the memory in MB and the processor seconds of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return {"memory": resident / 1024, "cpu": (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")}


def show(times: dict[str, list[float]], child: dict[str, float], complete: bool, run_dir: Path, values: int, *, save_rows: bool) -> None:
    theirs = times["wandb.log"]
    if save_rows:
        others = f"`wandb.log` {middle(theirs) * 1e6:.0f} µs"
        mine = {name: taken for name, taken in times.items() if name != "wandb.log"}
        save("delivery", [Row(name, f"{middle(taken) * 1e6:.0f} µs", others) for name, taken in mine.items()])
    print(f"{'':14}{'median':>10}{'p99':>10}{'ratio of medians':>20}{'of p99':>10}")
    for name, taken in times.items():
        ratios = (middle(taken) / middle(theirs), late(taken) / late(theirs))
        print(f"{name:14}{middle(taken) * 1e6:8.0f}us{late(taken) * 1e6:8.0f}us{ratios[0]:20.2f}{ratios[1]:10.2f}")
    if child:
        print(f"the sink process: {child['memory']:.0f} MB, {child['cpu']:.1f} s of processor time")
    print(f"everything delivered: {'yes' if complete else 'no'}")
    sizes = {"journal": size(run_dir / "journal.jsonl"), "tensorboard": size(run_dir / "tensorboard")}
    sizes |= {"wandb": size(run_dir / "wandb"), "mlflow": size(run_dir / "mlflow.db")}
    print("bytes per value: " + json.dumps({name: round(total / values, 1) for name, total in sizes.items()}))


def middle(taken: Sequence[float]) -> float:
    return statistics.median(taken)


def late(taken: Sequence[float]) -> float:
    return sorted(taken)[int(len(taken) * 0.99)]


def size(path: Path) -> int:
    files: Any = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
