"""Incidents: groups of alarms that come together, and the cause of each group.

The cause is a certain mistake (a claim), otherwise the first alarm, causes before effects. A finding can also be a claim
(`Finding.claim`): an entropy bonus with the wrong sign is always a mistake, a loss of entropy may be a consequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, AlarmRule

INCIDENT_UPDATES: Final = 3  # updates within which alarms form one incident


RETURN_UPDATES: Final = 50
"""Updates after the last alarm of an incident within which a recurring mistake belongs to it even if no other alarm is on."""


NO_EFFECTS: Final = ("telemetry/", "run/")
"""Prefixes of types that are never effects of other alarms."""


class CausalOrder:
    """The place of each type of alarm among causes: by rank, then in order of declaration.

    Attributes:
        claims: types that are always a mistake and never a consequence of another alarm.
        last: types that are never the cause of another alarm.
    """

    def __init__(self, rules: Iterable[AlarmRule]) -> None:
        ordered = sorted(rules, key=lambda rule: rule.rank)
        self._places = {rule.type: place for place, rule in enumerate(ordered)}
        self.claims = frozenset(rule.type for rule in ordered if rule.claim)
        self.last = frozenset(rule.type for rule in ordered if rule.rank >= CAUSE_LAST_RANK)

    def place(self, kind: str) -> int:
        """Return the place of a type, small for causes; unknown types come last."""
        return self._places.get(kind, len(self._places))


@dataclass(slots=True)
class Incident:
    """Alarms that came together.

    Attributes:
        number: number of the incident, from 1.
        order: order of causes.
        last: update in which its latest alarm was raised.
        raised: types with the updates in which they were raised.
        claims: raised types that are certain mistakes.
    """

    number: int
    order: CausalOrder
    last: int
    raised: dict[str, int] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)

    @property
    def cause(self) -> str:
        """The type that explains the others: a certain mistake, otherwise the first alarm, causes before effects.

        Mistakes within `INCIDENT_UPDATES` of the first one are ordered only by place, because rules differ in patience. Alarms about the
        task, the end of the run and telemetry never explain other alarms.
        """
        order, raised = self.order, self.raised
        first = min((raised[kind] for kind in self.claims), default=0)
        together = {kind for kind in self.claims if raised[kind] - first <= INCIDENT_UPDATES}
        return min(
            raised,
            key=lambda kind: (kind in order.last, kind not in self.claims, first if kind in together else raised[kind], order.place(kind)),
        )

    def expects(self, kind: str, lasting: Collection[str], is_claim: bool) -> bool:
        """Return whether an alarm that is raised late belongs to this incident: a recurring alarm, or an effect of its cause.

        `lasting` has the types of this incident that are still active; `is_claim` is True for a certain mistake.
        """
        if kind in self.raised:
            return kind in self.claims or bool(lasting)
        is_effect = not is_claim and not kind.startswith(NO_EFFECTS)
        return is_effect and self.cause in lasting and self.order.place(kind) > self.order.place(self.cause)


class Incidents:
    """Assigns alarms to numbered incidents.

    Attributes:
        open: the latest incident, which further alarms may join.
    """

    def __init__(self, order: CausalOrder) -> None:
        self._order = order
        self.open: Incident | None = None

    def raised(
        self, kinds: Sequence[str], update: int, claims: Iterable[str] = (), *, began: int | None = None, lasting: Collection[str] = ()
    ) -> Incident:
        """Return the incident of the alarms raised in this update: the open one, or a new one.

        Args:
            kinds: types of the alarms.
            update: update in which they were raised.
            claims: types whose findings are certain mistakes, in addition to types that always are.
            began: update since which the earliest of them has held, which may be long before a patient rule raises it.
            lasting: types of the open incident that are still active.
        """
        claimed = self._order.claims.intersection(kinds).union(claims)
        recent = self.open is not None and (lasting or update - self.open.last <= RETURN_UPDATES)
        again = self.open is not None and recent and all(self.open.expects(k, lasting, k in claimed) for k in kinds)
        late = self.open is None or (update if began is None else began) - self.open.last > INCIDENT_UPDATES
        if self.open is None or (late and not again):
            self.open = Incident(1 if self.open is None else self.open.number + 1, self._order, update)
        self.open.last = update
        for kind in kinds:
            self.open.raised.setdefault(kind, update)
        self.open.claims |= claimed
        return self.open
