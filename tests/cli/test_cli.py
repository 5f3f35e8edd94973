"""The command line: its messages about mistakes, after which no files are left."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
from forked import run_python
from run_cli import run_cli

from esper_telemetry import PPO, RunStatus, Sink, Telemetry, __version__, make_env, read_run
from esper_telemetry.cli.main import main
from esper_telemetry.core.metric import catalogue
from esper_telemetry.delivery import catch_up
from esper_telemetry.delivery.catch_up import BackendAudit, audit
from esper_telemetry.delivery.status import Cursor, Cursors

pytestmark = pytest.mark.usefixtures("one_core")

CARTPOLE = ("train", "--env", "CartPole-v1")
ONE_UPDATE = ("--total-steps", "1", "--num-envs", "2", "--num-steps", "32")


def cursors(run_dir: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads((run_dir / "cursors.json").read_text()))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return empty


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def recorded(run_dir: Path) -> None:
    """Record a run of one update, with the name of its directory."""
    with Telemetry(run_dir=run_dir, name=run_dir.name) as telemetry:
        telemetry.log({"my/number": 1.0})
        telemetry.flush(env_step=1)


UNMADE = "WithoutItsSimulator-v0"
gymnasium.register(UNMADE, entry_point="no_such_simulator:Simulation")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--env", "CartPol-v1"], "there is no environment 'CartPol-v1'; did you mean CartPole-v1"),
        (["train", "--env", UNMADE], f"environment '{UNMADE}' cannot be made: No module named 'no_such_simulator'"),
        (["train"], "--env"),
        (
            [*CARTPOLE, "--sink", "grafana"],
            "unknown sink 'grafana'; known sinks are console, mlflow, prometheus, tensorboard, trackio, wandb",
        ),
        ([*CARTPOLE, "--level", "loud"], "level must be one of off, minimal, normal, debug, got 'loud'"),
        ([*CARTPOLE, "--telemetry-budget", "2"], "budget must be a fraction of the wall time over 0 and at most 1, got 2.0"),
        ([*CARTPOLE, "--profile-schedule", "1", "1", "0"], "traces 1 or more, got 1, 1 and 0"),
        ([*CARTPOLE, "--profile", "--level", "off"], "--profile writes into the run directory, which level off does not create"),
        ([*CARTPOLE, "--checkpoint-every", "9", "--level", "off"], "--checkpoint-every needs --run-dir with --level off"),
        ([*CARTPOLE, "--levle", "debug"], "Unrecognized options: --levle, debug; did you mean --level? see esper-telemetry train"),
        ([*CARTPOLE, "--device", "abacus"], "device 'abacus' cannot be used here"),
        ([*CARTPOLE, "--total-steps", "0"], "total_steps must be at least 1, got 0"),
        ([*CARTPOLE, "--total-steps", "many"], "--total-steps: invalid literal for int() with base 10: 'many'"),
        ([*CARTPOLE, "--threads", "0"], "threads must be at least 1, got 0"),
        ([*CARTPOLE, "--checkpoint-every", "-1"], "checkpoint_every must be at least 0, got -1"),
        ([*CARTPOLE, "--eval-every", "9", "--eval-episodes", "0"], "eval_episodes must be at least 1, got 0"),
        ([*CARTPOLE, "--run-dir", ""], "run_dir must name a directory, got ''"),
        ([*CARTPOLE, "--sink", "wandb:a/b"], "a W&B project must have 1 to 128 characters, none of / \\ # ? % :, got 'a/b'"),
        ([*CARTPOLE, "--sink", "mlflow?experiment="], "experiment must have a name, got ''"),
        ([*CARTPOLE, "--num-envs", "0"], "num_envs must be at least 1, got 0"),
        (
            [*CARTPOLE, "--num-minibatches", "3"],
            "num_minibatches must divide the rollout of 8 x 128 = 1024 rows, got 3; the nearest divisors are 1, 2, 4, 8",
        ),
        ([*CARTPOLE, "--policy", "oracle"], "--policy oracle is for --env morphogenesis, got --env CartPole-v1"),
        ([*CARTPOLE, "--task", "text"], "--task text is for --env morphogenesis, got --env CartPole-v1"),
        (
            ["train", "--env", "morphogenesis", "--policy", "random", "--eval-every", "9"],
            "--policy random does not learn, so --eval-every cannot be used with it",
        ),
        (["replay", "nowhere", "--to", "tensorboard"], "there is no run directory nowhere"),
        (["replay", ".", "--to", "tensorboard"], ". is not a run directory: it holds no journal.jsonl"),
        (["replay", "nowhere"], "replay needs --to SINK, such as --to mlflow"),
        (["trian"], "there is no command 'trian'; did you mean train? see esper-telemetry --help"),
        (["--vresion"], "there is no option '--vresion'; did you mean --version? see esper-telemetry --help"),
        (["diagnose", "a", "--jsn"], "did you mean --json? see esper-telemetry diagnose --help"),
        ([*CARTPOLE, "--threshold", "kl_spke_high=1"], "unknown threshold 'kl_spke_high'; did you mean kl_spike_high"),
        (["diagnose", "nowhere"], "there is no run directory nowhere"),
        (["diagnose", "--from", "mlflow:gopher://x?run=1"], "does not support the scheme 'gopher' of a tracking URI"),
    ],
    ids=" ".join,
)
def test_wrong_use_is_one_sentence_with_the_offending_value_and_creates_nothing(
    arguments: list[str], sentence: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_cli(arguments, capfd)

    assert (code, out) == (2, "")
    assert err.startswith("esper-telemetry: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "mlflow"])
def test_a_sink_whose_package_is_missing_says_how_to_install_it(
    package: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    code, out, err = run_cli([*CARTPOLE, "--sink", package], capfd)

    assert (code, out) == (2, "")
    assert f"needs {package}: pip install 'esper-telemetry[{package}]'\n" in err
    assert list(here.iterdir()) == []


def test_without_gymnasium_one_is_told_how_to_install_it(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)

    code, _, err = run_cli(CARTPOLE, capfd)

    assert code == 2
    assert err == "esper-telemetry: Gymnasium environments need gymnasium: pip install 'esper-telemetry[train]'\n"
    assert list(here.iterdir()) == []


def test_a_directory_that_holds_a_run_is_left_alone(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded(here / "taken")
    before = contents(here)

    code, _, err = run_cli([*CARTPOLE, "--run-dir", "taken", "--sink", "tensorboard"], capfd)

    assert code == 2
    assert err.startswith("esper-telemetry: taken already holds a run: ")
    assert contents(here) == before


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates, 64 steps each, with a checkpoint. Pendulum's episodes take 200 steps, so none ends."""
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    options = ("--total-steps", "100", "--num-envs", "2", "--num-steps", "32", "--run-dir", str(run_dir))
    with pytest.raises(SystemExit) as stop:
        main(["train", "--env", "Pendulum-v1", *options, "--level", "minimal", "--sink", "tensorboard"])
    assert stop.value.code == 0
    return run_dir


@pytest.fixture
def stopped(half_done: Path, here: Path) -> Path:
    return Path(shutil.copytree(half_done, here / "run"))


@pytest.mark.system
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ((), "has trained 128 steps of 100: to train more, pass a larger --total-steps"),
        (("--total-steps", "128"), "has trained 128 steps of 128: to train more, pass a larger --total-steps"),
        (("--env", "Acrobot-v1"), "--env cannot change when a run is resumed: "),
        (("--num-envs", "4"), "was trained with 2, got 4"),
        (("--policy", "lstm"), "--policy cannot change when a run is resumed: "),
        (("--hidden-sizes", "8", "8"), "was trained with (64, 64), got (8, 8)"),
        (("--seed", "7"), "was trained with 0, got 7"),
        (("--run-dir", "elsewhere"), "--run-dir goes with a new run: --resume takes it from "),
        (("--preset", "none"), "--preset goes with a new run: --resume takes it from "),
        (("--level", "off"), "--level off keeps no journal, so a run cannot be resumed with it"),
        (("--level", "loud", "--total-steps", "999"), "level must be one of off, minimal, normal, debug, got 'loud'"),
        (("--learning-rate", "-1"), "learning_rate must be positive"),
        (("--sink", "grafana", "--total-steps", "999"), "unknown sink 'grafana'"),
    ],
)
def test_a_run_that_cannot_go_on_as_asked_is_left_as_it_was(
    half_done: Path, option: tuple[str, ...], sentence: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(half_done)

    code, out, err = run_cli(["train", "--resume", str(half_done), *option], capfd)

    assert (code, out) == (2, "")
    assert err.startswith("esper-telemetry: ") and err.count("\n") == 1
    assert sentence in err
    assert contents(half_done) == before
    assert list(here.iterdir()) == []


def unlink_checkpoint(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "latest.pt").unlink()


def cut_checkpoint(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "latest.pt"
    path.write_bytes(path.read_bytes()[:1000])


def put_another_checkpoint(run_dir: Path) -> None:
    PPO(make_env("CartPole-v1", num_envs=2)).save(run_dir / "checkpoints" / "latest.pt")


def unlink_journal(run_dir: Path) -> None:
    (run_dir / "journal.jsonl").unlink()


def lose_the_head(run_dir: Path) -> None:
    journal = run_dir / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[1:]))


def begin_by_hand(run_dir: Path) -> None:
    unlink_journal(run_dir)
    Telemetry(run_dir=run_dir).close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (unlink_checkpoint, "run cannot be resumed without a checkpoint: run/checkpoints/latest.pt does not exist"),
        (cut_checkpoint, "run/checkpoints/latest.pt is not a checkpoint: "),
        (put_another_checkpoint, "does not fit: its env is CartPole-v1, here it is Pendulum-v1"),
        (unlink_journal, "run is not a run directory: it holds no journal.jsonl"),
        (lose_the_head, "run/journal.jsonl has no line that describes the run"),
        (begin_by_hand, "run is not a run of esper-telemetry train: its settings lack checkpoint_every"),
        (shutil.rmtree, "there is no run directory run"),
    ],
)
def test_a_directory_that_cannot_be_resumed_says_why(
    stopped: Path, spoil: Callable[[Path], None], sentence: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(stopped)
    before = contents(here)

    code, out, err = run_cli(["train", "--resume", "run", "--total-steps", "999"], capfd)

    assert (code, out) == (2, "")
    assert err.startswith("esper-telemetry: ") and err.count("\n") == 1
    assert sentence in err
    assert contents(here) == before


@pytest.mark.system
def test_a_run_of_a_version_without_a_setting_is_resumed_with_its_default(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    journal = stopped / "journal.jsonl"
    text = journal.read_text()
    assert text.count(',"stop_on_nonfinite":false') == 1
    journal.write_text(text.replace(',"stop_on_nonfinite":false', ""))

    code, out, err = run_cli(["train", "--resume", "run", "--total-steps", "200"], capfd)

    assert (code, err) == (0, "")
    assert "run continues after update 2" in out


def test_a_run_that_is_still_trained_is_not_resumed(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Telemetry(run_dir="run", resume=True):
        code, _, err = run_cli(["train", "--resume", "run", "--total-steps", "999"], capfd)

    assert code == 2
    assert err == "esper-telemetry: run is still being trained: only one process at a time can continue a run\n"


@pytest.mark.system
def test_a_resumed_run_takes_its_settings_and_sinks_from_the_run(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard without the console, and the level, as in the first part; the learning rate and the number of steps are new."""
    options = ("--total-steps", "200", "--learning-rate", "0.001", "--no-anneal-learning-rate")

    code, out, err = run_cli(["train", "--resume", "run", *options], capfd)

    assert (code, err) == (0, "")
    assert "run continues after update 2, step 128\n" in out
    assert "TensorBoard" in out and "finished after" not in out
    run = read_run("run")
    assert [record.axes.update for record in run.records] == [1, 2, 3, 4]
    assert (run.info.config["total_steps"], run.info.config["num_steps"]) == (200, 32)
    assert [record.values["opt/lr"] for record in run.records[2:]] == [0.001, 0.001]
    assert {record.values["telemetry/level"] for record in run.records} == {1.0}


@pytest.mark.system
def test_other_sinks_may_be_named_and_get_the_whole_run(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run_cli(["train", "--resume", "run", "--total-steps", "200", "--sink", "tensorboard:other"], capfd)

    assert code == 0
    assert cursors(stopped)["tensorboard:other"]["records"] == 4
    assert cursors(stopped)["tensorboard"]["records"] == 2


def test_a_password_is_not_kept_so_the_sink_is_named_again(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    journal = stopped / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"tensorboard"]', '"mlflow:http://me:***@host"]', 1))

    code, _, err = run_cli(["train", "--resume", "run", "--total-steps", "200"], capfd)

    assert code == 2
    assert "the password in sink mlflow:http://me:***@host was not stored: name the sinks again with --sink" in err


@pytest.mark.system
def test_messages_need_their_address_again(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The address is a secret, so only its scheme is stored; the resumed run keeps it."""
    journal = stopped / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"preset":', '"notify":["slack"],"preset":', 1))

    code, out, _ = run_cli(["train", "--resume", "run", "--total-steps", "200"], capfd)

    assert code == 0
    assert "slack gets no messages, because addresses are not stored: name them with --notify" in out
    assert read_run("run").info.config["notify"] == ["slack"]


def test_a_directory_that_cannot_be_written_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its parent is a file, which stops an administrator, too."""
    (here / "file").write_text("")

    code, _, err = run_cli([*CARTPOLE, "--run-dir", "file/run"], capfd)

    assert code == 2
    assert err == "esper-telemetry: cannot write to run directory file/run: Not a directory\n"
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [["train", "--env", "CartPol-v1"], ["--nonsense"]], ids=" ".join)
def test_a_mistake_in_a_terminal_is_the_same_sentence_without_a_traceback(arguments: list[str], here: Path) -> None:
    done = run_python("-m", "esper_telemetry", *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("esper-telemetry: ")
    assert done.stderr.count("\n") == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "replay", "doctor", "compress", "metrics"])
def test_the_help_of_every_command_has_an_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli([command, "--help"], capfd)

    assert (code, err) == (0, "")
    assert f"Example: esper-telemetry {command} " in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_the_help_names_every_command(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(arguments, capfd)

    assert code == 0
    assert all(command in out for command in ("train", "replay", "doctor", "compress", "metrics"))


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--version"], capfd) == (0, f"esper-telemetry {__version__}\n", "")


def test_a_directory_of_runs_is_listed_with_status_and_command(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The oldest run first; other folders are skipped."""
    for name in ("first", "second"):
        recorded(here / "runs" / name)
    Telemetry(run_dir=here / "runs" / "empty", name="empty").close(RunStatus.INTERRUPTED)
    (here / "runs" / "notes").mkdir()

    code, out, err = run_cli(["diagnose", "runs"], capfd)
    entries = json.loads(run_cli(["diagnose", "runs", "--json"], capfd).out)["runs"]

    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs is not a run, but holds 3:",
        "  first, 1 updates, finished: esper-telemetry diagnose runs/first",
        "  second, 1 updates, finished: esper-telemetry diagnose runs/second",
        "  empty, 0 updates, interrupted: esper-telemetry diagnose runs/empty",
    ]
    assert [(entry["run_dir"], entry["status"]) for entry in entries][2] == ("runs/empty", "interrupted")


@pytest.mark.system
def test_a_server_that_is_not_there_is_one_sentence(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 1. `doctor` asks a server once, although both the directory and the option name it."""
    audits: list[Sink] = []

    def audited(run_dir: Path, sink: Sink) -> BackendAudit | None:
        audits.append(sink)
        return audit(run_dir, sink)

    monkeypatch.setattr(catch_up, "audit", audited)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recorded(here / "run")
    Cursors(here / "run").save("mlflow:http://127.0.0.1:1", Cursor())

    read = run_cli(["diagnose", "--from", "mlflow:http://127.0.0.1:1?run=abc"], capfd)
    compared = run_cli(["doctor", "run", "--sink", "mlflow:http://127.0.0.1:1"], capfd)

    dead = "the server does not answer (Connection refused)"
    assert read == (2, "", f"esper-telemetry: MLflow at http://127.0.0.1:1 cannot be read: {dead}\n")
    assert f"\nmlflow:http://127.0.0.1:1: cannot be read: {dead}\n" in compared.out
    assert len(audits) == 1


@pytest.mark.system
def test_after_ctrl_c_the_command_that_goes_on_is_printed(here: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "esper_telemetry", *CARTPOLE, "--total-steps", "10000000", "--run-dir", "run"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),  # as `one_core`
    )
    assert process.stdout is not None
    begun = next(line for line in process.stdout if line.startswith("update "))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()

    assert begun
    assert process.returncode == 130
    assert out.endswith(f"resume with: esper-telemetry train --resume {here / 'run'}\n")


def test_levels_may_be_written_in_any_case(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_cli([*CARTPOLE, *ONE_UPDATE, "--run-dir", "run", "--level", "Debug"], capfd)

    assert (code, err) == (0, "")
    assert read_run("run").records[0].values["telemetry/level"] == 3


def test_a_run_without_a_directory_gets_one_named_after_the_environment(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli([*CARTPOLE, *ONE_UPDATE], capfd)

    (run_dir,) = (here / "runs").iterdir()
    assert code == 0
    assert run_dir.name.startswith("cartpole_v1-")
    assert "finished after 1 updates" in out
    assert read_run(run_dir).status is RunStatus.FINISHED


@pytest.mark.parametrize(("options", "files"), [((), []), (("--run-dir", "run"), [Path("run/checkpoints/latest.pt")])])
def test_at_level_off_checkpoints_alone_are_written_into_the_run_directory_that_is_given(
    options: tuple[str, ...], files: list[Path], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_cli([*CARTPOLE, *ONE_UPDATE, "--level", "off", *options], capfd)

    assert (code, err) == (0, "")
    assert [path.relative_to(here) for path in here.rglob("*.*")] == files


@pytest.mark.system
def test_a_profile_is_a_trace_that_perfetto_and_tensorboard_read(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Updates 1 and 2 are skipped, 3 and 4 traced: twice the ranges of an update, with torch's operations below."""
    four = ("--total-steps", "256", "--num-envs", "2", "--num-steps", "32", "--num-epochs", "1")
    code, out, _ = run_cli([*CARTPOLE, *four, "--run-dir", "run", "--profile", "--profile-schedule", "1", "1", "2"], capfd)

    (path,) = (here / "run" / "profile").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert code == 0
    assert str(path.relative_to(here)) in out
    assert path.name.endswith(".pt.trace.json.gz")
    assert (names.count("rollout"), names.count("update"), names.count("telemetry")) == (2, 2, 4)
    assert sum(event["name"].startswith("aten::") for event in events) > 100


def test_a_run_too_short_to_be_profiled_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli([*CARTPOLE, *ONE_UPDATE, "--run-dir", "run", "--profile"], capfd)

    assert code == 0
    assert "profile: nothing was traced, because the run ended before update 6" in out


def test_a_journal_is_packed_once_and_everything_reads_it(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, again = run_cli(["compress", "run"], capfd), run_cli(["compress", "run"], capfd)

    assert (first.code, first.out[:7], " MB are " in first.out) == (0, "run: 0.", True)
    assert (again.code, again.out) == (0, "run: is packed already\n")
    assert not (stopped / "journal.jsonl").exists()
    assert run_cli(["replay", "run", "--to", "tensorboard:elsewhere"], capfd).code == 0
    assert run_cli(["diagnose", "run"], capfd).code == 0
    assert run_cli(["compress", "nowhere"], capfd)[::2] == (2, "esper-telemetry: there is no run directory nowhere\n")


def test_a_run_is_replayed_into_another_backend_once(stopped: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = run_cli(["replay", "run", "--to", "tensorboard:elsewhere"], capfd)
    again = run_cli(["replay", "run", "--to", "tensorboard:elsewhere"], capfd)

    assert (first.code, first.out) == (0, "tensorboard:elsewhere: closed, 2 records sent\n")
    assert (again.code, again.out) == (0, "tensorboard:elsewhere: closed, 0 records sent\n")
    assert len(list((here / "elsewhere").iterdir())) == 1

    several = run_cli(["replay", "run", "--to", "tensorboard:b", "--to", "tensorboard:c"], capfd)
    assert several.out == "tensorboard:b: closed, 2 records sent\ntensorboard:c: closed, 2 records sent\n"


def test_metrics_lists_every_key_with_its_meaning(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(["metrics"], capfd)

    assert code == 0
    assert all(metric.key in out for metric in catalogue())


@pytest.mark.system
def test_metrics_as_json_is_for_programs(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(["metrics", "--json"], capfd)

    described = json.loads(out)
    assert code == 0
    assert [metric["key"] for metric in described] == [metric.key for metric in catalogue()]
    assert all(metric["question"] for metric in described)
