"""A task that needs memory: CartPole-v1 without velocities, first with an LSTM, then without.

python examples/memory.py
"""

from collections import deque
from statistics import fmean

from esper_telemetry import PPO, Telemetry, attach, make_env
from esper_telemetry.events import EpisodeEnd
from esper_telemetry.ppo import preset

TASK = "CartPole-v1"


def final_return(policy: str) -> float:
    chosen = preset(TASK, policy, mask_velocity=True)
    env = make_env(TASK, num_envs=chosen.num_envs, seed=1, mask_velocity=True)
    returns: deque[float] = deque(maxlen=100)
    with Telemetry(["console"], run_dir=None) as telemetry:
        trainer = PPO(env, chosen.config(seed=1))
        attach(telemetry, trainer)
        trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
        trainer.learn(60_000)
    return fmean(returns)


if __name__ == "__main__":
    for policy in ("lstm", "mlp"):
        print(f"{policy}: mean return of the last 100 episodes {final_return(policy):.0f}")
