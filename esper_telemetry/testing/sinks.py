"""Tools for tests of sinks: `check_sink` runs the checks of `CHECKS`, `MemorySink` stores what it gets, `FailingSink` fails on demand.

Each check delivers its own runs, with records and alarms of every kind. It also delivers them through a wrapper that fails on purpose.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.delivery.catch_up import audit, replay
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import Cursors
from esper_telemetry.journal.file import Journal, JournalReader
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_record, encode_run
from esper_telemetry.sinks.sink_protocol import Shown, Sink, StoredMetrics, SupportsAlarms, SupportsRecall, runs_in_process

BATCH_RECORDS = 200


def run_in(directory: Path, **changes: Any) -> RunInfo:
    """Return a run with a new id in that directory; `changes` replace its name, settings and tags."""
    metrics = {"policy/kl": MetricInfo("nats", "Is the policy moving?", level="minimal")}
    fields = {"name": "conformance", "config": {"learning_rate": 3e-4, "sizes": [64, 64]}, "tags": ("kit",), **changes}
    return RunInfo(secrets.token_hex(6), run_dir=directory, started=time.time(), metrics=metrics, **fields)


def record(update: int, *, keys: int = 3, values: dict[str, float] | None = None) -> Record:
    """Return a record with that many keys, or with these values; all axes have different numbers."""
    numbers = {f"policy/key_{index}": update + index / 1000 for index in range(keys)} if values is None else values
    axes = Axes(update, update * 128, update * 16, 1.7e9 + update / 8)
    counts = Histogram((0.0, 0.5, 1.0), (float(update), 1.0))
    return Record(update, axes, numbers, {"adv/raw/hist": counts} if update % 10 == 1 else {})


def alarm(update: int, event: AlarmEvent) -> Alarm:
    """Return an alarm of the record of that update, with words that need quoting."""
    text = "the policy moved <b>too far</b>, “ünïcode” & 'quotes'"
    axes = record(update).axes
    return Alarm(update, axes, "policy/kl_spike", event, 0.9, AlarmLevel.CRITICAL, "policy/kl", since=1, incident=1, text=text)


def journalled(run: RunInfo, records: Iterable[Record], *, status: RunStatus | None = RunStatus.FINISHED) -> Path:
    """Write a journal of these records into the run's directory and return the directory. Without `status` the run does not end."""
    assert run.run_dir is not None
    journal = Journal.create(run.run_dir)
    journal.write(encode_run(run))
    for entry in records:
        journal.write(encode_record(entry))
    if status is not None:
        journal.write(encode_end(status, seq=10**6))
    journal.close()
    return run.run_dir


def delivered(sink: Sink, run: RunInfo, records: Sequence[Record], status: RunStatus = RunStatus.FINISHED) -> None:
    """Open, write in batches, and close a sink as delivery does when nothing fails."""
    sink.open(run)
    for start in range(0, len(records), BATCH_RECORDS):
        sink.write(tuple(records[start : start + BATCH_RECORDS]))
    sink.close(status)


def expect_equal(run_dir: Path, sink: Sink) -> None:
    """Fail if the backend's content differs from the journal's. A sink whose backend cannot be read passes."""
    result = audit(run_dir, sink)
    if result is None:
        return
    missing, updates = result.missing, result.lacking[:10]
    sentence = f"the backend lacks {missing.total()} numbers of updates {updates} ({dict(missing.most_common(3))})"
    assert not missing, sentence
    assert not result.different, f"numbers differ from the journal's: {dict(result.different.most_common(3))}"
    assert not result.repeated, f"numbers are stored more than once: {dict(result.repeated.most_common(3))}"
    assert not result.unknown, f"the backend holds updates that were never sent: {result.unknown[:10]}"


class Around:
    """A wrapper that can fail before each call of the wrapped sink.

    Args:
        inner: the wrapped sink.
        before: called with the name of the method and its argument before the method of the wrapped sink.
    """

    def __init__(self, inner: Sink, before: Callable[[str, Any], None]) -> None:
        self.inner = inner
        self.in_process = True
        self.name = "around"
        self._before = before

    def open(self, run: RunInfo) -> None:
        """See `Sink`."""
        self._before("open", run)
        self.inner.open(run)

    def write(self, records: Sequence[Record]) -> None:
        """See `Sink`."""
        self._before("write", records)
        self.inner.write(records)

    def close(self, status: RunStatus) -> None:
        """See `Sink`."""
        self._before("close", status)
        self.inner.close(status)


Factory: TypeAlias = Callable[[], Sink]
Check: TypeAlias = Callable[[Factory, Path], None]

MANY_RECORDS = 10_000
MANY_KEYS = 1000
HANG_SECONDS = 20.0
CLOSE_SECONDS = 2.0
MAX_START_SECONDS = 60.0


def check_sink(factory: Factory, *, only: Collection[str] = (), leave_out: Collection[str] = ()) -> tuple[str, ...]:
    """Run the checks on a sink and return their names; AssertionError says what is wrong.

    A sink with `stored` and `shown` (`SupportsAudit`) is also asked what its backend holds after each of them.

    Args:
        factory: creates a new sink at each call; what it writes goes to `run.run_dir`, or is identified by `run.run_id`.
        only, leave_out: names of checks, as in `CHECKS`.

    Raises ValueError for an unknown check.
    """
    unknown = {*only, *leave_out} - CHECKS.keys()
    if unknown:
        raise ValueError(f"unknown check {sorted(unknown)[0]!r}: choose from {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if (not only or name in only) and name not in leave_out]
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="esper-kit-", ignore_cleanup_errors=True) as directory:
            try:
                CHECKS[name](factory, Path(directory) / "run")
            except Exception as error:
                raise AssertionError(f"the sink fails the check {name!r}: {type(error).__name__}: {error}") from error
    return tuple(chosen)


def _protocol(factory: Factory, _: Path) -> None:
    """The sink has the three methods with their arguments, a constant name, and can be pickled for the sink process."""
    sink = factory()
    for method in ("open", "write", "close"):
        assert callable(getattr(sink, method, None)), f"the method {method} is missing"
        inspect.signature(getattr(sink, method)).bind(object())
    assert isinstance(getattr(sink, "name", ""), str), "its name is not a string"
    assert getattr(sink, "name", "") == getattr(factory(), "name", ""), "its name changes from one to the next"
    if not runs_in_process(sink):
        pickle.loads(pickle.dumps(sink))


def _expect_arrival(factory: Factory, directory: Path, records: Sequence[Record], **changes: Any) -> None:
    """Deliver records of a run with these changes, and fail unless the backend holds them."""
    run, sink = run_in(directory, **changes), factory()
    journalled(run, records)
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _steps(factory: Factory, directory: Path) -> None:
    """Thirty records arrive, each at its step."""
    _expect_arrival(factory, directory, [record(update) for update in range(1, 31)])


def _not_finite(factory: Factory, directory: Path) -> None:
    """The sink may refuse numbers that are not finite, which no record holds, by an exception, and takes the next record."""
    sink, run = factory(), run_in(directory)
    directory.mkdir()
    sink.open(run)
    for number in (math.nan, math.inf, -math.inf):
        try:
            sink.write((record(1, values={"policy/kl": number}),))
        except Exception:
            continue
    sink.write((record(2),))
    sink.close(RunStatus.FINISHED)


def _many_keys(factory: Factory, directory: Path) -> None:
    """A thousand keys in one record: a sink may show fewer, and `shown` says which."""
    _expect_arrival(factory, directory, [record(update, keys=MANY_KEYS) for update in (1, 2)])


def _many_records(factory: Factory, directory: Path) -> None:
    """Ten thousand records, in batches of two hundred."""
    _expect_arrival(factory, directory, [record(update) for update in range(1, MANY_RECORDS + 1)])


def _collisions(factory: Factory, directory: Path) -> None:
    """Keys that become the same when characters are replaced remain separate."""
    values = {"my/key": 1.0, "my_key": 2.0, "my/key/a": 3.0, "my/key_a": 4.0, "my_key_a": 5.0}
    _expect_arrival(factory, directory, [record(update, values=values) for update in (1, 2)])


def _unicode(factory: Factory, directory: Path) -> None:
    """Names, notes and settings in any script, with markup and quotes, a newline and a null."""
    text = "Läufer <b>№ 7</b> 走る 'quoted' \"twice\" \\ {braces} %s\n\u0007"
    config = {"путь": text, "nested": {"ключ": [text]}}
    _expect_arrival(factory, directory, [record(1)], name=text, notes=text, tags=("ünï", "a b"), config=config)


def _alarms(factory: Factory, directory: Path) -> None:
    """A sink that takes alarms takes every event of one, and one that recalls takes earlier alarms."""
    sink, run = factory(), run_in(directory)
    directory.mkdir()
    sink.open(run)
    if isinstance(sink, SupportsRecall):
        sink.recall((alarm(1, AlarmEvent.RAISE),))
    for update, event in enumerate(AlarmEvent, start=2):
        sink.write((record(update),))
        if isinstance(sink, SupportsAlarms):
            sink.alarm(alarm(update, event))
    sink.close(RunStatus.FAILED)


def _fails_once(factory: Factory, directory: Path) -> None:
    """No data are lost if a method fails before it does anything: it is called again, even if the sink was open."""
    for method in ("open", "write", "close"):
        failed: list[str] = []

        def fail(called: str, _: Any, method: str = method, failed: list[str] = failed) -> None:
            if called == method and not failed:
                failed.append(called)
                raise ConnectionError("fails on purpose")

        _deliver_around(factory(), run_in(directory / method), fail)
        expect_equal(directory / method, factory())


def _refused_record(factory: Factory, directory: Path) -> None:
    """A record that is refused is put aside, and all others arrive in order."""

    def refuse(method: str, argument: Any) -> None:
        if method == "write" and any(entry.axes.update == 7 for entry in argument):
            raise ValueError("refused on purpose")

    run = run_in(directory)
    delivery = _deliver_around(factory(), run, refuse)
    assert delivery.cursor.quarantined == 1, f"{delivery.cursor.quarantined} records were put aside instead of one"
    assert delivery.sender.sent == 19, f"{delivery.sender.sent} records of 19 others were sent"


def _hangs(factory: Factory, directory: Path) -> None:
    """A call that hangs does not keep the run from ending."""
    journal = Journal.create(directory)
    journal.write(encode_run(run_in(directory)), encode_record(record(1)))
    resume, others = threading.Event(), set(threading.enumerate())

    def hang(method: str, _: Any) -> None:
        if method == "write":
            resume.wait(HANG_SECONDS)

    deliveries = Deliveries(journal, [Around(factory(), hang)])
    journal.write(encode_end(RunStatus.FINISHED, seq=9))
    begun_at = time.monotonic()
    deliveries.close(CLOSE_SECONDS)
    duration = time.monotonic() - begun_at
    resume.set()
    for thread in set(threading.enumerate()) - others:  # they write into the directory, which will be gone
        thread.join(CLOSE_SECONDS)
    journal.close()
    assert duration < CLOSE_SECONDS + 2, f"closing took {duration:.1f} s but {CLOSE_SECONDS:.0f} s were allowed"


def _fork(factory: Factory, directory: Path) -> None:
    """A forked copy of the process ends, and the sink continues unaffected."""
    run, records = run_in(directory), [record(update) for update in range(1, 7)]
    journalled(run, records)
    sink = factory()
    sink.open(run)
    sink.write(tuple(records[:3]))
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    sink.write(tuple(records[3:]))
    sink.close(RunStatus.FINISHED)
    expect_equal(directory, sink)


def _closes_twice(factory: Factory, directory: Path) -> None:
    """Closing it again, or without having opened it, does nothing."""
    factory().close(RunStatus.FAILED)
    directory.mkdir()
    sink = factory()
    delivered(sink, run_in(directory), [record(1)])
    sink.close(RunStatus.FINISHED)


def _sigterm(factory: Factory, directory: Path) -> None:
    """SIGTERM to the process that feeds it, in the middle of writing, changes nothing."""
    if runs_in_process(factory()):
        return
    journal, records = Journal.create(directory), [record(update) for update in range(1, 201)]
    journal.write(encode_run(run_in(directory)))
    deliveries = Deliveries(journal, [factory()])
    for entry in records:
        journal.write(encode_record(entry))
    deadline = time.monotonic() + MAX_START_SECONDS
    while not next(iter(deliveries.stats().sinks.values())).records:
        assert time.monotonic() < deadline, f"nothing has arrived after {MAX_START_SECONDS:.0f} s"
        time.sleep(0.02)
    if deliveries.child_pid is not None:
        os.kill(deliveries.child_pid, signal.SIGTERM)
    journal.write(encode_end(RunStatus.FINISHED, seq=10**6))
    report = deliveries.close(120.0)
    journal.close()
    assert report.complete, f"not everything was delivered: {report}"
    expect_equal(directory, factory())


def _resume(factory: Factory, directory: Path) -> None:
    """A run that was killed continues in the same place of the backend."""
    run, records = run_in(directory), [record(update) for update in range(1, 21)]
    journalled(run, records)
    delivered(factory(), run, records[:10], RunStatus.KILLED)
    delivered(factory(), replace(run, resumed_from={"update": 10, "recorded": 10}), records[10:])
    expect_equal(directory, factory())


def _replay_twice(factory: Factory, directory: Path) -> None:
    """A journal that is replayed again sends nothing again."""
    journalled(run_in(directory), [record(update) for update in range(1, 21)])
    first, second = replay(directory, factory()), replay(directory, factory())
    assert (first.complete, first.sinks[0].sent) == (True, 20), f"the first time: {first}"
    assert (second.complete, second.sinks[0].sent) == (True, 0), f"the second time: {second}"
    expect_equal(directory, factory())


CHECKS: dict[str, Check] = {
    check.__name__.strip("_").replace("_", " "): check
    for check in (
        *(_protocol, _steps, _not_finite, _many_keys, _many_records, _collisions, _unicode, _alarms),
        *(_fails_once, _refused_record, _hangs, _fork, _closes_twice, _sigterm, _resume, _replay_twice),
    )
}
"""The checks by name."""


def _deliver_around(sink: Sink, run: Any, before: Callable[[str, Any], None]) -> Delivery:
    """Deliver twenty records through `Around`, without the pauses between attempts, and return the delivery."""
    run_dir = journalled(run, [record(update) for update in range(1, 21)])
    reader = JournalReader(run_dir / "journal.jsonl")
    delivery = Delivery(Around(sink, before), reader, cursors=Cursors(run_dir), patience=50)
    delivery.finish(RunStatus.KILLED)
    while not delivery.over:
        delivery.breaker.retry_now()
        delivery.step()
    reader.close()
    return delivery


METHODS = frozenset(["open", "write", "alarm", "close"])


@dataclass
class MemorySink:
    """Stores the runs that it was opened for, the records, the alarms, the outcomes, and the statuses that it was closed with."""

    runs: list[RunInfo] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    statuses: list[RunStatus] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    name: str = "memory"
    in_process: bool = True
    outcomes: list[JournalEvent] = field(default_factory=list)
    _by_run: dict[str, list[Record]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def open(self, run: RunInfo) -> None:
        """Store the run."""
        self.runs.append(run)

    def write(self, records: Sequence[Record]) -> None:
        """Store the records."""
        self.records.extend(records)
        self._by_run.setdefault(self.runs[-1].run_id, []).extend(records)

    def stored(self, run: RunInfo) -> StoredMetrics:
        """Return the numbers of that run."""
        stored = StoredMetrics(ended=bool(self.statuses))
        for record in self._by_run.get(run.run_id, ()):
            for key, value in record.values.items():
                stored.add(record.axes.update, key, value)
        return stored

    def shown(self, run: RunInfo) -> Shown:
        """Return the function that gives all values of a record."""
        return lambda record: record.values

    def alarm(self, alarm: Alarm) -> None:
        """Store the alarm."""
        self.alarms.append(alarm)

    def outcome(self, event: JournalEvent) -> None:
        """Store the outcome."""
        self.outcomes.append(event)

    def close(self, status: RunStatus) -> None:
        """Store the status."""
        self.statuses.append(status)


@dataclass
class FailingSink(MemorySink):
    """Fails in the methods named, and is a `MemorySink` otherwise.

    Attributes:
        fail_in: any of `open`, `write`, `alarm` and `close`.
        error: raised there; None only hangs.
        times: number of calls that fail before the sink recovers; None for all.
        hang_seconds: duration of such a call before it fails.
        calls: the methods called, in order, failing or not.
    """

    name: str = "failing"
    fail_in: Collection[str] = METHODS
    error: Exception | None = field(default_factory=lambda: RuntimeError("this sink fails on purpose"))
    times: int | None = None
    hang_seconds: float = 0.0
    calls: list[str] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.fail_in) - METHODS
        if unknown:
            raise ValueError(f"fail_in names methods of a sink, open, write, alarm or close; got {sorted(unknown)}")

    def open(self, run: RunInfo) -> None:
        """Fail, or store the run."""
        self._called("open")
        super().open(run)

    def write(self, records: Sequence[Record]) -> None:
        """Fail, or store the records."""
        self._called("write")
        super().write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Fail, or store the alarm."""
        self._called("alarm")
        super().alarm(alarm)

    def close(self, status: RunStatus) -> None:
        """Fail, or store the status."""
        self._called("close")
        super().close(status)

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method not in self.fail_in or (self.times is not None and self.failures >= self.times):
            return
        self.failures += 1
        time.sleep(self.hang_seconds)
        if self.error is not None:
            raise self.error
