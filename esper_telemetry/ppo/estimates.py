"""The critic's estimates of a rollout on the host, once it is collected: the weights have not changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.ppo.inference import Acting
from esper_telemetry.ppo.memory import LSTMMemory

Array = npt.NDArray[Any]


class Final(NamedTuple):
    """Last observations [E, ...] of episodes that a limit cut at time `time` in the environments `rows` [E]."""

    time: int
    rows: Array
    observations: Array


def estimate(
    acting: Acting, observations: Array, terminated: Array, finals: Sequence[Final], memory: LSTMMemory | None
) -> tuple[Array, Array]:
    """Values [T, B] of the states acted in, and of those that followed, 0 after termination.

    Args:
        observations: [T + 1, B, ...].
        terminated: [T, B].
        finals: what limits cut.
        memory: of the trunk that the value reads, already moved through the rollout; None without memory.

    No estimate moves the memory on.
    """
    if memory is None:
        flat = acting.value(acting.critic(observations.reshape(-1, *observations.shape[2:])))
        values = flat.reshape(len(observations), -1)
    else:
        last = acting.value(acting.critic(observations[-1], memory.state.copy()))
        values = np.concatenate([acting.value(decoded(acting, memory)), last[None]])
    next_values = np.where(terminated, np.float32(0), values[1:])
    for_limits(acting, next_values, finals, memory)
    return values[:-1], next_values


def decoded(acting: Acting, memory: LSTMMemory) -> Array:
    """Features [T, B, F] of a rollout from what the core gave."""
    assert acting.critic.decode is not None
    outputs = memory.outputs
    return acting.critic.decode(outputs.reshape(-1, outputs.shape[-1])).reshape(*outputs.shape[:2], -1)


def for_limits(acting: Acting, next_values: Array, finals: Sequence[Final], memory: LSTMMemory | None) -> None:
    """Writes to [T, B] the values of the states in which a limit ended an episode."""
    if not finals:
        return
    rows = np.concatenate([final.rows for final in finals])
    times = np.concatenate([np.full(len(final.rows), final.time) for final in finals])
    state = None if memory is None else np.ascontiguousarray(np.moveaxis(memory.after[times, :, :, rows], 0, 2))
    features = acting.critic(np.concatenate([final.observations for final in finals]), state)
    next_values[times, rows] = acting.value(features)


def remember(acting: Acting, observations: Array, memory: LSTMMemory, fresh: Array) -> None:
    """Moves the critic's own memory through a rollout: observations [T + 1, B, ...], begins without memory [T + 1, B]."""
    assert acting.critic.advance is not None
    steps = len(memory.after)
    inputs = acting.critic.encode(observations[:-1].reshape(-1, *observations.shape[2:]))
    inputs = inputs.reshape(steps, -1, inputs.shape[-1])
    memory.begin()
    for t in range(steps):
        acting.critic.advance(inputs[t], memory.state)
        memory.keep(t, fresh[t + 1])
