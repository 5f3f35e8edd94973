"""The exception that ends a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from esper_telemetry.detectors.rule import Finding, Rule, View
from esper_telemetry.detectors.rules.numerics import KEY as NONFINITE
from esper_telemetry.record import RUN_FAILED, Axes, RunStatus

ALARM_KEY = f"alarm/{RUN_FAILED}"
MESSAGE_CHARACTERS = 240
"""Of the exception's message; the journal's event has a thousand."""
NAMED_ENVIRONMENTS = 8


def failure_findings(data: Mapping[str, Any], update: int) -> dict[str, Finding]:
    """The findings of a failure event by type of alarm, causes first."""
    sentence = failure_sentence(data, update)
    findings = {RUN_FAILED: Finding(1.0, ALARM_KEY, text=lambda: sentence)}
    tensor = first_tensor(data)
    if tensor:
        count = float(data.get("nonfinite", {}).get("count", 1))
        nonfinite = Finding(1.0, NONFINITE, count, 0.0, text=lambda: f"the first tensor that is not finite: {tensor}")
        findings = {NONFINITE: nonfinite, **findings}
    return findings


class Failure(NamedTuple):
    """A `failure` event of a journal."""

    seq: int
    axes: Axes
    data: Mapping[str, Any]


def bad_ending(status: RunStatus | None, last_update: int, failures: Sequence[Failure]) -> str:
    """The sentence on a run that failed or was killed; empty for one that ended otherwise, or goes on."""
    if status is RunStatus.KILLED:
        return (
            f"The run was killed after update {last_update:,}: its process ended without an exception (out of memory, a signal, "
            "a lost machine); the log of the job or of the system says why."
        )
    if status is not RunStatus.FAILED:
        return ""
    if not failures:
        return f"The run ended as failed after update {last_update:,}, and its journal names no exception: the log of the job says why."
    return f"{failure_sentence(failures[-1].data, failures[-1].axes.update + 1)}."


def failure_sentence(data: Mapping[str, Any], update: int) -> str:
    """The update, the exception and the first non-finite tensor of a failure event, in a sentence without its full stop."""
    message = next(iter(str(data.get("message", "")).strip().splitlines()), "").strip()
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}..."
    exception = ": ".join(part for part in (str(data.get("exception", "")), message) if part)
    tensor = first_tensor(data)
    named = f"; the first tensor that is not finite: {tensor}" if tensor else ""
    return f"The run failed at update {update:,}: {exception.rstrip('.')}{named}"


def first_tensor(data: Mapping[str, Any]) -> str:
    """The first non-finite tensor of a failure event: `observations (3 of 32 values, environments 2)`; empty where all are finite."""
    found = data.get("nonfinite")
    if not found:
        return str(data.get("first_nonfinite") or "")
    environments = list(map(str, found.get("environments", ())))
    more = ", ..." if len(environments) > NAMED_ENVIRONMENTS else ""
    where = f", environments {', '.join(environments[:NAMED_ENVIRONMENTS])}{more}" if environments else ""
    return f"{found['tensor']} ({found['count']:,} of {found['size']:,} values{where})"


def goes_on(view: View) -> Iterator[Finding]:
    """A record follows: a run that had failed was resumed."""
    yield Finding(0.0, ALARM_KEY)


RULES = (
    Rule(
        type=RUN_FAILED,
        judge=goes_on,
        inputs=(),
        n_off=1,
        certain=True,
        source="always an error: raised by the failure event, over with the next whole record",
    ),
)
