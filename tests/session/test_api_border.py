"""Arguments of the Python API: accepted forms, one-sentence errors, and one warning for lost values."""

import argparse
import copy
import gc
import io
import math
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from forked import run_python
from torch import nn

from esper_telemetry import Metric, MetricGroup, Record, RunStatus, Telemetry, attach, read_run, reports, value_fit
from esper_telemetry.core.group import Postponed
from esper_telemetry.testing import MemorySink


@dataclass(frozen=True, slots=True)
class Curiosity(MetricGroup):
    bonus: Any = reports(Metric(key="curiosity/bonus", unit="reward", question="How much does novelty pay?"))


def warned(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


# --- the constructor


def one_record(sinks: Any, run_dir: Path) -> None:
    with Telemetry(sinks, run_dir=run_dir) as telemetry:
        telemetry.log({"a/b": 1.0})
        telemetry.flush(env_step=1)


@pytest.mark.system
def test_a_single_sink_is_a_list_of_one(tmp_path: Path) -> None:
    memory, received = MemorySink(), list[Record]()
    one_record(memory, tmp_path / "object")
    one_record(received.append, tmp_path / "callable")
    one_record("prometheus", tmp_path / "uri")

    assert [record.values["a/b"] for record in (*memory.records, *received)] == [1.0, 1.0]
    assert (tmp_path / "uri" / "metrics.prom").exists()


@pytest.mark.parametrize("sinks", [None, [], (), iter(())])
def test_no_sinks_are_no_sinks(tmp_path: Path, sinks: Any) -> None:
    one_record(sinks, tmp_path / "run")

    assert len(read_run(tmp_path / "run").records) == 1


WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sinks": "tensorbord"}, ValueError, "'tensorbord'"),
    ({"sinks": 3}, TypeError, "got 3"),
    ({"sinks": {"tensorboard": True}}, TypeError, "got {'tensorboard': True}"),
    ({"sinks": MemorySink}, TypeError, r"write MemorySink\(\)"),
    ({"sinks": ["console", None]}, TypeError, "got None"),
    ({"level": "debgu"}, ValueError, "level must be one of off, minimal, normal, debug, got 'debgu'"),
    ({"level": 7}, ValueError, "got 7"),
    ({"budget": 0}, ValueError, "budget must be a fraction of the wall time over 0 and at most 1, got 0"),
    ({"budget": 1.5}, ValueError, "got 1.5"),
    ({"budget": math.nan}, ValueError, "got nan"),
    ({"budget": "2 %"}, TypeError, "budget must be one number, got '2 %'"),
    ({"close_timeout": 0}, ValueError, "got 0"),
    ({"close_timeout": None}, TypeError, "close_timeout must be one number, got None"),
    ({"detect": "strict"}, TypeError, "detect takes True, False or Thresholds.*got 'strict'"),
    ({"ranks": "one"}, ValueError, "ranks must be 'all' or 'alone', got 'one'"),
    ({"offload": "no"}, ValueError, "offload must be True or False, got 'no'"),
    ({"resume": "runs/a"}, ValueError, "resume must be True or False, got 'runs/a'"),
    ({"config": 3}, TypeError, "config must be a mapping, a dataclass or an argparse.Namespace, got 3"),
    ({"facts": ["clip"]}, TypeError, r"facts must be a mapping.*got \['clip'\]"),
    ({"name": 3}, TypeError, "name must be a text, got 3"),
    ({"run_dir": ""}, ValueError, "run_dir must name a directory, got ''"),
    ({"run_dir": 3}, TypeError, "run_dir must be a path, 'auto' or None, got 3"),
    ({"rundir": "x"}, TypeError, "no argument 'rundir': did you mean 'run_dir'?"),
    ({"xyzzy": 1}, TypeError, "no argument 'xyzzy': it takes sinks, run_dir"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=text):
        Telemetry(**arguments)

    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_is_a_path_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for run_dir in (tmp_path / "a", str(tmp_path / "b"), "~/c"):
        one_record((), run_dir)  # type: ignore[arg-type]  # a text is taken, too

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert len(read_run("~/c").records) == 1


def test_a_file_and_the_directory_of_another_run_are_refused(tmp_path: Path, telemetry: Telemetry) -> None:
    """The other run's journal is still empty."""
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError, match="file' is a file: pass the path of a directory"):
        Telemetry(run_dir=tmp_path / "file")
    with pytest.raises(FileExistsError, match=r"already holds a run: pass another run directory, or .* Telemetry\(resume=True\)"):
        Telemetry(run_dir=tmp_path / "run")


@dataclass
class Settings:
    lr: float = 0.1
    path: Path = Path("data")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Settings(), {"lr": 0.1, "path": "data"}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        (None, {}),
        ({"own": Settings(), 1: np.float32(0.5)}, {"own": {"lr": 0.1, "path": "data"}, "1": 0.5}),
    ],
)
def test_settings_are_written_as_json_and_one_tag_is_a_list_of_one(tmp_path: Path, config: object, expected: dict[str, object]) -> None:
    Telemetry(run_dir=tmp_path / "run", config=config, tags="baseline", notes=None).close()

    info = read_run(tmp_path / "run").info
    assert (info.config, info.tags) == (expected, ("baseline",))


# --- numbers


STEPS: list[Any] = [5, np.int64(5), np.uint8(5), np.array(5), np.array([5]), torch.tensor(5), torch.tensor([5.0]), 5.0, np.float32(5)]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_steps_are_whole_numbers_of_any_type(tmp_path: Path, telemetry: Telemetry, step: Any) -> None:
    telemetry.observe(Curiosity(torch.tensor(1.0)), epoch=step, step=step)
    telemetry.flush(env_step=step, update=step, gradient_step=step)

    axes = read_run(tmp_path / "run").records[0].axes
    assert (axes.env_step, axes.update, axes.gradient_step) == (5, 5, 5)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (2.5, ValueError, "must be a whole number, got 2.5"),
        (math.nan, ValueError, "must be a whole number, got nan"),
        (-1, ValueError, "must be at least 0, got -1"),
        (2**63, ValueError, "must be at most 9223372036854775807, got 9223372036854775808"),
        ("5", TypeError, "must be one number, got '5'"),
        (None, TypeError, "must be one number, got None"),
        (np.arange(3), TypeError, r"must be one number, got a NumPy array of shape \[3\]"),
        (torch.zeros(2), TypeError, r"must be one number, got a tensor of shape \[2\]"),
        (torch.tensor(1.5), ValueError, r"must be a whole number, got tensor\(1.5"),
    ],
)
def test_what_is_no_step_is_quoted(telemetry: Telemetry, step: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"env_step {text}"):
        telemetry.flush(env_step=step)
    if step is not None:
        with pytest.raises(error, match=f"update {text}"):
            telemetry.flush(env_step=1, update=step)
        with pytest.raises(error, match=f"step {text}"):
            telemetry.observe(Curiosity(1.0), step=step)
    if np.ndim(step) == 0:
        with pytest.raises(error, match=f"epoch {text}"):
            telemetry.observe(Curiosity(1.0), epoch=step)


def test_logged_numbers_are_of_any_type(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {
        "python": 1,
        "truth": True,
        "numpy": np.float32(1),
        "half": np.float16(1),
        "array": np.array(1.0),
        "one": np.array([1.0]),
        "tensor": torch.tensor(1.0),
        "tracked": torch.tensor([1.0], requires_grad=True),
    }
    with warnings.catch_warnings(), Telemetry(run_dir=tmp_path / "run") as telemetry:
        warnings.simplefilter("error")
        for update in range(2):
            telemetry.log({f"a/{name}": number for name, number in numbers.items()})
            telemetry.flush(env_step=update)

    for record in read_run(tmp_path / "run").records:
        assert {key: value for key, value in record.values.items() if key.startswith("a/")} == {f"a/{name}": 1.0 for name in numbers}


def test_a_number_that_is_not_finite_or_too_large_is_counted(tmp_path: Path, telemetry: Telemetry) -> None:
    telemetry.log({"a/b": 10**400, "a/c": -(10**400), "a/d": math.nan, "a/e": 1.0})
    telemetry.flush(env_step=1)

    values = read_run(tmp_path / "run").records[0].values
    assert {key: value for key, value in values.items() if key.startswith("a/")} == {
        **dict.fromkeys(("a/b_nonfinite", "a/c_nonfinite", "a/d_nonfinite"), 1.0),
        "a/e": 1.0,
    }


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"a/b": "0.3"}, TypeError, "a/b must be one number, got '0.3'"),
        ({"a/b": {"c": 1.0}}, TypeError, "a/b must be one number, got {'c': 1.0}"),
        ({"a/b": np.zeros(3)}, TypeError, r"a/b must be one number, got a NumPy array of shape \[3\]"),
        ({"a/b": torch.zeros(2, 2)}, TypeError, r"a/b must be one number, got a tensor of shape \[2, 2\]"),
        ({"a/b": 1j}, TypeError, "a/b must be one number, got 1j"),
        ({"Loss/Policy Loss": 1.0}, ValueError, "got 'Loss/Policy Loss': write 'loss/policy_loss'"),
        ({"charts/episodic-return": 1.0}, ValueError, "write 'charts/episodic_return'"),
        ({"": 1.0}, ValueError, "got ''"),
        ({3: 1.0}, ValueError, "got 3"),
        (None, TypeError, "log takes a mapping from keys to numbers"),
        ("a/b", TypeError, "log takes a mapping from keys to numbers"),
        ([("a/b", 1.0)], TypeError, "log takes a mapping from keys to numbers"),
    ],
)
def test_what_cannot_be_logged_is_quoted_and_nothing_is_logged(
    tmp_path: Path, telemetry: Telemetry, values: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        telemetry.log({"a/a": 1.0, **values} if isinstance(values, dict) else values)
    telemetry.flush(env_step=1)

    assert "a/a" not in read_run(tmp_path / "run").records[0].values


@pytest.mark.parametrize("number", [np.float32(2), np.array([2.0])])
def test_groups_hold_numbers_of_any_type(number: Any) -> None:
    assert Curiosity(number).values() == {"curiosity/bonus": 2.0}


# --- observe


@pytest.mark.parametrize("wrong", [{"a": 1}, 3, None, "a", b"a", torch.ones(2), np.ones(2), torch.tensor(1.0), [1.0], Curiosity])
def test_observe_says_where_plain_numbers_go(tmp_path: Path, telemetry: Telemetry, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"observe takes the results of metric functions, got .*: plain numbers go to telemetry.log"):
        telemetry.observe(Curiosity(1.0), wrong)
    telemetry.flush(env_step=1)

    assert "curiosity/bonus" not in read_run(tmp_path / "run").records[0].values


def test_groups_come_alone_and_in_lists_tuples_and_generators(tmp_path: Path, telemetry: Telemetry) -> None:
    telemetry.observe()
    telemetry.observe(Curiosity(1.0), [Curiosity(2.0)], (Curiosity(3.0) for _ in range(1)), epoch=np.int64(2))
    telemetry.flush(env_step=1)

    assert read_run(tmp_path / "run").records[0].values["curiosity/bonus"] == 2.0


# --- lost values are reported


LATE: dict[str, Callable[[Telemetry], object]] = {
    "observe": lambda telemetry: telemetry.observe(Curiosity(1.0)),
    "log": lambda telemetry: telemetry.log({"a/b": 1.0}),
    "flush": lambda telemetry: telemetry.flush(env_step=1),
    "watch": lambda telemetry: telemetry.watch(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), 0.1)),
    "on_alarm": lambda telemetry: telemetry.on_alarm(print),
    "notify_intervention": lambda telemetry: telemetry.notify_intervention("learning rate"),
}


@pytest.mark.parametrize("call", LATE)
def test_a_call_after_close_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str) -> None:
    telemetry = Telemetry(run_dir=tmp_path / "run")
    telemetry.close()

    LATE[call](telemetry)
    LATE[call](telemetry)
    LATE["log"](telemetry)

    assert warned(caplog, f"{call} was called after close") == 1
    assert warned(caplog, "after close") == 1
    assert read_run(tmp_path / "run").records == ()


def test_closing_twice_and_entering_again_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(run_dir=tmp_path / "run")
    with telemetry:
        telemetry.close()
    telemetry.close()

    assert caplog.records == []


def test_at_off_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(level="off") as telemetry:
        pass
    for call in LATE.values():
        call(telemetry)

    assert caplog.records == []


def test_a_flush_that_was_forgotten_is_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        for _ in range(3):
            telemetry.observe(Curiosity(1.0))

    assert warned(caplog, "flush was never called") == 1
    assert [record.partial for record in read_run(tmp_path / "run").records] == [True]


def test_what_follows_the_last_flush_is_no_mistake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        telemetry.flush(env_step=1)
        telemetry.observe(Curiosity(1.0))
    with pytest.raises(RuntimeError), Telemetry(run_dir=tmp_path / "failed") as telemetry:
        telemetry.observe(Curiosity(1.0))
        raise RuntimeError

    assert warned(caplog, "flush") == 0


def test_updates_that_pile_up_are_told_while_training_goes_on(telemetry: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    """Twelve updates of two epochs each."""
    for _ in range(12):
        for epoch in range(2):
            telemetry.observe(Curiosity(1.0), epoch=epoch)

    assert warned(caplog, "several updates seem to have been observed since the last flush") == 1
    telemetry.flush(env_step=1)


def test_long_updates_that_are_counted_from_nought_are_no_mistake(telemetry: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    for update in range(20):
        for epoch in range(3):
            for _ in range(4):
                telemetry.observe(Curiosity(1.0), epoch=epoch)
        telemetry.flush(env_step=8 * update, update=update)

    assert caplog.records == []


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"env_step": 50}, "env_step=50 after 100"),
        ({"env_step": 200, "gradient_step": 3}, "gradient_step=3 after 8"),
        ({"env_step": 200, "update": 4}, "update=4 after 4"),
        ({"env_step": 200, "update": 2}, "update=2 after 4"),
    ],
)
def test_axes_that_go_back_are_told_once(telemetry: Telemetry, caplog: pytest.LogCaptureFixture, axes: dict[str, int], text: str) -> None:
    telemetry.flush(env_step=100, update=4, gradient_step=8)
    telemetry.flush(**axes)
    telemetry.flush(**axes)

    assert warned(caplog, text) == 1
    assert warned(caplog, "esper-telemetry: flush was given") <= 2


# --- watch, attach, on_alarm


MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
WRONG_CALLS: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
    *[
        (Telemetry.watch, pair, "watch takes a torch module and its optimizer, got")
        for pair in ((None, OPTIMIZER), (MODEL, None), (OPTIMIZER, MODEL), (MODEL, MODEL.parameters()), (nn.Linear, OPTIMIZER))
    ],
    *[(attach, (source,), "attach takes a Telemetry and a trainer with hooks, got") for source in (None, MODEL, object())],
    *[(Telemetry.on_alarm, (callback,), "on_alarm takes a function of one alarm, got") for callback in (None, "print", 3)],
]


@pytest.mark.parametrize(("call", "arguments", "text"), WRONG_CALLS)
def test_calls_say_what_they_take(telemetry: Telemetry, call: Callable[..., object], arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(telemetry, *arguments)
    if call is attach:
        with pytest.raises(TypeError, match=text):
            call(*arguments, *arguments)


def test_a_model_that_is_watched_twice_is_measured_once(tmp_path: Path, telemetry: Telemetry) -> None:
    """Gradients (3, 4): a norm of 5."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    telemetry.watch(model, optimizer)
    stop = telemetry.watch(model, optimizer)
    for update in range(2):
        optimizer.zero_grad()
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
        telemetry.flush(env_step=update)
        stop()

    assert [record.values.get("grad/global/norm_preclip") for record in read_run(tmp_path / "run").records] == [5.0, None]


def test_an_optimizer_is_watched_with_one_model(telemetry: Telemetry) -> None:
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(both.parameters(), 0.1)
    telemetry.watch(both[0], optimizer)

    with pytest.raises(ValueError, match="this optimizer is watched already: watch it once"):
        telemetry.watch(both[1], optimizer)


# --- copies, other processes, threads


class Agent(nn.Module):
    def __init__(self, telemetry: Telemetry | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.telemetry = telemetry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("write", [pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())])
def test_what_holds_telemetry_cannot_be_pickled_and_says_what_to_do(telemetry: Telemetry, write: Callable[[object], object]) -> None:
    for thing in (telemetry, [telemetry], Agent(telemetry)):
        with pytest.raises(TypeError, match=r"a Telemetry belongs to the process that made it .*: leave it out of what is saved"):
            write(thing)


def test_a_copy_of_what_holds_telemetry_holds_the_same(telemetry: Telemetry) -> None:
    agent = copy.deepcopy(Agent(telemetry))

    assert agent.telemetry is telemetry
    assert copy.copy(telemetry) is telemetry


@pytest.mark.system
def test_a_watched_model_is_copied_saved_and_compiled_as_ever(telemetry: Telemetry) -> None:
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters())
    telemetry.watch(agent, optimizer)
    agent(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save((agent, optimizer, agent.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        loaded, its_optimizer, *_ = torch.load(file, weights_only=False)
        copies = [copy.deepcopy(agent), pickle.loads(pickle.dumps(agent)), loaded]
        copied, copied_optimizer = copy.deepcopy((agent, optimizer))
        pickle.dumps(optimizer)
    compiled = torch.compile(agent, backend="eager")

    for other in (*copies, copied, compiled):
        assert torch.equal(other(torch.ones(1, 2)), agent(torch.ones(1, 2)))
    for other in copies:
        other(torch.ones(1, 2)).sum().backward()
    copied_optimizer.step()
    its_optimizer.step()
    telemetry.flush(env_step=1)

    assert telemetry.run_dir is not None
    assert read_run(telemetry.run_dir).records[0].axes.gradient_step <= 1


class FlushedMeanwhile(Postponed):
    """A measurement whose `observe` gives another thread a second to flush."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.thread = threading.Thread(target=lambda: telemetry.flush(env_step=1))

    @property
    def kind(self) -> str:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(1.0)
        return "curiosity"

    @classmethod
    def together(cls, measured: Sequence[Self]) -> Iterable[MetricGroup]:
        return [Curiosity(1.0)]


def test_threads_are_served_one_at_a_time(tmp_path: Path) -> None:
    """Groups that one thread observes during another's flush belong to that update or the next; none is lost."""
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        measured = FlushedMeanwhile(telemetry)
        telemetry.observe(measured)
        measured.thread.join()
        telemetry.flush(env_step=2)

    assert [record.values.get("curiosity/bonus") for record in read_run(tmp_path / "run").records] == [1.0, None]


@pytest.mark.system
def test_a_function_that_returns_has_not_killed_the_run(tmp_path: Path) -> None:
    """No reference to the telemetry is left when the interpreter exits."""
    code = (
        "import gc\n"
        "from esper_telemetry import Telemetry\n"
        "def train():\n"
        "    telemetry = Telemetry(run_dir='run')\n"
        "    telemetry.flush(env_step=1)\n"
        "train()\n"
        "gc.collect()\n"
    )

    run_python("-c", code, cwd=tmp_path)

    assert read_run(tmp_path / "run").status is RunStatus.FINISHED


@pytest.mark.system
def test_what_is_closed_is_not_kept(tmp_path: Path) -> None:
    telemetry = Telemetry(run_dir=tmp_path / "run")
    telemetry.close()
    reference = weakref.ref(telemetry)
    del telemetry
    gc.collect()

    assert reference() is None


# --- what is shown


def test_a_run_is_shown_in_a_few_lines(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run", name="walker") as telemetry:
        for update in range(30):
            telemetry.observe(value_fit(torch.randn(64), torch.randn(64)))
            telemetry.log({"numerics/nonfinite": 3.0})
            telemetry.flush(env_step=update * 64)

    run = read_run(tmp_path / "run")
    lines = repr(run).splitlines()
    assert str(run) == repr(run)
    assert len(lines) <= 8
    assert max(map(len, lines)) < 200
    assert lines[0].startswith("Run 'walker' in ")
    assert "finished" in lines[1]
    assert "30 of " in lines[2] and "update 1 to 30, env_step 0 to 1856" in lines[2]
    assert "numerics/nonfinite (1)" in lines[3]


def test_parts_of_a_run_are_shown_on_a_line(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        telemetry.log({f"many/n{number}": number for number in range(500)})
        telemetry.log({"numerics/nonfinite": 3.0})
        telemetry.flush(env_step=64)
        text = repr(telemetry)

    run = read_run(tmp_path / "run")
    assert "run_dir" in text and "update 1" in text and "open" in text
    assert all(len(repr(part)) < 1000 for part in (run.records[0], run.info, *run.alarms))
    assert repr(run.records[0]).startswith("Record(update=1, env_step=64, gradient_step=0, values={'many/n0': 0, ")
