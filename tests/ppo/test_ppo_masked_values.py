"""Values in rows without a transition, and in irrelevant parts of actions, do not change an update."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_builders import equal, weights
from test_ppo_masks import restricted
from torch import Tensor

from esper_telemetry.ppo import PPO
from esper_telemetry.ppo.rollout import Rollout

POISONS = st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30])


def with_resets(rollout: Rollout) -> Rollout:
    """Return the rollout as if every row after an end were a reset, as in Gymnasium's NEXT_STEP mode."""
    valid = torch.ones_like(rollout.ended)
    for t in range(1, len(valid)):
        valid[t] = ~(rollout.ended[t - 1] & valid[t - 1])
    memory = rollout.recurrence
    if memory is not None:
        fresh = memory.fresh.copy()
        fresh[1:] |= ~valid[:-1].numpy()
        memory = replace(memory, fresh=fresh, valid=valid.numpy())
    return replace(
        rollout,
        ended=rollout.ended & valid,
        terminated=rollout.terminated & valid,
        valid=valid,
        transitions=int(valid.sum()),
        recurrence=memory,
    )


def poisoned(rollout: Rollout, poison: float) -> Rollout:
    """Write an invalid value into every row without a transition, and into every irrelevant part of an action."""
    assert rollout.valid is not None
    lost = ~rollout.valid

    def spoil(column: Tensor, where: Tensor) -> Tensor:
        shape = where.shape + (1,) * (column.dim() - where.dim())
        if column.dtype == torch.bool:
            return column & ~where.view(shape)
        return torch.where(where.view(shape), torch.tensor(poison if column.is_floating_point() else 99), column).to(column.dtype)

    columns: dict[str, Any] = {
        name: spoil(getattr(rollout, name), lost) for name in ("observations", "log_probs", "rewards", "values", "next_values")
    }
    idle = {name: lost | ~rollout.relevance[name] if name in rollout.relevance else lost for name in rollout.actions}
    columns["actions"] = {name: spoil(action, idle[name]) for name, action in rollout.actions.items()}
    for name in ("head_log_probs", "action_masks", "relevance", "scores"):
        columns[name] = {part: spoil(column, lost) for part, column in getattr(rollout, name).items()}
    return replace(rollout, **columns)


def updated(settings: dict[str, Any], seed: int, poison: float | None) -> list[Tensor]:
    trainer: PPO = restricted(seed=seed, num_epochs=2, entropy_coef=0.01, **settings)
    rollout = with_resets(trainer.collector.collect())
    assert rollout.valid is not None and not rollout.valid.all()
    trainer._update(rollout if poison is None else poisoned(rollout, poison))
    return weights(trainer)


@pytest.mark.parametrize(
    "chosen", [{}, {"shared_trunk": True, "normalize_minibatches": True}, {"policy": "lstm"}, {"policy": "gru", "clip_value": 0.2}], ids=str
)
@given(seed=st.integers(0, 1000), poison=POISONS)
@settings(max_examples=6, deadline=None)
def test_an_update_takes_no_notice_of_what_is_masked(chosen: dict[str, Any], seed: int, poison: float) -> None:
    clean, poisoned = updated(chosen, seed, None), updated(chosen, seed, poison)

    assert equal(clean, poisoned) and all(weight.isfinite().all() for weight in poisoned)
