"""Outcomes of synthetic courses, whose labels follow from their construction, and of short real runs.

Every course is drawn with many seeds. If a label is right by construction, 95 % of the draws must get it. At most 2 % of pure noise may
be labelled as learning.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.verdict.run_outcome import GOOD, Outcome, OutcomeJudge, OutcomeKind, outcome_of
from esper_telemetry.core.metric import Array
from esper_telemetry.core.record import Axes, Record, RunStatus

EPISODES = 12
SEEDS = 40
Draw = Callable[[np.random.Generator, Array], Array]
"""Makes the mean returns of all updates from their times, 0 to 1."""
Column = float | Sequence[float] | Array


def records(means: Array, *, episodes: int = EPISODES, steps: int = 1000, more: Mapping[str, Column] | None = None) -> list[Record]:
    """Records of updates of `steps` steps, with these mean returns and further columns, each a number or a number per update."""
    columns = {"episode/return_mean": means, "episode/count": float(episodes), **(more or {})}
    rows = {key: np.broadcast_to(np.asarray(column, float), len(means)).tolist() for key, column in columns.items()}
    return [
        Record(update, Axes(update, steps * update, 16 * update, 0.0), {key: row[update - 1] for key, row in rows.items()})
        for update in range(1, len(means) + 1)
    ]


def correlated(rng: np.random.Generator, count: int, persistence: float) -> Array:
    """Autoregressive noise with standard deviation 1."""
    values = rng.normal(size=count)
    for place in range(1, count):
        values[place] = persistence * values[place - 1] + math.sqrt(1 - persistence**2) * values[place]
    return values


def sparse(chance: Callable[[Array], Array]) -> Draw:
    """Fractions of successful episodes, given the success probability over time."""
    return lambda rng, time: rng.binomial(EPISODES, chance(time)) / EPISODES


def noisy(course: Callable[[Array], Array], height: float = 10, persistence: float = 0.2) -> Draw:
    """A course that is `height` standard deviations of noise high."""
    return lambda rng, time: 3 * (height * course(time) + correlated(rng, len(time), persistence)) - 50


def sigmoid(middle: float, width: float) -> Callable[[Array], Array]:
    return lambda time: 1 / (1 + np.exp((middle - time) / width))


FLAT: Mapping[str, Draw] = {
    "white noise": noisy(np.zeros_like),
    "noise of persistence 0.5": noisy(np.zeros_like, persistence=0.5),
    "noise of persistence 0.7": noisy(np.zeros_like, persistence=0.7),
    "heavy tails": lambda rng, time: 10 * rng.standard_t(2.5, len(time)),
    "exponential": lambda rng, time: rng.exponential(5, len(time)),
    "no reward": lambda rng, time: np.zeros_like(time),
    "time limit": lambda rng, time: np.full_like(time, -200.0),
    "rare success": sparse(lambda time: np.full_like(time, 0.01)),
    "success by chance": sparse(lambda time: np.full_like(time, 0.3)),
}
LEARNING: Mapping[str, Draw] = {
    "straight": noisy(lambda time: time),
    "late": noisy(sigmoid(0.75, 0.06)),
    "steps": noisy(lambda time: np.floor(5 * time) / 4, height=16),
    "accelerating": noisy(lambda time: time**2),
    "sparse success": sparse(lambda time: 0.02 + 0.7 * time**2),
}
CONVERGED: Mapping[str, Draw] = {
    "sigmoid": noisy(sigmoid(0.3, 0.05)),
    "a step": noisy(lambda time: (time > 0.35).astype(float)),
    "sparse success": sparse(lambda time: 0.02 + 0.85 * sigmoid(0.3, 0.05)(time)),
}
DECLINING: Mapping[str, Draw] = {
    "from the start": noisy(lambda time: -time),
    "late collapse": noisy(lambda time: sigmoid(0.3, 0.06)(time) * (time < 0.88)),
    "a drop": noisy(lambda time: (time < 0.3).astype(float)),
    "sparse success": sparse(lambda time: 0.02 + 0.85 * sigmoid(0.3, 0.05)(time) * (time < 0.8)),
}


@cache
def outcomes(draw: Draw, updates: int) -> list[OutcomeKind]:
    time = np.linspace(0, 1, updates)
    return [outcome_of(records(draw(np.random.default_rng(seed), time))).kind for seed in range(SEEDS)]


@pytest.mark.system
@pytest.mark.parametrize("updates", [60, 200])
@pytest.mark.parametrize(
    ("courses", "label"),
    [(FLAT, OutcomeKind.FLAT), (LEARNING, OutcomeKind.LEARNING), (CONVERGED, OutcomeKind.CONVERGED), (DECLINING, OutcomeKind.DECLINING)],
    ids=lambda value: str(value) if isinstance(value, OutcomeKind) else "",
)
def test_outcomes_are_right(courses: Mapping[str, Draw], label: OutcomeKind, updates: int) -> None:
    kinds = {name: outcomes(draw, updates) for name, draw in courses.items()}

    right = [kind is label for values in kinds.values() for kind in values]
    assert sum(right) >= 0.95 * len(right), {name: sorted(set(values)) for name, values in kinds.items()}


@pytest.mark.parametrize("updates", [24, 60, 200])
def test_noise_is_not_learning(updates: int) -> None:
    kinds = [kind for draw in FLAT.values() for kind in outcomes(draw, updates)]

    assert sum(kind in GOOD for kind in kinds) <= 0.02 * len(kinds)


@pytest.mark.parametrize(("returns", "at_end"), [([20.2, 19.7, 34.6, 37.0, 49.1], True), ([20.2, 19.7], False)])
def test_the_last_outcome_of_a_journal_is_by_all_updates(returns: list[float], at_end: bool) -> None:
    course = records(np.array(returns), episodes=20, more={"episode/return_std": 13.0})
    detectors, events = Detectors({}), list[tuple[str, Mapping[str, Any]]]()
    for record in course:
        events += detectors.step(record).events

    last = detectors.end(RunStatus.FINISHED)

    assert bool(events) is bool(last) is at_end
    if at_end:
        assert dict(last)["outcome"] == outcome_of(course, status=RunStatus.FINISHED).data()


def test_a_few_long_episodes_tell_a_trend() -> None:
    """Sixteen updates of one episode each, as logged: the return falls in nearly all of them. Noise of this length shows no trend."""
    falling = -np.array([141, 142, 146, 145, 151, 155, 153, 160, 163, 161, 170, 174, 179, 183, 190, 195]) * 1000.0
    kinds = [outcome_of(records(np.random.default_rng(seed).normal(size=16), episodes=1)).kind for seed in range(200)]

    assert outcome_of(records(falling, episodes=1)).text.startswith("declining: return -1.4e5 -> -1.6e5 in 16")
    assert outcome_of(records(-falling, episodes=1)).kind is OutcomeKind.LEARNING
    assert sum(kind is not OutcomeKind.TOO_SHORT for kind in kinds) <= 4


CARTPOLE = [21, 28, 34, 31, 42, 84, 103, 99, 51, 108, 105, 161, 188, 159, 87, 123, 133, 184, 218, 238, 226, 157, 153]
ACROBOT = [-498.0, -471.0, -365.0, -290.0, -240.0, -205.0]
OTHER_ROWS = "16.6 17.5 18.9 21.2 23.9 24.5 22.5 30.8 25.8 24.7 20.1 28.7 21.9 30.8 18.9 19.0 18.7 20.9 23.5 26.9 25.9 30.3 27.9 32.3 33.0 "
OTHER_ROWS += "35.6 25.8 25.8 19.6 23.7 27.8 24.1 23.8 22.4 14.7 14.0 15.1 16.6 20.0 17.1 21.8 20.7"
HALF_LOST = [*np.linspace(1.0, 490.0, 42), *np.linspace(487.0, 492.0, 45), 466, 421, 334, 247, 209, 208, 215]
LOST = [-190.0] * 6 + [-390.0] * 20
ONE_TWO = np.tile([1.0, 2.0], 20)
UP = np.arange(40.0)
NONFINITE = {"numerics/nonfinite": 3.0}


class Course(NamedTuple):
    """Mean returns, the episodes of each update and their standard deviation, and the end of the run."""

    returns: Sequence[float] | Array
    episodes: int = EPISODES
    std: float | None = None
    status: RunStatus | None = None
    more: Mapping[str, float] = {}

    def outcome(self) -> Outcome:
        spread = {} if self.std is None else {"episode/return_std": self.std}
        return outcome_of(records(np.array(self.returns, float), episodes=self.episodes, more={**spread, **self.more}), status=self.status)


KINDS: Mapping[str, list[tuple[Course, OutcomeKind]]] = {
    "Numbers are not finite in a run that learns, and in one whose returns are not finite either": [
        (Course(UP, more=NONFINITE), OutcomeKind.LEARNING),
        (Course(UP, more={**NONFINITE, "episode/return_mean_nonfinite": 3.0}), OutcomeKind.FAILED),
    ],
    "Seven updates with a rise and 19 without one are too few": [
        (Course(np.arange(7.0)), OutcomeKind.TOO_SHORT),
        (Course(np.arange(10.0)), OutcomeKind.LEARNING),
        (Course(ONE_TWO[:19]), OutcomeKind.TOO_SHORT),
        (Course(ONE_TWO[:20]), OutcomeKind.FLAT),
        (Course([3.0, 1, 4, 1, 5, 9, 2, 6], 1), OutcomeKind.TOO_SHORT),
    ],
    "Twelve updates of 12 episodes are 144 episodes; an unfinished run may still begin to learn": [
        (Course(ONE_TWO[:12], status=RunStatus.FINISHED), OutcomeKind.FLAT),
        (Course(ONE_TWO[:12], status=RunStatus.INTERRUPTED), OutcomeKind.TOO_SHORT),
        (Course(ONE_TWO[:9], status=RunStatus.FINISHED), OutcomeKind.TOO_SHORT),
    ],
    "A bad end is a failure": [
        (Course(UP, status=RunStatus.FAILED), OutcomeKind.FAILED),
        (Course(UP, status=RunStatus.KILLED), OutcomeKind.FAILED),
        (Course(UP, status=RunStatus.INTERRUPTED), OutcomeKind.LEARNING),
        (Course(UP, more=NONFINITE), OutcomeKind.LEARNING),
    ],
    "A rise that slows down, but gains 15 % of itself in the last third, has not converged; one that is exactly level has": [
        (Course([*np.linspace(0, 85, 40), *np.linspace(85, 100, 20)]), OutcomeKind.LEARNING),
        (Course([*np.linspace(0, 1000, 20), *np.full(40, 1000.0)]), OutcomeKind.CONVERGED),
    ],
    "Means of more than a hundred episodes per update: the last fifth of the updates is hardly lower than before": [
        (Course(HALF_LOST[:-3], 120), OutcomeKind.LEARNING)
    ],
    "Measured CartPole blocks are few, uneven and far above the first ones, unless their episodes differ by 400": [
        (Course(CARTPOLE, 8), OutcomeKind.LEARNING),
        (Course(CARTPOLE, 8, 60.0), OutcomeKind.LEARNING),
        (Course(CARTPOLE, 8, 400.0), OutcomeKind.FLAT),
        (Course(CARTPOLE[::-1], 8, 60.0), OutcomeKind.DECLINING),
    ],
    "Acrobot, six measured updates of 4,096 steps: an update's episodes differ by 60, or their spread is unknown": [
        (Course(ACROBOT, std=60.0), OutcomeKind.LEARNING),
        (Course([-value for value in ACROBOT], std=60.0), OutcomeKind.DECLINING),
        (Course(ACROBOT), OutcomeKind.TOO_SHORT),
        (Course(ACROBOT[:3], std=60.0), OutcomeKind.LEARNING),
        (Course(ACROBOT[:3], std=200.0), OutcomeKind.TOO_SHORT),
        (Course(ACROBOT[:2], std=60.0), OutcomeKind.TOO_SHORT),
    ],
    "A deterministic task with a deterministic policy has no spread: seven groups of 8 equal episodes": [
        (Course([50.0, 50, 65, 92, 98, 98, 98], 8, 0.0), OutcomeKind.LEARNING)
    ],
    "A trend without noise is clear from its blocks, and its end is compared with the spread of the first episodes": [
        (Course(np.linspace(10.0, 12.0, 60), std=10.0), OutcomeKind.FLAT),
        (Course(np.linspace(10.0, 20.0, 60), std=10.0), OutcomeKind.LEARNING),
        (Course(np.linspace(12.0, 10.0, 60), std=10.0), OutcomeKind.FLAT),
        (Course(np.linspace(20.0, 10.0, 60), std=10.0), OutcomeKind.DECLINING),
        (Course([*LOST, *np.linspace(-390.0, -180.0, 34)], std=110.0), OutcomeKind.FLAT),
        (Course([*LOST, *np.linspace(-390.0, -300.0, 34)], std=110.0), OutcomeKind.DECLINING),
        (Course([*np.linspace(10.0, 50.0, 20), *np.linspace(50.0, 10.0, 40)], std=10.0), OutcomeKind.DECLINING),
    ],
    "A rise is lost before it is clear by blocks alone: CartPole with a policy trained on other rows than its losses used": [
        (Course([*map(float, OTHER_ROWS.split())], 15, 10.0), OutcomeKind.DECLINING)
    ],
    "Values that are no numbers are passed over": [
        (Course([math.inf if update == 3 else 1e200 if update == 17 else update for update in range(40)]), OutcomeKind.LEARNING)
    ],
}


@pytest.mark.parametrize(
    ("course", "kind"), [pytest.param(*row, id=f"{name} [{place}]") for name, rows in KINDS.items() for place, row in enumerate(rows)]
)
def test_outcomes_of(course: Course, kind: OutcomeKind) -> None:
    assert course.outcome().kind is kind


@pytest.mark.parametrize(
    ("course", "text"),
    [
        (Course([*np.linspace(0, 100, 30), *np.full(30, 68.0)]), "learning: return 8.62 -> 68 in 60 updates, 87.3 at best"),
        (
            Course([*np.linspace(20.0, 500.0, 30), *np.linspace(480.0, 100.0, 20)]),
            "declining: return 462 at best -> 174 in 50 updates, 53.1 in the first rollouts",
        ),
        (Course(np.linspace(500.0, 20.0, 40)), "declining: return 482 -> 65.3 in 40 updates"),
        (Course([908.0 + np.sin(update) - update / 20 for update in range(60)]), "flat: return 908 -> 905 in 60 updates"),
        (Course(HALF_LOST, 120), "declining: return 492 at best -> 215"),
        (Course([35.0, 45, 55, 65, 75, 85], 10, 5.0), "learning: return 35 -> 60 in 6 updates (mean of all 60 episodes)"),
        (Course(ONE_TWO, more=NONFINITE), "failed: numbers have been NaN or infinite since update 1"),
    ],
    ids=["a third lost", "a rise that is lost", "a fall", "a level", "half lost in the last episodes", "few episodes", "not finite"],
)
def test_a_sentence_has_the_numbers_of_its_course(course: Course, text: str) -> None:
    assert course.outcome().text.startswith(text)


def test_the_sentence_has_the_numbers_that_decided() -> None:
    """Returns 10, 20, ..., 300 of 12 episodes each: the first three updates hold a tenth of the episodes.

    The last 100 episodes are 8 updates of 230 to 300, whose mean is 265, and 4 episodes of the previous update, with 220.
    """
    outcome = outcome_of(records(np.arange(10.0, 310.0, 10.0)))

    assert outcome.text == "learning: return 20 -> 263 in 30 updates"
    assert (outcome.first, outcome.last, outcome.best, outcome.episodes) == (20.0, 263.2, 263.2, 360)


def test_the_return_is_the_one_that_the_trainer_reports_and_the_best_is_its_highest() -> None:
    """The trainer's mean over a hundred episodes reaches 1000; the means of single updates do not matter."""
    course = records(np.arange(10.0, 310.0, 10.0), more={"episode/return_mean_100": [*range(10, 300, 10), 1000.0]})

    rising, falling = outcome_of(course), outcome_of([*course, replace(course[10], axes=Axes(31, 31_000, 0, 0.0))])

    assert (rising.last, rising.best) == (1000.0, 1000.0)
    assert (falling.last, falling.best) == (110.0, 1000.0)


@pytest.mark.parametrize("draw", [FLAT["heavy tails"], LEARNING["late"], DECLINING["late collapse"]])
def test_no_sentence_contradicts_its_numbers(draw: Draw) -> None:
    for seed in range(5):
        judge = OutcomeJudge()
        for record in records(draw(np.random.default_rng(seed), np.linspace(0, 1, 60))):
            judge.step(record)
            outcome = judge.so_far()
            levels = re.search(r"return (\S+) (?:at best )?-> (\S+) in", outcome.text)
            assert outcome.kind is OutcomeKind.TOO_SHORT or levels is not None
            if levels is not None:
                assert outcome.kind not in GOOD or float(levels[2]) >= float(levels[1])
                assert outcome.kind is not OutcomeKind.DECLINING or float(levels[2]) < float(levels[1])


def test_an_outcome_changes_when_the_new_one_lasts() -> None:
    """Measured values of CartPole with an LSTM: nearly flat, with a spread of half the level. The outcome used to change eleven times."""
    draw = noisy(lambda time: 0.2 * time, height=5)
    changes = 0
    for seed in range(5):
        judge = OutcomeJudge()
        events = [judge.step(record) for record in records(draw(np.random.default_rng(seed), np.linspace(0, 1, 100)))]
        changes = max(changes, sum(event is not None for event in events))

    assert changes <= 4


def test_the_first_episodes_replace_the_rewards_by_which_a_run_was_judged() -> None:
    """The mean reward rises for forty updates; then the first episode ends."""
    judge = OutcomeJudge({"normalize_rewards": False})
    for record in records(np.zeros(40)):
        judge.step(replace(record, values={"reward/mean": float(record.seq), "episode/count": 0.0}))
    assert judge.so_far().text == "learning: mean reward 2.5 -> 30.5 in 40 updates"

    judge.step(Record(41, Axes(41, 41_000, 0, 0.0), {"episode/return_mean": 7.0, "episode/count": 2.0}))

    assert judge.so_far().text.startswith("too short to tell: 2 episodes in 0 blocks of updates")


def test_a_run_that_has_learned_is_not_too_short_again() -> None:
    """CartPole: three updates rise clearly and the fourth's spread blurs the rise. Events report lasting changes only."""
    spreads = {"episode/return_std": [9.0, 15, 20, 30, 40, 45, 50, 50]}
    judge = OutcomeJudge()

    events = [judge.step(record) for record in records(np.array([20.0, 30, 52, 42, 75, 80, 90, 110]), episodes=20, more=spreads)]

    assert [event.kind for event in events if event is not None] == [OutcomeKind.LEARNING]


@pytest.mark.parametrize(
    ("means", "episodes", "kind"),
    [
        ([50.0, 60.0, 95.0, 98.0, 70.0, 48.0, 47.0], 8, OutcomeKind.DECLINING),
        ([50.0, 70.0, 90.0, 100.0, 99.0, 101.0, 98.0], 8, OutcomeKind.LEARNING),
        ([50.0, 48.0, 52.0, 49.0, 51.0, 50.0, 49.0], 8, OutcomeKind.FLAT),
        ([50.0, 110.0, 52.0], 150, OutcomeKind.DECLINING),
        ([50.0, 58.0, 66.0], 150, OutcomeKind.LEARNING),
    ],
)
def test_groups_of_many_episodes_tell_a_course_though_they_are_few(means: list[float], episodes: int, kind: OutcomeKind) -> None:
    """Episodes of equal length end together in every third update and differ by 10: seven groups of 8, three of 150."""
    course = [
        Record(
            3 * place,
            Axes(3 * place, 1000 * place, 0, 0.0),
            {"episode/return_mean": mean, "episode/return_std": 10.0, "episode/count": float(episodes)},
        )
        for place, mean in enumerate(means, 1)
    ]
    between = [Record(one, Axes(one, 334 * one, 0, 0.0), {"episode/count": 0.0}) for one in range(1, 22) if one % 3]

    assert outcome_of(sorted([*course, *between], key=lambda record: record.seq)).kind is kind


def test_a_return_that_stays_above_its_first_episodes_has_risen_however_much_it_varies() -> None:
    """CartPole at a learning rate of 0.1: 20 with a spread of 9 at first, 377 in update 7, about 100 at the end."""
    course = [20, 36, 72, 140, 186, 344, 377, 236, 125, 147, 164, 135, 160, 128, 81, 124, 93, 117, 86, 98]
    counts = [39, 30, 10, 4, 3, 2, 3, 9, 8, 4, 8, 6, 6, 10, 11, 10, 11, 9, 8, 9]
    spreads = [9, 20, 26, 61, 35, 3, 97, 125, 28, 14, 21, 22, 65, 78, 31, 117, 57, 78, 22, 51]
    more = {"episode/count": counts, "episode/return_std": spreads}

    assert outcome_of(records(np.array(course, float), more=more)).kind is OutcomeKind.DECLINING
    assert outcome_of(records(np.arange(20.0, 820.0, 40.0), more=more)).kind is OutcomeKind.LEARNING


def test_a_threshold_that_is_passed_is_solved() -> None:
    """The return is 200 from update 31 on. The 100 episodes of a mean take eight updates and a third."""
    facts = {"reward_threshold": 195.0, "env": "Task-v0"}
    rising = np.concatenate([np.arange(10.0, 200.0, 6.4), np.full(30, 200.0)])

    solved = outcome_of(records(rising), facts)
    scaled = outcome_of(records(np.full(60, 2000.0) + np.arange(60) % 3), facts)
    lost = outcome_of(records(np.concatenate([rising, np.full(20, 10.0)])), facts)

    assert solved.kind is OutcomeKind.SOLVED
    assert solved.text.endswith(f"above 195, the threshold of Task-v0, since update {solved.since}")
    assert outcome_of(records(rising)).kind is OutcomeKind.CONVERGED
    assert scaled.kind is OutcomeKind.FLAT and "already above the environment's threshold of 195" in scaled.text
    assert lost.kind is OutcomeKind.DECLINING


@pytest.mark.parametrize(("threshold", "is_far"), [(900.0, True), (300.0, False), (None, False)])
def test_a_return_that_settles_far_below_the_threshold_needs_an_explanation(threshold: float | None, is_far: bool) -> None:
    rising = np.concatenate([np.arange(10.0, 200.0, 6.4), np.full(30, 200.0)])

    settled = outcome_of(records(rising), {"reward_threshold": threshold, "env": "Task-v0"})

    assert settled.kind is OutcomeKind.CONVERGED
    assert settled.is_far_below is settled.needs_explanation is is_far is settled.text.endswith("far below 900, the threshold of Task-v0")


def test_a_threshold_that_is_no_number_is_not_known() -> None:
    course = records(np.arange(1.0, 40.0), more={"episode/return_std": 1.0})

    assert outcome_of(course, {"reward_threshold": "unknown"}) == outcome_of(course)


def test_success_and_length_decide_where_all_returns_are_equal() -> None:
    """Earlier is better for a reward of 1 at the end of every episode, later for a penalty of 1; with zero rewards, neither is."""
    falling = {"episode/length_mean": np.linspace(200.0, 40.0, 40)}
    reached, punished, nothing = (outcome_of(records(np.full(40, value), more=falling)) for value in (1.0, -1.0, 0.0))
    success = outcome_of(records(np.zeros(40), more={"episode/success_rate": np.linspace(0.0, 0.9, 40)}))

    assert reached.text.startswith("learning: length of episodes 194 -> 55.1 in 40 updates at a return of 1 in every")
    assert (punished.kind, nothing.kind) == (OutcomeKind.DECLINING, OutcomeKind.FLAT)
    assert success.kind is OutcomeKind.LEARNING


def test_early_short_episodes_are_no_baseline() -> None:
    """Only short episodes end in the first steps: their returns of -100 are better than the initial policy's -500."""
    course = np.concatenate([[-100.0, -180.0, -300.0], np.full(37, -500.0) + np.arange(37) % 5])

    assert outcome_of(records(course, steps=1024, more={"episode/length_mean": -course}), {"num_envs": 8}).kind is OutcomeKind.FLAT


@pytest.mark.parametrize(("cut_off", "first"), [(1.0, 10.0), (0.5, 15.0)])
def test_episodes_that_are_all_cut_off_are_a_baseline_at_once(cut_off: float, first: float) -> None:
    """Environments end together every 200 steps, and the return doubles from the first to the second end."""
    ends = {"episode/length_mean": 200.0, "episode/truncated_frac": cut_off}
    course = records(10 * np.arange(1.0, 31.0), episodes=120, steps=120 * 200, more=ends)

    assert outcome_of(course, {"num_envs": 120}).first == first


def test_returns_that_a_script_reports_count_without_environments() -> None:
    course = records(np.linspace(-700.0, -120.0, 22), episodes=1, steps=0, more={"episode/length_mean": 1.0})

    assert outcome_of(course, {"num_envs": 16, "reported_returns": True}).kind is OutcomeKind.LEARNING


def test_a_failure_stands_until_a_record_follows() -> None:
    judge = OutcomeJudge()
    course = records(np.arange(30.0))
    for record in course[:20]:
        judge.step(record)

    failed = judge.failure("The run failed at update 21: KeyError: 'joint 7'")
    resumed = judge.step(course[20])

    assert failed is not None and failed.kind is OutcomeKind.FAILED
    assert failed.text == "failed: The run failed at update 21: KeyError: 'joint 7'"
    assert failed.before.startswith("learning: return ")
    assert resumed is not None and resumed.kind is OutcomeKind.LEARNING


def test_long_runs_keep_their_first_rollouts() -> None:
    """The return rises in 20 of 3,000 updates, within the first percent of the run."""
    time = np.arange(3000)
    course = 100 * sigmoid(20, 5)(time.astype(float)) + np.random.default_rng(0).normal(size=3000)

    outcome = outcome_of(records(course))

    assert outcome.kind is OutcomeKind.CONVERGED
    assert outcome.first is not None and outcome.first < 10
    assert outcome.since is not None and outcome.since < 200
