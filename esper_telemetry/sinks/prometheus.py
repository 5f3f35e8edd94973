"""Prometheus: the latest values, in a file for the node exporter or on a port of this machine. It keeps no history."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from esper_telemetry.core.record import Alarm, AlarmEvent, Record, RunInfo, RunStatus
from esper_telemetry.sinks.budget import KeyBudget
from esper_telemetry.sinks.protocol import Place, check_options, require_package, require_run_dir

LOOPBACK = "127.0.0.1"
FORBIDDEN = re.compile("[^a-zA-Z0-9_]")
HIGHEST_PORT = 65535
TEXTFILE = "metrics.prom"
ADDRESS = re.compile(r"-?\d+|[\w.-]*:\d+/?|\w+://.*")
"""What is meant as a port or a server, and would be taken for the name of a file."""


@dataclass(frozen=True)
class PrometheusSink:
    """Shows the latest record as gauges `esper_policy_kl{run="..."}` and alarms as counters.

    Attributes:
        path: a text file, replaced as a whole with every batch; `RUN_DIR/metrics.prom` when neither is given.
        port: serve `http://127.0.0.1:PORT/metrics` instead, as long as the run goes on.
        max_keys: how many keys at most.
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
        if self.port is not None and not 0 < self.port <= HIGHEST_PORT:
            raise ValueError(f"port must be from 1 to {HIGHEST_PORT}, got {self.port}")
        if self.port is not None and self.path is not None:
            raise ValueError(f"PrometheusSink takes a file or a port, got {str(self.path)!r} and {self.port}")
        if self.path is not None and (ADDRESS.fullmatch(str(self.path)) or Path(self.path).is_dir()):
            raise ValueError(
                f"PrometheusSink takes a file, or a port of this machine such as prometheus:9090, got {str(self.path)!r}"
            )

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> PrometheusSink:
        """`prometheus[:FILE|:PORT]`."""
        check_options("prometheus", options)
        return cls(port=int(rest)) if rest.isdecimal() else cls(rest or None)

    @property
    def name(self) -> str:
        """`prometheus`, and the port or the file where one was given."""
        target = self.port or self.path
        return f"prometheus:{target}" if target else "prometheus"

    def place(self, run: RunInfo) -> Place:
        """The address, or the file."""
        if self.port is None:
            return Place(str(self._file(run)), "")
        url = f"http://{LOOPBACK}:{self.port}/metrics"
        return Place(url, f"curl {url}")

    def import_client(self) -> None:
        """Imports the client of Prometheus."""
        import prometheus_client.core  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Begins to serve; raises OSError where the port is taken."""
        self._end()
        budget = KeyBudget(run, "Prometheus", max_keys=self.max_keys, details=self.details)
        file = self._file(run) if self.port is None else None
        object.__setattr__(self, "_open", _Exposition(run, budget, file, self.port))

    def write(self, records: Sequence[Record]) -> None:
        """Shows the last of the records."""
        if self._open is None:
            raise ValueError("PrometheusSink.write needs open first")
        for record in records:
            self._open.show(record)
        self._open.publish()

    def alarm(self, alarm: Alarm) -> None:
        """Counts it by its type, and says which are raised."""
        if self._open is not None:
            self._open.tell(alarm)
            self._open.publish()

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Goes on counting from those of earlier parts of the run."""
        if self._open is not None:
            for alarm in alarms:
                self._open.tell(alarm)

    def close(self, status: RunStatus) -> None:
        """Says how the run ended, in the file, and serves no more."""
        if self._open is not None:
            self._open.status = str(status)
            self._open.publish()
        self._end()

    def _end(self) -> None:
        if self._open is not None:
            self._open.stop()
            object.__setattr__(self, "_open", None)

    def _file(self, run: RunInfo) -> Path:
        return Path(self.path) if self.path else require_run_dir(run, "PrometheusSink", "path= or port=") / TEXTFILE


class _Exposition:
    """What is shown at the moment; a collector for Prometheus' own registry."""

    def __init__(self, run: RunInfo, budget: KeyBudget, file: Path | None, port: int | None) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.status = "running"
        self._run, self._budget, self._file = run, budget, file
        self._last: Record | None = None
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

    def show(self, record: Record) -> None:
        """Takes a record in."""
        self._last = self._budget.select(record)

    def tell(self, alarm: Alarm) -> None:
        """Takes an alarm in."""
        self._raised[alarm.type] += alarm.event is AlarmEvent.RAISE
        if alarm.event is AlarmEvent.CLEAR:
            self._active.discard(alarm.type)
        else:
            self._active.add(alarm.type)

    def publish(self) -> None:
        """Replaces the file, if there is one."""
        from prometheus_client import write_to_textfile

        if self._file is not None:
            write_to_textfile(str(self._file), self._registry)

    def stop(self) -> None:
        """Serves no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5.0)

    def describe(self) -> Iterator[Any]:
        """Nothing: what is shown is known when it is collected."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Everything at this moment; called by the registry, from any thread."""
        yield self._family(
            "esper_run_status", "How the run stands.", 1.0, {"status": self.status, "run_id": self._run.run_id}
        )
        last = self._last
        if last is not None:
            axes = last.axes
            numbers = {
                "axis/update": axes.update,
                "axis/env_step": axes.env_step,
                "axis/gradient_step": axes.gradient_step,
            }
            yield self._family(
                "esper_last_update_timestamp_seconds", "When the latest record was made.", axes.wall_time
            )
            for key, value in {**numbers, **last.values}.items():
                described = self._run.describe(key)
                yield self._family(self._name(key), described.question if described else key, value)
        yield from self._alarms()

    def _alarms(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        raised = CounterMetricFamily("esper_alarms", "How often an alarm was raised.", labels=["run", "type"])
        active = GaugeMetricFamily("esper_alarm_active", "Whether an alarm is raised.", labels=["run", "type"])
        for kind, count in list(self._raised.items()):
            raised.add_metric([self._run.name, kind], count)
            active.add_metric([self._run.name, kind], float(kind in self._active))
        yield from (raised, active)

    def _family(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        named = {"run": self._run.name, **(labels or {})}
        family = GaugeMetricFamily(name, text, labels=list(named))
        family.add_metric(list(named.values()), value)
        return family

    def _name(self, key: str) -> str:
        """`esper_policy_kl` of `policy/kl`; numbered where two keys would have the same."""
        if key not in self._names:
            plain, number = f"esper_{FORBIDDEN.sub('_', key)}", 1
            name = plain
            while name in self._names.values():
                number += 1
                name = f"{plain}_{number}"
            self._names[key] = name
        return self._names[key]
