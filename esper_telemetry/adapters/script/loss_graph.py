"""Reads the terms of a loss from its graph before the backward pass, independent of the script's variable names.

A graph keeps the tensors that a backward pass needs: the ratio that is clipped, the advantages that multiply it, the bounds of the
clip, the error of the critic. From the loss downwards, sums, means and products with numbers are followed to the *terms*: the first
operations that are not linear. `torch.autograd.grad` up to these terms gives their weights. It leaves `.grad`, weights and the
graph as they are.

Shapes: N rows of the minibatch, A actions, D action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HEAD
from esper_telemetry.adapters.script.autograd_graph import (
    EXPONENTIALS,
    JOINTS,
    NO_OUTPUTS,
    ROUNDING,
    SUMS,
    DistributionGraphs,
    LossGraph,
    Node,
    children_of,
    graph_of,
    in_order,
    is_scaling,
    joined_rows,
    kind_of,
    kinds_below,
    nodes_below,
    shape_of,
    through_views,
    without_sign,
)
from esper_telemetry.adapters.script.critic_and_entropy import (
    critic_of_rows,
    critic_term,
    entropy_of_rows,
    entropy_term,
    error_of,
    factor_of_sum,
    joined_entropies,
    left_out_entropy,
    left_out_values,
    plogp,
)
from esper_telemetry.adapters.script.loss_reading import EntropyTerm, LossReading, PenaltyTerm, PolicyTerm, ValueTerm
from esper_telemetry.adapters.script.policy_terms import (
    choices_of,
    gaussian_of,
    is_row_log_prob,
    policy_of_rows,
    policy_term,
    products_of,
    ratio_below,
)

MAX_MEAN_WEIGHT = 2.0
"""Largest weight of a policy's term that is a mean: a sum over rows, perhaps divided by the number of episodes, has a larger one."""


def read_loss(
    loss: Tensor,
    *,
    held: Iterable[Tensor] = (),
    outputs: DistributionGraphs = NO_OUTPUTS,
    values: Sequence[Tensor] = (),
    climbed: bool = False,
    graph: Iterable[Node] | None = None,
) -> LossReading | None:
    """Return the terms of a loss before its backward pass; None if it lacks terms of a policy and a critic.

    Args:
        loss: 0-d, with its graph.
        held: tensors of the script, which show numbers that the graph does not keep.
        outputs: of its distributions, with graphs.
        values: of layers with one unit, with graphs, the last one at the end.
        climbed: its optimizer maximises it.
        graph: its `graph_of`, if the caller has it.
    """
    held = [*held, *outputs.log_probs, *outputs.entropies, *values, loss]
    # a hook of the script would see a second backward pass, and `retain_grad` would add its gradients
    listens = any(one.grad_fn is not None and (one._backward_hooks or one.retains_grad) for one in held)
    if loss.grad_fn is None or loss.numel() != 1 or listens:
        return None
    nodes = graph_of(loss) if graph is None else graph
    return _LossReader(LossGraph(loss, nodes, held, outputs, values), climbed=climbed).read()


def joined(readings: Sequence[LossReading]) -> LossReading | None:
    """Return the losses of an optimizer step as one reading; None without one of a policy.

    Policy gradients without a ratio are joined row by row: their passes may divide the rows of a rollout. Other losses show the rows
    of the first pass.
    """
    policies = [one for one in readings if one.policy is not None]
    terms = [one.policy for one in policies if one.policy is not None]
    values = [one.value for one in readings if one.value is not None]
    if not terms:
        return None
    first = policies[0]._replace(value=values[0] if values else None)
    advantages = joined_rows([one.advantages for one in terms])
    if len(terms) < 2 or advantages is None or any(one.log_ratio is not None for one in terms):
        return first
    log_probs = joined_rows([one.log_probs for one in terms])
    if len(values) == len(terms):
        estimates, returns = joined_rows([one.values for one in values]), joined_rows([one.returns for one in values])
        first = first._replace(value=values[0]._replace(values=estimates, returns=returns))
    return first._replace(
        policy=terms[0]._replace(advantages=advantages, log_probs=log_probs, valid=None),
        inputs=joined_rows([one.inputs for one in policies]),
        actions=joined_rows([one.actions for one in policies]),
        logits=joined_rows([one.logits for one in policies]),
    )


class _Terms:
    """The terms of a loss, and its gradients with respect to them.

    Attributes:
        edges: of the graph at the terms.
        gradients: of the loss there; None where it does not depend on a term.
        slopes: the gradients that are not None, by node.
    """

    def __init__(self, graph: LossGraph, loss: Tensor) -> None:
        self.edges = [GradientEdge(*term) for term in dict.fromkeys(_nonlinear(graph, graph.loss.grad_fn))]
        self.gradients: Sequence[Tensor | None] = ()
        if self.edges:
            self.gradients = torch.autograd.grad(loss, self.edges, retain_graph=True, allow_unused=True)
        reached = zip(self.edges, self.gradients, strict=True)
        self.slopes = {edge.node: gradient for edge, gradient in reached if gradient is not None}
        self._nodes_below = cache(nodes_below)  # a loss of many steps has as many terms

    def own_gradient(self, place: int) -> Tensor:
        """Gradient of the loss with respect to a term, without paths through the other terms, which may be above it."""
        others = [  # with slopes that leave out the paths through terms above them, which would count twice
            (edge, self.own_gradient(other))
            for other, (edge, gradient) in enumerate(zip(self.edges, self.gradients, strict=True))
            if other != place and gradient is not None and self.edges[place].node in self._nodes_below(edge.node)
        ]
        own = self.gradients[place]
        assert own is not None
        if not others:
            return own
        above, slopes = zip(*others, strict=True)
        (through,) = torch.autograd.grad(above, [self.edges[place]], slopes, retain_graph=True, allow_unused=True)
        if through is None:
            return own
        rest = own - through
        return rest if float(rest.abs().max()) > ROUNDING * float(own.abs().max()) else torch.zeros_like(own)


class _LossReader:
    """Reads term by term: first those of single rows, which a script adds one by one.

    Attributes:
        loss: 0-d, which gradient descent lowers.
        others: number of terms that are neither of the policy nor of the critic, the entropy or a divergence.
        parts: of a penalty on the divergence from the policy at collection.
    """

    def __init__(self, graph: LossGraph, *, climbed: bool) -> None:
        self.graph, self.climbed = graph, climbed
        self.loss = -graph.loss if climbed else graph.loss
        self.terms = _Terms(graph, self.loss)
        self.policy: PolicyTerm | None = None
        self.value: ValueTerm | None = None
        self.entropy: EntropyTerm | None = None
        self.others, self.parts = 0, list[tuple[GradientEdge, Tensor, float | None]]()

    def read(self) -> LossReading | None:
        """Return the terms; None without a term of a policy or critic."""
        chosen, by_row = self._read_rows()
        nodes = [edge.node for edge in self.terms.edges]
        has_bonus = any(node in self.graph.entropies or plogp(self.graph, node) is not None for node in nodes)
        for place, node in enumerate(nodes):
            if node not in by_row and self.terms.gradients[place] is not None:
                self._read_term(place, sampled=not has_bonus)
        first = self.policy or self.value
        if first is None:
            return None
        rows = chosen if self.policy is not None and self.policy.by_row else [first.edge.node]
        reading = LossReading(
            policy=self.policy,
            value=self.value,
            entropy=self.entropy,
            total=self.loss.detach().reshape(()),
            complete=not self.others,
            climbed=self.climbed,
            inputs=joined_rows([self.graph.inputs(node) for node in rows]),
            penalty=PenaltyTerm.of(self.parts),
        )
        return reading if self.policy is None else self._with_distribution(self._with_bonus(reading), rows)

    def _read_rows(self) -> tuple[list[Node], set[Node]]:
        """Read the terms of single rows; return the nodes of log-probabilities, and all nodes that have been read."""
        graph, slopes = self.graph, self.terms.slopes
        chosen = [node for node in in_order(slopes) if is_row_log_prob(graph, node)] if len(slopes) > 1 else []
        if len(chosen) > 1:
            self.policy = policy_of_rows(graph, chosen, slopes)
        self.value, errors = critic_of_rows(graph, slopes)
        self.entropy, bonuses = (None, ()) if self.policy is None else entropy_of_rows(graph, slopes, len(chosen))
        by_term = ((self.policy, chosen), (self.value, errors), (self.entropy, bonuses))
        return chosen, {node for term, nodes in by_term if term is not None for node in nodes}

    def _read_term(self, place: int, *, sampled: bool) -> None:
        graph, terms, node = self.graph, self.terms, self.terms.edges[place].node
        divergence = _divergence(graph, node)
        if divergence is not None:
            own = terms.own_gradient(place)
            choices = own.shape[-1] if kind_of(node) == "MulBackward0" else 1  # whose products are summed
            weight = divergence * float(own.sum()) / choices
            self.parts += [(terms.edges[place], own, weight if divergence else None)] if bool(own.any()) else []
            return
        gradient = terms.gradients[place]
        assert gradient is not None
        if node in graph.log_probs or hasattr(node, "variable"):  # the policy's term depends on them too
            gradient = terms.own_gradient(place)
        term = (
            entropy_term(graph, node, gradient, sampled=sampled) or policy_term(graph, node, gradient) or critic_term(graph, node, gradient)
        )
        if isinstance(term, PolicyTerm) and self.policy is None:
            self.policy, self.others = term, self.others + term.reshaped
        elif isinstance(term, ValueTerm) and self.value is None:
            self.value = term
        elif isinstance(term, EntropyTerm) and (self.entropy is None or self.entropy.goes_with(term)):
            self.entropy = term if self.entropy is None else self.entropy.plus(term)
        elif bool(terms.own_gradient(place).any()):
            self.others += 1
            if self.policy is not None and isinstance(term, PolicyTerm):
                self.policy = self.policy.preferred(term)

    def _with_distribution(self, reading: LossReading, rows: Sequence[Node]) -> LossReading:
        """Add the distributions whose log-probabilities the script computes itself."""
        policy = reading.policy
        assert policy is not None
        logits, actions, source = choices_of(self.graph, rows)
        reading = reading._replace(logits=logits, actions=actions, source=source)
        if logits is not None or self.graph.log_probs:
            return reading
        heads, drawn, layer = gaussian_of(self.graph, policy.edge.node)
        if drawn is None:
            return reading._replace(heads=heads)
        if policy.log_probs is None and policy.log_ratio is not None:
            means, log_std = heads.means[HEAD], heads.log_std[HEAD]
            density = torch.distributions.Normal(means, log_std.exp(), validate_args=False).log_prob(drawn).sum(-1)
            policy = policy._replace(log_probs=density)
        return reading._replace(policy=policy, heads=heads, actions=drawn, source=layer)

    def _with_bonus(self, reading: LossReading) -> LossReading:
        """Add what a whole loss leaves out, and count the entropy as the sum over the choices of a row."""
        policy, entropy = reading.policy, reading.entropy
        assert policy is not None
        count = len(policy.advantages)
        if reading.complete and reading.value is None:
            reading = reading._replace(left_out=left_out_values(self.graph, count))
        if reading.complete and entropy is None:
            entropy = left_out_entropy(self.graph, count)
        if entropy is None:
            return reading
        choices = max(1, entropy.entropies.numel() // count)
        entropy = entropy._replace(weight=entropy.weight / choices, loss=entropy.loss * choices)
        factor = None if entropy.edge is None else factor_of_sum(self.graph, entropy.edge.node, count)
        if factor and policy.weight < MAX_MEAN_WEIGHT:
            entropy = entropy._replace(weight=factor, loss=entropy.loss * entropy.weight / factor)
        return reading._replace(entropy=entropy)


def _nonlinear(graph: LossGraph, node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the first operations below that are not linear, with the number of their output."""
    waiting = [(node, 0)]
    while waiting:
        node, number = waiting.pop()
        if node in graph.linear:
            continue
        graph.linear.add(node)
        kind = kind_of(node)
        entropies = joined_entropies(graph, node) if kind in JOINTS else None
        graph.entropies |= {} if entropies is None else {node: entropies}
        is_output = node in graph.entropies or node in graph.log_probs
        is_chosen = kind == "GatherBackward0" and plogp(graph, through_views(children_of(node)[0])) is not None
        if not is_output and (kind in SUMS or is_chosen or is_scaling(node) or _weighs_rows(graph, node)):
            waiting += [(child, place) for child, place in node.next_functions if child is not None]
        else:
            yield node, number


def _weighs_rows(graph: LossGraph, node: Node) -> bool:
    """Return True for rows of a term times numbers without a graph, such as a mask of padding, or rows where a condition holds."""
    kind, children = kind_of(node), children_of(node)
    if kind not in ("MulBackward0", "DivBackward0", "WhereBackward0") or children.count(None) != 1:
        return False
    if kind == "DivBackward0" and children[0] is None:
        return False
    below = through_views(next(child for child in children if child is not None))
    while kind_of(below) in ("SumBackward1", "MeanBackward1"):  # of each sequence
        below = through_views(children_of(below)[0])
    rows = without_sign(below)[0]
    is_policys = below in graph.entropies or next(products_of(graph, rows), None) is not None
    if is_policys or _weighs_rows(graph, rows):
        return True
    return error_of(graph, rows) is not None and ratio_below(graph, rows, shape_of(rows).numel()) is None


def _divergence(graph: LossGraph, node: Node) -> int | None:
    """Return the sign with which a term increases a divergence, 0 for log-ratios, whose sign other parts decide; None for other terms.

    Estimates are of log-ratios r: -r, r² and exp(r) - 1 - r (http://joschu.net/blog/kl-approx.html). A divergence has the products
    of probabilities at collection p, or now q, and the difference of their logarithms.
    """
    kind, children = kind_of(node), children_of(node)
    if any(consumer in graph.linear and _is_log_ratio(graph, consumer) for consumer, _ in graph.consumers[node]):
        return 0 if _is_log_prob(graph, node) else None
    if kind == "LogBackward0" and _is_exponential(graph, through_views(children[0])):
        return 0
    if _is_exponential(graph, node):
        return 1
    if kind == "PowBackward0" and node._saved_exponent == 2:
        return 1 if _is_log_ratio(graph, through_views(children[0])) else None
    if kind != "MulBackward0":
        return None
    for place, (factor, child) in enumerate(zip((node._saved_other, node._saved_self), children, strict=False)):
        other = children[1 - place]
        below = None if child is None else through_views(child)
        if below is None or factor is None or not _are_probabilities(factor):
            continue
        is_difference = _is_log_ratio(graph, below)
        if other is None and (is_difference or _is_log_prob(graph, below)):
            first = kind_of(below) == "SubBackward0" and children_of(below)[0] is None
            return 1 if is_difference and first else -1
        if other is not None and is_difference and EXPONENTIALS & kinds_below(other):
            return 1
    return None


def _is_log_prob(graph: LossGraph, node: Node) -> bool:
    """Return True for log-probabilities, of the chosen actions or of all."""
    node = without_sign(node)[0]
    while kind_of(node) in ("GatherBackward0", "IndexBackward0"):
        node = through_views(children_of(node)[0])
    return node in graph.log_probs or (
        kind_of(node) in ("LogSoftmaxBackward0", "LogBackward0", "SubBackward0") and bool(EXPONENTIALS & kinds_below(node))
    )


def _is_log_ratio(graph: LossGraph, node: Node) -> bool:
    """Return True for the difference of log-probabilities and as many numbers without a graph."""
    children = children_of(node)[:2]
    if kind_of(node) not in ("SubBackward0", "AddBackward0") or children.count(None) != 1:
        return False
    return _is_log_prob(graph, next(child for child in children if child is not None))


def _is_exponential(graph: LossGraph, node: Node) -> bool:
    """Return True for the ratio of probabilities now and at collection, or its inverse."""
    if kind_of(node) == "DivBackward0":
        return None in children_of(node) and not is_scaling(node) and bool(EXPONENTIALS & kinds_below(node))
    return kind_of(node) == "ExpBackward0" and _is_log_ratio(graph, without_sign(children_of(node)[0])[0])


def _are_probabilities(numbers: Tensor) -> bool:
    """Return True for the probabilities of all choices [..., A] of each row."""
    whole = numbers.dim() > 1 and numbers.shape[-1] > 1 and numbers.is_floating_point()
    return whole and bool((numbers >= 0).all()) and bool(((numbers.sum(-1) - 1).abs() < 1e-4).all())
