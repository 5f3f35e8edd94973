"""Advantages of scripts: the environments decide where episodes end, and the script's flags do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from equation_values import equation_values
from tapping import observed
from torch.autograd.graph import get_gradient_edge

from esper_telemetry.adapters.script.loss_reading import ValueTerm
from esper_telemetry.adapters.script.script_episodes import EpisodeLog
from esper_telemetry.adapters.script.script_minibatches import without_other_rows
from esper_telemetry.adapters.script.script_rollouts import ScriptRollout
from esper_telemetry.core.facts import Facts
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.target_equations import Held
from esper_telemetry.updates.update import CollectedRows, JoinedMinibatches, RolloutContext, Update


class Envs:
    """Two environments that step together."""

    num_envs = 2


def stepped(log: EpisodeLog, env: Envs, terminated: list[bool], truncated: list[bool]) -> None:
    log.after_step(env, (None, np.zeros(2), np.array(terminated), np.array(truncated), {}))


def test_ends_of_a_rollout_are_those_that_its_environments_returned() -> None:
    log, env = EpisodeLog(), Envs()
    assert log.includes(env)
    stepped(log, env, [True, False], [False, False])
    stepped(log, env, [False, True], [True, True])

    ends = observed(log)
    assert ends.ended.tolist() == [[True, False], [True, True]]
    assert ends.time_limits.tolist() == [[False, False], [True, False]]

    log.take()
    assert log.collected() is None


def test_ends_of_several_environments_that_step_apart_are_not_known() -> None:
    log, envs = EpisodeLog(), [Envs(), Envs()]
    for env in envs:
        assert log.includes(env)
        stepped(log, env, [False, False], [False, False])

    assert log.collected() is None


FACTS = Facts(gamma=0.9, gae_lambda=0.8, columns_by_name=True, precision="fp32")


def values_of(
    rollout: RolloutEnd, minibatches: JoinedMinibatches | None = None, *, later: bool = False, held: Held | None = None
) -> dict[str, float]:
    """Return the results of the checks of targets and of a first minibatch; the update is the first one, or a later one."""
    collected, context = None, RolloutContext(previous_targets=torch.zeros(6, 1) if later else None)
    if minibatches is not None and minibatches.rows is not None:
        collected = CollectedRows(rollout.advantages.flatten()[minibatches.rows])
    update = Update(rollout=rollout, minibatches=minibatches, collected=collected, context=context, sampled=True)
    return equation_values(update, FACTS, held)


def rollout(ended: torch.Tensor, advantages: torch.Tensor, columns: torch.Tensor, limits: torch.Tensor | None) -> RolloutEnd:
    rewards, values, following = columns
    return RolloutEnd(
        *(1, 1, rewards, values, advantages, advantages + values, rewards, ended, ended),
        next_values=following * ~ended,
        actions={},
        gamma=0.9,
        last_values=following[-1:],
        time_limits=limits,
    )


def random_columns(steps: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards, values and values of the next row, [3, T, 2], and ends [T, 2]."""
    generator = torch.Generator().manual_seed(4)
    columns = torch.randn(3, steps, 2, generator=generator)
    columns[2, :-1] = columns[1, 1:]
    return columns, torch.rand(steps, 2, generator=generator) < 0.15


def advantages_of(columns: torch.Tensor, ended: torch.Tensor, added: torch.Tensor | float = 0.0) -> torch.Tensor:
    rewards, values, following = columns
    result, carried = torch.zeros_like(rewards), torch.zeros(2)
    for t in range(len(rewards) - 1, -1, -1):
        delta = (rewards + added)[t] + 0.9 * following[t] * ~ended[t] - values[t]
        carried = delta + 0.72 * ~ended[t] * carried
        result[t] = carried
    return result


def known(columns: torch.Tensor, ended: torch.Tensor, advantages: torch.Tensor | None = None) -> RolloutEnd:
    """A rollout whose environments say that they have no time limits, by default with the right advantages."""
    return rollout(ended, advantages_of(columns, ended) if advantages is None else advantages, columns, torch.zeros_like(ended))


def test_flags_that_mean_another_step_are_no_mistake_unless_the_environments_say_so() -> None:
    columns, ended = random_columns()
    late = torch.cat([torch.zeros(1, 2, dtype=torch.bool), ended[:-1]])
    advantages = advantages_of(columns, late)

    assert "advantages" not in values_of(rollout(ended, advantages, columns, None))
    assert "advantages_ends_late" in values_of(known(columns, ended, advantages))


def test_whatever_a_script_adds_after_time_limits_is_right_but_to_run_on_is_not() -> None:
    columns, ended = random_columns()
    limits = ended & (torch.arange(40).unsqueeze(1) % 2 == 0)
    bootstrapped = advantages_of(columns, ended, 0.9 * torch.full((40, 2), 1.7) * limits)
    running_on = advantages_of(columns, ended & ~limits)

    assert "advantages_time_limits_end" in values_of(rollout(ended, advantages_of(columns, ended), columns, limits))
    assert values_of(known(columns, ended))["advantages"] < 1e-6
    assert values_of(rollout(ended, bootstrapped, columns, limits))["advantages"] < 1e-6
    assert "advantages_time_limit_no_end" in values_of(rollout(ended, running_on, columns, limits))


def standard(advantages: torch.Tensor) -> torch.Tensor:
    return (advantages - advantages.mean()) / advantages.std()


def test_normalised_advantages_with_values_after_time_limits_are_read_from_the_returns() -> None:
    columns, ended = random_columns(200)
    limits = ended & (torch.arange(200).unsqueeze(1) % 2 == 0)
    right = advantages_of(columns, ended, 0.9 * torch.full((200, 2), 1.7) * limits)
    whole = replace(rollout(ended, right, columns, limits), advantages=standard(right))

    assert "advantages_normalized" in values_of(whole)


def test_normalised_returns_minus_values_of_other_units_are_named() -> None:
    columns, ended = random_columns(200)
    columns[1:] = 5 * columns[1:]
    rewards, sums = columns[0], torch.zeros(200, 2)
    ended[-1] = True
    for t in range(199, -1, -1):
        sums[t] = rewards[t] + (0.9 * ~ended[t] * sums[t + 1] if t < 199 else 0.0)
    advantages = standard(standard(sums) - columns[1])
    whole = replace(known(columns, ended, advantages), returns=sums)

    assert "advantages_other_units" in values_of(whole)
    assert "advantages_normalized_returns" in values_of(replace(whole, returns=standard(sums)))


def test_actions_that_a_program_repeats_are_one_step() -> None:
    for repeats, steps in ((3, 5), (1, 15)):
        log, env = EpisodeLog(), Envs()
        assert log.includes(env)
        for time in range(15):
            log.decisions += time % repeats == 0
            over = np.array([time == 8, False])
            log.after_step(env, (np.zeros((2, 1)), np.ones(2), over, np.zeros(2, bool), {}), np.full((2, 1), time // repeats))
        taken = observed(log)
        assert (taken.steps, taken.rewards.unique().tolist()) == (steps, [float(repeats)])
        assert taken.ended[:, 0].nonzero().tolist() == [[8 // repeats]]


def test_a_critic_that_draws_its_own_rows_is_not_compared_with_the_policys() -> None:
    columns, ended = random_columns()
    own = known(columns, ended)
    names = [name for name in ScriptRollout._fields if name != "returns_known"]
    script = ScriptRollout(**{name: getattr(own, name) for name in names})
    policys, critics = torch.arange(0, 20), torch.arange(30, 50)
    returns, values = own.returns.flatten(), own.values.flatten()
    edge = get_gradient_edge(torch.ones(1, requires_grad=True))
    term = ValueTerm(values[critics] + 0.1, returns[critics], None, None, "squared", edge)

    assert without_other_rows(term, script, policys).returns is None
    assert without_other_rows(term, script, critics) is term
    swapped = term._replace(values=values[policys] + 0.1)
    assert without_other_rows(swapped, script, policys) is swapped  # targets of other rows are a mistake


def test_what_a_source_has_observed_of_the_advantages_is_their_explanation() -> None:
    columns, ended = random_columns()

    assert "advantages_uncleared" in values_of(replace(known(columns, ended), seen_difference="uncleared"))
    assert "advantages_uncleared" not in values_of(replace(known(columns, ended), seen_difference="older_weights"))


def test_differences_of_columns_found_by_name_need_an_explanation() -> None:
    columns, ended = random_columns()
    noise = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))

    assert "advantages" not in values_of(known(columns, ended, noise))


def passes_of(
    rollout: RolloutEnd, *estimates: torch.Tensor, advantages: list[torch.Tensor] | None = None, **columns: torch.Tensor
) -> JoinedMinibatches:
    """Return passes over the rollout, a minibatch each, with the critic's estimates [T, B] in them, in one loss with the policy's."""
    count, size = len(estimates), rollout.rewards.numel()
    used = advantages or [rollout.advantages] * count
    return JoinedMinibatches(
        tuple(range(count)),
        (size,) * count,
        torch.zeros(count * size),
        torch.cat([one.flatten() for one in used]),
        None,
        {"total": torch.zeros(count)},
        rows=torch.arange(size).repeat(count),
        values=torch.cat([one.flatten() for one in estimates]),
        old_values=rollout.values.flatten().repeat(count),
        returns=columns.get("returns", rollout.returns.flatten().repeat(count)),
    )


def test_values_of_another_output_are_named_and_no_last_value_is() -> None:
    """The last value is the only one of the critic."""
    columns, ended = random_columns()
    columns[2, -1] += 1
    advantages = advantages_of(columns, ended)
    columns[2, -1] -= 1
    made = known(columns, ended, advantages)
    outputs = torch.randn(40, 2, generator=torch.Generator().manual_seed(9))

    assert "advantages_other_last_value" in values_of(made, passes_of(made, made.values))
    found = values_of(made, passes_of(made, outputs))
    assert "values_other_output" in found and "advantages" not in found
    assert "values" not in values_of(made, passes_of(made, made.values + 0.1 * outputs))  # a critic that lags
    assert "values_other_rows" in values_of(made, passes_of(made, made.values.flip(0)))
    alike = replace(made, returns=torch.ones_like(made.returns), log_probs=torch.zeros_like(made.log_probs))
    assert "values" not in values_of(alike, passes_of(alike, alike.values.flip(0)))  # a row may be taken for another one


def test_targets_that_each_pass_computes_again_are_no_mistake() -> None:
    columns, ended = random_columns()
    made = known(columns, ended)
    moved = torch.stack([columns[0], *(one + 0.3 * one.square() for one in columns[1:])])
    again = advantages_of(moved, ended)
    returns = torch.cat([made.returns.flatten(), (made.advantages + moved[1]).flatten()])

    both = {"advantages": [made.advantages, again], "returns": returns}
    assert "returns_new_values" in values_of(made, passes_of(made, made.values, moved[1], returns=returns))
    assert values_of(made, passes_of(made, made.values, moved[1], **both))["returns"] < 1e-6  # type: ignore[arg-type]


def test_a_critic_whose_outputs_have_the_units_of_scaled_targets_is_named_once_there_were_targets() -> None:
    columns, ended = random_columns()
    made = known(columns, ended)
    made = replace(made, returns=(made.returns - 4) / 3)
    outputs, scaled = (passes_of(made, made.values, one) for one in (made.values * 0.9, (made.values - 4) / 3))

    assert "returns_other_units" in values_of(made, outputs, later=True)
    assert "returns" not in values_of(made, outputs)
    assert "returns_rescaled" in values_of(made, scaled, later=True)


def test_a_difference_counts_without_an_explanation_once_the_equation_has_held() -> None:
    columns, ended = random_columns()
    noise = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    held: Held = {True: set(), False: set()}

    assert values_of(known(columns, ended), held=held)
    assert values_of(known(columns, ended, noise), held=held)["advantages"] > 0.1
    ended[-1] = True  # such rollouts have not been seen to hold
    assert "advantages" not in values_of(known(columns, ended, noise), held=held)


def test_environments_that_tell_time_limits_know_the_ends() -> None:
    """Values after limits are known, and the advantages are of flags one step late."""
    columns, ended = random_columns()
    late = torch.cat([torch.zeros(1, 2, dtype=torch.bool), ended[:-1]])
    limits = ended & (torch.arange(40).unsqueeze(1) % 2 == 0)
    made = replace(rollout(ended, advantages_of(columns, late), columns, None), terminated=ended & ~limits)

    assert "advantages_ends_late" in values_of(made)
