"""The base class of adapters: gradients clipped together, in parts or not clipped; counters; and the end of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_telemetry import Telemetry
from esper_telemetry.adapters.adapter import Adapter, last_layer, named_parameters, parameter_groups, plain_settings
from esper_telemetry.events import BackwardEnd, MinibatchEnd, OptimizerStep, RolloutEnd
from esper_telemetry.testing import MemorySink

MAX_NORM = 0.5


class Trainer:
    """An actor and a critic of one weight each, with gradients 3 and 4; `clip` is called before the step."""

    def __init__(self, clip: Callable[[Trainer], object] = lambda trainer: None) -> None:
        self.actor, self.critic = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD([*self.actor.parameters(), *self.critic.parameters()], lr=0.1)
        self._clip = clip

    def learn_from(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        (3 * self.actor(rows) + 4 * self.critic(rows)).mean().backward()
        self._clip(self)
        self.optimizer.step()


def together(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_([*trainer.actor.parameters(), *trainer.critic.parameters()], MAX_NORM)


def apart(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.actor.parameters(), MAX_NORM)
    nn.utils.clip_grad_norm_(trainer.critic.parameters(), MAX_NORM)


def actor_alone(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.actor.parameters(), MAX_NORM)


class TrainerAdapter(Adapter):
    def __init__(self, telemetry: Telemetry, trainer: Trainer, clipped_apart: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(telemetry)
        self.events: list[Any] = []
        for kind in (BackwardEnd, OptimizerStep):
            self.hooks.on(kind, self.events.append, late=kind is BackwardEnd)
        parameters = named_parameters(actor=trainer.actor, critic=trainer.critic)
        self.begin_run({}, {"groups": self.groups()})
        self.follow([trainer.optimizer], parameters, clipped_apart)

    def groups(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["actor.weight"], "critic": ["critic.weight"]}


def minibatches(
    clip: Callable[[Trainer], object] = lambda trainer: None, *, apart: bool = False, level: str = "minimal"
) -> tuple[list[Any], TrainerAdapter, MemorySink]:
    sink, trainer = MemorySink(), Trainer(clip)
    with Telemetry([sink], run_dir=None, level=level, offload=False) as telemetry:
        adapter = TrainerAdapter(telemetry, trainer, (["actor.weight"], ["critic.weight"]) if apart else ())
        for _ in range(2):
            adapter.begin_update(adapter.env_step + 8)
            for epoch in range(2):
                adapter.begin_minibatch(epoch)
                trainer.learn_from(torch.ones(2, 1))
    return adapter.events, adapter, sink


@pytest.mark.parametrize("level", ["minimal", "debug"])
@pytest.mark.parametrize(("clip", "in_parts", "max_norm"), [(together, False, 0.5), (apart, True, 0.5), (lambda _: None, False, None)])
def test_norms_are_those_before_clipping(clip: Any, in_parts: bool, max_norm: float | None, level: str) -> None:
    """The norms are 3 and 4 whether they are clipped together, separately or not. At DEBUG a hook reads the gradients, too."""
    events, _, _ = minibatches(clip, apart=in_parts, level=level)

    assert [type(event) for event in events] == [BackwardEnd, OptimizerStep] * 4
    for backward in events[::2]:
        assert backward.names == ("actor.weight", "critic.weight")
        assert backward.norms.tolist() == [3, 4]
        assert backward.max_norm == max_norm
        assert [set(part) for part in backward.clipped_apart] == ([{"actor.weight"}, {"critic.weight"}] if in_parts else [])
    assert [(event.epoch, event.step) for event in events] == 2 * [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_gradients_that_are_not_clipped_are_measured_at_the_step() -> None:
    events, _, _ = minibatches(actor_alone, apart=True)

    assert dict(zip(events[0].names, events[0].norms.tolist(), strict=True)) == {"actor.weight": 3, "critic.weight": 4}
    assert events[0].clipped_apart == (frozenset({"actor.weight"}),)


def test_records_count_updates_and_steps() -> None:
    """The norms after clipping are 0.5 each if actor and critic are clipped apart."""
    _, adapter, sink = minibatches(apart, apart=True, level="normal")

    axes = [(record.axes.update, record.axes.env_step, record.axes.gradient_step) for record in sink.records]
    assert axes == [(1, 8, 2), (2, 16, 4)]
    values = sink.records[-1].values
    assert values["grad/actor/norm_preclip"] == pytest.approx(3)
    assert values["grad/critic/norm_postclip"] == pytest.approx(0.5, rel=1e-5)
    assert values["opt/lr"] == pytest.approx(0.1)
    assert not adapter.listening


def test_torch_clips_if_the_norms_cannot_be_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the norms are broken")

    monkeypatch.setattr("esper_telemetry.adapters.taps.equals_torch", broken)

    events, adapter, _ = minibatches(together)

    assert events[0].norms.tolist() == [3, 4]
    gradients = [float(parameter.grad) for parameter in adapter.parameters.values() if parameter.grad is not None]
    assert gradients == pytest.approx([0.3, 0.4], rel=1e-5)
    assert caplog.text.count("the norms are broken") == 1


def test_nothing_is_left_in_the_trainer() -> None:
    trainer, clip = Trainer(), nn.utils.clip_grad_norm_
    with Telemetry([], run_dir=None) as telemetry:
        adapter = TrainerAdapter(telemetry, trainer)
        adapter.listen(trainer, "learn_from", lambda *_: None)
        assert (adapter.listening, nn.utils.clip_grad_norm_ is clip) == (True, False)

    assert "learn_from" not in vars(trainer)
    assert not trainer.optimizer._optimizer_step_pre_hooks
    assert not trainer.optimizer._optimizer_step_post_hooks
    assert nn.utils.clip_grad_norm_ is clip


def test_a_minibatch_without_a_step_does_not_count() -> None:
    """The second of three rows leads to no step; the rows of an update are joined when it ends."""
    joined: list[Any] = []

    def join(rows: Sequence[Any]) -> Any:
        joined.append(list(rows))
        raise NotImplementedError

    trainer = Trainer()
    with Telemetry([], run_dir=None) as telemetry:
        adapter = Adapter(telemetry, join=join)
        adapter.follow([trainer.optimizer], named_parameters(actor=trainer.actor, critic=trainer.critic))
        adapter.begin_update(8)
        for row in ("first", "second", "third"):
            adapter.begin_minibatch(0)
            adapter.row = row
            if row != "second":
                trainer.learn_from(torch.ones(2, 1))
        adapter.end_update()

    assert joined[0] == ["first", "third"]
    assert adapter.gradient_step == 2


def test_a_rollout_that_fails_costs_its_event_alone(caplog: pytest.LogCaptureFixture) -> None:
    sink, trainer = MemorySink(), Trainer()

    def broken() -> RolloutEnd:
        raise ZeroDivisionError("a bug of telemetry")

    with Telemetry([sink], run_dir=None, offload=False) as telemetry:
        adapter = TrainerAdapter(telemetry, trainer)
        adapter.begin_update(8, broken)
        adapter.begin_minibatch(0)
        trainer.learn_from(torch.ones(2, 1))
        adapter.hooks.emit(MinibatchEnd(0, 0, log_ratio=torch.zeros(2), advantages=torch.ones(2)))

    assert "a bug of telemetry" in caplog.text
    assert {"policy/kl", "grad/actor/norm_preclip"} <= sink.records[0].values.keys()


def test_groups_and_the_last_layer_of_two_networks() -> None:
    """The two networks share their first layer."""
    trunk = nn.Linear(2, 2)
    actor, critic = nn.Sequential(trunk, nn.Linear(2, 1)), nn.Sequential(trunk, nn.Linear(2, 1))

    parameters = named_parameters(actor=actor, critic=critic)

    assert [*parameters] == [*(f"actor.{n}" for n, _ in actor.named_parameters()), "critic.1.weight", "critic.1.bias"]
    assert parameter_groups(parameters, actor.parameters(), critic.parameters()) == {
        "actor": ["actor.1.weight", "actor.1.bias"],
        "shared": ["actor.0.weight", "actor.0.bias"],
        "critic": ["critic.1.weight", "critic.1.bias"],
    }
    assert last_layer(["critic.0.weight", "critic.0.bias", "critic.1.weight", "critic.1.bias"]) == ["critic.1.weight", "critic.1.bias"]
    assert last_layer(["critic.scale"]) == []


def test_settings_are_plain() -> None:
    settings = {1: (torch.tensor(0.5), None), "kind": nn.Tanh()}

    assert plain_settings(settings) == {"1": [0.5, None], "kind": "Tanh()"}
