"""Numbers of `TelemetryCallback` compared with a second computation from the saved rollout, policy and generators."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_models
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from esper_telemetry import Telemetry, read_run, watch_pair
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.core.record import Record
from esper_telemetry.events import BackwardEnd, HeadsBackward, RolloutEnd, TrunkBackward

pytestmark = pytest.mark.sb3

CASES = ("ppo", "pendulum", "recurrent", "maskable", "a2c", "multi_discrete", "pictures")


class SavingCallback(BaseCallback):
    """Saves buffer, policy and generator at the beginning of every update."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[tuple[Any, Any, Any]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        self.saved.append((copy.deepcopy(model.rollout_buffer), copy.deepcopy(model.policy), np.random.get_state()))


class PlainUpdate:
    """An update computed a second time from the saved data, in plain torch."""

    def __init__(self, model: Any, buffer: Any, policy: Any, rng_state: Any) -> None:
        self.model, self.policy = model, policy
        self.log_ratio: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.used: list[Tensor] = []
        self.norms: list[dict[str, float]] = []
        self.policy_losses: list[float] = []
        self.value_losses: list[float] = []
        before = np.random.get_state()
        np.random.set_state(rng_state)
        policy.set_training_mode(True)
        for _ in range(getattr(model, "n_epochs", 1)):
            for samples in buffer.get(getattr(model, "batch_size", None)):
                self.step(samples)
        np.random.set_state(before)

    def step(self, samples: Any) -> None:
        actions = samples.actions
        if isinstance(self.model.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        more: list[Any] = [samples.lstm_states, samples.episode_starts] if hasattr(samples, "lstm_states") else []
        named: dict[str, Any] = {"action_masks": samples.action_masks} if hasattr(samples, "action_masks") else {}
        values, log_probs, entropy = self.policy.evaluate_actions(samples.observations, actions, *more, **named)
        keep = samples.mask.bool() if hasattr(samples, "mask") else torch.ones(len(log_probs), dtype=torch.bool)
        log_probs, old = log_probs[keep], samples.old_log_prob[keep]
        advantages, values, returns = samples.advantages[keep], values.flatten()[keep], samples.returns[keep]
        if self.model.normalize_advantage:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (log_probs - old).exp()
        if hasattr(self.model, "clip_range"):
            loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
        else:
            loss = -(advantages * log_probs).mean()
        if getattr(self.model, "clip_range_vf", None) is not None:
            old_values = samples.old_values[keep]
            values = old_values + (values - old_values).clamp(-0.2, 0.2)
        error = (returns - values).square().mean()
        total = loss + self.model.vf_coef * error - self.model.ent_coef * entropy[keep].mean()
        self.policy.optimizer.zero_grad()
        total.backward()
        self.norms.append(self._norms())
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.model.max_grad_norm)
        self.policy.optimizer.step()
        self.log_ratio.append((log_probs - old).detach())
        self.entropy.append(entropy[keep].detach())
        self.used.append(advantages.detach())
        self.policy_losses.append(loss.item())
        self.value_losses.append(error.item() / 2)

    def _norms(self) -> dict[str, float]:
        squares = {name: p.grad.square().sum().item() for name, p in self.policy.named_parameters() if p.grad is not None}
        whole = sum(squares.values()) ** 0.5
        of = {
            "actor": ("policy_net", "action_net", "lstm_actor", "log_std"),
            "critic": ("value_net", "lstm_critic"),
            "lstm": ("lstm_",),
            "shared": ("features_extractor.",),
        }
        by_group = {
            group: sum(square for name, square in squares.items() if any(part in name for part in parts)) ** 0.5
            for group, parts in of.items()
        }
        return {**by_group, "global": whole, "applied": min(whole, self.model.max_grad_norm)}


@pytest.fixture(scope="module", params=CASES)
def saved_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any, list[Record]]:
    model, saving = sb3_models.MODELS[request.param](), SavingCallback()
    run_dir = tmp_path_factory.mktemp("sb3") / "run"
    with Telemetry([], run_dir=run_dir, offload=False) as telemetry:
        model.learn(384, callback=[TelemetryCallback(telemetry, updates_per_record=1), saving])
    return request.param, model, saving.saved, list(read_run(run_dir).records)


@pytest.fixture(scope="module")
def updates(saved_run: tuple[str, Any, Any, list[Record]]) -> list[tuple[Any, PlainUpdate, Mapping[str, float]]]:
    """The saved buffer, the second computation and the record of each update."""
    _, model, saved, records = saved_run
    assert len(saved) == len(records) >= 3
    return [(copy.deepcopy(k[0]), PlainUpdate(model, *copy.deepcopy(k)), r.values) for k, r in zip(saved, records, strict=True)]


def close(value: float, rel: float = 2e-4, abs: float = 1e-7) -> Any:
    return pytest.approx(value, rel=rel, abs=abs)


def test_ratios_of_every_minibatch(updates: Any) -> None:
    for _, plain, values in updates:
        rows = torch.cat(plain.log_ratio).double()
        ratio = rows.exp()
        assert values["policy/kl"] == close((ratio - 1 - rows).mean().item(), abs=1e-6)
        assert values["policy/ratio/max"] == close(ratio.max().item())
        assert values["policy/ratio/min"] == close(ratio.min().item())
        assert values["integrity/ratio_init"] <= 1e-6
        assert values["integrity/ratio_init"] == close(plain.log_ratio[0].abs().max().item(), abs=1e-6)
        if "policy/clip_frac" in values:
            moved = torch.cat(plain.log_ratio[1:]).exp()  # before the first step every ratio is inside the trust region
            assert values["policy/clip_frac"] == close(((moved - 1).abs() > 0.2).double().mean().item(), abs=1e-3)


def test_divergence_of_the_last_epoch_equals_their_log(saved_run: Any) -> None:
    name, _, _, records = saved_run
    if name == "a2c":
        pytest.skip("A2C logs none")
    for record in records:
        assert record.values["policy/kl_last"] == close(record.values["sb3/train/approx_kl"], abs=1e-6)
        assert record.values["value/explained_variance"] == close(record.values["sb3/train/explained_variance"], abs=1e-4)


def test_gradients_before_and_after_clipping_by_group(updates: Any) -> None:
    for _, plain, values in updates:
        for group in ("global", "actor", "critic", "lstm", "shared"):
            expected = float(np.mean([norms[group] for norms in plain.norms]))
            assert values.get(f"grad/{group}/norm_preclip", 0.0) == close(expected), group
        assert values["grad/global/norm_postclip"] == close(float(np.mean([norms["applied"] for norms in plain.norms])))


def test_losses_and_entropy(updates: Any) -> None:
    for _, plain, values in updates:
        assert values["policy/entropy"] == close(torch.cat(plain.entropy).mean().item(), abs=1e-5)
        counts = [len(rows) for rows in plain.log_ratio]
        assert values["loss/policy"] == close(float(np.average(plain.policy_losses, weights=counts)), abs=1e-6)
        assert values["loss/value"] == close(float(np.average(plain.value_losses, weights=counts)))


def test_advantages_before_normalisation_and_as_used(updates: Any) -> None:
    for buffer, plain, values in updates:
        advantages, returns = buffer.advantages.astype(np.float64), buffer.returns.astype(np.float64)
        assert values["adv/raw/mean"] == close(advantages.mean(), abs=1e-6)
        assert values["adv/raw/std"] == close(advantages.std())
        assert values["ret/mean"] == close(returns.mean(), abs=1e-6)
        assert values["adv/norm/mean"] == close(torch.cat(plain.used).double().mean().item(), abs=1e-5)
        fit = 1 - (returns - buffer.values).var() / returns.var()
        assert values["value/explained_variance"] == close(fit, abs=1e-5)
        assert values["integrity/gae_identity"] < 1e-5


def test_temporal_differences_separate_termination_from_a_time_limit(updates: Any) -> None:
    """The temporal difference is the advantage less its carry: the buffer's recursion, inverted."""
    for buffer, plain, values in updates:
        model = plain.model
        carry = np.zeros_like(buffer.advantages)
        carry[:-1] = model.gamma * model.gae_lambda * (1 - buffer.episode_starts[1:]) * buffer.advantages[1:]
        assert values["value/td/mean"] == close((buffer.advantages - carry).mean(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("name", "sizes"), [("multi_discrete", [3, 2]), ("multi_binary", [1, 1, 1])])
def test_gradients_of_parts_of_an_action_are_rows_of_one_layer(name: str, sizes: list[int], tmp_path: Path) -> None:
    """The norm of each part is the norm of its rows, weights and biases together."""
    model = sb3_models.MODELS[name]()
    norms: list[list[float]] = []

    def before_clipping(_: Any) -> None:
        layer = model.policy.action_net
        rows = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1).double().split(sizes)
        norms.append([float(part.norm()) for part in rows])

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        callback = TelemetryCallback(telemetry)
        callback.hooks.on(BackwardEnd, before_clipping)
        model.learn(128, callback=callback)

    (record,) = read_run(tmp_path / "run").records
    means = np.mean(norms, 0)
    for index, mean in enumerate(means):
        assert record.values[f"grad/head/action_{index}/norm"] == close(mean, rel=1e-5)


@pytest.mark.parametrize("name", ["ppo", "recurrent", "a2c", "pictures"])
def test_constant_observations_of_one_environment_are_reported(name: str, tmp_path: Path) -> None:
    """The first environment yields ones from the third rollout on. A2C joins rollouts in one record, in whose first rollout they vary."""
    model = sb3_models.MODELS[name]()
    policy_sees = model.env.step_wait

    def step_wait() -> Any:
        observations, *rest = policy_sees()
        if model.num_timesteps > model.n_steps * model.n_envs * 2:
            observations[0] = 1
        return observations, *rest

    model.env.step_wait = step_wait
    values = [record.values for record in sb3_models.recorded_run(model, tmp_path / "run", steps=768).records]

    assert values[0]["obs/constant_frac"] == 0
    assert values[-1]["obs/constant_frac"] == (0 if name == "a2c" else 1 / model.n_envs)


def test_steps_are_those_of_the_data(saved_run: Any) -> None:
    name, model, saved, records = saved_run
    rollout = model.n_steps * model.n_envs
    assert [record.axes.env_step for record in records] == [rollout * (index + 1) for index in range(len(saved))]
    assert [record.axes.update for record in records] == list(range(1, len(saved) + 1))
    if name != "a2c":  # A2C dumps its log every hundredth update
        assert [r.values["sb3/time/total_timesteps"] for r in records] == [r.axes.env_step for r in records]
    per_update = sum(1 for _ in copy.deepcopy(saved[0][0]).get(getattr(model, "batch_size", None)))
    per_update *= getattr(model, "n_epochs", 1)
    assert records[-1].axes.gradient_step == per_update * len(records)


def test_episodes_are_those_of_the_monitor(saved_run: Any) -> None:
    name, model, _, records = saved_run
    recent = [episode["r"] for episode in model.ep_info_buffer]
    if recent:
        assert records[-1].values["episode/return_mean_100"] == close(float(np.mean(recent)))
    assert sum(record.values.get("episode/count", 0) for record in records) == len(recent), name


def test_memory_is_measured(saved_run: Any) -> None:
    name, _, saved, records = saved_run
    memory = {key for key in records[0].values if key.startswith("lstm/")}
    assert bool(memory) == (name == "recurrent")
    if name == "recurrent":
        buffer = saved[-1][0]
        alive = 1 - buffer.episode_starts[:, None, :, None]
        expected = float(np.sqrt(np.square(buffer.hidden_states_pi * alive).mean()))
        assert records[-1].values["lstm/h/rms"] == close(expected, rel=1e-3)
        assert any("gate" in key or "forget" in key for key in memory)


def test_forbidden_actions_are_never_chosen(tmp_path: Path) -> None:
    records = sb3_models.recorded_run(sb3_models.maskable(), tmp_path).records

    assert all(record.values["integrity/mask_violation"] == 0 for record in records)
    assert all(record.values["policy/entropy"] <= np.log(3) + 1e-6 for record in records)


@pytest.mark.parametrize("make", [sb3_models.ppo, sb3_models.pendulum, sb3_models.recurrent])
def test_a_module_beside_its_host_and_the_gradient_of_the_bonus(make: Any, tmp_path: Path) -> None:
    """Weights are unchanged; the head's intensity is its gradient's root mean square, and a Gaussian bonus pulls with c √(D / N)."""
    bare = make(ent_coef=0.01)
    bare.learn(384)
    theirs = sb3_models.fingerprint(bare)
    model = make(ent_coef=0.01)
    with Telemetry([], run_dir=tmp_path) as telemetry:
        callback = TelemetryCallback(telemetry)
        head = model.policy.action_net
        watch_pair(telemetry, callback, "head", module=head, host=model.policy.mlp_extractor)
        intensities: list[list[float]] = []

        def keep(event: BackwardEnd) -> None:
            intensities[-1].append(float(torch.cat([as_vector(p.grad) for p in head.parameters()]).square().mean().sqrt()))

        callback.hooks.on(RolloutEnd, lambda _: intensities.append([]))
        callback.hooks.on(BackwardEnd, keep)
        model.learn(384, callback=callback)

    for record, expected in zip(read_run(tmp_path).records, intensities, strict=True):
        assert record.values["grad/pair/head/connected"] == 1
        assert record.values["grad/pair/head/intensity"] == pytest.approx(np.mean(expected), rel=1e-5)
        assert record.values["grad/pair/head/upstream"] > 0
        if make is sb3_models.pendulum:
            assert record.values["grad/entropy/norm"] == pytest.approx(0.01 / model.batch_size**0.5)
        else:
            assert record.values["grad/entropy/norm"] > 0
    ours = sb3_models.fingerprint(model)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize(("name", "heads"), [("multi_discrete", 2), ("multi_binary", 3)])
def test_gradients_through_the_heads_add_up_to_the_actors(name: str, heads: int, tmp_path: Path) -> None:
    """The gradients are taken at the input of the last layer; the record compares each pair."""
    model = sb3_models.MODELS[name]()
    through: list[HeadsBackward] = []
    whole: list[TrunkBackward] = []
    with Telemetry([], run_dir=tmp_path, level="debug") as telemetry:
        callback = TelemetryCallback(telemetry)
        callback.hooks.on(HeadsBackward, through.append)
        callback.hooks.on(TrunkBackward, whole.append)
        model.learn(256, callback=callback)

    assert len(through) == len(whole) > 0
    for event, both in zip(through, whole, strict=True):
        assert len(event.heads) == heads
        torch.testing.assert_close(sum(event.heads.values()), both.actor, rtol=0, atol=1e-7)
        assert {part.split(".")[0] for part in event.parameters} == {"mlp_extractor"}
    for record in read_run(tmp_path).records:
        pairs = [key for key in record.values if key.startswith("grad/heads/")]
        assert len(pairs) == heads * (heads - 1) // 2
        assert "grad/layer/mlp_extractor_policy_net_0_weight/heads_cos" in record.values


def as_vector(gradient: Tensor | None) -> Tensor:
    return torch.as_tensor(gradient).flatten()
