"""Lifecycle of seeds: transitions, action masks, weight curves, gates, gradient health, the watchdog, checkpoints."""

from dataclasses import replace

import pytest
import torch
from growing import play, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_telemetry.lab.morphogenesis import feedback
from esper_telemetry.lab.morphogenesis import training as watchdog
from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS, RandomController
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.feedback import CAUSES, CauseHistory, diagnose, exploding, vanishing
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthStep
from esper_telemetry.lab.morphogenesis.kinds import Op, Stage
from esper_telemetry.lab.morphogenesis.slots import CURVES, GATES, TRANSITIONS, Slots, progress

LEGAL = {(a, b) for a, after in TRANSITIONS.items() for b in after} | {(stage, stage) for stage in Stage}


@pytest.mark.system
def test_no_transition_is_illegal_under_random_actions() -> None:
    """100,000 environment steps: 1,024 environments for 98 steps. The last step of an episode begins the next one."""
    env = tiny(1024, slots=3)

    transitions = set()
    for number, (before, after, _) in enumerate(play(env, 98)):
        if (number + 1) % env.horizon:
            pairs = zip(before.flatten().tolist(), after.flatten().tolist(), strict=True)
            transitions |= {(Stage(a), Stage(b)) for a, b in set(pairs)}

    assert transitions <= LEGAL
    assert {after for _, after in transitions} == set(Stage) - {Stage.UNKNOWN}


@pytest.mark.system
def test_masks_never_forbid_to_wait_and_always_leave_a_slot() -> None:
    env, choose = tiny(64), RandomController(1)
    for _ in range(64):
        masks = env.action_masks()
        assert masks["op"][:, Op.WAIT].all() and masks["blueprint"].any(1).all()
        assert (masks["slot"].any(-1) | ~masks["op"]).all()
        env.step(choose(env))


@pytest.mark.system
def test_features_stay_in_range_with_nonfinite_weights() -> None:
    env, choose = tiny(16), RandomController(2)
    for number in range(64):
        if number == 20:
            env.colony.hosts[3] = torch.nan
        observations = env.step(choose(env)).observations
        assert observations.shape == (16, len(env.observation_names))
        assert observations.isfinite().all() and observations.abs().max() <= 1


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_shaping_telescopes(gamma: float) -> None:
    """The first state has potential 0, so the discounted sum of the shaping over an episode is 0."""
    env, shaping = tiny(32, gamma=gamma), list[torch.Tensor]()
    weight = feedback.REWARDS["shaped"]["shaping"]
    env.hooks.on(GrowthStep, lambda event: shaping.append(event.rewards["shaping"] / weight))

    play(env, env.horizon)

    assert max(part.abs().max() for part in shaping) > 1
    total = sum(gamma**t * part.double() for t, part in enumerate(shaping))
    assert torch.as_tensor(total).abs().max() < 1e-3


@pytest.mark.parametrize("mode", feedback.REWARDS)
def test_rewards_are_the_sum_of_their_components(mode: str) -> None:
    env, sums = tiny(reward=mode), list[torch.Tensor]()
    env.hooks.on(GrowthStep, lambda event: sums.append(torch.stack(list(event.rewards.values())).sum(0)))

    paid = [reward for _, _, reward in play(env, 40)]

    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(paid, sums, strict=True))


@given(st.integers(1, 8), st.sampled_from(range(len(CURVES))))
@settings(max_examples=50, deadline=None)
def test_curves_are_monotonic_from_0_to_1(epochs: int, curve: int) -> None:
    done = torch.arange(epochs + 1)
    way = progress(done, torch.full_like(done, epochs), torch.full_like(done, curve))

    assert way[0].abs() < 1e-6 and (way[-1] - 1).abs() < 1e-6
    assert (way.diff() >= 0).all()


def test_the_cosine_is_half_way_at_half_time() -> None:
    one = torch.tensor([1])

    assert progress(one, one * 2, one * CURVES.index("cosine")).item() == pytest.approx(0.5)


def holding(**changes: float) -> Slots:
    """Return a slot that can be fossilised."""
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
def test_gates_open_where_their_checks_hold(gate: str, changes: dict[str, float], permissive: bool, strict: bool) -> None:
    """At an accuracy of 0.7. The seed began its stage at 0.6999, or at 0.69 if the gate tests an improvement."""
    slots = holding(**{"anchor": 0.6999, **changes})
    (tested,) = [one for one in GATES if one.name == gate]
    accuracy = torch.tensor([0.7])

    assert tested.passed(slots, accuracy, strict=False).item() is permissive
    assert tested.passed(slots, accuracy, strict=True).item() is strict


def test_severities_are_half_at_their_limits() -> None:
    """Exploding: ten times the clip limit of 1. Vanishing: 1e-5 of it."""
    assert exploding(torch.tensor([10.0, 100.0, 1.0, 0.0, torch.inf])).tolist() == pytest.approx([0.5, 1, 0, 0, 1])
    assert vanishing(torch.tensor([1e-5, 1e-3, 0.0, torch.nan])).tolist() == pytest.approx([0.5, 0, 1, 0], abs=1e-6)
    assert holding(exploding=0.5, vanishing=0.2).health.item() == pytest.approx(0.5)


def causes_after(seed: float, host: float, upstream: float, alpha: float = 1.0) -> str:
    """Return the cause for a seed after eight constant epochs (gradient 1e-3, host 1, upstream 0.1) and one with these values."""
    one, history = torch.ones(1, 1), CauseHistory.fresh(1, 1, torch.device("cpu"))
    steps = [(1e-3, 1.0, 0.1, 1.0)] * 8 + [(seed, host, upstream, alpha)]
    for s, h, u, a in steps:
        parts = {"seed": s * one, "host": h * one, "upstream": u * one, "alpha": a * one}
        history, cause = diagnose(history, one * s / h, counted=one.bool(), **parts)
    return CAUSES[int(cause)]


def test_causes_distinguish_dormant_saturated_and_fast_hosts() -> None:
    assert causes_after(0.1, 1.0, 0.1) == "ok"
    assert causes_after(1e-6, 1.0, 1e-4) == "dormant"
    assert causes_after(1e-6, 1.0, 0.1) == "saturated"
    assert causes_after(1e-3, 10.0, 0.1) == "host_fast"
    assert causes_after(0.0, 1.0, 0.0) == "disconnected"
    assert causes_after(0.0, 1.0, 0.0, alpha=0.0) == "dormant"
    assert causes_after(1e-3, 1.0, 0.1) == "indeterminate"


def test_a_gradient_that_is_zero_from_birth_is_lost_inside_the_seed() -> None:
    """The loss reaches the seed, but all of its units are dead, so no epoch has a gradient to compare with."""
    history, zero, one = CauseHistory.fresh(1, 1, torch.device("cpu")), torch.zeros(1, 1), torch.ones(1, 1)
    for _ in range(6):
        history, cause = diagnose(history, zero, zero, one, one, counted=one.bool(), alpha=one)
        assert CAUSES[int(cause)] == "saturated"


def test_nonfinite_gradients_have_a_cause_and_leave_no_trace_in_the_history() -> None:
    """The epochs after a rollback are judged like the first epochs of a seed."""
    history, one = CauseHistory.fresh(1, 1, torch.device("cpu")), torch.ones(1, 1)
    causes = []
    for host in (1.0, 1.0, torch.nan, 1.0, 1.0):
        parts = {"seed": 1e-3 * one, "host": host * one, "upstream": one}
        history, cause = diagnose(history, 1e-3 * one, counted=one.bool(), alpha=one, **parts)
        causes.append(CAUSES[int(cause)])

    assert causes == ["indeterminate", "indeterminate", "nonfinite", "indeterminate", "indeterminate"]
    assert all(part.isfinite().all() for part in history)


def test_layers_that_diverge_explode_and_vanish_in_one_epoch() -> None:
    """Units near zero leave their output weights without a gradient. Large output weights multiply the input weights' gradient."""
    env, events = tiny(1, slots=1), list[GrowthStep]()
    env.hooks.on(GrowthStep, events.append)
    slots = env.slots
    slots.set(torch.ones(1, 1, dtype=torch.bool), stage=Stage.TRAINING, blueprint=2, life=3)  # an mlp
    seed = env.colony.network.seed.unpack(env.colony.seeds[:, 0])
    seed["enter"].fill_(1e-9)
    seed["leave"].copy_(1e4 * torch.randn(seed["leave"].shape, generator=torch.Generator().manual_seed(0)))

    env.step({name: torch.zeros(1, dtype=torch.int64) for name in env.action_specs})

    columns = {name: events[0].seeds[name].item() for name in ("exploding", "vanishing", "strongest", "weakest")}
    parameters = events[0].labels["parameter"]
    assert columns["exploding"] >= 0.5 and columns["vanishing"] >= 0.5
    assert parameters[int(columns["strongest"])] == "enter" and parameters[int(columns["weakest"])] == "leave"
    assert slots.vanishing.item() == 0  # the gradient of the whole seed, which the controller observes


def verdict(losses: list[float], classes: int = 10) -> watchdog.WatchdogVerdict:
    watch = watchdog.TrainingWatchdog.fresh(1, torch.device("cpu"))
    for loss in losses:
        watch, last = watchdog.watch_losses(watch, torch.tensor([loss]), classes)
    return last


def test_the_watchdog_detects_three_kinds_of_failure() -> None:
    """ln 10 = 2.303 is the loss of guessing."""
    healthy = [0.5] * 12

    assert not verdict(healthy).panic
    assert verdict([*healthy, torch.nan]).nonfinite
    assert verdict([*healthy, 2.3]).lobotomy and not verdict([0.5, 2.3]).lobotomy
    assert not verdict([*healthy, 50.0, 50.0]).divergence and verdict([*healthy, 50.0, 50.0, 50.0]).divergence
    assert not verdict([*healthy, 50.0, 50.0, 0.5, 50.0]).divergence


def wait(env: Morphogenesis) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(env.num_envs, dtype=torch.int64) for name in env.action_specs}


def test_no_snapshot_is_taken_of_a_host_whose_loss_rises() -> None:
    """Epochs 15 to 17 diverge before the watchdog acts. It restores the weights from before them."""
    env = tiny(2)
    for _ in range(14):
        env.step(wait(env))
    loss = env.host.val_loss[0].item()
    for _ in range(watchdog.DIVERGENCE_EPOCHS):
        env.colony.hosts[0] *= 1e3
        env.step(wait(env))

    assert env.host.val_loss[0] > 12
    env.step(wait(env))
    assert env.host.val_loss[0] < 2 * loss


def test_slots_without_a_seed_stay_empty_after_a_roll_back() -> None:
    """The snapshot holds a seed that was pruned later."""
    env = tiny(1, slots=1)
    stage = torch.ones(1, 1, dtype=torch.bool)
    env.slots.set(stage, stage=Stage.TRAINING, blueprint=2)
    env.colony.seeds.fill_(0.1)
    env.step(wait(env))
    env.slots.set(stage, stage=Stage.DORMANT)
    env.colony.drop(stage)
    env.colony.hosts[0] = torch.nan
    env.step(wait(env))

    assert env.colony.hosts.isfinite().all() and not env.colony.seeds.any()


def test_patience_ends_the_episode_of_a_broken_host() -> None:
    """Host 1 breaks in the third epoch and is replaced. The episode of host 0 has all eight epochs."""
    env, counted = tiny(2, horizon=8, patience=100), list[torch.Tensor]()
    env.hooks.on(GrowthStep, lambda event: counted.append(event.history.epochs))
    ended = []
    for number in range(1, 12):
        if number == 3:
            env.colony.hosts[1] = torch.nan
        ended.append(env.step(wait(env)).terminated.tolist())

    assert [number for number, (first, _) in enumerate(ended, 1) if first] == [8]
    assert [number for number, (_, second) in enumerate(ended, 1) if second] == [3, 11]
    assert [int(epochs[0]) for epochs in counted] == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    assert [int(epochs[1]) for epochs in counted] == [1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]


def test_patience_waits_for_seeds_that_grow() -> None:
    """No host improves because none learns. Host 1 has a seed in training."""
    env = tiny(2, slots=1, patience=4)
    env.colony.task = replace(env.colony.task, learning_rate=0.0)
    env.slots.set(torch.tensor([[False], [True]]), stage=Stage.TRAINING)

    ended = [env.step(wait(env)).terminated.tolist() for _ in range(5)]

    assert ended == [[False, False]] * 3 + [[True, False]] + [[False, False]]


def test_a_broken_host_is_rolled_back_and_the_others_are_unchanged() -> None:
    """The seeds of the broken host are pruned."""
    broken, healthy = (tiny(4) for _ in range(2))
    for env in (broken, healthy):
        play(env, 12)
    broken.colony.hosts[2] = torch.nan

    steps = [env.step(wait(env)) for env in (broken, healthy)]

    others = torch.tensor([0, 1, 3])
    assert broken.colony.hosts.isfinite().all() and broken.colony.seeds.isfinite().all()
    assert torch.equal(broken.colony.hosts[others], healthy.colony.hosts[others])
    assert torch.equal(steps[0].rewards[others], steps[1].rewards[others])
    alive = {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING}
    assert not alive & set(broken.slots.stage[2].tolist())


@pytest.mark.system
@pytest.mark.parametrize("patience", [None, 3])
@pytest.mark.parametrize("task", ["synthetic", "digits", "text"])
def test_a_restored_environment_continues_bit_identically(task: str, patience: int | None) -> None:
    env, restored = (tiny(4, task=task, patience=patience) for _ in range(2))
    play(env, 40)
    restored.load_state_dict(env.state_dict())

    for a, b in zip(play(env, 40, seed=5), play(restored, 40, seed=5), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(env.colony.hosts, restored.colony.hosts)


def test_a_state_of_an_earlier_version_is_restored() -> None:
    """The old state has one epoch for all environments, and no severities."""
    env, restored = tiny(2), tiny(2)
    play(env, 10)
    state = env.state_dict()
    epoch = int(state["epoch"][0])
    host = {**state["host"], "epoch": epoch / env.horizon}
    old = {name: part for name, part in state.items() if name != "severities"} | {"epoch": epoch, "host": host}
    restored.load_state_dict(old)

    for a, b in zip(play(env, 30), play(restored, 30), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_state_of_another_layout_is_refused() -> None:
    env = tiny(2)

    with pytest.raises(ValueError, match="laid out by version 1, got a state of version 0"):
        env.load_state_dict({**env.state_dict(), "layout": 0})


@pytest.mark.system
def test_hooks_do_not_change_training() -> None:
    hooked, plain = tiny(4), tiny(4)
    hooked.hooks.on(GrowthStep, lambda event: None)
    play(hooked, 40)
    play(plain, 40)

    assert torch.equal(hooked.colony.hosts, plain.colony.hosts)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_choose_what_is_possible(name: str) -> None:
    env, choose = tiny(16), SCRIPTS[name](0)
    ops = set()
    for _ in range(64):
        actions, masks = choose(env), env.action_masks()
        rows = torch.arange(16)
        assert masks["op"][rows, actions["op"]].all()
        assert masks["slot"][rows, actions["op"], actions["slot"]].all()
        assert (masks["blueprint"][rows, actions["blueprint"]] | (actions["op"] != Op.GERMINATE)).all()
        ops |= set(actions["op"].tolist())
        env.step(actions)

    assert {Op.WAIT, Op.GERMINATE, Op.ADVANCE} <= ops


@pytest.mark.system
def test_the_oracle_scores_above_hosts_without_seeds() -> None:
    grown, unchanged = (Morphogenesis(16, seed=0) for _ in range(2))
    choose = SCRIPTS["oracle"](0)
    for _ in range(32):
        grown.step(choose(grown))
        unchanged.step(wait(unchanged))

    assert grown.score.mean() > unchanged.score.mean() + 0.1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"task": "chess"}, "task must be one of synthetic, digits, text, got 'chess'"),
        ({"slots": 5}, "slots must be at most 4, got 5"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"reward": "gold"}, "reward must be one of shaped, basic, sparse, got 'gold'"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, got 'lion'"),
        ({"horizon": 1}, "horizon must be at least 2, got 1"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Morphogenesis(2, **setting)  # type: ignore[arg-type]
