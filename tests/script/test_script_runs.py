"""Typical scripts, each run in a separate process, with and without telemetry."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import run_python
from mistakes.corpus import Edit, edited
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_until

from esper_telemetry import RunStatus, read_run
from esper_telemetry.adapters.script.program import PrefixFormatter
from esper_telemetry.journal.read import Run

pytestmark = pytest.mark.system

SCRIPTS = Path(__file__).parent / "scripts"
CATEGORICAL = (SCRIPTS / "categorical.py").read_text()
TWO_CORES = min(2, len(os.sched_getaffinity(0)))
"""For the trainer and the worker process."""

SPEED = re.compile(r"^SPS: \d+$", re.MULTILINE)
"""Lines that differ between any two runs."""


class ProcessResult(NamedTuple):
    code: int
    stdout: str
    stderr: str


def python(directory: Path, *words: str, fresh: bool = False, cores: int = 1) -> ProcessResult:
    """Run Python on one core, so without a worker, in a fork of a process that has imported torch: both save seconds.

    Args:
        fresh: use a new process. Ctrl-C ends it even if the tests run in the background.
        cores: of a new process.
    """
    if not fresh:
        program = run_python(*words, cwd=directory)
        return ProcessResult(program.returncode, SPEED.sub("SPS", program.stdout), program.stderr)

    def as_in_a_terminal() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.sched_setaffinity(0, random.sample(sorted(os.sched_getaffinity(0)), cores))

    result = subprocess.run(
        [sys.executable, *words], cwd=directory, capture_output=True, text=True, timeout=120, check=False, preexec_fn=as_in_a_terminal
    )
    return ProcessResult(result.returncode, SPEED.sub("SPS", result.stdout), result.stderr)


def with_telemetry(directory: Path, script: str, *arguments: str, fresh: bool = False, cores: int = 1) -> ProcessResult:
    words = ("-m", "esper_telemetry", "run", "--run-dir", "run", script, *arguments)
    return python(directory, *words, fresh=fresh, cores=cores)


def run_of(directory: Path, source: str, *arguments: str) -> Run:
    """Return the run of a script that ends well."""
    (directory / "script.py").write_text(source)
    result = with_telemetry(directory, "script.py", *arguments)
    assert result.code == 0 and "failed" not in result.stderr, result.stderr
    return read_run(directory / "run")


def check(directory: Path, source: str, *words: str, updates: int = 2) -> dict[str, dict[str, Any]]:
    """Return the equations of a script by name."""
    (directory / "script.py").write_text(source)
    options = ("--json", "--updates", str(updates), "--run-dir", "run", "script.py", *words)
    result = python(directory, "-m", "esper_telemetry", "check", *options)
    assert result.stdout.startswith("{"), result.stderr
    return {row["equation"]: row for row in json.loads(result.stdout)["equations"]}


def script_stderr(result: ProcessResult) -> str:
    """Return the lines that a script wrote to stderr, without our own."""
    return "".join(line for line in result.stderr.splitlines(keepends=True) if not line.startswith("esper-telemetry: "))


def weights_of(result: ProcessResult) -> str:
    return result.stdout.splitlines()[-1]


def telemetry_lines(result: ProcessResult) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("esper-telemetry: ")]


LOSS_AND_STEP = """                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
"""
APART = """                first.zero_grad()
                (pg_loss - args.ent_coef * entropy_loss).backward()
                norm = nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
                first.step()
                second.zero_grad()
                v_loss.backward()
                second.step()
"""
OPTIMIZER = "optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)"


@pytest.mark.parametrize(
    ("made", "stepped"),
    [
        (  # a group each
            'optimizer = optim.Adam([{"params": agent.actor.parameters()}, {"params": agent.critic.parameters(), "lr": 3e-3}], lr=1e-3)',
            LOSS_AND_STEP,
        ),
        (  # an optimizer each after one backward pass; the variable names show which network they belong to
            "pi_opt, vf_opt = optim.Adam(agent.actor.parameters(), lr=1e-3), optim.Adam(agent.critic.parameters(), lr=3e-3)",
            LOSS_AND_STEP.replace("optimizer.zero_grad()", "agent.zero_grad()").replace("optimizer.step()", "pi_opt.step(); vf_opt.step()"),
        ),
        (  # an optimizer and a loss each
            "first, second = optim.Adam(agent.actor.parameters(), lr=1e-3), optim.Adam(agent.critic.parameters(), lr=3e-3)",
            APART,
        ),
    ],
)
def test_learning_rates_of_actor_and_critic(tmp_path: Path, made: str, stepped: str) -> None:
    source = edited(CATEGORICAL, ((OPTIMIZER, made), (LOSS_AND_STEP, stepped)))

    records = run_of(tmp_path, source, "--total_timesteps=512").records
    assert len(records) == 2
    for record in records:
        rates = {key: value for key, value in record.values.items() if key.startswith("opt/lr")}
        assert rates == {"opt/lr": 1e-3, "opt/lr/actor": 1e-3, "opt/lr/critic": 3e-3}


def test_the_gradient_of_an_entropy_bonus_whose_weight_has_no_name(tmp_path: Path) -> None:
    """The graph of the loss has the weight. The second script doubles it, which doubles the gradient."""
    norms = []
    for weight in ("0.01", "0.02"):
        directory = tmp_path / weight
        directory.mkdir()
        text = CATEGORICAL.replace("args.ent_coef * entropy_loss", f"{weight} * entropy_loss").replace("ent_coef", "unused")
        (record,) = run_of(directory, text, "--total_timesteps=256").records
        assert record.values["loss/entropy_coef"] == pytest.approx(float(weight))
        assert record.values["loss/entropy"] == pytest.approx(-record.values["policy/entropy"], rel=0.01)
        norms.append(record.values["grad/entropy/norm"])

    assert norms[1] == pytest.approx(2 * norms[0], rel=0.05)  # the policies differ after the first step


COMMON = {
    *("policy/kl", "policy/clip_frac", "policy/entropy", "integrity/ratio_init", "adv/raw/std", "ret/std", "reward/mean"),
    *("value/explained_variance", "loss/policy", "loss/value", "grad/global/norm_preclip", "opt/lr"),
    *("episode/return_mean_100", "train/env_steps_per_second"),
}


def checked_run(run_dir: Path, plain: ProcessResult, keys: set[str]) -> Run:
    """Return a run of four updates with these keys, whose gradient norms are those that the script prints."""
    run = read_run(run_dir)
    assert run.status is RunStatus.FINISHED
    assert [record.axes.env_step for record in run.records] == [256, 512, 768, 1024]
    assert all(record.values.keys() >= keys for record in run.records[1:])
    norms = [float(norm) for norm in re.findall(r"norm (\S+)", plain.stdout)]
    for place, record in enumerate(run.records):
        assert record.values["grad/global/norm_preclip"] == pytest.approx(sum(norms[4 * place : 4 * place + 4]) / 4, rel=1e-5)
        assert record.values["integrity/ratio_init"] <= 1e-6
        assert record.values["integrity/gae_identity"] <= 1e-6
        assert "telemetry/metric_errors" not in record.values
    return run


BROKEN_READER = """
import sys
from esper_telemetry.adapters.script import listener
from esper_telemetry.cli.run import main

original, calls, broken = listener.read_loss, [], [int(word) for word in sys.argv[1].split(",")]

def read_loss(loss, **options):
    calls.append(loss)
    return no_such_name if len(calls) in broken or 0 in broken else original(loss, **options)

listener.read_loss = read_loss
main(["--run-dir", "run", "--level", "debug", sys.argv[2]])
"""


def test_a_bug_in_the_reader_of_losses_costs_readings_and_is_counted_and_shown(tmp_path: Path) -> None:
    """Four minibatches an update. Readings fail for the first loss, before the run exists, and for the sixth, in the second update."""
    result = python(tmp_path, "-c", BROKEN_READER, "1,6", str(SCRIPTS / "categorical.py"))

    assert result.code == 0, result.stderr
    errors = [record.values.get("telemetry/metric_errors", 0.0) for record in read_run(tmp_path / "run").records]
    assert errors == [1.0, 1.0, 0.0, 0.0]
    assert result.stderr.count("read_loss failed (NameError: name 'no_such_name' is not defined)") == 1
    assert "Traceback" in result.stderr and "in read_loss" in result.stderr


BROKEN_FINDER = """
import sys
from esper_telemetry.adapters.script.rollout_finder import RolloutFinder
from esper_telemetry.cli.run import main

RolloutFinder.rollout = lambda *_: no_such_name
main(["--run-dir", "run", sys.argv[1]])
"""


def test_a_bug_in_the_finder_of_rollouts_costs_only_these(tmp_path: Path) -> None:
    result = python(tmp_path, "-c", BROKEN_FINDER, str(SCRIPTS / "categorical.py"))

    assert result.code == 0, result.stderr
    values = [record.values for record in read_run(tmp_path / "run").records]
    assert [one["telemetry/metric_errors"] for one in values] == [1.0] * 4
    assert all({"policy/kl", "loss/policy", "episode/return_mean_100"} <= one.keys() for one in values[1:])
    assert "not found: rollouts" in result.stderr

    checked = python(tmp_path, "-m", "esper_telemetry", "check", "run")
    assert checked.code == 2 and "4 measurements failed with an error of telemetry's own" in checked.stderr


def test_a_script_that_fails_before_its_first_update_hears_of_its_first_nonfinite_variable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "def act(state):\n"
        "    state = torch.log(state)\n"
        "    return torch.distributions.Categorical(logits=state)\n"
        "act(torch.tensor([-1.0, 1.0]))\n"
    )
    result = python(tmp_path, "-m", "esper_telemetry", "run", "script.py")

    assert result.code == 1
    assert "training raised ValueError; first non-finite tensor: state[0] = nan, assigned in script.py:3" in result.stderr


def test_a_reader_that_never_works_is_reported_at_the_end(tmp_path: Path) -> None:
    result = python(tmp_path, "-c", BROKEN_READER, "0", str(SCRIPTS / "categorical.py"))

    assert result.code == 0, result.stderr
    assert result.stderr.count("read_loss failed (NameError: name 'no_such_name' is not defined)") == 1
    assert "found nothing to measure" in result.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ProcessResult:
    """Run the script in one piece without telemetry."""
    return python(tmp_path_factory.mktemp("plain"), str(SCRIPTS / "categorical.py"), "--seed=4")


MEMORY = {"lstm/h/rms", "lstm/c/rms", "lstm/reset_rate", "lstm/age/mean", "lstm/c_growth"}


def test_a_script_in_one_piece(tmp_path: Path, plain: ProcessResult) -> None:
    """Prints and weights equal a run without telemetry. The critic's fit and the gradient norms are the script's own. One line names what
    is measured, including episodes, which the script misses because it was written for another Gymnasium.
    """
    result = with_telemetry(tmp_path, str(SCRIPTS / "categorical.py"), "--seed=4", fresh=True, cores=TWO_CORES)

    assert (result.code, result.stdout, script_stderr(result)) == (0, plain.stdout, plain.stderr)
    run = checked_run(tmp_path / "run", plain, COMMON)
    assert [record.axes.gradient_step for record in run.records] == [4, 8, 12, 16]
    for values in (record.values for record in run.records):
        assert values["value/explained_variance"] == pytest.approx(values["script/losses/explained_variance"], abs=1e-5)
    assert run.info.facts["groups"].keys() == {"actor", "critic"}
    assert run.info.facts["env"] == "CartPole-v1"
    assert run.info.facts["action_space"] == "Discrete(2)"
    assert run.info.config["seed"] == 4
    assert run.info.name.endswith("/run")
    first, *_, last = telemetry_lines(result)
    assert "found episodes (the script itself misses them" in first
    assert "gradients before and after clipping, probability ratios, distributions" in first
    assert "not found" not in first
    assert last.endswith(f"4 updates; the verdict on them: esper-telemetry diagnose {tmp_path / 'run'}")
    assert not any("episodic_return" in key for record in run.records for key in record.values)


def test_with_a_default_device_each_pass_counts_once(tmp_path: Path, plain: ProcessResult) -> None:
    """With a default device, torch calls `Tensor.backward` a second time from within itself."""
    text = CATEGORICAL.replace("import torch\n", "import torch\ntorch.set_default_device('cpu')\n", 1)
    (tmp_path / "categorical.py").write_text(text)
    result = with_telemetry(tmp_path, "categorical.py", "--seed=4")

    assert (result.code, weights_of(result)) == (0, weights_of(plain))
    run = read_run(tmp_path / "run")
    assert [record.axes.gradient_step for record in run.records] == [4, 8, 12, 16]
    assert [record.values["integrity/rows_repeated"] for record in run.records] == [0.0] * 4
    assert run.alarms == ()


def test_the_last_kl_and_value_loss_are_the_scripts_own(tmp_path: Path) -> None:
    """One minibatch and one epoch: the numbers of the update are the minibatch's, which the script prints."""
    result = with_telemetry(tmp_path, str(SCRIPTS / "categorical.py"), "--num_minibatches=1", "--update_epochs=1", "--learning_rate=0.5")

    printed = [(float(kl), float(loss)) for kl, loss in re.findall(r"kl (\S+) value (\S+)", result.stdout)]
    measured = [(record.values["policy/kl"], record.values["loss/value"]) for record in read_run(tmp_path / "run").records]
    assert measured == [pytest.approx(pair, abs=1e-6, rel=1e-5) for pair in printed] != []


def test_a_script_in_one_piece_with_memory(tmp_path: Path) -> None:
    """Minibatches of whole environments: prints, scalars and weights as without telemetry, and everything in `COMMON` and of memory.
    Probabilities are unchanged before the first step, so states are the collected ones. The time of `run` is counted.
    """
    script = str(SCRIPTS / "lstm.py")
    plain = python(tmp_path, script)
    before = event_values(tmp_path / "runs")
    (tmp_path / "runs").rename(tmp_path / "plain")
    result = with_telemetry(tmp_path, script)

    assert (result.code, result.stdout, script_stderr(result)) == (0, plain.stdout, plain.stderr)
    assert event_values(tmp_path / "runs") == before != {}
    assert "recurrent states" in telemetry_lines(result)[0] and "not found" not in telemetry_lines(result)[0]
    run = checked_run(tmp_path / "run", plain, COMMON | MEMORY)
    assert {"lstm/gate/f/mean", "lstm/cell_log_gain"} <= run.records[0].values.keys()
    assert run.info.facts["policy"] == "lstm"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ((", next_lstm_state = agent.get_action_and_value(next_obs", ", _ = agent.get_action_and_value(next_obs"), "memory_empty"),
        (("(initial_lstm_state[0][:, mbenvinds], ", "(0 * initial_lstm_state[0][:, mbenvinds], 0 * "), "memory_zero"),
    ],
)
def test_a_memory_that_is_empty_in_acting_or_at_the_start_of_training(tmp_path: Path, change: tuple[str, str], name: str) -> None:
    rows = check(tmp_path, edited((SCRIPTS / "lstm.py").read_text(), (change,)), updates=3)

    assert [one["hypothesis"] for one in rows["replayed_log_probs"]["explanations"]] == [name]


def test_a_script_without_a_vector_environment(tmp_path: Path) -> None:
    """Continuous actions, no clipping, everything in a class. The time limit ends the episodes."""
    script = str(SCRIPTS / "gaussian.py")
    plain, result = python(tmp_path, script), with_telemetry(tmp_path, script)

    assert (result.code, result.stdout) == (0, plain.stdout)
    run = read_run(tmp_path / "run")
    assert [record.axes.env_step for record in run.records] == [250, 500, 750]
    assert [record.values["episode/length_mean"] for record in run.records] == [200, 200, 200]
    assert run.records[0].values["policy/head/action/std/mean"] == pytest.approx(1.0, abs=0.05)
    assert "grad/clip/coef" not in run.records[0].values
    assert "num_epochs" not in run.info.facts, "the loop's own counter is not a setting"
    means = [float(line.split()[1]) for line in plain.stdout.splitlines() if line.startswith("reward")]
    assert [record.values["reward/mean"] for record in run.records] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "name"),
    [("long()", "whole_actions"), ("clamp(-0.5, 0.5)", "cut_actions"), ("mul(2)", "scaled_actions"), ("mul(1)", "other_spread")],
)
def test_actions_of_the_loss_that_are_not_those_of_the_rollout(tmp_path: Path, change: str, name: str) -> None:
    edits: tuple[Edit, ...] = (
        ("observations, actions = torch.zeros(n_steps + 1, 1, 3)", "logp_old, observations, actions = [], torch.zeros(n_steps + 1, 1, 3)"),
        (".sample()\n", ".sample()\n                    logp_old.append(self.dist(obs.view(1, 3)).log_prob(actions[t]).sum(-1))\n"),
        (
            "logp_old = self.dist(observations[:-1]).log_prob(actions).sum(-1)",
            f"logp_old, actions = torch.stack(logp_old), actions.{change}",
        ),
    )
    if name == "other_spread":
        edits += (
            ("def dist(self, obs):", "def dist(self, obs, width=1.0):"),
            ("self.log_std.exp())", "width * self.log_std.exp())"),
            ("self.dist(obs.view(1, 3)).sample()", "self.dist(obs.view(1, 3), 0.5).sample()"),
            ("self.dist(obs.view(1, 3)).log_prob", "self.dist(obs.view(1, 3), 0.5).log_prob"),
        )
    rows = check(tmp_path, edited((SCRIPTS / "gaussian.py").read_text(), edits), updates=3)

    assert [one["hypothesis"] for one in rows["replayed_log_probs"]["explanations"]] == [name]


def test_another_temperature_in_acting(tmp_path: Path) -> None:
    change = ("Categorical(logits=self.actor(x))", "Categorical(logits=self.actor(x) * (0.2 if action is None else 1.0))")
    rows = check(tmp_path, edited((SCRIPTS / "categorical.py").read_text(), (change,)), updates=3)

    assert [one["hypothesis"] for one in rows["replayed_log_probs"]["explanations"]] == ["other_spread"]


BETA = (
    (
        "return Normal(self.pi(obs), self.log_std.exp())",
        "return torch.distributions.Beta(1 + self.pi(obs).exp() / 9, 1 + self.log_std.exp() / 9)",
    ),
    ("learn(updates=3)", "learn(updates=10)"),
)


@pytest.mark.parametrize(
    ("edits", "sent", "is_told"),
    [
        (BETA[:1], "actions[t, 0].numpy()", True),
        (BETA[:1], "4 * actions[t, 0].numpy() - 2", False),
        ((), "actions[t, 0].tanh().numpy()", True),
        ((), "2 * actions[t, 0].tanh().numpy()", False),
    ],
)
def test_actions_with_bounds_of_their_own_are_told_of_any_distribution(
    tmp_path: Path, edits: tuple[Edit, ...], sent: str, is_told: bool
) -> None:
    source = edited((SCRIPTS / "gaussian.py").read_text(), (*edits, BETA[1], ("step(actions[t, 0].numpy())", f"step({sent})")))

    run = run_of(tmp_path, source)

    names = {event.data["name"] for event in run.events if event.type == "remark"}
    assert ("own range action" in names) is is_told
    assert any("policy/head/action/range_reached" in record.values for record in run.records)


def test_a_script_that_is_none_of_ours(tmp_path: Path) -> None:
    """Nothing is created, and one line says why."""
    script = str(SCRIPTS / "supervised.py")
    plain, result = python(tmp_path, script), with_telemetry(tmp_path, script)

    assert (result.code, result.stdout) == (0, plain.stdout)
    assert telemetry_lines(result) == [
        "esper-telemetry: supervised.py: found nothing to measure: no optimizer step with a loss of a policy was seen; "
        "what was seen: steps of SGD"
    ]
    assert list(tmp_path.iterdir()) == []


WORKERS = """
import multiprocessing, time, torch
def work():
    while time.process_time() < 1.5:
        pass
if __name__ == "__main__":
    worker = multiprocessing.Process(target=work)
    worker.start()
    worker.join()
"""


def test_a_script_whose_child_processes_work_is_told_that_they_are_not_seen(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)

    (line,) = telemetry_lines(with_telemetry(tmp_path, str(tmp_path / "workers.py")))

    assert "found nothing to measure" in line and "optimizer steps in them are not seen" in line


ONLINE = """
import gymnasium, torch
from torch.distributions import Categorical
env = gymnasium.make("CartPole-v1")
policy = torch.nn.Linear(4, 2)
optimizer = torch.optim.RMSprop(policy.parameters())
observation, _ = env.reset(seed=1)
for _ in range(9):
    choices = Categorical(logits=policy(torch.as_tensor(observation)))
    action = choices.sample()
    observation, reward, *_ = env.step(action.item())
    optimizer.zero_grad()
    (-reward * choices.log_prob(action)).backward()
    optimizer.step()
"""


def test_a_script_with_a_step_of_the_optimizer_for_each_action_hears_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "online.py").write_text(ONLINE)

    (line,) = telemetry_lines(with_telemetry(tmp_path, "online.py"))

    assert "what was seen: steps of RMSprop, 9 steps of CartPoleEnv, 9 draws of actions. A loss of a policy is a mean" in line


@pytest.mark.parametrize(
    ("end", "code", "words", "status"),
    [
        ("crashed", 1, "RuntimeError: out of luck", RunStatus.FAILED),
        pytest.param("three", 3, "", RunStatus.FAILED, marks=pytest.mark.slow),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt", RunStatus.INTERRUPTED),
        pytest.param("terminated", -signal.SIGTERM, "", RunStatus.KILLED, marks=pytest.mark.slow),
        ("forked", 0, "", RunStatus.FINISHED),
    ],
)
def test_a_script_ends_as_without(tmp_path: Path, plain: ProcessResult, end: str, code: int, words: str, status: RunStatus | None) -> None:
    """Exit code, prints and traceback are the script's own. The journal has the earlier records and says how the run ended. If the system
    kills the script, the worker process writes the end.
    """
    script = str(SCRIPTS / "categorical.py")
    cores = TWO_CORES if end == "terminated" else 1
    result = with_telemetry(tmp_path, script, "--seed=4", f"--end={end}", fresh=True, cores=cores)
    prints = plain.stdout.splitlines()[1:]

    called, *printed = [line for line in result.stdout.splitlines() if "myself" not in line]
    assert result.code == code
    assert called == f"called as ['{script}', '--seed=4', '--end={end}'] in __main__"
    assert printed == prints[: len(printed)]
    assert len(printed) == len(prints) or end != "forked"
    assert traceback_of(result) == ([words, script] if words else [])
    run = recorded(tmp_path / "run", updates=2)
    assert run.status is status


def traceback_of(result: ProcessResult) -> list[str]:
    """Return the last line of a traceback and the first file in it, empty without a traceback."""
    lines = result.stderr.splitlines()
    if "Traceback (most recent call last):" not in lines:
        return []
    first = lines[lines.index("Traceback (most recent call last):") + 1]
    return [lines[-1], first.split('"')[1]]


def recorded(run_dir: Path, *, updates: int) -> Run:
    """Return the run once it has that many complete updates and its end, which another process may still write."""

    def complete() -> Run | None:
        with suppress(ValueError):  # nothing is written yet
            run = read_run(run_dir)
            records = [record for record in run.records if not record.partial]
            return run if len(records) >= updates and run.status is not None else None
        return None

    run = wait_until(complete, f"{updates} updates and the end of the run in {run_dir}")
    assert run is not None
    return run


def event_values(directory: Path) -> dict[str, list[float]]:
    """Return the values of the script's own writer by tag, without its speed."""
    (file,) = directory.glob("*/events.*")
    accumulator = EventAccumulator(str(file))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag != "charts/SPS"]
    return {tag: [event.value for event in accumulator.Scalars(tag)] for tag in tags}


def test_the_first_variable_that_is_not_finite_is_named_before_the_gradient(tmp_path: Path) -> None:
    """The third update divides advantages by 0; the next forward pass raises, when all weights are NaN."""
    edits = (
        ("b_inds = np.arange(batch_size)", "weighed_t = b_advantages / (iteration < 3)\n        b_inds = np.arange(batch_size)"),
        ("mb_advantages = b_advantages[mb_inds]", "mb_advantages = weighed_t[mb_inds]"),
    )
    text = edited(CATEGORICAL, edits)
    (tmp_path / "script.py").write_text(text)

    result = with_telemetry(tmp_path, "script.py")

    assert result.code == 1
    (failure,) = [event.data for event in read_run(tmp_path / "run").events if event.type == "failure"]
    line = text[: text.index("weighed_t =")].count("\n") + 1
    assert failure["nonfinite"]["tensor"] == f"weighed_t, assigned in script.py:{line}"


def test_numbers_of_a_tensor_remain_numbers_for_torch(tmp_path: Path) -> None:
    """Recording the rows that scripts take must not make sequences of tensors, neither during nor after the run."""
    lines = (
        "import torch",
        "numbers = torch.arange(3.0)",
        "print(torch.tensor([numbers[1], torch.nn.Parameter(numbers[2]).detach()]), list(numbers[torch.tensor([0, 2])]))",
        "torch.func.vmap(lambda row: row[torch.tensor([0, 1])])(torch.ones(2, 3))",
    )
    (tmp_path / "script.py").write_text("\n".join(lines))

    plain, measured = python(tmp_path, "script.py"), with_telemetry(tmp_path, "script.py")

    assert plain.code == measured.code == 0
    assert plain.stdout == measured.stdout


def test_other_ranks_run_the_script_and_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('trained')")

    process = run_python(*("-m", "esper_telemetry", "run", "script.py"), cwd=tmp_path, env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"})

    assert (process.returncode, process.stdout, process.stderr) == (0, "trained\n", "")


def test_a_message_of_telemetry_has_its_prefix_once() -> None:
    for message in ("esper-telemetry: the sink is slow", "the sink is slow"):
        record = logging.LogRecord("esper_telemetry", logging.WARNING, "", 0, message, None, None)
        assert PrefixFormatter().format(record) == "esper-telemetry: the sink is slow"
