"""Every fault breaks training, and restores the trainer afterwards."""

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from faults_builders import cartpole, learn, pendulum, recall, recorded
from ppo_builders import equal, weights
from torch import Tensor

from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.events import MinibatchEnd
from esper_telemetry.lab.faults import FAULTS, NotApplicableError, find, inject, schedule
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env

Values = Mapping[str, float]
Effect = Callable[[Values, Values], bool]
"""Condition on the values of the first broken update and of the same update of a healthy run."""


def rises(key: str, bound: float) -> Effect:
    return lambda now, usual: now[key] > bound > usual[key]


def becomes(key: str, value: float) -> Effect:
    return lambda now, usual: now[key] == value != usual[key]


def multiplies(key: str, factor: float, tolerance: float = 1e-6) -> Effect:
    return lambda now, usual: now[key] == pytest.approx(factor * usual[key], rel=tolerance)


def loses(key: str) -> Effect:
    return lambda now, usual: key not in now and key in usual


EFFECTS: dict[str, Effect] = {
    "lr_x100": multiplies("opt/lr", 100),
    "lr_x10": multiplies("opt/lr", 10),
    "lr_zero": becomes("opt/update_to_weight", 0),
    "lr_period6": multiplies("opt/lr", 10 ** (3**0.5 / 2)),  # sin(2π/6) = √3/2
    "lr_leak": multiplies("opt/lr", 1.03),
    "epochs_x5": multiplies("gradient_steps", 5),
    "vf_x1000": rises("grad/global/norm_preclip_max", 100),
    "loss_sign": lambda now, usual: now["policy/surrogate_gain"] < 0 < usual["policy/surrogate_gain"],
    "entropy_sign": lambda now, usual: now["loss/entropy"] > 0 > usual["loss/entropy"],
    "adam_beta2": becomes("reward/absmax", 0),
    "bf16_log_probs": rises("integrity/ratio_init", 1e-3),
    "reward_1e4": multiplies("reward/absmax", 1e4),
    "nan_reward": rises("numerics/nonfinite", 0.5),
    "adv_x100": rises("integrity/adv_norm", 1),
    "adv_sign": rises("integrity/gae_identity", 1e-3),
    "stale_adv": rises("integrity/gae_identity", 1e-3),
    "returns_shuffled": rises("integrity/gae_identity", 1e-3),
    "obs_mismatch": rises("integrity/ratio_init", 1e-3),
    "h0_zero": rises("integrity/ratio_init", 1e-5),
    "mask_bug": rises("integrity/ratio_init", 1e-3),
    "no_reset": lambda now, usual: now["lstm/reset_rate"] < usual["lstm/reset_rate"] / 2,  # the ends before it still count
    "ent0_strong": becomes("reward/absmax", 5),
    "stuck_normalizer": rises("norm/obs/clip_frac", 0.1),
    "dead_relu": becomes("grad/layer/actor_encoder_layers_0_weight/norm", 0),
    "forget_m10": becomes("lstm/gate/f/sat_lo", 1),
    "forget_p10": becomes("lstm/gate/f/sat_hi", 1),
    "frozen_trunk": loses("grad/shared/norm_preclip"),
    "detached_head": loses("grad/head_arg/norm_preclip"),
    "saturated_head": lambda now, usual: now["policy/head/arg/entropy_norm"] < 0.01 < usual["policy/head/arg/entropy_norm"],
}
BY_EVENTS = {"repeated_minibatches", "constant_observations", "swapped_ends"}


def make(fault: str) -> PPO:
    return cartpole(normalize_observations=True) if fault == "stuck_normalizer" else recall()


@cache
def usual(*, normalized: bool) -> Values:
    return second(cartpole(normalize_observations=True) if normalized else recall(), None)


@cache
def healthy_weights(calls: tuple[int, ...], *, normalized: bool) -> list[Tensor]:
    """Weights after calls of `learn` with these numbers of updates."""
    trainer = cartpole(normalize_observations=True) if normalized else recall()
    for updates in calls:
        learn(trainer, updates)
    return weights(trainer)


def second(trainer: PPO, fault: str | None) -> Values:
    """Values of the second update, the first broken one."""
    records = recorded(trainer, fault, updates=2)
    steps = records[1].axes.gradient_step - records[0].axes.gradient_step
    return {**records[1].values, "gradient_steps": steps}


@cache
def broken_values(fault: str) -> Values:
    return second(make(fault), fault)


def test_every_fault_has_its_effect_tested() -> None:
    assert {fault.name for fault in FAULTS} == set(EFFECTS) | BY_EVENTS


@pytest.mark.parametrize("fault", EFFECTS)
def test_a_fault_shows_in_the_first_broken_update(fault: str) -> None:
    assert EFFECTS[fault](broken_values(fault), usual(normalized=fault == "stuck_normalizer"))


@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
def test_a_fault_is_undone_bit_for_bit(fault: str) -> None:
    restored = make(fault)
    learn(restored, 1)

    with inject(restored, fault):
        pass
    learn(restored, 1)

    assert equal(healthy_weights((1, 1), normalized=fault == "stuck_normalizer"), weights(restored))


@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS if not fault.noisy])
def test_broken_updates_change_weights_and_nothing_else(fault: str) -> None:
    broken = make(fault)
    before = surroundings(broken)

    with inject(broken, fault):
        learn(broken, 2)

    assert not equal(healthy_weights((2,), normalized=fault == "stuck_normalizer"), weights(broken))
    assert surroundings(broken) == before


def surroundings(trainer: PPO) -> list[object]:
    """Return the parts of a trainer that are not learned."""
    groups = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in trainer.optimizer.param_groups]
    trained = [parameter.requires_grad for parameter in trainer.policy.parameters()]
    return [trainer.steps, trainer.config, groups, trained, trainer.collector.env, trainer.normalizers.observations]


@pytest.mark.parametrize("fault", ["obs_mismatch", "h0_zero", "mask_bug"])
def test_other_inputs_in_training_than_in_acting_are_named(fault: str) -> None:
    assert any(EQUATION_KEY + label in broken_values(fault) for label in find(fault).hypotheses)


def test_repeated_minibatches_hold_the_same_rows() -> None:
    trainer, rows = recall(num_epochs=1), []
    trainer.hooks.on(MinibatchEnd, lambda event: rows.append(event.rows))

    with inject(trainer, "repeated_minibatches"):
        learn(trainer, 1)

    assert len(rows) == 2
    assert torch.equal(rows[0], rows[1])


def test_one_environment_gives_constant_observations() -> None:
    trainer = cartpole()

    with inject(trainer, "constant_observations"):
        observations = trainer.collector.collect().observations

    assert bool((observations[1:, 0] == 1).all())
    assert not bool((observations[1:, 1:] == 1).all())


def test_termination_and_time_limit_are_exchanged() -> None:
    """All episodes of CueRecall terminate."""
    trainer = recall()

    with inject(trainer, "swapped_ends"):
        swapped = trainer.collector.collect()
        assert bool(swapped.ended.any())
        assert not bool(swapped.terminated.any())

    right = trainer.collector.collect()
    assert bool(right.ended.any())
    assert bool((right.terminated == right.ended).all())


def test_a_scheduled_fault_begins_and_ends_with_its_updates() -> None:
    trainer, rates = recall(), []
    schedule(trainer, "lr", dose=4, at_update=2, until=4)

    for _ in range(4):
        learn(trainer, 1)
        rates.append(round(trainer.optimizer.param_groups[0]["lr"] / trainer.config.learning_rate))

    assert rates == [1, 4, 4, 1]


def test_a_scheduled_fault_can_be_cancelled() -> None:
    trainer, healthy = recall(), recall()

    schedule(trainer, "dead_relu", at_update=2)()
    learn(trainer, 2)
    learn(healthy, 2)

    assert equal(weights(trainer), weights(healthy))


def test_faults_may_be_taken_back_in_any_order() -> None:
    trainer = recall()
    before = surroundings(trainer)

    first = schedule(trainer, "vf_x1000", at_update=1)
    second = schedule(trainer, "h0_zero", at_update=1)
    first()
    second()

    assert surroundings(trainer) == before


def test_a_family_knows_its_doses() -> None:
    """A dose of 30 is slightly nearer to 10 than to 100: log 3 against log 3.3."""
    assert find("lr", 30).name == "lr_x10"
    assert find("lr", 300).name == "lr_x100"
    assert find("forget", -2).name == "forget_m10"
    assert find("forget", 4).name == "forget_p10"


@pytest.mark.parametrize(
    ("fault", "trainer", "sentence"),
    [
        ("h0_zero", cartpole, "h0_zero does not apply to CartPole-v1: its policy has no memory"),
        ("dead_relu", cartpole, "dead_relu does not apply to CartPole-v1: no layer with ReLU reads its observations"),
        ("mask_bug", cartpole, "mask_bug does not apply to CartPole-v1: it has no action masks"),
        ("detached_head", cartpole, "detached_head does not apply to CartPole-v1: its actions have one part"),
        ("ent0_strong", pendulum, "ent0_strong does not apply to Pendulum-v1: its actions are continuous"),
        ("stuck_normalizer", recall, "stuck_normalizer does not apply to cue-recall: its observations are not normalised"),
    ],
)
def test_a_fault_says_in_a_sentence_why_it_does_not_apply(fault: str, trainer: Callable[[], PPO], sentence: str) -> None:
    broken = trainer()
    before = surroundings(broken)

    with pytest.raises(NotApplicableError) as refusal, inject(broken, fault):
        pass

    assert str(refusal.value) == sentence
    assert surroundings(broken) == before


def test_what_a_trainer_cannot_have_is_refused() -> None:
    gru = PPO(make_env("cue-recall", num_envs=4), PPOConfig(policy="gru", num_steps=8, lstm_size=8))
    with pytest.raises(NotApplicableError, match="its policy has no LSTM"), inject(gru, "forget_m10"):
        pass
    with pytest.raises(NotApplicableError, match="its learning rate follows the KL"):
        schedule(recall(desired_kl=0.01), "lr_x10", at_update=1)
    learn(passed := recall(), 1)
    with pytest.raises(ValueError, match="at_update must come after the 1 updates already made, got 1"):
        schedule(passed, "lr_x10", at_update=1)


@pytest.mark.parametrize("fault", ["frozen_trunk", "dead_relu"])
def test_separate_networks_can_be_broken_too(fault: str) -> None:
    trainer = cartpole(activation="relu")

    values = second(trainer, fault)

    assert values.get("grad/layer/actor_layers_0_weight/norm", 0) == 0
    assert values["grad/layer/heads_action_linear_bias/norm"] > 0
