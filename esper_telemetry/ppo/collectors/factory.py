"""The collector for a kind of environment."""

from __future__ import annotations

from esper_telemetry.ppo.collectors.host import Collector
from esper_telemetry.ppo.collectors.tensors import TensorCollector
from esper_telemetry.ppo.environments.protocol import Environment, TensorEnvironment
from esper_telemetry.ppo.environments.wrappers import on_host
from esper_telemetry.ppo.normalizer import Normalizers
from esper_telemetry.ppo.policy import ActorCritic


def collector_for(
    env: Environment, policy: ActorCritic, normalizers: Normalizers, *, num_steps: int, seed: int, greedy: bool = False
) -> Collector | TensorCollector:
    """Return the collector for that kind of environment; tensor environments on the host are stepped as arrays."""
    if not isinstance(env, TensorEnvironment):
        return Collector(env, policy, num_steps, seed, normalizers, greedy=greedy)
    if env.device.type == policy.value.weight.device.type == "cpu":
        return Collector(on_host(env), policy, num_steps, seed, normalizers, greedy=greedy)
    return TensorCollector(env, policy, num_steps, seed, normalizers, greedy=greedy)
