"""Which keys a sink with a browser behind it shows: thousands of charts make a dashboard unusable."""

from __future__ import annotations

from collections.abc import Iterable

from esper_telemetry.core.record import Level, MetricInfo, Record, RunInfo, template_of
from esper_telemetry.sinks.layout import family_name, importance
from esper_telemetry.sinks.protocol import logger

LAYER_LABEL = "{layer}"
HISTORY_LABEL = "{key}/"
AT_DEBUG = {Level.DEBUG.name.lower(), str(Level.DEBUG.value)}
KEPT_FREE = 5
"""At most one key in this many is kept free for those that must be shown when they come."""


class KeyBudget:
    """Admits keys up to a limit, most important families first, and remembers which; the rest stay in the journal.

    Numbers of single layers and histories of other keys are details that only runs at DEBUG show, unless they are asked for. Keys that are
    measured even at the minimal level keep their room when they first appear late, as the returns do.
    """

    def __init__(self, run: RunInfo, sink: str, *, max_keys: int, details: bool, quiet: bool = False) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be positive, got {max_keys}")
        self.run = run
        self.sink = sink
        self.quiet = quiet
        self.max_keys = max_keys
        self.details = details or str(run.facts.get("level")).lower() in AT_DEBUG
        self.admitted: set[str] = set()
        self.refused: set[str] = set()
        self.expected = {key for key, info in run.metrics.items() if info.level == "minimal" and "{" not in key}

    def select(self, record: Record) -> Record:
        """The record with the admitted keys only."""
        self._judge(record)
        values = {key: value for key, value in record.values.items() if key in self.admitted}
        histograms = {key: value for key, value in record.histograms.items() if key in self.admitted}
        return Record(record.seq, record.axes, values, histograms, record.partial)

    def _judge(self, record: Record) -> None:
        """Decides, once, about every key of the record that is new."""
        new = ({*record.values, *record.histograms} - self.admitted) - self.refused
        if not new:
            return
        refused = [key for key in sorted(new, key=self._rank) if not self._admit(key)]
        self._warn(refused)
        self.refused.update(refused, self._details(new))

    def _admit(self, key: str) -> bool:
        """True when the key is within the budget, or not a matter of it."""
        if self._is_detail(key):
            return True
        kept_free = 0 if key in self.expected else min(len(self.expected - self.admitted), self.max_keys // KEPT_FREE)
        if len(self.admitted) + kept_free >= self.max_keys:
            return False
        self.admitted.add(key)
        return True

    def _rank(self, key: str) -> tuple[bool, bool, int, str]:
        """What is measured at every level first, the histories of other keys last."""
        info: MetricInfo | None = self.run.describe(key)
        history = template_of(key, self.run.metrics).startswith(HISTORY_LABEL)
        return (info is not None and info.level != "minimal", history, importance(key), key)

    def _details(self, keys: Iterable[str]) -> set[str]:
        return {key for key in keys if self._is_detail(key)}

    def _is_detail(self, key: str) -> bool:
        """True for a key of one layer of the network, or the history of another key, where those are not wanted."""
        if self.details:
            return False
        template = template_of(key, self.run.metrics)
        return "/layer/" in key or LAYER_LABEL in template or template.startswith(HISTORY_LABEL)

    def _warn(self, refused: list[str]) -> None:
        """Says once per run that keys are left out, and which."""
        if refused and not self.quiet and not self.refused - self._details(self.refused):
            families = ", ".join(sorted({family_name(key) for key in refused}))
            message = "%s shows %d keys and leaves %d others (of %s) to the journal; max_keys= raises that limit"
            logger.warning(message, self.sink, len(self.admitted), len(refused), families)
