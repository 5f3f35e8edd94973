"""Learning of CueRecall: a policy with memory solves it; a policy without memory, or with the previous episode's cue, does not."""

from typing import Any

import pytest
from recent_returns import mean_return

from esper_telemetry.ppo import PPO, preset
from esper_telemetry.ppo.environments.cue_recall import CueRecall

pytestmark = pytest.mark.system

CHANCE = 5.25  # always the same op except 0, and the right arguments: 9 / 4 + 3


def final_return(steps: int = 25_000, *, stale_cue: bool = False, **changes: Any) -> float:
    tuned = preset("cue-recall", "lstm")
    trainer = PPO(CueRecall(tuned.num_envs, seed=1, stale_cue=stale_cue), tuned.config(seed=1, **changes))
    return mean_return(trainer, steps)


def test_memory_recalls_the_cue() -> None:
    assert final_return() > 9


def test_without_memory_the_cue_is_a_guess() -> None:
    assert final_return(policy="mlp", hidden_sizes=(32,)) < CHANCE + 0.5


@pytest.mark.slow
def test_a_cue_of_the_episode_before_is_a_guess_because_memory_ends_with_the_episode() -> None:
    assert final_return(stale_cue=True) < CHANCE + 0.5
