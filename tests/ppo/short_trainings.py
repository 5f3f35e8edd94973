"""Trainings whose results or events are returned."""

import statistics
from collections import deque

from ppo_builders import EventLog

from esper_telemetry.events import EpisodeEnd
from esper_telemetry.ppo import PPO


def mean_return(trainer: PPO, total_steps: int, *, episodes: int = 100) -> float:
    """Train, and return the mean return of the last episodes."""
    returns: deque[float] = deque(maxlen=episodes)
    trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
    trainer.learn(total_steps)
    return statistics.fmean(returns)


def learned(trainer: PPO, total_steps: int, *types: type) -> EventLog:
    """Train, and return the events of these types."""
    emitted = EventLog().listen(trainer, *types)
    trainer.learn(total_steps)
    return emitted
