"""Updates of one process, and the parts of them that two ranks would have seen."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.telemetry import session_of
from esper_telemetry.updates import Details, Episodes, Growth, Layer, Minibatches, Snapshot
from esper_telemetry.updates.data import ActionChoices, BackwardGradients, LeafGradients, RecurrentState, RolloutData

ENVS = 4
FIRST = 1
"""Environments of rank 0; rank 1 has the rest."""
SMALL = {"num_steps": 48, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (16,)}


def updates(env: str, **settings: Any) -> tuple[list[Snapshot], dict[str, Any]]:
    """Return some updates of one process, and the facts of its run; losses and logits in float64, so that parts of them add up."""
    trainer = PPO(make_env(env, num_envs=ENVS), PPOConfig(**{**SMALL, **settings}))
    submitted: list[Snapshot] = []

    def keep(update: Snapshot) -> None:
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


def half(snapshot: Snapshot, rank: int) -> Snapshot:
    """What a rank would have seen: its environments, its rows of every minibatch, the gradients of all."""
    assert snapshot.rollout and snapshot.minibatches and snapshot.episodes
    return snapshot._replace(
        rollout=_rollout(snapshot.rollout, rank),
        minibatches=_minibatches(snapshot.minibatches, rank),
        gradients=tuple(_gradients(part, snapshot.minibatches.counts, rank) for part in snapshot.gradients),
        episodes=_episodes(snapshot.episodes, snapshot.rollout, rank),
        growth=None if snapshot.growth is None else _growth(snapshot.growth, rank),
    )


def _columns(x: Any, rank: int) -> Any:
    """The environments of a rank, of everything with [T, B, ...] inside."""
    if isinstance(x, Tensor):
        return x[:, :FIRST] if rank == 0 else x[:, FIRST:]
    if isinstance(x, Mapping):
        return {name: _columns(part, rank) for name, part in x.items()}
    if isinstance(x, ActionChoices):
        return ActionChoices(*(_columns(part, rank) for part in x))
    return x


def _rollout(rollout: RolloutData, rank: int) -> RolloutData:
    parts = {name: _columns(part, rank) for name, part in rollout._asdict().items() if name != "constant"}
    if rollout.constant is not None:
        parts["constant"] = rollout.constant[:FIRST] if rank == 0 else rollout.constant[FIRST:]
    if rollout.actions:
        names = ("chosen", "previous", "action_masks")
        parts["actions"] = rollout.actions._replace(
            **{name: _columns(getattr(rollout.actions, name), rank) for name in names}
        )
    if rollout.memory:
        parts["memory"] = _memory(rollout.memory, rank)
    return rollout._replace(**parts)


def _memory(memory: RecurrentState, rank: int) -> RecurrentState:
    chosen = slice(FIRST) if rank == 0 else slice(FIRST, None)
    sizes = {name: getattr(memory.size, name)[..., chosen] for name in ("total", "squares", "absolute", "largest")}
    layers = [
        Layer(layer.weights, *(_columns(x, rank) for x in (layer.inputs, layer.hidden, layer.memory)))
        for layer in memory.layers
    ]
    return RecurrentState(memory.size._replace(**sizes), _columns(memory.ages, rank), tuple(layers))


def _minibatches(minibatches: Minibatches, rank: int) -> Minibatches:
    """The first third of the rows of every minibatch, or the rest; losses whose means, weighted by rows, are those of all."""
    cuts = [count // 3 for count in minibatches.counts]

    def rows(x: Tensor) -> Tensor:
        parts = zip(x.split(list(minibatches.counts)), cuts, strict=True)
        return torch.cat([part[:cut] if rank == 0 else part[cut:] for part, cut in parts])

    def each(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: rows(x) for name, x in columns.items()}

    counts, first = (torch.tensor(numbers, dtype=torch.float64) for numbers in (minibatches.counts, cuts))
    shift = 0.5 / first if rank == 0 else -0.5 / (counts - first)
    return minibatches._replace(
        counts=tuple(cuts) if rank == 0 else tuple(c - cut for c, cut in zip(minibatches.counts, cuts, strict=True)),
        features=_features(minibatches.features, cuts[0], rank),
        log_ratio=rows(minibatches.log_ratio),
        advantages=rows(minibatches.advantages),
        losses={name: loss + shift for name, loss in minibatches.losses.items()},
        logits=each(minibatches.logits),
        action_masks=each(minibatches.action_masks),
        log_std=each(minibatches.log_std),
        head_log_ratios=each(minibatches.head_log_ratios),
        relevance=each(minibatches.relevance),
        rows=None if minibatches.rows is None else rows(minibatches.rows),
        details=None if minibatches.details is None else _details(minibatches.details, rows),
    )


def _details(details: Details, rows: Callable[[Tensor], Tensor]) -> Details:
    """A rank's rows of every column."""

    def cut(x: Any) -> Any:
        """Of one column, of none, or of one for each head."""
        return {head: rows(part) for head, part in x.items()} if isinstance(x, Mapping) else x if x is None else rows(x)

    parts: dict[str, Any] = {name: cut(part) for name, part in details._asdict().items()}
    return Details(**parts)


def _gradients(gradients: BackwardGradients, counts: tuple[int, ...], rank: int) -> BackwardGradients:
    """The same norms, and gradients at the trunk whose parts, in the shares of the rows, make up those of all."""
    if gradients.leaves is None:
        return gradients
    rows, cuts = (torch.tensor(numbers, dtype=torch.float64) for numbers in (counts, [count // 3 for count in counts]))
    share = (cuts if rank == 0 else rows - cuts) / rows
    actor, critic, dots = ((0.3, 0.6, 0.25), (0.7, 0.4, 0.75))[rank]
    leaves = gradients.leaves
    assert leaves.dots is not None
    return gradients._replace(
        leaves=LeafGradients(
            leaves.actor.double() * actor**0.5 / share,
            leaves.critic.double() * critic**0.5 / share,
            leaves.dots.double() * dots / share**2,
        ),
    )


def _features(features: Tensor | None, cut: int, rank: int) -> Tensor | None:
    return None if features is None else features[:cut] if rank == 0 else features[cut:]


def _episodes(episodes: Episodes, rollout: RolloutData, rank: int) -> Episodes:
    """Those of its environments, in their order; of the last hundred every third or the others, with the places that they have."""
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


def _growth(growth: Growth, rank: int) -> Growth:
    """The networks of its environments."""
    columns = {name: _columns(getattr(growth, name), rank) for name in ("hosts", "seeds", "rewards", "gates")}
    return growth._replace(**columns)


def recorded(run_dir: Path, snapshots: list[Snapshot], facts: Mapping[str, Any]) -> None:
    """Writes a run of these updates, summarised where the trainer is."""
    with Telemetry(run_dir=run_dir) as telemetry:
        session_of(telemetry).start(facts=facts)
        for update, snapshot in enumerate(snapshots, 1):
            session_of(telemetry).submit(snapshot)
            telemetry.flush(env_step=192 * update, update=update, gradient_step=4 * update)
