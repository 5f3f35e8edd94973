"""What one delivery has read and its sink has still to take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from esper_telemetry.record import Alarm, Record


class Batch:
    """Records and alarms in the order of the journal, and how many records go at once: fewer after a refusal, to find what is refused.

    Attributes:
        taken: records that left it since `clear_taken`.
    """

    def __init__(self) -> None:
        self.taken: list[Record] = []
        self._entries: list[Record | Alarm] = []
        self._most: int | None = None

    def __bool__(self) -> bool:
        return bool(self._entries)

    def append(self, entry: Record | Alarm) -> None:
        """Adds what was read."""
        self._entries.append(entry)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self.taken.clear()
        self._most = None

    def clear_taken(self) -> None:
        """Forgets what has left; called when all of it is noted."""
        self.taken.clear()
        self._most = None

    def alarm(self) -> Alarm | None:
        """The alarm that is next, if one is."""
        first = self._entries[0]
        return first if isinstance(first, Alarm) else None

    def records(self, most: int | None = None) -> Sequence[Record]:
        """The records that go next: up to the next alarm, and at most so many."""
        limit = min(self._most or len(self._entries), most or len(self._entries))
        ready: list[Record] = []
        for entry in self._entries[:limit]:
            if isinstance(entry, Alarm):
                break
            ready.append(entry)
        return tuple(ready)

    def after(self, record: Record, most: int) -> Sequence[Record]:
        """The first so many records behind that one, as far as they are here."""
        later = (entry for entry in self._entries if isinstance(entry, Record) and entry.seq > record.seq)
        return tuple(islice(later, most))

    def halve(self, size: int) -> None:
        """Lets at most half of that many records go at once."""
        self._most = max(1, size // 2)

    def drop_alarm(self) -> None:
        """The next alarm was delivered."""
        del self._entries[0]

    def take(self, records: Sequence[Record]) -> None:
        """These records were delivered."""
        self.remove(records)
        self.taken.extend(records)

    def remove(self, records: Sequence[Record]) -> None:
        """These records leave, delivered or not."""
        gone = {record.seq for record in records}
        self._entries = [entry for entry in self._entries if isinstance(entry, Alarm) or entry.seq not in gone]
