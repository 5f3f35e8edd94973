"""A module next to its host: how strongly it learns, what gradient reaches it, and why it learns little."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run, watch_pair
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks
from esper_telemetry.history.derive import PairHistories

PAIR = {f"grad/pair/head/{n}" for n in ("connected", "intensity", "host_intensity", "upstream", "zero_frac")}


def trainer() -> PPO:
    config = PPOConfig(num_steps=32, num_epochs=1, num_minibatches=2, hidden_sizes=(8,))
    return PPO(make_env("CartPole-v1", num_envs=4), config)


def watched(run_dir: Path, source: PPO, **options: Any) -> list[dict[str, float]]:
    with Telemetry(run_dir=run_dir, offload=False, **options) as telemetry:
        attach(telemetry, source)
        watch_pair(telemetry, source, "head", module=source.policy.heads["action"], host=source.policy.actor)
        source.learn(200)
    return [dict(record.values) for record in read_run(run_dir).records]


def test_a_real_module_is_measured_beside_its_host(tmp_path: Path) -> None:
    """The ratio of the two intensities equals the ratio of their root mean squares, which other keys report as well."""
    values = watched(tmp_path, trainer())[-1]

    assert {*PAIR, "grad/pair/head/intensity_ratio"} <= set(values)
    assert values["grad/pair/head/connected"] == 1.0
    assert values["grad/pair/head/intensity"] == pytest.approx(values["grad/head_action/rms"], rel=1e-5)
    assert values["grad/pair/head/intensity_ratio"] == pytest.approx(
        values["grad/pair/head/intensity"] / values["grad/pair/head/host_intensity"]
    )


def test_what_arrives_at_the_module_is_the_gradient_of_its_output(tmp_path: Path) -> None:
    source, norms = trainer(), []

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: norms.append(float(gradient.double().norm())))

    source.policy.heads["action"].register_forward_hook(keep)
    values = watched(tmp_path, source, level="normal")[-1]

    assert values["grad/pair/head/upstream"] == pytest.approx(sum(norms[-2:]) / 2)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Intensities are root mean squares of the gradients before clipping. `upstream` is the gradient at the head's output.

    The loss is Σ y²/2 at y = 1, so that gradient is y, of 8 rows and 2 outputs: √16. The bias's gradient is 8 in each output.
    """
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.ModuleList([trunk, head])
    nn.init.zeros_(head.weight)
    nn.init.ones_(head.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Telemetry(run_dir=tmp_path) as telemetry:
        watched = telemetry.watch(model, optimizer)
        stop = watch_pair(telemetry, watched, "head", module=head, host=trunk)
        for update in range(2):
            hidden = trunk(torch.ones(8, 3))
            optimizer.zero_grad()
            (head(hidden).square().sum() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            telemetry.flush(env_step=update + 1)
            stop()

    first, second = (record.values for record in read_run(tmp_path).records)
    weight = 8 * hidden[0].detach().double()  # gradient of each output's weights
    squares = 2 * float(weight.square().sum()) + 2 * 8.0**2
    assert first["grad/pair/head/upstream"] == pytest.approx(4.0)
    assert first["grad/pair/head/intensity"] == pytest.approx((squares / 10) ** 0.5)
    assert first["grad/pair/head/host_intensity"] == 0.0  # the head's weights are zero
    assert not [key for key in second if key.startswith("grad/pair/")]


def test_module_and_host_need_one_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.ModuleList([trunk, head])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with Telemetry(run_dir=tmp_path) as telemetry:
        _, watched = [telemetry.watch(model, optimizer) for optimizer in optimizers]
        watch_pair(telemetry, watched, "head", module=head, host=trunk)
        head(trunk(torch.ones(8, 3))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        telemetry.flush(env_step=1)

    assert not [key for record in read_run(tmp_path).records for key in record.values if "grad/pair/" in key]
    assert caplog.messages == ["pair 'head' is not measured: its module and its host need parameters that the same optimizer trains"]


def test_a_frozen_module_is_disconnected_and_the_journal_says_so(tmp_path: Path) -> None:
    source = trainer()
    source.policy.heads["action"].requires_grad_(False)

    values = watched(tmp_path, source)[-1]

    assert values["grad/pair/head/connected"] == 0.0
    assert not {"grad/pair/head/intensity", "grad/pair/head/intensity_ratio"} & set(values)
    events = [event for event in read_run(tmp_path).events if event.type == "evidence/pairs"]
    assert events[0].data == {"head": {"cause": "disconnected", "confidence": None}}


def test_watching_changes_nothing_and_ends_when_asked() -> None:
    bare, observed = trainer(), trainer()
    bare.learn(200)
    with Telemetry(run_dir=None) as telemetry:
        stop = watch_pair(telemetry, observed, "head", module=observed.policy.heads["action"], host=observed.policy.actor)
        observed.learn(200)
        stop()

    pairs = zip(bare.policy.parameters(), observed.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not observed.policy.heads["action"]._forward_hooks


def test_mistakes_are_named() -> None:
    source, telemetry = trainer(), Telemetry(level="off")
    trunk = source.policy.actor

    with pytest.raises(ValueError, match="pair 'x' needs a module and a host apart, and they share 2 parameters"):
        watch_pair(telemetry, source, "x", module=trunk, host=trunk)
    with pytest.raises(ValueError, match="pair 'x' needs a module and a host with parameters"):
        watch_pair(telemetry, source, "x", module=nn.ReLU(), host=trunk)


@pytest.mark.parametrize("level", ["off", "minimal"])
def test_below_normal_nothing_is_registered(level: str) -> None:
    source = trainer()
    with Telemetry(run_dir=None, level=level) as telemetry:
        watch_pair(telemetry, source, "x", module=source.policy.heads["action"], host=source.policy.actor)

    assert source.hooks.__dict__ == Hooks().__dict__
    assert not source.policy.heads["action"]._forward_hooks


def step(histories: PairHistories, own: float, host: float, upstream: float, connected: float = 1.0) -> str:
    names = {"connected": connected, "intensity": own, "host_intensity": host, "upstream": upstream}
    histories.derive({f"grad/pair/seed/{name}": value for name, value in names.items()}, Level.NORMAL)
    return histories.diagnoses["seed"].cause


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ((0.1, 1.0, 1.0), "ok"),
        ((1e-5, 1.0, 1e-4), "dormant"),  # little arrives
        ((0.0, 1.0, 0.0), "dormant"),  # no gradient: gated off
        ((1e-5, 1.0, 1.0), "saturated"),  # much arrives, little remains
        ((0.1, 1000.0, 1.0), "host_fast"),  # the module learns as before, its host much faster
    ],
)
def test_the_history_tells_why_a_module_learns_little(last: tuple[float, float, float], cause: str) -> None:
    """After thirty updates at a tenth of the host's intensity."""
    histories = PairHistories()
    for update in range(30):
        wobble = 1 + 0.1 * (update % 3)
        assert step(histories, 0.1 * wobble, 1.0 * wobble, 1.0 * wobble) == "ok"

    assert step(histories, *last) == cause


def test_without_a_history_a_low_ratio_is_indeterminate_and_no_gradient_is_disconnected() -> None:
    assert step(PairHistories(), 1e-4, 1.0, 1.0) == "indeterminate"
    assert step(PairHistories(), 0.1, 1.0, 1.0, connected=0.0) == "disconnected"
