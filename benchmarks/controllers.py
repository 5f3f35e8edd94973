"""Quality of controllers that grow networks: final scores and PPO's learning curve, over several seeds.

python benchmarks/controllers.py [--tasks synthetic digits text] [--policies lstm oracle heuristic random] [--seeds 5] [--updates 40]

The score of an episode is the validation accuracy minus the price of the seeds' parameters, over the hosts of 16 environments. The score
of a run is the mean of its last four episodes. Tables show the median over seeds, the range in brackets, and processor seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from esper_telemetry import PPO
from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthStep
from esper_telemetry.ppo.config import preset

LAST, BLOCK = 4, 5
"""Number of last episodes that give a run's score, and of PPO updates in a block of its curve."""


def learned(task: str, policy: str, seed: int, updates: int) -> list[float]:
    """Return the score of every episode of PPO, one per update."""
    found, scores = preset("morphogenesis", policy), list[float]()
    trainer = PPO(Morphogenesis(found.num_envs, task=task), found.config(seed=seed))

    def keep(event: GrowthStep) -> None:
        if event.last:
            scores.append(float(event.hosts["score"].mean()))

    trainer.hooks.on(GrowthStep, keep)
    trainer.learn(updates * trainer.config.num_steps * found.num_envs)
    return scores


def scripted(task: str, policy: str, seed: int) -> list[float]:
    """Return the scores of the last episodes."""
    env, choose, scores = Morphogenesis(16, task=task, seed=seed), SCRIPTS[policy](seed), list[float]()
    while len(scores) < LAST:
        if env.step(choose(env)).terminated.any():
            scores.append(float(env.score.mean()))
    return scores


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def compare(task: str, policy: str, seeds: int, updates: int) -> None:
    start, runs = time.process_time(), list[list[float]]()
    for seed in range(1, seeds + 1):
        runs.append(scripted(task, policy, seed) if policy in SCRIPTS else learned(task, policy, seed, updates))
        print(f"  {task} {policy} seed {seed}: {statistics.mean(runs[-1][-LAST:]):.3f}", flush=True)
    seconds = (time.process_time() - start) / seeds
    print(f"{task} {policy}: {summary([statistics.mean(run[-LAST:]) for run in runs])}, {seconds:.0f} s a run")
    if policy not in SCRIPTS:
        blocks = [[statistics.mean(run[at : at + BLOCK]) for run in runs] for at in range(0, len(runs[0]), BLOCK)]
        print("  in blocks of", BLOCK, *(f"{statistics.median(block):.3f}" for block in blocks), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["synthetic", "digits", "text"])
    parser.add_argument("--policies", nargs="+", default=["random", "heuristic", "oracle", "lstm"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in options.tasks:
        for policy in options.policies:
            compare(task, policy, options.seeds, options.updates)


if __name__ == "__main__":
    main()
