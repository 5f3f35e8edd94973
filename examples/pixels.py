"""A custom environment with an image in its observations, and two kinds of actions.

There is a lamp at a random place in a dark room of 16x16 pixels. Half of the reward is for naming the side of the room
with the lamp, the other half for pointing at its height. The camera may be upside down, and the observation says whether
it is. The networks configure themselves: the image goes through convolutions, the rest through a layer, and every part
of the action has a separate head.

python examples/pixels.py
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env

PIXELS, STEPS = 16, 10


class Lamp(gymnasium.Env[Any, Any]):
    observation_space = spaces.Dict(camera=spaces.Box(0, 255, (PIXELS, PIXELS, 1), np.uint8), upside_down=spaces.Discrete(2))
    action_space = spaces.Dict(side=spaces.Discrete(2), height=spaces.Box(0.0, 1.0, (1,), np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right_side = action["side"] == (self.column >= PIXELS // 2)
        miss = abs(float(action["height"][0]) - self.row / (PIXELS - 1))
        self.steps += 1
        return self.look(), 0.5 * float(right_side) + 0.5 * (1 - miss), False, self.steps == STEPS, {}

    def look(self) -> dict[str, Any]:
        self.row, self.column, turned = self.np_random.integers((PIXELS, PIXELS, 2))
        room = np.zeros((PIXELS, PIXELS, 1), np.uint8)
        room[self.row, self.column] = 255
        return {"camera": room[::-1, ::-1] if turned else room, "upside_down": turned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--run-dir", default=None)
    options = parser.parse_args()
    gymnasium.register("Lamp-v0", lambda **settings: Lamp())
    env = make_env("Lamp-v0", num_envs=16, seed=1)
    config = PPOConfig(seed=1, num_steps=64, num_epochs=4, learning_rate=1e-3, gamma=0.0, log_std=-1.0, squash=True)
    with Telemetry(["console"], run_dir=options.run_dir or "auto") as telemetry:
        trainer = PPO(env, config)
        attach(telemetry, trainer)
        trainer.learn(options.total_steps)


if __name__ == "__main__":
    main()
