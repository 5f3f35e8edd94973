"""One real run, read back from everywhere: the same numbers in the journal, TensorBoard, W&B and MLflow."""

from pathlib import Path

import pytest
from backends_read import (
    AXES,
    assert_the_same_numbers_in_all_four,
    is_detail,
    journal_points,
    mlflow_points,
    mlflow_run,
    tensorboard_points,
    wandb_entries,
    wandb_exit_code,
    wandb_rows,
)
from command_line import Finished

from esper_telemetry import RunStatus, read_run

pytestmark = pytest.mark.system


@pytest.fixture
def run_dir(finished: Finished) -> Path:
    return finished.run_dir


def test_every_key_of_every_update_is_the_same_in_all_four(run_dir: Path) -> None:
    assert_the_same_numbers_in_all_four(run_dir)


def test_a_hundred_metrics_are_compared(run_dir: Path) -> None:
    """Otherwise the comparison could pass without numbers."""
    points = journal_points(run_dir)

    assert len(points) > 100
    assert len(points["policy/kl"]) == 6
    assert {"episode/return_mean_100", "grad/global/norm_preclip", "value/explained_variance"} <= points.keys()


def test_histograms_are_compared_too(run_dir: Path) -> None:
    """The log-ratios of 8 epochs over each rollout's rows."""
    histograms = [record.histograms for record in read_run(run_dir).records]

    assert all({"policy/logratio/hist", "adv/raw/hist", "ret/hist", "value/err/hist"} <= by_key.keys() for by_key in histograms)
    rows = [sum(by_key["ret/hist"].counts) for by_key in histograms]
    assert [sum(by_key["policy/logratio/hist"].counts) for by_key in histograms] == [8 * count for count in rows]


def test_only_details_are_left_to_the_journal(run_dir: Path) -> None:
    """Two trunks of two layers, a head and a value, with a weight and a bias each; and histories of other keys."""
    keys = {key for record in read_run(run_dir).records for key in record.values}

    left_out = keys - journal_points(run_dir).keys()
    assert len([key for key in left_out if key.startswith("grad/layer/") and key.endswith("/norm")]) == 12
    assert "policy/kl/ema" in left_out
    assert all(map(is_detail, left_out))


def test_x_is_the_environment_step_in_tensorboard_and_mlflow(run_dir: Path) -> None:
    steps = [record.axes.env_step for record in read_run(run_dir).records]

    assert steps == sorted(set(steps))
    assert steps[-1] >= 5500
    assert [point.step for point in tensorboard_points(run_dir)["policy/kl"]] == steps
    assert [point.step for point in mlflow_points(run_dir)["policy/kl"]] == steps


@pytest.mark.parametrize(("axis", "expected"), [("axis/update", [1, 2, 3, 4, 5, 6]), ("axis/gradient_step", range(32, 193, 32))])
def test_the_other_axes_stand_beside_it(run_dir: Path, axis: str, expected: list[int]) -> None:
    """8 epochs of 4 minibatches are 32 gradient steps an update."""
    assert [point.value for point in tensorboard_points(run_dir)[axis]] == list(expected)
    assert [point.value for point in mlflow_points(run_dir)[axis]] == list(expected)


def test_every_row_of_wandb_carries_all_axes(run_dir: Path) -> None:
    rows = wandb_rows(wandb_entries(run_dir))
    records = read_run(run_dir).records

    assert [[row[axis] for axis in AXES] for row in rows] == [
        [record.axes.update, record.axes.env_step, record.axes.gradient_step, record.axes.wall_time] for record in records
    ]


def test_every_backend_says_that_the_run_finished(run_dir: Path) -> None:
    assert read_run(run_dir).status is RunStatus.FINISHED
    assert wandb_exit_code(wandb_entries(run_dir)) == 0
    assert mlflow_run(run_dir).info.status == "FINISHED"


def test_every_backend_has_the_settings(run_dir: Path) -> None:
    settings = {"env": "CartPole-v1", "num_steps": 128, "seed": 1}
    logged = [entry["run"]["config"]["update"] for entry in wandb_entries(run_dir) if entry["type"] == "run"]

    assert settings.items() <= read_run(run_dir).info.config.items()
    assert settings.items() <= logged[0].items()
    assert {key: str(value) for key, value in settings.items()}.items() <= mlflow_run(run_dir).data.params.items()


def test_mlflow_names_the_program_that_made_the_run(run_dir: Path) -> None:
    assert mlflow_run(run_dir).data.tags["mlflow.source.name"].endswith("esper_telemetry/__main__.py")


def test_the_end_says_what_was_seen_and_how_to_open_each_backend(finished: Finished) -> None:
    run_dir, command = finished

    assert command.stderr == ""
    assert "return, last 100 episodes" in command.stdout
    assert f"$ tensorboard --logdir {run_dir}\n" in command.stdout
    assert f"$ wandb sync {run_dir}/wandb/offline-run-*-{read_run(run_dir).info.run_id}\n" in command.stdout
    assert f"$ mlflow ui --backend-store-uri sqlite:///{run_dir}/mlflow.db\n" in command.stdout
    assert list(run_dir.glob(f"wandb/offline-run-*-{read_run(run_dir).info.run_id}"))
