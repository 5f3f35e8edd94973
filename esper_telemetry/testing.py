"""A kit that tries a sink with everything that has broken one: `check_sink(MySink)`.

What a sink is tried on: runs of their own, records of every kind, and sinks that are broken on purpose around yours.

Two sinks: one that remembers everything, one that fails on demand.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from esper_telemetry.core.record import (
    Alarm,
    AlarmEvent,
    AlarmLevel,
    Axes,
    Histogram,
    MetricInfo,
    Record,
    RunInfo,
    RunStatus,
)
from esper_telemetry.delivery.catch_up import audit, replay
from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.journal.file import Journal, JournalReader
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.sinks.protocol import Shown, Sink, StoredMetrics

BATCH = 200


def run_in(directory: Path, **changes: Any) -> RunInfo:
    """A run that no other one is like."""
    described = {"policy/kl": MetricInfo("nats", "Is the policy moving?", level="minimal")}
    given = {"name": "conformance", "config": {"learning_rate": 3e-4, "sizes": [64, 64]}, "tags": ("kit",), **changes}
    return RunInfo(secrets.token_hex(6), run_dir=directory, started=time.time(), metrics=described, **given)


def record(update: int, *, keys: int = 3, values: dict[str, float] | None = None) -> Record:
    """A record with so many keys; every axis has another number."""
    numbers = {f"policy/key_{index}": update + index / 1000 for index in range(keys)} if values is None else values
    axes = Axes(update, update * 128, update * 16, 1.7e9 + update / 8)
    counts = Histogram((0.0, 0.5, 1.0), (float(update), 1.0))
    return Record(update, axes, numbers, {"adv/raw/hist": counts} if update % 10 == 1 else {})


def alarm(update: int, event: AlarmEvent) -> Alarm:
    """An alarm of the record of that update, with words that need quoting."""
    text = "the policy moved <b>too far</b>, “ünïcode” & 'quotes'"
    axes = record(update).axes
    return Alarm(
        update, axes, "policy/kl_spike", event, 0.9, AlarmLevel.CRITICAL, "policy/kl", since=1, incident=1, text=text
    )


def batches(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """As the relay hands them over."""
    for start in range(0, len(records), BATCH):
        yield tuple(records[start : start + BATCH])


def journalled(run: RunInfo, records: Iterable[Record], *, status: RunStatus | None = RunStatus.FINISHED) -> Path:
    """Writes a journal that holds them into the run's directory, which it returns; without status the run has no end."""
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
    """Opens, writes and closes a sink as the relay does when all is well."""
    sink.open(run)
    for batch in batches(records):
        sink.write(batch)
    sink.close(status)


def expect_equal(run_dir: Path, sink: Sink) -> None:
    """Fails unless the backend holds what the journal holds; content with a sink that cannot say what it holds."""
    found = audit(run_dir, sink)
    if found is None:
        return
    lacks = (
        f"lacks {found.missing.total()} numbers of updates {found.lacking[:10]} ({dict(found.missing.most_common(3))})"
    )
    assert not found.missing, f"the backend {lacks}"
    assert not found.different, f"numbers differ from the journal's: {dict(found.different.most_common(3))}"
    assert not found.repeated, f"numbers stand there more than once: {dict(found.repeated.most_common(3))}"
    assert not found.unknown, f"the backend holds updates that were never sent: {found.unknown[:10]}"


class Around:
    """A sink around yours that fails as it is told, and else does what yours does.

    Args:
        inner: your sink.
        before: called with the name of the method and its argument before yours is.
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


def check_sink(factory: Factory, *, only: Collection[str] = (), leave_out: Collection[str] = ()) -> tuple[str, ...]:
    """Tries a sink and returns the names of the checks that it passed; it passes all of `CHECKS`, or AssertionError says what is wrong.

    A sink with `stored` and `shown` (`sinks/stored.py`) is also asked what its backend holds after each of them.

    Args:
        factory: makes the sink, each time anew; what it writes belongs into `run.run_dir`, or is told apart by `run.run_id`.
        only, leave_out: names of checks, as in `CHECKS`.

    Raises ValueError for a name that is no check.
    """
    unknown = {*only, *leave_out} - CHECKS.keys()
    if unknown:
        raise ValueError(f"there is no check {sorted(unknown)[0]!r}: there are {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if (not only or name in only) and name not in leave_out]
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="esper-kit-", ignore_cleanup_errors=True) as directory:
            try:
                CHECKS[name](factory, Path(directory) / "run")
            except Exception as error:
                raise AssertionError(f"the sink fails the check {name!r}: {type(error).__name__}: {error}") from error
    return tuple(chosen)


def _protocol(factory: Factory, _: Path) -> None:
    """It has the three methods with their arguments, a name that stays, and can travel to the process that feeds sinks."""
    sink = factory()
    for method in ("open", "write", "close"):
        assert callable(getattr(sink, method, None)), f"it has no method {method}"
        inspect.signature(getattr(sink, method)).bind(object())
    assert isinstance(getattr(sink, "name", ""), str), "its name is no text"
    assert getattr(sink, "name", "") == getattr(factory(), "name", ""), "its name changes from one to the next"
    if not getattr(sink, "in_process", True):
        pickle.loads(pickle.dumps(sink))


def _steps(factory: Factory, directory: Path) -> None:
    """What it is given arrives, at its steps."""
    run, records = run_in(directory), [record(update) for update in range(1, 31)]
    journalled(run, records)
    sink = factory()
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _not_finite(factory: Factory, directory: Path) -> None:
    """Numbers that are not finite, which records do not hold, may be refused by an exception; the sink lives on."""
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
    """A thousand keys in one record: a sink may show fewer, and says so."""
    run, records = run_in(directory), [record(update, keys=MANY_KEYS) for update in (1, 2)]
    journalled(run, records)
    sink = factory()
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _many_records(factory: Factory, directory: Path) -> None:
    """Ten thousand records, in batches of two hundred."""
    run, records = run_in(directory), [record(update) for update in range(1, MANY_RECORDS + 1)]
    journalled(run, records)
    sink = factory()
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _collisions(factory: Factory, directory: Path) -> None:
    """Keys that become the same where characters are replaced stay apart."""
    values = {"my/key": 1.0, "my_key": 2.0, "my/key/a": 3.0, "my/key_a": 4.0, "my_key_a": 5.0}
    run, records = run_in(directory), [record(update, values=values) for update in (1, 2)]
    journalled(run, records)
    sink = factory()
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _unicode(factory: Factory, directory: Path) -> None:
    """Names, notes and settings in any script, with markup and quotes, a newline and a null."""
    text = "Läufer <b>№ 7</b> 走る 'quoted' \"twice\" \\ {braces} %s\n\u0007"
    changes = {
        "name": text,
        "notes": text,
        "tags": ("ünï", "a b"),
        "config": {"путь": text, "nested": {"ключ": [text]}},
    }
    run, records = run_in(directory, **changes), [record(1)]
    journalled(run, records)
    sink = factory()
    delivered(sink, run, records)
    expect_equal(directory, sink)


def _alarms(factory: Factory, directory: Path) -> None:
    """Where it takes alarms, it takes all that becomes of one, and those of before."""
    sink, run = factory(), run_in(directory)
    directory.mkdir()
    tell: Callable[[Any], object] = getattr(sink, "alarm", lambda _: None)
    sink.open(run)
    getattr(sink, "recall", lambda _: None)((alarm(1, AlarmEvent.RAISE),))
    for update, event in enumerate(AlarmEvent, start=2):
        sink.write((record(update),))
        tell(alarm(update, event))
    sink.close(RunStatus.FAILED)


def _fails_once(factory: Factory, directory: Path) -> None:
    """A failure before any of its methods costs nothing: it is called again, also when it was open."""
    for method in ("open", "write", "close"):
        run = run_in(directory / method)
        _deliver_around(factory(), run, _failing_once(method))
        expect_equal(directory / method, factory())


def _refused_record(factory: Factory, directory: Path) -> None:
    """A record that cannot be taken is put aside, and all others arrive in order."""

    def refuse(method: str, argument: Any) -> None:
        if method == "write" and any(entry.axes.update == 7 for entry in argument):
            raise ValueError("refused on purpose")

    run = run_in(directory)
    delivery = _deliver_around(factory(), run, refuse)
    assert delivery.cursor.quarantined == 1, f"{delivery.cursor.quarantined} records were put aside instead of one"
    assert delivery.sent == 19, f"{delivery.sent} records of 19 others were sent"


def _hangs(factory: Factory, directory: Path) -> None:
    """A call that hangs does not keep the run from ending."""
    journal = Journal.create(directory)
    journal.write(encode_run(run_in(directory)), encode_record(record(1)))
    go, others = threading.Event(), set(threading.enumerate())

    def hang(method: str, _: Any) -> None:
        if method == "write":
            go.wait(HANG_SECONDS)

    relay = Deliveries(journal, [Around(factory(), hang)])
    journal.write(encode_end(RunStatus.FINISHED, seq=9))
    begun = time.monotonic()
    relay.close(CLOSE_SECONDS)
    took = time.monotonic() - begun
    go.set()
    for thread in set(threading.enumerate()) - others:  # they write into the directory, which will be gone
        thread.join(CLOSE_SECONDS)
    journal.close()
    assert took < CLOSE_SECONDS + 2, f"closing took {took:.1f} s where {CLOSE_SECONDS:.0f} s were allowed"


def _fork(factory: Factory, directory: Path) -> None:
    """A forked copy of the process ends, and the sink goes on as if nothing had happened."""
    run, records = run_in(directory), [record(update) for update in range(1, 7)]
    journalled(run, records)
    sink = factory()
    sink.open(run)
    sink.write(tuple(records[:3]))
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
    if getattr(factory(), "in_process", True):
        return
    journal, records = Journal.create(directory), [record(update) for update in range(1, 201)]
    journal.write(encode_run(run_in(directory)))
    relay = Deliveries(journal, [factory()])
    for entry in records:
        journal.write(encode_record(entry))
    _until(lambda: next(iter(relay.stats().sinks.values())).records > 0)
    if relay.child_pid is not None:
        os.kill(relay.child_pid, signal.SIGTERM)
    journal.write(encode_end(RunStatus.FINISHED, seq=10**6))
    report = relay.close(120.0)
    journal.close()
    assert report.complete, f"not everything was delivered: {report}"
    expect_equal(directory, factory())


def _resume(factory: Factory, directory: Path) -> None:
    """A run that was killed goes on in the same place of the backend."""
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
    "protocol": _protocol,
    "steps": _steps,
    "not finite": _not_finite,
    "many keys": _many_keys,
    "many records": _many_records,
    "collisions": _collisions,
    "unicode": _unicode,
    "alarms": _alarms,
    "fails once": _fails_once,
    "refused record": _refused_record,
    "hangs": _hangs,
    "fork": _fork,
    "closes twice": _closes_twice,
    "sigterm": _sigterm,
    "resume": _resume,
    "replay twice": _replay_twice,
}
"""What is tried, by name."""


def _deliver_around(sink: Sink, run: Any, before: Callable[[str, Any], None]) -> Delivery:
    """Delivers twenty records through a sink that is disturbed, without the pauses between attempts."""
    run_dir = journalled(run, [record(update) for update in range(1, 21)])
    reader = JournalReader(run_dir / "journal.jsonl")
    delivery = Delivery(Around(sink, before), reader, cursors=Cursors(run_dir), patience=50)
    delivery.finish(RunStatus.KILLED)
    while not delivery.over:
        delivery.breaker.retry_now()
        delivery.step()
    reader.close()
    return delivery


def _failing_once(method: str) -> Callable[[str, Any], None]:
    failed: list[str] = []

    def fail(called: str, _: Any) -> None:
        if called == method and not failed:
            failed.append(called)
            raise ConnectionError("fails on purpose")

    return fail


def _until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing has arrived after {seconds:.0f} s"
        time.sleep(0.02)


METHODS = frozenset(["open", "write", "alarm", "close"])


@dataclass
class MemorySink:
    """Remembers what it was given: the runs it was opened for, the records, the alarms, the statuses it was closed with.

    A sink need not have `alarm`: it then gets records only.
    """

    runs: list[RunInfo] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    statuses: list[RunStatus] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    name: str = "memory"
    in_process: bool = True
    _by_run: dict[str, list[Record]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def open(self, run: RunInfo) -> None:
        """Remembers the run."""
        self.runs.append(run)

    def write(self, records: Sequence[Record]) -> None:
        """Remembers the records."""
        self.records.extend(records)
        self._by_run.setdefault(self.runs[-1].run_id, []).extend(records)

    def stored(self, run: RunInfo) -> StoredMetrics:
        """The records of that run."""
        stored = StoredMetrics(ended=bool(self.statuses))
        for record in self._by_run.get(run.run_id, ()):
            for key, value in record.values.items():
                stored.add(record.axes.update, key, value)
        return stored

    def shown(self, run: RunInfo) -> Shown:
        """All values of a record."""
        return lambda record: record.values

    def alarm(self, alarm: Alarm) -> None:
        """Remembers the alarm."""
        self.alarms.append(alarm)

    def close(self, status: RunStatus) -> None:
        """Remembers the status."""
        self.statuses.append(status)


@dataclass
class FailingSink(MemorySink):
    """Fails in the methods named, and is a `MemorySink` otherwise.

    Attributes:
        fail_in: any of `open`, `write`, `alarm` and `close`.
        error: what is raised there; None only hangs.
        times: how many calls fail before all is well; None never gets well.
        hang_seconds: how long such a call takes before it fails.
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
        """Fails, or remembers the run."""
        self._called("open")
        super().open(run)

    def write(self, records: Sequence[Record]) -> None:
        """Fails, or remembers the records."""
        self._called("write")
        super().write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Fails, or remembers the alarm."""
        self._called("alarm")
        super().alarm(alarm)

    def close(self, status: RunStatus) -> None:
        """Fails, or remembers the status."""
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
