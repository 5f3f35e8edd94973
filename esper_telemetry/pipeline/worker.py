"""A writer whose work is done by a process beside the trainer.

The process itself: how it is started, and what it does.

What trainer and process agree on.

The moment from which the records of a loop of one's own are made in a process beside it.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import torch

from esper_telemetry.core.packing import Values
from esper_telemetry.core.record import Axes, Level, MetricInfo, RunInfo, RunStatus, SinkLag
from esper_telemetry.core.supervisor import collect_garbage_rarely, lower_process_priority
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.lock import Role, lock_for, remove_lock
from esper_telemetry.journal.read import alarms, end_after_parent, read_contents
from esper_telemetry.pipeline.channel import (
    Message,
    MessagePacker,
    PlainMessage,
    Replies,
    Ring,
    Vocabulary,
    messages,
    reply,
    shared_file,
)
from esper_telemetry.pipeline.plain import PlainListener, Teller
from esper_telemetry.pipeline.record import JournalOutput, JournalWriter, Measured
from esper_telemetry.pipeline.sampling import Average
from esper_telemetry.pipeline.watch import Found, Watches
from esper_telemetry.pipeline.window import Keys, Numbers
from esper_telemetry.updates import data as snapshot

RING_BYTES: Final = 256 << 20
"""Of the memory that may be shared: several times what may wait. A small run uses the first megabytes alone."""

AWAITED: Final = ("sync", "end")
"""What the trainer waits for: the answer comes through the pipe though it says nothing."""

WORDS: Final = Vocabulary((Measured, Axes, JournalOutput, SinkLag, Values, Numbers, *snapshot.KINDS), (*Level, Keys))
"""What updates are told in."""


ENTRY: Final = "from esper_telemetry.pipeline.worker import main; main()"
LOG_NAME: Final = "summary.log"

PIPE_BYTES: Final = 1 << 20
"""What the pipe should hold: the descriptions of all metrics, and several updates besides their tensors."""

NICENESS: Final = 10
"""The trainer goes first where cores are scarce; the sinks' process is nicer still."""


def worth_offloading() -> bool:
    """Return whether this system can run the process, which takes memory files (Linux), and has a second core for it."""
    if not hasattr(os, "memfd_create"):
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) > 1


def started(run_dir: Path, level: Level, acknowledgements: int, shared: int) -> subprocess.Popen[bytes]:
    """Starts it: it answers through one descriptor, and shares the memory behind the other."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    lock = lock_for(run_dir, Role.WRITER)
    try:
        with (run_dir / LOG_NAME).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-c", ENTRY, str(run_dir), level.name),
                    *map(str, (os.getpid(), acknowledgements, shared)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[acknowledgements, shared, lock],
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
    finally:
        os.close(lock)


def private_pipe(process: subprocess.Popen[bytes]) -> int:
    """Our end of the process's input: large, and never blocking."""
    assert process.stdin is not None
    with process.stdin:
        pipe = os.dup(process.stdin.fileno())
    os.set_blocking(pipe, False)
    with suppress(OSError, AttributeError):  # where the system allows less, or has no such call, more waits in memory
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


class WorkerOutput(logging.Handler):
    """Keeps what is warned of, for the trainer, who sees no log of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one warning."""
        self._warnings.append(" ".join(record.getMessage().split()))

    def take(self) -> Sequence[str]:
        """What was warned of since the last call, a line each."""
        warnings, self._warnings = self._warnings, []
        return warnings


def main() -> None:
    """Does what comes in, in order, and answers each with warnings and what was found, until the end of the input."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    run_dir, level = Path(sys.argv[1]), Level[sys.argv[2]]
    parent, acknowledgements, shared = map(int, sys.argv[3:])
    lower_process_priority(NICENESS)
    collect_garbage_rarely()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s")
    told = WorkerOutput()
    _logger.addHandler(told)
    _logger.setLevel(logging.DEBUG)
    os.set_blocking(acknowledgements, False)
    ring = Ring(shared, RING_BYTES)
    listener = PlainListener()
    incoming = messages(parent, ring, WORDS, lambda content: ("record", (listener.hear(content),)))
    watches = next(incoming, None)
    if watches is None:
        return
    writer = JournalWriter(Journal.open(run_dir), level, watches.load())
    method = ""
    for message in incoming:
        method, arguments = message.load()
        getattr(writer, method)(*arguments)
        answer = [*told.take(), *writer.found()]
        speaks = bool(answer) or method in AWAITED
        if speaks:
            with suppress(BrokenPipeError):
                reply(acknowledgements, answer, parent)
        ring.answer(told=speaks)
    if method not in ("", "end"):
        end_after_parent(parent, run_dir)


REPLY_BYTES: Final = 1 << 16
MOST_BYTES: Final = 64 << 20
"""What may wait in memory for a process that is not fast enough; beyond it updates are recorded without their summary."""

LOOK_SECONDS: Final = 0.01
"""How often whoever waits for the process looks what it has done: not all of it comes through the pipe."""

LEAVE_SECONDS: Final = 5.0
"""For the process to end by itself when everything is done."""

MOST_PARTS: Final = 256
"""What one call writes; systems take 1024."""

_logger = logging.getLogger("esper_telemetry")


class OffloadedWriter:
    """A `Writer` whose work is done by a process of its own.

    Args:
        journal: of a run with a directory; nobody else appends to it meanwhile.
        level: at which it measures while nothing is wrong.
        watches: see `JournalWriter`; it goes to the process first of all.

    Raises OSError or MemoryError where the system refuses what the process needs; nothing of it is left open then.
    """

    def __init__(self, journal: Journal, level: Level, watches: Watches | None = None) -> None:
        self._journal, self._run_dir, self._level, self._watches = journal, journal.run_dir, level, watches
        self._local: JournalWriter | None = None
        self._info: RunInfo | None = None
        self._unacknowledged: deque[Message | PlainMessage] = deque()
        self._replies = Replies()
        self._answered = self._told = 0
        self._found: list[Found] = []
        self._warned = self._left = False
        with ExitStack() as lent, ExitStack() as kept:
            self._acknowledgements, answers = os.pipe()
            kept.callback(os.close, self._acknowledgements)
            lent.callback(os.close, answers)
            os.set_blocking(self._acknowledgements, False)
            shared = shared_file(RING_BYTES)
            lent.callback(os.close, shared)
            self._ring = Ring(shared, RING_BYTES)
            self._packer, self._teller = MessagePacker(self._ring, WORDS), Teller()
            self._outbox = deque(self._packer.pack(watches).parts())
            kept.callback(remove_lock, self._run_dir, Role.WRITER)
            self._process = started(self._run_dir, level, answers, shared)
            kept.callback(_killed, self._process)
            self._pipe = private_pipe(self._process)
            kept.pop_all()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def run(self, info: RunInfo) -> None:
        """See `Writer`."""
        self._info = info
        self._send("run", info)

    def go_on(self, info: RunInfo) -> None:
        """See `Writer`."""
        self._info = info
        self._send("go_on", info)

    def catch_up(self) -> None:
        """Reads in the journal what somebody else has written since `go_on`."""
        self._send("catch_up")

    def idle(self) -> bool:
        """Whether everything is done that was asked for, here if the process is gone; never waits for it."""
        if self._local is None:
            self._listen()
        return not self._unacknowledged

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """See `Writer`."""
        self._send("describe", metrics, seq)

    def record(self, measured: Measured) -> None:
        """See `Writer`."""
        if measured.snapshots and self._ring.taken + sum(map(len, self._outbox)) > MOST_BYTES:
            self._warn(
                "the process that summarises updates does not keep up: some updates are recorded without summary"
            )
            measured = measured._replace(snapshots=())
        if self._local is None:  # the process appends it, and the sinks' backlog is reckoned from this number
            self._journal.records += 1
        if measured.plain and self._local is None:
            with suppress(struct.error):  # a count that is none goes the longer way
                told = self._teller.tell(measured)
                self._dispatch(PlainMessage(("record", (measured,)), told))
                return
        self._send("record", measured)

    def event(self, event: JournalEvent) -> None:
        """See `Writer`."""
        self._send("event", event)

    def found(self) -> Sequence[Found]:
        """See `Writer`."""
        if self._outbox and self._local is None and not self._left:
            self._pump()
        if self._local is None and not self._left:
            self._count_answers()
            if self._ring.told > self._told:
                self._listen()
        found, self._found = [*self._found, *(self._local.found() if self._local else ())], []
        return found

    def sync(self, timeout: float) -> None:
        """See `Writer`."""
        self._send("sync", timeout)
        self._settle(timeout)

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """See `Writer`."""
        self._send("end", status, seq, timeout)
        self._settle(timeout)
        if self._unacknowledged and self._local is None:
            self._take_over("is too slow")
        self._leave()

    def _send(self, method: str, *arguments: Any) -> None:
        if self._local is not None:
            getattr(self._local, method)(*arguments)
            return
        self._dispatch(self._packer.pack((method, arguments)))

    def _dispatch(self, message: Message | PlainMessage) -> None:
        self._unacknowledged.append(message)
        self._outbox += message.parts()
        self._pump()

    def _pump(self) -> None:
        """Writes what the pipe takes, which never waits; `found` does so again, and reads what is acknowledged."""
        try:
            with suppress(BlockingIOError):
                while self._outbox:
                    self._written(os.writev(self._pipe, [*itertools.islice(self._outbox, MOST_PARTS)]))
        except OSError as error:
            self._take_over("has died" if isinstance(error, BrokenPipeError) else f"cannot be reached ({error})")

    def _count_answers(self) -> None:
        """Lets go of the messages that are answered by now."""
        answered = self._ring.answered
        for _ in range(answered - self._answered):
            if self._unacknowledged.popleft().place is not None:
                self._ring.release()
        self._answered = answered

    def _listen(self) -> None:
        """Reads what has come back by now, or finds that nothing more will."""
        if not self._read() and self._unacknowledged:
            self._take_over("has died")

    def _read(self) -> bool:
        """Takes in what has come back by now; whether more may come."""
        received: bytes | None = b""
        try:
            received = os.read(self._acknowledgements, REPLY_BYTES)
        except BlockingIOError:
            received = None
        except OSError:  # nothing can be heard any more
            pass
        for answer in self._replies.take(received or b""):
            self._told += 1
            for told in answer:
                self._take_note(told)
        self._count_answers()
        return received != b""

    def _take_note(self, told: str | Found) -> None:
        """What the process had to warn of while it dealt with a message, or what it has found."""
        if isinstance(told, str):
            _logger.warning("%s", told)
        else:
            self._found.append(told)

    def _written(self, count: int) -> None:
        """So many bytes of the outbox are on their way."""
        while count:
            part = self._outbox.popleft()
            if len(part) > count:
                self._outbox.appendleft(part[count:])
            count -= min(count, len(part))

    def _settle(self, timeout: float) -> None:
        """Waits until everything is acknowledged, at most for that time."""
        deadline = time.monotonic() + timeout
        while self._local is None and self._unacknowledged and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
            self._pump()
            if self._local is None:
                self._listen()

    def _wait(self, seconds: float) -> None:
        """Until the process has done something, or can take something."""
        waiting = select.poll()  # select takes no descriptor above 1023
        waiting.register(self._acknowledgements, select.POLLIN)
        if self._outbox:
            waiting.register(self._pipe, select.POLLOUT)
        waiting.poll(1000 * max(0.0, min(seconds, LOOK_SECONDS)))

    def _take_over(self, reason: str) -> None:
        """Does here what the process did not do, and everything from now on."""
        self._warn(f"the process that summarises updates {reason}: training goes on and does it itself")
        _killed(self._process)
        self._read()
        last = self._last_number()
        self._journal.go_on()
        self._local = JournalWriter(self._journal, self._level, self._watches)
        if self._info is not None and last >= 0:
            self._local.go_on(self._info)
        self._outbox.clear()
        self._recover_alarms(last)
        while self._unacknowledged:
            method, arguments = self._unacknowledged.popleft().load()
            if _number(method, arguments) > last:
                self._journal.records -= method == "record"  # it was counted when it was sent
                getattr(self._local, method)(*arguments)

    def _last_number(self) -> int:
        """Return the number of the last line in the journal, which may not be acknowledged yet; -1 where the run line is not there.

        Where the journal cannot be read it is that of the last acknowledged line: some updates may have two records, of which readers take
        the first.
        """
        try:
            return read_contents(self._run_dir).seq
        except ValueError:
            return -1
        except OSError:
            numbers = [_number(*message.load()) for message in self._unacknowledged]
            return min(numbers, default=0) - 1

    def _recover_alarms(self, last: int) -> None:
        """Finds in the journal what the process could not say any more; for how long to look closely is lost with it."""
        numbers = [_number(*message.load()) for message in self._unacknowledged]
        first = min((number for number in numbers if 0 < number <= last), default=None)
        if first is not None:
            with suppress(OSError):  # a journal that cannot be read tells nothing
                lost = tuple(alarm for alarm in alarms(self._run_dir) if alarm.seq >= first)
                self._found.append(Found(lost, 0))

    def dismiss(self) -> None:
        """Ends the process, whatever it is doing; it has written nothing."""
        self._process.kill()
        self._leave()

    def _leave(self) -> None:
        self._left = True
        os.close(self._pipe)
        os.close(self._acknowledgements)
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:  # it has written everything, and only ends slowly
            _killed(self._process)
        remove_lock(self._run_dir, Role.WRITER)

    def _warn(self, text: str) -> None:
        if not self._warned:
            _logger.warning("%s (%s)", text, self._run_dir / LOG_NAME)
            self._warned = True


def _killed(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and waits until it is gone."""
    process.kill()
    process.wait()


def _number(method: str, arguments: tuple[Any, ...]) -> int:
    """The number of the line that a message becomes; 0 for the run line, which comes before all."""
    match method:
        case "record" | "event":
            return int(arguments[0].seq)
        case "describe" | "end":
            return int(arguments[1])
    return 0


WORTH_SHARE: Final = 0.005
"""Of the wall time that records take on the training thread, above which a process is worth its memory: a quarter of the budget."""
WORTH_SECONDS: Final = 1.0
"""How long a run goes on before it is asked: a process takes two to start."""
WORTH_RECORDS: Final = 20


class HandOver:
    """Weighs what records cost here, and brings the writer that makes them elsewhere.

    Args:
        start: makes that writer; None where the system refuses what it needs.
    """

    def __init__(self, start: Callable[[], OffloadedWriter | None]) -> None:
        self._start = start
        self._refused = False
        self._cost, self._pace = Average(), Average()
        self._elapsed = 0.0
        self._learning: OffloadedWriter | None = None

    def weigh(self, seconds: float, elapsed: float) -> None:
        """Takes what a record has cost the training thread, and the time since the one before, in seconds."""
        self._cost.add(seconds)
        self._pace.add(elapsed)
        self._elapsed += elapsed

    def writer(self, run: RunInfo) -> OffloadedWriter | None:
        """Who makes the records from now on; None while it is this process. Never waits."""
        if self._learning is None:
            if self._worthwhile and not self._refused:
                self._learning = self._start()
                self._refused = self._learning is None
                if self._learning is not None:
                    self._learning.go_on(run)
            return None
        if not self._learning.idle():
            return None
        self._learning.catch_up()
        return self._learning

    def give_up(self) -> None:
        """Ends a process that has not taken over."""
        if self._learning is not None:
            self._learning.dismiss()

    @property
    def _worthwhile(self) -> bool:
        known = self._cost.count >= WORTH_RECORDS and self._elapsed >= WORTH_SECONDS
        return known and self._cost.value > WORTH_SHARE * self._pace.value and worth_offloading()
