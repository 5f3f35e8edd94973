"""Pure metric functions: tensors in, one frozen group out; one file per family."""

from esper_telemetry.metrics.advantages import advantage_stats, normalized_advantage_stats
from esper_telemetry.metrics.entropy import entropy_rows, entropy_stats, head_entropy, policy_entropy
from esper_telemetry.metrics.episodes import episode_stats
from esper_telemetry.metrics.gradients import (
    gradient_health,
    gradient_norms,
    gradient_zeros,
    interference,
    leaf_interference,
)
from esper_telemetry.metrics.integrity import buffer_age, gae_identity, mask_violation, nonfinite_count, rows_repeated
from esper_telemetry.metrics.losses import loss_terms, ppo_losses
from esper_telemetry.metrics.ratio import ratio_diagnostics
from esper_telemetry.metrics.returns import return_stats
from esper_telemetry.metrics.rewards import reward_stats
from esper_telemetry.metrics.values import value_fit, value_movement

__all__ = [
    "advantage_stats",
    "buffer_age",
    "entropy_rows",
    "entropy_stats",
    "episode_stats",
    "gae_identity",
    "gradient_health",
    "gradient_norms",
    "gradient_zeros",
    "head_entropy",
    "interference",
    "leaf_interference",
    "loss_terms",
    "mask_violation",
    "nonfinite_count",
    "normalized_advantage_stats",
    "policy_entropy",
    "ppo_losses",
    "ratio_diagnostics",
    "return_stats",
    "reward_stats",
    "rows_repeated",
    "value_fit",
    "value_movement",
]
