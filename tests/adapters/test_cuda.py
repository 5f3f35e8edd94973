"""Trainers on a GPU: telemetry changes no weight, no metric fails, and equations hold as on the CPU.

Tests that need at most two devices also run on a simulated GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import assert_identical
from pretended_gpu import pretended_gpu
from torch import Tensor, nn

from esper_telemetry import PPO, PPOConfig, Telemetry, advantage_stats, attach, gradient_health, make_env, ratio_diagnostics, read_run
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import equation_results
from esper_telemetry.journal.read import Run

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries emit deprecation warnings
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
TESTS = Path(__file__).parents[1]
UPDATES = 3
Weights = Mapping[str, Tensor]


def bundled(telemetry: Telemetry | None, **settings: Any) -> Weights:
    config = PPOConfig(num_steps=32, num_epochs=2, num_minibatches=2, hidden_sizes=(32,), seed=1, **settings)
    trainer = PPO(make_env("CartPole-v1", num_envs=4, seed=1), config, device=DEVICE)
    if telemetry is not None:
        attach(telemetry, trainer)
    trainer.learn(UPDATES * 4 * 32)
    return trainer.policy.state_dict()


def watched(telemetry: Telemetry | None) -> Weights:
    """Weights of a user's own loop with two optimizers, one of which keeps its rate on the device."""
    torch.manual_seed(1)
    agent = nn.ModuleDict({name: nn.Linear(4, size).to(DEVICE) for name, size in (("actor", 2), ("critic", 1))})
    rates: dict[str, Any] = {"actor": 1e-3, "critic": torch.tensor(1e-2, device=DEVICE)}
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=rates[name]) for name, part in agent.items()}
    if telemetry is not None:
        for name, optimizer in optimizers.items():
            parts: dict[str, Any] = {name: name}
            telemetry.watch(agent, optimizer, **parts, stop_on_nonfinite=True)
    for update in range(1, UPDATES + 1):
        rows = torch.randn(64, 4, device=DEVICE)
        agent.zero_grad()
        (agent["actor"](rows).square().mean() + agent["critic"](rows).square().mean()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        if telemetry is not None:
            telemetry.observe(advantage_stats(rows[:, 0]), ratio_diagnostics(0 * rows[:, 0], rows[:, 1], clip=0.2))
            telemetry.flush(env_step=64 * update)
    return agent.state_dict()


def stable_baselines(telemetry: Telemetry | None, kind: str = "ppo") -> Weights:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sb3_contrib")
    import sb3_models

    from esper_telemetry.adapters.sb3 import TelemetryCallback

    model: Any = sb3_models.MODELS[kind](device=DEVICE)
    model.learn(UPDATES * 128, callback=None if telemetry is None else TelemetryCallback(telemetry))
    weights: Weights = model.policy.state_dict()
    return weights


def rsl_rl(telemetry: Telemetry | None, **settings: Any) -> Weights:
    pytest.importorskip("rsl_rl")
    pytest.importorskip("gymnasium")
    import rsl_rl_models

    from esper_telemetry.adapters.rsl_rl import attach_runner

    model = rsl_rl_models.runner(device=DEVICE, **settings)
    if telemetry is not None:
        attach_runner(telemetry, model)
    rsl_rl_models.learn(model, UPDATES)
    return {**model.alg.actor.state_dict(), **{f"c.{k}": v for k, v in model.alg.critic.state_dict().items()}}


def torchrl(telemetry: Telemetry | None) -> Weights:
    pytest.importorskip("torchrl")
    from torchrl_models import Program

    from esper_telemetry.adapters.torchrl import attach_loss

    program = Program(device=DEVICE)
    if telemetry is not None:
        attach_loss(telemetry, program.loss, program.optimizer, program.estimator)
    program.learn()
    return dict(program.loss.named_parameters())


def trl(telemetry: Telemetry | None, **settings: Any) -> Weights:
    pytest.importorskip("trl")
    from esper_telemetry.adapters.trl import TelemetryCallback
    from esper_telemetry.lab.language_models import build_trainer
    from esper_telemetry.lab.small_language_model import save_model

    with tempfile.TemporaryDirectory() as directory:
        callbacks = [] if telemetry is None else [TelemetryCallback(telemetry)]
        path = save_model(Path(directory), seed=1)
        trainer = build_trainer(path, seed=1, steps=2 * UPDATES, callbacks=callbacks, use_cpu=False, **settings)
        trainer.train()
        return dict(trainer.model.state_dict())


def mixed_precision(telemetry: Telemetry | None) -> Weights:
    """Weights of a user's own loop with autocast and a gradient scaler."""
    torch.manual_seed(1)
    policy, value = nn.Linear(4, 2).to(DEVICE), nn.Linear(4, 1).to(DEVICE)
    agent = nn.ModuleDict({"policy": policy, "value": value})
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE)
    for update in range(1, UPDATES + 1):
        rows = torch.randn(64, 4, device=DEVICE)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=policy(rows))
            actions, advantages = old.sample(), torch.randn(64, device=DEVICE)
            before = old.log_prob(actions)
        for epoch in range(2):
            with torch.autocast(DEVICE, dtype=torch.float16):
                new = torch.distributions.Categorical(logits=policy(rows).float()).log_prob(actions)
                loss = -(torch.exp(new - before) * advantages).mean() + value(rows).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if telemetry is not None:
                health = gradient_health(agent, groups={"policy": ["policy"], "value": ["value"]}, max_norm=0.5)
                telemetry.observe(health, ratio_diagnostics(new - before, advantages, clip=0.2), epoch=epoch)
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        if telemetry is not None:
            telemetry.observe(advantage_stats(advantages))
            telemetry.flush(env_step=64 * update)
    return agent.state_dict()


GRU: dict[str, Any] = {"policy": "gru", "lstm_size": 16, "shared_trunk": True, "entropy_coef": 0.01, "stop_on_nonfinite": True}
"""With a check of every gradient."""

TRAINERS: Mapping[str, Callable[[Telemetry | None], Weights]] = {
    "bundled": bundled,
    "bundled_lstm": partial(bundled, policy="lstm", lstm_size=16),
    "bundled_gru": partial(bundled, **GRU),
    "watched": watched,
    "stable_baselines": stable_baselines,
    "stable_baselines_factored": partial(stable_baselines, kind="multi_discrete"),
    "stable_baselines_lstm": partial(stable_baselines, kind="recurrent"),
    "rsl_rl": rsl_rl,
    "rsl_rl_lstm": partial(rsl_rl, model="RNNModel"),
    "torchrl": torchrl,
    "trl": trl,
    "trl_bf16": partial(trl, bf16=True),
    "mixed_precision": mixed_precision,
}


PRETENDED = [
    "bundled",
    "watched",
    *(pytest.param(name, marks=pytest.mark.system) for name in ("bundled_lstm", "bundled_gru")),
    *(pytest.param(name, marks=pytest.mark.sb3) for name in ("stable_baselines", "stable_baselines_factored", "rsl_rl", "torchrl")),
]


@pytest.mark.system
@pytest.mark.parametrize("level", ["normal", "debug"])
@pytest.mark.parametrize("name", PRETENDED)
@pytest.mark.parametrize("offload", [False, pytest.param(None, marks=pytest.mark.system)], ids=["here", "shipped"])
def test_tensors_of_both_devices_meet_nowhere(name: str, level: str, offload: bool | None, tmp_path: Path) -> None:
    """Both when updates are measured on the device and when all but sampled updates are sent to a worker."""
    train = TRAINERS[name]
    with pretended_gpu():
        expected = {key: value.clone() for key, value in train(None).items()}
        with Telemetry([], run_dir=tmp_path / "run", level=level, offload=offload) as telemetry:
            actual = train(telemetry)

    assert_identical(actual, expected)
    check_records(read_run(tmp_path / "run"), ratio_error=1e-5)


@needs_gpu
@pytest.mark.parametrize("level", ["normal", "debug"])
@pytest.mark.parametrize("name", TRAINERS)
def test_weights_are_bit_identical(name: str, level: str, tmp_path: Path) -> None:
    train = TRAINERS[name]
    expected = {key: value.clone() for key, value in train(None).items()}
    again = train(None)
    if not all(torch.equal(expected[key], again[key]) for key in expected):
        pytest.skip("this trainer does not repeat its own weights on this device")

    with Telemetry([], run_dir=tmp_path / "run", level=level) as telemetry:
        actual = train(telemetry)

    assert_identical(actual, expected)
    check_records(read_run(tmp_path / "run"), ratio_error=0.05 if train is mixed_precision else 1e-5)


def check_records(run: Run, *, ratio_error: float) -> None:
    """Every update has a record without a failed metric; the identity of the first minibatch and all equations hold."""
    assert len(run.records) >= UPDATES
    results = [(at, one) for at, record in enumerate(run.records) for one in equation_results(record.values, Facts.of(run.info.facts))]
    assert [(at, result.equation.name, result.error) for at, result in results if not result.holds] == []
    for record in run.records:
        assert "telemetry/metric_errors" not in record.values
        assert record.values["grad/global/norm_preclip"] > 0
        if "lm/entropy" not in record.values:
            assert record.values.get("integrity/ratio_init", 0.0) <= ratio_error
            assert record.values.get("integrity/gae_identity", 0.0) <= 1e-4


SCRIPT_CHANGES = (
    (r"(torch\.Tensor\(.*\))$", rf"\1.to('{DEVICE}')"),
    (r"torch\.zeros\((.*)\)$", rf"torch.zeros(\1, device='{DEVICE}')"),
    (r"Agent\(envs\)$", f"Agent(envs).to('{DEVICE}')"),
    (r"action\.numpy\(\)", "action.cpu().numpy()"),
    (r"p\.detach\(\)\.numpy", "p.detach().cpu().numpy"),
    (r"torch\.tensor\(reward\)", f"torch.tensor(reward).to('{DEVICE}')"),
)
"""Substitutions that move the script to the device: pattern and replacement."""


PRETEND = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pretended_gpu import pretended_gpu
from esper_telemetry.__main__ import main
with pretended_gpu():
    main()
"""


@pytest.mark.system
@pytest.mark.parametrize("gpu", ["pretended", pytest.param("real", marks=needs_gpu)])
def test_a_script_prints_the_same_weights(gpu: str, tmp_path: Path) -> None:
    source = (TESTS / "script/scripts/categorical.py").read_text(encoding="utf-8")
    text = source
    for pattern, replacement in SCRIPT_CHANGES:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count
    (tmp_path / "plain.py").write_text(text if gpu == "real" else source, encoding="utf-8")
    (tmp_path / "script.py").write_text(text, encoding="utf-8")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    module = ("-m", "esper_telemetry") if gpu == "real" else ("-c", PRETEND, str(TESTS))
    plain, watched = run("plain.py"), run(*module, "run", "--run-dir", "run", "script.py")

    assert (plain.returncode, watched.returncode) == (0, 0), plain.stderr + watched.stderr
    assert watched.stdout.splitlines()[1:] == plain.stdout.splitlines()[1:]  # the first line has the script's name
    recorded = read_run(tmp_path / "run")
    assert len(recorded.records) == 4
    assert recorded.alarms == ()
    check_records(recorded, ratio_error=1e-5)


@needs_gpu
def test_memory_of_the_device_is_reported(tmp_path: Path) -> None:
    with Telemetry([], run_dir=tmp_path / "run") as telemetry:
        bundled(telemetry)

    assert all(record.values["perf/memory/device_mib"] > 0 for record in read_run(tmp_path / "run").records)
