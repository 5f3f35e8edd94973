"""Files of a run in MLflow: its settings, what it is, what went wrong in it, and on request its checkpoints.

Names that MLflow accepts: a single bad one would have a whole batch refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from posixpath import normpath
from typing import Any, Final

from esper_telemetry.core.record import RunInfo
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.incidents import IncidentCards
from esper_telemetry.sinks.protocol import logger
from esper_telemetry.sinks.readme import run_readme

CONFIG: Final = "config.json"
CHECKPOINTS: Final = "checkpoints"
"""Folders of that name, in the run directory and among the artifacts."""
PAGE: Final = "run.md"
INCIDENTS: Final = "incidents"
"""The name, without its ending, of the artifacts that say what went wrong."""


class Artifacts:
    """Stores files of one run. A store that refuses them, as many do, costs one warning and no number."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._accepted = True

    def incidents(self, incidents: IncidentCards) -> None:
        """Stores what went wrong, for people and for programs."""
        self._try(INCIDENTS, lambda: self._client.log_text(self._run_id, incidents.page(), f"{INCIDENTS}.md"))
        self._try(INCIDENTS, lambda: self._client.log_text(self._run_id, incidents.to_json(), f"{INCIDENTS}.json"))

    def description(self, run: RunInfo) -> None:
        """Stores what the run is, and its settings as they stand in the run directory, where secrets are stars."""
        self._try(PAGE, lambda: self._client.log_text(self._run_id, run_readme(run) + "\n", PAGE))
        if run.run_dir is not None and (path := Path(run.run_dir) / CONFIG).is_file():
            self._try(CONFIG, lambda: self._client.log_artifact(self._run_id, str(path)))

    def checkpoints(self, run: RunInfo) -> None:
        """Stores what lies in the run directory's folder of checkpoints; says so where there is none."""
        folder = None if run.run_dir is None else Path(run.run_dir) / CHECKPOINTS
        files = [] if folder is None else sorted(path for path in folder.glob("*") if path.is_file())
        if not files:
            logger.warning("MLflow gets no checkpoints of run %s: there are none in %s", run.name, folder)
        for path in files:
            self._try(path.name, partial(self._client.log_artifact, self._run_id, str(path), CHECKPOINTS))

    def _try(self, name: str, store: Callable[[], object]) -> None:
        if not self._accepted:
            return
        try:
            store()
        except Exception as error:  # what a store of artifacts raises depends on where it is: boto3, requests, OSError
            self._accepted = False
            logger.warning("MLflow does not store %s (%s); the run directory has it", name, masked(str(error)))


MAX_LENGTH = 250
FORBIDDEN = re.compile(r"[^\w\-. :/]")


class LegalNames:
    """Gives every name a legal one, the same each time and never the same for two; remembers those that changed."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> str:
        """The legal name."""
        if name not in self.given:
            self.given[name] = self._unused(legal(name))
            self.taken.add(self.given[name])
        return self.given[name]

    @property
    def changed(self) -> dict[str, str]:
        """The original of every legal name that is not the original itself."""
        return {legal_name: name for name, legal_name in self.given.items() if legal_name != name}

    def _unused(self, candidate: str) -> str:
        number, name = 1, candidate
        while name in self.taken:
            number += 1
            suffix = f"_{number}"
            name = candidate[: MAX_LENGTH - len(suffix)] + suffix
        return name


def legal(name: str) -> str:
    """The name itself where MLflow accepts it, else the nearest that it does."""
    allowed = FORBIDDEN.sub("_", name)[:MAX_LENGTH]
    # MLflow takes names for paths: no empty segment, no `.` or `..`, nothing before the first `/`.
    return allowed if allowed and normpath(allowed) == allowed and allowed[0] not in "/." else _flat(allowed)


def _flat(name: str) -> str:
    return "_".join(part for part in re.split(r"[/.]+", name) if part) or "_"
