"""Lives of seeds: only legal transitions, masks that always leave a choice, weights that move along their curves, gates, the watchdog."""

from __future__ import annotations

import pytest
import torch
from growing import play, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_telemetry.lab.morphogenesis import Morphogenesis, rewards
from esper_telemetry.lab.morphogenesis import training as watchdog
from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS, RandomController
from esper_telemetry.lab.morphogenesis.gradient_health import CAUSES, CauseHistory, diagnose, exploding, vanishing
from esper_telemetry.lab.morphogenesis.slots import (
    CURVES,
    GATES,
    TRANSITIONS,
    Op,
    Slots,
    Stage,
    TransitionGates,
    progress,
)
from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

LEGAL = {(a, b) for a, after in TRANSITIONS.items() for b in after} | {(stage, stage) for stage in Stage}


def test_no_transition_is_illegal_under_random_actions() -> None:
    """100,000 steps of environments: 1,024 of them for 98 steps; the last step of an episode begins another."""
    env = tiny(1024, slots=3)

    seen = set()
    for number, (before, after, _) in enumerate(play(env, 98)):
        if (number + 1) % env.horizon:
            pairs = zip(before.flatten().tolist(), after.flatten().tolist(), strict=True)
            seen |= {(Stage(a), Stage(b)) for a, b in set(pairs)}

    assert seen <= LEGAL
    assert {after for _, after in seen} == set(Stage) - {Stage.UNKNOWN}


def test_masks_never_forbid_to_wait_and_always_leave_a_slot() -> None:
    env, choose = tiny(64), RandomController(1)
    for _ in range(64):
        masks = env.action_masks()
        assert masks["op"][:, Op.WAIT].all() and masks["blueprint"].any(1).all()
        assert (masks["slot"].any(-1) | ~masks["op"]).all()
        env.step(choose(env))


def test_features_stay_in_range_whatever_happens_to_the_weights() -> None:
    env, choose = tiny(16), RandomController(2)
    for number in range(64):
        if number == 20:
            env.colony.hosts[3] = torch.nan
        observations = env.step(choose(env)).observations
        assert observations.shape == (16, len(env.observation_names))
        assert observations.isfinite().all() and observations.abs().max() <= 1


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_shaping_telescopes(gamma: float) -> None:
    """The first state has no potential, so discounted shaping adds up to nothing over every episode."""
    env, seen = tiny(32, gamma=gamma), list[torch.Tensor]()
    weight = rewards.REWARDS["shaped"]["shaping"]
    env.hooks.on(GrowthStep, lambda event: seen.append(event.rewards["shaping"] / weight))

    play(env, env.horizon)

    assert max(part.abs().max() for part in seen) > 1
    total = sum(gamma**t * part.double() for t, part in enumerate(seen))
    assert torch.as_tensor(total).abs().max() < 1e-3


@pytest.mark.parametrize("mode", rewards.REWARDS)
def test_rewards_are_the_sum_of_what_is_told(mode: str) -> None:
    env, told = tiny(reward=mode), list[torch.Tensor]()
    env.hooks.on(GrowthStep, lambda event: told.append(torch.stack(list(event.rewards.values())).sum(0)))

    paid = [reward for _, _, reward in play(env, 40)]

    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(paid, told, strict=True))


@given(st.integers(1, 8), st.sampled_from(range(len(CURVES))))
@settings(max_examples=50, deadline=None)
def test_curves_go_from_nothing_to_all_and_never_back(epochs: int, curve: int) -> None:
    done = torch.arange(epochs + 1)
    found = progress(done, torch.full_like(done, epochs), torch.full_like(done, curve))

    assert found[0].abs() < 1e-6 and (found[-1] - 1).abs() < 1e-6
    assert (found.diff() >= 0).all()


def test_the_cosine_is_half_way_at_half_time() -> None:
    one = torch.tensor([1])

    assert progress(one, one * 2, one * CURVES.index("cosine")).item() == pytest.approx(0.5)


def holding(**changes: float) -> Slots:
    """One slot that might be fossilised."""
    slots = Slots.empty(1, 1, torch.device("cpu"))
    good = {"stage": Stage.HOLDING, "norm": 0.5, "exploding": 0.1, "ratio": 0.1, "contribution": 0.005, "target": 1.0}
    slots.set(torch.ones(1, 1, dtype=torch.bool), **{**good, **changes})
    return slots


@pytest.mark.parametrize(
    ("gate", "changes", "permissive", "strict"),
    [
        ("g5", {}, True, False),
        ("g5", {"contribution": 0.02}, True, True),
        ("g5", {"contribution": -1.0}, False, False),
        ("g5", {"exploding": 0.8}, False, False),
        ("g2", {"age": 3}, True, False),
        ("g2", {"age": 3, "anchor": 0.69}, True, True),
        ("g2", {"age": 2}, False, False),
        ("g2", {"age": 3, "exploding": 0.8, "anchor": 0.69}, False, True),
        ("g2", {"age": 3, "norm": -1.0}, False, False),
        ("g3", {}, True, False),
        ("g3", {"age": 3}, True, True),
        ("g3", {"target": 0.5, "age": 3}, False, False),
        ("g3", {"total": 4, "done": 2, "age": 3}, False, False),
    ],
)
def test_gates_open_for_what_they_ask(gate: str, changes: dict[str, float], permissive: bool, strict: bool) -> None:
    """At an accuracy of 0.7; the seed began its stage at 0.695 unless said otherwise, half a point below, which is rounded."""
    slots = holding(**{"anchor": 0.6999, **changes})
    (found,) = [one for one in GATES if one.name == gate]
    accuracy = torch.tensor([0.7])

    assert TransitionGates().passed(found, slots, accuracy).item() is permissive
    assert TransitionGates(strict=True).passed(found, slots, accuracy).item() is strict


def test_severities_are_half_where_the_flags_were() -> None:
    """Ten times the limit of 1; a 100,000th of it."""
    assert exploding(torch.tensor([10.0, 100.0, 1.0, 0.0, torch.inf])).tolist() == pytest.approx([0.5, 1, 0, 0, 1])
    assert vanishing(torch.tensor([1e-5, 1e-3, 0.0, torch.nan])).tolist() == pytest.approx([0.5, 0, 1, 0], abs=1e-6)
    assert holding(exploding=0.5, vanishing=0.2).health.item() == pytest.approx(0.5)


def causes_after(seed: float, host: float, upstream: float, alpha: float = 1.0) -> str:
    """Cause of a seed that was steady for eight epochs (gradient 1e-3, host 1, upstream 0.1) and now is like this."""
    one, history = torch.ones(1, 1), CauseHistory.fresh(1, 1, torch.device("cpu"))
    steps = [(1e-3, 1.0, 0.1, 1.0)] * 8 + [(seed, host, upstream, alpha)]
    for s, h, u, a in steps:
        parts = {"seed": s * one, "host": h * one, "upstream": u * one, "alpha": a * one}
        history, cause = diagnose(history, one * s / h, counted=one.bool(), **parts)
    return CAUSES[int(cause)]


def test_a_dormant_seed_is_told_from_a_fast_host_and_a_saturated_one() -> None:
    assert causes_after(0.1, 1.0, 0.1) == "ok"
    assert causes_after(1e-6, 1.0, 1e-4) == "dormant"
    assert causes_after(1e-6, 1.0, 0.1) == "saturated"
    assert causes_after(1e-3, 10.0, 0.1) == "host_fast"
    assert causes_after(0.0, 1.0, 0.0) == "disconnected"
    assert causes_after(0.0, 1.0, 0.0, alpha=0.0) == "dormant"
    assert causes_after(1e-3, 1.0, 0.1) == "indeterminate"


def verdict(losses: list[float], classes: int = 10) -> watchdog.WatchdogVerdict:
    """Of the last loss."""
    watch = watchdog.TrainingWatchdog.fresh(1, torch.device("cpu"))
    for loss in losses:
        watch, found = watchdog.watch_losses(watch, torch.tensor([loss]), classes)
    return found


def test_the_watchdog_knows_three_ways_to_break() -> None:
    """ln 10 = 2.303 is the loss of guessing."""
    well = [0.5] * 12

    assert not verdict(well).panic
    assert verdict([*well, torch.nan]).nonfinite
    assert verdict([*well, 2.3]).lobotomy and not verdict([0.5, 2.3]).lobotomy
    assert not verdict([*well, 50.0, 50.0]).divergence and verdict([*well, 50.0, 50.0, 50.0]).divergence
    assert not verdict([*well, 50.0, 50.0, 0.5, 50.0]).divergence


def test_a_broken_host_gets_its_weights_back_and_its_neighbours_notice_nothing() -> None:
    """The reward is less by the penalty, and the seeds that lived are pruned."""
    broken, whole = (tiny(4) for _ in range(2))
    for env in (broken, whole):
        play(env, 12)
    broken.colony.hosts[2] = torch.nan

    wait = {name: torch.zeros(4, dtype=torch.int64) for name in broken.action_specs}
    steps = [env.step(wait) for env in (broken, whole)]

    others = torch.tensor([0, 1, 3])
    assert broken.colony.hosts.isfinite().all() and broken.colony.seeds.isfinite().all()
    assert torch.equal(broken.colony.hosts[others], whole.colony.hosts[others])
    assert torch.equal(steps[0].rewards[others], steps[1].rewards[others])
    alive = {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING}
    assert not alive & set(broken.slots.stage[2].tolist())


@pytest.mark.parametrize("task", ["synthetic", "digits", "text"])
def test_a_checkpoint_goes_on_bit_by_bit(task: str) -> None:
    env, again = tiny(4, task=task), tiny(4, task=task)
    play(env, 40)
    again.load_state_dict(env.state_dict())

    for a, b in zip(play(env, 40, seed=5), play(again, 40, seed=5), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(env.colony.hosts, again.colony.hosts)


def test_a_state_of_another_layout_is_refused() -> None:
    env = tiny(2)

    with pytest.raises(ValueError, match="laid out by version 1, got a state of version 0"):
        env.load_state_dict({**env.state_dict(), "layout": 0})


def test_who_listens_changes_nothing() -> None:
    heard, silent = tiny(4), tiny(4)
    heard.hooks.on(GrowthStep, lambda event: None)
    play(heard, 40)
    play(silent, 40)

    assert torch.equal(heard.colony.hosts, silent.colony.hosts)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_choose_what_is_possible(name: str) -> None:
    env, choose = tiny(16), SCRIPTS[name](0)
    done = set()
    for _ in range(64):
        actions, masks = choose(env), env.action_masks()
        rows = torch.arange(16)
        assert masks["op"][rows, actions["op"]].all()
        assert masks["slot"][rows, actions["op"], actions["slot"]].all()
        assert (masks["blueprint"][rows, actions["blueprint"]] | (actions["op"] != Op.GERMINATE)).all()
        done |= set(actions["op"].tolist())
        env.step(actions)

    assert {Op.WAIT, Op.GERMINATE, Op.ADVANCE} <= done


def test_a_seed_grown_by_one_who_knows_pays() -> None:
    """The oracle's hosts end at least ten points of accuracy above those that nobody touches."""
    grown, left = (Morphogenesis(16, seed=0) for _ in range(2))
    choose = SCRIPTS["oracle"](0)
    wait = {name: torch.zeros(16, dtype=torch.int64) for name in left.action_specs}
    for _ in range(32):
        grown.step(choose(grown))
        left.step(wait)

    assert grown.score.mean() > left.score.mean() + 0.1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"task": "chess"}, "task must be one of synthetic, digits, text, got 'chess'"),
        ({"slots": 5}, "slots must be at most 4, got 5"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"reward": "gold"}, "reward must be one of shaped, basic, sparse, got 'gold'"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, got 'lion'"),
        ({"horizon": 1}, "horizon must be at least 2, got 1"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(setting: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Morphogenesis(2, **setting)  # type: ignore[arg-type]
