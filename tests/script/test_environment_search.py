"""Environments whose functions have other names are found by what flows through them: a choice goes in, a reward and an end come out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import gymnasium
import numpy as np
import pytest
import torch
from tapping import new_listener, observed, tapped
from torch import nn
from torch.distributions import Categorical

from esper_telemetry.adapters.script.observed_steps import step_result
from esper_telemetry.adapters.script.script_taps import Taps
from esper_telemetry.equations.transitions import checksums

LIMIT = 4
"""Steps of an episode."""


class Senda:
    """An environment with Spanish names; `vista` shows the state, and `coste` is a part of `paso`."""

    def __init__(self) -> None:
        self.lugar = 0

    def reiniciar(self) -> list[float]:
        self.lugar = 0
        return self.vista()

    def vista(self) -> list[float]:
        return [self.lugar + 0.5, 1.5]

    def coste(self) -> float:
        return 0.5 * self.lugar

    def paso(self, accion: int) -> tuple[list[float], float, bool]:
        self.lugar += 1
        return self.vista(), accion - self.coste(), self.lugar == LIMIT


class Steps(Senda):
    """The same with the usual names."""

    step, reset = Senda.paso, Senda.reiniciar


class Weg:
    """The same with German names: `schritt` returns a dictionary, and the observation is asked for."""

    __slots__ = ("senda",)

    def __init__(self) -> None:
        self.senda = Senda()

    def neu(self) -> list[float]:
        return self.senda.reiniciar()

    def bild(self) -> list[float]:
        return self.senda.vista()

    def schritt(self, aktion: int) -> dict[str, Any]:
        _, reward, over = self.senda.paso(aktion)
        return {"belohnung": reward, "ende": over}


def transition(place: int, action: int) -> tuple[tuple[int, float], float, bool]:
    return (place + 1, 1.5), action - 0.5 * (place + 1), place + 1 == LIMIT


def path() -> Generator[tuple[list[float], float, bool], int, None]:
    place, reward = 0, 0.0
    while True:
        action = yield [place + 0.5, 1.5], reward, place == LIMIT
        place, reward = place + 1, action - 0.5 * place


def walk_to_the_end() -> Generator[tuple[list[float] | None, float], int, None]:
    place, reward = 0, 0.0
    while place < LIMIT:
        action = yield [place + 0.5, 1.5], reward
        place, reward = place + 1, action - 0.5 * place
    yield None, reward


SIGNATURE = str(inspect.signature(Senda.paso))
CODES = [one.__code__ for one in (Senda.paso, Senda.reiniciar, transition)]


class Holder:
    """An object that holds a generator."""

    walk: Generator[tuple[list[float], float, bool], int, None]


holder = Holder()


def bounds(values: list[float], action: int) -> tuple[float, float, int]:
    return min(values), max(values), action


def other(action: int) -> float:
    return bounds([0.5, 1.0], action)[1]


def act(form: str, steps: int, cut: int = LIMIT) -> list[tuple[float, bool]]:
    """Choose actions by a policy; the program begins an episode after an end, and after `cut` steps."""
    torch.manual_seed(1)
    policy = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 5))
    results, length = list[tuple[float, bool]](), cut
    senda, weg, place, walks = Senda(), Weg(), 0, [walk_to_the_end()]
    path_of_steps, early = Steps(), senda.paso

    def advance(action: int) -> tuple[list[float], float, bool]:
        senda.lugar += 1
        return senda.vista(), 1.0 * action, senda.lugar == LIMIT

    for _ in range(steps):
        if length == cut or (results and results[-1][1]):
            length = place = 0
            senda = Senda() if form == "new object" else senda
            senda.reiniciar()
            weg.neu()
            walks = [walk_to_the_end()]
            next(walks[0])
            holder.walk = path()
            next(holder.walk)
        with torch.no_grad():
            action = int(Categorical(logits=policy(torch.ones(2))).sample())
        match form:
            case "methods" | "new object":
                _, reward, over = senda.paso(action)
                senda.vista()
            case "dictionary":
                reward, over = weg.schritt(action).values()
                weg.bild()
            case "stepped":
                _, reward, over = path_of_steps.step(action)
            case "function":
                (place, _), reward, over = transition(place, action)
            case "generator":
                _, reward, over = holder.walk.send(action)
            case "nested":
                _, reward, over = advance(action)
            case "early reference":
                _, reward, over = early(action)
            case "generators":
                seen, reward = walks[0].send(action)
                over = seen is None
            case _:
                reward, over = other(action), False
        results.append((reward, over))
        length += 1
    with torch.no_grad():
        policy(torch.ones(2))
    return results


@pytest.mark.parametrize(
    "form", ["methods", "dictionary", "function", "generator", "nested", "early reference", "new object", "generators"]
)
def test_an_environment_of_any_form_is_found_from_its_first_step_on(form: str) -> None:
    with tapped() as listener:
        results = act(form, steps=8)

    taken = observed(listener.environments)
    assert taken.rewards.flatten().tolist() == [reward for reward, _ in results]
    assert taken.ended.flatten().tolist() == [over for _, over in results]
    assert [one.__code__ for one in (Senda.paso, Senda.reiniciar, transition)] == CODES
    assert results == act(form, steps=8)


def push(seen: np.ndarray, force: np.ndarray, clock: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    moved = seen + np.concatenate([force, force], 1)
    return moved, force[:, 0] - 0.5 * clock, clock == LIMIT


def test_noise_shows_the_environment_of_a_policy_of_plain_tensors() -> None:
    """The actions are no choice that is known: they are the argument that is no observation."""
    weights, seen, clock, paid, forces = torch.ones(2, 1), np.zeros((3, 2), np.float32), np.zeros(3, int), [], []
    with tapped() as listener:
        for _ in range(6):
            forces.append((torch.from_numpy(seen) @ weights + torch.randn(3, 1)).numpy())
            clock = clock % LIMIT + 1
            seen, rewards, _ = push(seen, forces[-1], clock)
            paid.append(rewards)
        torch.randn(1)

    taken = observed(listener.environments)
    np.testing.assert_allclose(taken.rewards, np.stack(paid), rtol=1e-6)
    assert taken.ended.tolist() == [[step % LIMIT == 3] * 3 for step in range(6)]
    assert taken.received is not None
    np.testing.assert_array_equal(taken.received.reshape(6, 3), np.stack(forces)[..., 0])


@pytest.mark.parametrize("form", ["methods", "dictionary", "generator", "new object", "generators"])
def test_episodes_that_the_program_ends_itself_are_counted(form: str) -> None:
    with tapped() as listener:
        act(form, steps=11, cut=3)

    assert [one.length for one in listener.environments.take()[0]] == [3, 3, 3]


def test_a_tapped_class_that_is_pickled_by_value_does_nothing_elsewhere() -> None:
    with tapped():
        act("methods", steps=3)
        assert str(inspect.signature(Senda.paso)) == SIGNATURE
        assert Senda.paso.__code__ not in CODES and Senda.reiniciar.__code__ not in CODES
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            pickled = cloudpickle.dumps(Senda.paso)
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])

    assert cloudpickle.loads(pickled)(Senda(), 1) == ([1.5, 1.5], 0.5, False)


def test_a_step_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of the recorder are not among those that are searched for environments."""
    calls, plain = list[object](), Taps.after_step

    def counted(taps: Taps, env: object, *args: Any, **options: Any) -> None:
        calls.append(env)
        plain(taps, env, *args, **options)

    monkeypatch.setattr(Taps, "after_step", counted)
    with tapped() as listener:
        act("stepped", steps=8)

    assert listener.environments.steps == len(calls) == 8


def test_other_functions_are_no_environments() -> None:
    """They return numbers and flags, too, but not a reward of a choice."""
    with tapped() as listener:
        act("none", steps=8)

    assert listener.environments.steps == 0


def test_the_choice_of_a_network_of_parameters_may_be_drawn_by_multinomial() -> None:
    scores, senda = torch.zeros(2, requires_grad=True), Senda()
    with tapped() as listener:
        for _ in range(6):
            action = int(torch.multinomial(scores.softmax(0).detach(), 1))
            senda.paso(action)
            senda.lugar %= LIMIT
        torch.multinomial(torch.ones(9), 4)  # rows, not a choice

    assert listener.environments.steps == listener.distributions.draws == 6


def test_the_choice_may_be_an_argmax_and_flags_may_be_numbers() -> None:
    days = np.zeros(3)

    def day(order: Any) -> tuple[Any, Any]:
        days[:] = (days + 1) % LIMIT
        return order - 0.5 * days, (days == 0).astype(np.float32)

    policy = nn.Linear(2, 5)
    with tapped() as listener, torch.no_grad():
        for _ in range(8):
            scores = policy(torch.ones(3, 2))
            day((scores - torch.empty_like(scores).exponential_().log()).argmax(-1).numpy())
        policy(torch.ones(3, 2))

    assert [one.length for one in listener.environments.take()[0]] == [LIMIT] * 6


def test_the_first_variable_that_is_not_finite_is_found_when_the_network_acts() -> None:
    policy = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    with tapped() as listener, torch.no_grad():
        seen = torch.ones(4, 2)
        policy(seen)
        assert listener.origin is None
        listener.acting.after_env_step()
        seen = seen / torch.tensor([1.0, 0.0]) * torch.tensor([1.0, 0.0])
        policy(seen)

    assert listener.origin is not None
    assert listener.origin.words.startswith("seen, assigned in test_environment_search.py:")
    assert listener.origin.words.endswith(", in 4 of 8 entries")


def test_rewards_are_known_from_before_wrappers_change_them() -> None:
    class Opposite(gymnasium.RewardWrapper[Any, Any]):
        def reward(self, reward: Any) -> float:
            return -0.5 * float(reward)

    with tapped() as listener:
        env = Opposite(gymnasium.make("CartPole-v1"))
        env.reset(seed=1)
        while not env.step(1)[2]:
            pass

    steps = observed(listener.environments)
    assert steps.raw_rewards is not None
    assert steps.raw_rewards.tolist() == [[1.0]] * steps.steps and steps.rewards.tolist() == [[-0.5]] * steps.steps
    assert [one.returned for one in listener.environments.take()[0]] == [steps.steps]


@pytest.mark.system
def test_a_program_that_sets_a_profiler_keeps_it() -> None:
    def profiler(*_: object) -> None:
        return

    with tapped() as listener:
        sys.setprofile(profiler)
        try:
            act("methods", steps=4)
            assert sys.getprofile() is profiler
        finally:
            sys.setprofile(None)

    assert listener.environments.steps == 0


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"state": [0.5, 1.0], "reward": 2.0, "done": True}, (2.0, True)),
        ((2.0, np.bool_(True)), (2.0, True)),
        (([0.5], torch.tensor([2.0]), torch.tensor([True])), (2.0, True)),
        (([0.5, 1.0], 2.0), (2.0, False)),
        ((3, [0.5, 1.0], {}), None),
        ((2.0, [0.5, 1.0], 1), (2.0, True)),
        ((None, 2), (2.0, True)),
        (([0.5, 1.0], 2.0, 0.5), None),
        (([0.5, 1.0], torch.ones(1, requires_grad=True)), None),
        ((2.0, 1), None),
        ((True, "text"), None),
        ([2.0, 0.5, 1.0], None),
    ],
)
def test_a_result_has_a_reward_and_a_flag(result: object, expected: tuple[float, bool] | None) -> None:
    parts = step_result(result)
    if expected is None:
        assert parts is None
        return
    listener = new_listener()
    listener.after_env_step(Senda(), parts, 0)
    taken = observed(listener.environments)
    assert (float(taken.rewards), bool(taken.ended)) == expected


def test_environments_of_a_batch_may_share_a_flag() -> None:
    listener, senda = new_listener(), Senda()
    for over in (False, True):
        result = {"seen": torch.zeros(3, 2), "reward": torch.arange(3.0), "over": over}
        listener.after_env_step(senda, result, torch.zeros(3), foreign=True)

    assert observed(listener.environments).ended.tolist() == [[False] * 3, [True] * 3]
    assert [one.returned for one in listener.environments.take()[0]] == [0.0, 2.0, 4.0]


class Halves:
    """A wrapper that shows half of each state."""

    def __init__(self) -> None:
        self.inner = Steps()

    def reset(self) -> list[float]:
        return [0.5 * one for one in self.inner.reset()]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        state, reward, over = self.inner.step(action)
        return [0.5 * one for one in state], reward, over


def test_the_observations_of_a_wrapper_are_those_that_the_script_sees() -> None:
    policy = nn.Linear(2, 2)
    with tapped() as listener:
        env = Halves()
        policy(torch.ones(2))  # from here on the classes are known
        seen = [env.reset()]
        for _ in range(LIMIT + 2):
            state, _, over = env.step(1)
            seen.append(env.reset() if over else state)
        collected = listener.environments.collected()

    assert collected is not None
    stored = torch.tensor(seen[:-1]).unsqueeze(1)
    transitions = collected.transitions(stored, None)
    assert transitions is not None
    assert torch.equal(transitions.inputs[1:], transitions.outcomes[:-1])
    assert transitions.outcomes[-1] == checksums(torch.tensor([[seen[-1]]]))
    assert listener.environments.steps == LIMIT + 2
