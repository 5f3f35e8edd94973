"""Hysteresis and escalation: properties of every sequence of severities and of raised alarms."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_telemetry.alarms.alarm_state import Change, Escalation, Hysteresis, Patience

SEVERITIES = st.lists(st.sampled_from([None, math.nan, 0.0, 0.24, 0.25, 0.49, 0.5, 0.9, 1.0]), max_size=60)
PATIENCES = st.builds(Patience, n_on=st.integers(1, 3), n_off=st.integers(1, 4), warmup=st.integers(0, 5))
KINDS = ("policy/kl_spike", "grad/drift", "numerics/nonfinite")
RAISED = st.lists(st.sets(st.sampled_from(KINDS)), max_size=80)
DURATIONS = st.fixed_dictionaries({kind: st.integers(1, 12) for kind in KINDS})


def changes(patience: Patience, severities: list[float | None]) -> list[Change]:
    state, result = Hysteresis(patience), []
    for severity in severities:
        change = state.step(severity)
        result += [change] if change else []
    return result


def remaining(state: Escalation, raised: list[set[str]]) -> list[int]:
    return [state.step(kinds) for kinds in raised]


@given(PATIENCES, SEVERITIES)
def test_raises_and_clears_alternate_and_begin_with_a_raise(patience: Patience, severities: list[float | None]) -> None:
    result = changes(patience, severities)

    assert result[:1] in ([], ["RAISE"])
    assert all(a != b for a, b in pairwise(result))


@given(PATIENCES, SEVERITIES)
def test_missing_severities_change_nothing(patience: Patience, severities: list[float | None]) -> None:
    """After the warm-up, which counts them as updates."""
    reference, state = (Hysteresis(patience, updates=patience.warmup) for _ in range(2))
    for severity in severities:
        state.step(severity)
        if severity is not None and not math.isnan(severity):
            reference.step(severity)

    assert (state.active, state.streak) == (reference.active, reference.streak)
    assert state.updates == patience.warmup + len(severities)


@given(PATIENCES, SEVERITIES)
def test_nothing_is_raised_during_the_warm_up(patience: Patience, severities: list[float | None]) -> None:
    assert changes(patience, severities[: patience.warmup]) == []


def test_patience_must_make_sense() -> None:
    with pytest.raises(ValueError, match=r"off 0\.6 and on 0\.5"):
        Patience(off=0.6)
    with pytest.raises(ValueError, match="got 0 and 3"):
        Patience(n_on=0)


@given(DURATIONS, RAISED, st.integers(1, 8))
def test_the_level_is_never_raised_for_longer_than_the_cap(durations: dict[str, int], raised: list[set[str]], cap: int) -> None:
    result = remaining(Escalation(durations, cap=cap), raised)

    longest = streak = 0
    for left in result:
        streak = streak + 1 if left else 0
        longest = max(longest, streak)
    assert longest <= cap


@given(DURATIONS, st.integers(1, 150))
def test_a_type_that_never_stops_opens_one_window_in_three_durations(durations: dict[str, int], updates: int) -> None:
    """A duration of d: DEBUG for d updates, then none for 2d."""
    kind, d = KINDS[0], durations[KINDS[0]]

    result = remaining(Escalation(durations), [{kind}] * updates)

    assert result == [max(0, d - t % (3 * d)) for t in range(updates)]


@given(DURATIONS)
def test_types_raised_together_keep_the_level_for_the_longest_of_them(durations: dict[str, int]) -> None:
    assert remaining(Escalation(durations), [set(KINDS)]) == [max(durations.values())]


def test_a_type_without_a_duration_raises_no_level() -> None:
    assert remaining(Escalation({}), [{"telemetry/storm"}]) == [0]
