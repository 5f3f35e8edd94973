"""Why a script's training computes other log-probabilities than its acting, found from its network's inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from tapping import tapped
from torch import Tensor, nn

from esper_telemetry.adapters.script.acting import Acting, ActingLog, TrainedRows
from esper_telemetry.adapters.script.network_logs import LstmLog
from esper_telemetry.equations.transitions import checksums

STEPS, ENVS, INPUTS = 8, 4, 3


def acted(network: nn.Sequential, states: Tensor) -> Acting:
    """Return the log of a network that acts on these states [T, B, n]."""
    log = ActingLog()
    with torch.no_grad():
        for inputs in states:
            rows = inputs
            for layer in network:
                if isinstance(layer, nn.Linear):
                    log.add(layer, rows, has_graph=False)
                rows = layer(rows)
            log.after_env_step()
    acting = log.take(len(states), ENVS)
    assert acting is not None
    return acting


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 5), *between, nn.Linear(5, 2))


@pytest.mark.parametrize("case", ["same", "running", "noise", "copy", "older copy", "dropout", "mode"])
def test_what_differs_between_acting_and_training(case: str) -> None:
    """Training uses the rows in another order. Running statistics differ from step to step."""
    trained = network(nn.Dropout(0.5)) if case in ("dropout", "mode") else network()
    stored = torch.randn(STEPS, ENVS, INPUTS)
    moving = torch.linspace(1, 2, STEPS).reshape(-1, 1, 1)
    inputs = {"running": (stored - moving) / moving, "noise": stored + torch.randn_like(stored)}.get(case, stored)
    acting_network = copy.deepcopy(trained) if "copy" in case else trained
    if case == "older copy":
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(trained.parameters()) + 0.1, trained.parameters())
    acting = acted(acting_network.train(case != "mode"), inputs)
    rows = torch.randperm(STEPS * ENVS)
    parameters = list(trained.parameters())

    named = acting.difference(stored.reshape(-1, INPUTS)[rows], rows, stored, parameters, [trained.train()])

    expected = {"running": "other_statistics", "noise": "other_observations", "older copy": "older_weights"}
    assert named == {**expected, "dropout": "random_passes", "mode": "other_mode"}.get(case)


def test_images_on_another_scale_are_named() -> None:
    log, layer = ActingLog(), nn.Conv2d(1, 2, 2)
    images = torch.rand(STEPS, ENVS, 1, 3, 3)
    for inputs in images:
        log.add(layer, inputs, has_graph=False)
        log.after_env_step()
    acting = log.take(STEPS, ENVS)

    assert acting is not None
    assert acting.difference(255 * images.flatten(0, 1), torch.arange(STEPS * ENVS), None, [layer.weight], []) == "other_scale"
    assert acting.difference(images.flatten(0, 1), torch.arange(STEPS * ENVS), None, [layer.weight], []) is None


def test_a_network_may_act_with_a_graph_and_training_is_none_of_its_acting() -> None:
    acting, trained = nn.Linear(INPUTS, 2), nn.Linear(INPUTS, 2)
    log, states = ActingLog(), torch.randn(STEPS, ENVS, INPUTS)
    log.add(trained, torch.randn(16, INPUTS), has_graph=True)
    log.before_backward()
    for inputs in states:
        log.add(acting, inputs, has_graph=True)
        log.after_env_step()
    log.add(trained, torch.randn(16, INPUTS), has_graph=True)
    log.before_backward()

    taken = log.take(STEPS, ENVS)

    assert taken is not None and torch.equal(taken.inputs, states)
    assert [weight() for weight in taken.weights] == [acting.weight]


@pytest.mark.parametrize("delayed", [False, True])
def test_running_statistics_of_one_environment_change_from_step_to_step(delayed: bool) -> None:
    """Slowly changing observations are nearly the previous observations times a number."""
    time = torch.arange(64.0).reshape(-1, 1, 1)
    stored = torch.sin(time / torch.tensor([9.0, 5.0, 3.0]) + torch.arange(3))
    moving = 1 + time / 2000
    inputs = torch.cat([stored[:1], stored[:-1]]) if delayed else (stored - moving) / moving
    acting = Acting(inputs, [], training=False)

    named = acting.difference(stored.reshape(-1, INPUTS), torch.arange(64), stored, [], [])

    assert named == ("other_observations" if delayed else "other_statistics")


def test_weights_that_a_parametrisation_computes_are_not_asked_for() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(INPUTS, 3))
    before = [buffer.clone() for buffer in layer.buffers()]

    ActingLog().add(layer, torch.zeros(1, INPUTS), has_graph=False)

    assert before and all(torch.equal(*pair) for pair in zip(before, layer.buffers(), strict=True))


def test_calls_that_do_not_fit_the_rollout_are_none_of_its_acting() -> None:
    log = ActingLog()
    log.add(nn.Linear(INPUTS, 1), torch.zeros(1, INPUTS), has_graph=False)
    log.after_env_step()

    assert log.take(STEPS, ENVS) is None


def test_rows_of_earlier_updates_are_those_that_no_later_step_acted_on() -> None:
    """The second update is trained on the first update's rows, the third only on one of them, and on one that was acted on twice."""
    torch.manual_seed(3)
    plain, states = network(), torch.randn(3, STEPS, ENVS, INPUTS)
    states[2, 0, 0] = states[1, 0, 0]
    rows, numbers = TrainedRows(), [checksums(part).flatten() for part in states]
    losses = [numbers[0], torch.cat([numbers[1], numbers[0]]), torch.cat([numbers[2], numbers[1][:1]])]
    found = []
    for part, loss in zip(states, losses, strict=True):
        rows.begin(acted(plain, part))
        found.append(rows.add(loss))

    assert found[0] is None and found[2] is None
    assert found[1] is not None and found[1].nonzero().flatten().tolist() == [*range(STEPS * ENVS, 2 * STEPS * ENVS)]


def test_rows_of_an_unfinished_episode_may_be_trained_on_later() -> None:
    """They were acted on before the last update, which left them out."""
    torch.manual_seed(4)
    plain, states, rows = network(), torch.randn(2, STEPS, ENVS, INPUTS), TrainedRows()
    first, second = (checksums(part).flatten() for part in states)
    rows.begin(acted(plain, states[0]))
    rows.add(first[:-5])
    rows.begin(acted(plain, states[1]))

    assert rows.add(torch.cat([first[-5:], second])) is None


@pytest.mark.parametrize(("kind", "parts"), [(nn.LSTMCell, 2), (nn.GRUCell, 1)])
@pytest.mark.parametrize(("calls", "is_known"), [(STEPS, True), (STEPS + 1, True), (2 * STEPS, False)])
def test_states_of_a_recurrent_cell_are_those_before_each_step(kind: type[nn.RNNCellBase], parts: int, calls: int, is_known: bool) -> None:
    """Another call estimates the value after the last step; two calls in each step do not fit the rollout."""
    log, cell = LstmLog(), kind(INPUTS, 3)  # type: ignore[call-arg]  # of the subclasses
    states = torch.randn(calls, parts, ENVS, 3)
    with torch.no_grad():
        for state in states:
            log.add(cell, (torch.zeros(ENVS, INPUTS), tuple(state) if parts == 2 else state[0]))

    recorded = log.take(STEPS, ENVS)

    assert (recorded is not None) is is_known
    if recorded is not None:
        assert torch.equal(recorded.states, states[:STEPS].unsqueeze(1))


class Noisy(nn.Module):
    """A policy that a script compiles, with functions of torch that are replaced while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, 2)

    def forward(self, states: Tensor) -> Tensor:
        """Actions of noisy scores."""
        scores = self.layer(states)
        return torch.argmax(scores + torch.randn_like(scores), -1) + torch.multinomial(scores.softmax(-1), 1)[:, 0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_compiles_what_a_script_calls() -> None:
    with tapped():
        compiled = torch.jit.script(Noisy())
        assert compiled(torch.randn(STEPS, INPUTS)).shape == (STEPS,)
    assert torch.jit.script(Noisy())(torch.randn(STEPS, INPUTS)).shape == (STEPS,)


def test_a_compiled_policy_stays_one_graph() -> None:
    layer = nn.Linear(INPUTS, 2)

    def act(states: Tensor) -> Tensor:
        policy = torch.distributions.Normal(layer(states), 1.0, validate_args=False)  # as `torch.compile` sets it, once in a process
        log_probs: Tensor = policy.log_prob(policy.sample() + torch.randn(STEPS, 2))
        return log_probs

    torch._dynamo.reset()
    with tapped():
        compiled = torch.compile(act, backend="eager", fullgraph=True)  # raises if torch cannot trace all of it
        assert compiled(torch.randn(STEPS, INPUTS)).requires_grad
