"""Correct programs and their variants, for the matrix of false alarms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .corpus import BY_NAME, CHANGES, FORCE, STYLES, Edit, Program


def correct(name: str, base: str, args: tuple[str, ...] = (), edits: tuple[Edit, ...] = ()) -> Program:
    """Return a correct program."""
    return Program(name, base.removesuffix(".py"), base, "correct", edits, args)


def of_cleanrl(directory: Path) -> Iterator[Program]:
    """Yield CleanRL's scripts, unedited except for the argument that Gymnasium 1.x requires for `TransformObservation`."""
    short = ("--no-cuda", "--num-steps", "64", "--total-timesteps", "1300")
    for env, args in {
        "CartPole-v1": (),
        "Acrobot-v1": (),
        "CartPole-v1 plain": ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"),
        "CartPole-v1 one": ("--num-envs", "1", "--num-minibatches", "2"),
    }.items():
        options = ("--env-id", env.split()[0], *short, *args)
        yield correct(f"cleanrl ppo {env}", str(directory / "ppo.py"), options)
    clip = ("lambda obs: np.clip(obs, -10, 10))", "lambda obs: np.clip(obs, -10, 10), env.observation_space)")
    for env in ("Pendulum-v1", "MountainCarContinuous-v0"):
        options = ("--env-id", env, *short, "--num-minibatches", "4", "--num-envs", "2")
        yield correct(f"cleanrl continuous {env}", str(directory / "ppo_continuous_action.py"), options, (clip,))


SB3_VARIANTS: dict[str, tuple[str, ...]] = {
    "": (),
    "one env": ("--n-envs", "1", "--n-steps", "128"),
    "odd batch": ("--batch-size", "50"),
    "whole batch": ("--batch-size", "256", "--n-epochs", "6"),
    "clip vf": ("--clip-range-vf", "0.2"),
    "raw advantages": ("--no-normalize-advantage",),
    "vecnormalize": ("--normalize", "both"),
    "norm rewards": ("--normalize", "rewards"),
    "norm obs": ("--normalize", "observations"),
    "annealed": ("--linear-rate",),
    "target kl": ("--target-kl", "0.01"),
    "target kl 1e-6": ("--target-kl", "0.000001"),
    "λ = 1": ("--gae-lambda", "1.0"),
    "γ = 1": ("--gamma", "1.0"),
    "no entropy": ("--ent-coef", "0.0"),
    "odd rollout": ("--n-envs", "3", "--n-steps", "37", "--batch-size", "40"),
    "rms prop": ("--rms-prop",),
    "linear clip": ("--linear-clip", "--linear-rate"),
    "no clipping": ("--max-grad-norm", "1000000"),
}
A2C_VARIANTS: dict[str, tuple[str, ...]] = {
    "": (),
    "one env": ("--n-envs", "1"),
    "λ = 0.9": ("--gae-lambda", "0.9"),
    "normalised": ("--n-steps", "16"),
    "adam": ("--adam",),
    "vecnormalize": ("--normalize", "both"),
    "annealed": ("--linear-rate",),
}
CONTRIB_VARIANTS = ("", "one env", "odd batch", "odd rollout", "clip vf", "raw advantages", "vecnormalize", "annealed")
ENVS = ("CartPole-v1", "Acrobot-v1", "FrozenLake-v1", "CliffWalking-v1", "tasks:Drift-v0", "Taxi-v4")
CONTINUOUS_ENVS = ("Pendulum-v1", "MountainCarContinuous-v0", "tasks:Push-v0")
BUNDLED_ENVS = (
    *("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "LunarLander-v3"),
    *("FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "BipedalWalker-v3", "tasks:Drift-v0"),
    *("tasks:Push-v0", "tasks:MaskedDrift-v0", "tasks:PairDrift-v0"),
)
NORMALISED = {"normalize_observations": True, "normalize_rewards": True}
BUNDLED_VARIANTS: dict[str, dict[str, Any]] = {
    "normalised": NORMALISED,
    "bf16": {"precision": "bf16"},
    "minibatch advantages": {"normalize_minibatches": True, "clip_value": 0.2, "entropy_coef": 0.01},
    "raw advantages": {"normalize_advantages": False, "shared_trunk": True},
    "desired kl": {"desired_kl": 0.01, "activation": "relu"},
    "target kl": {"target_kl": 0.001, "anneal_learning_rate": False, "num_steps": 30, "num_minibatches": 5},
}
BUNDLED_CONTINUOUS: dict[str, dict[str, Any]] = {
    "squashed": {"squash": True},
    "state std": {"state_dependent_std": True, "entropy_coef": 0.01},
    "bf16 normalised": {"precision": "bf16", **NORMALISED},
}


def _bundled() -> Iterator[Program]:
    program, settings = "bundled.py", "--settings"
    for env in ("cartpole", "acrobot", "pendulum", "cue-recall", "cartpole-lstm", "morphogenesis"):
        yield correct(f"bundled {env}", program, (env,))
    for env in BUNDLED_ENVS:
        yield correct(f"bundled {env}", program, (env, "--policy", "mlp", "--updates", "3"))
    for env in ("CartPole-v1", "tasks:Drift-v0"):
        for label, changes in BUNDLED_VARIANTS.items():
            yield correct(f"bundled {env} {label}", program, (env, "--policy", "mlp", settings, json.dumps(changes)))
    for env in ("Pendulum-v1", "tasks:Push-v0"):
        for label, changes in BUNDLED_CONTINUOUS.items():
            yield correct(f"bundled {env} {label}", program, (env, "--policy", "mlp", settings, json.dumps(changes)))
    for policy in ("lstm", "gru"):
        for env in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1"):
            yield correct(f"bundled {env} {policy}", program, (env, "--policy", policy, "--mask-velocity"))
        for env in ("cue-recall", "tasks:Drift-v0", "FrozenLake-v1"):
            yield correct(f"bundled {env} {policy} preset", program, (env, "--policy", policy, "--updates", "3"))
        wide = json.dumps({"lstm_layers": 2, "precision": "bf16", "num_minibatches": 3})
        yield correct(f"bundled {policy} bf16 2 layers", program, ("CartPole-v1", "--policy", policy, settings, wide))


def _programs() -> Iterator[Program]:
    yield from _bundled()
    sb3, script = "sb3_healthy.py", "script.py"
    continuous, own_loop = CHANGES["continuous"], CHANGES["own_loop"]
    for env in (*ENVS, *CONTINUOUS_ENVS):
        for label, args in SB3_VARIANTS.items():
            yield correct(f"sb3 ppo {env} {label}".strip(), sb3, ("ppo", env, *args))
        for label, args in A2C_VARIANTS.items():
            yield correct(f"sb3 a2c {env} {label}".strip(), sb3, ("a2c", env, *args))
    for env in CONTINUOUS_ENVS:
        yield correct(f"sb3 ppo {env} gsde", sb3, ("ppo", env, "--gsde"))
        yield correct(f"sb3 ppo {env} gsde squashed", sb3, ("ppo", env, "--gsde", "--squash"))
        yield correct(f"sb3 a2c {env} gsde", sb3, ("a2c", env, "--gsde"))
    for env in ("tasks:WidePush-v0", "tasks:PairDrift-v0", "tasks:BitDrift-v0", "tasks:DictDrift-v0"):
        for algorithm in ("ppo", "a2c", "recurrent"):
            yield correct(f"sb3 {algorithm} {env}", sb3, (algorithm, env))
        for label in ("odd rollout", "norm rewards", "clip vf", "one env"):
            yield correct(f"sb3 ppo {env} {label}", sb3, ("ppo", env, *SB3_VARIANTS[label]))
    for label in CONTRIB_VARIANTS:
        for env in ("CartPoleWithoutVelocities", "Pendulum-v1", "tasks:Drift-v0"):
            yield correct(f"sb3 recurrent {env} {label}".strip(), sb3, ("recurrent", env, *SB3_VARIANTS[label]))
        for env in ("CartPole-v1", "tasks:MaskedDrift-v0", "FrozenLake-v1"):
            yield correct(f"sb3 masked {env} {label}".strip(), sb3, ("masked", env, *SB3_VARIANTS[label]))
    yield correct("sb3 recurrent shared", sb3, ("recurrent", "tasks:Drift-v0", "--shared-lstm"))
    for kind in ("recurrent", "masked"):
        yield correct(f"subclass {kind}", "contrib_program.py", ("--kind", kind))
    for label, args in {"reinforce": (), "a2c": ("--critic",)}.items():
        for env in ("tasks:Drift-v0", "CartPole-v1", "Acrobot-v1"):
            yield correct(f"{label} {env}", "policy_gradient.py", ("--env-id", env, *args))
            for style in STYLES[: 2 if args else 1]:
                yield correct(f"{label} {style} {env}", "policy_gradient.py", ("--env-id", env, *args), CHANGES[style])
    for label, penalty in {
        "difference": "-logratio.mean()",
        "expectation": "(ratio - 1 - logratio).mean()",
        "square": "logratio.pow(2).mean()",
    }.items():
        added = (("loss = pg_loss -", f"loss = pg_loss + 0.3 * {penalty} -"),)
        yield correct(f"script KL {label}", script, (), added)
    clear, step = "            optimizer.zero_grad()\n", "            nn.utils.clip_grad_norm_"
    accumulated = (
        (clear, f"            if start % (2 * minibatch_size) == 0:\n    {clear}"),
        ("loss.backward()", "(loss / 2).backward()"),
        (step, f"            if start % (2 * minibatch_size) == 0:\n                continue\n{step}"),
    )
    for env in ("tasks:Drift-v0", "CartPole-v1"):
        for label, args in {"": (), "no entropy": ("--ent-coef", "0")}.items():
            yield correct(f"script {env} accumulated {label}".strip(), script, ("--env-id", env, *args), accumulated)
    yield correct("own loop", script, (), own_loop)
    yield correct("own loop one minibatch", script, ("--num-minibatches", "1"), own_loop)
    yield correct("own loop γ = 1", script, ("--gamma", "1"), own_loop)
    yield correct("subclass ppo", "sb3_program.py")
    counter = (("for n_steps in range(n_rollout_steps)", "for place in range(n_rollout_steps)"),)
    step = "            self.num_timesteps += env.num_envs\n"
    hidden = ((step + "            callback.update_locals(locals())", step + "            callback.update_locals({})"),)
    yield correct("subclass ppo other counter", "sb3_program.py", (), counter)
    yield correct("subclass ppo without variables", "sb3_program.py", (), (*counter, *hidden))
    yield correct("subclass ppo push", "sb3_program.py", FORCE)
    variants: dict[str, tuple[str, ...]] = {
        "": (),
        "clip vf": ("--clip-vloss",),
        "raw advantages": ("--no-norm-adv",),
        "no annealing": ("--no-anneal-lr",),
        "no entropy": ("--ent-coef", "0"),
        "one env": ("--num-envs", "1", "--num-steps", "128"),
        "odd batch": ("--num-minibatches", "5"),
        "whole batch": ("--num-minibatches", "1"),
        "λ = 1": ("--gae-lambda", "1"),
    }
    for label, args in variants.items():
        for env in ("tasks:Drift-v0", "CartPole-v1", "Acrobot-v1"):
            yield correct(f"script {env} {label}".strip(), script, ("--env-id", env, *args))
        for env in CONTINUOUS_ENVS:
            yield correct(f"script {env} {label}".strip(), script, ("--env-id", env, *args), continuous)
    for env in CONTINUOUS_ENVS:
        yield correct(f"script {env} squashed", script, ("--env-id", env), (*continuous, *CHANGES["squashed"]))
    for env in ("tasks:Drift-v0", "CartPole-v1"):
        for label in ("bootstrapped", "rollout_normalised"):
            edits = tuple(edit for edit in BY_NAME[f"variant-{label}"].edits if edit not in continuous)
            yield correct(f"script {env} {label.replace('_', ' ')}", script, ("--env-id", env), edits)


CORRECT: tuple[Program, ...] = tuple(_programs())
