"""Terms of losses as their graphs show them, and the passes of a script."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

from esper_telemetry.adapters.script.autograd_graph import (
    NO_OUTPUTS,
    DistributionGraphs,
    LossGraph,
    detaches_states,
    graph_of,
    in_words,
    nonfinite_operation,
    takes_softmax_twice,
)
from esper_telemetry.adapters.script.loss_graph import read_loss
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.script_minibatches import PassFinder, common_factor
from esper_telemetry.adapters.script.settings import read_coefficients

ROWS, CLIP = 16, 0.2

Error = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Critic losses of estimates, targets and estimates at collection; with the clip, and the weight relative to half a squared error."""


class Rows:
    """Rows of a minibatch, with a policy and a critic of one layer each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        states = torch.randn(ROWS, 3)
        distribution = self.distribution = Categorical(logits=nn.Linear(3, 2)(states))
        self.log_probs, self.entropy = distribution.log_prob(torch.arange(ROWS) % 2), distribution.entropy()
        self.output = nn.Linear(3, 1)(states)
        self.values = self.output.view(-1)
        self.old_log_probs = self.log_probs.detach() - 0.1 * torch.randn(ROWS)
        self.ratio = (self.log_probs - self.old_log_probs).exp()
        self.advantages, self.returns = torch.randn(ROWS), torch.randn(ROWS)
        self.old_values = self.values.detach() + 0.1 * torch.randn(ROWS)

    def surrogate(self, ratio: Tensor | None = None) -> Tensor:
        ratio = self.ratio if ratio is None else ratio
        return torch.max(-self.advantages * ratio, -self.advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()

    def read(self, loss: Tensor) -> LossReading:
        outputs = DistributionGraphs([self.log_probs], [self.entropy])
        reading = read_loss(loss, held=[self.values], outputs=outputs, values=[self.output])
        assert reading is not None
        return reading


def squared(values: Tensor, returns: Tensor, old: Tensor) -> Tensor:
    return (values - returns) ** 2


def clipped(values: Tensor, returns: Tensor, old: Tensor) -> Tensor:
    return (old + torch.clamp(values - old, -CLIP, CLIP) - returns) ** 2


ERRORS: dict[str, tuple[Error, float | None, float]] = {
    "half the square": (lambda v, r, o: 0.5 * squared(v, r, o).mean(), None, 1.0),
    "F.mse_loss": (lambda v, r, o: F.mse_loss(v, r), None, 2.0),
    "targets first": (lambda v, r, o: (r - v).pow(2).sum() / ROWS, None, 2.0),
    "a product": (lambda v, r, o: ((r - v) * (r - v)).mean(), None, 2.0),
    "a Huber loss": (lambda v, r, o: F.smooth_l1_loss(v, r), None, 1.0),
    "the larger one": (lambda v, r, o: torch.max(squared(v, r, o), clipped(v, r, o)).mean(), CLIP, 2.0),
    "the smaller one": (lambda v, r, o: torch.min(squared(v, r, o), clipped(v, r, o)).mean(), CLIP, 2.0),
    "the clipped one alone": (lambda v, r, o: 0.5 * clipped(v, r, o).mean(), CLIP, 1.0),
    "clipped by tensors": (lambda v, r, o: torch.clamp(v, o - CLIP, o + CLIP).sub(r).pow(2).mean(), CLIP, 2.0),
}


@pytest.mark.parametrize("name", ERRORS)
def test_values_targets_clip_and_weight_of_a_value_loss(name: str) -> None:
    rows = Rows()
    error, clip, weight = ERRORS[name]

    reading = rows.read(rows.surrogate() + error(rows.values, rows.returns, rows.old_values))

    value = reading.value
    assert reading.complete and value is not None and value.values is not None and value.returns is not None
    torch.testing.assert_close(value.values, rows.values.detach())
    torch.testing.assert_close(value.returns, rows.returns)
    assert (value.clip is None) == (clip is None) and value.clip == pytest.approx(clip)
    assert value.weight == pytest.approx(weight)
    torch.testing.assert_close(value.loss, error(rows.values, rows.returns, rows.old_values).detach() / weight)
    if clip is not None:
        torch.testing.assert_close(value.old_values, rows.old_values)


def test_a_difference_of_a_column_and_a_row_has_their_numbers() -> None:
    rows = Rows()

    value = rows.read(rows.surrogate() + (rows.output - rows.returns).square().mean()).value

    assert value is not None and value.values is not None and value.returns is not None
    torch.testing.assert_close(value.returns, rows.returns)


@pytest.mark.parametrize("column_first", [True, False])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_torch_functions_that_broadcast_have_their_numbers(loss: Callable[..., Tensor], column_first: bool) -> None:
    rows = Rows()
    values, returns = (rows.output, rows.returns) if column_first else (rows.values, rows.returns.unsqueeze(1))
    with pytest.warns(UserWarning, match="target size"):
        term = rows.read(rows.surrogate() + loss(values, returns)).value

    assert term is not None and term.values is not None and term.returns is not None
    torch.testing.assert_close(term.values, rows.values.detach())
    torch.testing.assert_close(term.returns, rows.returns)


@pytest.mark.parametrize("form", ["plain", "plain inverted", "added", "subtracted", "inverted"])
def test_the_ratio_is_that_of_the_new_policy_whatever_the_loss_has(form: str) -> None:
    """Log-probabilities may also be stored as negative ones."""
    rows = Rows()
    new, old, negative = rows.log_probs, rows.old_log_probs, -rows.old_log_probs
    log_ratio = {
        "plain": new - old,
        "plain inverted": old - new,
        "added": negative + new,
        "subtracted": negative - -new,
        "inverted": -new - negative,
    }[form]

    policy = rows.read(rows.surrogate(log_ratio.exp())).policy

    assert policy is not None and policy.inverted == ("inverted" in form)
    torch.testing.assert_close(policy.log_ratio, (new - old).detach())
    torch.testing.assert_close(policy.old_log_probs, old)
    torch.testing.assert_close(policy.advantages, rows.advantages)
    assert policy.clip == pytest.approx(CLIP)


def test_a_clip_that_does_nothing_is_known() -> None:
    rows = Rows()
    ratio = (rows.log_probs - rows.old_log_probs).exp()

    policy = rows.read(-torch.min(ratio * rows.advantages, ratio.clamp(-9, 11) * rows.advantages).mean()).policy

    assert policy is not None and policy.clip == pytest.approx(10)


Surrogate = Callable[[Tensor, Tensor], Tensor]
"""Policy losses as functions of ratios and advantages."""

OTHER_SURROGATES: dict[str, Surrogate] = {
    "SPO": lambda ratio, a: a.abs() / 0.4 * (ratio - 1) ** 2 - ratio * a,
    "soft clip": lambda ratio, a: -(0.2 * torch.tanh((ratio - 1) / 0.2) * a + a),
    "sigmoid": lambda ratio, a: -torch.sigmoid(4 * (ratio - 1)) * a,
    "one bound": lambda ratio, a: -torch.where(a > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * a,
}


@pytest.mark.parametrize("name", OTHER_SURROGATES)
def test_a_loss_of_another_function_of_the_ratio_shows_its_ratios_and_is_not_judged(name: str) -> None:
    rows = Rows()

    reading = rows.read(OTHER_SURROGATES[name](rows.ratio, rows.advantages).mean() + rows.values.square().mean())

    policy = reading.policy
    assert policy is not None and policy.log_ratio is not None
    torch.testing.assert_close(policy.log_ratio, (rows.log_probs - rows.old_log_probs).detach())
    torch.testing.assert_close(policy.old_log_probs, rows.old_log_probs)
    assert (policy.loss, policy.clip, reading.complete) == (None, None, False)


@pytest.mark.parametrize("first", [False, True])
def test_the_cross_entropy_of_a_critic_is_not_the_policys_term(first: bool) -> None:
    rows = Rows()
    bins = nn.Linear(3, 5)(torch.randn(ROWS, 3)).log_softmax(-1)
    critic = -(torch.rand(ROWS) * bins.gather(1, torch.arange(ROWS).remainder(5)[:, None])[:, 0]).mean()

    reading = rows.read(critic + rows.surrogate() if first else rows.surrogate() + critic)

    assert reading.policy is not None and reading.policy.log_ratio is not None and not reading.complete
    torch.testing.assert_close(reading.policy.advantages, rows.advantages)


MASK = torch.arange(ROWS) % 4 > 0
"""Rows that are not padding."""

MASKED_MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "times the mask": lambda rows: (rows * MASK).sum() / MASK.sum(),
    "where": lambda rows: torch.where(MASK, rows, 0.0).sum() / MASK.sum(),
    "filled": lambda rows: rows.masked_fill(~MASK, 0.0).sum() / MASK.sum(),
    "indexed": lambda rows: rows[MASK].mean(),
    "selected": lambda rows: rows.masked_select(MASK).mean(),
    "of sequences": lambda rows: ((rows * MASK).view(4, -1).sum(0) / MASK.view(4, -1).sum(0).clamp(min=1)).sum() / 3,
}


@pytest.mark.parametrize("name", MASKED_MEANS)
def test_rows_that_a_loss_leaves_out_are_not_valid(name: str) -> None:
    rows, mean = Rows(), MASKED_MEANS[name]
    surrogate = -torch.min(rows.advantages * rows.ratio, rows.advantages * rows.ratio.clamp(1 - CLIP, 1 + CLIP))
    errors = (rows.values - rows.returns) ** 2

    reading = rows.read(mean(surrogate) + 0.5 * mean(errors) - 0.01 * mean(rows.entropy))

    policy, value, entropy = reading.policy, reading.value, reading.entropy
    assert policy is not None and value is not None and entropy is not None and reading.complete
    assert policy.valid is not None and policy.valid.tolist() == MASK.tolist()
    torch.testing.assert_close(policy.advantages, rows.advantages)
    torch.testing.assert_close(policy.loss, surrogate[MASK].mean().detach())
    assert policy.clip == pytest.approx(CLIP)
    torch.testing.assert_close(value.returns, rows.returns)
    torch.testing.assert_close(value.loss, 0.5 * errors[MASK].mean().detach())
    torch.testing.assert_close(entropy.loss, -rows.entropy[MASK].mean().detach())


@pytest.mark.parametrize("mixture", [False, True])
def test_weights_of_a_mixture_are_no_logits_of_actions(mixture: bool) -> None:
    rows, logits = Rows(), nn.Linear(3, 2)(torch.randn(ROWS, 3)).log_softmax(-1)
    if mixture:
        log_probs = (logits + torch.randn(ROWS, 2)).logsumexp(-1)
    else:
        log_probs = logits.gather(1, torch.arange(ROWS).remainder(2)[:, None])[:, 0]

    reading = rows.read(-(rows.advantages * (log_probs - log_probs.detach()).exp()).mean())

    assert (reading.logits is None) is mixture


@pytest.mark.parametrize(
    ("bonus", "weight", "times"),
    [
        (lambda rows, plogp: 0.25 * plogp.sum(0).mean(), 0.25, ROWS / 2),
        (lambda rows, plogp: -(rows.entropy * 0.25).sum(), 0.25, ROWS),
        (lambda rows, plogp: 0.25 * plogp.sum() / ROWS, 0.25, 1),
        (lambda rows, plogp: 0.25 * plogp.sum(-1).mean(), 0.25, 1),
        (lambda rows, plogp: -(0.05 / ROWS) * rows.entropy.sum(), 0.05, 1),
    ],
    ids=["axes swapped", "sum", "divided sum", "mean", "tuned sum"],
)
def test_a_bonus_summed_over_the_rows_keeps_the_weight_that_the_script_has(
    bonus: Callable[[Rows, Tensor], Tensor], weight: float, times: float
) -> None:
    """`times` is the size of its loss, in negative mean entropies. Weights that make the sum a plausible mean are taken for a mean's."""
    rows = Rows()
    distribution = rows.distribution
    entropy = rows.read(rows.surrogate() + bonus(rows, distribution.probs * distribution.logits)).entropy

    assert entropy is not None and entropy.weight == pytest.approx(weight)
    assert float(entropy.loss) == pytest.approx(-times * float(rows.entropy.detach().mean()))


def test_log_probabilities_in_place_of_the_entropy_are_its_term_and_beside_it_another_one() -> None:
    rows = Rows()
    sampled = rows.read(rows.surrogate() + 0.01 * rows.log_probs.mean())
    rows = Rows()
    penalty = (rows.old_log_probs - rows.log_probs).mean()

    both = rows.read(rows.surrogate() + 0.5 * penalty - 0.01 * rows.entropy.mean())

    assert sampled.complete and sampled.entropy is not None and sampled.entropy.weight == pytest.approx(0.01)
    assert float(sampled.entropy.loss) == pytest.approx(float(rows.log_probs.detach().mean()))
    assert both.complete and both.entropy is not None and both.entropy.weight == pytest.approx(0.01)
    assert both.penalty is not None and both.penalty.weight == pytest.approx(0.5) and not both.is_whole
    assert read_coefficients(both) == pytest.approx({"entropy": 0.01, "penalty": 0.5})


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "difference": lambda new, old: old - new,
    "square": lambda new, old: (new - old) ** 2,
    "expectation": lambda new, old: (new - old).exp() - 1 - (new - old),
    "expectation of the ratio": lambda new, old: (new - old).exp() - 1 - (new - old).exp().log(),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", PENALTIES)
def test_an_estimate_of_the_divergence_is_a_penalty_of_its_sign(name: str, sign: int) -> None:
    rows = Rows()
    loss = rows.surrogate() + sign * 0.5 * PENALTIES[name](rows.log_probs, rows.old_log_probs).mean()

    reading = rows.read(loss)

    assert reading.complete and reading.penalty is not None
    assert reading.penalty.weight * sign > 0
    slopes = torch.autograd.grad(sign * 0.5 * PENALTIES[name](rows.log_probs, rows.old_log_probs).mean(), rows.log_probs)
    edges = torch.autograd.grad([*reading.penalty.edges], rows.log_probs, [*reading.penalty.slopes])
    torch.testing.assert_close(edges, slopes)


@pytest.mark.parametrize("backward", [False, True])
def test_the_divergence_of_the_distributions_is_a_penalty(backward: bool) -> None:
    rows, logits, old = Rows(), nn.Linear(3, 2)(torch.randn(ROWS, 3)), torch.randn(ROWS, 2)
    pair = (Categorical(logits=old), Categorical(logits=logits))[:: -1 if backward else 1]

    reading = rows.read(rows.surrogate() - 0.25 * kl_divergence(*pair).mean())

    assert reading.complete and reading.penalty is not None and reading.penalty.weight < 0


@pytest.mark.parametrize("of_sample", [False, True])
def test_entropies_of_several_heads_are_one_term(of_sample: bool) -> None:
    rows, other = Rows(), Rows()
    log_probs, entropy = rows.log_probs + other.log_probs, rows.entropy + other.entropy
    old = rows.old_log_probs + other.old_log_probs
    bonus = -log_probs.mean() if of_sample else entropy.mean()
    loss = rows.surrogate((log_probs - old).exp()) - 0.01 * bonus
    outputs = DistributionGraphs([rows.log_probs, other.log_probs], [rows.entropy, other.entropy])

    reading = read_loss(loss, held=[], outputs=outputs, values=[])

    assert reading is not None and reading.complete and reading.entropy is not None
    assert reading.entropy.weight == pytest.approx(0.01)
    assert float(reading.entropy.loss) == pytest.approx(-float(bonus.detach()))


def test_the_terms_of_a_loss_that_is_climbed_are_those_of_its_negative() -> None:
    rows = Rows()
    loss = rows.surrogate() + 0.25 * (rows.values - rows.returns).square().mean() - 0.01 * rows.entropy.mean()
    outputs = DistributionGraphs([rows.log_probs], [rows.entropy])
    reading = rows.read(loss)

    climbed = read_loss(-loss, held=[rows.values], outputs=outputs, values=[rows.output], climbed=True)

    assert climbed is not None and climbed.policy is not None and reading.policy is not None
    torch.testing.assert_close(climbed.policy.advantages, reading.policy.advantages)
    torch.testing.assert_close(climbed.policy.loss, reading.policy.loss)
    assert climbed.value is not None and climbed.entropy is not None
    assert climbed.value.weight == pytest.approx(0.5) and climbed.entropy.weight == pytest.approx(0.01)
    torch.testing.assert_close(climbed.total, loss.detach())


@pytest.mark.parametrize("is_mean", [False, True])
def test_terms_that_a_script_adds_row_by_row_are_columns(is_mean: bool) -> None:
    """As in PyTorch's examples of REINFORCE and of an actor-critic; the rows were acted on one by one."""
    torch.manual_seed(0)
    states, returns = torch.randn(ROWS, 3), torch.randn(ROWS)
    policy, critic = nn.Linear(3, 2), nn.Linear(3, 1)
    acted = [(Categorical(logits=policy(state)), critic(state)) for state in states]
    log_probs = [distribution.log_prob(torch.tensor(row % 2)) for row, (distribution, _) in enumerate(acted)]
    gains = [goal - value.item() for goal, (_, value) in zip(returns, acted, strict=True)]
    errors = [F.smooth_l1_loss(value, goal.reshape(1)) for goal, (_, value) in zip(returns, acted, strict=True)]
    losses = torch.stack([-one * gain for one, gain in zip(log_probs, gains, strict=True)])
    loss = losses.mean() if is_mean else losses.sum()
    loss = loss + torch.stack(errors).sum() - 0.01 * sum(distribution.entropy() for distribution, _ in acted)

    reading = read_loss(loss)

    assert reading is not None and reading.policy is not None and reading.policy.log_probs is not None
    assert reading.complete and reading.policy.by_row
    torch.testing.assert_close(reading.policy.log_probs, torch.stack(log_probs).detach())
    torch.testing.assert_close(reading.policy.advantages, torch.stack(gains))
    assert reading.policy.weight == pytest.approx(1 if is_mean else ROWS)
    assert reading.value is not None and reading.value.returns is not None and reading.entropy is not None
    torch.testing.assert_close(reading.value.returns, returns)
    assert reading.value.weight == pytest.approx(ROWS) and reading.entropy.weight == pytest.approx(0.01 * ROWS)
    assert reading.actions is not None and reading.actions.tolist() == [row % 2 for row in range(ROWS)]


@pytest.mark.parametrize("log", [False, True])
def test_probabilities_chosen_from_a_softmax_show_logits_and_actions(log: bool) -> None:
    rows, layer, actions = Rows(), nn.Linear(3, 2), torch.arange(ROWS) % 2
    outputs = layer(torch.randn(ROWS, 3))
    chosen = outputs.log_softmax(1) if log else outputs.softmax(1)
    log_probs = chosen.gather(1, actions[:, None]).squeeze(1)
    log_probs = log_probs if log else log_probs.log()

    reading = rows.read(rows.surrogate((log_probs - rows.old_log_probs).exp()))

    assert reading.logits is not None and reading.actions is not None and reading.source is not None
    torch.testing.assert_close(reading.logits.softmax(1), outputs.softmax(1).detach())
    assert reading.actions.tolist() == actions.tolist() and reading.source.weight == id(layer.weight)


def test_what_a_loss_leaves_out_is_known() -> None:
    rows = Rows()

    reading = rows.read(rows.surrogate())

    assert reading.complete and reading.value is None
    assert reading.left_out is not None and reading.left_out.values is not None
    torch.testing.assert_close(reading.left_out.values, rows.values.detach())
    assert reading.entropy is not None and reading.entropy.weight == 0


@pytest.mark.parametrize("ratio", [lambda new, old: (new.log() - old).exp(), lambda new, old: new / old.exp()])
@pytest.mark.parametrize("swapped", [False, True])
def test_ratios_of_all_pairs_of_log_probabilities_are_seen(ratio: Callable[[Tensor, Tensor], Tensor], swapped: bool) -> None:
    """New ones [N, 1] and old ones [N] are broadcast to [N, N], or the reverse."""
    layer, old, advantages = nn.Linear(3, 2), -torch.rand(ROWS), torch.randn(ROWS)
    new = layer(torch.randn(ROWS, 3)).softmax(-1)[:, 0].unsqueeze(-1)
    pairs = ratio(new.squeeze(-1), old.unsqueeze(-1)) if swapped else ratio(new, old)
    loss = -torch.min(pairs * advantages, pairs.clamp(0.8, 1.2) * advantages).mean()

    reading = read_loss(loss, held=[pairs, new])

    assert reading is not None and reading.policy is not None and reading.policy.pairs
    assert reading.policy.log_ratio is not None
    assert torch.allclose(reading.policy.log_ratio, (new.squeeze(-1).log() - old.mean()).detach(), atol=1e-5)
    assert len(reading.policy.advantages) == ROWS


def test_a_policy_gradient_of_a_density_of_several_terms_is_read() -> None:
    """The graph does not keep the sum of the terms, here of a squashed Gaussian."""
    layer, log_std, advantages = nn.Linear(3, 1), nn.Parameter(torch.zeros(1)), torch.randn(ROWS)
    drawn = torch.randn(ROWS, 1)
    density = -0.5 * ((drawn - layer(torch.randn(ROWS, 3))) / log_std.exp()) ** 2 - log_std - torch.log(1 - torch.tanh(drawn) ** 2)

    reading = read_loss(-(density.sum(-1) * advantages).mean())

    assert reading is not None and reading.policy is not None and reading.policy.log_probs is None
    assert torch.equal(reading.policy.advantages, advantages)


@pytest.mark.parametrize("flat", [False, True])
def test_products_of_all_pairs_of_log_probabilities_and_advantages_are_seen(flat: bool) -> None:
    """Of a policy gradient: [N, 1] times [N] is [N, N], and normalised advantages leave nothing of its mean."""
    layer, actions, advantages = nn.Linear(3, 2), torch.randint(2, (ROWS, 1)), torch.randn(ROWS)
    chosen = layer(torch.randn(ROWS, 3)).log_softmax(-1).gather(1, actions)
    loss = -((chosen.squeeze(-1) if flat else chosen) * advantages).mean()

    reading = read_loss(loss, held=[chosen])

    assert reading is not None and reading.policy is not None and reading.policy.pairs is not flat
    assert len(reading.policy.advantages) == ROWS


def test_ratios_of_the_actions_of_all_rows_are_seen() -> None:
    """`probs[:, actions]` instead of `probs.gather(1, actions)`; the log-probabilities are those of each row's own action."""
    probs = torch.rand(6, 3).softmax(-1).requires_grad_()
    actions, advantages = torch.tensor([0, 1, 2, 0, 1, 1]), torch.randn(6)
    chosen = probs[:, actions]
    ratio = chosen / torch.rand(6)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    reading = read_loss(loss, held=[ratio, chosen])

    assert reading is not None and reading.policy is not None and reading.policy.pairs and reading.policy.log_probs is not None
    assert torch.equal(reading.policy.log_probs, probs.detach()[torch.arange(6), actions].log())


@pytest.mark.parametrize(
    ("log_probs", "twice"),
    [
        (lambda logits: Categorical(logits=logits).log_prob(torch.zeros(ROWS)), False),
        (lambda logits: Categorical(probs=logits.softmax(-1)).log_prob(torch.zeros(ROWS)), False),
        (lambda logits: Categorical(logits=logits.log_softmax(-1)).log_prob(torch.zeros(ROWS)), False),
        (lambda logits: logits.softmax(-1)[:, 0].log(), False),
        (lambda logits: Categorical(logits=logits.softmax(-1)).log_prob(torch.zeros(ROWS)), True),
        (lambda logits: logits.softmax(-1).view(ROWS, 2).log_softmax(-1)[:, 0], True),
        (lambda logits: -F.cross_entropy(logits.softmax(-1), torch.zeros(ROWS, dtype=torch.long), reduction="none"), True),
    ],
)
def test_a_softmax_of_a_softmax_is_seen(log_probs: Callable[[Tensor], Tensor], twice: bool) -> None:
    loss = -(log_probs(nn.Linear(3, 2)(torch.randn(ROWS, 3))) * torch.randn(ROWS)).mean()

    assert takes_softmax_twice(graph_of(loss)) is twice


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize(("steps", "detaches", "cut"), [(6, True, True), (6, False, False), (2, True, False)])
def test_a_state_without_a_gradient_is_seen(kind: type[nn.RNNCellBase], steps: int, detaches: bool, cut: bool) -> None:
    cell, state, outputs = kind(3, 2), torch.zeros(ROWS, 2), list[Tensor]()  # type: ignore[call-arg]  # of the subclasses
    memory = torch.zeros(ROWS, 2)
    for _ in range(steps):
        state = (state.detach() if detaches else state) * torch.ones(ROWS, 1)
        if kind is nn.LSTMCell:
            state, memory = cell(torch.randn(ROWS, 3), (state, memory))
        else:
            state = cell(torch.randn(ROWS, 3), state)
        outputs.append(state)

    assert detaches_states(graph_of(torch.stack(outputs).sum()), {id(cell.weight_hh)}) is cut


def test_a_graph_in_which_the_script_listens_is_left_alone() -> None:
    retaining, hooked = Rows(), Rows()
    retaining.ratio.retain_grad()
    calls: list[Tensor] = []
    hooked.ratio.register_hook(calls.append)

    assert read_loss(retaining.surrogate(), held=[retaining.ratio]) is None and retaining.ratio.grad is None
    assert read_loss(hooked.surrogate(), held=[hooked.ratio]) is None and not calls


def test_a_factor_of_the_whole_loss_is_told_from_other_weights() -> None:
    rows = Rows()
    loss = rows.surrogate() + 0.5 * squared(rows.values, rows.returns, rows.old_values).mean()

    reading = rows.read((loss - 0.01 * rows.entropy.mean()) / 4)

    assert reading.policy is not None
    terms = reading.policy, reading.value, reading.entropy
    assert common_factor(*terms, {"value": 0.5, "entropy": 0.01}) == pytest.approx(0.25)
    assert common_factor(*terms, {"value": 0.1}) == 1.0
    assert common_factor(*terms, {}) == 1.0


def test_passes_are_counted_by_the_variable_that_grows_after_each_of_them() -> None:
    """Three passes of four minibatches. The other variables are the update, the minibatch, its first row, and all minibatches."""
    finder = PassFinder()
    for count in range(12):
        epoch, minibatch = divmod(count, 4)
        numbers = {"update": 1, "_": epoch, "i": minibatch, "start": 8 * minibatch, "total": count}
        finder.add({(0, name): number for name, number in numbers.items()}, 8)

    assert finder.find(32) == (0, "_")
    assert finder.passes((0, "_")) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert finder.find(20) == (0, "_")  # minibatches that overlap
    assert finder.find(96) is None


def test_a_pass_over_few_of_the_rows_is_counted_by_a_variable_with_a_name_that_says_so() -> None:
    finder = PassFinder()
    for count in range(8):
        epoch, minibatch = divmod(count, 2)
        finder.add({(0, name): number for name, number in {"_": epoch, "epoch": epoch, "i": minibatch}.items()}, 20)

    assert finder.find(320) == (0, "epoch")


def test_ratios_that_are_0_or_infinite_have_finite_logarithms() -> None:
    rows = Rows()
    rows.old_log_probs = rows.log_probs.detach() + torch.linspace(-300, 300, ROWS)
    rows.ratio = (rows.log_probs - rows.old_log_probs).exp()

    policy = rows.read(rows.surrogate() + F.mse_loss(rows.values, rows.returns)).policy

    assert policy is not None and policy.log_ratio is not None
    assert bool((rows.ratio == 0).any()) and bool(rows.ratio.isinf().any())
    assert -104 < float(policy.log_ratio.min()) < -87 and 87 < float(policy.log_ratio.max()) < 89


def test_each_dimension_of_a_gaussian_that_is_not_summed_has_its_own_ratio() -> None:
    torch.manual_seed(0)
    actions, old, advantages = torch.randn(ROWS, 3), torch.randn(ROWS, 3), torch.randn(ROWS, 1)
    now = Normal(nn.Linear(2, 3)(torch.randn(ROWS, 2)), 1.0).log_prob(actions)
    ratio = (now - old).exp()
    reading = read_loss(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean(), held=[now])

    assert reading is not None and reading.policy is not None
    policy = reading.policy
    assert policy.log_ratios is not None and policy.log_ratio is not None and policy.old_log_probs is not None
    torch.testing.assert_close(policy.log_ratios, (now - old).detach())
    torch.testing.assert_close(policy.log_ratio, (now - old).sum(1).detach())
    torch.testing.assert_close(policy.old_log_probs, old.sum(1))
    assert torch.equal(policy.advantages, advantages[:, 0])


def masked_entropy(logits: Tensor, low: float = 0.0) -> Tensor:
    """Entropy of a choice whose last option is forbidden."""
    probs = logits.masked_fill(torch.tensor([False, False, True]), -torch.inf).softmax(-1)
    return -(probs * probs.clamp(min=low).log()).sum(-1).mean()


NONFINITE: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "0 log 0": (masked_entropy, "a product of 0 and the logarithm of 0"),
    "0 log 1e-8": (lambda logits: masked_entropy(logits, 1e-8), None),
    "log(1 - 1)": (lambda logits: (1 - (50 + logits).tanh() ** 2).log().mean(), "the logarithm of 0"),
    "root of a negative number": (lambda logits: (-logits.exp()).sqrt().mean(), "the root of -1.10517"),
    "infinite from outside": (lambda logits: ((torch.inf - logits) / logits.exp()).square().mean(), "a quotient of inf and 1.10517"),
    "NaN from outside": (lambda logits: (torch.tensor(torch.nan) * logits.exp()).mean(), None),
}


@pytest.mark.parametrize("name", NONFINITE)
def test_the_first_operation_that_is_not_finite_is_named(name: str) -> None:
    compute, words = NONFINITE[name]
    loss = compute(torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], requires_grad=True)) + 1.0

    graph = LossGraph(loss, graph_of(loss), [], NO_OUTPUTS, ())

    operation = nonfinite_operation(graph, given="infinite" in name)

    assert (None if operation is None else in_words(graph, *operation)) == words
