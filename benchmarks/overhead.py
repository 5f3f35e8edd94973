"""Cost of telemetry: passes over gradients, whole steps compared with other tools, whole runs with three backends.

    python benchmarks/overhead.py                            # everything; 20 minutes
    python benchmarks/overhead.py passes steps               # parts of it
    python benchmarks/overhead.py --rounds 9 --json overhead.json

passes: clipping with the norm of every tensor against `torch.nn.utils.clip_grad_norm_`, and telemetry's measurements. The clipped gradients
must be bit-identical, otherwise the program stops.
steps: whole training steps under `wandb.watch`, Cockpit, a loop of `.item()` and telemetry, against steps without measurements. A message
names the tools that are not installed.
runs: the bundled trainer on CartPole-v1, at NORMAL with TensorBoard, W&B (offline) and MLflow, against OFF, in turns of half a second
(`turns.py`); and telemetry's microseconds on the training thread per minibatch and per update.

Contenders take turns. Figures are medians over the rounds, ratios are medians of the rounds' ratios, and times are processor time with one
torch thread. Memory is the peak of a separate process: passes minus the gradients alone, steps minus bare steps.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch
from contenders import OPENING_SECONDS, Work, attached, ours, trained
from gradient_passes import DEBUG, LIMITS, NORMAL, OURS, TORCH, Gradients, passes
from networks import NETWORKS
from rich.console import Console
from rich.table import Table
from rounds import take_turns
from trainer import median_of, spawn
from turns import Contender, in_turns, ratio, serve
from watched_steps import NEEDS, WATCHERS, Step, Training

PARTS = ("passes", "steps", "runs")
GOALS = {f"{OURS}, does not clip": 0.6, f"{OURS}, clips": 0.95, NORMAL: 1.0}
"""Largest allowed ratios to torch's clipping."""

STEPS_PER_ROUND = 16
FEW_CALLS = 3
"""Calls per round of slow contenders, and of every contender in measurements of memory."""

RUNS = {"CartPole MLP": Work(0, 0), "CartPole LSTM 64": Work(0, 0, lstm_size=64, scaled_rewards=True)}
"""Whole runs. Without scaled rewards, returns of hundreds sometimes saturate the critic's LSTM. The alarm `grad/vanish` then measures the
next updates at DEBUG, which would distort the result.
"""
TURNS, TURN_UPDATES = 60, 8

WATCHED = ("MLP 64x64", "LSTM 512")
"""Networks for the comparison of whole steps."""

MINIBATCHES = Work(0, 0).epochs * Work(0, 0).minibatches

Row = dict[str, Any]


def compare_passes(rounds: int) -> Iterator[Row]:
    """Yield the ratios to torch's clipping, on every network."""
    for name, network in NETWORKS.items():
        gradients = Gradients(network)
        for limit in LIMITS.values():
            gradients.check_equal(limit)
        found = passes(gradients)
        memory = {contender: peak("passes", name, contender) for contender in ("", *found)}
        for what in LIMITS:
            pair = [f"{TORCH}, {what}", f"{OURS}, {what}"]
            yield from timed_passes(name, gradients, {key: found[key] for key in pair}, rounds, memory)
        rest = {f"{TORCH}, clips": found[f"{TORCH}, clips"], NORMAL: found[NORMAL]}
        yield from list(timed_passes(name, gradients, rest, rounds, memory))[1:]
        rest = {f"{TORCH}, clips": found[f"{TORCH}, clips"], DEBUG: found[DEBUG]}
        yield from list(timed_passes(name, gradients, rest, rounds, memory, FEW_CALLS))[1:]


def timed_passes(
    network: str,
    gradients: Gradients,
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    memory: dict[str, float],
    calls: int | None = None,
) -> Iterator[Row]:
    """Yield one row per contender."""
    calls = calls or NETWORKS[network].calls
    for name, timed in take_turns(contenders, rounds=rounds, calls=calls, prepare=gradients.restore).items():
        yield {
            "network": network,
            "contender": name,
            "microseconds": timed.microseconds,
            "ratio": timed.ratio,
            "rounds": timed.rounds,
            "goal": GOALS.get(name),
            "megabytes": memory[name] - memory[""],
        }


def compare_steps(rounds: int) -> Iterator[Row]:
    """Yield the ratios to steps without measurements."""
    present = [name for name in WATCHERS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    for name in [name for name in WATCHERS if name not in present]:
        yield {"contender": name, "skipped": f"{NEEDS[name]} is not installed"}
    for network in WATCHED:
        memory = {contender: peak("steps", network, contender) for contender in present}
        with ExitStack() as stack:
            steps: dict[str, Step] = {name: stack.enter_context(WATCHERS[name](Training(network))) for name in present if memory[name]}
            for name, timed in take_turns(steps, rounds=rounds, calls=STEPS_PER_ROUND).items():
                yield {
                    "network": network,
                    "contender": name,
                    "microseconds": timed.microseconds,
                    "ratio": timed.ratio,
                    "rounds": timed.rounds,
                    "megabytes": memory[name] - memory["bare"],
                }
        for name in [name for name in present if not memory[name]]:
            yield {"network": network, "contender": name, "skipped": "it fails, see above"}


def compare_runs(rounds: int, steps: int) -> Iterator[Row]:
    """Yield the relative speed with telemetry, turn by turn, and its microseconds on the training thread in whole runs."""
    for network, work in RUNS.items():
        work = replace(work, steps=steps)
        command = [sys.executable, "-W", "ignore", __file__, "--alone", "runs", network]
        found = in_turns({name: Contender([*command, name]) for name in ("OFF", "NORMAL")}, TURNS)
        wall, cpu = (ratio(found["OFF"], found["NORMAL"], figure) for figure in ("wall", "thread"))
        bare = spawn("esper", work, None)
        clocked = [spawn("esper + telemetry, clocked", replace(work, seed=seed), None) for seed in range(rounds)]
        yield {
            "network": network,
            "contender": "NORMAL and three backends, over OFF",
            "steps_per_second": bare.wall,
            "wall_ratio": wall,
            "cpu_ratio": cpu,
            "microseconds_per_minibatch": median_of(clocked, "per_minibatch"),
            "microseconds_per_update": median_of(clocked, "per_update"),
            "update_microseconds": median_of(clocked, "update"),
            "megabytes": median_of(clocked, "megabytes") - bare.megabytes,
        }


def train_in_turns(network: str, level: str) -> None:
    """Run a contender of `compare_runs`, after its backends have opened."""
    work = RUNS[network]
    trainer, _ = ours(work)
    with attached(trainer) if level == "NORMAL" else nullcontext():
        trainer.learn(1)
        time.sleep(OPENING_SECONDS)
        serve(lambda: trained(trainer, TURN_UPDATES * work.num_envs * work.num_steps))


def peak(part: str, network: str, contender: str) -> float:
    """Return the peak memory in MB of a process with this contender; 0 if the contender failed, which is printed."""
    command = [sys.executable, "-W", "ignore", __file__, "--alone", part, network, contender]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        print(f"{contender} on {network} fails: {reason}", file=sys.stderr)
        return 0.0
    return float(done.stdout.splitlines()[-1])


def alone(part: str, network: str, contender: str) -> float:
    """Print the result of `peak`, in the process that `peak` starts."""
    if part == "passes":
        gradients = Gradients(NETWORKS[network])
        forget_peak()
        for _ in range(FEW_CALLS if contender else 0):
            passes(gradients)[contender]()
    else:
        with WATCHERS[contender](Training(network)) as step:
            for _ in range(STEPS_PER_ROUND):
                step()
    return highest()


def highest() -> float:
    """Return the peak memory of this process in MB since `forget_peak`; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def forget_peak() -> None:
    """Return freed memory to the system, and reset `highest`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


SPEED_GOAL, SHARE_GOAL = "0.97", "2 %"
"""Yield the relative speed of whole runs with telemetry, and telemetry's share of the training thread."""

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "network": ("network", str),
    "contender": ("", str),
    "microseconds": ("µs", "{:.0f}".format),
    "ratio": ("ratio", "{:.3f}".format),
    "goal": ("goal", "≤ {:.2f}".format),
    "steps_per_second": ("steps/s", "{:.0f}".format),
    "wall_ratio": ("wall ratio", str),
    "cpu_ratio": ("CPU ratio", str),
    "microseconds_per_minibatch": ("µs/minibatch", "{:.1f}".format),
    "microseconds_per_update": ("µs/update besides", "{:.0f}".format),
    "update_microseconds": ("µs an update takes", "{:.0f}".format),
    "megabytes": ("MB more", "{:+.0f}".format),
    "skipped": ("", "left out: {}".format),
}
"""Field by title and format."""


def table(title: str, rows: list[Row]) -> Table:
    """Return the rows as a table, with all columns that occur."""
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    found = Table(title=title)
    for key in shown:
        found.add_column(COLUMNS[key][0], justify="left" if key in ("network", "contender", "skipped") else "right")
    for row in rows:
        found.add_row(*["" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in shown])
    return found


def page_rows(part: str, rows: list[Row]) -> dict[str, list[results.Row]]:
    """Return the rows of the page by table."""
    if part == "runs":
        speed = [results.Row(row["network"], str(row["wall_ratio"]), "telemetry off", SPEED_GOAL) for row in rows]
        clocked = []
        for row in rows:
            taken = row["microseconds_per_update"] + row["microseconds_per_minibatch"] * MINIBATCHES
            share = f"{100 * taken / row['update_microseconds']:.1f} %"
            clocked.append(results.Row(f"share of an update, {row['network']}", share, "", SHARE_GOAL))
        return {"runs": speed, "runs_clocked": clocked}
    other = "`clip_grad_norm_`" if part == "passes" else "bare step"
    timed = [row for row in rows if row.get("ratio") not in (None, 1.0)]  # 1.0 is the contender that others are divided by
    own_memory = (NORMAL, DEBUG) if part == "passes" else [name for name in WATCHERS if name != "bare"]
    memory = [row for row in rows if row.get("megabytes") is not None and row["contender"] in own_memory]
    return {
        part: [
            results.Row(
                f"{row['contender']}, {row['network']}", f"{row['ratio']:.2f}", other, "" if row.get("goal") is None else f"{row['goal']:g}"
            )
            for row in timed
        ],
        f"{part}_memory": [results.Row(f"{row['contender']}, {row['network']}", f"{max(0.0, row['megabytes']):.0f}") for row in memory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of a whole run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--save", action="store_true", help="put the figures into docs/benchmarks.json")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"a part is one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.alone:
        part, network, contender = options.alone
        if part == "runs":
            train_in_turns(network, contender)
        else:
            print(alone(part, network, contender))
        return
    measures = {
        "passes": lambda: compare_passes(options.rounds),
        "steps": lambda: compare_steps(options.rounds),
        "runs": lambda: compare_runs(options.rounds, options.steps),
    }
    found: dict[str, list[Row]] = {}
    for part in options.parts or PARTS:
        found[part] = list(measures[part]())
        Console(width=160).print(table(f"{part}, {options.rounds} rounds", found[part]))
        if options.save:
            for key, rows in page_rows(part, found[part]).items():
                results.save(key, rows)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
