"""Each rule is raised by its own fault, in time, and by no other; a healthy run raises none."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
from healthy_run import FACTS, Spoil, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.alarms import Detectors, Thresholds
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.record import RUN_FAILED, AlarmEvent, AlarmLevel

SINCE = 30


class Case(NamedTuple):
    """One fault, and the number of updates within which it must be raised."""

    spoil: Spoil
    lag: int = 0
    facts: Mapping[str, Any] = FACTS
    thresholds: Thresholds = Thresholds()


def swinging(metrics: Values, ago: int) -> None:
    """The periodicity test, which runs every tenth update, finds the same period."""
    if ago % 10 == 0:
        metrics.update({"policy/kl/period/p": 1e-9, "policy/kl/period/length": 6.0})


BOILING = set_to({"grad/actor/norm_preclip": lambda ago: 0.3 * 1.08 ** (ago + 1), "grad/actor/severity_explode": 0.3})
UNSCALED = {**FACTS, "normalize_observations": False}
CASES: dict[str, Case] = {
    "lm/mask": Case(set_to({"lm/mask_errors": 0.2}), 1),
    "lm/advantage_sign": Case(set_to({"lm/groups/sign_agreement": 0.0, "lm/groups/mixed": 0.0}), 1),
    "lm/grouping": Case(set_to({"lm/groups/sign_agreement": 0.6, "lm/groups/mixed": 0.5}), 1),
    "lm/rounded": Case(set_to({"lm/logprob/bf16_frac": 1.0}), 1),
    "lm/engine_mismatch": Case(set_to({"lm/mismatch/mult_error": 1.3}), 2),
    "lm/other_distribution": Case(set_to({"lm/surprise/gap": 0.3, "lm/surprise/z": 10.0}), 1),
    "lm/dead_groups": Case(set_to({"lm/groups/zero_advantage": 1.0, "lm/reward/mean": 0.5}), 2),
    "lm/length_reward": Case(set_to({"lm/reward/length_correlation": 0.99}), 2),
    "lm/truncation": Case(set_to({"lm/truncated_frac": lambda ago: 0.02 if ago < 6 else 0.8}), 8),
    "lm/entropy_collapse": Case(set_to({"lm/entropy": 0.01, "lm/groups/zero_advantage": 0.8, "lm/groups/all_best": 0.1}), 2),
    "numerics/nonfinite": Case(set_to({"numerics/nonfinite": 3.0})),
    "integrity/ratio_init": Case(set_to({"integrity/ratio_init": 0.4})),
    "integrity/gae_identity": Case(set_to({"integrity/gae_identity": 0.01})),
    "integrity/equation": Case(set_to({"integrity/equation/advantages": 0.3, "integrity/equation/advantages_ends_ignored": 1e-7})),
    "integrity/actions": Case(set_to({"integrity/actions/mode": 90.0, "integrity/actions_variance/mode": 10.0})),
    "integrity/adv_norm": Case(set_to({"integrity/adv_norm": 50.0, "adv/norm/std": 100.0})),
    "integrity/mask_violation": Case(set_to({"integrity/mask_violation": 1.0})),
    "integrity/rows_repeated": Case(set_to({"integrity/rows_repeated": 0.75})),
    "integrity/buffer_age": Case(set_to({"buffer/age_updates": 1.0})),
    "value/scale_shift": Case(multiplied({"reward/absmax": 100, "reward/mean": 100, "reward/std": 100})),
    "reward/constant": Case(set_to({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0}), 9),
    "obs/constant": Case(set_to({"obs/constant_frac": 0.0625}), 3),
    "obs/copies": Case(set_to({"obs/identical_frac": 1.0}), 5),
    "obs/unscaled": Case(set_to({"obs/rms_max": 4000.0, "obs/rms_ratio": 5000.0}), 1, facts=UNSCALED),
    "norm/off": Case(set_to({"obs/rms_median": 40.0}), 1),
    "reward/unscaled": Case(multiplied({"reward/absmax": 1e5, "reward/mean": 1e5, "reward/std": 1e5}), 1),
    "policy/actions_cut": Case(set_to({"policy/head/op/std_of_range": 30.0, "policy/head/op/bound_frac": 0.97}), 1),
    "policy/action_range": Case(set_to({"policy/head/op/empty_range_frac": 1.0}), 1),
    "ret/short_sighted": Case(
        set_to({"episode/length_mean": 200.0}), facts={**FACTS, "gamma": 0.3}, thresholds=Thresholds(discounted_length=50)
    ),
    "opt/negative_rate": Case(set_to({"opt/lr": -3e-4})),
    "adv/signs": Case(set_to({"adv/minibatch_rows": 2.0}), 1),
    "grad/slow_growth": Case(BOILING, 91),
    "value/never_fits": Case(set_to({"value/r2": -5.0, "value/explained_variance": -4.0}), 30, thresholds=Thresholds()),
    "value/limit_bias": Case(set_to({"value/bias_truncated": 80.0}), 4),
    "policy/std_collapse": Case(set_to({"policy/head/op/std/mean": 0.0025}), 2),
    "lstm/empty": Case(set_to({"lstm/h/rms": 1e-5}), 4),
    "norm/drift": Case(set_to({"norm/obs/drift": 2.0}), 20),
    "adv/degenerate": Case(set_to({"adv/participation": 0.01, "adv/raw/absmax_over_std": 60.0}), 4),
    "opt/stalled_weights": Case(set_to({"opt/lr": 0.0, "policy/kl_max": 1e-6})),
    "opt/state_lost": Case(set_to({"opt/state_reset": 1.0})),
    "opt/update_too_large": Case(set_to({"opt/update_to_weight": 0.4})),
    "opt/rms_spike": Case(set_to({"opt/stable_rms": 30.0})),
    "grad/missing_group": Case(set_to(dict.fromkeys(("grad/actor/norm_preclip", "grad/layer/heads_op_weight/norm", "grad/head/op/norm")))),
    "grad/vanish": Case(set_to({"grad/layer/encoder_weight/norm": 0.0})),
    "grad/actor_starved": Case(
        set_to({"grad/interference/log_ratio": 2.5, "grad/interference/critic_share": 0.9999, "grad/clip/coef": 0.3}), 1
    ),
    "grad/explode": Case(multiplied({"grad/global/norm_preclip_max": 1000}), lag=1),
    "grad/interference": Case(set_to({"grad/interference/cos": -0.9}), 10),
    "grad/clip_saturated": Case(set_to({"grad/clip/coef": 1e-4}), 1),
    "grad/oscillation": Case(swinging, 30),
    "grad/noise_dominated": Case(
        set_to({"opt/snr_share": -0.01}), 40, thresholds=Thresholds().with_changes({"grad/noise_dominated": "on"})
    ),
    "grad/drift": Case(multiplied({"grad/global/norm_preclip": 300}), 4),
    "grad/concentration": Case(set_to({"grad/concentration/entropy": 0.1}), 2),
    "repr/dormant": Case(set_to({"repr/dormant_frac": 0.9})),
    "repr/rank_collapse": Case(set_to({"repr/effective_rank": 2.0}), 1),
    "repr/norm_growth": Case(multiplied({"repr/feature_norm": lambda ago: 1.5 ** (ago + 1)}), 12),
    "lstm/forget_closed": Case(set_to({"lstm/gate/f/sat_lo": 0.95, "lstm/timescale/median": 1.0})),
    "lstm/gate_closed": Case(set_to({"lstm/gate/o/sat_lo": 0.99})),
    "lstm/forget_open": Case(set_to({"lstm/gate/f/sat_hi": 0.99})),
    "lstm/cell_drift": Case(multiplied({"lstm/c/rms": 10})),
    "lstm/stale_state": Case(set_to({"lstm/staleness_first": 1.0})),
    "lstm/reset_missing": Case(set_to({"lstm/reset_rate": 0.0})),
    "policy/kl_spike": Case(set_to({"policy/kl": 1.0, "policy/clip_frac": 0.3})),
    "policy/ratio_explosion": Case(set_to({"policy/ess_frac_min": 0.05, "policy/ratio/max": 40.0})),
    "policy/ratio_collapse": Case(set_to({"policy/ratio/p01": 0.01}), 2),
    "policy/clip_saturation": Case(set_to({"policy/clip_frac": 0.6, "policy/kl": 0.04}), 1),
    "policy/kl_stall": Case(set_to({"policy/kl_max": 0.0}), 2),
    "policy/entropy_collapse": Case(set_to({"policy/entropy_norm": 0.03, "policy/entropy_marginal_norm": 0.05}), 2),
    "policy/entropy_crash": Case(
        set_to({"policy/entropy_rate": -0.4, "policy/entropy_norm": 0.2}), 1, facts={**FACTS, "total_steps": 1000 * 512}
    ),
    "policy/entropy_explosion": Case(set_to({"policy/entropy_norm": 0.999, "policy/kl": 1e-6}), 9),
    "policy/action_shift": Case(set_to({"policy/action_shift_js": 0.4})),
    "policy/wrong_direction": Case(set_to({"policy/surrogate_gain": -0.03}), lag=2),
    "policy/dead_head": Case(set_to({"grad/head/op/norm": 0.0}), 2),
    "value/fit_collapse": Case(
        both(set_to({"value/r2": -1.0, "value/explained_variance": -0.9}), multiplied({"loss/value": 5, "value/loss_norm": 5})), 1
    ),
    "value/loss_jump": Case(multiplied({"loss/value": 1000})),
    "value/bias": Case(set_to({"value/bias": 6.0, "value/bias_over_std": 3.0}), 9),
    "env/rollback": Case(set_to({"env/rollbacks": 1.0, "env/rollback/nonfinite": 1.0, "host/each/3/rollbacks": 1.0})),
    "seed/explode": Case(set_to({"seed/exploding": 0.9, "seed/exploding_sustained": 0.8})),
    "seed/vanish": Case(set_to({"seed/vanishing": 0.9}), 1),
    "seed/dormant": Case(set_to({"seed/cause/dormant": 0.5, "seed/cause/disconnected": 0.4}), 2),
    "seed/stalled": Case(set_to({"seed/gate/g2/pass_frac": None}), 4),
    "seed/reward_hacking": Case(set_to({"env/score": 0.5, "episode/return_mean": 6.0}), 4),
    "task/no_episodes": Case(set_to({"episode/count": 0.0}), 25),
    "task/return_drop": Case(set_to({"episode/return_mean_100": -4.0}), 9),
    "telemetry/missing_metric": Case(set_to({"policy/kl": None}), 4),
    "telemetry/overhead": Case(set_to({"perf/telemetry_frac": 0.9, "perf/telemetry_ms": 12_000.0}), 10),
    "telemetry/delivery": Case(set_to({"telemetry/errors": lambda ago: ago + 1.0}), 4),
}


def case_records(kind: str) -> list[Any]:
    """Records of a case; before a drop of the return, the return rises."""
    case = CASES[kind]
    made = run(SINCE + max(20, case.lag + 10), case.spoil, since=SINCE)
    if kind == "task/return_drop":
        key = "episode/return_mean_100"
        for update in range(SINCE - 1):
            made[update] = replace(made[update], values={**made[update].values, key: 0.1 * update})
    return made


def alone(kind: str) -> Detectors:
    """Detectors of a case with its rule only."""
    return Detectors(CASES[kind].facts, CASES[kind].thresholds.without(CASES.keys() - {kind}))


@pytest.mark.parametrize("kind", CASES)
def test_what_goes_wrong_is_reported_in_time_with_numbers_evidence_and_what_to_try(kind: str) -> None:
    case = CASES[kind]
    verdicts = judged(case_records(kind)[: SINCE + case.lag], case.facts, case.thresholds)
    first = next(alarm for alarm in alarms(verdicts) if alarm.type == kind)

    assert raised(verdicts)[kind] >= SINCE
    assert first.event is AlarmEvent.RAISE
    assert first.text.startswith(f"Since update {first.since}, ") and "Try: " in first.text
    assert first.incident >= 1 and first.cause
    assert 0 < len(first.evidence["values"]) <= 24 or kind == "telemetry/missing_metric"
    assert first.level is AlarmLevel.of(first.severity)


def test_groups_of_one_completion_are_named() -> None:
    """No group is mixed, and no advantage has the wrong sign, as each group has one reward."""
    (alarm,) = alarms(judged(run(SINCE + 3, set_to({"lm/groups/single": 1.0, "lm/groups/mixed": 0.0}))))

    assert alarm.type == "lm/grouping" and "100 % of the prompts have had only one completion" in alarm.text


def test_every_rule_has_a_case_and_every_type_a_rule() -> None:
    """The limit on alarms raises `telemetry/storm`. `test_failures.py` covers exceptions, which leave no record."""
    types = [rule.type for rule in alarm_rules()]

    assert len(types) == len(set(types))
    assert set(types) == set(CASES) | {RUN_FAILED, "telemetry/storm"}
    assert [rule.type for rule in alarm_rules() if rule.judge is None] == ["telemetry/storm"]


def test_a_healthy_run_raises_nothing_and_leaves_no_question_open() -> None:
    verdicts = judged(run(200))

    assert alarms(verdicts) == []
    assert {name for verdict in verdicts for name, _ in verdict.events} <= {"task/plateau", "outcome"}
    assert {verdict.values["alarm/active"] for verdict in verdicts} == {0.0}


@cache
def is_instance(key: str, template: str) -> bool:
    """Return True if the key instantiates the template or one of its histories: `{key}` is any key, other labels one segment."""
    pattern = re.escape(template).replace(re.escape("{key}"), ".+")
    return re.fullmatch(re.sub(r"\\\{[a-z_]+\\\}", "[a-z0-9_]+", pattern), key) is not None


@pytest.mark.parametrize("rule", [rule for rule in alarm_rules() if rule.type in CASES], ids=lambda rule: rule.type)
def test_the_keys_that_decide_are_declared_and_the_first_that_is_declared_decides(rule: Any) -> None:
    """The page of a metric then lists exactly the alarms that its value raises, under `decides`."""
    detectors, keys = alone(rule.type), set[str]()
    judge = detectors._judges[rule.type]

    def recorded(view):  # type: ignore[no-untyped-def]
        findings = list(judge(view))
        keys.update(finding.key for finding in findings)
        return findings

    detectors._judges[rule.type] = recorded
    for record in case_records(rule.type):
        detectors.step(record)

    assert [key for key in keys if not any(is_instance(key, template) for template in rule.inputs)] == []
    assert any(is_instance(key, rule.inputs[0]) for key in keys)


def with_keys(records: list[Any], keeps: Callable[[str], bool]) -> list[Any]:
    return [replace(one, values={key: value for key, value in one.values.items() if keeps(key)}) for one in records]


def is_raised(kind: str, records: list[Any]) -> bool:
    detectors = alone(kind)
    return any(detectors.step(record).alarms for record in records)


@pytest.mark.parametrize("rule", [rule for rule in alarm_rules() if rule.type in CASES and rule.required_keys], ids=lambda rule: rule.type)
def test_a_rule_requires_what_its_judge_reads(rule: Any) -> None:
    """The required keys suffice to raise it, so a check with these keys is a real one; if any is missing, it is not raised."""
    records = case_records(rule.type)
    required = [key for keys in rule.required_keys for key in keys]

    assert is_raised(rule.type, with_keys(records, lambda key: any(is_instance(key, name) for name in required)))
    for keys in rule.required_keys:
        instances = {key for one in records for key in one.values if any(is_instance(key, name) for name in keys)}
        assert not is_raised(rule.type, with_keys(records, lambda key, gone=instances: key not in gone))  # type: ignore[misc]


def test_a_rule_without_required_keys_judges_whatever_there_is() -> None:
    """Action tests have five alternatives, one rule follows keys that disappear, and the end of a run is an event, not a record."""
    assert {rule.type for rule in alarm_rules() if not rule.required_keys} == {
        "integrity/actions",
        "telemetry/missing_metric",
        "telemetry/storm",
        RUN_FAILED,
    }
