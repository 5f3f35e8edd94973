"""Updates of one process, and the parts of them that each of two ranks would have."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.events import RolloutEnd
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthUpdate
from esper_telemetry.metrics.gradients.actor_critic import LeafGradients
from esper_telemetry.telemetry import session_of
from esper_telemetry.updates.update import (
    ActionChoices,
    BackwardGradients,
    CollectedRows,
    Episodes,
    JoinedMinibatches,
    Layer,
    RecurrentState,
    RolloutContext,
    Update,
)

ENVS = 4
FIRST = 1
"""Number of environments of rank 0; rank 1 has the rest."""
SMALL = {"num_steps": 48, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (16,)}


def updates(env: str, **settings: Any) -> tuple[list[Update], dict[str, Any]]:
    """Return some updates of one process, and the run's facts. Losses and logits are float64, so that their parts add up."""
    trainer = PPO(make_env(env, num_envs=ENVS), PPOConfig(**{**SMALL, **settings}))
    submitted: list[Update] = []

    def keep(update: Update) -> None:
        if update and update.minibatches:
            losses = {name: loss.double() for name, loss in update.minibatches.losses.items()}
            logits = {head: scores.double() for head, scores in update.minibatches.logits.items()}
            precise = update._replace(minibatches=update.minibatches._replace(losses=losses, logits=logits))
            submitted.append(copy.deepcopy(precise))

    with Telemetry(run_dir=None) as telemetry:
        session_of(telemetry).submit = keep  # type: ignore[method-assign]  # instead of recording it
        attach(telemetry, trainer)
        trainer.learn(4 * 48 * ENVS)
    return submitted, trainer.facts(4 * 48 * ENVS)


def half(update: Update, rank: int) -> Update:
    """Return the data of one rank: its environments, its rows of every minibatch, and the gradients of all rows."""
    assert update.rollout and update.minibatches and update.episodes
    return update._replace(
        rollout=_rollout(update.rollout, rank),
        context=_context(update.context, rank),
        minibatches=_minibatches(update.minibatches, rank),
        features=_part(update.features, update.minibatches.counts[0] // 3, rank),
        collected=update.collected and CollectedRows(*map(_rows_of(update.minibatches.counts, rank), update.collected)),
        gradients=tuple(_gradients(part, update.minibatches.counts, rank) for part in update.gradients),
        episodes=_episodes(update.episodes, update.rollout, rank),
        extensions=tuple(_growth(part, rank) for part in update.extensions if isinstance(part, GrowthUpdate)),
    )


def _part(x: Any, first: int, rank: int) -> Any:
    """Select a rank's rows, of which rank 0 has the first; None if there are none."""
    return None if x is None else x[:first] if rank == 0 else x[first:]


def _columns(x: Any, rank: int) -> Any:
    """Select a rank's environments in everything with [T, B, ...]."""
    if isinstance(x, Tensor):
        return x[:, :FIRST] if rank == 0 else x[:, FIRST:]
    if isinstance(x, Mapping):
        return {name: _columns(part, rank) for name, part in x.items()}
    if isinstance(x, ActionChoices):
        return ActionChoices(*(_columns(part, rank) for part in x))
    return x


def _rollout(rollout: RolloutEnd, rank: int) -> RolloutEnd:
    """Select a rank's environments; bounds and standard deviations [D] stay whole."""
    same = ("bounds",) if all(std.dim() > 1 for std in rollout.log_std.values()) else ("bounds", "log_std")
    names = [field.name for field in fields(rollout) if field.name not in same]
    return replace(rollout, **{name: _columns(getattr(rollout, name), rank) for name in names})


def _context(context: RolloutContext, rank: int) -> RolloutContext:
    return context._replace(
        previous_choices=_columns(context.previous_choices, rank),
        memory=None if context.memory is None else _memory(context.memory, rank),
        constant=_part(context.constant, FIRST, rank),
    )


def _memory(memory: RecurrentState, rank: int) -> RecurrentState:
    chosen = slice(FIRST) if rank == 0 else slice(FIRST, None)
    sizes = {name: getattr(memory.size, name)[..., chosen] for name in ("total", "squares", "absolute", "largest")}
    layers = [Layer(layer.weights, *(_columns(x, rank) for x in (layer.inputs, layer.hidden, layer.memory))) for layer in memory.layers]
    return RecurrentState(memory.size._replace(**sizes), _columns(memory.ages, rank), tuple(layers))


def _rows_of(counts: tuple[int, ...], rank: int) -> Callable[[Any], Any]:
    """Return a function that cuts a rank's rows of every minibatch out of a column, out of one column per head, or of None."""
    cuts = [count // 3 for count in counts]

    def cut(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: cut(part) for name, part in x.items()}
        if not isinstance(x, Tensor):
            return x
        parts = zip(x.split(list(counts)), cuts, strict=True)
        return torch.cat([part[:own] if rank == 0 else part[own:] for part, own in parts])

    return cut


def _minibatches(minibatches: JoinedMinibatches, rank: int) -> JoinedMinibatches:
    """Select a rank's rows. The ranks' losses, weighted by rows, average to the losses of all rows."""
    cuts = [count // 3 for count in minibatches.counts]
    rows = _rows_of(minibatches.counts, rank)
    counts, first = (torch.tensor(numbers, dtype=torch.float64) for numbers in (minibatches.counts, cuts))
    shift = 0.5 / first if rank == 0 else -0.5 / (counts - first)
    columns = {name: rows(x) for name, x in minibatches._asdict().items() if name not in ("epochs", "counts", "losses")}
    return minibatches._replace(
        **columns,
        counts=tuple(cuts) if rank == 0 else tuple(c - cut for c, cut in zip(minibatches.counts, cuts, strict=True)),
        losses={name: loss + shift for name, loss in minibatches.losses.items()},
    )


def _gradients(gradients: BackwardGradients, counts: tuple[int, ...], rank: int) -> BackwardGradients:
    """Keep the norms. The ranks' gradients at the trunk, weighted by rows, add up to the whole gradient."""
    if gradients.leaves is None:
        return gradients
    rows, cuts = (torch.tensor(numbers, dtype=torch.float64) for numbers in (counts, [count // 3 for count in counts]))
    share = (cuts if rank == 0 else rows - cuts) / rows
    actor, critic, dots = ((0.3, 0.6, 0.25), (0.7, 0.4, 0.75))[rank]
    leaves = gradients.leaves
    assert leaves.dots is not None
    return gradients._replace(
        leaves=LeafGradients(
            leaves.actor.double() * actor**0.5 / share, leaves.critic.double() * critic**0.5 / share, leaves.dots.double() * dots / share**2
        )
    )


def _episodes(episodes: Episodes, rollout: RolloutEnd, rank: int) -> Episodes:
    """Select the episodes of a rank's environments, in order. Of the last hundred, a rank has every third one or the others."""
    places = torch.nonzero(rollout.ended if rollout.valid is None else rollout.ended & rollout.valid)
    assert len(places) == len(episodes.returns)
    own = [(env < FIRST) == (rank == 0) for env in places[:, 1].tolist()]
    recent = [place for place in range(len(episodes.recent_returns)) if (place % 3 == 0) == (rank == 0)]
    return Episodes(
        tuple(itertools.compress(episodes.returns, own)),
        tuple(itertools.compress(episodes.lengths, own)),
        tuple(episodes.recent_returns[place] for place in recent),
        tuple(float(place) for place in recent),
    )


def _growth(growth: GrowthUpdate, rank: int) -> GrowthUpdate:
    """Select the networks of a rank's environments."""
    columns = {name: _columns(getattr(growth.steps, name), rank) for name in ("hosts", "seeds", "rewards", "gates")}
    return replace(growth, steps=replace(growth.steps, **columns))


def recorded(run_dir: Path, updates: list[Update], facts: Mapping[str, Any]) -> None:
    """Write a run of these updates, summarised in the training process."""
    with Telemetry(run_dir=run_dir) as telemetry:
        session_of(telemetry).start(facts=facts)
        for number, update in enumerate(updates, 1):
            session_of(telemetry).submit(update)
            telemetry.flush(env_step=192 * number, update=number, gradient_step=4 * number)
