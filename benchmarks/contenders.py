"""Trainers on the same work, one function each, which runs in its own process; see `trainer.py`."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ENVIRONMENT = "CartPole-v1"


OPENING_SECONDS = 8.0
"""Time for the worker and sink processes to import and open three backends."""


@dataclass(frozen=True)
class Work:
    """The work of every contender: CartPole-v1, with networks of 64 x 64 tanh, after an LSTM if `lstm_size` is given.

    With `scaled_rewards` the bundled trainer divides rewards by the spread of returns; the others do not have this setting. `steps` is a
    multiple of a rollout's, because trainers round it up or down.
    """

    steps: int
    seed: int
    num_envs: int = 8
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 1e-3
    lstm_size: int | None = None
    scaled_rewards: bool = False
    script: str | None = None
    purejaxrl: str | None = None
    jax_python: str = sys.executable


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        cpu, wall: environment steps per CPU-second and per second of wall time in `learn`.
        episode_return: at its end.
        megabytes: peak memory of the process.
        per_minibatch, per_update: microseconds of telemetry on the training thread, if measured; the two do not overlap.
        update: microseconds of a whole update, if measured.
    """

    cpu: float
    wall: float
    episode_return: float
    megabytes: float
    per_minibatch: float | None = None
    per_update: float | None = None
    update: float | None = None


def measured(learn: Callable[[], int], returns: deque[float]) -> Run:
    """Time `learn`, which returns its environment steps."""
    cpu, wall = time.process_time(), time.perf_counter()
    steps = learn()
    return run_of(steps, time.process_time() - cpu, time.perf_counter() - wall, returns)


def run_of(steps: int, cpu: float, wall: float, returns: deque[float]) -> Run:
    """Return a run of that many seconds."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Run(steps / cpu, steps / wall, statistics.fmean(returns) if returns else float("nan"), peak)


def esper(work: Work) -> Run:
    """The bundled trainer without telemetry."""
    trainer, returns = ours(work)
    return measured(lambda: trained(trainer, work.steps), returns)


def trained(trainer: Any, steps: int) -> int:
    """Train for that many more steps, up to the end of a rollout, and return their number.

    The bundled trainer does not count rows in which environments are reset. Stable-Baselines3 and RSL-RL do, on native environments.
    """
    before = int(trainer.env_steps)
    trainer.learn(before + steps)
    return int(trainer.env_steps) - before


def tuned(work: Work) -> Run:
    """The bundled trainer with one LSTM for actor and critic and normalised observations and rewards, as in the presets."""
    trainer, returns = ours(work, shared_trunk=True, normalize_observations=True, normalize_rewards=True)
    return measured(lambda: trained(trainer, work.steps), returns)


def observed(work: Work) -> Run:
    """The bundled trainer with NORMAL telemetry to TensorBoard, W&B (offline) and MLflow.

    The clock starts after the backends have been imported and opened, which takes some seconds on the other core, and stops before they
    close.
    """
    trainer, returns = ours(work)
    with attached(trainer):
        trainer.learn(1)
        time.sleep(OPENING_SECONDS)
        return measured(lambda: trained(trainer, work.steps), returns)


def certified(work: Work) -> Run:
    """The same with a clock around telemetry's work on the training thread: building events and calling their listeners.

    Steps per second are too noisy to show the effect.
    """
    from clocked_hooks import ClockedHooks

    clock = ClockedHooks()
    trainer, returns = ours(work, hooks=clock)
    with attached(trainer):
        trainer.learn(1)
        time.sleep(OPENING_SECONDS)
        clock.forget()
        updates, steps = -trainer.updates, -trainer.env_steps
        run = measured(lambda: trained(trainer, work.steps), returns)
        updates, steps = updates + trainer.updates, steps + trainer.env_steps
    often, seldom = (1e6 * seconds for seconds in clock.seconds())
    return replace(
        run,
        per_minibatch=often / (updates * work.epochs * work.minibatches),
        per_update=seldom / updates,
        update=1e6 * steps / run.cpu / updates,
    )


@contextmanager
def attached(trainer: Any) -> Iterator[None]:
    """NORMAL telemetry to TensorBoard, W&B (offline) and MLflow."""
    from esper_telemetry import Telemetry, attach
    from esper_telemetry.sinks.mlflow.mlflow_sink import MLflowSink
    from esper_telemetry.sinks.tensorboard.tensorboard_sink import TensorBoardSink
    from esper_telemetry.sinks.wandb.wandb_sink import WandbSink

    with tempfile.TemporaryDirectory() as directory:
        backends = (TensorBoardSink(), WandbSink(project="benchmark"), MLflowSink())
        with Telemetry(backends, run_dir=Path(directory) / "run") as telemetry:
            attach(telemetry, trainer)
            yield


def disturbed(work: Work) -> Run:
    """The bundled trainer without telemetry, next to a process that only counts: the cost of any work on the second core.

    The cores of a virtual machine are often two threads of one core, which share its units and caches.
    """
    trainer, returns = ours(work)
    with subprocess.Popen([sys.executable, "-c", "import os, itertools; os.nice(19); all(itertools.count(1))"]) as busy:
        try:
            return measured(lambda: trained(trainer, work.steps), returns)
        finally:
            busy.kill()


def ours(work: Work, *, hooks: Any = None, **settings: Any) -> tuple[Any, deque[float]]:
    """Return the bundled trainer with these hooks, if any, and the returns of its latest episodes."""
    from esper_telemetry.events import EpisodeEnd
    from esper_telemetry.ppo import PPO, PPOConfig
    from esper_telemetry.ppo.environments.environment_registry import make_env

    config = PPOConfig(
        num_steps=work.num_steps,
        num_epochs=work.epochs,
        num_minibatches=work.minibatches,
        learning_rate=work.learning_rate,
        anneal_learning_rate=False,
        policy="lstm" if work.lstm_size else "mlp",
        lstm_size=work.lstm_size or 64,
        seed=work.seed,
        **{"normalize_rewards": work.scaled_rewards, **settings},
    )
    trainer = PPO(make_env(ENVIRONMENT, num_envs=work.num_envs, seed=work.seed), config)
    trainer.hooks = hooks or trainer.hooks
    returns: deque[float] = deque(maxlen=100)
    trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
    return trainer, returns


def stable_baselines(work: Work, *, native: bool = False) -> Run:
    """Stable-Baselines3, or sb3-contrib's RecurrentPPO, with the default vector environment and monitor, and without a logger.

    With `native` they step Gymnasium's vector implementation instead.
    """
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecEnv

    settings: dict[str, Any] = {
        "n_steps": work.num_steps,
        "batch_size": work.num_envs * work.num_steps // work.minibatches,
        "n_epochs": work.epochs,
        "learning_rate": work.learning_rate,
        "seed": work.seed,
        "device": "cpu",
    }
    env: VecEnv
    if native:
        from sb3_vector import NativeVecEnv

        env = NativeVecEnv(work.num_envs, work.seed)
    else:
        env = make_vec_env(ENVIRONMENT, work.num_envs, seed=work.seed)
    if work.lstm_size is None:
        from stable_baselines3 import PPO

        model: Any = PPO("MlpPolicy", env, **settings)
    else:
        from sb3_contrib import RecurrentPPO

        model = RecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": work.lstm_size}, **settings)
    returns: deque[float] = deque(maxlen=100)

    def learn() -> int:
        model.learn(work.steps)
        returns.extend(episode["r"] for episode in model.ep_info_buffer or ())
        return work.steps

    return measured(learn, returns)


def rsl_rl(work: Work) -> Run:
    """RSL-RL on Gymnasium's vector implementation. It lacks a categorical head, so the sign of a Gaussian action chooses."""
    from rsl_rl.runners import OnPolicyRunner
    from rsl_vector import SignedCartPole

    model: dict[str, Any] = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    if work.lstm_size is not None:
        model |= {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": work.lstm_size, "rnn_num_layers": 1}
    settings = {
        "num_steps_per_env": work.num_steps,
        "save_interval": 10**9,
        "check_for_nan": False,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": dict(model),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": work.epochs,
            "num_mini_batches": work.minibatches,
            "learning_rate": work.learning_rate,
            "schedule": "fixed",
            "value_loss_coef": 0.5,
            "entropy_coef": 0.0,
            "max_grad_norm": 0.5,
        },
    }
    env = SignedCartPole(work.num_envs, work.seed)
    with redirect_stdout(sys.stderr):
        runner = OnPolicyRunner(env, settings, log_dir=None, device="cpu")

    def learn() -> int:
        runner.learn(work.steps // (work.num_envs * work.num_steps))
        return work.steps

    return measured(learn, env.returns)


def cleanrl(work: Work, *, native: bool = False) -> Run:
    """CleanRL's unedited `ppo.py`; the clock starts at its first reset, and stops after it has closed its environments."""
    import cleanrl_script

    assert work.script is not None
    options: dict[str, object] = {
        "total-timesteps": work.steps,
        "num-envs": work.num_envs,
        "num-steps": work.num_steps,
        "num-minibatches": work.minibatches,
        "update-epochs": work.epochs,
        "learning-rate": work.learning_rate,
        "seed": work.seed,
        "env-id": ENVIRONMENT,
    }
    watch = cleanrl_script.run(work.script, options, native=native)
    return run_of(work.steps, *watch.elapsed(), watch.returns)


def purejaxrl(work: Work, *, count_compilation: bool = False) -> Run:
    """PureJaxRL's `ppo.py` under the Python with JAX; the clock starts before or after its compilation."""
    script = Path(__file__).with_name("purejaxrl.py")
    command = [work.jax_python, str(script), "--work", json.dumps(asdict(work))]
    done = subprocess.run(
        [*command, *(["--count-compilation"] if count_compilation else [])], stdout=subprocess.PIPE, text=True, check=True
    )
    return Run(**json.loads(done.stdout.splitlines()[-1]))


CONTENDERS: dict[str, Callable[[Work], Run]] = {
    "esper": esper,
    "esper, one LSTM": tuned,
    "esper + telemetry": observed,
    "esper + telemetry, clocked": certified,
    "esper + busy core": disturbed,
    "sb3": stable_baselines,
    "sb3, native": partial(stable_baselines, native=True),
    "rsl_rl": rsl_rl,
    "cleanrl": cleanrl,
    "cleanrl, native": partial(cleanrl, native=True),
    "purejaxrl": purejaxrl,
    "purejaxrl, with compilation": partial(purejaxrl, count_compilation=True),
}
