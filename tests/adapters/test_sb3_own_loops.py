"""Mistakes in a Stable-Baselines3 training loop are named from one step of a sampled update."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import assert_identical
from sb3_models import MODELS, fingerprint, recorded_run
from sb3_own_loops import LOSS_MISTAKES, LOSS_VARIANTS, STEP_MISTAKES, Minibatch, OwnLoopPPO, PaddedRecurrentPPO, cartpole, right_step
from torch import nn

from esper_telemetry.equations.equation import EQUATION_KEY, FITTED_KEY, equations

pytestmark = pytest.mark.sb3

CHECKED = ("gradient", "clipping", "optimizer_step")
SEEDS = (3, 11)

ALIKE = {
    "gradient_policy_missing": {"gradient_advantages_broadcast"},
    "gradient_advantages_broadcast": {"gradient_policy_missing"},
    "gradient_value_missing": {"gradient_target_old_values"},
    "gradient_target_old_values": {"gradient_value_missing"},
}
"""Mistakes that a batch may not distinguish: normalised advantages add up to 0, and a critic without a gradient never moves."""


def model(seed: int = 3, make_loss: Any = Minibatch.loss, take_step: Any = right_step, **changes: Any) -> OwnLoopPPO:
    kind = type("OwnLoop", (OwnLoopPPO,), {"make_loss": staticmethod(make_loss), "take_step": staticmethod(take_step)})
    settings = {"n_steps": 64, "batch_size": 64, "n_epochs": 3, "ent_coef": 0.01, "learning_rate": 2e-3, "device": "cpu"}
    result: OwnLoopPPO = kind("MlpPolicy", cartpole(seed), seed=seed, **{**settings, **changes})
    return result


def first_record(learner: Any, run_dir: Path) -> Mapping[str, float]:
    return recorded_run(learner, run_dir, steps=256).records[0].values


def failed(values: Mapping[str, float]) -> set[str]:
    return {name for name in CHECKED if values[EQUATION_KEY + name] > equations()[name].tolerance_at("fp32")}


def named(values: Mapping[str, float]) -> set[str]:
    """Names of the hypotheses for the checked equations."""
    labels = {key.removeprefix(EQUATION_KEY) for key in values if key.startswith(EQUATION_KEY)}
    return {label for label in labels - set(CHECKED) if label.startswith(CHECKED)}


@pytest.mark.parametrize("climbs", [False, True])
def test_an_optimizer_that_maximises_climbs_the_negative_loss(climbs: bool, tmp_path: Path) -> None:
    settings = {"optimizer_kwargs": {"maximize": True, "eps": 1e-5}}

    values = first_record(model(make_loss=lambda b: -b.loss() if climbs else b.loss(), policy_kwargs=settings), tmp_path)

    assert (failed(values), named(values)) == ((set(), set()) if climbs else ({"gradient"}, {"gradient_sign"}))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", LOSS_MISTAKES)
def test_a_mistake_in_the_loss_is_named(mistake: str, seed: int, tmp_path: Path) -> None:
    values = first_record(model(seed, LOSS_MISTAKES[mistake]), tmp_path)

    label = f"gradient_{mistake}"
    assert failed(values) == {"gradient"}
    assert label in named(values) <= {label} | ALIKE.get(label, set())


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("advantages_raw", "not_normalized"),
        ("advantages_std_alone", "std_alone"),
        ("advantages_reversed", "other_rows"),
        ("policy_sign", None),
        ("policy_summed", None),
    ],
)
def test_advantages_in_use_are_compared_with_those_of_the_rollout(loss: str, name: str | None, tmp_path: Path) -> None:
    """The gradient check detects advantages with another sign or weight."""
    values = first_record(model(make_loss=LOSS_MISTAKES[loss]), tmp_path)

    key = EQUATION_KEY + "normalized_advantages"
    labels = {label for label in values if label.startswith(f"{key}_")}
    assert labels == ({f"{key}_{name}"} if name else set())
    assert (key in values) == (name is not None)


@pytest.mark.parametrize("variant", LOSS_VARIANTS)
def test_a_published_loss_is_named_and_raises_no_alarm(variant: str, tmp_path: Path) -> None:
    values = first_record(model(make_loss=LOSS_VARIANTS[variant]), tmp_path)

    label = f"gradient_{variant}"
    if not failed(values):  # no row of this minibatch differs
        return
    explanations = equations()["gradient"].explanations(values)
    assert label in named(values) and any(one.variant for one in explanations)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", STEP_MISTAKES)
def test_a_mistake_in_the_step_is_named(mistake: str, seed: int, tmp_path: Path) -> None:
    values = first_record(model(seed, take_step=STEP_MISTAKES[mistake], max_grad_norm=0.05), tmp_path)

    equation = next(name for name in CHECKED if mistake.startswith(name))
    assert failed(values) == {equation}
    assert named(values) == {mistake}


def test_a_rate_that_the_loop_does_not_set_is_named_with_its_value(tmp_path: Path) -> None:
    """The schedule falls from 2e-3 to 0 over 1024 steps, so it asks for 1.5e-3 after the first 256; the optimizer keeps its 2e-3."""
    learner = model(learning_rate=lambda remaining: 2e-3 * remaining)
    learner.sets_rate = False
    run = recorded_run(learner, tmp_path, steps=1024, level="debug")

    values = run.records[1].values
    assert named(values) == {"optimizer_step_learning_rate"}
    assert values[FITTED_KEY + "optimizer_step_learning_rate"] == pytest.approx(2e-3, rel=1e-2)


def test_an_optimizer_that_lacks_a_parameter_is_named(tmp_path: Path) -> None:
    learner = model()
    learner.policy.optimizer.param_groups[0]["params"].pop()

    values = first_record(learner, tmp_path)

    assert named(values) == {"optimizer_step_left_out", "gradient_parts_not_cleared"}


def test_a_state_that_is_cleared_in_each_step_is_named_in_each_update(tmp_path: Path) -> None:
    run = recorded_run(model(take_step=STEP_MISTAKES["optimizer_step_state_cleared"]), tmp_path, steps=768, level="debug")

    assert [named(record.values) for record in run.records] == [{"optimizer_step_state_cleared"}] * 3


@pytest.mark.parametrize("another_object", [False, True])
def test_an_optimizer_that_is_new_in_each_update_is_named(another_object: bool, tmp_path: Path) -> None:
    class Forgetful(OwnLoopPPO):
        def train(self) -> None:
            self.policy.optimizer.state.clear()
            if another_object:
                self.policy.optimizer = torch.optim.Adam(self.policy.parameters(), eps=1e-5)
            super().train()

    run = recorded_run(Forgetful("MlpPolicy", cartpole(3), n_steps=64, n_epochs=1, seed=3), tmp_path, steps=1024, level="debug")

    assert not failed(run.records[0].values)  # the new state is correct here
    assert [named(record.values) for record in run.records[1:]] == [{"optimizer_step_state_lost"}] * 3


def test_a_gradient_sign_that_was_changed_in_the_policy_is_named(tmp_path: Path) -> None:
    learner = model()
    right = learner.policy.evaluate_actions

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        values, log_prob, entropy = right(*args, **kwargs)
        return values, 2 * log_prob.detach() - log_prob, entropy

    vars(learner.policy)["evaluate_actions"] = evaluate

    assert named(first_record(learner, tmp_path)) == {"gradient_policy_sign"}


def hide_gradient_of_values(policy: Any) -> None:
    """Make the policy object, not its class, return values without a graph."""
    right = policy.evaluate_actions

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        values, log_prob, entropy = right(*args, **kwargs)
        return values.detach(), log_prob, entropy

    vars(policy)["evaluate_actions"] = evaluate


@pytest.mark.parametrize("name", ["a2c", "recurrent", "maskable", "pendulum"])
def test_values_without_a_gradient_are_named_in_each_algorithm(name: str, tmp_path: Path) -> None:
    learner = MODELS[name]()
    hide_gradient_of_values(learner.policy)
    run = recorded_run(learner, tmp_path, steps=2048 if name == "a2c" else 128)

    label = "gradient_value_missing"
    assert label in named(run.records[0].values) <= {label} | ALIKE[label]


def cut_off(learner: Any, method: str) -> None:
    """Detach the output of the layers before a head, in acting and in training."""
    extractor = learner.policy.mlp_extractor
    compute = getattr(extractor, method)
    vars(extractor)[method] = lambda features: compute(features).detach()


@pytest.mark.parametrize("method", ["forward_actor", "forward_critic"])
def test_layers_that_are_cut_off_from_their_head_are_named(method: str, tmp_path: Path) -> None:
    """The live policy has the mistake, so the recomputed gradient has it, too."""
    learner = model()
    cut_off(learner, method)

    assert named(first_record(learner, tmp_path)) == {"gradient_parts_missing"}


@pytest.mark.parametrize("term", ["policy", "value", ""])
def test_a_term_whose_mean_includes_padding_is_named(term: str, tmp_path: Path) -> None:
    kind = type("Padded", (PaddedRecurrentPPO,), {"padded": term})
    sizes = {"lstm_hidden_size": 8, "net_arch": [8]}
    settings = {"n_steps": 48, "batch_size": 64, "n_epochs": 2, "ent_coef": 0.01, "seed": 3, "device": "cpu"}
    learner = kind("MlpLstmPolicy", cartpole(3), policy_kwargs=sizes, **settings)

    values = recorded_run(learner, tmp_path, steps=192).records[0].values

    assert named(values) == ({f"gradient_{term}_padded"} if term else set())
    assert failed(values) == ({"gradient"} if term else set())


@pytest.mark.parametrize("delta", [1.0, 3.7, 10.0])
def test_a_huber_loss_is_no_mistake(delta: float, tmp_path: Path) -> None:
    """It takes the mean squared error's coefficient, so its coefficient for ½ (V - R)² is half as large."""

    def huber(b: Minibatch) -> torch.Tensor:
        return b.loss(value=nn.functional.huber_loss(b.values, b.returns, delta=delta))

    values = first_record(model(make_loss=huber, gae_lambda=1.0), tmp_path)

    assert failed(values) == {"gradient"}
    assert any(one.variant for one in equations()["gradient"].explanations(values))


def test_an_encoder_that_is_frozen_for_actor_and_critic_is_no_mistake(tmp_path: Path) -> None:
    learner = model()
    for method in ("forward_actor", "forward_critic"):
        cut_off(learner, method)

    assert not failed(first_record(learner, tmp_path))


def test_a_run_of_a2c_that_is_shorter_than_a_record_is_checked(tmp_path: Path) -> None:
    learner = MODELS["a2c"]()
    hide_gradient_of_values(learner.policy)

    (record,) = recorded_run(learner, tmp_path, steps=5 * learner.n_steps * learner.n_envs).records

    assert "gradient_value_missing" in named(record.values)
    assert EQUATION_KEY + "replayed_log_probs" in record.values


def test_a_critic_that_is_cut_off_from_a_shared_trunk_is_named(tmp_path: Path) -> None:
    learner = MODELS["pictures"](ent_coef=0.01)
    policy = learner.policy

    def evaluate(observations: Any, actions: Any) -> Any:
        features = policy.extract_features(observations)
        distribution = policy._get_action_dist_from_latent(policy.mlp_extractor.forward_actor(features))
        values = policy.value_net(policy.mlp_extractor.forward_critic(features.detach()))
        return values, distribution.log_prob(actions), distribution.entropy()

    vars(policy)["evaluate_actions"] = evaluate

    assert named(recorded_run(learner, tmp_path, steps=64).records[0].values) == {"gradient_critic_stopped"}


def test_the_alarm_says_what_the_gradient_equals(tmp_path: Path) -> None:
    run = recorded_run(model(take_step=STEP_MISTAKES["gradient_not_cleared"]), tmp_path, steps=768)

    texts = [alarm.text for alarm in run.alarms if alarm.type == "integrity/equation"]
    assert any(
        "the gradients before clipping equal the sum of this minibatch's gradient and the previous gradient" in text for text in texts
    )


class Noisy(nn.Sequential):
    """Layers that draw random numbers and update statistics."""

    def __init__(self, inputs: int) -> None:
        super().__init__(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))


def noisy(**changes: Any) -> OwnLoopPPO:
    learner = model(**changes)
    torch.manual_seed(0)
    learner.policy.mlp_extractor.policy_net = Noisy(4)
    learner.policy.action_net = nn.Linear(16, 2)
    learner.policy.optimizer = torch.optim.Adam(learner.policy.parameters(), lr=1e-3)
    return learner


def test_dropout_and_batch_norm_give_the_same_gradient(tmp_path: Path) -> None:
    run = recorded_run(noisy(), tmp_path, steps=1024, level="debug")

    assert [failed(record.values) for record in run.records] == [set()] * 4


@pytest.mark.parametrize("make_loss", [Minibatch.loss, LOSS_MISTAKES["no_clip"]])
@pytest.mark.parametrize("make", [model, noisy])
def test_weights_and_generators_are_the_same_without_telemetry(make: Any, make_loss: Any, tmp_path: Path) -> None:
    with_telemetry, without = make(make_loss=make_loss), make(make_loss=make_loss)
    with_telemetry.set_random_seed(5)
    recorded_run(with_telemetry, tmp_path, steps=768, level="debug")
    observed = fingerprint(with_telemetry)
    without.set_random_seed(5)
    without.learn(768)

    assert_identical(observed, fingerprint(without))
