"""The chart of single layers' gradients in a report."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from journaled import axes, lines_of, write

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.core.record import Record
from esper_telemetry.views.report import report_html
from esper_telemetry.views.report_charts import MAX_COLUMNS, MAX_LAYERS, GradientFlow, gradient_flow
from esper_telemetry.views.run_view import open_view

LIMIT = 0.5
FACTS = {"max_grad_norm": LIMIT}


def flow_of(path: Path, updates: int, values: Callable[[int], dict[str, float]]) -> GradientFlow | None:
    records = [Record(update, axes(update), values(update)) for update in range(1, updates + 1)]
    return gradient_flow(open_view(write(path / "run", lines_of(records, facts=FACTS))))


def norms(**layers: float) -> dict[str, float]:
    return {f"grad/layer/{layer}/norm": norm for layer, norm in layers.items()}


@pytest.mark.system
def test_severities_are_those_of_the_journal(tmp_path: Path) -> None:
    """A run at DEBUG has severities too. The critic's targets become a million times larger, so some layers explode."""
    config = PPOConfig(num_steps=16, num_epochs=1, num_minibatches=1, hidden_sizes=(8,), shared_trunk=True)
    trainer = PPO(make_env("CartPole-v1", num_envs=4, seed=0), config)
    with Telemetry(run_dir=tmp_path, level="debug", offload=False) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(24 * 64)
        trainer.coefficients, trainer._weights = {}, {}
        object.__setattr__(config, "value_coef", 1e6)
        trainer.learn(30 * 64)

    flow = gradient_flow(open_view(tmp_path))
    records = {record.axes.update: record.values for record in read_run(tmp_path).records}

    assert flow is not None and flow.worst is not None
    assert list(flow.updates) == list(records)
    names = [name.replace(".", "_") for name in trainer.parameters]
    assert [layer.layer for layer in flow.layers] == names
    for layer in flow.layers:
        for update, severity in zip(flow.updates, layer.severity, strict=True):
            explode, vanish = (records[update][f"grad/layer/{layer.layer}/severity_{kind}"] for kind in ("explode", "vanish"))
            assert severity == pytest.approx(explode if explode >= vanish else -vanish)
    assert flow.worst[0].severity[flow.worst[1]] > 0.25


@pytest.mark.system
def test_a_spike_and_a_gap_of_a_long_run_are_kept(tmp_path: Path) -> None:
    """One of 2,000 updates has a norm of 500, a hundred times the first threshold of 10 clip limits. Two norms are not finite."""

    def values(update: int) -> dict[str, float]:
        if update > 1998:
            return {"grad/global/norm_preclip_nonfinite": 3.0}
        return norms(first=500.0 if update == 7 else 0.1, second=0.1 + 0.01 * (update % 5))

    flow = flow_of(tmp_path, 2000, values)

    assert flow is not None and flow.worst is not None
    assert len(flow.updates) == len(flow.env_steps) <= MAX_COLUMNS
    layer, column = flow.worst
    assert (layer.layer, layer.severity[column], layer.largest) == ("first", 1.0, 500.0)
    assert flow.updates[column] == pytest.approx(7, abs=2000 / MAX_COLUMNS)
    assert flow.updates[-1] == 2000
    assert flow.nonfinite == (False,) * (len(flow.updates) - 1) + (True,)


def test_an_update_without_a_finite_gradient_is_a_gap(tmp_path: Path) -> None:
    broken = {"grad/global/norm_preclip_nonfinite": 2.0}
    flow = flow_of(tmp_path, 3, lambda update: broken if update == 2 else norms(first=0.1, second=0.2))

    assert flow is not None
    assert [np.isnan(layer.severity).tolist() for layer in flow.layers] == [[False, True, False]] * 2
    assert flow.nonfinite == (False, True, False)


def test_a_vanishing_layer_is_below_zero(tmp_path: Path) -> None:
    """1e-9 is two decades below the first threshold of 1e-7: half of the ramp of four."""
    flow = flow_of(tmp_path, 3, lambda update: norms(first=1e-9, second=0.1))

    assert flow is not None
    assert flow.layers[0].severity.tolist() == pytest.approx([-0.5] * 3)
    assert flow.layers[1].severity.tolist() == [0.0] * 3


def test_of_many_layers_the_worst_are_shown_in_the_order_of_the_network(tmp_path: Path) -> None:
    def values(update: int) -> dict[str, float]:
        return norms(**{f"layer_{place}": 1e-10 if place == 68 else 0.1 for place in range(70)})

    flow = flow_of(tmp_path, 2, values)

    assert flow is not None
    assert [layer.layer for layer in flow.layers] == [f"layer_{place}" for place in (*range(MAX_LAYERS - 1), 68)]
    assert flow.hidden == 70 - MAX_LAYERS


@pytest.mark.parametrize("values", [{}, norms(only=0.1)])
def test_a_run_without_layers_has_no_picture(tmp_path: Path, values: dict[str, float]) -> None:
    records = [Record(update, axes(update), values) for update in (1, 2)]
    view = open_view(write(tmp_path / "run", lines_of(records)), judged=True)

    assert gradient_flow(view) is None
    assert "explode or vanish?" not in report_html([view])
