"""Public logs: numbers of real training runs, the correct result for each, and columns of unknown trainers."""

import gzip
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_cli import run_cli
from torch.utils.tensorboard import SummaryWriter

from esper_telemetry.alarms.verdict.run_outcome import outcome_of
from esper_telemetry.importers import read_foreign, read_source
from esper_telemetry.importers.log_conditions import adaptive_rate
from esper_telemetry.importers.records import LoggedPoint, LoggedRun

LOGS = Path(__file__).parent / "logs"


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run_cli(["diagnose", *arguments, "--json"], capsys)
    assert code == 0
    verdict: dict[str, Any] = json.loads(out)
    return verdict


@pytest.mark.parametrize(
    ("name", "outcome", "causes", "said"),
    [
        ("rsl_rl_adaptive.csv", "flat", [], ""),
        ("rl_games_amp.csv", "learning", [("policy/kl_spike", 1), ("policy/clip_saturation", 9)], ""),
        (
            "rl_games_drop.csv",
            "learning",
            [("task/return_drop", 85)],
            "Since update 85, the return has fallen from 1206 to 782: 37 % of the improvement is lost.",
        ),
        ("sample_factory.csv", "learning", [], "Returns of the first"),
        ("sb3_solved_constant.csv", "learning", [], ""),
        ("sb3_sac_no_timesteps.csv", "learning", [], "an off-policy algorithm (train/critic_loss)"),
        ("sb3_console.txt", "learning", [("policy/kl_spike", 7)], ""),
        ("monitor.csv", "flat", [], "The Monitor wrapper writes episodes alone"),
        ("rllib_first_rows_nan.csv", "learning", [], ""),
        (
            "rllib_collapsed.csv",
            "learning",
            [("policy/entropy_collapse", 2)],
            "Since update 2, the policy has done the same in every state, until update 260",
        ),
        ("rllib_impala_result.json", "converged", [], "losses and entropies of IMPALA and A2C are sums"),
        ("trl_early_2025.log", "too short to tell", [], ""),
        ("verl_group_of_one.log", "flat", [("lm/grouping", 1)], "there is one answer per prompt and no baseline"),
        ("verl_group_of_one.log", "flat", [("lm/grouping", 1)], "measured before the only gradient step"),
        ("spinning_up_progress.txt", "converged", [], ""),
    ],
)
def test_public_logs(name: str, outcome: str, causes: Sequence[tuple[str, int]], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`rl_games_amp` has a KL of 53.6 and a clip fraction of 0.31 in its first update; `sb3_console` has 0.12 and 0.56."""
    verdict = diagnosed(capsys, "--from", str(LOGS / name))

    assert verdict["outcome"]["outcome"] == outcome
    assert [(incident["cause"], incident["since"]) for incident in verdict["incidents"]] == causes
    assert said in json.dumps([verdict["notes"], verdict["events"], verdict["incidents"]])
    assert "esper_telemetry." not in json.dumps(verdict) and "telemetry.observe" not in json.dumps(verdict)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ((LOGS / "own_columns.csv").read_text(), {"episode/return_mean": 18.8333}),
        ((LOGS / "own_columns_2.csv").read_text(), {"episode/return_mean": 0.43950554728507996, "policy/kl_k1": 0.0}),
        ("Output,Average Reward,Total Timesteps\n1,0.03,2048\n2,0.09,4096\n", {"episode/return_mean": 0.03}),
        ("average-episode-return\tv-loss\ttotal-env-interacts\n-5\t2\t10\n-4\t1\t20\n", {"episode/return_mean": -5.0, "loss/value": 2.0}),
        ("1,-12.5\n2,-11\n3,-9\n", {"episode/return_mean": -12.5}),
        ('{"rewards": [1, 2, 3], "pi_loss": [0.3, 0.2, 0.1]}', {"episode/return_mean": 1.0, "loss/policy": 0.3}),
    ],
    ids=["episodes", "a fine-tuning script", "names in words", "hyphens", "no names", "lists"],
)
def test_columns_of_an_unknown_trainer(
    table: str, expected: Mapping[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal prints a command whose mapping reads them. Columns without a name are mapped by hand."""
    monkeypatch.chdir(tmp_path)
    Path("own log.csv" if "," in table or "\t" in table else "own log.json").write_text(table)
    path = next(iter(tmp_path.iterdir())).name

    refusal = run_cli(["diagnose", "--from", path], capsys).err
    command = shlex.split(refusal[refusal.index("esper-telemetry diagnose") :])[2:]
    if "COLUMN" in refusal:
        command = ["--from", path, "--map", "episode/return_mean=2", "--map", "env_step=1"]
    verdict = diagnosed(capsys, *command)

    assert "these are the columns of no known trainer" in refusal
    columns = dict(word.split("=", 1) for word in command if "=" in word)
    first = read_foreign(read_source(path), columns).records[0]
    assert {key: first.values[key] for key in expected} == expected
    assert set(verdict["read"]) >= set(expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--map", "episode/return_mean"], "--map needs KEY=COLUMN, such as episode/return_mean=reward"),
        (["--map", "episode/return=reward"], "unknown metric episode/return; known ones include "),
        (["--map", "episode/return_mean=rewards"], "unknown column rewards; known ones include reward"),
        (["--run", "2"], "holds 1 run, and --run asks for 2"),
    ],
)
def test_a_wrong_column_is_a_sentence(words: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_cli(["diagnose", "--from", LOGS / "own_columns.csv", *words], capsys)

    assert code == 2 and sentence in error


def test_a_column_in_place_of_the_trainer_s(tmp_path: Path) -> None:
    """The evaluation replaces the returns of training; the other columns are the trainer's."""
    path = tmp_path / "progress.csv"
    path.write_text("Epoch,AverageEpRet,LossV,TotalEnvInteracts,best\n" + "".join(f"{n},1,4,{n * 10},{n}\n" for n in range(1, 9)))

    records = read_foreign(read_source(str(path)), {"episode/return_mean": "best"}).records

    assert [record.values["episode/return_mean"] for record in records] == [float(n) for n in range(1, 9)]
    assert {record.values["loss/value"] for record in records} == {2.0}


def test_each_series_keeps_its_own_positions() -> None:
    """Returns logged between updates belong to the next update; series on another axis are listed and not read."""
    losses = {"train/loss": [LoggedPoint(x, 1.0) for x in (100, 200, 300)]}
    points = {
        **losses,
        "train/kl_divergence": [LoggedPoint(x, x / 1e4) for x in (100, 200, 300)],
        "reward/reward": [LoggedPoint(x, float(x)) for x in (50, 90, 150, 240, 260, 310)],
        "len/len": [LoggedPoint(x, 7.0) for x in (1, 2)],
    }

    imported = read_foreign(LoggedRun("run", points))

    assert [record.values["episode/return_mean_100"] for record in imported.records] == [70.0, 150.0, 270.0]
    assert imported.unused == ("len/len (on another axis: 1 to 2)",)


def test_a_long_log_is_merged() -> None:
    """1,201 rows: an update is the mean of three rows, and the last update has one row."""
    points = {tag: [LoggedPoint(10.0 * n, float(n)) for n in range(1, 1202)] for tag in ("train/loss", "train/kl_divergence")}

    imported = read_foreign(LoggedRun("run", points))

    assert [record.axes.env_step for record in imported.records[:2]] == [30, 60]
    assert imported.records[-1].axes.env_step == 12010
    assert [record.values["loss/total"] for record in imported.records[:2]] == [2.0, 5.0]
    assert "An update is the mean of 3 of 1,201 logged rows." in imported.notes


def test_runs_that_stand_in_one_text(tmp_path: Path) -> None:
    """Steps that start again mark a new run; steps counted within each epoch do not."""
    table = "| time/ | |\n|    total_timesteps | {} |\n| rollout/ | |\n|    ep_rew_mean | {} |\n-------------\n"
    (tmp_path / "out.txt").write_text("".join(table.format(n % 4 * 100 + 100, n) for n in range(8)))
    (tmp_path / "epochs.csv").write_text("epoch,step,loss,reward,grad_norm\n" + "".join(f"{n // 4},{n % 4},1,2,3\n" for n in range(8)))

    first, second = (read_source(str(tmp_path / "out.txt"), number) for number in (1, 2))
    epochs = read_source(str(tmp_path / "epochs.csv"))

    assert [point.value for point in first.points["rollout/ep_rew_mean"]] == [0, 1, 2, 3]
    assert [point.value for point in second.points["rollout/ep_rew_mean"]] == [4, 5, 6, 7]
    assert (epochs.x, len(epochs.points["reward"])) == ("rows", 8)


def test_a_folder_is_searched(tmp_path: Path) -> None:
    """Event files have priority over tables; files that only have an event file's name, or no numbers, are skipped."""
    (tmp_path / "progress.csv").write_bytes((LOGS / "sb3_solved_constant.csv").read_bytes())
    (tmp_path / "events.out.tfevents.1.host.1.0.meta").write_text("guid: 1")
    before = read_source(str(tmp_path))
    with SummaryWriter(str(tmp_path / "PPO_1")) as writer:
        for step in range(3):
            writer.add_scalar("rollout/ep_rew_mean", 5.0, step)
    after = read_source(str(tmp_path))

    assert len(before.points["rollout/ep_rew_mean"]) == 98
    assert after.points["rollout/ep_rew_mean"] == [(0, 5.0), (1, 5.0), (2, 5.0)]
    assert "also here, and not read: " in after.notes[0] and "progress.csv" in after.notes[0]


def test_other_files_of_trainers(tmp_path: Path) -> None:
    """Monitors of several environments, a W&B panel with a column per run, ML-Agents checkpoints, and a compressed Sample Factory log."""
    for place in range(2):
        rows = "".join(f"{place},{10},{t}\n" for t in range(place, 20, 2))
        (tmp_path / f"{place}.monitor.csv").write_text('#{"t_start": 1.0, "env_id": "A-v0"}\nr,l,t\n' + rows)
    (tmp_path / "wandb_export.csv").write_text(
        '"Step","a - rollout/ep_rew_mean","a - rollout/ep_rew_mean__MIN","b - rollout/ep_rew_mean"\n1,5,5,\n2,6,6,8\n'
    )
    (tmp_path / "training_status.json").write_text(
        json.dumps({"Ball": {"checkpoints": [{"steps": n, "reward": n / 10} for n in (10, 20)]}, "metadata": {"x": "1"}})
    )
    lines = "".join(f"Fps is (10 sec: nan). Total num frames: {n}. Lag\n[1] Avg episode reward: [(0, '{n}.5')]\n" for n in (5, 9))
    (tmp_path / "sf_log.txt.gz").write_bytes(gzip.compress(lines.encode()))

    def returns(name: str, tag: str, run: int | None = None) -> list[tuple[float, ...]]:
        return [tuple(point) for point in read_source(str(tmp_path / name), run).points[tag]]

    assert returns("", "r")[:3] == [(10, 0), (20, 1), (30, 0)]
    assert returns("wandb_export.csv", "rollout/ep_rew_mean") == [(2, 8)]
    assert returns("wandb_export.csv", "rollout/ep_rew_mean", 1) == [(1, 5), (2, 6)]
    assert returns("training_status.json", "Environment/Cumulative Reward") == [(10, 1), (20, 2)]
    assert returns("sf_log.txt.gz", "reward/reward") == [(5, 5.5), (9, 9.5)]


def test_numbers_that_are_not_finite_without_a_fault() -> None:
    """A mean of no episodes is not a fault; a loss that is never finite is one, and so is one that stops being finite."""
    nan = float("nan")

    def counted(loss: Sequence[float], returns: Sequence[float]) -> list[float]:
        columns = {"train/loss": loss, "train/kl_divergence": [0.1] * len(loss), "reward/reward": returns}
        points = {tag: [LoggedPoint(float(n), value) for n, value in enumerate(values)] for tag, values in columns.items()}
        return [record.values["numerics/nonfinite"] for record in read_foreign(LoggedRun("run", points)).records]

    assert counted([nan, 1, 1, 1], [nan, nan, 3, nan]) == [0, 0, 0, 0]
    assert counted([nan] * 4, [1, 2, 3, 4]) == [1, 1, 1, 1]
    assert counted([1, 1, nan, 1], [1, 2, 3, float("inf")]) == [0, 0, 1, 1]


NOISE = [abs(n % 7 - 3) / 10 for n in range(60)]
RISING = [n + NOISE[n] for n in range(60)]


@pytest.mark.parametrize(
    ("columns", "kind", "clause"),
    [
        ({"rollout/ep_rew_mean": RISING}, None, ""),
        ({"rollout/ep_rew_mean": [-50.0] * 60}, "reward/constant", "Since update 1, every episode has had a return of exactly -50"),
        (
            {"rollout/ep_rew_mean": RISING, "train/explained_variance": [n / 100 for n in NOISE]},
            "value/never_fits",
            "Since update 1, the critic has explained nothing of the returns",
        ),
        (
            {"actor/ppo_kl": [0.0] * 60, "actor/pg_clipfrac": [0.0] * 60, "actor/entropy": [0.7] * 60},
            "policy/kl_stall",
            "the policy is frozen",
        ),
        (
            {"train/reward": NOISE, "train/frac_reward_zero_std": NOISE, "train/entropy": [1 + n for n in NOISE]}
            | {"train/grad_norm": [1.0] * 48 + [90.0] * 12},
            "grad/slow_growth",
            "gradient norms have grown from 1 to 90",
        ),
    ],
    ids=["nothing", "constant returns", "a critic without a fit", "a frozen policy", "growing gradients"],
)
def test_findings_on_a_whole_log_are_alarms(
    columns: Mapping[str, Sequence[float]], kind: str | None, clause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the types of the rules for journals, and `--fail-on warn` sees them."""
    path = tmp_path / "progress.csv"
    rows = [",".join(map(str, cells)) for cells in zip(range(1, 61), *columns.values(), strict=True)]
    path.write_text("\n".join([",".join(["step", *columns]), *rows]))

    code, out, _ = run_cli(["diagnose", "--from", path, "--json", "--fail-on", "warn"], capsys)
    incidents = json.loads(out)["incidents"]
    alarms = {alarm["type"]: alarm for incident in incidents for alarm in incident["alarms"]}

    assert code == (0 if kind is None else 3)
    assert alarms if kind else not alarms
    assert kind is None or (clause in alarms[kind]["text"] and alarms[kind]["level"] == "warn")


def test_a_log_without_returns_names_what_logs_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("time/total_timesteps,train/policy_gradient_loss\n" + "".join(f"{n},0.01\n" for n in range(30)))

    text = diagnosed(capsys, "--from", str(path))["outcome"]["text"]

    assert "no returns are logged, which are supplied by the Monitor wrapper" in text and "telemetry" not in text


def test_few_returns_give_way_to_the_reward_per_step() -> None:
    """skrl logs the return of an episode when one ends, which eight of a hundred rows have, and the reward of a step in each row."""
    rows = range(1, 101)
    points = {
        "Loss / Policy loss": [LoggedPoint(10.0 * n, 0.1) for n in rows],
        "Reward / Instantaneous reward (mean)": [LoggedPoint(10.0 * n, float(n)) for n in rows],
        "Reward / Total reward (mean)": [LoggedPoint(10.0 * n, 5.0) for n in rows if n % 12 == 0],
    }

    imported = read_foreign(LoggedRun("run", points))

    assert [record.values["reward/mean"] for record in imported.records] == [float(n) for n in rows]
    assert not any("episode/return_mean_100" in record.values for record in imported.records)
    assert "because only 8 rows have the return of an episode" in imported.notes[0]
    assert outcome_of(imported.records, imported.facts).text.startswith("learning: mean reward 5.5 -> 90.5")


def test_a_rate_that_is_printed_with_three_decimals_is_not_0(tmp_path: Path) -> None:
    line = "step:{} - actor/lr:0.000 - actor/ppo_kl:-0.000 - actor/pg_clipfrac:0.001 - critic/score/mean:0.000\n"
    (tmp_path / "verl.log").write_text("".join(line.format(step) for step in range(1, 4)))

    assert set(read_source(str(tmp_path / "verl.log")).points) == {"actor/pg_clipfrac", "critic/score/mean"}


def test_a_rate_that_follows_the_divergence() -> None:
    """Factors of 1.5, several of which may fall in one row; a decay and a warm-up have other factors."""
    assert adaptive_rate([1e-3, 1.5e-3, 1.5e-3, 1e-3, 2.25e-3, 1e-3 / 1.5, 1e-3])
    assert not adaptive_rate([1e-3 * (1 - n / 10) for n in range(10)])
    assert not adaptive_rate([1e-3, 2e-3, 1e-3, 2e-3, 1e-3, 2e-3])
