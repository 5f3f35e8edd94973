"""What `TelemetryCallback` costs Stable-Baselines3: processor time with it over that without.

    python benchmarks/adapters.py                        # five models, forty turns; fifteen minutes
    python benchmarks/adapters.py ppo --turns 80

At NORMAL with TensorBoard, W&B (offline) and MLflow. Models with and without train in turns of a second or two (`turns.py`), each in a
process of its own with one torch thread; figures are medians of the turns' ratios, and between what the middle half of these lies.
`thread` is the training thread's processor time, which telemetry slows training by; `process` that of all threads of the process.
Summaries and backends have processes of their own, on another core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import turns

SINKS = ("tensorboard", "wandb:overhead?mode=offline", "mlflow")
LIMIT = 1.05


def ppo() -> Any:
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu")


def ppo_pendulum() -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("Pendulum-v1", 8, seed=1)
    return PPO("MlpPolicy", env, n_steps=256, batch_size=128, seed=1, device="cpu")


def a2c() -> Any:
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_vec_env

    return A2C("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=1), n_steps=64, seed=1, device="cpu")


def recurrent_ppo() -> Any:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("CartPole-v1", 8, seed=1)
    return RecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 64}, seed=1, device="cpu")


def maskable_ppo() -> Any:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_util import make_vec_env

    from esper_telemetry.faults.sb3.beds import MaskedArms

    return MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 8, seed=1), n_steps=256, seed=1, device="cpu")


MODELS: Mapping[str, tuple[Callable[[], Any], int]] = {
    "ppo": (ppo, 1),
    "ppo_pendulum": (ppo_pendulum, 1),
    "a2c": (a2c, 8),
    "recurrent_ppo": (recurrent_ppo, 1),
    "maskable_ppo": (maskable_ppo, 1),
}
"""Each model with the rollouts of a turn."""
WARM_UP_TURNS = 5


def serve(name: str, watched: bool) -> None:
    """Trains in turns, in this process."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    from esper_telemetry import Telemetry
    from esper_telemetry.adapters.sb3 import TelemetryCallback

    make, rollouts = MODELS[name]

    class Turn(BaseCallback):
        """Trains on only when it is its turn."""

        def __init__(self) -> None:
            super().__init__()
            self._own = turns.Turns()
            self._rollouts = 0
            self._wanted = True

        def _on_rollout_start(self) -> None:
            if self._rollouts % rollouts == 0:
                self._wanted = self._own.next()
            self._rollouts += 1

        def _on_step(self) -> bool:
            return self._wanted

    model = make()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        Telemetry(
            SINKS if watched else (), run_dir=f"{directory}/run", level="normal" if watched else "off"
        ) as telemetry,
    ):
        model.learn(10**9, callback=[*([TelemetryCallback(telemetry)] if watched else []), Turn()])


def compare(name: str, count: int) -> dict[str, Any]:
    """Figures of one model."""
    command = [sys.executable, "-W", "ignore", __file__, "--alone", name]
    contenders = {kind: turns.Contender([*command, int(kind == "watched")]) for kind in ("bare", "watched")}
    found = turns.in_turns(contenders, count, WARM_UP_TURNS)
    return {
        "model": name,
        "seconds": statistics.median(one["thread"] for one in found["bare"]),
        **{kind: turns.ratio(found["watched"], found["bare"], kind) for kind in ("thread", "process", "wall")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--turns", type=int, default=40, help="of both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"a model is one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if options.alone:
        serve(options.alone[0], options.alone[1] == "1")
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    found = []
    print(f"{'model':>14} {'s bare':>7} {'thread':>22} {'process':>22} {'wall':>22}   goal: thread <= {LIMIT}")
    for name in options.models or MODELS:
        row = compare(name, options.turns)
        found.append(row)
        print(
            f"{name:>14} {row['seconds']:7.2f} {row['thread']!s:>22} {row['process']!s:>22} {row['wall']!s:>22}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
