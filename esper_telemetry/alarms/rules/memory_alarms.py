"""Memory of recurrent policies: gates, cell state, resets, stored states.

A step adds at most 1 to a cell state. So a state of 60 can be a useful counter in an episode of 500 steps, but is too large in one of 100.
Gates are sampled. Between two samples their state is inferred from the cell state, and only from a sudden, unusual change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log10

from esper_telemetry.alarms.alarm_bounds import SMALLEST_DIVISOR, Ramp, above, below, decade_ramp, hard
from esper_telemetry.alarms.baselines import History
from esper_telemetry.alarms.judges import Before, StateJudge, Z, reading
from esper_telemetry.alarms.rule import Finding, View, alarm
from esper_telemetry.alarms.rules.trust_region_alarms import KL_SPIKE
from esper_telemetry.core.facts import Facts

CELL, LARGEST, GROWTH = "lstm/c/rms", "lstm/c/absmax", "lstm/c_growth"
CLOSED, OPEN, TIMESCALE = "lstm/gate/f/sat_lo", "lstm/gate/f/sat_hi", "lstm/timescale/median"
CELL_HISTORY = History(CELL, scale_min=0.05)  # cell states hardly vary
MAX_WRITTEN = 1.0  # largest cell state without memory: a gate times a tanh
JUMP_UPDATES = 2  # updates for which a jump of the cell state counts: its growth is fully visible in the next rollout
SETTLE_UPDATES = 20  # updates after which the size of states can be compared: at first they are close to 0
SHUT_UPDATES = 4
"""Updates after a fall of the cell state within which the largest cell state is small too, if the gates have closed."""

FORGET_CLOSED = Ramp("forget_closed", 0.5, 0.9, "share of forget gates below 0.1")
FORGET_OPEN = Ramp("forget_open", 0.8, 1.0, "share of forget gates above 0.9")
ADDS_UP_GROWTH = above("adds_up_growth", 1.3, "growth of the cell state over an episode, if nothing is forgotten")
ADDS_UP_JUMP = above("adds_up_jump", 1.5, "size of the cell state relative to the previous update, in addition", lowest=SMALLEST_DIVISOR)
MIN_TIMESCALE = below("timescale", 1.2, "median memory of a unit, steps")


def remembers(facts: Facts) -> bool:
    """True if the policy has an LSTM."""
    return facts.policy in (None, "lstm")


@dataclass(slots=True)
class ForgetClosedJudge:
    """Memory that is lost from one step to the next: the gates show it, or cell states are as small as a single step can write.

    Gates are measured in sampled updates; a measurement counts until the next one.

    Attributes:
        gates, written: severity by the gates, and by the cell states.
        shut: share of closed gates in the last measurement.
        open_at: size of the cell state in the last measurement, if the gates were open.
        sizes: sizes of the cell state in the last updates.
        fell_from: size before the cell state became much smaller; None if it has not.
        fallen_updates: updates since then.
    """

    gates: float = 0.0
    written: float = 0.0
    shut: float | None = None
    open_at: float | None = None
    sizes: list[float] = field(default_factory=list)
    fell_from: float | None = None
    fallen_updates: int = 0

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        shut, timescale, largest = view.get(CLOSED), view.get(TIMESCALE), view.get(LARGEST)
        if shut is not None:
            severity = limits.severity(FORGET_CLOSED, shut)
            self.gates = max(severity, hard(timescale is not None and timescale < limits[MIN_TIMESCALE] and shut > 0.3))
            self.shut = shut
            self.open_at = view.get(CELL) if severity == 0 else None
        usual = view.baselines.median(LARGEST)
        if largest is not None and usual is not None and view.z(LARGEST) is not None:
            small = largest <= MAX_WRITTEN and view.previous.get(LARGEST, largest) <= MAX_WRITTEN
            gone = self.has_fallen(view) and small and usual > 1.5 * MAX_WRITTEN
            gone = gone and (self.written > 0 or self.fallen_updates <= SHUT_UPDATES)  # otherwise its use declined slowly
            dropped = usual > 1.5 * MAX_WRITTEN and drops(view)
            self.written = hard((gone or dropped) and not self.gates_open(view))
        if shut is None and largest is None:
            return
        severity = max(self.gates, self.written)
        if self.gates >= self.written and self.shut is not None:
            words = "{:%} of the forget gates are closed, so the memory fades at once: its median timescale, in steps, is {}"
            bound = limits.middle(FORGET_CLOSED)
            yield Finding(severity, CLOSED, self.shut, bound).says(words, self.shut, timescale or 1.0)
            return
        yield Finding(severity, LARGEST, largest, MAX_WRITTEN).says(
            "cell states are only as large as a single step can make them, {}{}, at most {}{}: the forget gates are closed",
            *(view.get(CELL) or 0.0, partial(view.usual, CELL), largest or 0.0, partial(view.usual, LARGEST)),
        )

    def gates_open(self, view: View) -> bool:
        """True if the gates were open in the last measurement and the cell state has not become much smaller since."""
        size, then = view.get(CELL), self.open_at
        return size is not None and then is not None and size > then / view.limits[ADDS_UP_JUMP]

    def has_fallen(self, view: View) -> bool:
        """True if the cell state became much smaller within two updates and stayed small; False for a slow decline."""
        size, sizes = view.get(CELL), self.sizes
        if size is None:
            return False
        sizes.append(size)
        del sizes[:-3]
        before = max(sizes[:-1], default=size) if self.fell_from is None else self.fell_from
        self.fell_from = before if size < before / view.limits[ADDS_UP_JUMP] else None
        self.fallen_updates = 0 if self.fell_from is None else self.fallen_updates + 1
        return self.fell_from is not None


def drops(view: View) -> bool:
    """True if the cell state is much smaller than before and smaller than ever, and shrinks with its age instead of growing."""
    size, before, growth = view.get(CELL), view.previous.get(CELL), view.get(GROWTH)
    if size is None or before is None or growth is None:
        return False
    large = (view.baselines.median(CELL) or 0.0) > MAX_WRITTEN
    lowest = view.baselines.below.get(CELL, 0.0) > 0
    return large and lowest and size < MAX_WRITTEN and size < before / view.limits[ADDS_UP_JUMP] and growth < 0


@dataclass(slots=True)
class OpenGates:
    """Forget gates that never close; a measurement counts until the next one.

    Attributes:
        gates: severity by the gates.
        open: share of open gates in the last measurement.
        growing: the cell state grows with every step.
        inferred: it has grown since the last measurement of the gates.
        refuted: a measurement has shown that the gates were not the reason; then they are not inferred again.
        jump_updates: updates for which the latest jump still counts.
    """

    gates: float = 0.0
    open: float | None = None
    growing: bool = False
    inferred: bool = False
    refuted: bool = False
    jump_updates: int = 0

    def adds_up(self, view: View, growth: float) -> bool:
        """True if the cell state grows with its age, after a jump that is large for one update and for its history.

        A jump happens only once, so it counts as long as the state grows.
        """
        limits, size, before = view.limits, view.values.get(CELL, 0.0), view.previous.get(CELL, 0.0)
        jumped = (view.get("policy/kl") or 0.0) < limits.low(KL_SPIKE) and (view.get("lstm/reset_rate") or 0.0) > 0
        jumped = jumped and size > max(MAX_WRITTEN, limits[ADDS_UP_JUMP] * before) and before > 0 and not self.refuted
        jumped = jumped and view.baselines.beyond.get(CELL, 0.0) > 0 and (view.z(CELL) or 0.0) > limits.low(Z)
        self.jump_updates = JUMP_UPDATES if jumped else max(0, self.jump_updates - 1)
        self.growing = growth > limits[ADDS_UP_GROWTH] and (self.jump_updates > 0 or self.growing)
        self.inferred = self.growing or self.inferred
        return self.growing


def forget_open(view: View, past: OpenGates) -> Iterator[Finding]:
    """Memory that is never forgotten, by the gates or because cell states have suddenly begun to grow with every step."""
    limits, value, growth = view.limits, view.get(OPEN), view.get(GROWTH)
    if value is None and growth is None:
        return
    if value is not None:
        past.refuted = past.refuted or (past.inferred and value <= limits.low(FORGET_OPEN))
        past.gates, past.open, past.inferred = limits.severity(FORGET_OPEN, value), value, False
        past.growing = past.growing and value > limits.low(FORGET_OPEN)
    grows = value is None and growth is not None and view.z(CELL) is not None and past.adds_up(view, growth)
    severity = max(past.gates, hard(grows))
    if past.open is not None and (past.gates > 0 or not grows):
        words = "{:%} of the forget gates never close: the memory accumulates and forgets nothing"
        yield Finding(severity, OPEN, past.open, limits.middle(FORGET_OPEN)).says(words, past.open)
        return
    yield Finding(severity, GROWTH, growth, limits[ADDS_UP_GROWTH]).says(
        "the cell state has begun to grow with every step, to {}{} in one update: the forget gates no longer close",
        *(view.values.get(CELL, 0.0), partial(view.usual, CELL)),
    )


CELL_ABSMAX = above("cell_absmax", 50.0, "largest cell state, in the middle of a ramp from half to twice this value")
CELL_OF_AGE = above("cell_of_age", 0.5, "the same relative to the longest age, which it cannot exceed, in addition")
CELL_SIZE = above("cell_size", 3.0, "typical cell state above which its history counts: learning enlarges a small memory")
CELL_JUMP = above("cell_jump", 4.0, "typical cell state over its median, in addition", lowest=SMALLEST_DIVISOR)
CELL_GROWTH = Ramp("cell_growth", 4.0, 12.0, "growth of the cell state over an episode")


@reading(CELL)
def cell_drift(view: View, value: float, growing: Before) -> Iterator[Finding]:
    """A cell state that grows: compared with its history, beyond a useful size, or with its age.

    A step adds at most 1. A unit that counts the steps of a long episode is large and useful; a unit that adds nearly 1 in every step is
    not. Growth with age must last for two updates, and `growing` is its severity in the previous one. If all environments reset together,
    that update contains only the youngest and the oldest states, and a cell that fills quickly seems to grow between them.
    """
    limits, z = view.limits, view.z(CELL)
    largest, growth, age = view.get(LARGEST), view.get(GROWTH), view.get("lstm/age/max")
    counts = largest is not None and age is not None and largest <= limits[CELL_OF_AGE] * (age + 1)
    useless = limits[CELL_ABSMAX]
    jumped = value > MAX_WRITTEN * limits[CELL_SIZE] and view.baselines.shift.get(CELL, 0.0) > log10(limits[CELL_JUMP])
    severities = {
        CELL: 0.0 if z is None or not jumped else limits.severity(Z, z),
        LARGEST: 0.0 if largest is None or counts else decade_ramp(largest, useless / 2, useless * 2),
        GROWTH: 0.0,
    }
    if growth is not None:
        # a memory that fills in the first steps of an episode grows with its age, too, but not beyond what a single step can write
        severity = limits.severity(CELL_GROWTH, growth) if value > MAX_WRITTEN else 0.0
        severities[GROWTH] = min(growing.swap(severity), severity)
    key = max(severities, key=lambda name: severities[name])
    finding = Finding(severities[key], key, view.values[key], adaptive=key == CELL, z=z if key == CELL else None)
    usual, most = partial(view.usual, CELL), largest or value
    words = "the LSTM's cell state has grown to {}{}, with a largest value of {}, so its output saturates"
    yield finding.says(words, value, usual, most)


STALE = Ramp("stale", 1.0, 3.0, "relative distance of stored and recomputed states after the update")
STALE_FIRST = above("stale_first", 1e-3, "the same before the first optimizer step, when it must be 0")


def stale_state(view: View) -> Iterator[Finding]:
    """Stored states that differ from the states that the weights compute."""
    first, last = view.get("lstm/staleness_first"), view.get("lstm/staleness")
    words = "training has used other LSTM states than acting: stored states differ by {:%} from the states that the weights compute "
    if first is not None and first > view.limits[STALE_FIRST]:
        finding = Finding(1.0, "lstm/staleness_first", first, view.limits[STALE_FIRST])
        yield finding.says(words + "before the first optimizer step", first)
    elif first is not None or last is not None:
        severity = view.limits.severity(STALE, last or 0.0) if view.update > SETTLE_UPDATES else 0.0
        finding = Finding(severity, "lstm/staleness", last, view.limits.middle(STALE))
        yield finding.says(words + "after the update", last or 0.0)


@reading("lstm/reset_rate", "episode/count")
def reset_missing(view: View, rate: float, ended: float, before: list[float]) -> Iterator[Finding]:
    """Episodes that ended without a reset of the memory; `before` has the ends in the last rollouts without a reset.

    The state after the last step of a rollout is reset in the next rollout, so one end per environment proves nothing yet. Ends in the
    previous rollout do, and so do more episodes than environments. A rollout of a single step may be the row in which an environment is
    reset, which the policy does not see; then the check waits for one more rollout.
    """
    late = 2 if view.facts.num_steps == 1 else 1
    waiting = before[-late] if len(before) >= late else 0.0
    before[:] = [*before, ended][-late:] if rate == 0 else []
    wrong = rate == 0 and (waiting > 0 or ended > (view.facts.num_envs or ended))
    words = "the memory has never been reset, although {} episodes have ended: it leaks into the next episode"
    yield Finding(hard(wrong), "lstm/reset_rate", rate, 0.0).says(words, waiting + ended)


GATE_CLOSED = Ramp("gate_closed", 0.85, 0.95, "share of input or output gates below 0.1")


def gate_closed(view: View) -> Iterator[Finding]:
    """Closed input gates, which write nothing, and closed output gates, which read nothing."""
    for gate, effect in (("input", "nothing is written to the memory"), ("output", "the policy reads nothing from its memory")):
        key = f"lstm/gate/{gate[0]}/sat_lo"
        share = view.get(key)
        if share is not None:
            finding = Finding(view.limits.severity(GATE_CLOSED, share), key, share, view.limits.middle(GATE_CLOSED))
            yield finding._replace(instance=gate).says(f"{{:%}} of the {gate} gates are closed: {effect}", share)


memory_alarm = partial(alarm, debug_updates=5, pieces=("transitions",))  # declares an alarm about a recurrent policy

RULES = (
    memory_alarm("lstm/forget_closed", "lstm/gate/{gate}/sat_lo", "lstm/{part}/absmax", TIMESCALE, rank=210)
    .needs(CLOSED, applies=remembers)
    .follows(LARGEST, CELL_HISTORY)
    .says(
        "The forget gate is closed: memory does not last from one step to the next.",
        "Initialise the forget bias at 1, lower the learning rate, normalise inputs.",
        "Gates are sampled; |c| ≤ 1 without memory, which every update shows. A short timescale alone is healthy in short tasks.",
    )
    .shows("lstm/gate/f/*", "lstm/timescale/*", "lstm/c/*")
    .judged(ForgetClosedJudge(), FORGET_CLOSED, MIN_TIMESCALE, ADDS_UP_JUMP),
    memory_alarm("lstm/gate_closed", "lstm/gate/{gate}/sat_lo", rank=204, sampled=True)
    .needs(("lstm/gate/i/sat_lo", "lstm/gate/o/sat_lo"), applies=remembers)
    .says(
        "The input or the output gate is closed: nothing is written to the memory, or nothing is read from it.",
        "Initialise the biases of the gates at 0, lower the learning rate, normalise inputs.",
        "Karpathy 2015, 1506.02078. Healthy runs stay below 0.03; biases of -10 give 0.99.",
    )
    .shows("lstm/gate/i/*", "lstm/gate/o/*", "lstm/h/*")
    .judged(gate_closed, GATE_CLOSED),
    memory_alarm("lstm/forget_open", "lstm/gate/{gate}/sat_hi", GROWTH, rank=220, sampled=True, debug_updates=3)
    .needs(OPEN, applies=remembers)
    .follows(CELL_HISTORY)
    .says(
        "The forget gate never closes: the memory accumulates and forgets nothing.",
        "Check that states are reset at the ends of episodes; clip the cell state.",
        "Healthy runs stay below 0.66. Gates are sampled; between samples, a cell state that grows by half in one update and keeps growing "
        "with its age indicates the same.",
    )
    .shows("lstm/gate/f/*", "lstm/timescale/*", "lstm/c/*", GROWTH)
    .judged(StateJudge(forget_open, OpenGates()), FORGET_OPEN, ADDS_UP_GROWTH, ADDS_UP_JUMP),
    memory_alarm("lstm/cell_drift", "lstm/{part}/rms", "lstm/{part}/absmax", GROWTH, rank=230, relative=True, warmup=10)
    .needs(CELL, applies=remembers)
    .follows(CELL_HISTORY)
    .says(
        "The cell state grows with its age.",
        "Check resets, shorten sequences, clip or regularise the cell state.",
        "In healthy runs cell states become two to ten times as large within fifty updates. States of 50 and more are usual in episodes of "
        "hundreds of steps.",
    )
    .shows("lstm/c/*", GROWTH, "lstm/age/*", "lstm/reset_rate")
    .judged(StateJudge(cell_drift, Before()), CELL_ABSMAX, CELL_OF_AGE, CELL_SIZE, CELL_JUMP, CELL_GROWTH),
    memory_alarm("lstm/stale_state", "lstm/staleness", "lstm/staleness_first", rank=300, sampled=True)
    .needs(("lstm/staleness", "lstm/staleness_first"), applies=lambda facts: facts.policy != "mlp")
    .says(
        "Training starts from stored LSTM states that the current weights would not compute.",
        "Recompute states at the start of each epoch, use a burn-in, or train on whole episodes.",
        "Every update makes stored states stale, by 0.05-0.3 in healthy runs; 1 is as wrong as an empty memory. sb3-contrib#265",
    )
    .shows("lstm/staleness", "lstm/staleness_first", "integrity/ratio_init")
    .judged(stale_state, STALE, STALE_FIRST),
    memory_alarm("lstm/reset_missing", rank=50, hard=True, claim=True, certain=True, n_off=1, debug_updates=10)
    .reads("lstm/reset_rate")
    .needs("lstm/reset_rate", "episode/count", facts=("num_envs",), applies=lambda facts: facts.policy != "mlp")
    .says(
        "Episodes end but the memory is never reset: it leaks from one episode into the next.",
        "Set the state to 0 after each `done`, in the rollout and in training.",
        "identity",
    )
    .shows("lstm/reset_rate", "lstm/age/*", "episode/count", CELL)
    .judged(StateJudge(reset_missing, list[float]())),
)
