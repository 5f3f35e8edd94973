"""A custom metric: a frozen group whose fields declare what they report, observed from a hook of the trainer.

python examples/custom_metric.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from esper_telemetry import PPO, Max, Mean, Metric, MetricGroup, PPOConfig, Telemetry, attach, make_env, read_run, reports
from esper_telemetry.events import RolloutEnd


@dataclass(frozen=True, slots=True)
class Surprise(MetricGroup):
    """Distance between single rewards and the critic's expectation of the step."""

    mean: Mean = reports(Metric(key="surprise/mean", unit="reward", question="How wrong is one step's expectation?"))
    worst: Max = reports(Metric(key="surprise/worst", unit="reward", question="How large is the largest one?"))


def surprise(event: RolloutEnd) -> Surprise:
    """Return the group of the temporal-difference errors [T, B] of a rollout."""
    error = (event.rewards + event.gamma * event.next_values - event.values).abs().double()
    return Surprise(mean=Mean(error.sum(), float(error.numel())), worst=Max(error.max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=20_480)
    parser.add_argument("--run-dir", help="a new runs/custom-metric-<time> by default")
    options = parser.parse_args()
    with Telemetry(run_dir=options.run_dir or "auto", name="custom-metric") as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1))
        trainer.hooks.on(RolloutEnd, lambda event: telemetry.observe(surprise(event)))
        attach(telemetry, trainer)
        telemetry.log({"my/threads": torch.get_num_threads()})
        trainer.learn(options.total_steps)
    assert telemetry.run_dir is not None
    last = read_run(telemetry.run_dir).records[-1]
    print({key: round(value, 3) for key, value in last.values.items() if key.startswith("surprise/")})


if __name__ == "__main__":
    main()
