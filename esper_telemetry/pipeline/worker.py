"""`WorkerPipeline`: the pipeline in a worker process, connected by a pipe and shared memory.

A record takes about five hundred small operations, a seventh of a fast CPU trainer's time on its own thread; packing the update takes about
a millisecond. The price is a second interpreter with torch, about 200 MB. Tensors are in shared memory because the system allocates fresh
pages for every write to a pipe, half a millisecond per update, and a pipe only takes a megabyte at a time.

A dying process loses nothing in two cases. If the trainer is killed, the worker still finds the finished updates in the pipe, and ends
the run as killed. If the worker dies or hangs, the training process finds the worker's progress in the journal, and does the rest itself.

A call that has killed the worker must not kill the trainer, so it is not repeated unchanged. If its `CallNote` names a function, that
function is never called again. Otherwise the record of that update is written without the data that were still to be measured. Alarms of
users are off from then on in any case: they were promised a separate process.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from esper_telemetry.core.containment import CallNote, call_note
from esper_telemetry.core.group import Values
from esper_telemetry.core.process_memory import DeviceUsage
from esper_telemetry.core.record import Alarm, Axes, Level, MetricInfo, RunInfo, RunStatus, SinkBacklog, SinkLag
from esper_telemetry.core.redaction import error_line, known_secrets
from esper_telemetry.core.supervisor import (
    HAS_HELPERS,
    MIN_PAUSE_SECONDS,
    PauseDetector,
    ProcessSupervisor,
    WarningCollector,
    become_helper_process,
)
from esper_telemetry.journal.file import Journal, is_abandoned, last_entries
from esper_telemetry.journal.lines import Entry, JournalEvent
from esper_telemetry.journal.lock import Role, lock_for, remove_lock
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.journal.read import JournalContents, end_after_parent
from esper_telemetry.pipeline.channel import (
    HAS_SHARED_FILES,
    Message,
    MessagePacker,
    Replies,
    Ring,
    Vocabulary,
    messages,
    reply,
    shared_file,
)
from esper_telemetry.pipeline.in_process import AlarmReport, InProcessPipeline, PipelineSettings
from esper_telemetry.pipeline.window import FlushCost, FlushedUpdate
from esper_telemetry.updates.update import KINDS

LOG_NAME: Final = "summary.log"
ENTRY: Final = "from esper_telemetry.pipeline.worker import main; main()"

MAX_WORKER_THREADS: Final = 4
RING_BYTES: Final = 256 << 20
"""Size of the shared memory, several times `MAX_WAITING_BYTES`. A small run uses only the first megabytes."""
PIPE_BYTES: Final = 1 << 20
"""Size of the pipe: the descriptions of all metrics, and several updates without their tensors."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Bytes that may wait for a slow worker; beyond it updates are recorded without the data that are still to be measured."""
MAX_LATE_MESSAGES: Final = 32
LATE_SECONDS: Final = 2.0
"""A worker with several unanswered messages for this long is late; a fast run may send several messages between two of its polls."""
MAX_PARTS: Final = 256
"""Parts that one call writes; systems take 1024."""
POLL_SECONDS: Final = 0.01
"""Time between two polls of the worker's counter in `sync` and `end`, because not every answer comes through the pipe."""
MAX_MESSAGE_SECONDS: Final = 60.0
"""Time that the worker may take for one message; a user's alarm that hangs takes longer."""
AWAITED_SHARE: Final = 0.75
"""Fraction of the time at the end of a run that the worker gets; the rest is for finishing its work in this process."""
USER_ALARM: Final = "alarm "
"""Prefix of the notes of alarms."""
EXIT_SECONDS: Final = 5.0
"""Time that the worker may take to exit when everything is done."""
NICENESS: Final = 10
"""Gives the trainer priority if cores are scarce; the sink process has an even lower priority."""

AWAITED: Final = ("sync", "end")
"""Calls that the trainer waits for: the worker replies through the pipe even without a report."""
PAYLOAD: Final = Vocabulary((FlushedUpdate, Axes, SinkBacklog, FlushCost, SinkLag, DeviceUsage, Values, *KINDS), tuple(Level))
"""Types in an update's payload."""

_logger = logging.getLogger("esper_telemetry")


def can_use_worker(settings: PipelineSettings) -> bool:
    """Return whether a worker can make the records: on Linux or macOS, with a second core, and with settings that it can import.

    A worker cannot import definitions of the script itself, such as a detector or an alarm.
    """
    if not (HAS_HELPERS and HAS_SHARED_FILES):
        return False
    if _cores() < 2:
        return False
    try:
        return b"__main__" not in pickle.dumps(settings)
    except (Exception, SystemExit):  # pickling runs code of detectors and alarms, which may not support it
        return False


def worker_threads() -> int:
    """Return the number of threads of a worker: one for a trainer on the CPU, more if a GPU leaves cores idle and makes large updates."""
    return max(1, min(MAX_WORKER_THREADS, _cores() // 4)) if torch.cuda.is_initialized() else 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPipeline:
    """A pipeline whose work is done in another process, with the calls of `InProcessPipeline`; only `sync` and `end` wait.

    Args:
        journal: journal of a run with a directory; only the worker appends to it meanwhile.
        settings: sent to the worker.

    Raises OSError or MemoryError if the system lacks resources for the worker; everything is then closed.
    """

    def __init__(self, journal: Journal, settings: PipelineSettings) -> None:
        self._journal, self._run_dir, self._settings = journal, journal.run_dir, settings
        self._fallback: InProcessPipeline | None = None
        self._info: RunInfo | None = None
        self._unanswered: deque[Message] = deque()
        self._replies = Replies()
        self._answers = self._replies_read = 0
        self._reports: list[AlarmReport] = []
        self._warned: set[str] = set()
        self._secrets: tuple[str, ...] = ()
        self._closed = self._is_changing = False
        self._in_time_at = time.monotonic()
        self._lost_records = 0
        self._orphan: MemoryJournal | None = None
        self._begun, self._begun_at, self._pauses = 0, time.monotonic(), PauseDetector()
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
                environment={"OMP_NUM_THREADS": str(worker_threads())},
            )
            try:
                self._supervisor.start([shared, lock])
            except BaseException:
                remove_lock(self._run_dir, Role.WRITER)
                raise
        os.set_blocking(self._supervisor.input, False)
        with suppress(OSError, AttributeError):  # if the system allows less, or lacks this call, more waits in memory
            import fcntl

            fcntl.fcntl(self._supervisor.input, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pid(self) -> int:
        """Process ID of the worker."""
        assert self._supervisor.pid is not None
        return self._supervisor.pid

    def start(self, info: RunInfo) -> None:
        """Append the head of the journal."""
        self._info = info
        self._send("start", info)

    def resume(self, info: RunInfo, earlier: JournalContents) -> None:
        """Continue a run whose journal holds this head and the records of earlier parts of the run."""
        self._info = info
        self._send("resume", info, earlier)

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """Append descriptions of keys that the head did not have."""
        self._send("describe", metrics, seq)

    def record(self, update: FlushedUpdate) -> None:
        """Append the record of an update."""
        if len(self._unanswered) <= MAX_LATE_MESSAGES:
            self._in_time_at = time.monotonic()
        if update.updates and self._waiting_bytes > MAX_WAITING_BYTES:
            self._warn("the process that summarises updates does not keep up: some updates are recorded without summary")
            update = update.without_summary()
        if self._fallback is None:  # the worker appends it, and the sinks' backlog is computed from this number
            self._journal.records += 1
        self._send("record", update)

    @property
    def is_late(self) -> bool:
        """True while updates wait for the worker, which should then get less work. A single sampled update may have 20 MB."""
        behind = len(self._unanswered) > MAX_LATE_MESSAGES and time.monotonic() - self._in_time_at > LATE_SECONDS
        return self._fallback is None and (behind or self._waiting_bytes > MAX_WAITING_BYTES // 2)

    @property
    def _waiting_bytes(self) -> int:
        return self._ring.used_bytes + sum(map(len, self._outbox))

    def event(self, event: JournalEvent) -> None:
        """Append an event other than a record."""
        self._send("event", event)

    def take_reports(self) -> Sequence[AlarmReport]:
        """Return the detector's reports that this process has received since the last call."""
        if self._fallback is None and not self._closed:
            with self._changing():
                self._write()
                if self._fallback is None:
                    self._release_answered()
                    if self._ring.replies > self._replies_read:
                        self._poll()
                if self._fallback is None and self._hangs(MAX_MESSAGE_SECONDS):
                    self._take_over("hangs")
        late = self._fallback.take_reports() if self._fallback else ()
        reports, self._reports = [*self._reports, *late], []
        return reports

    @property
    def missing_records(self) -> int:
        """Records that were made and are not in the journal by now."""
        if self._fallback is None:
            return self._ring.missing_records
        here = self._fallback.missing_records if self._orphan is None else self._orphan.records
        return self._lost_records + here

    def sync(self, timeout: float) -> None:
        """Make all lines so far durable, if `timeout` seconds allow."""
        self._send("sync", timeout)
        self._await_answers(timeout)

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """Append the last line. All lines are in the journal on return, without summaries if time is short."""
        self._send("end", status, seq, timeout)
        wait = timeout * AWAITED_SHARE
        self._await_answers(wait)
        if self._unanswered and self._fallback is None:
            self._take_over("is too slow", blame=self._hangs(wait / 2), seconds=timeout - wait)
        self._closed = True
        if self._fallback is None:
            self._supervisor.stop(EXIT_SECONDS)  # it has written everything, and may only exit slowly
            remove_lock(self._run_dir, Role.WRITER)

    def idle(self) -> bool:
        """Return whether all calls are done, by this process if the worker is gone; never waits for the worker."""
        if self._fallback is None:
            self._poll()
        return not self._unanswered

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the state of the pipe and the ring. If an exception, as from a signal handler, interrupts this, their use ends."""
        if self._is_changing and self._fallback is None:
            self._take_over("was interrupted", blame=False)
        self._is_changing = True
        yield
        self._is_changing = False

    def _hangs(self, seconds: float) -> bool:
        """Return whether the worker has worked on one message for so long, without pauses of both processes."""
        now, begun = time.monotonic(), self._ring.begun
        pause = max(0.0, self._pauses.seconds() - MIN_PAUSE_SECONDS)
        if begun != self._begun or begun == self._ring.answers:
            self._begun, self._begun_at = begun, now
        self._begun_at += pause
        return now - self._begun_at >= seconds

    def _send(self, method: str, *arguments: Any) -> None:
        if self._fallback is None and (secrets := known_secrets()) is not self._secrets:
            self._secrets = secrets
            self._send("learn", secrets)
        with self._changing():
            if self._fallback is None and (message := self._packed(method, arguments)) is not None:
                self._unanswered.append(message)
                self._outbox += message.parts()
                self._write()
                return
        if self._fallback is not None:
            getattr(self._fallback, method)(*arguments)

    def _packed(self, method: str, arguments: tuple[Any, ...]) -> Message | None:
        """Return the message of a call; of a record without summary if that cannot be pickled; None if the rest cannot."""
        try:
            return self._packer.pack((method, arguments))
        except Exception as error:  # pickling runs code of plugins
            self._warn(f"{method} cannot be sent to the process that summarises updates ({error_line(error)})")
            is_summary = method == "record" and arguments[0].updates
            return self._packed(*_without_summary(method, arguments)) if is_summary else None

    def _write(self) -> None:
        """Write as much as the pipe takes without waiting; `take_reports` continues."""
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
        """Release the answered messages and their shared memory."""
        answers = self._ring.answers
        for _ in range(answers - self._answers):
            if self._unanswered.popleft().place is not None:
                self._ring.release()
        self._answers = answers

    def _poll(self) -> None:
        """Read the replies so far, or notice that no more will come."""
        has_ended = self._supervisor.has_ended  # before reading: its output comes before its end
        self._read()
        if has_ended and self._unanswered:
            self._take_over("has died")

    def _read(self) -> None:
        received = b""
        with suppress(OSError):  # if the pipe cannot be read, the worker's counter says which messages are answered
            while piece := self._supervisor.read():
                received += piece
        for items in self._replies.take(received):
            self._replies_read += 1
            for item in items:  # alarms, and warnings of the worker, because its log is not shown
                if isinstance(item, str):
                    _logger.warning("%s", item)
                else:
                    self._reports.append(item)
        self._release_answered()

    def _await_answers(self, timeout: float) -> None:
        """Wait until everything is answered, at most for that time."""
        deadline = time.monotonic() + timeout
        while self._fallback is None and self._unanswered and time.monotonic() < deadline:
            poll = select.poll()  # select cannot use descriptors above 1023
            poll.register(self._supervisor.replies, select.POLLIN)
            if self._outbox:
                poll.register(self._supervisor.input, select.POLLOUT)
            poll.poll(1000 * max(0.0, min(deadline - time.monotonic(), POLL_SECONDS)))
            self._hangs(timeout)
            with self._changing():
                self._write()
                if self._fallback is None:
                    self._poll()

    def _take_over(self, reason: str, *, blame: bool = True, seconds: float = math.inf) -> None:
        """Do the worker's unfinished work in this process, and everything from now on.

        Args:
            reason: what has happened to the worker.
            blame: whether the message under way may be the reason.
            seconds: time after which records are written without the data that are still to be measured.
        """
        deadline = time.monotonic() + seconds
        was_alive = not self._supervisor.has_ended
        self._supervisor.kill()
        is_gone = self._supervisor.await_end()
        self._read()
        under_way = blame and self._ring.begun > self._ring.answers
        code = self._supervisor.reap()
        remove_lock(self._run_dir, Role.WRITER)
        unanswered, self._unanswered = [*self._unanswered], deque()
        self._outbox.clear()
        self._is_changing = False
        self._lost_records = self._ring.missing_records
        if not is_gone:  # two processes must not append to one journal
            self._give_up(reason, sum(message.load()[0] == "record" for message in unanswered))
            return
        culprit = CallNote.read(self._ring.note) if under_way else ""
        if code == -signal.SIGKILL and not was_alive and not culprit.startswith(USER_ALARM):
            culprit = ""  # killed from outside, as by a system that is out of memory
        blamed = f" in {culprit}, which is not called again in this run" if culprit else ""
        self._warn(f"the process that summarises updates {reason}{blamed}: training continues and summarises them itself")
        calls = [message.load() for message in unanswered]
        if under_way and calls and not culprit:
            calls[0] = _without_summary(*calls[0])
        self._continue_here(calls, culprit, deadline)

    def _continue_here(self, calls: Sequence[tuple[str, tuple[Any, ...]]], culprit: str, deadline: float) -> None:
        """Repeat the calls whose results are missing from the journal, and report the alarms of the others."""
        numbers = [_seq(*call) for call in calls]
        last, entries = self._last_seq(numbers)
        self._journal.go_on()
        self._fallback = InProcessPipeline(self._journal, self._settings, banned=(culprit,))
        if self._info is not None and last >= 0:
            self._fallback.resume(self._info)
        first = min((number for number in numbers if 0 < number <= last), default=None)
        if first is not None:  # the worker could not send these alarms, and the duration of their escalation is lost
            lost = tuple(entry for entry in entries if isinstance(entry, Alarm) and entry.seq >= first)
            self._reports.append(AlarmReport(lost, 0))
        for number, (method, arguments) in zip(numbers, calls, strict=True):
            if number > last:
                self._journal.records -= method == "record"  # it was counted when it was sent
                if time.monotonic() > deadline:
                    method, arguments = _without_summary(method, arguments)
                getattr(self._fallback, method)(*arguments)

    def _give_up(self, reason: str, waiting: int) -> None:
        """Continue without a journal: the worker cannot be ended, and may still write to it."""
        self._warn(f"the process that summarises updates {reason} and cannot be ended: nothing is recorded from here on")
        self._lost_records += waiting
        self._orphan = MemoryJournal()
        self._fallback = InProcessPipeline(self._orphan, self._settings)

    def _last_seq(self, numbers: Sequence[int]) -> tuple[int, Sequence[Entry]]:
        """Return the number of the last line in the journal, -1 without a run line, and the last entries.

        If the journal cannot be read, use the number of the last answered line: some updates may then have two records, and readers use
        the first.
        """
        try:
            if is_abandoned(self._run_dir):
                return -1, ()
            entries = last_entries(self._run_dir)
        except OSError:
            return min(numbers, default=0) - 1, ()
        return max((entry.seq for entry in entries if not isinstance(entry, RunInfo)), default=0), entries

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            _logger.warning("esper-telemetry: %s (%s)", text, self._run_dir / LOG_NAME)
            self._warned.add(text)


def _without_summary(method: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return the call of a record without the data that are still to be measured; any other call unchanged."""
    return (method, (arguments[0].without_summary(),)) if method == "record" else (method, arguments)


def _seq(method: str, arguments: tuple[Any, ...]) -> int:
    """Return the number of the line that a call becomes; 0 for the run line, which comes first."""
    match method:
        case "record" | "event":
            return int(arguments[0].seq)
        case "describe" | "end":
            return int(arguments[1])
    return 0


def main() -> None:
    """Run the worker: make the incoming calls in order, and answer each with warnings and alarms, until the input ends."""
    replies, shared, parent = map(int, sys.argv[1:4])
    run_dir = Path(sys.argv[4])
    become_helper_process(NICENESS)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
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
    journal = Journal.open(run_dir)
    pipeline = InProcessPipeline(journal, settings.load(), parent)
    call_note.memory = ring.note
    method = ""
    for message in incoming:
        ring.begin()
        method, arguments = message.load()
        getattr(pipeline, method)(*arguments)
        items = [*warnings.take(), *pipeline.take_reports()]
        replied = bool(items) or method in AWAITED
        if replied:
            with suppress(BrokenPipeError):
                reply(replies, items, parent)
        ring.answer(replied=replied, missing_records=journal.missing_records)
    journal.close()
    if method not in ("", "end"):
        end_after_parent(parent, run_dir)
