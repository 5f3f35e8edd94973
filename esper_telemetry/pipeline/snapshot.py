"""The state of a run's histories and alarms in `history.snapshot`, so that a resumed run need not judge all of its records again.

Judging 10,000 records again takes half a minute. The file is written every `SNAPSHOT_RECORDS` records and at the end. If it is missing, or
belongs to other rules, the last records of the journal are judged again instead.

A snapshot is a pickle that is read as data: it can name loaded classes of histories and alarms, but no function. Functions
and rules in the state are replaced by numbers: their positions in a list that writer and reader both make from a new state.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import json
import logging
import pickle
import platform
import re
import sys
import types
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from esper_telemetry.alarms.alarm_bounds import Ramp
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.core.files import draft_of
from esper_telemetry.journal.file import JOURNAL_NAME
from esper_telemetry.journal.read import JournalContents

SNAPSHOT_NAME: Final = "history.snapshot"
SNAPSHOT_RECORDS: Final = 200
"""Records between two snapshots: judging this many again takes less than a second."""
CHECKED_BYTES: Final = 4096
"""Bytes of the journal before the position of a snapshot that must be unchanged."""
STATIC: Final = (*(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, re.Pattern), *(AlarmRule, Ramp))
"""Types of objects that a state refers to and does not contain."""
PLAIN: Final = frozenset([str, int, float, bool, type(None)])
"""Types of objects that are never static or references."""
STATE_MODULES: Final = ("esper_telemetry.alarms.", "esper_telemetry.history.", "esper_telemetry.equations.")
"""Prefixes of modules whose classes a snapshot may name, and whose sources must be unchanged."""
PACKAGE: Final = Path(__file__).parents[1]
DATA_MODULES: Final = (
    *("esper_telemetry.core.rate_schedule", "esper_telemetry.core.record"),
    *("esper_telemetry.journal.lines", "esper_telemetry.journal.read"),
)
OTHER_CLASSES: Final = frozenset(
    [
        *[("collections", name) for name in ("deque", "Counter", "defaultdict", "OrderedDict")],
        *[("builtins", name) for name in ("set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str")],
        *[("numpy", name) for name in ("dtype", "ndarray")],
        *[(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")],
        *[(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")],
    ]
)
"""Names of the functions that make plain containers and arrays."""

_logger = logging.getLogger("esper_telemetry")


class RunState(NamedTuple):
    """State of histories and alarms.

    Attributes:
        values: values by name, which are pickled.
        references: objects that the values refer to and that a resumed run makes itself, by name.
    """

    values: Mapping[str, Any]
    references: Mapping[str, Any]


class SnapshotFile:
    """The snapshot of one run.

    Args:
        run_dir: directory of the run.
        new_state: makes the state of a run without records.
    """

    def __init__(self, run_dir: Path, new_state: Callable[[], RunState]) -> None:
        self._run_dir = run_dir
        self._path = run_dir / SNAPSHOT_NAME
        self._new_state = new_state

    def write(self, contents: JournalContents, state: RunState) -> None:
        """Replace the snapshot; if the disk refuses it, only the time that it would have saved is lost."""
        try:
            checksum = _checksum(self._run_dir, contents.offset)
            head = {"fingerprint": self._fingerprint, "offset": contents.offset, "checksum": checksum}
            with draft_of(self._path) as draft, draft.open("wb") as file:
                file.write(json.dumps(head).encode() + b"\n")
                pickle.dump(replace(contents, info=replace(contents.info, run_dir=None)), file, protocol=5)
                _StatePickler(file, self._static, state.references).dump(dict(state.values))
        except Exception as error:  # pickling runs code of users' alarms
            _logger.debug("no snapshot of the histories: %s", error)

    def read(self, references: Mapping[str, Any]) -> tuple[JournalContents, Mapping[str, Any]] | None:
        """Return the contents of the journal up to the snapshot, and the state's values; None without one that fits journal and rules."""
        try:
            head, contents, file = _opened(self._run_dir)
            with file:
                if head["fingerprint"] != self._fingerprint:
                    raise ValueError("it was written with other versions or other alarms")
                modules = {type(item.judge).__module__ for item in self._static if isinstance(item, AlarmRule)}
                return contents, _StateUnpickler(file, self._static, references, modules).load()
        except Exception as error:  # the file may have been edited
            _logger.debug("the snapshot of the histories cannot be used: %s", error)
            return None

    @functools.cached_property
    def _static(self) -> Sequence[Any]:
        """Functions and rules of a new state, in the order in which a pickler meets them."""
        state = self._new_state()
        pickler = _StatePickler(io.BytesIO(), (), state.references)
        pickler.dump(dict(state.values))
        return pickler.met

    @functools.cached_property
    def _fingerprint(self) -> str:
        """Versions and sources that must be unchanged for a state to be readable, and the types of the run's alarms."""
        modules = {type(item.judge).__module__ for item in self._static if isinstance(item, AlarmRule)}
        files = {Path(path) for name in modules if (path := getattr(sys.modules.get(name), "__file__", None))}
        # Not only loaded modules: more are loaded at the end of a run than at its beginning.
        for room in STATE_MODULES:
            files.update((PACKAGE / room.split(".")[1]).rglob("*.py"))
        checksum = _source_checksum(frozenset(files))
        types = sorted(item.type for item in self._static if isinstance(item, AlarmRule))
        return f"{platform.python_version()} {np.__version__} {zlib.crc32(' '.join(types).encode(), checksum):08x}"


@functools.cache
def _source_checksum(files: frozenset[Path]) -> int:
    checksum = 0
    for path in sorted(files):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def known_contents(run_dir: Path) -> JournalContents | None:
    """Return the contents of a journal up to its snapshot; None without one that fits the journal."""
    try:
        _, contents, file = _opened(run_dir)
        file.close()
        return replace(contents, info=replace(contents.info, run_dir=run_dir.absolute()))
    except Exception as error:
        _logger.debug("the journal's contents are not known from a snapshot: %s", error)
        return None


def _opened(run_dir: Path) -> tuple[Mapping[str, Any], JournalContents, IO[bytes]]:
    """Return the head of a snapshot, the contents of the journal, and the file at its state; raises if one of them does not fit."""
    file = (run_dir / SNAPSHOT_NAME).open("rb")
    try:
        head = json.loads(file.readline(CHECKED_BYTES))
        if head["checksum"] != _checksum(run_dir, head["offset"]):
            raise ValueError("the journal is another one")
        contents = _StateUnpickler(file, (), {}, ()).load()
        if not isinstance(contents, JournalContents) or contents.offset != head["offset"]:
            raise ValueError("the contents are not of this journal")
    except BaseException:
        file.close()
        raise
    return head, contents, file


def _checksum(run_dir: Path, offset: int) -> int:
    """Return the checksum of the journal's last bytes before a position; raises ValueError if it is shorter."""
    with (run_dir / JOURNAL_NAME).open("rb") as journal:
        journal.seek(max(0, offset - CHECKED_BYTES))
        content = journal.read(min(offset, CHECKED_BYTES))
    if len(content) < min(offset, CHECKED_BYTES):
        raise ValueError("the journal is shorter than it was")
    return zlib.crc32(content)


class _StatePickler(pickle.Pickler):
    """Leaves out objects that the reader has itself.

    Args:
        static: functions and rules in the reader's order.
        references: objects by name.

    Attributes:
        met: functions and rules in the order in which they were met.
    """

    def __init__(self, file: IO[bytes], static: Sequence[Any], references: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        self.dispatch_table = {**copyreg.dispatch_table, types.MappingProxyType: lambda view: (dict, (dict(view),))}
        self._places = {id(item): place for place, item in enumerate(static)}
        self._names = {id(item): name for name, item in references.items()}
        self.met: list[Any] = []

    def persistent_id(self, obj: Any) -> int | str | None:
        """Return the name of a reference, the position of a function or rule, or -1 for a function that was made for one update."""
        if type(obj) in PLAIN:
            return None
        if (name := self._names.get(id(obj))) is not None:
            return name
        if not isinstance(obj, STATIC) or str(getattr(obj, "__module__", "")).startswith("numpy"):
            return None
        self.met.append(obj)
        return self._places.get(id(obj), -1)


class _StateUnpickler(pickle.Unpickler):
    """Reads data; raises UnpicklingError for anything else."""

    def __init__(self, file: IO[bytes], static: Sequence[Any], references: Mapping[str, Any], modules: Collection[str]) -> None:
        super().__init__(file)
        self._static, self._references, self._modules = static, references, modules

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that the writer has left out; None for a function that was made for one update."""
        if isinstance(pid, str):
            return self._references[pid]
        return None if pid < 0 else self._static[pid]

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of histories and alarms, or of plain data."""
        if (module, name) in OTHER_CLASSES:
            return super().find_class(module, name)
        if module.startswith(STATE_MODULES) or module in DATA_MODULES:
            found = getattr(importlib.import_module(module), name, None)
        else:
            found = getattr(sys.modules.get(module), name, None) if module in self._modules else None
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"a snapshot cannot contain {module}.{name}")
        return found
