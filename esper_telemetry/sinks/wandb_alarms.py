"""Alarms in a W&B run: alerts for people, a table and a few lines in the summary; none of it is a row, so no step moves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from esper_telemetry.record import Alarm, AlarmEvent, AlarmLevel
from esper_telemetry.redaction import masked
from esper_telemetry.sinks.incidents import COLUMNS, Incidents, alarm_text, cause_of
from esper_telemetry.sinks.protocol import logger

WAIT: Final = timedelta(minutes=5)
"""W&B sends no second alert of one title, which is the alarm's type, within this time."""

LEVELS: Final = {AlarmLevel.CRITICAL: "ERROR", AlarmLevel.WARN: "WARN", AlarmLevel.INFO: "INFO"}


class WandbAlarms:
    """What is said of alarms in a run that is open."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.incidents = Incidents()

    def tell(self, alarm: Alarm) -> None:
        """Alerts where it is raised or has become critical; the summary names what is wrong now, what was first, and why a run failed."""
        known = Incidents([*self.incidents.alarms, alarm])
        critical = alarm.event is AlarmEvent.UPDATE and alarm.level is AlarmLevel.CRITICAL
        if alarm.event is AlarmEvent.RAISE or critical:
            text = f"{alarm_text(alarm)}\n{alarm.key} at update {alarm.axes.update}, step {alarm.axes.env_step}"
            self.run.alert(title=alarm.type, text=text, level=LEVELS[alarm.level], wait_duration=WAIT)
        first = cause_of(known.of(known.alarms[0].incident))
        self.run.summary.update(
            {
                "alarms/raised": len(known.raised),
                "alarms/active": ", ".join(sorted(known.active)),
                "alarms/first": "" if first is None else f"{first.type}: {alarm_text(first)}",
                **({"alarms/failure": known.failure} if known.failure or self.incidents.failure else {}),
            }
        )
        self.incidents.add(alarm)

    def close(self) -> None:
        """Adds the table of all alarms to the summary, if there were any; where no table can be stored, the run ends all the same."""
        if not self.incidents.alarms:
            return
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=self.incidents.rows())
        try:
            self.run.summary.update({"alarms/table": table})
        except (ConnectionResetError, BrokenPipeError):
            raise
        except (
            Exception
        ) as error:  # what storing an artifact raises depends on the server: pydantic, requests, W&B's own
            logger.warning("W&B does not store the table of alarms (%s); the journal has them", one_line_of(error))


def one_line_of(error: Exception) -> str:
    """The first line of an error, with passwords masked."""
    return masked(f"{type(error).__name__}: {error}".splitlines()[0])
