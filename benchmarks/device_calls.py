"""GPU operations that telemetry starts on the training thread, counted without a GPU: `python benchmarks/device_calls.py [--save]`.

Tensors pretend to be on a GPU (`tests/pretended_gpu.py`). The count is the number of calls that would start GPU work in an update that is
not sampled, with telemetry minus without; views start no work. `waits` are reads of a number, which wait for the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import Row, save

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "adapters")]

from pretended_gpu import DeviceCalls, PretendedGPU, pretended_gpu  # noqa: E402  # of the tests

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env  # noqa: E402
from esper_telemetry.pipeline.sampling import Sampling  # noqa: E402

UPDATES, WARM_UPDATES = 4, 3
GOAL = "250"

Train = Callable[[int], object]


def bundled(telemetry: Telemetry, **settings: Any) -> Train:
    """Return a function that trains the bundled trainer for that many updates: 5 epochs of 4 minibatches."""
    config = PPOConfig(num_steps=16, num_epochs=5, num_minibatches=4, hidden_sizes=(8,), **settings)
    trainer = PPO(make_env("CartPole-v1", num_envs=4, seed=0), config, device="cuda")
    attach(telemetry, trainer)
    return lambda updates: trainer.learn(trainer.env_steps + 64 * updates)


def rsl_rl(telemetry: Telemetry) -> Train:
    """Return a function that trains an RSL-RL runner."""
    import rsl_rl_models

    from esper_telemetry.adapters.rsl_rl import attach_runner

    runner = rsl_rl_models.runner(device="cuda")
    attach_runner(telemetry, runner)
    return lambda updates: rsl_rl_models.learn(runner, updates)


def sb3(telemetry: Telemetry) -> Train:
    """Return a function that trains Stable-Baselines3's PPO: 5 epochs of 4 minibatches."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    from esper_telemetry.adapters.sb3 import TelemetryCallback

    env = make_vec_env("CartPole-v1", 4, seed=0)
    model = stable_baselines3.PPO("MlpPolicy", env, n_steps=16, n_epochs=5, batch_size=16, device="cuda", seed=0)
    callback = TelemetryCallback(telemetry)
    return lambda updates: model.learn(64 * updates, callback=callback, reset_num_timesteps=False)


TRAINERS: dict[str, tuple[str, Callable[[Telemetry], Train]]] = {
    "bundled trainer, MLP": ("torch", bundled),
    "bundled trainer, LSTM": ("torch", lambda telemetry: bundled(telemetry, policy="lstm", lstm_size=8)),
    "Stable-Baselines3": ("stable_baselines3", sb3),
    "RSL-RL": ("rsl_rl", rsl_rl),
}


def counted(prepare: Callable[[Telemetry], Train], level: str) -> tuple[float, float]:
    """Return the operations and waits of an update."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pretended_gpu() as gpu,
        Telemetry(run_dir=Path(folder) / "run", level=level, detect=False) as telemetry,
    ):
        train = prepare(telemetry)
        train(WARM_UPDATES)
        before = waits(gpu)
        with DeviceCalls() as calls:
            train(UPDATES)
        return calls.count / UPDATES, (waits(gpu) - before) / UPDATES


def waits(gpu: PretendedGPU) -> int:
    """Return the number of reads from the device so far."""
    return sum(gpu.reads.values())


def main() -> None:
    """Count, print, and save if `--save` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="put the counts into docs/benchmarks.json")
    options = parser.parse_args()
    logging.getLogger("esper_telemetry").setLevel(logging.ERROR)
    Sampling.begin = lambda self, **_: False  # type: ignore[method-assign]  # no update is sampled
    rows = []
    for name, (package, prepare) in TRAINERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not installed")
            continue
        calls, reads = counted(prepare, "off")
        for level in ("minimal", "normal"):
            more_calls, more_reads = (now - then for now, then in zip(counted(prepare, level), (calls, reads), strict=True))
            rows.append(Row(f"{name}, {level}", f"{more_calls:.0f}", f"{calls:.0f}", GOAL))
            print(f"{name}, {level}: {more_calls:.0f} operations more than {calls:.0f}, {more_reads:.1f} waits more")
    if options.save:
        save("device_calls", rows)


if __name__ == "__main__":
    main()
