"""Processor time of other trainers with telemetry, relative to training without it: Stable-Baselines3, RSL-RL, skrl,
rl_games, RLlib, TorchRL, TRL and verl.

    python benchmarks/adapters.py                        # all models except trl that are installed, forty turns; half an hour
    python benchmarks/adapters.py ppo --turns 80
    python benchmarks/adapters.py rsl_rl rsl_rl_lstm skrl rl_games rllib torchrl torchrl_pendulum
    python benchmarks/adapters.py rsl_rl_cuda            # on a GPU
    python benchmarks/adapters.py trl --turns 5          # a language model of 105 million parameters; a quarter of an hour

Telemetry runs at NORMAL with TensorBoard, W&B (offline) and MLflow, if they are installed. Each model has its own process with one torch
thread, and trains in turns with and without telemetry: a second or two, or 16 updates for `trl`. Two processes with the same work would
differ by more than the effect.
Figures are medians of the turns' ratios, with the quartiles. `thread` is the processor time of the training thread, the slowdown of
training; `process` is the time of all threads of the process. The worker and the sink process run on another core.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import turns
from results import Row, save

sys.path.append(str(Path(__file__).parents[1] / "tests/adapters"))  # the small models of the tests

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb:overhead?mode=offline", "mlflow": "mlflow"}
"""Each sink, by the package that it needs."""

MAX_RATIO = 1.05


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

    from esper_telemetry.lab.faults.sb3_models import MaskedArms

    return MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 8, seed=1), n_steps=256, seed=1, device="cpu")


Turns: TypeAlias = "tuple[Callable[[], object], Callable[[], object]]"
"""Functions that train for a turn: without telemetry, and with it."""


def _sb3(make: Callable[[], Any], rollouts: int) -> Callable[[Any], Turns]:
    def turns_of(telemetry: Any) -> Turns:
        from esper_telemetry.adapters.sb3 import TelemetryCallback

        model, callback = make(), TelemetryCallback(telemetry)
        steps = rollouts * model.n_steps * model.n_envs

        def learn(callback: Any) -> None:
            model.learn(steps, callback=callback, reset_num_timesteps=False)

        return partial(learn, None), partial(learn, callback)

    return turns_of


def _rsl_rl(telemetry: Any, envs: int = 64, device: str = "cpu", widths: Sequence[int] = (128, 128), **settings: Any) -> Turns:
    """RSL-RL; without telemetry, `learn` is the class's method instead of the adapter's."""
    from rsl_rl.runners import OnPolicyRunner
    from rsl_rl_models import runner
    from rsl_vector import DeviceCartPole, SignedCartPole

    from esper_telemetry.adapters.rsl_rl import attach_runner

    env = SignedCartPole if device == "cpu" else DeviceCartPole
    model = runner(env, envs=envs, device=device, steps=24, num_learning_epochs=5, model_hidden_dims=[*widths], **settings)
    attach_runner(telemetry, model)

    def silent(learn: Callable[[int], object]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            learn(8)
        if device != "cpu":
            torch.cuda.synchronize()

    return partial(silent, partial(OnPolicyRunner.learn, model)), partial(silent, lambda count: model.learn(count))


def _skrl(telemetry: Any, envs: int = 64) -> Turns:
    """skrl, with a listener that stops between the turns."""
    from skrl_models import cartpole_env, skrl_agent

    from esper_telemetry.adapters.skrl import AgentListener

    model = skrl_agent(cartpole_env, "categorical", envs=envs, steps=24, widths=(128, 128), learning_epochs=5)
    listener = AgentListener(telemetry, model.agent)

    def observed() -> None:
        listener.start()
        model.learn(8)
        listener.stop()

    return partial(model.learn, 8), observed


def _rl_games(telemetry: Any, envs: int = 64) -> Turns:
    """rl_games, which trains until a number of updates; its agent without the tap on `train` is without telemetry."""
    import rl_games_models

    mlp = {**rl_games_models.MLP, "units": [128, 128]}
    settings = {"env": rl_games_models.CARTPOLE, "envs": envs, "steps": 24, "mini_epochs": 5, "mlp": mlp}
    algo = rl_games_models.train(settings, 1, telemetry)

    def train(learn: Callable[[], object]) -> None:
        algo.max_epochs = algo.epoch_num + 1024 // envs
        with contextlib.redirect_stdout(io.StringIO()):
            learn()

    return partial(train, partial(type(algo).train, algo)), partial(train, lambda: algo.train())


def _silent() -> Any:
    from esper_telemetry import Telemetry

    return Telemetry(run_dir=None, level="off")


def _rllib(telemetry: Any) -> Turns:
    """RLlib with a local learner, whose listener stops between the turns."""
    import ray
    import rllib_models

    from esper_telemetry.adapters.rllib import LearnerListener, attach_config

    os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise Ray writes a token to the home directory
    ray.init("local", include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    algorithm = attach_config(rllib_models.learning_config(), _silent).build_algo()
    learner = algorithm.learner_group._learner
    learner.telemetry, learner._listener = telemetry, LearnerListener(telemetry, learner)

    def train() -> None:
        for _ in range(3):
            algorithm.train()

    def observed() -> None:
        learner.call(LearnerListener.start)
        train()
        learner.call(LearnerListener.stop)

    return train, observed


def _torchrl(telemetry: Any, **settings: Any) -> Turns:
    """TorchRL's plain loop."""
    from torchrl_models import Program

    from esper_telemetry.adapters.torchrl import attach_loss

    program = Program(envs=8, steps=128, rows=256, epochs=10, updates=1_000_000, width=64, **settings)
    listener = attach_loss(telemetry, program.loss, program.optimizer, program.estimator)
    assert listener is not None
    listener.stop()
    batches = iter(program.collector)

    def observed() -> None:
        listener.start()
        program.learn_from(next(batches))
        listener.stop()

    return lambda: program.learn_from(next(batches)), observed


VERL_UPDATES = 2
"""Updates of verl in a turn."""


def _verl(telemetry: Any) -> Turns:
    """GRPO in verl, whose only worker is in this process: a Llama of 3 million parameters, 64 completions of at most 6 tokens."""
    from esper_telemetry.lab.verl_cpu import ENVIRONMENT

    os.environ |= {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled"}  # otherwise Ray writes a token to the home directory
    from esper_telemetry.adapters.verl import DriverListener
    from esper_telemetry.lab.small_language_model import save_model
    from esper_telemetry.lab.verl_cpu.verl_training import SamplingManager, cpu_config, local_ray, new_trainer

    stack = contextlib.ExitStack()
    stack.enter_context(local_ray())
    atexit.register(stack.close)
    config = cpu_config(save_model(Path(tempfile.mkdtemp()), seed=1, width=256, layers=4))
    trainer = new_trainer(config)
    manager = SamplingManager.create(config, trainer.get_llm_client())
    listener = DriverListener(telemetry, trainer, samples=True)

    def fit() -> None:
        trainer.total_training_steps = trainer.global_steps + VERL_UPDATES
        trainer.fit(manager)

    def observed() -> None:
        listener.start()
        fit()
        listener.stop()

    return fit, observed


LANGUAGE_UPDATES = 16
"""Updates of a language model in a turn. Telemetry compares gradients in one of them."""


def train_language_model(telemetry: Any, count: int) -> dict[str, list[turns.Figures]]:
    """Return the figures of every turn of GRPO in TRL: a Llama of 105 million parameters, 8 completions of at most 24 tokens.

    Training is one call of TRL, so a callback divides it into turns, and attaches or removes telemetry between two updates. All turns
    count: the first updates compare gradients most often.
    """
    import transformers

    from esper_telemetry.adapters.trl import TelemetryCallback
    from esper_telemetry.lab.language_models import build_trainer
    from esper_telemetry.lab.small_language_model import save_model

    figures: dict[str, list[turns.Figures]] = {"bare": [], "callback": []}
    observer = TelemetryCallback(telemetry)
    order = [kind for turn in range(count) for kind in sorted(figures, reverse=turn % 2 == 1)]

    class Alternation(transformers.TrainerCallback):  # type: ignore[misc]  # not typed if it is not installed
        def __init__(self) -> None:
            self._begun: tuple[float, ...] = ()
            self._turn = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (LANGUAGE_UPDATES * args.num_iterations) == 0:
                self._end()
                if order[self._turn] == "callback":
                    observer.on_train_begin(args, state, control)
                self._begun = turns.clocks()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._end()

        def _end(self) -> None:
            observer.detach()
            if self._begun:
                figures[order[self._turn]].append(turns.since(self._begun))
                self._turn += 1
                time.sleep(turns.PAUSE_SECONDS)

    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(
            save_model(Path(directory) / "model", seed=1, width=1024, layers=10),
            seed=1,
            steps=2 * len(order) * LANGUAGE_UPDATES,
            per_device_train_batch_size=8,
            max_completion_length=24,
            learning_rate=1e-5,
            callbacks=[Alternation(), observer],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return figures


MODELS: Mapping[str, Callable[[Any], Turns]] = {
    "ppo": _sb3(ppo, 1),
    "ppo_pendulum": _sb3(ppo_pendulum, 1),
    "a2c": _sb3(a2c, 32),
    "recurrent_ppo": _sb3(recurrent_ppo, 1),
    "maskable_ppo": _sb3(maskable_ppo, 1),
    "rsl_rl": _rsl_rl,
    "rsl_rl_1024": partial(_rsl_rl, envs=1024),
    "rsl_rl_lstm": partial(_rsl_rl, model="RNNModel", model_rnn_hidden_dim=64),
    "rsl_rl_cuda": partial(_rsl_rl, envs=4096, device="cuda", widths=(512, 256, 128)),  # as in Isaac Lab's tasks
    "skrl": _skrl,
    "skrl_1024": partial(_skrl, envs=1024),
    "rl_games": _rl_games,
    "rl_games_1024": partial(_rl_games, envs=1024),
    "rllib": _rllib,
    "verl": _verl,
    "torchrl": _torchrl,
    "torchrl_pendulum": partial(_torchrl, env="Pendulum-v1"),
}
"""Models by name: telemetry -> functions that train for a turn."""

LANGUAGE_MODEL = "trl"
"""The model of `train_language_model`, whose turns take more than a minute."""

NAMES = (*MODELS, LANGUAGE_MODEL)

PACKAGES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(MODELS, ("stable_baselines3", "sb3_contrib")),
    **dict.fromkeys((name for name in MODELS if name.startswith("rsl_rl")), ("rsl_rl",)),
    **dict.fromkeys(("torchrl", "torchrl_pendulum"), ("torchrl",)),
    **dict.fromkeys(("skrl", "skrl_1024"), ("skrl",)),
    **dict.fromkeys(("rl_games", "rl_games_1024"), ("rl_games",)),
    "rllib": ("ray",),
    "verl": ("verl",),
    LANGUAGE_MODEL: ("trl",),
}
"""The package that a model needs."""

WARM_UP_TURNS = 5


def train(name: str, count: int, *, backends: bool) -> dict[str, list[turns.Figures]]:
    """Return the figures of every turn, in this process."""
    torch.set_num_threads(1)
    from esper_telemetry import Telemetry

    figures: dict[str, list[turns.Figures]] = {"bare": [], "callback": []}
    sinks = [sink for package, sink in SINKS.items() if backends and importlib.util.find_spec(package)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, Telemetry(sinks, run_dir=f"{directory}/run") as telemetry:
        if name == LANGUAGE_MODEL:
            return train_language_model(telemetry, count)
        functions = dict(zip(figures, MODELS[name](telemetry), strict=True))
        for turn in range(WARM_UP_TURNS + count):
            for kind in sorted(figures, reverse=turn % 2 == 1):
                time.sleep(turns.PAUSE_SECONDS)
                begun = turns.clocks()
                functions[kind]()
                if turn >= WARM_UP_TURNS:
                    figures[kind].append(turns.since(begun))
    return figures


def compare(name: str, count: int, *, backends: bool) -> dict[str, Any]:
    """Return the figures of one model, measured in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--alone", name, "--turns", str(count)]
    command += [] if backends else ["--no-backends"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {
        "model": name,
        "seconds": statistics.median(one["thread"] for one in figures["bare"]),
        **{kind: turns.ratio(figures["callback"], figures["bare"], kind) for kind in ("thread", "process", "wall")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(NAMES)}; all but {LANGUAGE_MODEL} by default")
    parser.add_argument("--turns", type=int, default=40, help="of both")
    parser.add_argument("--no-backends", action="store_true", help="write the journal alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--save", action="store_true", help="put the ratios into docs/benchmarks.json")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.models) - set(NAMES):
        parser.error(f"a model is one of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    if options.alone:
        print(json.dumps(train(options.alone, options.turns, backends=not options.no_backends)))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    rows = []
    print(f"{'model':>16} {'s bare':>7} {'thread':>22} {'process':>22} {'wall':>22}   goal: thread <= {MAX_RATIO}")
    for name in options.models or MODELS:
        if "cuda" in name and not torch.cuda.is_available():
            print(f"{name:>16} left out: it needs a GPU", flush=True)
            continue
        if missing := [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]:
            print(f"{name:>16} left out: {missing[0]} is not installed", flush=True)
            continue
        row = compare(name, options.turns, backends=not options.no_backends)
        rows.append(row)
        print(f"{name:>16} {row['seconds']:7.2f} {row['thread']!s:>22} {row['process']!s:>22} {row['wall']!s:>22}", flush=True)
    for table, figure, chosen in (
        ("adapters", "thread", [row for row in rows if "cuda" not in row["model"]]),
        ("adapters_gpu", "wall", [row for row in rows if "cuda" in row["model"]]),
    ):
        if options.save and chosen:
            suffix = ", no backends" if options.no_backends else ""
            cells = [(f"`{row['model']}`, {options.turns} turns{suffix}", str(row[figure])) for row in chosen]
            save(table, [Row(what, ours, "no telemetry", str(MAX_RATIO)) for what, ours in cells])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
