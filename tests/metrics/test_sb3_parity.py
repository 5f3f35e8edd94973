"""The numbers that Stable-Baselines3 logs for an update, from the rows that its `train` uses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import explained_variance
from torch import Tensor
from torch.distributions import Categorical

from esper_telemetry.core.group import pack
from esper_telemetry.history.critic import CriticMoments, VarianceAverage, critic_fit
from esper_telemetry.metrics.entropy import entropy_stats
from esper_telemetry.metrics.ratio import ratio_diagnostics
from esper_telemetry.metrics.values import value_fit

MINIBATCHES = 4


class Watched:
    """One update of SB3's PPO: its minibatches' rows, and its log."""

    def __init__(self, directory: Path) -> None:
        model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=32, n_epochs=1, seed=0, device="cpu")
        model.set_logger(configure(str(directory), []))
        self.old: list[Tensor] = []
        self.new: list[Tensor] = []
        self.logits: list[Tensor] = []
        model.policy.evaluate_actions = self._seen(model)  # type: ignore[method-assign] # no other place has them
        model.learn(128)
        self.logged: dict[str, Any] = model.logger.name_to_value
        buffer = model.rollout_buffer
        self.values, self.returns = buffer.values.flatten(), buffer.returns.flatten()

    def _seen(self, model: PPO) -> Any:
        evaluate, get = model.policy.evaluate_actions, model.rollout_buffer.get

        def batches(size: int | None = None) -> Any:
            for batch in get(size):
                self.old.append(batch.old_log_prob)
                yield batch

        def evaluated(observations: Tensor, actions: Tensor) -> Any:
            result = evaluate(observations, actions)
            self.new.append(result[1].detach())
            self.logits.append(_logits(model, observations))
            return result

        model.rollout_buffer.get = batches  # type: ignore[method-assign,assignment] # the same
        return evaluated


def _logits(model: PPO, observations: Tensor) -> Tensor:
    result = model.policy.get_distribution(observations).distribution
    assert isinstance(result, Categorical)
    logits: Tensor = result.logits.detach()
    return logits


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(tmp_path_factory.mktemp("sb3"))


def test_kl_and_clip_fraction_are_what_it_logs(watched: Watched) -> None:
    """SB3 includes the first minibatch, in which nothing is clipped, in the average. Our clip fraction is 4/3 of it."""
    log_ratio = torch.stack(watched.new) - torch.stack(watched.old)
    packed = pack(ratio_diagnostics(log_ratio, clip=0.2, dim=-1))
    result = packed.layout.finish(packed.table(), np.arange(MINIBATCHES), np.zeros(MINIBATCHES, int)).values

    assert len(log_ratio) == MINIBATCHES and float(log_ratio.abs().max()) > 0.01
    assert result["policy/kl"] == pytest.approx(watched.logged["train/approx_kl"], rel=1e-3, abs=1e-7)
    assert result["policy/clip_frac"] * 3 / 4 == pytest.approx(watched.logged["train/clip_fraction"], rel=1e-6)


def test_entropy_loss_is_what_it_logs(watched: Watched) -> None:
    entropy = entropy_stats({"action": torch.cat(watched.logits)}).values()["policy/entropy"]

    assert -entropy == pytest.approx(watched.logged["train/entropy_loss"], rel=1e-5)


def test_explained_variance_is_its_function(watched: Watched) -> None:
    values, returns = torch.as_tensor(watched.values), torch.as_tensor(watched.returns)
    measured = value_fit(values, returns).values()
    keys = ("value/bias", "value/err/std", "value/std", "value/target/std")
    result = critic_fit(CriticMoments(*map(measured.get, keys)), VarianceAverage())[0].explained_variance
    theirs = explained_variance(watched.values, watched.returns)

    assert result == pytest.approx(theirs, rel=1e-5)
    assert result == pytest.approx(watched.logged["train/explained_variance"], rel=1e-5)
