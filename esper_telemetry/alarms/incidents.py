"""Which alarms belong together, and which of them is the cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from esper_telemetry.alarms.kinds import ALARMS

TOGETHER = 3
"""Updates within which alarms form one incident."""

CAUSES = (
    "numerics/nonfinite",
    "integrity/mask_violation",
    "integrity/buffer_age",
    "integrity/gae_identity",
    "lstm/reset_missing",
    "integrity/ratio_init",
    "integrity/rows_repeated",
    "integrity/adv_norm",
    "grad/missing_group",
    "policy/dead_head",
    "opt/stalled_weights",
    "opt/state_lost",
    "obs/constant",
    "reward/constant",
    "value/scale_shift",
    "norm/drift",
    "adv/degenerate",
    "opt/update_too_large",
    "grad/vanish",
    "repr/dormant",
    "lstm/forget_closed",
    "lstm/forget_open",
    "lstm/cell_drift",
    "policy/kl_stall",
    "grad/actor_starved",
    "policy/wrong_direction",
    "value/loss_jump",
    "grad/explode",
    "policy/kl_spike",
    "lstm/stale_state",
)
"""Types that explain others, the surest first; those that are not named follow in the order of `alarms`, those of `LAST` last."""

LAST = ("task/", "run/", "telemetry/")

CLAIMS = frozenset(
    {
        "integrity/mask_violation",
        "integrity/gae_identity",
        "integrity/rows_repeated",
        "integrity/adv_norm",
        "lstm/reset_missing",
        "grad/missing_group",
        "opt/stalled_weights",
        "obs/constant",
    }
)
"""Types that are a mistake in themselves and no consequence: they are the cause even where they show an update or two later.

Not so `integrity/ratio_init`: logits that have exploded are rounded by more than the bounds allow.
"""


def order(kind: str) -> int:
    """Where a type stands among causes; small is early."""
    return _ORDER.get(kind, len(_ORDER))


def _ordered() -> dict[str, int]:
    rest = [alarm.type for alarm in ALARMS if alarm.type not in CAUSES]
    rest.sort(key=lambda kind: kind.startswith(LAST))
    return {kind: place for place, kind in enumerate((*CAUSES, *rest))}


_ORDER = _ordered()


@dataclass(slots=True)
class Incident:
    """Alarms that came together.

    Attributes:
        number: from 1.
        first: update of its first alarm.
        last: update of its latest alarm that was raised.
        raised: types with the updates in which they were raised.
        claims: those of them that are a mistake in themselves, as they were raised here.
    """

    number: int
    first: int
    last: int
    raised: dict[str, int] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)

    @property
    def cause(self) -> str:
        """The type that it is put down to: what is a mistake for certain, else what came first, causes before effects.

        The task, the end of the run and telemetry itself are never the cause of anything but themselves.
        """
        return min(self.raised, key=self._rank)

    def _rank(self, kind: str) -> tuple[bool, bool, int, int]:
        return kind.startswith(LAST), kind not in self.claims, self.raised[kind], order(kind)


class Incidents:
    """Numbers incidents as alarms are raised."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Incident | None = None

    def raised(self, kinds: Sequence[str], update: int, claims: Iterable[str] = ()) -> Incident:
        """The incident that alarms raised in this update belong to: the open one, or a new one.

        Args:
            kinds: their types.
            update: in which they were raised.
            claims: those of them that are a mistake in themselves for once, besides the types that always are.
        """
        if self._open is None or update - self._open.last > TOGETHER:
            self._count += 1
            self._open = Incident(self._count, update, update)
        self._open.last = update
        for kind in kinds:
            self._open.raised.setdefault(kind, update)
        self._open.claims |= CLAIMS.intersection(kinds) | set(claims)
        return self._open
