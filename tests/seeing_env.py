"""Small environments with images among their observations, alone or with other parts."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

QUARTERS = 4


class Spotlight(gymnasium.Env[Any, Any]):
    """Naming the lit quarter of the image pays 1, so a guess pays 0.25 on average. Episodes are truncated after `length` steps.

    With `parts` the observation is a Dict: a Discrete `shift` rotates the right answer by that many quarters, and a vector holds the time.
    """

    def __init__(self, shape: tuple[int, int, int] = (8, 8, 1), dtype: str = "uint8", *, parts: bool = False, length: int = 8) -> None:
        self.image = spaces.Box(0, 255 if dtype == "uint8" else 1, shape, np.dtype(dtype).type)
        shift = spaces.Discrete(2, start=3)
        time = spaces.Box(0.0, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict(image=self.image, shift=shift, time=time) if parts else self.image
        self.action_space = spaces.Discrete(QUARTERS)
        self.parts, self.length, self.count, self.lit, self.shift = parts, length, 0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == (self.lit + self.shift) % QUARTERS)
        self.count += 1
        return self._observe(), reward, False, self.count >= self.length, {}

    def _observe(self) -> Any:
        self.lit = int(self.np_random.integers(QUARTERS))
        shape = self.image.shape
        height, width = (side for axis, side in enumerate(shape) if axis != int(np.argmin(shape)))
        plane = np.zeros((height, width), self.image.dtype)
        row, column = divmod(self.lit, 2)
        half = (height // 2, width // 2)
        plane[row * half[0] : (row + 1) * half[0], column * half[1] : (column + 1) * half[1]] = self.image.high.max()
        image = np.broadcast_to(np.expand_dims(plane, int(np.argmin(shape))), shape).copy()
        if not self.parts:
            return image
        self.shift = int(self.np_random.integers(2))
        return {"image": image, "shift": np.int64(self.shift + 3), "time": np.array([self.count], np.float32)}


def spotlights(mode: AutoresetMode, *, parts: bool, lengths: tuple[int, ...] = (3, 5)) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Spotlight, parts=parts, length=length) for length in lengths], autoreset_mode=mode)


def register() -> None:
    makers: dict[str, Any] = {"Spotlight-v0": Spotlight, "SpotlightParts-v0": partial(Spotlight, parts=True)}
    for name, maker in makers.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, maker)


register()
