"""What is known of a way to break training on purpose: plain data and one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from esper_telemetry.ppo.trainer import PPO

Undo: TypeAlias = Callable[[], None]
Break: TypeAlias = Callable[[PPO, float], Undo]
Need: TypeAlias = Callable[[PPO], str | None]

WINDOW = 20
"""Updates after the first broken one in which an alarm still counts."""


class NotApplicableError(ValueError):
    """A fault needs what this trainer does not have; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break training.

    Attributes:
        name: what people call it, `lr_x100`.
        what: what it does, in one sentence.
        apply: breaks a trainer by a dose and returns the function that mends it.
        accepts: types of alarms that name it rightly.
        bound: updates after the first broken one by which the first of them is due; 0: in that update.
        family: name under which doses of one kind of fault are found, `lr`; its own name where there is one of the kind.
        dose: how much, by default.
        doses: the least and the most that make sense; the same twice where there is nothing to choose.
        needs: what a trainer must have; each returns the sentence that says what is missing, or None.
        causes: types that an incident may rightly be put down to; the accepted ones unless said otherwise.
        noisy: it raises an exception in training, as it would in life.
        core: one of those that metrics were designed with; the others were added to see what these cannot name.
    """

    name: str
    what: str
    apply: Break
    accepts: tuple[str, ...]
    bound: int
    family: str = ""
    dose: float = 1.0
    doses: tuple[float, float] = (1.0, 1.0)
    needs: tuple[Need, ...] = ()
    causes: tuple[str, ...] = ()
    noisy: bool = False
    core: bool = True

    def missing(self, trainer: PPO) -> str | None:
        """Why it does not apply to this trainer, in one sentence; None where it does."""
        lacks = next((text for need in self.needs if (text := need(trainer))), None)
        return None if lacks is None else f"{self.name} does not apply to {trainer.env.name}: {lacks}"

    def checked(self, dose: float | None) -> float:
        """The dose, the default for None; raises ValueError outside of the range that makes sense."""
        dose = self.dose if dose is None else dose
        low, high = self.doses
        if not low <= dose <= high:
            wanted = f"from {low:g} to {high:g}" if low < high else f"{low:g}, the only one"
            raise ValueError(f"the dose of {self.name} must be {wanted}, got {dose:g}")
        return dose

    @property
    def named_by(self) -> tuple[str, ...]:
        """Types that an incident may rightly be put down to."""
        return self.causes or self.accepts
