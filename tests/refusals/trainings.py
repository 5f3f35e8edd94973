"""Three small trainings, each with telemetry or without, and their final weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper_telemetry import PPO, PPOConfig, make_env
from esper_telemetry.events import UpdateEnd

if TYPE_CHECKING:
    from esper_telemetry import Telemetry  # cannot be imported on a simulated system

UPDATES = 6
MIDDLE = 3
"""A resource is refused after this update."""

Middle = Callable[[], None]


def digest(tensors: Iterable[Tensor]) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


def bundled(telemetry: Telemetry | None, middle: Middle) -> str:
    trainer = PPO(make_env("CartPole-v1", num_envs=2), PPOConfig(num_steps=32, num_epochs=2, seed=3))
    if telemetry is not None:
        from esper_telemetry import attach

        attach(telemetry, trainer)
    trainer.hooks.on(UpdateEnd, lambda event: middle() if event.update == MIDDLE else None, last=True)
    trainer.learn(total_steps=UPDATES * 64)
    return digest(trainer.policy.state_dict().values())


def own_loop(telemetry: Telemetry | None, middle: Middle) -> str:
    torch.manual_seed(3)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if telemetry is not None:
        telemetry.watch(model, optimizer)
    for update in range(1, 5 * UPDATES + 1):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if telemetry is not None:
            telemetry.log({"my/loss": loss.item()})
            telemetry.flush(env_step=16 * update)
        if update == MIDDLE:
            middle()
    return digest(model.state_dict().values())


def sb3(telemetry: Telemetry | None, middle: Middle) -> str:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    class Middles(BaseCallback):
        rollouts = 0

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            self.rollouts += 1
            if self.rollouts == MIDDLE + 1:
                middle()

    callbacks: list[Any] = [Middles()]
    if telemetry is not None:
        from esper_telemetry.adapters.sb3 import TelemetryCallback

        callbacks.append(TelemetryCallback(telemetry))
    model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=1, seed=3, device="cpu")
    model.learn(UPDATES * 64, callback=callbacks)
    return digest(model.policy.state_dict().values())


TRAININGS: dict[str, Callable[[Telemetry | None, Middle], str]] = {"bundled": bundled, "own_loop": own_loop, "sb3": sb3}


def nothing() -> None:
    """Refuse nothing in the middle of a training."""
