"""One real run, read back from everywhere: the same numbers in the journal, TensorBoard, W&B and MLflow."""

from pathlib import Path

import pytest
from backends_read import assert_the_same_numbers_in_all_four, is_detail, journal_points, mlflow_run, wandb_entries, wandb_exit_code
from command_line import Finished

from esper_telemetry import RunStatus, read_run

pytestmark = pytest.mark.system


@pytest.fixture
def run_dir(finished: Finished) -> Path:
    return finished.run_dir


def test_every_key_of_every_update_is_the_same_in_all_four(run_dir: Path) -> None:
    assert_the_same_numbers_in_all_four(run_dir)


def test_a_hundred_metrics_are_compared(run_dir: Path) -> None:
    """Otherwise the comparison could pass without numbers. 8 epochs of 4 minibatches are 32 gradient steps an update."""
    points = journal_points(run_dir)

    assert len(points) > 100
    assert len(points["policy/kl"]) == 6
    assert [record.axes.gradient_step for record in read_run(run_dir).records] == [32 * update for update in range(1, 7)]
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


def test_every_backend_has_the_settings_and_says_that_the_run_finished(run_dir: Path) -> None:
    settings = {"env": "CartPole-v1", "num_steps": 128, "seed": 1}
    run, entries, in_mlflow = read_run(run_dir), wandb_entries(run_dir), mlflow_run(run_dir)
    logged = [entry["run"]["config"]["update"] for entry in entries if entry["type"] == "run"]

    assert (run.status, wandb_exit_code(entries), in_mlflow.info.status) == (RunStatus.FINISHED, 0, "FINISHED")
    assert settings.items() <= run.info.config.items()
    assert settings.items() <= logged[0].items()
    assert {key: str(value) for key, value in settings.items()}.items() <= in_mlflow.data.params.items()
    assert in_mlflow.data.tags["mlflow.source.name"].endswith("esper_telemetry/__main__.py")


def test_the_end_says_what_was_seen_and_how_to_open_each_backend(finished: Finished) -> None:
    run_dir, command = finished

    assert command.stderr == ""
    assert "return, last 100 episodes" in command.stdout
    assert f"$ tensorboard --logdir {run_dir}\n" in command.stdout
    assert f"$ wandb sync {run_dir}/wandb/offline-run-*-{read_run(run_dir).info.run_id}\n" in command.stdout
    assert f"$ mlflow ui --backend-store-uri sqlite:///{run_dir}/mlflow.db\n" in command.stdout
    assert list(run_dir.glob(f"wandb/offline-run-*-{read_run(run_dir).info.run_id}"))
