"""Programs of the bed, declared before any was scored: tasks, programs that are wrong from their first line, variants, published settings.

Programs with wrong equations are those of `equation_bugs*.py`, trained longer on other tasks. `Program.causes` are the alarms that name
what is wrong; a remark on a setting is `remark/<setting>`. `integrity/equation` counts where the equation is one of the bug's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import equations
from equation_bugs import CONTINUOUS, PROGRAMS, Bug, Edit, edited
from equation_healthy import BOOTSTRAPPED, ROLLOUT_NORMALISED

from esper_telemetry.equations.equation import equations as equations_of_ppo


@dataclass(frozen=True)
class Task:
    """An environment with a budget and settings under which the correct programs learn.

    Attributes:
        env: Gymnasium id.
        steps: environment steps of a run.
        settings: as `script.py` names them, with underscores.
    """

    env: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continuous(self) -> bool:
        """True where actions are numbers."""
        return self.env in ("InvertedPendulum-v5", "Hopper-v5", "Pendulum-v1", "LunarLanderContinuous-v3")


CARTPOLE = Task("CartPole-v1", 16_000)
FROZEN = Task("FrozenLake-v1", 12_000)
CLIFF = Task("CliffWalking-v1", 20_000, {"ent_coef": 0.01})
LANDER = Task("LunarLander-v3", 28_000, {"num_envs": 8, "update_epochs": 6})
LONG_LANDER = Task("LunarLander-v3", 45_000)
"""For the bundled trainer, which learns more slowly here with its settings."""
BOXING = Task("ALE/Boxing-v5", 24_000, {"num_envs": 8, "num_steps": 128, "gamma": 0.99, "update_epochs": 6})
INVERTED = Task("InvertedPendulum-v5", 16_000, {"ent_coef": 0.0, "update_epochs": 6})
HOPPER = Task(
    "Hopper-v5", 24_000, {"ent_coef": 0.0, "num_envs": 4, "num_steps": 256, "gamma": 0.99, "update_epochs": 6}
)


@dataclass(frozen=True)
class Program:
    """A program of the bed.

    Attributes:
        name: unique.
        family: of siblings, which share a half.
        trainer: script, subclass, sb3 or bundled.
        task: what it trains on.
        kind: wrong, correct, variant (correct, and harmless otherwise), or published.
        causes: alarms that name the mistake.
        equations: equations that may be named; empty for any.
        edits: of the healthy program.
        settings: beside those of the task.
        wrappers: mistakes of the environment.
        source: link, where the mistake is one of public history, or where settings were published.
    """

    name: str
    family: str
    trainer: str
    task: Task
    kind: str = "wrong"
    causes: frozenset[str] = frozenset()
    equations: frozenset[str] = frozenset()
    edits: tuple[Edit, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    source: str = ""

    @property
    def half(self) -> str:
        """`tuning` or `test`, by a hash of the family."""
        return "test" if hashlib.sha256(self.family.encode()).digest()[0] % 2 else "tuning"

    @property
    def twin(self) -> str:
        """Name of the correct program with the same trainer and task."""
        return f"correct-{self.trainer}-{self.task.env.split('/')[-1]}"

    def command(self, seed: int, run_dir: str) -> tuple[str, list[str]]:
        """Return the text of the program and the words that start it, which begin with its file."""
        steps = ("--total-timesteps", str(self.task.steps), "--seed", str(seed))
        if self.trainer in ("sb3", "bundled"):
            text = (PROGRAMS.parent / "bed" / "library_program.py").read_text()
            options = ("--settings", json.dumps(dict(self.settings)), "--env-id", self.task.env)
            return text, ["program.py", "--trainer", self.trainer, *options, *steps, "--run-dir", run_dir]
        own = ("--env-id", self.task.env, *steps)
        watched = ["run", "--run-dir", run_dir, "program.py", *own]
        if self.trainer == "script":
            edits = self.edits
            if self.task.continuous and edits[: len(CONTINUOUS)] != CONTINUOUS:
                edits = (*CONTINUOUS, *edits)
            text = edited((PROGRAMS / "script.py").read_text(), (*edits, *SCRIPT_EDITS))
            return text, [*watched, *_options({**self.task.settings, **self.settings})]
        text = edited((PROGRAMS / "sb3_program.py").read_text(), (*self.edits, *SUBCLASS_EDITS))
        settings = {SB3_NAMES[name]: value for name, value in self.task.settings.items()} | dict(self.settings)
        return text, [*watched, "--settings", json.dumps(settings)]


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        option = name.replace("_", "-")
        yield from (f"--{'' if value else 'no-'}{option}",) if isinstance(value, bool) else (f"--{option}", str(value))


SCRIPT_EDITS: Final[tuple[Edit, ...]] = (
    ("import gymnasium as gym\n", "import bed_environment\nimport gymnasium as gym\n"),
    ("gym.make(args.env_id)", "bed_environment.make(args.env_id)"),
    ("envs.reset(seed=args.seed)", "envs.reset(seed=1000 * args.seed)"),
)
SUBCLASS_EDITS: Final[tuple[Edit, ...]] = (
    ("import gymnasium as gym\n", "import json\nimport bed_environment\n"),
    (
        "args = parser.parse_args()\n",
        'parser.add_argument("--settings", type=json.loads, default={})\nargs = parser.parse_args()\n',
    ),
    ("gym.make(args.env_id)", "bed_environment.make(args.env_id)"),
    (
        "make_vec_env(make_env, 6, seed=args.seed)",
        'make_vec_env(make_env, args.settings.pop("n_envs", 6), seed=args.seed)',
    ),
    ('        "device": "cpu",\n    }\n', '        "device": "cpu",\n    } | args.settings\n'),
)
SB3_NAMES: Final = {
    "num_envs": "n_envs",
    "num_steps": "n_steps",
    "gamma": "gamma",
    "ent_coef": "ent_coef",
    "update_epochs": "n_epochs",
}

CAUSES: Final[Mapping[str, frozenset[str]]] = {
    "advantages": frozenset({"integrity/equation", "integrity/gae_identity"}),
    "returns": frozenset({"integrity/equation", "integrity/gae_identity", "value/never_fits", "value/bias"}),
    "normalized": frozenset({"integrity/equation", "integrity/adv_norm"}),
    "log_probs": frozenset({"integrity/equation", "integrity/ratio_init"}),
    "values": frozenset({"integrity/equation"}),
    "actions": frozenset({"integrity/equation", "integrity/actions"}),
    "transitions": frozenset({"integrity/equation"}),
    "policy_loss": frozenset({"integrity/equation", "policy/wrong_direction"}),
    "value_loss": frozenset({"integrity/equation", "value/never_fits", "value/fit_collapse"}),
    "entropy": frozenset({"integrity/equation", "policy/entropy_explosion", "policy/entropy_collapse"}),
    "gradient": frozenset({"integrity/equation", "grad/missing_group"}),
    "optimizer": frozenset({"integrity/equation", "opt/state_lost"}),
    "minibatches": frozenset({"integrity/equation", "integrity/rows_repeated"}),
    "schedule": frozenset({"integrity/equation", "opt/negative_rate", "opt/stalled_weights"}),
}
"""Alarms that name a mistake, by the quantity in which it is."""

MORE_CAUSES: Final[Mapping[str, frozenset[str]]] = {
    "timeouts_as_ends": frozenset({"value/limit_bias"}),
    "obs_never_updated": frozenset({"obs/constant"}),
    "no_value_loss": frozenset({"value/never_fits", "grad/missing_group", "opt/stalled_weights"}),
    "v_detached": frozenset({"value/never_fits", "grad/missing_group"}),
    "missing_parameter": frozenset({"value/never_fits", "opt/stalled_weights", "grad/missing_group"}),
    "pg_sum": frozenset({"grad/interference", "grad/explode", "grad/clip_saturated"}),
    "dropout": frozenset({"integrity/ratio_init"}),
    "other_optimizer": frozenset({"opt/stalled_weights", "policy/kl_stall"}),
    "not_cleared": frozenset({"grad/explode", "grad/clip_saturated"}),
}
"""Beside those, of single mistakes."""

EQUATION_TASKS: Final[Mapping[str, Task]] = {
    "script-dones_after_step": LANDER,
    "script-bootstrap_old_value": CARTPOLE,
    "script-sign": CARTPOLE,
    "script-last_row_zero": FROZEN,
    "script-returns_new_values": CARTPOLE,
    "script-obs_statistics": LANDER,
    "script-dropout": CARTPOLE,
    "script-argmax": FROZEN,
    "script-obs_never_updated": CARTPOLE,
    "script-reward_before_obs": FROZEN,
    "script-obs_alias": LANDER,
    "force-clipped_stored": HOPPER,
    "force-no_log_det": INVERTED,
    "script-pg_minus_forgotten": BOXING,
    "script-pg_broadcast": CARTPOLE,
    "script-v_broadcast": CARTPOLE,
    "script-entropy_sign": FROZEN,
    "script-cleared_per_epoch": CARTPOLE,
    "script-missing_parameter": LANDER,
    "sb3-current_dones_stored": CARTPOLE,
    "sb3-last_value_of_old_obs": LANDER,
    "sb3-timeouts_as_ends": INVERTED,
    "sb3-timeout_old_value": CLIFF,
    "sb3-timeout_does_not_cut": CLIFF,
    "sb3-axes_rewards": LANDER,
    "sb3-dropout": CARTPOLE,
    "sb3-permuted_stored": FROZEN,
    "sb3-obs_alias": CARTPOLE,
    "sb3-reward_before_obs": FROZEN,
    "sb3-pg_rows": CARTPOLE,
    "sb3-entropy_sign": CLIFF,
    "sb3-entropy_sample_sign": CARTPOLE,
}


def _named(bug: Bug) -> str:
    return bug.name.split("-", 1)[1]


def equation_program(bug: Bug, task: Task) -> Program:
    """Return a program with a wrong equation on a task."""
    trainer = "subclass" if bug.base == "sb3_program.py" else "script"
    edits = bug.edits
    causes = frozenset().union(*(CAUSES[quantity] for quantity in bug.quantities))
    if _named(bug) == "permuted_stored":  # FrozenLake has four actions
        edits = tuple((old, new.replace("2 -", "3 -")) for old, new in edits)
    declared = equations_of_ppo()
    quantities = dict.fromkeys(
        [*bug.quantities, *bug.follows, *("gradient" for one in bug.quantities if one in equations.LOSSES)]
    )
    return Program(
        bug.name.replace("sb3-", "subclass-"),
        family=_named(bug).removeprefix("current_").replace("last_value_of_old_obs", "bootstrap_old_value"),
        trainer=trainer,
        task=task,
        causes=causes | MORE_CAUSES.get(_named(bug), frozenset()),
        equations=frozenset(name for quantity in quantities for name in equations.named_by(quantity, declared)),
        edits=edits,
        source=bug.source,
    )


SB3_BASE: Final = {"n_envs": 8, "n_steps": 64, "batch_size": 128, "n_epochs": 6, "learning_rate": 1e-3, "gamma": 0.98}
BUNDLED_BASE: Final = {"num_envs": 8, "num_steps": 64, "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.9}
LIBRARY_BASES: Final[Mapping[str, Mapping[str, Any]]] = {"sb3": SB3_BASE, "bundled": BUNDLED_BASE}

SCALED = frozenset({"obs/unscaled", "norm/off", "remark/unequal features"})
IDLE = frozenset({"policy/kl_stall", "opt/stalled_weights"})


def library(
    trainer: str,
    name: str,
    family: str,
    task: Task,
    causes: frozenset[str] | set[str],
    *,
    wrapper: str = "",
    kind: str = "wrong",
    source: str = "",
    **settings: Any,
) -> Program:
    """Return a program that uses a library's PPO as it is."""
    return Program(
        f"{trainer}-{name}",
        family,
        trainer,
        task,
        kind=kind,
        causes=frozenset(causes),
        settings={**LIBRARY_BASES[trainer], **settings},
        wrappers=(wrapper,) if wrapper else (),
        source=source,
    )


def _settings_and_wrappers() -> Iterator[Program]:
    yield library(
        "sb3",
        "constant_observation",
        "observation_constant",
        INVERTED,
        {"obs/constant"},
        wrapper="constant_observation",
    )
    yield library(
        "sb3",
        "frozen_statistics",
        "observation_scale",
        CARTPOLE,
        SCALED | {"obs/constant"},
        wrapper="frozen_statistics",
    )
    yield library("bundled", "unscaled_feature", "observation_scale", LONG_LANDER, SCALED, wrapper="unscaled_feature")
    yield library(
        "sb3",
        "zero_reward",
        "reward_constant",
        FROZEN,
        {"reward/constant", "remark/no reward", "remark/equal rewards"},
        wrapper="zero_reward",
    )
    noisy = {"value/never_fits"}
    yield library("sb3", "noise_reward", "reward_noise", LANDER, noisy, wrapper="noise_reward")
    yield library(
        "bundled",
        "huge_reward",
        "reward_scale",
        LONG_LANDER,
        {"reward/unscaled", "grad/interference", "remark/dominant critic"},
        wrapper="huge_reward",
    )
    yield library(
        "sb3",
        "negative_reward",
        "reward_sign",
        CARTPOLE,
        {"policy/wrong_direction", "reward/constant"},
        wrapper="negative_reward",
    )
    ignored = {"integrity/actions", "policy/action_mi", "remark/ignored actions"}
    yield library("sb3", "sampled_action", "action_ignored", CARTPOLE, ignored, wrapper="sampled_action")
    yield library("sb3", "large_action", "action_bounds", HOPPER, {"policy/actions_cut"}, wrapper="large_action")
    rates = {"remark/learning_rate", "opt/update_too_large", "policy/kl_spike", "policy/ratio_explosion"}
    yield library("bundled", "rate_large", "rate_large", CARTPOLE, rates, learning_rate=0.3)
    yield library("sb3", "rate_small", "rate_small", CARTPOLE, IDLE | {"remark/learning_rate"}, learning_rate=1e-8)
    short = {"ret/short_sighted", "remark/gamma", "remark/discount horizon"}
    yield library("bundled", "gamma_zero", "discount", LONG_LANDER, short, gamma=0.0)
    bonus = {"policy/entropy_explosion", "remark/entropy_coef"}
    yield library("bundled", "entropy_bonus", "entropy_bonus", CARTPOLE, bonus, entropy_coef=10.0)
    wide = {"policy/actions_cut", "remark/initial std"}
    yield library("sb3", "sigma_large", "sigma", INVERTED, wide, policy_kwargs={"log_std_init": 4.0})
    saturated = {"repr/rank_collapse", "repr/dormant", "grad/vanish", "remark/low rank"}
    yield library("sb3", "saturated", "network", CARTPOLE, saturated, policy_kwargs={"activation": "saturated"})
    yield library(
        "bundled",
        "value_weight",
        "value_weight",
        CARTPOLE,
        {
            "remark/value_coef",
            "grad/actor_starved",
            "grad/interference",
            "grad/clip_saturated",
            "remark/dominant critic",
        },
        value_coef=1e6,
    )


HUBER: tuple[Edit, ...] = (
    (
        "v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()",
        "v_loss = nn.functional.smooth_l1_loss(newvalue, b_returns[mb_inds])",
    ),
)
RELU: tuple[Edit, ...] = (
    (
        "nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()",
        "nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()",
    ),
)


def _variants() -> Iterator[Program]:
    def variant(name: str, task: Task, edits: tuple[Edit, ...] = (), **settings: Any) -> Program:
        return Program(f"variant-{name}", f"variant-{name}", "script", task, "variant", edits=edits, settings=settings)

    yield variant("bootstrapped", INVERTED, BOOTSTRAPPED)
    yield variant("rollout_normalised", LANDER, ROLLOUT_NORMALISED)
    yield variant("clipped_values", CARTPOLE, clip_vloss=True)
    yield variant("raw_advantages", FROZEN, norm_adv=False)
    yield variant("huber", CARTPOLE, HUBER)
    yield variant("relu", LANDER, RELU)
    yield variant("lambda_one", CARTPOLE, gae_lambda=1.0)
    yield variant("constant_rate", HOPPER, anneal_lr=False)


ZOO: Final = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml"
CLEANRL: Final = "https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo{}.py"
RELU_256: Final = {"activation": "relu", "net_arch": [256, 256], "log_std_init": -2, "ortho_init": False}


def _published() -> Iterator[Program]:
    def zoo(env: str, steps: int, source: str = ZOO, label: str = "zoo", **settings: Any) -> Program:
        name = f"published-{label}-{env.split('/')[-1]}"
        return Program(name, name, "sb3", Task(env, steps), "published", settings=settings, source=source)

    yield zoo(
        "CartPole-v1",
        16_000,
        n_envs=8,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate=1e-3,
        linear_rate=True,
    )
    yield zoo("Acrobot-v1", 24_000, normalize=True, n_envs=16, n_steps=256, gae_lambda=0.94, n_epochs=4)
    yield zoo("MountainCar-v0", 20_000, normalize=True, n_envs=16, n_steps=16, gae_lambda=0.98, n_epochs=4)
    yield zoo(
        "Pendulum-v1", 24_000, n_envs=4, n_steps=1024, gamma=0.9, learning_rate=1e-3, use_sde=True, sde_sample_freq=4
    )
    yield zoo(
        "LunarLander-v3",
        33_000,
        n_envs=16,
        n_steps=1024,
        batch_size=64,
        gae_lambda=0.98,
        gamma=0.999,
        n_epochs=4,
        ent_coef=0.01,
    )
    yield zoo(
        "BipedalWalker-v3", 16_400, normalize=True, n_envs=16, n_steps=512, batch_size=64, gamma=0.999, clip_range=0.18
    )
    yield zoo(
        *("MountainCarContinuous-v0", 10_000),
        normalize=True,
        n_envs=1,
        n_steps=8,
        batch_size=256,
        gae_lambda=0.9,
        learning_rate=7.77e-5,
        gamma=0.9999,
        ent_coef=0.00429,
        clip_range=0.1,
        max_grad_norm=5,
        vf_coef=0.19,
        use_sde=True,
        policy_kwargs={"log_std_init": -3.29, "ortho_init": False},
    )
    yield zoo(
        *("HalfCheetah-v5", 10_000),
        normalize=True,
        n_steps=512,
        gamma=0.98,
        learning_rate=2.0633e-5,
        ent_coef=0.000401762,
        clip_range=0.1,
        n_epochs=20,
        gae_lambda=0.92,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs=RELU_256,
    )
    yield zoo(
        *("Hopper-v5", 20_000),
        normalize=True,
        batch_size=32,
        n_steps=512,
        gamma=0.999,
        learning_rate=9.80828e-5,
        ent_coef=0.00229519,
        n_epochs=5,
        gae_lambda=0.99,
        max_grad_norm=0.7,
        vf_coef=0.835671,
        policy_kwargs=RELU_256,
    )
    yield zoo(
        "Swimmer-v5",
        20_000,
        normalize=True,
        n_envs=4,
        n_steps=1024,
        batch_size=256,
        learning_rate=6e-4,
        gamma=0.9999,
        gae_lambda=0.98,
    )
    yield zoo(
        *("InvertedPendulum-v5", 15_000),
        normalize=True,
        n_steps=32,
        gamma=0.999,
        learning_rate=0.000222425,
        ent_coef=1.37976e-7,
        clip_range=0.4,
        n_epochs=5,
        gae_lambda=0.9,
        max_grad_norm=0.3,
        vf_coef=0.19816,
    )
    yield zoo(
        *("Reacher-v5", 20_000),
        normalize=True,
        batch_size=32,
        n_steps=512,
        gamma=0.9,
        learning_rate=0.000104019,
        ent_coef=7.52585e-8,
        clip_range=0.3,
        n_epochs=5,
        gae_lambda=1.0,
        max_grad_norm=0.9,
        vf_coef=0.950368,
    )
    yield zoo(
        *("ALE/Boxing-v5", 20_000),
        n_envs=8,
        n_steps=128,
        n_epochs=4,
        batch_size=256,
        learning_rate=2.5e-4,
        linear_rate=True,
        clip_range=0.1,
        ent_coef=0.01,
    )
    cleanrl = {
        "n_envs": 4,
        "n_steps": 128,
        "batch_size": 128,
        "n_epochs": 4,
        "learning_rate": 2.5e-4,
        "linear_rate": True,
    }
    cleanrl |= {"ent_coef": 0.01, "clip_range_vf": 0.2}
    yield zoo("CartPole-v1", 20_000, CLEANRL.format(""), "cleanrl", **cleanrl)
    yield zoo("Acrobot-v1", 20_000, CLEANRL.format(""), "cleanrl", **cleanrl)
    yield zoo(
        *("Hopper-v5", 20_000, CLEANRL.format("_continuous_action"), "cleanrl"),
        normalize=True,
        learning_rate=3e-4,
        linear_rate=True,
    )
    yield zoo("CartPole-v1", 20_000, "https://github.com/DLR-RM/stable-baselines3", "sb3-default")


def _correct(programs: list[Program]) -> Iterator[Program]:
    """Yield the correct twin of every program that is wrong."""
    twins: dict[str, Program] = {}
    for program in programs:
        settings = LIBRARY_BASES.get(program.trainer, {})
        twins.setdefault(
            program.twin,
            replace(
                program,
                name=program.twin,
                kind="correct",
                causes=frozenset(),
                edits=(),
                settings=settings,
                wrappers=(),
                source="",
            ),
        )
    yield from twins.values()


BY_NAME: Final = {bug.name: bug for bug in equations.BUGS}
WRONG: Final = [
    *(equation_program(BY_NAME[name], task) for name, task in EQUATION_TASKS.items()),
    *_settings_and_wrappers(),
]
PROGRAMS_OF_BED: Final = (*WRONG, *_variants(), *_published(), *_correct(WRONG))
