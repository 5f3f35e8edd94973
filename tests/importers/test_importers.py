"""Other trainers' logs, read through every backend and judged."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from run_cli import run_cli
from trainer_logs import SB3, STEPS, TRAINERS, UPDATES, logged, written

from esper_telemetry.importers import read_foreign, read_source
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, number_of_actions


@pytest.mark.parametrize("family", sorted(TRAINERS))
def test_every_trainer_is_understood(family: str, tmp_path: Path) -> None:
    """Signs and factors are ours: a value loss is half the mean square, an entropy is positive, and mini-epochs share one fraction."""
    name, columns, expected = TRAINERS[family]

    imported = read_foreign(read_source(f"tensorboard:{written(tmp_path / 'run', columns)}"))

    assert imported.trainer == name
    assert [record.axes.env_step for record in imported.records] == STEPS
    for record in imported.records:
        assert {key: record.values[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def test_what_sb3_logs_late_belongs_to_the_update_before() -> None:
    """SB3 collects, logs and then trains: training values logged at step 512 belong to the steps up to 256."""
    kl = [float(place) for place in range(UPDATES)]

    imported = read_foreign(logged({**SB3, "train/approx_kl": kl}))

    by_step = {record.axes.env_step: record.values for record in imported.records}
    assert by_step[256]["policy/kl"] == 1.0
    assert by_step[512]["policy/kl"] == 2.0
    assert by_step[256]["episode/return_mean_100"] == 0.0
    assert "policy/kl" not in by_step[256 * UPDATES]
    assert by_step[256]["loss/value"] == 4.0
    assert by_step[256]["policy/entropy"] == 1.09


def test_episodes_belong_to_the_update_that_follows() -> None:
    """Three in the first update, none in the second, one in the third."""
    run = logged(TRAINERS["cleanrl"][1])
    points = {
        **run.points,
        "charts/episodic_return": [LoggedPoint(10, 1.0), LoggedPoint(20, 2.0), LoggedPoint(256, 6.0), LoggedPoint(600, 11.0)],
    }

    first, second, third = read_foreign(LoggedRun("run", points)).records[:3]

    assert [first.values["episode/count"], second.values["episode/count"], third.values["episode/count"]] == [3, 0, 1]
    assert first.values["episode/return_mean"] == 3.0
    assert "episode/return_mean" not in second.values
    assert third.values["episode/return_mean_100"] == 5.0


def test_an_even_choice_tells_the_number_of_actions() -> None:
    """An untrained policy chooses evenly: log 3 nats mean three actions. 1.25 nats and a Gaussian's entropy do not determine a number."""
    assert [number_of_actions(entropy) for entropy in (math.log(2), math.log(3) - 0.005, math.log(6))] == [2, 3, 6]
    assert [number_of_actions(entropy) for entropy in (1.25, 1.4189, -0.3, 0.2, 6.0)] == [None] * 5
    assert read_foreign(logged(SB3)).records[0].values["policy/entropy_norm"] == pytest.approx(1.09 / math.log(3))


def test_losses_that_are_not_finite_are_counted_and_an_undefined_fit_is_not() -> None:
    columns = {**SB3, "train/value_loss": [8.0] * 20 + [math.nan] * 10, "train/explained_variance": [math.nan] * UPDATES}

    records = read_foreign(logged(columns)).records

    assert [record.values["numerics/nonfinite"] for record in records[17:21]] == [0, 0, 1, 1]
    assert "value/explained_variance" not in records[0].values


@pytest.mark.system
def test_the_same_run_from_every_backend(tmp_path: Path) -> None:
    """An event file, a table, an offline run of W&B and MLflow's database give the same result."""
    import wandb
    from mlflow import MlflowClient

    columns = TRAINERS["cleanrl"][1]
    written(tmp_path / "tb", columns)
    rows = [{"global_step": step, **{tag: columns[tag][place] for tag in columns}} for place, step in enumerate(STEPS)]
    with (tmp_path / "progress.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    with wandb.init(mode="offline", dir=tmp_path, project="p", config={"learning_rate": 0.01}) as run:
        for row in rows:
            run.log(row)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run("0").info.run_id
    for row in rows[:5]:
        for tag in columns:
            client.log_metric(run_id, tag, row[tag], step=int(row["global_step"]))
    client.log_param(run_id, "learning_rate", 0.01)

    first = read_foreign(read_source(f"tensorboard:{tmp_path}/tb"))
    table_of, offline, database = (
        read_foreign(read_source(address))
        for address in (f"csv:{tmp_path}/progress.csv", f"wandb:{tmp_path}/wandb", f"mlflow:sqlite:///{tmp_path}/mlflow.db?run={run_id}")
    )
    assert len(first.records) == len(table_of.records) == len(offline.records) == UPDATES
    assert len(database.records) == 5
    for imported in (table_of, offline, database):
        for one, other in zip(first.records, imported.records, strict=False):
            assert one.axes == other.axes
            assert one.values == pytest.approx(other.values, rel=1e-6)
    assert offline.facts == database.facts == {"learning_rate": 0.01}


def _printed_by_verl(row: dict[str, float]) -> str:
    cells = [f"{tag}:{value}" for tag, value in row.items()]
    return f"(TaskRunner pid=7) step:{row['step']} - {' - '.join(cells[1:])}"


def _printed_by_openrlhf(row: dict[str, float]) -> str:
    status = {tag.removeprefix("train/"): value for tag, value in row.items() if tag != "step"}
    return f"INFO 08-02 00:36:03 ppo_trainer.py:547] ✨ Global step {row['step']}: {status}"


@pytest.mark.parametrize(
    ("trainer", "write"),
    [
        ("verl", _printed_by_verl),
        ("openrlhf", _printed_by_openrlhf),
        ("verl", lambda row: json.dumps({"step": row["step"], "data": {tag: row[tag] for tag in row if tag != "step"}})),
        ("trl", lambda row: f"{row['step']}/30 [00:07] " + str({tag: f"{value:.4g}" for tag, value in row.items()})),
        ("trl", lambda row: json.dumps(row)),
        ("nemo_rl", lambda row: json.dumps(row)),
    ],
    ids=["verl printed", "OpenRLHF printed", "verl lines", "TRL printed", "TRL lines", "NeMo-RL lines"],
)
def test_text_logs(trainer: str, write: Callable[[dict[str, float]], str], tmp_path: Path) -> None:
    """Other lines are skipped, such as a progress bar and braces without metrics."""
    name, columns, expected = TRAINERS[trainer]
    rows = [{"step": place + 1, **{tag: columns[tag][place] for tag in columns}} for place in range(UPDATES)]
    noise = ["loading {model}", "  3%|x | 1/30 [00:07<01:00]", "{'loss': ", "{{}}", "step: nothing - at all"]
    (tmp_path / "run.log").write_text("\n".join([*noise, *map(write, rows), *noise]))

    imported = read_foreign(read_source(f"log:{tmp_path}/run.log"))

    assert imported.trainer == name
    assert len(imported.records) == UPDATES
    assert [record.axes.env_step for record in imported.records] == [row["step"] for row in rows]
    for record in imported.records:
        assert {key: record.values[key] for key in expected} == pytest.approx(expected, rel=1e-3)


def test_blocks_that_nemo_rl_prints(tmp_path: Path) -> None:
    """A block belongs to the step in the heading above it; fractions of time are not metrics of the step."""
    blocks = [
        f"\n{'=' * 25} Step {step}/30 {'=' * 25}\n▶ Preparing batch...\n\n📊 Training Results:\n  • Loss: 0.0{step:02}\n"
        f"  • Generation KL Error: 0.002\n  • Avg Filtered Reward: 0.9\n  • Avg Total Reward: 0.{step:02}\n"
        "  • Mean Generation Length: 250.0\n\n⏱️  Timing:\n  • Total step time: 66.55s\n  • policy_training: 25.05s (37.6%)\n"
        for step in range(1, UPDATES + 1)
    ]
    (tmp_path / "run.log").write_text("".join(blocks))

    imported = read_foreign(read_source(f"log:{tmp_path}/run.log"))

    assert (imported.trainer, len(imported.records)) == ("NeMo-RL", UPDATES)
    expected = {"loss/policy": 0.007, "lm/mismatch/kl": 0.002, "lm/length/mean": 250.0, "numerics/nonfinite": 0.0}
    expected |= dict.fromkeys(("lm/reward/mean", "episode/return_mean", "episode/return_mean_100"), 0.07)
    assert {key: imported.records[6].values.get(key) for key in expected} == pytest.approx(expected)
    assert set(imported.unused) == {"train/avg_filtered_reward"}


def test_the_state_that_transformers_saves(tmp_path: Path) -> None:
    columns = TRAINERS["trl"][1]
    history = [
        {"step": place + 1, "epoch": 0.1, **{tag.removeprefix("train/"): columns[tag][place] for tag in columns}}
        for place in range(UPDATES)
    ]
    state = tmp_path / "checkpoint-30" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"best_metric": None, "log_history": [*history, {"step": 30, "train_runtime": 9.0}]}, indent=2))

    imported = read_foreign(read_source(f"log:{state}"))

    assert (imported.trainer, imported.name, len(imported.records)) == ("TRL", "checkpoint-30", UPDATES)
    assert imported.records[-1].values["lm/reward/mean"] == 0.4
    assert "train_runtime" in imported.unused


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, _ = run_cli(["diagnose", *arguments], capsys)
    assert code == 0
    return out


def test_what_went_wrong_and_what_nobody_can_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy jumps at the 20th update. Gradients were never logged, so checks on them stay unanswered."""
    columns = {**SB3, "train/approx_kl": [0.01] * 20 + [3.0] * 10, "train/clip_fraction": [0.1] * 20 + [0.8] * 10}
    directory = written(tmp_path / "PPO_1", columns)

    imported = json.loads(diagnosed(capsys, "--from", f"tensorboard:{directory}", "--json"))
    text = diagnosed(capsys, "--from", f"tensorboard:{directory}")

    (incident,) = imported["incidents"]
    assert (incident["cause"], incident["since"]) == ("policy/kl_spike", 20)
    assert imported["unanswered"]["grad/explode"] == "not logged: grad/global/norm_preclip_max"
    assert imported["unanswered"]["policy/entropy_crash"] == "setting not logged: total_steps"
    assert not [kind for kind in imported["unanswered"] if kind.startswith("telemetry/")]
    assert imported["read"]["loss/value"] == "train/value_loss times 0.5"
    assert "PPO_1: 30 updates of Stable-Baselines3, up to 7,680 environment steps" in text
    assert "incident 1, update 20: policy/kl_spike" in text
    assert "policy/kl: train/approx_kl (mean over the last epoch)" in text


def test_a_policy_that_does_not_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dead units leave the policy without a gradient, so its KL divergence is zero."""
    directory = written(tmp_path / "run", {**SB3, "train/approx_kl": [0.0] * UPDATES, "train/clip_fraction": [0.0] * UPDATES})

    (incident,) = json.loads(diagnosed(capsys, "--from", f"tensorboard:{directory}", "--json"))["incidents"]

    assert incident["cause"] == "policy/kl_stall"


def test_the_newest_of_several_runs_is_read(tmp_path: Path) -> None:
    """Runs in folders, and files in one folder that start again; a file that continues the steps belongs to the previous run."""
    for place, name in enumerate(("PPO_9", "PPO_10")):
        folder = written(tmp_path / name, {"train/approx_kl": [float(place)] * UPDATES})
        (file,) = folder.iterdir()
        file.rename(folder / "events.out.tfevents.1700000000.host.1.0")

    newest, first = read_source(f"tensorboard:{tmp_path}"), read_source(str(tmp_path), 1)

    assert (newest.name, first.name) == ("PPO_10", "PPO_9")
    assert "2 runs are here; this is the newest. --run N takes another (1: PPO_9, 2: PPO_10)." in newest.notes
    with pytest.raises(ValueError, match=r"holds 2 runs, and --run asks for 3"):
        read_source(str(tmp_path), 3)

    (tmp_path / "PPO_10" / "events.out.tfevents.1700000000.host.1.0").rename(tmp_path / "PPO_9" / "events.out.tfevents.1700000001.host.1.0")
    assert [read_source(str(tmp_path / "PPO_9"), number).points["train/approx_kl"][0].value for number in (1, 2)] == [0, 1]


def test_a_directory_or_logs_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["runs/a", "--from", "csv:x"]):
        code, _, error = run_cli(["diagnose", *words], capsys)
        assert code == 2 and "needs either a run directory or --from" in error
    for words in (["--map", "a=b"], ["--run", "2"]):
        code, _, error = run_cli(["diagnose", "runs/a", *words], capsys)
        assert code == 2 and f"{' '.join(words)} is for logs of another trainer" in error
