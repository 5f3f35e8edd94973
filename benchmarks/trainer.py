"""Speed of the bundled trainer: against other trainers on the same work, and with telemetry against training without it.

    python benchmarks/trainer.py                        # CartPole-v1, 8 x 128, 4 epochs x 4 minibatches, 64 x 64 tanh
    python benchmarks/trainer.py --num-envs 8 64 1024   # a table for each
    python benchmarks/trainer.py --lstm 64 256          # the same with LSTMs of these sizes, against recurrent trainers
    python benchmarks/trainer.py --steps 20000 --rounds 3     # a quick look: seconds for each contender
    python benchmarks/trainer.py --cleanrl ppo.py       # CleanRL's script, at this path
    python benchmarks/trainer.py --purejaxrl DIR --jax-python PYTHON     # PureJaxRL, see purejaxrl.py
    python benchmarks/trainer.py --telemetry            # NORMAL with three backends, and a second core kept busy, against OFF

Peers that are not installed are left out: Stable-Baselines3, sb3-contrib, rsl-rl-lib. Every run has its own process
with one torch thread. Contenders take turns, so that a change of the machine's speed affects all of them. Figures are
medians over the rounds, and ratios are medians over the pairs; only the ratios hold for other machines. Each round has
its own seed. The return is the mean of the last 100 training episodes, and MB the peak memory of the process.

The bundled trainer and RSL-RL step Gymnasium's vectorised CartPole. Stable-Baselines3 and CleanRL loop over single environments;
"native" is the same trainer on the vectorised one, the fair comparison for dozens of environments or more.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from contenders import CONTENDERS, ENVIRONMENT, Run, Work
from results import Row, save

PEERS = {
    "sb3": "Stable-Baselines3",
    "sb3, native": "Stable-Baselines3, native",
    "rsl_rl": "RSL-RL",
    "cleanrl": "CleanRL `ppo.py`",
    "cleanrl, native": "CleanRL `ppo.py`, native",
    "purejaxrl": "PureJaxRL, compiled before",
    "purejaxrl, with compilation": "PureJaxRL, compilation counted",
}
"""Names on the page."""

LEAST_ROLLOUTS = 4
"""Rollouts of a run, however many environments there are."""


def spawn(contender: str, work: Work, cores: str | None) -> Run:
    """Run the contender in a new process with one thread."""
    command = [sys.executable, __file__, "--contender", contender, "--work", json.dumps(asdict(work))]
    command = ["taskset", "-c", cores, *command] if cores else command
    threads = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, **threads, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def compare(names: list[str], work: Work, *, rounds: int, cores: str | None) -> tuple[list[Row], list[Row]]:
    """Print the medians of all contenders, and the first one's speed relative to each other's.

    Returns the rows of the page: speeds, then returns and memory.
    """
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(rounds):
        for name in names:
            runs[name].append(spawn(name, replace(work, seed=seed), cores))
    memory = f", LSTM {work.lstm_size}" if work.lstm_size else ""
    shape = f"{work.num_envs} x {work.num_steps}, {work.epochs} epochs x {work.minibatches}{memory}"
    print(f"{ENVIRONMENT}, {work.steps} steps, {shape}, {rounds} rounds; ratios: {names[0]} over the others")
    print(f"{'':20}{'steps/CPU-s':>12}{'steps/s':>10}{'CPU ratio':>11}{'wall ratio':>11}{'MB':>6}{'return':>8}  returns")
    rows = []
    medians = {}
    what = f"LSTM of {work.lstm_size} units, {work.steps:,} steps" if work.lstm_size else f"{work.num_envs} environments"
    for name, found in runs.items():
        cpu, wall, peak, returns = (median_of(found, key) for key in ("cpu", "wall", "megabytes", "episode_return"))
        pairs = list(zip(runs[names[0]], found, strict=True))
        ratios = [statistics.median(getattr(a, key) / getattr(b, key) for a, b in pairs) for key in ("cpu", "wall")]
        listed = " ".join(f"{value:.0f}" for value in sorted(run.episode_return for run in found))
        print(f"{name:20}{cpu:12.0f}{wall:10.0f}{ratios[0]:11.3f}{ratios[1]:11.3f}{peak:6.0f}{returns:8.1f}  {listed}")
        medians[name] = {"return": f"{returns:.0f}", "peak memory in MB": f"{peak:.0f}"}
        if not name.startswith("esper"):
            rows.append(Row(what, f"{ratios[0]:.2f}", peer_of(name, work), goal_of(name, work)))
    ours, *others = [name for name in names if name == names[0] or not name.startswith("esper")]
    return rows, [
        Row(f"{figure}, {what}", medians[ours][figure], ", ".join(f"{peer_of(name, work)} {medians[name][figure]}" for name in others))
        for figure in medians[ours]
    ]


def peer_of(name: str, work: Work) -> str:
    """Return the contender's name on the page."""
    return PEERS[name].replace("Stable-Baselines3", "sb3-contrib") if work.lstm_size else PEERS[name]


def goal_of(name: str, work: Work) -> str:
    """Return the goal for the ratio to that contender, as the page writes it; empty without a goal."""
    if work.lstm_size:
        return "2.5" if name == "rsl_rl" else ""
    if work.num_envs == 8:
        return "2.5" if name in ("sb3", "cleanrl", "rsl_rl") else ""
    return "2" if work.num_envs == 64 and (name == "rsl_rl" or name.endswith(", native")) else ""


def median_of(runs: list[Run], field: str) -> float:
    """Return the median of a field."""
    median: float = statistics.median(getattr(run, field) for run in runs)
    return median


def contenders(options: argparse.Namespace) -> list[str]:
    """Return the contenders: the bundled trainer first, then the installed ones."""
    if options.telemetry:
        return ["esper", "esper + telemetry", "esper + busy core"]
    theirs = "sb3_contrib" if options.lstm else "stable_baselines3"
    peers = {"sb3": theirs, "sb3, native": theirs, "rsl_rl": "rsl_rl"}
    found = [name for name, module in peers.items() if importlib.util.find_spec(module)]
    first = ["esper, one LSTM", "esper"] if options.lstm else ["esper"]
    if not options.lstm:
        found += ["cleanrl", "cleanrl, native"] if options.cleanrl else []
        found += ["purejaxrl", "purejaxrl, with compilation"] if options.purejaxrl else []
    return [*first, *found]


def work_of(options: argparse.Namespace, num_envs: int, lstm_size: int | None) -> Work:
    """Return the work for that many environments: whole rollouts, and enough of them to measure a speed."""
    work = Work(0, 0, num_envs, lstm_size=lstm_size, script=options.cleanrl, purejaxrl=options.purejaxrl, jax_python=options.jax_python)
    rollout = num_envs * work.num_steps
    return replace(work, steps=rollout * max(LEAST_ROLLOUTS, -(-options.steps // rollout)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps per run")
    parser.add_argument("--rounds", type=int, default=5, help="runs per contender")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8], help="environments that step together; a table for each number")
    parser.add_argument("--lstm", type=int, nargs="+", metavar="SIZE", help="compare recurrent policies; a table for each size of the LSTM")
    parser.add_argument("--cleanrl", metavar="PATH", help="CleanRL's ppo.py")
    parser.add_argument("--purejaxrl", metavar="DIR", help="PureJaxRL's folder with ppo.py and wrappers.py")
    parser.add_argument("--jax-python", default=sys.executable, help="the Python that has JAX")
    parser.add_argument("--telemetry", action="store_true", help="compare telemetry with none, instead of trainers")
    parser.add_argument("--only", nargs="*", help="these contenders alone")
    parser.add_argument("--save", action="store_true", help="put the ratios into docs/benchmarks.json")
    parser.add_argument("--cores", help="pin every process to these cores, as taskset writes them")
    parser.add_argument("--contender", choices=sorted(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(asdict(CONTENDERS[options.contender](Work(**json.loads(options.work))))))
        return
    names = [name for name in contenders(options) if not options.only or name in options.only]
    for num_envs, lstm_size in itertools.product(options.num_envs, options.lstm or [None]):
        work = work_of(options, num_envs, lstm_size)
        speeds, results = compare(names, work, rounds=options.rounds, cores=options.cores)
        if options.save and not options.telemetry:
            key = "purejaxrl" if options.purejaxrl else "trainer"
            save(key, speeds)
            save(f"{key}_returns", results)


if __name__ == "__main__":
    main()
