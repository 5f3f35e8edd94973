"""Checks use copies of the policy: a thread that acts meanwhile sees the unchanged policy, even if a check raises."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from esper_telemetry import Telemetry, read_run
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.core.event_parts import FirstMinibatch
from esper_telemetry.core.facts import UNCHECKED_FACT
from esper_telemetry.core.minibatch_objective import MinibatchObjective
from esper_telemetry.events import AfterUpdate, BackwardEnd, BeforeUpdate, Hooks, MinibatchStart

pytestmark = pytest.mark.sb3

CHECKED = (BeforeUpdate, MinibatchStart, MinibatchObjective, FirstMinibatch, BackwardEnd, AfterUpdate)
"""Events in whose course the policy is checked."""

in_pass: Callable[[nn.Module], object] = bool  # tests replace it
"""Called with the network in the middle of each pass."""


class Features(BaseFeaturesExtractor):
    """Has buffers, a mode, dropout and an attribute that each pass sets. A check moves the weights of the detached layer."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 8)
        self.cut_off, self.used = nn.Linear(4, 8), nn.Linear(4, 8)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.passes = 0

    def forward(self, observations: Tensor) -> Tensor:
        self.passes += 1
        features = self.norm(self.cut_off(observations).detach() + self.used(observations))
        in_pass(self)
        result: Tensor = self.dropout(features)
        return result


def model() -> PPO:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"policy_kwargs": {"features_extractor_class": Features}, "normalize_advantage": False}
    return PPO("MlpPolicy", make_vec_env("CartPole-v1", 2), n_steps=32, batch_size=32, n_epochs=2, seed=0, **settings)


def acted(policy: Any) -> list[Any]:
    """The outputs that an acting thread computes, and everything they depend on."""
    latent = policy.mlp_extractor.policy_net(policy.features_extractor.used(torch.ones(3, 4)))
    tensors = [policy.action_net(latent), policy.value_net(latent), *policy.parameters(), *policy.buffers()]
    states = [(module.training, getattr(module, "passes", 0)) for module in policy.modules()]
    distribution = vars(policy.action_dist).get("distribution")
    return [*(tensor.detach().numpy().tobytes() for tensor in tensors), states, id(distribution)]


class Actor:
    """A thread acts in the middle of each pass of a check.

    Attributes:
        states: the state during each check, after the states before it and before the states after it.
        weights_differ: whether a check has used weights other than the policy's.
    """

    def __init__(self, policy: Any, monkeypatch: pytest.MonkeyPatch, *, raised_in: int) -> None:
        self.policy, self.raised_in = policy, raised_in
        self.states: list[list[Any]] = []
        self.weights_differ = False
        self._passes, self._is_checked = 0, False
        self._emit = Hooks.emit
        monkeypatch.setattr(Hooks, "emit", lambda hooks, event: self.emit(hooks, event))
        monkeypatch.setitem(globals(), "in_pass", self.act)

    def emit(self, hooks: Hooks, event: Any) -> None:
        if not isinstance(event, CHECKED):
            self._emit(hooks, event)
            return
        self.states.append([acted(self.policy)])
        self._passes, self._is_checked = 0, True
        self._emit(hooks, event)
        self._is_checked = False
        self.states[-1].append(acted(self.policy))

    def act(self, network: Any) -> None:
        if self._is_checked:
            self._passes += 1
            thread = threading.Thread(target=lambda: self.states[-1].append(acted(self.policy)))
            thread.start()
            thread.join()
            weights = self.policy.features_extractor.cut_off.weight
            self.weights_differ |= not torch.equal(network.cut_off.weight, weights)
            if self._passes == self.raised_in:
                raise ArithmeticError("in the middle of a check")


def trained(own: PPO, run_dir: Path, **settings: Any) -> PPO:
    with Telemetry([], level="debug", run_dir=run_dir, offload=False, **settings) as telemetry:
        return own.learn(3 * 64, callback=TelemetryCallback(telemetry))


@pytest.mark.parametrize("raised_in", [0, 1, 3])
def test_a_thread_that_acts_during_checks_sees_the_policy_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised_in: int) -> None:
    """The third pass after a backward pass uses moved weights."""
    alone = model().learn(3 * 64)
    own = model()
    actor = Actor(own.policy, monkeypatch, raised_in=raised_in)

    trained(own, tmp_path)

    assert sum(len(states) > 2 for states in actor.states) >= 6, "checks take passes"
    assert actor.weights_differ == (raised_in != 1)
    assert all(state == states[0] for states in actor.states for state in states)
    weights = zip(alone.policy.state_dict().values(), own.policy.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_policy_that_cannot_be_copied_is_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = model()
    vars(own.policy)["lock"] = threading.Lock()

    trained(own, tmp_path)

    run = read_run(tmp_path)
    values, reason = (run.records[0].values, "the policy cannot be copied: TypeError: cannot pickle '_thread.lock' object")
    assert "integrity/equation/optimizer_step" in values
    assert {"integrity/equation/gradient", "integrity/equation/replayed_log_probs", "policy/kl_post"}.isdisjoint(values)
    assert run.info.facts[UNCHECKED_FACT]["gradient"] == reason
    assert reason in caplog.text
