"""Rows of minibatches as programs draw them, correctly and with mistakes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from explained import names

from esper_telemetry.equations.minibatch_rows import check_minibatches

STEPS, ENVS, SIZE = 32, 4, 16
ROLLOUT, PASSES = STEPS * ENVS, 4
Rows = list[list[np.ndarray]]


def cut(rows: np.ndarray, size: int = SIZE) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def passes(draw: Callable[[], list[np.ndarray]]) -> Rows:
    return [draw() for _ in range(PASSES)]


Program = Callable[[np.random.Generator], Rows]
PROGRAMS: dict[str, Program] = {
    "same_order": lambda g: PASSES * [cut(g.permutation(ROLLOUT))],
    "unshuffled": lambda g: passes(lambda: cut(np.arange(ROLLOUT))),
    "last_dropped": lambda g: passes(lambda: cut(g.permutation(ROLLOUT), 20)[:-1]),
    "with_replacement": lambda g: passes(lambda: cut(g.integers(0, ROLLOUT, ROLLOUT))),
    "overlapping": lambda g: passes(lambda: [g.permutation(ROLLOUT)[:SIZE] for _ in range(ROLLOUT // SIZE)]),
    "same_rows": lambda g: PASSES * [cut(g.integers(0, ROLLOUT, ROLLOUT))],
    "same_minibatch": lambda g: passes(lambda: (ROLLOUT // SIZE) * [g.permutation(ROLLOUT)[:SIZE]]),
    "one_minibatch": lambda g: passes(lambda: cut(g.permutation(ROLLOUT))[:1]),
    "environments_left_out": lambda g: passes(lambda: cut(ENVS * g.permutation(STEPS))),
    "times_left_out": lambda g: passes(lambda: cut(g.permutation(STEPS))),
    "left_out": lambda g: passes(lambda: cut(g.permutation(ROLLOUT))[:-2]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_in_the_minibatches_is_named_and_no_other(name: str, seed: int) -> None:
    rows = PROGRAMS[name](np.random.default_rng(seed))

    assert names(check_minibatches(rows, ROLLOUT, environments=ENVS)) == {name}


@pytest.mark.parametrize("size", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 10])
def test_permutations_match(size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(ROLLOUT, generator=generator).split(size) for _ in range(count)]

    assert check_minibatches(rows, ROLLOUT, environments=ENVS).matches


def test_whole_sequences_match(seed: int) -> None:
    """Each minibatch holds the sequences of one environment, too few to distinguish a fixed order from chance."""
    generator = np.random.default_rng(seed)
    grid = np.arange(ROLLOUT).reshape(STEPS, ENVS)
    rows = passes(lambda: [grid[:, env] for env in generator.permutation(ENVS)])

    assert check_minibatches(rows, ROLLOUT, environments=ENVS, shuffled=False).matches


def test_a_pass_that_training_stops_in_is_not_counted() -> None:
    generator = np.random.default_rng(0)
    rows = passes(lambda: cut(generator.permutation(ROLLOUT)))
    rows[-1] = rows[-1][:3]

    assert check_minibatches(rows, ROLLOUT).matches


def test_rows_that_are_no_transitions_are_named() -> None:
    generator = np.random.default_rng(0)
    valid = generator.random((STEPS, ENVS)) > 0.2
    rows = passes(lambda: cut(generator.permutation(np.flatnonzero(valid))))
    everything = passes(lambda: cut(generator.permutation(ROLLOUT)))

    assert check_minibatches(rows, ROLLOUT, environments=ENVS, valid=valid).matches
    assert names(check_minibatches(everything, ROLLOUT, environments=ENVS, valid=valid)) == {"padding"}


def test_passes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one pass"):
        check_minibatches([], 8)
    with pytest.raises(ValueError, match="rows must be from 0 to 7, got 0 to 8"):
        check_minibatches([[[0, 8]]], 8)
    with pytest.raises(ValueError, match="whole numbers"):
        check_minibatches([[[0.0, 1.0]]], 8)
