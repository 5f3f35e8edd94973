"""Messages about a run: critical alarms when they begin, and the outcome at the end, to any service that Apprise knows.

The sink runs in the sink process, so that the training does not wait for a service. A message is tried once, because it is of use only at
its time, and a dead service must not delay the end of a run. Only the scheme of an address is ever shown.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Final

from esper_telemetry.core.messages import capitalized
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import remember
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, logger, require_package

ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.IGNORECASE | re.DOTALL)
SEPARATORS: Final = re.compile(r"[/:@?&=,#]+")
BAD: Final = frozenset({RunStatus.FAILED, RunStatus.KILLED})


@dataclass
class NotifySink:
    """Sends messages to one address of Apprise, such as `slack://TOKEN_A/TOKEN_B/TOKEN_C` or `mailto://USER:PASSWORD@HOST`.

    An incident has at most one message, when its first alarm becomes critical.

    Attributes:
        address: as in Apprise's documentation; it is masked in all texts.
    """

    address: str = field(repr=False)
    _service: Any = field(default=None, init=False, repr=False, compare=False)
    _run: RunInfo | None = field(default=None, init=False, repr=False, compare=False)
    _outcome: str = field(default="", init=False, repr=False, compare=False)
    _warned: bool = field(default=False, init=False, repr=False, compare=False)
    _incidents: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False
    uri: ClassVar[str] = ""
    """An address is a secret, so its spelling must not be stored."""

    def __post_init__(self) -> None:
        require_package("apprise", "notify")
        match = ADDRESS.fullmatch(self.address) if isinstance(self.address, str) else None
        if match is None:
            raise ValueError("notify takes addresses of Apprise such as slack://TOKEN_A/TOKEN_B/TOKEN_C or mailto://USER:PASSWORD@HOST")
        self._scheme = match[1].lower()
        from apprise import NotificationManager

        if self._scheme not in NotificationManager():
            raise ValueError(f"Apprise knows no {self._scheme}:// address: see https://github.com/caronc/apprise/wiki")
        remember([self.address, match[2], *SEPARATORS.split(match[2])])

    @property
    def name(self) -> str:
        """`notify:`, the scheme, and a number that tells addresses of one scheme apart."""
        return f"notify:{self._scheme}-{blake2b(self.address.encode(), digest_size=2).hexdigest()}"

    def prepare_child(self) -> None:
        """Silence Apprise's own log, which repeats what a failure says here."""
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)

    def import_client(self) -> None:
        """Import Apprise."""
        import apprise  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Make the client; raises PermanentSinkError for an address that Apprise does not know."""
        import apprise

        self._service, self._run = apprise.Apprise(), run
        if not self._service.add(self.address):
            raise PermanentSinkError(f"Apprise knows no such {self._scheme}:// address: see https://github.com/caronc/apprise/wiki")

    def write(self, records: Sequence[Record]) -> None:
        """Do nothing: only alarms and the end of a run are messages."""

    def alarm(self, alarm: Alarm) -> None:
        """Send a message about the first critical alarm of an incident."""
        if self._run is None or not self._is_new(alarm):
            return
        self._send(f"{self._run.name}: {alarm.type}", alarm.text, "failure")
        self._incidents.add(alarm.incident)

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Remember the incidents that have had a message."""
        self._incidents.update(alarm.incident for alarm in alarms if self._is_new(alarm))

    def _is_new(self, alarm: Alarm) -> bool:
        begins = alarm.event is not AlarmEvent.CLEAR and alarm.level is AlarmLevel.CRITICAL
        return begins and alarm.incident not in self._incidents

    def outcome(self, event: JournalEvent) -> None:
        """Keep the outcome for the message at the end."""
        self._outcome = str(event.data.get("text", ""))

    def close(self, status: RunStatus) -> None:
        """Send the outcome; harmless when repeated."""
        if self._run is None:
            return
        where = f" esper-telemetry diagnose {shlex.quote(str(self._run.run_dir))}" if self._run.run_dir else ""
        body = f"{capitalized(self._outcome or 'no outcome')}.{where}"
        self._send(f"{self._run.name}: {status}", body, "failure" if status in BAD else "info")
        self._run = None

    def _send(self, title: str, body: str, kind: str) -> None:
        """Send a message; the first one that the service does not take costs a warning."""
        if not self._service.notify(body=body, title=title, notify_type=kind) and not self._warned:
            self._warned = True
            logger.warning("%s:// did not take a message (%s): the run continues, and later messages are tried", self._scheme, title)
