"""Pure metric functions: tensors in, one frozen group out; one file per family."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.metrics.advantages import advantage_stats as advantage_stats
    from esper_telemetry.metrics.advantages import normalized_advantage_stats as normalized_advantage_stats
    from esper_telemetry.metrics.entropy import entropy_rows as entropy_rows
    from esper_telemetry.metrics.entropy import entropy_stats as entropy_stats
    from esper_telemetry.metrics.entropy import head_entropy as head_entropy
    from esper_telemetry.metrics.entropy import policy_entropy as policy_entropy
    from esper_telemetry.metrics.episodes import episode_stats as episode_stats
    from esper_telemetry.metrics.gradients.actor_critic import bonus_gradient as bonus_gradient
    from esper_telemetry.metrics.gradients.actor_critic import head_interference as head_interference
    from esper_telemetry.metrics.gradients.actor_critic import interference as interference
    from esper_telemetry.metrics.gradients.actor_critic import layer_interference as layer_interference
    from esper_telemetry.metrics.gradients.actor_critic import leaf_interference as leaf_interference
    from esper_telemetry.metrics.gradients.directions import gradient_zeros as gradient_zeros
    from esper_telemetry.metrics.gradients.gradient_health import gradient_health as gradient_health
    from esper_telemetry.metrics.gradients.norms import gradient_norms as gradient_norms
    from esper_telemetry.metrics.integrity import buffer_age as buffer_age
    from esper_telemetry.metrics.integrity import gae_identity as gae_identity
    from esper_telemetry.metrics.integrity import mask_violation as mask_violation
    from esper_telemetry.metrics.integrity import nonfinite_count as nonfinite_count
    from esper_telemetry.metrics.integrity import rows_repeated as rows_repeated
    from esper_telemetry.metrics.losses import loss_terms as loss_terms
    from esper_telemetry.metrics.losses import ppo_losses as ppo_losses
    from esper_telemetry.metrics.ratio import ratio_diagnostics as ratio_diagnostics
    from esper_telemetry.metrics.rollout_stats import observation_scale as observation_scale
    from esper_telemetry.metrics.rollout_stats import return_stats as return_stats
    from esper_telemetry.metrics.rollout_stats import reward_stats as reward_stats
    from esper_telemetry.metrics.values import value_fit as value_fit
    from esper_telemetry.metrics.values import value_movement as value_movement

__all__, __getattr__, __dir__ = lazy_names(__name__)
