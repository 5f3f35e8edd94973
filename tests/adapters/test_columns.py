"""Columns shared by adapters, with numbers worked by hand."""

import math

import pytest
import torch
from torch.distributions import Categorical, Normal

from esper_telemetry.adapters.columns import (
    EvaluatedMinibatch,
    FinishedEpisode,
    HeadColumns,
    LossColumns,
    as_grid,
    chosen_log_probs,
    episodes_event,
    evaluated_minibatches,
    head_actions,
    head_columns,
    join_columns,
    loss_columns,
    minibatch_means,
    next_values,
    normalized_advantages,
    rows_by_environment,
)


def test_columns_of_each_kind_of_distribution() -> None:
    """A categorical head yields normalised logits, a Gaussian its mean and log standard deviation, and log-odds x the logits 0 and x."""
    parts = {
        "choice": Categorical(logits=torch.zeros(3, 2, requires_grad=True)),
        "number": Normal(torch.ones(3, 1), torch.full((3, 1), math.e)),
        "bit": torch.tensor([0.0, 1.0, 2.0]),
    }

    columns = head_columns(parts)

    assert columns.logits["choice"].flatten().tolist() == pytest.approx([-math.log(2)] * 6)
    assert columns.logits["bit"].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert columns.means["number"].tolist() == [[1]] * 3
    assert columns.log_std["number"].flatten().tolist() == pytest.approx([1] * 3)
    assert not columns.action_masks and not columns.logits["choice"].requires_grad


def test_a_kind_of_column_that_some_rows_lack_is_left_out() -> None:
    rows, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with_mask, without = HeadColumns(logits={"a": rows}, action_masks={"a": mask}), HeadColumns(logits={"a": rows})

    assert join_columns([with_mask, with_mask], torch.cat).action_masks["a"].shape == (2, 2)
    joined = join_columns([with_mask, without], torch.stack)

    assert joined.logits["a"].shape == (2, 1, 2)
    assert not joined.action_masks


def test_actions_are_split_by_head() -> None:
    """Each row has two choices and a number; with a single head, the head is the whole row."""
    actions = torch.tensor([[1.0, 2.0, 0.5]])

    several = head_actions(actions, ("a", "b", "c"), {"c"}, (1,))
    assert (several["a"].tolist(), several["b"].tolist(), several["c"].tolist()) == ([1], [2], [[0.5]])
    assert head_actions(actions, ("c",), {"c"}, (1,))["c"].tolist() == actions.tolist()
    assert chosen_log_probs(torch.zeros(1, 4), several["b"]).tolist() == pytest.approx([-math.log(4)])


def test_a_single_environment_keeps_its_dimension() -> None:
    """Five steps [5, 1] of one environment, and five rows [5] with one entry each."""
    assert head_actions(torch.zeros(5, 1), ("a",), (), (5, 1))["a"].shape == (5, 1)
    assert head_actions(torch.zeros(5, 1), ("a",), (), (5,))["a"].shape == (5,)
    with pytest.raises(ValueError, match=r"actions \[5, 1\] lack an entry for each of 2 heads in rows \[5\]"):
        head_actions(torch.zeros(5, 1), ("a", "b"), (), (5,))


def test_flat_rollouts_become_grids() -> None:
    """Three rows of the first environment and two of the second, so the grid's last step lacks the second environment's row."""
    rows = rows_by_environment([3, 2])

    assert rows.tolist() == [0, 2, 4, 1, 3]
    assert as_grid(torch.tensor([1.0, 2, 3, 4, 5]), rows, 2).tolist() == [[1, 4], [2, 5], [3, 0]]
    assert as_grid(torch.ones(5, dtype=torch.bool), rows, 2).tolist() == [[True, True], [True, True], [True, False]]
    assert as_grid(torch.zeros(4, 7), torch.arange(4), 2).shape == (2, 2, 7)


def test_means_of_minibatches() -> None:
    assert minibatch_means(torch.tensor([1.0, 3, 5, 7]), (2, 2)).tolist() == [2, 6]
    assert minibatch_means(torch.tensor([1.0, 3, 5]), (1, 2)).tolist() == [1, 4]


def test_rows_that_are_no_data_are_left_out_of_minibatches() -> None:
    """The second row of the second minibatch is padding. The other rows have ratio e, so their clipped loss is -1.2 times 1."""
    column = torch.ones(2)
    whole = EvaluatedMinibatch(0, torch.tensor([0, 1]), column, 0 * column, column, column, column, (torch.full((2, 1), math.e),), column)
    joined = evaluated_minibatches([whole, whole._replace(epoch=1, rows=torch.tensor([1]))], clip=0.2, clip_value=None)

    assert (joined.epochs, joined.counts) == ((0, 1), (2, 1))
    assert joined.rows is not None
    assert joined.rows.tolist() == [0, 1, 1]
    assert joined.log_ratio.tolist() == [1, 1, 1]
    assert joined.losses["policy"].tolist() == pytest.approx([-1.2, -1.2])
    assert joined.losses["value"].tolist() == [0, 0]
    assert joined.log_std["action"].flatten().tolist() == pytest.approx([1, 1, 1])
    assert not joined.means


def test_the_state_after_a_step() -> None:
    """Values 1, 2, 3 and 4 after the last step. The second step ends an episode: its value is 0, or 7 if a time limit ended it."""
    values, last = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([4.0])
    ended = torch.tensor([[False], [True], [False]])

    assert next_values(values, last, ended).flatten().tolist() == [2, 0, 4]
    bootstrap = torch.tensor([[0.0], [7.0], [0.0]])
    assert next_values(values, last, ended, bootstrap).flatten().tolist() == [2, 7, 4]


def test_losses_of_rows() -> None:
    """A ratio of 2 is clipped to 1.2 if the advantage is 1, but not if it is -1; a value that moved by 1 is clipped to 0.5."""
    columns = LossColumns(
        log_ratio=torch.full((2,), math.log(2)),
        log_probs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        values=torch.ones(2),
        old_values=torch.zeros(2),
        returns=torch.full((2,), 2.0),
        entropy=torch.full((2,), 0.3),
    )

    clipped, plain = loss_columns(columns, 0.2, 0.5), loss_columns(columns, None, None)

    assert clipped["policy"].tolist() == pytest.approx([-1.2, 2.0])
    assert clipped["value"].tolist() == [1.125, 1.125]
    assert clipped["entropy"].tolist() == pytest.approx([-0.3, -0.3])
    assert plain["policy"].tolist() == [1, -2]
    assert plain["value"].tolist() == [0.5, 0.5]


def test_losses_with_two_clips() -> None:
    """A ratio of 8: with a dual clip of 3, the loss at an advantage of -1 is 3, not 8.

    Targets are 0 and values moved from 0 to 1: the loss of the value clipped to 0.5 is 0.125, the larger one 0.5.
    """
    zeros, ones = torch.zeros(2), torch.ones(2)
    advantages = torch.tensor([1.0, -1.0])
    columns = LossColumns(torch.full((2,), math.log(8)), zeros, advantages, ones, zeros, zeros, zeros)

    losses = loss_columns(columns, 0.2, 0.5, dual_clip=3.0, clip_maximum=True)

    assert losses["policy"].tolist() == pytest.approx([-1.2, 3.0])
    assert losses["value"].tolist() == [0.5, 0.5]
    assert loss_columns(columns, 0.2, 0.5)["policy"].tolist() == pytest.approx([-1.2, 8.0])
    assert loss_columns(columns, 0.2, 0.5)["value"].tolist() == [0.125, 0.125]


def test_advantages_are_normalised_by_valid_rows() -> None:
    """1 and 3 have mean 2 and standard deviation √2; the padding of 9 is scaled, but not counted."""
    advantages, valid = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])

    scaled = normalized_advantages(advantages, valid)

    assert scaled.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 7 / math.sqrt(2)])
    assert normalized_advantages(advantages[:2]).tolist() == scaled[:2].tolist()


def test_episodes_become_one_event() -> None:
    event = episodes_event([FinishedEpisode(1.5, 10, 3), FinishedEpisode(2.5, 20, 7)], env_step=64)

    assert event is not None
    assert (event.env_step, event.returns, event.lengths, event.times) == (64, [1.5, 2.5], [10, 20], [3, 7])
    assert episodes_event([], env_step=64) is None
