"""MLflow: records as coalesced batches of metrics, through `MlflowClient` only, so that no global state is touched."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final
from urllib.parse import urlencode, urlsplit

from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.suggestion import did_you_mean
from esper_telemetry.sinks.budget import KeyBudget
from esper_telemetry.sinks.mlflow.artifacts import LegalNames
from esper_telemetry.sinks.mlflow.database import SQLITE
from esper_telemetry.sinks.mlflow.run import MlflowRun, joined_run, numbers_of, own_run
from esper_telemetry.sinks.mlflow.stored import stored_run
from esper_telemetry.sinks.protocol import Place, Shown, StoredMetrics, check_options, require_package, require_run_dir

REQUEST_TIMEOUT_SECONDS = 10
REQUEST_RETRIES = 1
STORE_MODULES = (
    "mlflow.store.tracking.rest_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "alembic.command",
    "sqlalchemy.dialects.sqlite",
)
SWITCH = {"true": True, "false": False}

SERVERS: Final = ("http", "https")
DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
"""May be followed by `+driver`, as in `postgresql+psycopg2`."""
SCHEMES: Final = (*SERVERS, *DATABASES, "file", "databricks", "databricks-uc", "uc")
"""Schemes of the tracking URIs that MLflow knows by itself; entry points of the group below add others."""
STORES: Final = "mlflow.tracking_store"
PORT_ONLY: Final = re.compile(r"[\w.-]+:\d+(/.*)?")


@dataclass(frozen=True)
class MLflowSink:
    """Logs the run to MLflow; steps are environment steps.

    `MLflowSink(run_id=...)` writes into a run that is open in this process instead, and leaves it open.

    A server with passwords takes them from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or from the URI,
    `https://user:password@host`, where they are stars wherever it is shown.

    Attributes:
        tracking_uri: server or store; `sqlite:///RUN_DIR/mlflow.db` when not given.
        experiment: the experiment's name; made when it is not there.
        run_id: an open run to join.
        parent: the run beneath which MLflow's pages show this one, such as the one whose checkpoint it began with: the id
            of an MLflow run, or that of a run of ours in the same experiment.
        checkpoints: store the run directory's checkpoints as artifacts when the run ends.
        max_keys: how many keys at most.
        details: also show the numbers of single layers and the histories of other keys.
    """

    tracking_uri: str | None = None
    experiment: str = "esper_telemetry"
    run_id: str | None = None
    parent: str | None = None
    checkpoints: bool = False
    max_keys: int = 300
    details: bool = False
    _open: MlflowRun | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_package("mlflow", "MLflowSink")
        if self.tracking_uri is not None:
            check_tracking_uri(self.tracking_uri)
        if not self.experiment.strip():
            raise ValueError(f"experiment must have a name, got {self.experiment!r}")
        if self.parent is not None and (self.run_id is not None or not self.parent.strip()):
            raise ValueError(f"parent is the id of a run, and for a run of ours only, got {self.parent!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> MLflowSink:
        """`mlflow[:TRACKING_URI][?experiment=NAME&parent=RUN&checkpoints=true]`."""
        check_options("mlflow", options, ["experiment", "parent", "checkpoints"])
        return cls(
            rest or None,
            experiment=options.get("experiment", cls.experiment),
            parent=options.get("parent"),
            checkpoints=_switch("checkpoints", options.get("checkpoints", "false")),
        )

    @property
    def in_process(self) -> bool:
        """True for a joined run, whose settings are those of this process."""
        return self.run_id is not None

    @property
    def name(self) -> str:
        """`mlflow:` and the tracking URI where one was given, or the joined run's id."""
        if self.run_id is not None:
            return f"mlflow:run/{self.run_id}"
        return f"mlflow:{masked(self.tracking_uri)}" if self.tracking_uri else "mlflow"

    @property
    def uri(self) -> str:
        """What `replay --to` takes; nothing for a joined run."""
        if self.run_id is not None:
            return ""
        default = type(self)
        options = {} if self.experiment == default.experiment else {"experiment": self.experiment}
        options |= {} if self.parent is None else {"parent": self.parent}
        options |= {"checkpoints": "true"} if self.checkpoints else {}
        return self.name + (f"?{urlencode(options)}" if options else "")

    def place(self, run: RunInfo) -> Place:
        """The store, and the command that shows it."""
        uri = self._store(run) or "the process's own tracking URI"
        command = (
            "" if "://" not in uri or uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        )
        return Place(masked(uri), command)

    def prepare_child(self) -> None:
        """Lets requests fail soon, where MLflow retries for minutes, and keeps MLflow from reporting its use.

        All of it holds for the whole process, so it is nothing to do in the user's.
        """
        limit_requests()

    def import_client(self) -> None:
        """Imports MLflow's client, and what its stores would import at the first request."""
        import mlflow.tracking  # noqa: F401 - for its effect

        for module in STORE_MODULES:
            with suppress(ModuleNotFoundError):  # other versions have others, and mlflow-skinny has no database
                import_module(module)

    def open(self, run: RunInfo) -> None:
        """Finds the run by its id, or makes it, and marks it as running."""
        budget = KeyBudget(run, "MLflow", max_keys=self.max_keys, details=self.details)
        store = self._store(run)
        if self.run_id is not None:
            opened = joined_run(store, self.run_id, budget, checkpoints=self.checkpoints)
        else:
            opened = own_run(
                store,
                budget,
                experiment=self.experiment,
                artifacts=self._artifacts(run),
                parent=self.parent,
                checkpoints=self.checkpoints,
            )
        object.__setattr__(self, "_open", opened)

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """What the store holds of the run; None for a joined one."""
        if self.run_id is not None:
            return None
        return stored_run(self._store(run), run, self.experiment)

    def shown(self, run: RunInfo) -> Shown:
        """What it should hold of a record."""
        budget = KeyBudget(run, "MLflow", max_keys=self.max_keys, details=self.details, quiet=True)
        names = LegalNames()
        return lambda record: {names[key]: value for key, value in numbers_of(budget.select(record)).items()}

    def write(self, records: Sequence[Record]) -> None:
        """Sends the records in batches; repeated after a failure, MLflow stores what it has already only once."""
        if self._open is None:
            raise ValueError("MLflowSink.write needs open first")
        self._open.write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Sets a tag by its type, and stores the incidents anew where something begins."""
        if self._open is not None:
            self._open.alarm(alarm)

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Knows the alarms of earlier parts of the run, for its incidents."""
        if self._open is not None:
            self._open.incidents.add(*alarms)

    def close(self, status: RunStatus) -> None:
        """Sets the run's status; leaves a joined run open."""
        if self._open is not None:
            self._open.close(status)
            object.__setattr__(self, "_open", None)

    def _store(self, run: RunInfo) -> str | None:
        """The tracking URI; None leaves a joined run where the process looks for it."""
        if self.tracking_uri is not None or self.run_id is not None:
            return self.tracking_uri
        if run.run_dir is None and "MLFLOW_TRACKING_URI" in os.environ:
            return os.environ["MLFLOW_TRACKING_URI"]
        return f"sqlite:///{require_run_dir(run, 'MLflowSink', 'tracking_uri=')}/mlflow.db"

    def _artifacts(self, run: RunInfo) -> Path | None:
        """Where artifacts of our own store go; None leaves it to the server."""
        if self.tracking_uri is not None or run.run_dir is None:
            return None
        return Path(run.run_dir).absolute() / "mlflow-artifacts"


def limit_requests() -> None:
    """Set, for this process, that MLflow's requests fail after seconds instead of minutes and that it does not report its use."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(REQUEST_RETRIES))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def check_tracking_uri(uri: str) -> None:
    """Raise ValueError for an address that no MLflow client can open: an unknown scheme, no host, a wrong port, no database."""
    shown = masked(uri)
    if PORT_ONLY.fullmatch(uri):
        raise ValueError(
            f"a tracking URI of MLflow begins with its scheme, got {shown!r}; did you mean http://{shown}?"
        )
    try:
        parts = urlsplit(uri)
        port = parts.port if parts.scheme in SERVERS else None
    except ValueError as error:  # brackets without an end, or a port that is no number or too large
        raise ValueError(f"the tracking URI {shown!r} of MLflow cannot be read: {error}") from None
    scheme = parts.scheme.partition("+")[0]
    windows_drive = len(scheme) == 1
    known = {*SCHEMES, *(entry.name for entry in entry_points(group=STORES))} if scheme not in SCHEMES else SCHEMES
    if scheme and not windows_drive and scheme not in known:
        near = did_you_mean(scheme, known) or f": it knows {', '.join(SCHEMES)}"
        raise ValueError(f"MLflow knows no tracking URI with the scheme {scheme!r}, got {shown!r}{near}")
    if scheme in SERVERS and (not parts.hostname or port == 0):
        raise ValueError(f"the tracking URI of an MLflow server is like http://HOST:PORT, got {shown!r}")
    if scheme == "sqlite" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(f"the tracking URI of an SQLite database is like {SQLITE}FILE, got {shown!r}")
    if scheme in DATABASES[1:] and not parts.netloc:
        raise ValueError(f"the tracking URI of a database is like {scheme}://USER@HOST/NAME, got {shown!r}")


def _switch(option: str, text: str) -> bool:
    """What an option of a URI says, true or false."""
    if text not in SWITCH:
        raise ValueError(f"option {option} of sink mlflow is true or false, got {text!r}")
    return SWITCH[text]
