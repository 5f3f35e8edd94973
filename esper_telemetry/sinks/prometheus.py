"""Prometheus: the latest values, in a file for the node exporter or on a local port, without history."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from esper_telemetry.core.record import Alarm, AlarmEvent, Record, RunInfo, RunStatus
from esper_telemetry.sinks.layout import KeyBudget
from esper_telemetry.sinks.sink_protocol import Place, check_options, require_package, require_run_dir

LOOPBACK: Final = "127.0.0.1"
FORBIDDEN: Final = re.compile("[^a-zA-Z0-9_]")
MAX_PORT: Final = 65535
TEXTFILE: Final = "metrics.prom"
ADDRESS: Final = re.compile(r"-?\d+|[\w.-]*:\d+/?|\w+://.*")
"""A port or a server, which must not be mistaken for the name of a file."""
JOIN_SECONDS: Final = 5.0


@dataclass
class PrometheusSink:
    """Shows the latest record as gauges `esper_policy_kl{run="..."}` and alarms as counters.

    Attributes:
        path: a text file, replaced as a whole with every batch; `RUN_DIR/metrics.prom` if neither is given.
        port: serve `http://127.0.0.1:PORT/metrics` instead while the run is open.
        max_keys: maximum number of keys.
        details: also show the numbers of single layers and the histories of other keys.
    """

    path: str | Path | None = None
    port: int | None = None
    max_keys: int = 300
    details: bool = False
    _open: _Exposition | None = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_package("prometheus_client", "PrometheusSink")
        if self.port is not None and not 0 < self.port <= MAX_PORT:
            raise ValueError(f"port must be from 1 to {MAX_PORT}, got {self.port}")
        if self.port is not None and self.path is not None:
            raise ValueError(f"PrometheusSink takes a file or a port, got {str(self.path)!r} and {self.port}")
        if self.path is not None and (ADDRESS.fullmatch(str(self.path)) or Path(self.path).is_dir()):
            raise ValueError(f"PrometheusSink takes a file, or a port of this machine such as prometheus:9090, got {str(self.path)!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> PrometheusSink:
        """Return the sink of `prometheus[:FILE|:PORT]`."""
        check_options("prometheus", options)
        return cls(port=int(rest)) if rest.isdecimal() else cls(rest or None)

    @property
    def name(self) -> str:
        """`prometheus`, and the port or the file if one was given."""
        target = self.port or self.path
        return f"prometheus:{target}" if target else "prometheus"

    def place(self, run: RunInfo) -> Place:
        """Return the address, or the file."""
        if self.port is None:
            return Place(str(self._file(run)), "")
        url = f"http://{LOOPBACK}:{self.port}/metrics"
        return Place(url, f"curl {url}")

    def import_client(self) -> None:
        """Import the client of Prometheus."""
        import prometheus_client.core  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Begin to serve, or make the file's folder; raises OSError if the port is taken."""
        self._end()
        budget = KeyBudget(run, "Prometheus", max_keys=self.max_keys, details=self.details)
        self._open = _Exposition(run, budget, self._file(run) if self.port is None else None, self.port)

    def write(self, records: Sequence[Record]) -> None:
        """Show the last of the records."""
        if self._open is None:
            raise ValueError("PrometheusSink.write needs open first")
        for record in records:
            self._open.last = self._open.budget.select(record)
        self._open.publish()

    def alarm(self, alarm: Alarm) -> None:
        """Count the alarm by its type, and show which alarms are raised."""
        if self._open is not None:
            self._open.count(alarm)
            self._open.publish()

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Count the alarms of earlier parts of the run."""
        if self._open is not None:
            for alarm in alarms:
                self._open.count(alarm)

    def close(self, status: RunStatus) -> None:
        """Write how the run ended into the file, and stop serving."""
        if self._open is not None:
            self._open.status = str(status)
            self._open.publish()
        self._end()

    def _end(self) -> None:
        if self._open is not None:
            self._open.stop()
            self._open = None

    def _file(self, run: RunInfo) -> Path:
        return Path(self.path) if self.path else require_run_dir(run, "PrometheusSink", "path= or port=") / TEXTFILE


class _Exposition:
    """The values of an open run, as a collector for a registry of Prometheus."""

    def __init__(self, run: RunInfo, budget: KeyBudget, file: Path | None, port: int | None) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.status = "running"
        self.last: Record | None = None
        self.budget = budget
        self._run, self._file = run, file
        self._names: dict[str, str] = {}
        self._raised: Counter[str] = Counter()
        self._active: set[str] = set()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._server: Any = None
        if port is not None:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=self._registry)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def count(self, alarm: Alarm) -> None:
        """Count an alarm, and remember whether its type is raised."""
        self._raised[alarm.type] += alarm.event is AlarmEvent.RAISE
        if alarm.event is AlarmEvent.CLEAR:
            self._active.discard(alarm.type)
        else:
            self._active.add(alarm.type)

    def publish(self) -> None:
        """Replace the file, if there is one."""
        from prometheus_client import write_to_textfile

        if self._file is not None:
            write_to_textfile(str(self._file), self._registry)

    def stop(self) -> None:
        """Stop the server, if there is one."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(JOIN_SECONDS)

    def describe(self) -> Iterator[Any]:
        """Return nothing: the registry asks at registration, before values exist."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Yield all values; called by the registry, from any thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = {"status": self.status, "run_id": self._run.run_id}
        yield self._gauge("esper_run_status", "Status of the run.", 1.0, status)
        last = self.last
        if last is not None:
            axes = last.axes
            yield self._gauge("esper_last_update_timestamp_seconds", "When the latest record was made.", axes.wall_time)
            steps = {name: getattr(axes, name) for name in ("update", "env_step", "gradient_step")}
            for key, value in {**{f"axis/{name}": step for name, step in steps.items()}, **last.values}.items():
                info = self._run.describe(key)
                yield self._gauge(self._name(key), info.question if info else key, value)
        raised = CounterMetricFamily("esper_alarms", "How often an alarm was raised.", labels=["run", "type"])
        active = GaugeMetricFamily("esper_alarm_active", "Whether an alarm is raised.", labels=["run", "type"])
        for kind, count in list(self._raised.items()):
            raised.add_metric([self._run.name, kind], count)
            active.add_metric([self._run.name, kind], float(kind in self._active))
        yield from (raised, active)

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        named = {"run": self._run.name, **(labels or {})}
        family = GaugeMetricFamily(name, text, labels=list(named))
        family.add_metric(list(named.values()), value)
        return family

    def _name(self, key: str) -> str:
        """Return `esper_policy_kl` for `policy/kl`; numbered if two keys would have the same name."""
        if key not in self._names:
            name = plain = f"esper_{FORBIDDEN.sub('_', key)}"
            number = 1
            while name in self._names.values():
                number += 1
                name = f"{plain}_{number}"
            self._names[key] = name
        return self._names[key]
