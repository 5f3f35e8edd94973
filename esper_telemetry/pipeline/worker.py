"""`WorkerPipeline`: the pipeline in a process beside the trainer, behind a pipe and shared memory.

A record takes some five hundred small operations, a seventh of a fast CPU trainer's time on its own thread; to pack the update takes about
a millisecond. The price is a second interpreter with torch, some 200 MB. Tensors lie in shared memory because the system finds fresh pages
for every write to a pipe, half a millisecond per update, and because a pipe takes a megabyte at a time.

Two cases of a dying process lose nothing. Where the trainer is killed, the worker still finds the finished updates in the pipe, and ends
the run as killed. Where the worker dies or hangs, the training process reads in the journal how far it came, and does the rest itself.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import torch

from esper_telemetry.core.group import Values
from esper_telemetry.core.record import Axes, Level, MetricInfo, RunInfo, RunStatus, SinkLag
from esper_telemetry.core.redaction import known_secrets
from esper_telemetry.core.supervisor import ProcessSupervisor, become_helper_process
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.lock import Role, lock_for, remove_lock
from esper_telemetry.journal.read import alarms, end_after_parent, read_contents
from esper_telemetry.pipeline.channel import (
    Message,
    MessagePacker,
    Replies,
    Ring,
    Vocabulary,
    messages,
    reply,
    shared_file,
)
from esper_telemetry.pipeline.record import (
    AlarmReport,
    FlushCost,
    FlushedUpdate,
    InProcessPipeline,
    PipelineSettings,
    SinkBacklog,
)
from esper_telemetry.updates.data import KINDS

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "esper_telemetry.Telemetry does not run on this system, which has no file locks (Python's module fcntl): use Linux or macOS,"
        " or WSL 2 on Windows. Metric functions, the trainer and commands that read a run work here."
    ) from error

LOG_NAME: Final = "summary.log"
ENTRY: Final = "from esper_telemetry.pipeline.worker import main; main()"

RING_BYTES: Final = 256 << 20
"""Size of the shared memory, several times `MAX_WAITING_BYTES`. A small run uses the first megabytes alone."""
PIPE_BYTES: Final = 1 << 20
"""Size of the pipe: the descriptions of all metrics, and several updates besides their tensors."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Bytes that may wait for a worker that is not fast enough; beyond it updates are recorded without what is still to be measured."""
MAX_PARTS: Final = 256
"""Parts that one call writes; systems take 1024."""
POLL_SECONDS: Final = 0.01
"""Time between two looks of `sync` and `end` at the worker's counter: not every answer comes through the pipe."""
KILL_POLL_SECONDS: Final = 0.001
"""Time between two checks of the trainer that a worker it has killed is gone."""
EXIT_SECONDS: Final = 5.0
"""Time that the worker may take to exit when everything is done."""
NICENESS: Final = 10
"""The trainer goes first where cores are scarce; the sinks' process is nicer still."""

AWAITED: Final = ("sync", "end")
"""Calls that the trainer waits for: the worker replies through the pipe though it has nothing to report."""
PAYLOAD: Final = Vocabulary((FlushedUpdate, Axes, SinkBacklog, FlushCost, SinkLag, Values, *KINDS), tuple(Level))
"""Types of which an update's payload is made."""

_logger = logging.getLogger("esper_telemetry")


def can_use_worker(settings: PipelineSettings) -> bool:
    """Return whether a worker can make the records: on Linux (memory files), with a second core, and with settings that it can import.

    A worker cannot import what the script itself defines, such as a detector or an alarm.
    """
    if not hasattr(os, "memfd_create"):
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if (cores or 1) < 2:
        return False
    try:
        return b"__main__" not in pickle.dumps(settings)
    except Exception:  # pickling runs code of detectors and alarms, which need not be made for it
        return False


class WorkerPipeline:
    """A pipeline whose work is done by a process of its own; calls as `InProcessPipeline`, none of which waits but `sync` and `end`.

    Args:
        journal: of a run with a directory; nobody else appends to it meanwhile.
        settings: sent to the worker.

    Raises OSError or MemoryError where the system refuses what the worker needs; nothing of it is left open then.
    """

    def __init__(self, journal: Journal, settings: PipelineSettings) -> None:
        self._journal, self._run_dir, self._settings = journal, journal.run_dir, settings
        self._fallback: InProcessPipeline | None = None
        self._info: RunInfo | None = None
        self._unanswered: deque[Message] = deque()
        self._replies = Replies()
        self._answers = self._replies_read = 0
        self._reports: list[AlarmReport] = []
        self._warned = self._closed = False
        self._secrets: tuple[str, ...] = ()
        with ExitStack() as lent:
            shared = shared_file(RING_BYTES)
            lent.callback(os.close, shared)
            self._ring = Ring(shared, RING_BYTES)
            self._packer = MessagePacker(self._ring, PAYLOAD)
            self._outbox = deque(self._packer.pack(settings).parts())
            lock = lock_for(self._run_dir, Role.WRITER)
            lent.callback(os.close, lock)
            self._supervisor = ProcessSupervisor(
                ENTRY,
                self._run_dir / LOG_NAME,
                arguments=(str(shared), str(os.getpid()), str(self._run_dir)),
                environment={"OMP_NUM_THREADS": "1"},
            )
            try:
                self._supervisor.start([shared, lock])
            except BaseException:
                remove_lock(self._run_dir, Role.WRITER)
                raise
        os.set_blocking(self._supervisor.input, False)
        with suppress(
            OSError, AttributeError
        ):  # where the system allows less, or has no such call, more waits in memory
            fcntl.fcntl(self._supervisor.input, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pid(self) -> int:
        """Number of the worker process."""
        assert self._supervisor.pid is not None
        return self._supervisor.pid

    def start(self, info: RunInfo) -> None:
        """Append the head of the journal."""
        self._info = info
        self._send("start", info)

    def resume(self, info: RunInfo) -> None:
        """Continue a run whose journal holds this head and the records of earlier parts of the run."""
        self._info = info
        self._send("resume", info)

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """Append descriptions of keys that the head did not have."""
        self._send("describe", metrics, seq)

    def record(self, update: FlushedUpdate) -> None:
        """Append the record of an update."""
        if update.updates and self._ring.used_bytes + sum(map(len, self._outbox)) > MAX_WAITING_BYTES:
            self._warn(
                "the process that summarises updates does not keep up: some updates are recorded without summary"
            )
            update = update._replace(updates=())
        if self._fallback is None:  # the worker appends it, and the sinks' backlog is computed from this number
            self._journal.records += 1
        self._send("record", update)

    def event(self, event: JournalEvent) -> None:
        """Append something that happened besides records."""
        self._send("event", event)

    def take_reports(self) -> Sequence[AlarmReport]:
        """Return what the detector has reported since the last call, as far as this process knows by now."""
        if self._fallback is None and not self._closed:
            if self._outbox:
                self._write()
            if self._fallback is None:
                self._release_answered()
                if self._ring.replies > self._replies_read:
                    self._poll()
        late = self._fallback.take_reports() if self._fallback else ()
        reports, self._reports = [*self._reports, *late], []
        return reports

    def sync(self, timeout: float) -> None:
        """Make all lines so far durable, if `timeout` seconds allow."""
        self._send("sync", timeout)
        self._await_answers(timeout)

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """Append the last line; all lines are in the journal when this returns."""
        self._send("end", status, seq, timeout)
        self._await_answers(timeout)
        if self._unanswered and self._fallback is None:
            self._take_over("is too slow")
        self._closed = True
        if self._fallback is None:
            self._supervisor.stop(EXIT_SECONDS)  # it has written everything, and only exits slowly
            remove_lock(self._run_dir, Role.WRITER)

    def idle(self) -> bool:
        """Return whether everything is done that was asked for, here if the worker is gone; never waits for it."""
        if self._fallback is None:
            self._poll()
        return not self._unanswered

    def _send(self, method: str, *arguments: Any) -> None:
        if self._fallback is not None:
            getattr(self._fallback, method)(*arguments)
            return
        if (secrets := known_secrets()) is not self._secrets:
            self._secrets = secrets
            self._send("learn", secrets)
        message = self._packer.pack((method, arguments))
        self._unanswered.append(message)
        self._outbox += message.parts()
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes, which never waits; `take_reports` does so again."""
        try:
            with suppress(BlockingIOError):
                while self._outbox:
                    count = os.writev(self._supervisor.input, [*itertools.islice(self._outbox, MAX_PARTS)])
                    while count:
                        part = self._outbox.popleft()
                        if len(part) > count:
                            self._outbox.appendleft(part[count:])
                        count -= min(count, len(part))
        except OSError as error:
            self._take_over("has died" if isinstance(error, BrokenPipeError) else f"cannot be reached ({error})")

    def _release_answered(self) -> None:
        """Let go of the messages that are answered by now, and of their shared memory."""
        answers = self._ring.answers
        for _ in range(answers - self._answers):
            if self._unanswered.popleft().place is not None:
                self._ring.release()
        self._answers = answers

    def _poll(self) -> None:
        """Read what has come back by now, or notice that nothing more will."""
        has_ended = self._supervisor.has_ended  # before reading: what it wrote comes before its end
        self._read()
        if has_ended and self._unanswered:
            self._take_over("has died")

    def _read(self) -> None:
        """Take in what has come back by now."""
        received = b""
        with suppress(OSError):  # a pipe that cannot be read: the worker's counter says what is answered
            while piece := self._supervisor.read():
                received += piece
        for items in self._replies.take(received):
            self._replies_read += 1
            for item in items:  # warnings of the worker, whose log nobody sees, and alarms
                if isinstance(item, str):
                    _logger.warning("%s", item)
                else:
                    self._reports.append(item)
        self._release_answered()

    def _await_answers(self, timeout: float) -> None:
        """Wait until everything is answered, at most for that time."""
        deadline = time.monotonic() + timeout
        while self._fallback is None and self._unanswered and time.monotonic() < deadline:
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(self._supervisor.replies, select.POLLIN)
            if self._outbox:
                poll.register(self._supervisor.input, select.POLLOUT)
            poll.poll(1000 * max(0.0, min(deadline - time.monotonic(), POLL_SECONDS)))
            self._write()
            if self._fallback is None:
                self._poll()

    def _take_over(self, reason: str) -> None:
        """Do in this process what the worker did not do, and everything from now on."""
        self._warn(f"the process that summarises updates {reason}: training goes on and does it itself")
        self._supervisor.kill()
        while not self._supervisor.has_ended:  # two processes must not append to one journal
            time.sleep(KILL_POLL_SECONDS)
        self._read()
        self._supervisor.reap()
        remove_lock(self._run_dir, Role.WRITER)
        calls = [message.load() for message in self._unanswered]
        self._unanswered.clear()
        self._outbox.clear()
        numbers = [_seq(*call) for call in calls]
        last = self._last_seq(numbers)
        self._journal.go_on()
        self._fallback = InProcessPipeline(self._journal, self._settings)
        if self._info is not None and last >= 0:
            self._fallback.resume(self._info)
        first = min((number for number in numbers if 0 < number <= last), default=None)
        if (
            first is not None
        ):  # the worker could not send the alarms of these; for how long they raise the level is lost
            with suppress(OSError):  # a journal that cannot be read has no alarms
                lost = tuple(alarm for alarm in alarms(self._run_dir) if alarm.seq >= first)
                self._reports.append(AlarmReport(lost, 0))
        for number, (method, arguments) in zip(numbers, calls, strict=True):
            if number > last:
                self._journal.records -= method == "record"  # it was counted when it was sent
                getattr(self._fallback, method)(*arguments)

    def _last_seq(self, numbers: Sequence[int]) -> int:
        """Return the number of the last line in the journal, which may not be answered yet; -1 where the run line is not there.

        Where the journal cannot be read it is that of the last answered line: some updates may have two records, of which readers take
        the first.
        """
        try:
            return read_contents(self._run_dir).seq
        except ValueError:
            return -1
        except OSError:
            return min(numbers, default=0) - 1

    def _warn(self, text: str) -> None:
        if not self._warned:
            _logger.warning("%s (%s)", text, self._run_dir / LOG_NAME)
            self._warned = True


def _seq(method: str, arguments: tuple[Any, ...]) -> int:
    """Return the number of the line that a call becomes; 0 for the run line, which comes before all."""
    match method:
        case "record" | "event":
            return int(arguments[0].seq)
        case "describe" | "end":
            return int(arguments[1])
    return 0


class WarningCollector(logging.Handler):
    """Keeps the warnings of the worker, for the training process to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        self._warnings.append(" ".join(record.getMessage().split()))

    def take(self) -> Sequence[str]:
        """Return the warnings since the last call, a line each."""
        warnings, self._warnings = self._warnings, []
        return warnings


def main() -> None:
    """Run the worker: make the calls that come in, in order, and answer each with warnings and alarms, until the input ends."""
    replies, shared, parent = map(int, sys.argv[1:4])
    run_dir = Path(sys.argv[4])
    become_helper_process(NICENESS)
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s")
    warnings = WarningCollector()
    _logger.addHandler(warnings)
    _logger.setLevel(logging.DEBUG)
    os.set_blocking(replies, False)
    ring = Ring(shared, RING_BYTES)
    incoming = messages(parent, ring, PAYLOAD)
    settings = next(incoming, None)
    if settings is None:
        return
    pipeline = InProcessPipeline(Journal.open(run_dir), settings.load(), parent)
    method = ""
    for message in incoming:
        method, arguments = message.load()
        getattr(pipeline, method)(*arguments)
        items = [*warnings.take(), *pipeline.take_reports()]
        replied = bool(items) or method in AWAITED
        if replied:
            with suppress(BrokenPipeError):
                reply(replies, items, parent)
        ring.answer(replied=replied)
    if method not in ("", "end"):
        end_after_parent(parent, run_dir)
