"""Names that MLflow accepts: a single bad one would have a whole batch refused."""

from __future__ import annotations

import re
from posixpath import normpath

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
