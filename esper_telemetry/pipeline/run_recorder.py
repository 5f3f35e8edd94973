"""The journal of one run: the lease of its directory, its run line, the numbers of its lines, and the pipeline that appends to it."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from esper_telemetry.alarms.metric_entries import descriptions
from esper_telemetry.alarms.verdict.remarks import REMARK
from esper_telemetry.core.files import replace_file
from esper_telemetry.core.group import SlotLayout
from esper_telemetry.core.messages import shown
from esper_telemetry.core.metric import declared
from esper_telemetry.core.record import AlarmEvent, AlarmLevel, Axes, MetricInfo, RunInfo, RunStatus
from esper_telemetry.core.redaction import HIDDEN, masked, redacted
from esper_telemetry.core.requirements import require_path
from esper_telemetry.journal.file import HOLDS_RUN, Journal, is_abandoned
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_metrics, encode_run, plain
from esper_telemetry.journal.lock import HELPER_ROLES, TrainerLock, await_release
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.journal.read import JournalContents, read_contents
from esper_telemetry.pipeline.in_process import INTERVENTION, AlarmReport, InProcessPipeline, PipelineSettings
from esper_telemetry.pipeline.snapshot import known_contents
from esper_telemetry.pipeline.window import FlushedUpdate
from esper_telemetry.pipeline.worker import WorkerPipeline, can_use_worker

MAX_HELPER_SECONDS: Final = 60.0
"""How long a resumed run waits for the helpers of a killed trainer, which deliver its last records."""

INVALID_PATH_ERRORS: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ})
"""Error numbers for a path that cannot be a run directory on any disk; other errors depend on the machine."""

NOT_IN_FILE_NAMES: Final = re.compile(r"[\x00-\x1f\x7f-\x9f/\\<>:\"|?*]+")
"""Characters that POSIX or Windows refuses, or that a terminal would interpret."""
MAX_LABEL_CHARACTERS: Final = 50
"""Characters of a run's name in the name of its directory, which systems limit to 255 bytes."""

OUTPUTS: Final = frozenset({"sinks", "notify"})
"""Settings of `train` that do not change the training."""

PACKAGES: Final = ("esper-telemetry", "torch", "numpy", "gymnasium", "wandb", "tensorboard", "mlflow")
"""Packages whose versions are in the run line."""

NO_WORKER: Final = (
    "esper-telemetry: cannot start the process that summarises updates (%s): training continues and summarises them itself, which takes"
    " more of its time"
)

_logger = logging.getLogger("esper_telemetry")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Arguments of `Telemetry` that concern the journal.

    Attributes:
        run_dir: directory of the journal; `auto` for a new directory, None for none.
        name: display name of the run; by default `default_name` of the directory.
        tags, notes: sent to the sinks.
        resume: whether to continue the run in `run_dir`.
    """

    run_dir: str | Path | Literal["auto"] | None = "auto"
    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    resume: bool = False


class RunPosition(NamedTuple):
    """Directory of the run's journal, and its last record; the same on every rank.

    Attributes:
        run_dir: directory of the journal; None without one.
        axes: axes of its last record when the run was resumed; None for a new run.
    """

    run_dir: Path | None = None
    axes: Axes | None = None

    def covers(self, axes: Axes) -> bool:
        """Return whether an earlier part of the run has recorded this update."""
        return self.axes is not None and axes.within(self.axes)


class RecordTotals(NamedTuple):
    """Records of a run.

    Attributes:
        made: number of records that were made.
        missing: number of them that cannot be read from the journal.
        is_deleted: whether the journal was deleted.
        fault: why they cannot be read, if another program has changed the journal; empty otherwise.
    """

    made: int = 0
    missing: int = 0
    is_deleted: bool = False
    fault: str = ""

    @property
    def is_readable(self) -> bool:
        """False if no record can be read."""
        return not self.made or self.missing < self.made

    def loss(self, taken: Mapping[str, int] = MappingProxyType({})) -> str:
        """Return the sentence on missing records, empty if the journal is complete; `taken` is the number of records of each sink."""
        if not self.missing:
            return ""
        nowhere = self.made - max([self.made - self.missing, *taken.values()])
        held = ", ".join(f"{name} has {count:,}" for name, count in taken.items() if count)
        if self.fault:
            cause = f"{self.missing:,} of {self.made:,} records cannot be read from the journal, because {self.fault}"
            return f"{cause}; {held}" if held else cause
        why = "the journal was deleted" if self.is_deleted else "the disk did not take them"
        kept = f"; {nowhere:,} are lost" + (f" ({held})" if held else "") if nowhere else f", but {held}"
        return f"{self.missing:,} of {self.made:,} records are not in the journal, because {why}{kept}"


class RepeatedUpdates:
    """Judges the updates of a resumed run that its journal has already, because their numbers differ unless training is deterministic.

    Sinks and views read the journal and do not show these alarms, so warnings do.

    Args:
        run: the resumed run.
        settings: settings of its pipeline.
        checkpoint: position from which it continues: alarms know the records up to it.

    Attributes:
        alarms: the first update of each type that was raised.
    """

    def __init__(self, run: RunInfo, settings: PipelineSettings, checkpoint: Axes) -> None:
        self._pipeline = InProcessPipeline(MemoryJournal(), settings)
        self._pipeline.resume(run, until=checkpoint)
        self._count, self.alarms = 0, dict[str, int]()

    def judge(self, update: FlushedUpdate) -> Sequence[AlarmReport]:
        """Judge an update, and log a warning for each alarm that is raised."""
        self._pipeline.record(update)
        self._count += 1
        reports = self._pipeline.take_reports()
        for alarm in (alarm for report in reports for alarm in report.alarms):
            if alarm.event is AlarmEvent.RAISE and alarm.level is not AlarmLevel.INFO:
                self.alarms.setdefault(alarm.type, alarm.axes.update)
                message = "esper-telemetry: update %d, which is trained again and not recorded: %s  %s"
                _logger.warning(message, alarm.axes.update, alarm.type, " ".join(alarm.text.split()))
        return reports

    @property
    def sentence(self) -> str:
        """The number of updates, and their alarms."""
        alarms = ", ".join(f"{kind} in update {update:,}" for kind, update in self.alarms.items())
        count = "1 update was" if self._count == 1 else f"{self._count:,} updates were"
        return f"{count} trained again and not recorded; their alarms: {alarms or 'none'}"


class RunRecorder:
    """Writes the journal of a run.

    The run directory is claimed at once, so that a mistake shows before training starts. The first line of the journal waits for `start`,
    when the trainer's facts are known. The run then chooses its pipeline, in this process or in a worker.

    A resumed run continues its journal after a new `run` line. Backends cannot retract records, so the first record of an update is kept:
    updates that are trained again, from the checkpoint to the end of the journal, are judged and not recorded again.

    Attributes:
        journal: journal of the run, which sinks read.
        run: description of the run for sinks; None before `start`.
        earlier: contents of the journal when the run was resumed; None for a new run.
        settings: settings of its pipeline.
        pipeline: appends to the journal.
        totals: number of records, known at the end.

    Raises:
        OSError, ValueError: as `lease_new_run` and `lease_existing_run`.
    """

    def __init__(self, options: RunOptions, settings: PipelineSettings) -> None:
        run_dir = options.run_dir
        if options.resume and (run_dir is None or (isinstance(run_dir, str) and run_dir == "auto")):
            raise ValueError("resume needs the directory of the run to continue: pass run_dir")
        if options.resume and run_dir is not None and not is_abandoned(_directory(run_dir)):
            self._lease = lease_existing_run(run_dir)
        else:
            self._lease = lease_new_run(run_dir, options.name)
        self.journal: Journal | MemoryJournal = self._lease.journal
        self.run: RunInfo | None = None
        self.totals = RecordTotals()
        self.earlier: JournalContents | None = self._lease.earlier
        self.settings = settings
        self.pipeline: InProcessPipeline | WorkerPipeline = InProcessPipeline(self.journal, settings)
        self._options = options
        self._repeated: RepeatedUpdates | None = None
        self._seq = 0 if self.earlier is None else self.earlier.seq
        self._records = self.journal.records
        self._described: set[str] = set()
        self._described_layouts: set[SlotLayout] = set()

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None without one."""
        return self.journal.run_dir

    @property
    def position(self) -> RunPosition:
        """The run directory, and the last record of the journal when the run was resumed."""
        return RunPosition(self.run_dir, self.earlier.axes if self.earlier else None)

    def start(self, config: Mapping[str, Any], facts: Mapping[str, Any], axes: Axes, *, worker: bool) -> None:
        """Write the run line, which opens the sinks, and `config.json`; a resumed run continues from `axes`.

        Args:
            worker: whether a worker process makes the records, if this system can run one.
        """
        if worker:
            self._use_worker()
        metrics = descriptions()
        self._described.update(metrics)
        options = self._options
        name = options.name or "run"
        if self.run_dir is not None and (options.run_dir == "auto" or options.name is None):
            name = default_name(self.run_dir)  # the name of a new directory contains the given name and the time
        run = RunInfo(
            run_id=secrets.token_hex(6),
            name=plain(name),
            run_dir=self.run_dir,
            started=time.time(),
            config=plain(config),
            tags=tuple(plain(options.tags)),
            notes=plain(options.notes),
            versions=dict(_versions()),
            facts=plain({"level": self.settings.level.name.lower(), **facts}),
            metrics=metrics,
        )
        if self.earlier is None:
            self.run = _without_secrets(run)
            self.pipeline.start(self.run)
        else:
            self.run = _without_secrets(_resumed(run, self.earlier, axes))
            end = [] if self.earlier.status else [encode_end(RunStatus.KILLED, seq=self._next_seq())]
            known = self.earlier.info.metrics
            new = {key: info for key, info in metrics.items() if known.get(key) != info}
            self.journal.write(*end, encode_run(replace(self.run, metrics={})), *([encode_metrics(new)] if new else []))
            self.pipeline.resume(self.run, self.earlier)
        if self.run_dir:
            _write_config(self.run_dir, self.run)

    def report_changed_settings(self) -> None:
        """Append an intervention if a resumed run continues with other settings."""
        if self.run is None or self.earlier is None or self.earlier.axes is None:
            return
        before = self.earlier.info.config
        settings = self.run.config.keys() - OUTPUTS
        changed = sorted(name for name in settings if plain(self.run.config[name]) != before.get(name))
        if changed:
            reason = "the run continues with other settings"
            self.event(INTERVENTION, self.earlier.axes, {"reason": reason, "changed": changed})

    def describe(self, layouts: Iterable[SlotLayout]) -> None:
        """Write descriptions that the run line did not have, of the keys of user-made groups."""
        infos: dict[str, MetricInfo] = {}
        for layout in layouts:
            if layout not in self._described_layouts:
                self._described_layouts.add(layout)
                infos.update({metric.key: metric.info() for _, metric in declared(layout.group)})
        infos = {key: info for key, info in infos.items() if key not in self._described}
        self._described.update(infos)
        if infos:
            self.pipeline.describe(infos, self._next_seq())

    def record(self, update: FlushedUpdate) -> None:
        """Append the record of an update; the sinks read it from the journal."""
        self._records += 1
        self.pipeline.record(update._replace(seq=self._next_seq()))

    def judge(self, update: FlushedUpdate, checkpoint: Axes) -> Sequence[AlarmReport]:
        """Judge an update that the journal has already, and return its alarms; nothing is appended."""
        if self._repeated is None:
            assert self.run is not None
            self._repeated = RepeatedUpdates(self.run, self.settings, checkpoint)
        return self._repeated.judge(update)

    @property
    def repeated(self) -> str:
        """The sentence on updates that were judged and not recorded; empty if they raised no alarm and recorded updates followed."""
        has_new = self.earlier is not None and self._records > self.earlier.records
        return self._repeated.sentence if self._repeated and (self._repeated.alarms or not has_new) else ""

    def event(self, kind: str, axes: Axes, data: Mapping[str, Any]) -> None:
        """Append an event other than a record."""
        self.pipeline.event(JournalEvent(kind, plain(data), seq=self._next_seq(), axes=axes))

    def end(self, status: RunStatus, timeout: float) -> None:
        """Append the end line; the journal is complete on return, if `timeout` seconds and the disk allow."""
        if self.repeated and self.earlier is not None and self.earlier.axes is not None:
            data = {"name": "repeated", "update": self.earlier.axes.update, "text": self.repeated, "quiet": False}
            self.event(REMARK, self.earlier.axes, data)
        self.pipeline.end(status, self._next_seq(), timeout)
        made, is_deleted = self._records, self.journal.is_deleted
        missing = made if is_deleted else min(made, self.pipeline.missing_records)
        readable, fault = made, ""
        if self.run_dir is not None and not is_deleted:
            with suppress(OSError):  # such as too many open files
                readable, fault = _readable_records(self.run_dir)
        fault = "" if missing else fault
        missing = max(missing, made - readable)
        self.totals = RecordTotals(made, missing, is_deleted, fault)
        self.journal.records = made - missing

    def release(self) -> None:
        """Close the journal and let others resume the run."""
        self._lease.release()

    def _use_worker(self) -> None:
        """Make the records in a worker; log a warning if the system lacks resources for it."""
        if not isinstance(self.journal, Journal) or not can_use_worker(self.settings):
            return
        try:
            self.pipeline = WorkerPipeline(self.journal, self.settings)
        except (OSError, MemoryError) as error:
            _logger.warning(NO_WORKER, error if isinstance(error, OSError) else "no memory")

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _readable_records(run_dir: Path) -> tuple[int, str]:
    """Return how many records the journal has, and why the others cannot be read."""
    try:
        contents = read_contents(run_dir, values=False)
    except (FileNotFoundError, ValueError) as error:
        return 0, str(error)
    return contents.records, "lines of it are damaged" if contents.damaged else "they were removed from it"


def default_name(run_dir: Path) -> str:
    """Return the last three parts of an absolute path, from `runs` on: many runs have a directory such as `telemetry`."""
    parts = run_dir.parts[1:][-3:]
    return "/".join(parts[parts.index("runs") + 1 :] if "runs" in parts[:-1] else parts) or "run"


def _resumed(run: RunInfo, earlier: JournalContents, axes: Axes) -> RunInfo:
    """Return the resumed run: its identity does not change, and settings and facts that are given now override earlier ones."""
    info = earlier.info
    resumed_from = {"update": axes.update, "env_step": axes.env_step, "gradient_step": axes.gradient_step}
    return replace(
        run,
        run_id=info.run_id,
        name=info.name,
        started=info.started,
        config={**info.config, **run.config},
        tags=run.tags or info.tags,
        notes=run.notes or info.notes,
        facts={**info.facts, **run.facts},
        metrics={**info.metrics, **run.metrics},
        resumed_from={**resumed_from, "recorded": earlier.recorded, "seq": earlier.seq},
    )


def _without_secrets(run: RunInfo) -> RunInfo:
    """Return the run with stars for its secrets, and for secrets of the command that it repeats."""
    texts = {name: getattr(run, name) for name in ("config", "facts", "tags", "notes", "name")}
    shown = redacted({**texts, "command": sys.argv})
    return replace(run, **{name: shown[name] for name in texts})


@cache
def _versions() -> Mapping[str, str]:
    """Return the versions of the packages of this process; looking them up takes milliseconds."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except (PackageNotFoundError, OSError):
            continue
    return versions


def _write_config(run_dir: Path, run: RunInfo) -> None:
    settings = {
        "run_id": run.run_id,
        "name": run.name,
        "command": redacted(sys.argv),
        "config": run.config,
        "facts": run.facts,
        "versions": run.versions,
    }
    try:
        replace_file(run_dir / "config.json", json.dumps(plain(settings), indent=2) + "\n")
    except OSError as error:
        message = "esper-telemetry: cannot write config.json in %s (%s); training continues, and the journal also holds the config"
        _logger.warning(message, run_dir, error.strerror)


@dataclass(slots=True)
class RunLease:
    """The right to write a run's journal.

    Attributes:
        journal: journal of the run, open for appending.
        earlier: contents of the journal before this process; None for a new run.
    """

    journal: Journal | MemoryJournal
    earlier: JournalContents | None = None
    _lock: TrainerLock | None = None

    def release(self) -> None:
        """Close the journal and let others resume the run; harmless when repeated."""
        self.journal.close()
        if self._lock is not None:
            self._lock.release()


def lease_new_run(run_dir: str | Path | Literal["auto"] | None, name: str | None) -> RunLease:
    """Create a run directory; "auto" makes one below `runs`, named after the run and the time.

    If it cannot be written, a warning is logged and no journal is kept.

    Raises:
        FileExistsError: the directory holds a journal already.
        OSError: the path cannot be a directory.
    """
    if run_dir is None:
        return RunLease(MemoryJournal())
    try:
        if isinstance(run_dir, str) and run_dir == "auto":
            journal, lock = _new_journal(name), None
        else:
            journal, lock = _named_journal(_directory(run_dir))
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError) or error.errno in INVALID_PATH_ERRORS:
            raise
        message = (
            "esper-telemetry: %s: training continues without journal, and sinks that need a run directory receive nothing;"
            " pass a run directory that can be written"
        )
        _logger.warning(message, error)
        return RunLease(MemoryJournal())
    return RunLease(journal, None, lock or _locked(journal.run_dir, str(run_dir)))


def lease_existing_run(run_dir: str | Path) -> RunLease:
    """Open a run directory to continue its run, after the helpers of a killed trainer have ended.

    Raises:
        FileNotFoundError: the directory does not contain a journal.
        ValueError: the journal does not say which run it is.
        BlockingIOError: the run is still being trained, or delivered.
    """
    run_dir = _directory(run_dir)
    contents = read_contents(run_dir, known=known_contents(run_dir), values=False)
    directory = run_dir.absolute()
    lock = _locked(directory, str(run_dir))
    try:
        for helper in HELPER_ROLES:
            if not await_release(directory, helper, MAX_HELPER_SECONDS):
                raise BlockingIOError(f"a process of {run_dir} still delivers records from before the run stopped: try again later")
        contents = read_contents(run_dir, known=contents, values=False)
        journal = Journal.open(run_dir)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    journal.records = contents.records
    return RunLease(journal, contents, lock)


def _directory(run_dir: str | Path) -> Path:
    """Return the path, `~` expanded; raises TypeError or ValueError if it is not a path, NotADirectoryError for a file."""
    if not isinstance(run_dir, str | os.PathLike):
        raise TypeError(f"run_dir must be a path, 'auto' or None, got {shown(run_dir)}")
    if not os.fspath(run_dir).strip():
        raise ValueError(f"run_dir must name a directory, got {shown(run_dir)}: pass 'auto' for a new one, None for none")
    path = require_path("run_dir", run_dir)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"run_dir {str(run_dir)!r} is a file: pass the path of a directory")
    return path


def _locked(directory: Path, name: str) -> TrainerLock | None:
    """Return the lock of the run; None, with a warning, if the system refuses it. Raises BlockingIOError if another process has it."""
    try:
        return TrainerLock(directory)
    except BlockingIOError:
        raise BlockingIOError(f"{name} is still being trained: only one process at a time can continue a run") from None
    except OSError as error:
        message = "esper-telemetry: cannot lock run directory %s (%s); training continues; do not resume this run in another process"
        _logger.warning(message, directory, error.strerror)
        return None


def _named_journal(run_dir: Path) -> tuple[Journal, TrainerLock | None]:
    """Create a journal, or lock and reuse the empty journal of a killed trainer."""
    if not is_abandoned(run_dir):
        return Journal.create(run_dir), None
    try:
        lock = TrainerLock(run_dir)
    except BlockingIOError:
        raise FileExistsError(f"{run_dir} {HOLDS_RUN}") from None
    try:
        return Journal.begin_again(run_dir), lock
    except BaseException:
        lock.release()
        raise


def _new_journal(name: str | None) -> Journal:
    shown = masked(name or Path(sys.argv[0]).stem or "run").replace(HIDDEN, "hidden")
    label = NOT_IN_FILE_NAMES.sub("-", shown)[:MAX_LABEL_CHARACTERS].strip("-.") or "run"
    stem = f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with suppress(FileExistsError):
            return Journal.create(Path("runs") / f"{stem}{suffix}")
    raise FileExistsError(f"a hundred runs named runs/{stem} have begun in this second: pass a run directory")
