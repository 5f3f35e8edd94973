"""Logs of TRL, verl, OpenRLHF and NeMo-RL: console output and files in addition to tags, and the faults of the logged runs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from run_cli import run_cli
from torch.utils.tensorboard import SummaryWriter
from trainer_logs import UPDATES, written

from esper_telemetry.importers import read_foreign, read_source
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, facts_of
from esper_telemetry.importers.text_logs import runs_of
from esper_telemetry.importers.trainers import NEMO_RL, SB3, TRL, VERL, Trainer

HEALTHY: Mapping[str, float] = {"policy_loss": 0.1, "ppo_kl": 0.001, "ppo_clip_ratio": 0.02, "actor_grad_norm": 0.5}


def printed_by_openrlhf(rows: Sequence[Mapping[str, float]]) -> str:
    """OpenRLHF's lines after Ray's coloured prefix."""
    prefix = "\x1b[36m(PPOTrainer pid=129)\x1b[0m INFO 11-26 21:53:59 ppo_trainer.py:551] ✨ Global step"
    return "\n".join(f"{prefix} {step}: {dict(row)}" for step, row in enumerate(rows, 1))


def step_of_nemo_rl(step: int, steps: int, metrics: Mapping[str, object]) -> str:
    lines = [f"{'=' * 25} Step {step}/{steps} {'=' * 25}", *(f"  • {name}: {value}" for name, value in metrics.items())]
    return "\n".join(lines)


def epoch_of_nemo_rl(epoch: int) -> str:
    return f"{'=' * 25} Epoch {epoch}/3 {'=' * 25}"


def log(directory: Path, text: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "console.log").write_text(text, encoding="utf-8")
    return f"log:{directory}/console.log"


def causes(capsys: pytest.CaptureFixture[str], address: str) -> list[str]:
    code, out, _ = run_cli(["diagnose", "--from", address, "--json"], capsys)
    assert code == 0 and "published settings" not in out
    return [incident["cause"] for incident in json.loads(out)["incidents"]]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_printed_numbers_that_are_not_finite_are_read(number: str, tmp_path: Path) -> None:
    """A dictionary with such a number is not a valid Python literal."""
    rows = [{**HEALTHY, "reward": 0.5}] * 5 + [{**HEALTHY, "policy_loss": float(number), "reward": 0.5}] * 3

    imported = read_foreign(read_source(log(tmp_path / "run_7", printed_by_openrlhf(rows))))

    assert (imported.name, len(imported.records)) == ("run_7", 8)
    assert [record.values["numerics/nonfinite"] for record in imported.records] == [0.0] * 5 + [1.0] * 3


def test_numbers_as_numpy_and_torch_print_them(tmp_path: Path) -> None:
    verl = [
        f"\x1b[36m(TaskRunner pid=1)\x1b[0m step:{step} - actor/pg_clipfrac:np.float64(0.25) - actor/ppo_kl:np.float32(nan)"
        " - actor/lr(1e-4):0.010 - actor/pg_loss:tensor(-0.5, device='cuda:0')"
        for step in range(1, 4)
    ]
    openrlhf = printed_by_openrlhf([HEALTHY] * 3).replace("0.02", "np.float64(0.02)").replace("0.5", "tensor(0.5)")

    first = read_foreign(read_source(log(tmp_path, "\n".join(verl)))).records[0].values
    second = read_foreign(read_source(log(tmp_path, openrlhf))).records[0].values

    assert {key: first[key] for key in ("policy/clip_frac_active", "opt/lr", "loss/policy", "numerics/nonfinite")} == {
        "policy/clip_frac_active": 0.25,
        "opt/lr": pytest.approx(1e-6),
        "loss/policy": -0.5,
        "numerics/nonfinite": 1.0,
    }
    assert (second["policy/clip_frac_active"], second["grad/global/norm_preclip"]) == (0.02, 0.5)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([epoch_of_nemo_rl(1), 1, 2, 3, epoch_of_nemo_rl(2), 1, 2, 3], [1, 2, 3, 4, 5, 6]),
        ([epoch_of_nemo_rl(1), 1, 2, 3, epoch_of_nemo_rl(1), 1, 2], [1, 2, 3, 4, 5]),
        ([epoch_of_nemo_rl(1), 1, 2, 3, 4, epoch_of_nemo_rl(1), 3, 4, 5], [1, 2, 3, 4, 5]),
        ([epoch_of_nemo_rl(1), 1, 1, 2, 2, 3], [1, 2, 3]),
    ],
    ids=["epochs", "another job", "a job that continues from a checkpoint", "a heading for each batch of a step"],
)
def test_steps_are_counted_over_epochs_and_jobs(lines: Sequence[str | int], expected: Sequence[int], tmp_path: Path) -> None:
    metrics = {"Loss": 0.1, "Generation KL Error": 0.001, "Avg Reward": 0.2}
    text = "\n".join(line if isinstance(line, str) else step_of_nemo_rl(line, 5, metrics) for line in lines)

    imported = read_foreign(read_source(log(tmp_path, text)))

    assert [record.axes.env_step for record in imported.records] == expected


def test_what_ppo_of_nemo_rl_prints(tmp_path: Path) -> None:
    metrics = {
        "Average batch reward": -0.8,
        "Policy Loss": "-1.7946846783161163e-02",
        "Generation KL Error": 3.78e-07,
        "Critic Loss": 1e20,
        "Critic LR": "3.00e-03",
        "Critic Clip Frac": 0.9,
    }
    text = "\n".join(step_of_nemo_rl(step, 9, {**metrics, "Policy Loss": -0.017}) for step in range(1, 9))
    text += "\n" + step_of_nemo_rl(9, 9, {**metrics, "Policy Loss": "-inf"})

    imported = read_foreign(read_source(log(tmp_path, text)))

    assert imported.records[0].values["loss/policy"] == -0.017
    assert imported.records[0].values["loss/value"] == 1e20
    assert [record.values["numerics/nonfinite"] for record in imported.records] == [0.0] * 8 + [1.0]
    assert set(imported.unused) == {"train/average_batch_reward", "train/critic/lr", "train/critic/vf_clipfrac"}


def test_metrics_that_a_single_controller_prints(tmp_path: Path) -> None:
    row = {"loss": 0.01, "probs_ratio_clamped": 1.0, "gen_kl_error": 0.0001, "reward": 0.3}
    lines = [f"(SingleControllerActor pid=812) step_metrics={row}"] * 4

    imported = read_foreign(read_source(log(tmp_path, "\n".join(lines))))

    assert (imported.trainer, len(imported.records)) == ("NeMo-RL", 4)
    assert imported.records[2].values["lm/reward/mean"] == 0.3


def test_settings_in_a_folder_below_a_run_are_no_second_run(tmp_path: Path) -> None:
    written(tmp_path / "logs" / "tensorboard", {"train/probs_ratio_clamped": [1.0] * UPDATES})
    with SummaryWriter(str(tmp_path / "logs" / "tensorboard" / "1795726632.2")) as writer:
        writer.add_text("hparams", "lr = 0.1")

    assert set(read_source(f"tensorboard:{tmp_path}/logs").points) == {"train/probs_ratio_clamped"}


NEMO_RL_SETTINGS = {"learning_rate": 0.002, "max_grad_norm": 1.0, "clip": 0.28}
VERL_CONFIG = {
    "actor_rollout_ref.actor.optim.lr": 0.002,
    "actor_rollout_ref.actor.clip_ratio": 0.3,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.optim.clip_grad": 0.5,
    "critic.optim.lr": 1e-5,
    "critic.grad_clip": 1.0,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "trainer.total_training_steps": 40,
}
VERL_SETTINGS = {"learning_rate": 0.002, "clip": 0.2, "max_grad_norm": 0.5, "total_steps": 40}


@pytest.mark.parametrize(
    ("config", "trainer", "facts"),
    [
        (
            {
                "policy": {
                    "max_grad_norm": 1.0,
                    "optimizer": {"kwargs": {"lr": 0.002}},
                    "megatron_cfg": {"optimizer": {"lr": 5e-6, "max_grad_norm": 9.0}},
                },
                "value": {"max_grad_norm": 2.0, "optimizer": {"kwargs": {"lr": 0.003}}},
                "loss_fn": {"ratio_clip_max": 0.28},
            },
            NEMO_RL,
            NEMO_RL_SETTINGS,
        ),
        (
            {"policy.megatron_cfg.optimizer.lr": "5e-06", "policy.optimizer.kwargs.lr": "0.002", "policy.max_grad_norm": "1.0"}
            | {"loss_fn.ratio_clip_max": "0.28"},
            NEMO_RL,
            NEMO_RL_SETTINGS,
        ),
        ({name: str(value) for name, value in VERL_CONFIG.items()}, VERL, VERL_SETTINGS),
        ({name.replace(".", "/"): str(value) for name, value in VERL_CONFIG.items()}, VERL, VERL_SETTINGS),
        ({"max_steps": -1}, TRL, {}),
        ({"max_steps": 500}, TRL, {"total_steps": 500}),
        (
            {"learning_rate": "0.0003", "n_steps": 256, "args/total_timesteps": 7680, "clip_range": "<function>", "n_envs": True},
            SB3,
            {"learning_rate": 0.0003, "num_steps": 256, "total_steps": 7680},
        ),
    ],
    ids=["NeMo-RL, groups", "NeMo-RL, flat", "verl in W&B", "verl in MLflow", "TRL without a limit", "TRL", "Stable-Baselines3"],
)
def test_settings_become_facts(config: Mapping[str, object], trainer: Trainer, facts: Mapping[str, float]) -> None:
    """If several settings have the same name, the optimizer that the policy uses counts. The KL target belongs to the reward's penalty."""
    assert facts_of(config, trainer.settings) == facts


def test_passes_over_one_batch_of_trl_are_one_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `num_iterations=2`, TRL logs the reward only with the first pass."""
    rows = [
        {
            "step": step,
            "entropy": 2.4 * 0.6**step,
            "loss": float(step % 2),
            "frac_reward_zero_std": 0.5,
            **({"reward": 0.1} if step % 2 else {}),
        }
        for step in range(1, 41)
    ]
    address = log(tmp_path, "\n".join(map(json.dumps, rows)))

    imported = read_foreign(read_source(address))

    assert [record.axes.env_step for record in imported.records] == [*range(1, 41, 2)]
    assert {record.values["loss/total"] for record in imported.records} == {0.5}
    assert causes(capsys, address) == ["lm/entropy_collapse"]


def test_steps_that_a_resumed_run_of_trl_repeats_count_once(tmp_path: Path) -> None:
    lost = [{"step": step, "reward": 0.1, "frac_reward_zero_std": 0.5, "loss": math.nan} for step in range(1, 9)]
    again = [{**row, "loss": 1.0} for row in lost]

    imported = read_foreign(read_source(log(tmp_path, "\n".join(map(json.dumps, [*lost, *again])))))

    assert [record.values["numerics/nonfinite"] for record in imported.records] == [0.0] * 8
    assert {record.values["loss/total"] for record in imported.records} == {1.0}


def test_a_reward_that_is_not_finite_counts_once(tmp_path: Path) -> None:
    """The same reward fills several keys."""
    imported = read_foreign(read_source(log(tmp_path, printed_by_openrlhf([{**HEALTHY, "reward": 0.5}, {**HEALTHY, "reward": math.nan}]))))

    assert [record.values["numerics/nonfinite"] for record in imported.records] == [0.0, 1.0]


def test_null_in_the_file_logger_of_verl_is_not_finite(tmp_path: Path) -> None:
    rows = [
        {"step": step, "data": {"actor/pg_loss": 0.1 if step < 4 else None, "actor/ppo_kl": 0.0, "actor/lr": 1e-6}} for step in range(1, 7)
    ]

    imported = read_foreign(read_source(log(tmp_path, "\n".join(map(json.dumps, rows)))))

    assert [record.values["numerics/nonfinite"] for record in imported.records] == [0.0] * 3 + [1.0] * 3


def test_rows_of_tables_do_not_count_as_steps() -> None:
    """W&B numbers every call; the training step is in a column."""
    rows = [
        {"_step": 2.0 * place + kind, **({"train/global_step": float(place), "train/ppo_kl": 0.1} if not kind else {})}
        for place in range(1, 4)
        for kind in (0, 1)
    ]

    assert runs_of("run", rows)[0].points["train/ppo_kl"] == [LoggedPoint(1.0, 0.1), LoggedPoint(2.0, 0.1), LoggedPoint(3.0, 0.1)]


def test_a_divergence_that_is_not_computed_is_left_out() -> None:
    """Without a reference model NeMo-RL logs 0."""
    steps = [LoggedPoint(float(step), 0.0) for step in range(1, 6)]

    def keys(last: float) -> set[str]:
        divergence = [*steps[:-1], LoggedPoint(5.0, last)]
        run = LoggedRun("run", {"train/loss": steps, "train/kl_penalty": divergence, "train/gen_kl_error": steps})
        return {key for record in read_foreign(run).records for key in record.values}

    assert "lm/kl_reference" not in keys(0.0)
    assert "lm/kl_reference" in keys(0.1)


LEARNS = [0.1 + 0.02 * step for step in range(UPDATES)]
FALLS = [2.4 * 0.5**step for step in range(UPDATES)]


def of_openrlhf(reward: Sequence[float], **others: Sequence[float]) -> dict[str, list[float]]:
    columns: dict[str, Sequence[float]] = {name: [value] * UPDATES for name, value in HEALTHY.items()}
    columns |= {"reward": reward, "group_reward_std": [0.2] * UPDATES, **others}
    return {f"train/{name}": [*column] for name, column in columns.items()}


def of_nemo_rl(reward: Sequence[float], **others: Sequence[float]) -> dict[str, list[float]]:
    columns: dict[str, Sequence[float]] = {"reward": reward, "gen_kl_error": [1e-4] * UPDATES}
    columns |= {"advantages/max": [1.0] * UPDATES, "advantages/min": [-1.0] * UPDATES}
    columns |= {"approx_entropy": [1.2] * UPDATES, **others}
    return {f"train/{name}": [*column] for name, column in columns.items()}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (of_openrlhf(LEARNS), []),
        (of_openrlhf([0.5] * UPDATES, group_reward_std=[0.0] * UPDATES), ["lm/dead_groups"]),
        (of_openrlhf([0.05] * UPDATES, ppo_kl=[0.9] * 4 + [0.0] * (UPDATES - 4)), ["policy/kl_spike"]),
        (of_openrlhf(LEARNS, ppo_kl=[-0.9, *[0.001] * (UPDATES - 1)]), []),
        (of_nemo_rl(LEARNS), []),
        (of_nemo_rl([0.5] * UPDATES, **{"advantages/max": [0.0] * UPDATES, "advantages/min": [0.0] * UPDATES}), ["lm/dead_groups"]),
        (of_nemo_rl([0.1, 0.0] * (UPDATES // 2), approx_entropy=FALLS), ["lm/entropy_collapse"]),
        (of_nemo_rl(LEARNS, approx_entropy=[2.4 * 0.85**step for step in range(UPDATES)]), []),
        (of_nemo_rl([0.1, 0.0] * (UPDATES // 2), approx_entropy=[0.03] * UPDATES), []),
        (of_nemo_rl([0.1] * 4 + [0.9] * 12 + [0.2] * (UPDATES - 16)), ["task/return_drop"]),
        (
            {
                "train/reward": [0.1, 0.0, 0.25, *([0.0, 0.25] * UPDATES)][:UPDATES],
                "train/frac_reward_zero_std": [0.0] * 5 + [1.0] * (UPDATES - 5),
                "train/learning_rate": [1e-6] * UPDATES,
            },
            ["lm/dead_groups"],
        ),
    ],
    ids=[
        "OpenRLHF, healthy",
        "OpenRLHF, constant reward",
        "OpenRLHF, rate too high",
        "OpenRLHF, an estimate below 0",
        "NeMo-RL, healthy",
        "NeMo-RL, constant reward",
        "NeMo-RL, rate too high",
        "NeMo-RL, solved",
        "NeMo-RL, a model that has few doubts from the start",
        "NeMo-RL, what was learned is lost",
        "TRL, equal rewards that alternate with the prompts",
    ],
)
def test_what_is_wrong_is_named_from_the_log(
    columns: dict[str, list[float]], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = written(tmp_path / "run", columns)

    assert causes(capsys, f"tensorboard:{directory}") == expected


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(lambda step: 0.5, ["lm/dead_groups"]), (lambda step: 0.5 + 0.01 * math.sin(step), [])],
    ids=["constant", "varied"],
)
def test_a_reward_that_is_always_the_same_is_named_from_the_console(
    reward: Callable[[int], float], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console does not print group statistics."""
    text = "\n".join(
        step_of_nemo_rl(step, 20, {"Loss": 0.1, "Generation KL Error": 0.001, "Avg Reward": f"{reward(step):.4f}"}) for step in range(1, 21)
    )

    assert causes(capsys, log(tmp_path, text)) == expected


def test_a_check_without_its_values_has_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The console allows four checks: non-finite numbers, equal rewards, a lower reward, and a failed run."""
    text = "\n".join(
        step_of_nemo_rl(step, 20, {"Loss": 0.1, "Generation KL Error": 0.001, "Avg Reward": step / 20}) for step in range(1, 21)
    )
    out = run_cli(["diagnose", "--from", log(tmp_path, text)], capsys).out

    assert "; 4 checks passed" in " ".join(out.split())
