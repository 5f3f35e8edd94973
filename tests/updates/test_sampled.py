"""Sampled updates: whole gradients, their parts and Adam's state, without an effect on training."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_run import rollout, untimed
from torch import Tensor, nn

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.core.metric import segment
from esper_telemetry.events import (
    BackwardEnd,
    HeadsBackward,
    Hooks,
    MinibatchStart,
    OptimizerStep,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.ppo_objective import TrunkOutputs
from esper_telemetry.recording import probes
from esper_telemetry.recording import recorder as recorder_module
from esper_telemetry.recording.probes import GradientProbe
from esper_telemetry.updates import groups
from esper_telemetry.updates.replays import FirstPasses
from esper_telemetry.updates.update import GradientSample

ALIGNMENT = {"grad/align/mean_pair_cos", "grad/align/direction_variance", "grad/sign/agreement"}
ENTRIES = {"grad/zero_frac", "grad/sign/pos_frac", *(f"grad/concentration/{n}" for n in ("entropy", "participation"))}
NOISE = {"grad/gns/g2", "grad/gns/tr_sigma", "grad/gns/noise_dominated"}
STEP = {"opt/update_to_weight", "opt/update_rms_over_lr", "opt/stable_rms", "opt/eps_dominated_frac"}
WEIGHTS = {"opt/weight_growth", "opt/weight_norm/value_weight", "opt/update_to_weight/value_weight"}
SECOND = {"opt/state_reset", "opt/snr_share", "grad/align/successive_cos"}
"""Keys that compare with an earlier sample, or need more than one step of the optimizer."""
SHARED = {"grad/interference/cos", "grad/interference/cancel"}
SAMPLED = ALIGNMENT | ENTRIES | NOISE | STEP | WEIGHTS


def trainer(**settings: Any) -> PPO:
    """A trainer with a constant learning rate. `values_of` trains update by update, and each call would anneal to its own end."""
    config: dict[str, Any] = {"num_steps": 32, "num_epochs": 2, "num_minibatches": 4, "hidden_sizes": (8, 8)}
    config |= {"entropy_coef": 0.01, "anneal_learning_rate": False}
    return PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(**{**config, **settings}))


def recall(**settings: Any) -> PPO:
    config: dict[str, Any] = {"policy": "lstm", "num_steps": 32, "num_epochs": 2, "num_minibatches": 2, "lstm_size": 8}
    config["anneal_learning_rate"] = False
    return PPO(CueRecall(8, seed=0), PPOConfig(**{**config, **settings}))


def values_of(run_dir: Path, source: PPO, *, updates: int, **options: Any) -> list[dict[str, float]]:
    with Telemetry(run_dir=run_dir, **{"offload": False, **options}) as telemetry:
        attach(telemetry, source)
        while source.updates < updates:
            source.learn(source.env_steps + 1)
    return [dict(record.values) for record in read_run(run_dir).records]


@pytest.mark.system
@pytest.mark.parametrize("make", [trainer, recall])
def test_normal_samples_one_update_in_eight(tmp_path: Path, make: Any) -> None:
    records = values_of(tmp_path, make(), updates=9)

    sampled_updates = [update for update, values in enumerate(records, start=1) if set(values) >= SAMPLED]
    assert sampled_updates == [1, 9], SAMPLED - set(records[0])
    assert all(not (SAMPLED | SECOND) & set(values) for values in records[1:8])
    assert set(records[8]) >= SECOND and not SECOND & set(records[0])
    assert all(values["telemetry/sample_every"] == 8 for values in records)


def test_layers_have_a_severity_at_debug_only(tmp_path: Path) -> None:
    (debug,) = values_of(tmp_path / "debug", trainer(), updates=1, level="debug")
    (normal,) = values_of(tmp_path / "normal", trainer(), updates=1)
    layers = {f"grad/layer/value_weight/severity_{name}" for name in ("explode", "vanish")}

    assert layers <= set(debug) and not layers & set(normal)


def test_a_network_of_many_layers_has_a_health_but_no_keys_details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_LAYERS", 3)
    (normal,) = values_of(tmp_path / "normal", trainer(), updates=1)
    (debug,) = values_of(tmp_path / "debug", trainer(), updates=1, level="debug")

    single = ("grad/layer/", "opt/update_to_weight/", "opt/weight_norm/")
    assert not [key for key in normal if key.startswith(single)]
    assert 0 < normal["grad/health"] <= 1
    assert all(any(key.startswith(start) for key in debug) for start in single)


def test_debug_samples_every_step_of_every_update(tmp_path: Path) -> None:
    records = values_of(tmp_path, trainer(), updates=3, level="debug")

    assert all(set(values) >= SAMPLED for values in records)
    assert all(set(values) >= SECOND for values in records[1:])
    assert "opt/snr_share" in records[0]


@pytest.mark.parametrize(("room", "steps"), [(1.0, range(8)), (0.65, range(0, 8, 2)), (0.4, (0, 4)), (0.0, (0,))])
def test_of_a_large_network_steps_are_left_out_evenly(
    tmp_path: Path, room: float, steps: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trainer()
    size = sum(parameter.numel() for parameter in source.policy.parameters())
    monkeypatch.setattr(probes, "VECTORS_BESIDES_STATES", 0)
    monkeypatch.setattr(probes, "MAX_TRAVELLING_ENTRIES", int(room * 8 * 4 * size))
    samples: list[GradientSample] = []
    take = GradientProbe.take

    def kept_too(probe: GradientProbe) -> GradientSample | None:
        sample = take(probe)
        samples.extend([] if sample is None else [sample])
        return sample

    monkeypatch.setattr(GradientProbe, "take", kept_too)

    values_of(tmp_path, source, updates=1, level="debug")

    assert [int(state.step[0]) - 1 for state in samples[0].states] == list(steps)


def test_minimal_knows_the_health_without_a_sample(tmp_path: Path) -> None:
    (values,) = values_of(tmp_path / "minimal", trainer(), updates=1, level="minimal")
    (normal,) = values_of(tmp_path / "normal", trainer(), updates=1)

    assert 0.9 < values["grad/health"] <= 1.0
    assert values["grad/health"] == pytest.approx(normal["grad/health"], abs=0.05)


def test_a_shared_trunk_has_a_cosine_of_its_parameters(tmp_path: Path) -> None:
    shared, apart = (values_of(tmp_path / str(flag), trainer(shared_trunk=flag), updates=1)[0] for flag in (True, False))

    assert -1 <= shared["grad/interference/cos"] <= 1 and 0 <= shared["grad/interference/cancel"] <= 1
    assert not SHARED & set(apart)


def test_the_cosine_is_that_of_the_two_losses_own_gradients(tmp_path: Path) -> None:
    """Compared with plain autograd: each loss of the first minibatch, backed up on its own through the whole network."""
    source = trainer(shared_trunk=True)
    alone: dict[str, Tensor] = {}
    losses, optimize = source._losses, source._optimize

    def both(batch: Any, epoch: int, step: int) -> Tensor:
        if step == 0:
            (output,) = source.policy.trunks(batch.observations)
            weighted = {name: source._weights[name] * loss for name, loss in losses(batch, TrunkOutputs(output, output)).losses.items()}
            parameters = list(source.policy.actor.parameters())
            terms = {"actor": weighted["policy"] + weighted["entropy"], "critic": weighted["value"]}
            for name, loss in terms.items():
                parts = torch.autograd.grad(loss, parameters, retain_graph=True)
                alone[name] = torch.cat([part.reshape(-1) for part in parts])
        return optimize(batch, epoch, step)

    source._optimize = both  # type: ignore[method-assign]  # wraps the optimizer step
    (values,) = values_of(tmp_path, source, updates=1)

    cosine = torch.nn.functional.cosine_similarity(alone["actor"].double(), alone["critic"].double(), 0)
    assert values["grad/interference/cos"] == pytest.approx(float(cosine), abs=1e-5)


@pytest.mark.parametrize("part", ["heads", "value"])
def test_a_frozen_part_of_the_network_is_no_obstacle(tmp_path: Path, part: str) -> None:
    source = trainer(shared_trunk=True)
    getattr(source.policy, part).requires_grad_(False)

    (values,) = values_of(tmp_path, source, updates=1, level="debug")

    assert set(values) >= ALIGNMENT | NOISE | STEP
    assert (set(values) >= SHARED) == (part != "actor")


def test_sparse_gradients_of_changing_size_are_sampled_as_far_as_they_compare(tmp_path: Path) -> None:
    """A user's trainer whose embedding uses two rows in one minibatch and three in the next."""
    embedding = nn.Embedding(9, 2, sparse=True)
    hooks = Hooks()
    source = type("Source", (), {"hooks": hooks})()
    with Telemetry(run_dir=tmp_path, offload=False, level="debug") as telemetry:
        attach(telemetry, source)
        hooks.emit(rollout(torch.zeros(4, 2)))
        for step, rows in enumerate(([1, 2], [1, 2], [3, 4, 5])):
            embedding.weight.grad = None
            embedding(torch.tensor(rows)).sum().backward()
            norms = torch.tensor([len(rows) * 2.0]).sqrt()
            hooks.emit(BackwardEnd(0, step, {"weight": embedding.weight}, ("weight",), norms, None))
        hooks.emit(UpdateEnd(1, 8, 3, 1e-3, {}))

    values = read_run(tmp_path).records[0].values
    assert values["grad/align/mean_pair_cos"] == pytest.approx(1.0)
    assert values["grad/global/norm_preclip_max"] == pytest.approx(6**0.5)


def test_every_head_has_a_gradient_and_so_has_the_bonus(tmp_path: Path) -> None:
    (factored,) = values_of(tmp_path / "a", recall(entropy_coef=0.01), updates=1)
    (greedy,) = values_of(tmp_path / "b", trainer(entropy_coef=0.0), updates=1)
    heads = {key for key in factored if key.startswith("grad/head/")}

    assert heads == {f"grad/head/{name}/norm" for name in recall().env.action_specs}
    assert factored["grad/value/norm"] > 0 and factored["grad/entropy/norm"] > 0
    assert greedy["grad/value/norm"] > 0 and "grad/entropy/norm" not in greedy


@pytest.mark.system
def test_a_new_optimizer_in_mid_training_is_noticed_at_the_next_sample(tmp_path: Path) -> None:
    source = trainer()
    with Telemetry(run_dir=tmp_path, offload=False, level="debug") as telemetry:
        attach(telemetry, source)
        source.learn(300)
        source.optimizer = torch.optim.Adam(source.policy.parameters(), lr=1e-3)
        source.learn(source.env_steps + 1)

    resets = [record.values["opt/state_reset"] for record in read_run(tmp_path).records[1:]]
    assert resets == [0.0] * (len(resets) - 1) + [float(len(list(source.policy.parameters())))]


def test_hooks_of_a_probe_are_gone_as_soon_as_they_have_enough(tmp_path: Path) -> None:
    """Eight steps in two epochs: the optimizer is read after the first and the last but one, whole gradients in the first epoch."""
    source = trainer()
    wanted = []
    types = (MinibatchStart, OptimizerStep)
    source.hooks.on(BackwardEnd, lambda event: wanted.append([source.hooks.wants(kind) for kind in types]))

    values_of(tmp_path, source, updates=3)

    assert wanted[:8] == [[True, True], *[[True, False]] * 5, [True, True], [True, False]]
    assert wanted[8:] == [[False, False]] * 16


@pytest.mark.system
@pytest.mark.parametrize("make", [trainer, recall])
def test_a_sample_too_large_to_travel_is_measured_on_the_spot(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = values_of(tmp_path / "small", make(), updates=2, level="debug")
    monkeypatch.setattr(recorder_module, "MAX_TRAVELLING_ENTRIES", 10)
    large = values_of(tmp_path / "large", make(), updates=2, level="debug")

    assert [untimed(values) for values in small] == [untimed(values) for values in large]


def weights_after(source: PPO, telemetry: Telemetry | None) -> list[Tensor]:
    if telemetry is not None:
        attach(telemetry, source)
    source.learn(3 * 256)
    return list(source.policy.state_dict().values())


@pytest.mark.system
@pytest.mark.parametrize("make", [trainer, recall])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_training_does_not_notice(make: Any, shared_trunk: bool) -> None:
    bare = weights_after(make(shared_trunk=shared_trunk), None)
    with Telemetry([lambda record: None], run_dir=None, level="debug") as telemetry:
        watched = weights_after(make(shared_trunk=shared_trunk), telemetry)

    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


@pytest.mark.system
def test_a_baseline_that_starts_anew_is_an_event_in_the_journal(tmp_path: Path) -> None:
    """Thirty norms of about 1, then fifty of 1000: with the fiftieth, the baseline restarts."""
    hooks = Hooks()
    source = type("Source", (), {"hooks": hooks})()
    weight = nn.Parameter(torch.zeros(1))
    facts = {"groups": {"actor": ["weight"]}, "max_grad_norm": 0.5}
    with Telemetry(run_dir=tmp_path, offload=False) as telemetry:
        attach(telemetry, source)
        hooks.emit(RunStart({}, facts))
        for update in range(1, 83):
            hooks.emit(rollout(torch.zeros(4, 2)))
            weight.grad = torch.full((1,), 1.0 if update <= 30 else 1000.0)
            hooks.emit(BackwardEnd(0, 0, {"weight": weight}, ("weight",), weight.grad.abs(), 0.5))
            hooks.emit(UpdateEnd(update, 8 * update, update, 1e-3, {}))

    changes = [(event.axes, event.data) for event in read_run(tmp_path).events if event.type == "rebaseline"]
    assert [(axes.update if axes else None, data) for axes, data in changes] == [(80, {"keys": ["grad/actor/norm_preclip"]})]


REPLAYED = {"policy/kl_post", "repr/drift_cos", "repr/capacity_loss"}


@pytest.mark.system
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(trainer, id="mlp", marks=pytest.mark.slow),
        pytest.param(recall, id="lstm"),
        pytest.param(lambda: trainer(shared_trunk=True), id="shared"),
        pytest.param(lambda: recall(policy="gru"), id="gru", marks=pytest.mark.slow),
    ],
)
def test_a_worker_shows_the_rollout_to_a_copy_of_the_policy(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = values_of(tmp_path / "here", make(), updates=2, level="debug")
    monkeypatch.setattr(FirstPasses, "take", no_pass)

    there = values_of(tmp_path / "there", make(), updates=2, level="debug", offload=True)

    assert set(here[0]) >= REPLAYED
    for one, other in zip(here, there, strict=True):
        assert untimed(other) == pytest.approx(untimed(one), nan_ok=True, rel=1e-6, abs=1e-9)


def no_pass(*arguments: object) -> None:
    raise AssertionError("the policy itself passes the rollout")


def test_debug_shows_in_which_layer_actor_and_critic_or_two_heads_conflict(tmp_path: Path) -> None:
    """Cosines of the first minibatch's gradients, which the test backs up to each parameter itself."""
    source = recall(shared_trunk=True, entropy_coef=0.01)
    names = {id(parameter): segment(name) for name, parameter in source.parameters.items()}
    expected: dict[str, float] = {}

    def by_layer(output: Tensor, parameters: Sequence[Tensor], one: Tensor, other: Tensor) -> dict[str, float]:
        gradients = (torch.autograd.grad(output, parameters, g, retain_graph=True) for g in (one, other))
        cosines = [nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(*gradients, strict=True)]
        return {names[id(parameter)]: float(cos) for parameter, cos in zip(parameters, cosines, strict=True)}

    def of_losses(event: TrunkBackward) -> None:
        if event.step == 0:
            cosines = by_layer(event.outputs[0], event.shared, event.actor, event.critic)
            expected.update({f"grad/layer/{layer}/interference_cos": cos for layer, cos in cosines.items()})

    def of_heads(event: HeadsBackward) -> None:
        if event.step == 0:
            cosines = by_layer(event.output, list(event.parameters.values()), event.heads["op"], event.heads["arg"])
            expected.update({f"grad/layer/{layer}/heads_cos": cos for layer, cos in cosines.items()})

    source.hooks.on(TrunkBackward, of_losses)
    source.hooks.on(HeadsBackward, of_heads)
    (values,) = values_of(tmp_path, source, updates=1, level="debug")

    assert len(expected) == 2 * len(list(source.policy.actor.parameters()))
    assert {key: values[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    assert -1 <= values["grad/heads/op_vs_arg/cos"] <= 1
