"""PureJaxRL's `ppo.py`, which compiles environments and training into one program, as a contender of `trainer.py`.

    git clone https://github.com/luchris429/purejaxrl
    python -m venv jax && jax/bin/pip install jax flax distrax optax gymnax==0.0.8
    python benchmarks/trainer.py --purejaxrl purejaxrl/purejaxrl --jax-python jax/bin/python

This file runs under the Python with JAX, so it does not import this package. The script is unedited. It dates from 2024 and needs
`jax.tree_map`, which JAX has renamed and which is restored here, and Brax and Navix, which CartPole does not use and which are empty here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

EMPTY = {
    "brax": ("envs",),
    "brax.envs": (),
    "brax.envs.wrappers": (),
    "brax.envs.wrappers.training": ("EpisodeWrapper", "AutoResetWrapper"),
    "navix": (),
}
"""Modules that `wrappers.py` imports for other environments, and the names it imports."""

RECENT_EPISODES = 100


def settings(work: dict[str, Any]) -> dict[str, Any]:
    """Return PureJaxRL's settings for the work of `contenders.Work`."""
    return {
        "LR": work["learning_rate"],
        "NUM_ENVS": work["num_envs"],
        "NUM_STEPS": work["num_steps"],
        "TOTAL_TIMESTEPS": work["steps"],
        "UPDATE_EPOCHS": work["epochs"],
        "NUM_MINIBATCHES": work["minibatches"],
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.0,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": False,
        "DEBUG": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=json.loads, required=True)
    parser.add_argument("--count-compilation", action="store_true")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    sys.path.insert(0, options.work["purejaxrl"])
    for name, members in EMPTY.items():
        sys.modules[name] = ModuleType(name)
        for member in members:
            setattr(sys.modules[name], member, None)
    jax: Any = import_module("jax")
    jax.tree_map = jax.tree.map
    ppo: Any = import_module("ppo")
    key = jax.random.PRNGKey(options.work["seed"])
    begun = time.process_time(), time.perf_counter()
    train = jax.jit(ppo.make_train(settings(options.work))).lower(key).compile()
    if not options.count_compilation:
        begun = time.process_time(), time.perf_counter()
    metrics = jax.block_until_ready(train(key))["metrics"]
    cpu, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
    returns = metrics["returned_episode_returns"][metrics["returned_episode"]][-RECENT_EPISODES:]
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = options.work["steps"]
    run = {"cpu": steps / cpu, "wall": steps / wall, "episode_return": float(returns.mean()), "megabytes": megabytes}
    print(json.dumps(run))


if __name__ == "__main__":
    main()
