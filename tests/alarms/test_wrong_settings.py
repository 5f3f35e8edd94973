"""Wrong settings, ends of episodes and observations, detected from the run itself."""

from collections.abc import Mapping

import pytest
from courses import SINCE, Course, check, parameters, whole
from healthy_run import FACTS, Number, Spoil, both, judged, later, multiplied, raised, run, set_to, with_steps

EARLY = {**FACTS, "total_steps": 1000 * 512}
LIMITED = {**FACTS, "horizon": 500}
PLUNGE = set_to({"policy/entropy_norm": lambda ago: 0.6 / 3 ** min(ago + 1, 3)})
SHORT = {"opt/beta2": 0.9}
RARE = set_to({"reward/zero_frac": lambda ago: 0.4 if ago % 4 == 3 else 1.0})
BLIND = {"obs/constant_frac": 1.0, "obs/still_frac": 1.0}
LOWER = "Lower the entropy coefficient, which is 0.3"
OUTWEIGHED = both(
    set_to({"episode/return_mean_100": lambda ago: min(5.0, 1.0 + 0.5 * ago)}),
    later(SINCE - 1, set_to({"policy/entropy_norm": 0.999, "loss/entropy_coef": 0.3, "episode/return_mean_100": 1.0})),
)

LENGTHS = [f"episode/{kind}_length_{end}" for kind in ("truncated", "terminated") for end in ("min", "max")]
ENDS: Mapping[str, Mapping[str, Number]] = {
    "over before": {"episode/truncated_frac": 0.0, "episode/terminated_length_min": 20.0, "episode/terminated_length_max": 300.0},
    "cut at": {"episode/truncated_frac": 1.0, "episode/truncated_length_min": 500.0, "episode/truncated_length_max": 500.0},
    "cut before": {"episode/truncated_frac": 1.0, "episode/truncated_length_min": 20.0, "episode/truncated_length_max": 300.0},
    "over at": {"episode/truncated_frac": 0.0, "episode/terminated_length_min": 500.0, "episode/terminated_length_max": 500.0},
}


def ended(first: str, then: str) -> Spoil:
    """Episodes end in one way, and from update 30 on in another."""
    return both(*(later(delay, set_to({**dict.fromkeys(LENGTHS), **ENDS[end]})) for delay, end in ((0, first), (SINCE - 1, then))))


COURSES: Mapping[str, list[Course]] = {
    "An entropy loss is minus the entropy: entropy that stands in the loss as it is has the wrong sign": [
        Course(
            "policy/entropy_crash",
            SINCE + 1,
            {"loss/entropy": 0.8},
            text=("Since update 30", "the loss has penalised exploration instead of rewarding it"),
        )
    ],
    "A bonus whose weight has become negative is none, unless on purpose; one without weight may have any sign": [
        Course("policy/entropy_crash", True, {"loss/entropy_coef": -0.01}),
        whole(None, False, {"loss/entropy_coef": -0.01}, 40, facts={**FACTS, "entropy_coef": -0.01}),
        Course(None, False, {"loss/entropy": 0.8, "loss/entropy_coef": 0.0}),
    ],
    "Entropy that falls to a third in every update, too fast for a slope over twenty, is reported early in a run and unless it is solved": [
        Course("policy/entropy_crash", SINCE + 2, PLUNGE, facts=EARLY),
        Course("policy/entropy_crash", False, PLUNGE),
        whole("policy/entropy_crash", False, both(later(5, multiplied({"episode/return_mean": 10.0})), later(20, PLUNGE)), 40, facts=EARLY),
    ],
    "beta2 = 0.9 reaches back ten of an update's sixteen steps, and every fourth update has a reward": [
        whole("opt/rms_spike", 21, both(set_to(SHORT), RARE), alone=True),
        whole(None, False, SHORT),
        Course(None, False, RARE, 60),
    ],
    "A memory becomes shorter than an update: ten steps instead of a thousand; twenty are more than an update": [
        Course("opt/rms_spike", SINCE, SHORT, alone=True),
        Course(None, False, {"opt/beta2": 0.95}),
    ],
    "Ends that contradict the time limit are reported at the second time": [
        whole("value/bias", SINCE + 1, ended(before, after), 40, facts=LIMITED, alone=True)
        for before, after in (("over before", "cut before"), ("cut at", "over at"), ("over at", "cut at"), ("cut at", "cut before"))
    ],
    "A policy that learns to last or to finish contradicts nothing": [
        whole(None, False, ended(before, after), 40, facts=LIMITED)
        for before, after in (("over before", "cut at"), ("cut at", "over before"), ("cut before", "cut before"))
    ],
    "Without a time limit nothing is said of ends": [
        whole(None, False, ended("over before", "cut before"), 40, facts={**FACTS, "horizon": None})
    ],
    "Environments never changed in ten updates, or none of them in four of 32 steps; a task of one step may have a single state": [
        whole("obs/constant", 10, {"obs/constant_frac": 0.5}, 40, alone=True),
        whole("obs/constant", 4, BLIND, 40, alone=True),
        whole(None, False, {**BLIND, "episode/length_mean": 1.0}, 40),
    ],
    "An agent that waits for a rollout or two is no fault": [
        Course(None, False, {"obs/constant_frac": lambda ago: 0.25 if ago % 3 else 0.0}, 60)
    ],
    "Gradients between 1 and 1000 have standard scores that no value exceeds; 100 times the largest, twice, still raises the alarm": [
        whole("grad/explode", SINCE, {"grad/global/norm_preclip_max": lambda ago: 10.0 ** (ago % 4) if ago < SINCE - 2 else 1e5}, 32)
    ],
    "An entropy coefficient of 0.3 is 30 times the largest published one; the return falls with it, and the run's length is unknown": [
        whole(alarm, True, OUTWEIGHED, facts={name: fact for name, fact in FACTS.items() if name != "total_steps"}, text=(LOWER, part))
        for alarm, part in (("policy/entropy_explosion", "its entropy is 100 % of the maximum"), ("task/return_drop", ""))
    ],
}


@pytest.mark.parametrize("course", parameters(COURSES))
def test_alarms_of(course: Course) -> None:
    check(course)


def test_more_passes_than_ever_are_reported_where_they_move_the_policy() -> None:
    """Five times as many optimizer steps, and three times the KL: 0.024, which alone raises no alarm."""
    records = run(40, multiplied({"policy/kl": 3}))
    more = [*with_steps(records[: SINCE - 1], gradient=16), *with_steps(records[SINCE - 1 :], gradient=80)]

    assert raised(judged(more))["policy/kl_spike"] == SINCE + 1
    assert raised(judged(records)) == {}
