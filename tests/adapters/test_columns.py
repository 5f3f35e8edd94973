"""Columns that adapters share, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Normal

from esper_telemetry.adapters.columns import (
    FinishedEpisode,
    HeadColumns,
    LossColumns,
    chosen_log_probs,
    episodes_event,
    head_actions,
    head_columns,
    head_names,
    join_columns,
    loss_columns,
    next_values,
    normalized_advantages,
)


def test_columns_of_each_kind_of_distribution() -> None:
    """A categorical head has normalised logits, a Gaussian one mean and log of the spread, log-odds x the logits 0 and x."""
    parts = {
        "choice": Categorical(logits=torch.zeros(3, 2)),
        "number": Normal(torch.ones(3, 1), torch.full((3, 1), math.e)),
        "bit": torch.tensor([0.0, 1.0, 2.0]),
    }

    columns = head_columns(parts)

    assert columns.logits["choice"].flatten().tolist() == pytest.approx([-math.log(2)] * 6)
    assert columns.logits["bit"].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert columns.means["number"].tolist() == [[1]] * 3
    assert columns.log_std["number"].flatten().tolist() == pytest.approx([1] * 3)
    assert not columns.action_masks


def test_columns_are_detached() -> None:
    logits = torch.zeros(2, 2, requires_grad=True)

    assert not head_columns({"action": Categorical(logits=logits)}).logits["action"].requires_grad


def test_one_head_has_no_number() -> None:
    assert head_names(1) == ("action",)
    assert head_names(2) == ("action_0", "action_1")


def test_a_kind_of_column_that_some_rows_lack_is_left_out() -> None:
    rows, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with_mask, without = HeadColumns(logits={"a": rows}, action_masks={"a": mask}), HeadColumns(logits={"a": rows})

    assert join_columns([with_mask, with_mask], torch.cat).action_masks["a"].shape == (2, 2)
    joined = join_columns([with_mask, without], torch.stack)

    assert joined.logits["a"].shape == (2, 1, 2)
    assert not joined.action_masks


def test_actions_are_split_by_head() -> None:
    """Two choices and a number in each row; alone, a head has the whole row."""
    actions = torch.tensor([[1.0, 2.0, 0.5]])

    several = head_actions(actions, ("a", "b", "c"), {"c"})
    assert (several["a"].tolist(), several["b"].tolist(), several["c"].tolist()) == ([1], [2], [[0.5]])
    assert head_actions(actions, ("c",), {"c"})["c"].tolist() == actions.tolist()
    assert chosen_log_probs(torch.zeros(1, 4), several["b"]).tolist() == pytest.approx([-math.log(4)])


def test_the_state_after_a_step() -> None:
    """Values 1, 2, 3 and 4 after the last step. The second step ends an episode: 0, or 7 where a time limit cut it."""
    values, last = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([4.0])
    ended = torch.tensor([[False], [True], [False]])

    assert next_values(values, last, ended).flatten().tolist() == [2, 0, 4]
    bootstrap = torch.tensor([[0.0], [7.0], [0.0]])
    assert next_values(values, last, ended, bootstrap).flatten().tolist() == [2, 7, 4]


def test_losses_of_rows() -> None:
    """A ratio of 2 is clipped to 1.2 where the advantage is 1, and not where it is -1; a value that moved by 1 counts as moved by 0.5."""
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


def test_advantages_are_normalised_by_valid_rows() -> None:
    """Mean 2 and standard deviation √2 of 1 and 3; the padding of 9 is scaled, but not counted."""
    advantages, valid = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])

    scaled = normalized_advantages(advantages, valid)

    assert scaled.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 7 / math.sqrt(2)])
    assert normalized_advantages(advantages[:2]).tolist() == scaled[:2].tolist()


def test_episodes_become_one_event() -> None:
    event = episodes_event([FinishedEpisode(1.5, 10, 3), FinishedEpisode(2.5, 20, 7)], env_step=64)

    assert event is not None
    assert (event.env_step, event.returns, event.lengths, event.times) == (64, [1.5, 2.5], [10, 20], [3, 7])
    assert episodes_event([], env_step=64) is None
