"""The adapter of examples/custom_adapter.py: its numbers equal explicit `observe` calls in the same loop, and training is unchanged."""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper_telemetry import Level, Telemetry, advantage_stats, attach, ratio_diagnostics, value_fit
from esper_telemetry.core.record import Record
from esper_telemetry.events import EpisodeEnd, Hooks, RunStart, UpdateEnd, UpdateStart
from esper_telemetry.testing import MemorySink

UPDATES = 3
EXAMPLE: Mapping[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples/custom_adapter.py"))
Trainer: Any = EXAMPLE["Trainer"]
CHANGING = ("perf/", "telemetry/", "train/env_steps_per_second")
OF_EVENTS_ALONE = {
    # over all rows of the update; a loop that observes reports them by minibatch
    *("policy/ratio/p01", "policy/ratio/p99"),
    *("grad/actor/threshold_explode", "grad/critic/threshold_explode"),  # from the fact `max_grad_norm`
}


class OwnLoop(Trainer):  # type: ignore[misc]  # a class from a script
    """The example's trainer with explicit observation calls: the second computation."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry, self._minibatch, self._env_step = telemetry, 0, 0
        model = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        telemetry.watch(model, self.optimizer, actor=self.actor, critic=self.critic)

    def learn(self, updates: int) -> None:
        super().learn(updates)
        self._telemetry.flush(env_step=self._env_step)

    def collect(self) -> Any:
        if self._env_step:
            self._telemetry.flush(env_step=self._env_step)
        rollout = super().collect()
        self._env_step += rollout.rewards.numel()
        self._minibatch = 0
        returns = rollout.advantages + rollout.values
        self._telemetry.observe(advantage_stats(rollout.advantages), value_fit(rollout.values, returns))
        return rollout

    def learn_from(self, rollout: Any, rows: torch.Tensor) -> Any:
        minibatch = super().learn_from(rollout, rows)
        epoch, self._minibatch = self._minibatch // 4, self._minibatch + 1
        group = ratio_diagnostics(minibatch.log_ratio, minibatch.advantages, clip=EXAMPLE["CLIP"])
        self._telemetry.observe(group, epoch=epoch)
        return minibatch


def adapted(level: str = "normal") -> tuple[list[Record], Any]:
    sink, trainer = MemorySink(), Trainer()
    with Telemetry([sink], run_dir=None, level=level) as telemetry:
        if telemetry.level > Level.OFF:
            EXAMPLE["TrainerAdapter"](telemetry, trainer, UPDATES * 512)
        trainer.learn(UPDATES)
    return list(sink.records), trainer


def test_numbers_are_those_of_the_loop_itself() -> None:
    """Advantages, critic, ratios, clipping and gradients by group: every key that both runs have."""
    records, _ = adapted()
    sink = MemorySink()
    with Telemetry([sink], run_dir=None) as telemetry:
        OwnLoop(telemetry).learn(UPDATES)

    assert len(records) == len(sink.records) == UPDATES
    for ours, own in zip(records, sink.records, strict=True):
        both = ours.values.keys() & own.values.keys() - OF_EVENTS_ALONE
        shared = [key for key in both if not key.startswith(CHANGING)]
        assert {"adv/raw/std", "value/explained_variance", "policy/kl", "grad/actor/norm_preclip"} <= set(shared)
        assert {"grad/clip/coef", "policy/clip_frac", "policy/kl_last"} <= set(shared)
        assert {key: ours.values[key] for key in shared} == pytest.approx({key: own.values[key] for key in shared}, rel=1e-5, abs=1e-7)
        assert ours.axes.env_step == own.axes.env_step
        assert ours.axes.gradient_step == own.axes.gradient_step


class WithoutRollouts:
    """A trainer that reports which episodes ended in each update, but not its rollouts."""

    def __init__(self) -> None:
        self.hooks = Hooks()

    def learn(self, episodes: Sequence[Sequence[float]]) -> None:
        self.hooks.emit(RunStart({}, {}))
        for update, returns in enumerate(episodes, 1):
            if returns:
                self.hooks.emit(EpisodeEnd(update, returns, [1] * len(returns)))
            self.hooks.emit(UpdateStart(update, update))
            self.hooks.emit(UpdateEnd(update, update, update, learning_rate=1e-3, seconds={}))


def test_returns_are_recorded_where_no_rollout_is_known() -> None:
    sink, source = MemorySink(), WithoutRollouts()
    with Telemetry([sink], run_dir=None) as telemetry:
        attach(telemetry, source)
        source.learn([(), (1.0, 3.0), ()])

    means = [record.values.get("episode/return_mean_100") for record in sink.records]
    assert means == [None, 2.0, 2.0]
    assert [record.values.get("episode/count") for record in sink.records] == [None, 2.0, 0.0]


@pytest.mark.parametrize("level", ["off", "normal", "debug"])
def test_weights_are_those_without_telemetry_and_the_trainer_is_left_alone(level: str) -> None:
    """The rollout and its minibatches agree: collection probabilities, the GAE identity, and every row once per pass."""
    bare = Trainer()
    bare.learn(UPDATES)

    records, trainer = adapted(level)

    assert len(records) == (0 if level == "off" else UPDATES)
    for record in records:
        assert max(record.values["integrity/ratio_init"], record.values["integrity/gae_identity"]) <= 1e-6
        assert record.values["integrity/rows_repeated"] == 0
        assert "telemetry/metric_errors" not in record.values
    pairs = zip(bare.parameters, trainer.parameters, strict=True)
    assert all(torch.equal(expected, actual) for expected, actual in pairs)
    assert vars(trainer).keys() == vars(bare).keys()
    assert not trainer.actor._forward_hooks
