"""A task that needs memory: CartPole-v1 without velocities, first with an LSTM, then without.

python examples/memory.py
"""

from __future__ import annotations

import argparse
from collections import deque
from statistics import fmean

from esper_telemetry import PPO, Telemetry, attach, make_env
from esper_telemetry.events import EpisodeEnd
from esper_telemetry.ppo import preset

TASK = "CartPole-v1"


def final_return(policy: str, total_steps: int) -> float:
    tuned = preset(TASK, policy, mask_velocity=True)
    env = make_env(TASK, num_envs=tuned.num_envs, seed=1, mask_velocity=True)
    returns: deque[float] = deque(maxlen=100)
    with Telemetry(["console"], run_dir=None) as telemetry:
        trainer = PPO(env, tuned.config(seed=1))
        attach(telemetry, trainer)
        trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
        trainer.learn(total_steps)
    return fmean(returns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=30_000, help="of each policy")
    options = parser.parse_args()
    for policy in ("lstm", "mlp"):
        mean = final_return(policy, options.total_steps)
        print(f"{policy}: mean return of the last 100 episodes {mean:.0f}")


if __name__ == "__main__":
    main()
