"""Groups that the halves of an update do not contain, from the rows of one rank or of all."""

from collections.abc import Iterator

import torch
from torch import Tensor

from esper_telemetry import gradient_health
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.metrics.actions import greedy_agreement
from esper_telemetry.metrics.episodes import episode_ends, evaluation_stats
from esper_telemetry.metrics.kl import exact_kl, head_exact_kl, kl_after_update
from esper_telemetry.metrics.lstm.states import first_staleness, memory_use, state_staleness
from esper_telemetry.metrics.representation import excess_ratio, feature_drift, feature_norm
from esper_telemetry.metrics.rollout_stats import normalizer_clipping, normalizer_drift
from esper_telemetry.metrics.values import ending_bias, value_movement

ROWS, FIRST = 96, 31
"""Number of rows of both ranks, and of rank 0."""
WHOLE = slice(None)
HALVES = (slice(FIRST), slice(FIRST, None))
OF_ITS_OWN = {
    "repr/capacity_loss": "a copy of the network on each rank's rows: the last rank's value",
    "repr/dormant_frac/{layer}": "a sample of each rank",
    "repr/response/{layer}/p05": "as above: the last rank's value",
    "repr/response/{layer}/p50": "as above",
    "repr/response/{layer}/p95": "as above",
    "lstm/bptt/h0_grad_norm": "a minibatch of each rank: the mean",
    "lstm/bptt/profile_ratio": "a minibatch of each rank: the mean",
    "grad/layer/{layer}/interference_cos": "a minibatch of each rank, only at DEBUG: the mean",
    "grad/layer/{layer}/heads_cos": "as above",
    "grad/heads/{pair}/cos": "as above",
    "grad/pair/{pair}/connected": "the same on all ranks, or from the rows of each rank: the mean",
    "grad/pair/{pair}/intensity": "as above",
    "grad/pair/{pair}/host_intensity": "as above",
    "grad/pair/{pair}/upstream": "as above",
    "grad/pair/{pair}/zero_frac": "as above",
    "reward/trained_correlation": "the rows of each rank: the mean of their correlations",
}
"""Keys that each rank measures on its own data, and why that is enough."""


def columns(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64) * (1 + seed)


def observed(part: slice) -> Iterator[MetricGroup | Postponed]:
    """Yield the groups of a part of the rows."""
    a, b, c = (columns(seed=seed)[part] for seed in range(3))
    wide, other = (columns(5, seed=seed)[part] for seed in (3, 4))
    flags, others = a > 0.5, b > 0
    rows = {"op": a.square(), "arg": b.square()}
    yield exact_kl(rows, relevant={"arg": flags})
    yield head_exact_kl(rows, relevant={"arg": flags})
    yield kl_after_update(rows, relevant={"arg": flags})
    yield memory_use(rows, relevant={"arg": flags})
    yield greedy_agreement({"op": wide}, {"op": wide + other / 4}, relevant={"op": others})
    yield evaluation_stats(c.tolist(), a.abs().int().tolist())
    yield state_staleness(wide, other)
    yield first_staleness(wide, wide + other / 100)
    yield normalizer_drift("obs", *(torch.full((4,), x) for x in (1.0, 2.0, 3.0, 4.0)))
    yield normalizer_clipping("obs", wide, clip=1.5, valid=others.unsqueeze(-1).expand_as(wide))
    yield excess_ratio(a / 3, clip=0.2, valid=others)
    yield feature_norm(wide, valid=others)
    yield feature_drift(wide, other)
    yield value_movement(a, b, c, clip=0.2, valid=others)
    yield ending_bias(a[None], b[None], (flags | others)[None], flags[None], valid=(c < 2)[None])
    over = flags | others
    yield episode_ends(over[None], flags[None], (10 * c[over].abs()).int().tolist())
    yield gradient_health([with_gradient()], max_norm=0.5)


def with_gradient() -> Tensor:
    """Return a parameter whose gradients have been summed over the ranks."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 4.0, 12.0])
    return weight
