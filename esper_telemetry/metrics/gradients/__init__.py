"""Gradients of a model: norms, health, directions, concentration, noise, and the interference of actor and critic."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names

if TYPE_CHECKING:
    from esper_telemetry.metrics.gradients.actor_critic import BonusGradient as BonusGradient
    from esper_telemetry.metrics.gradients.actor_critic import Interference as Interference
    from esper_telemetry.metrics.gradients.actor_critic import PairGradients as PairGradients
    from esper_telemetry.metrics.gradients.actor_critic import ParameterInterference as ParameterInterference
    from esper_telemetry.metrics.gradients.actor_critic import bonus_gradient as bonus_gradient
    from esper_telemetry.metrics.gradients.actor_critic import group_interference as group_interference
    from esper_telemetry.metrics.gradients.actor_critic import interference as interference
    from esper_telemetry.metrics.gradients.actor_critic import leaf_gradients as leaf_gradients
    from esper_telemetry.metrics.gradients.actor_critic import leaf_interference as leaf_interference
    from esper_telemetry.metrics.gradients.actor_critic import pair_gradients as pair_gradients
    from esper_telemetry.metrics.gradients.actor_critic import parameter_interference as parameter_interference
    from esper_telemetry.metrics.gradients.directions import GradientNoise as GradientNoise
    from esper_telemetry.metrics.gradients.directions import GradientSigns as GradientSigns
    from esper_telemetry.metrics.gradients.directions import GradientZeros as GradientZeros
    from esper_telemetry.metrics.gradients.directions import LayerZeros as LayerZeros
    from esper_telemetry.metrics.gradients.directions import MinibatchAlignment as MinibatchAlignment
    from esper_telemetry.metrics.gradients.directions import SuccessiveAlignment as SuccessiveAlignment
    from esper_telemetry.metrics.gradients.directions import gradient_signs as gradient_signs
    from esper_telemetry.metrics.gradients.directions import gradient_zeros as gradient_zeros
    from esper_telemetry.metrics.gradients.directions import minibatch_alignment as minibatch_alignment
    from esper_telemetry.metrics.gradients.directions import shard_noise as shard_noise
    from esper_telemetry.metrics.gradients.directions import successive_alignment as successive_alignment
    from esper_telemetry.metrics.gradients.directions import two_batch_noise as two_batch_noise
    from esper_telemetry.metrics.gradients.directions import weighted_pair_cosine as weighted_pair_cosine
    from esper_telemetry.metrics.gradients.distribution import DECADE_EDGES as DECADE_EDGES
    from esper_telemetry.metrics.gradients.distribution import Concentration as Concentration
    from esper_telemetry.metrics.gradients.distribution import GradientDecades as GradientDecades
    from esper_telemetry.metrics.gradients.distribution import LayerConcentration as LayerConcentration
    from esper_telemetry.metrics.gradients.distribution import LayerDecades as LayerDecades
    from esper_telemetry.metrics.gradients.distribution import concentration as concentration
    from esper_telemetry.metrics.gradients.distribution import decade_counts as decade_counts
    from esper_telemetry.metrics.gradients.distribution import gradient_decades as gradient_decades
    from esper_telemetry.metrics.gradients.distribution import layer_concentration as layer_concentration
    from esper_telemetry.metrics.gradients.gradient_health import gradient_health as gradient_health
    from esper_telemetry.metrics.gradients.gradient_health import gradients_of as gradients_of
    from esper_telemetry.metrics.gradients.gradient_health import named_parameters as named_parameters
    from esper_telemetry.metrics.gradients.norms import Clipping as Clipping
    from esper_telemetry.metrics.gradients.norms import GlobalGradient as GlobalGradient
    from esper_telemetry.metrics.gradients.norms import GradientNorms as GradientNorms
    from esper_telemetry.metrics.gradients.norms import GroupGradients as GroupGradients
    from esper_telemetry.metrics.gradients.norms import HeadGradients as HeadGradients
    from esper_telemetry.metrics.gradients.norms import LayerGradients as LayerGradients
    from esper_telemetry.metrics.gradients.norms import TermGradients as TermGradients
    from esper_telemetry.metrics.gradients.norms import clip_coefficients as clip_coefficients
    from esper_telemetry.metrics.gradients.norms import coefficients as coefficients
    from esper_telemetry.metrics.gradients.norms import gradient_norms as gradient_norms
    from esper_telemetry.metrics.gradients.norms import head_gradients as head_gradients
    from esper_telemetry.metrics.gradients.norms import term_gradients as term_gradients
    from esper_telemetry.metrics.gradients.norms import value_gradient as value_gradient

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.metrics.gradients.actor_critic": (
            "BonusGradient",
            "Interference",
            "PairGradients",
            "ParameterInterference",
            "bonus_gradient",
            "group_interference",
            "interference",
            "leaf_gradients",
            "leaf_interference",
            "pair_gradients",
            "parameter_interference",
        ),
        "esper_telemetry.metrics.gradients.directions": (
            "GradientNoise",
            "GradientSigns",
            "GradientZeros",
            "LayerZeros",
            "MinibatchAlignment",
            "SuccessiveAlignment",
            "gradient_signs",
            "gradient_zeros",
            "minibatch_alignment",
            "shard_noise",
            "successive_alignment",
            "two_batch_noise",
            "weighted_pair_cosine",
        ),
        "esper_telemetry.metrics.gradients.distribution": (
            "Concentration",
            "DECADE_EDGES",
            "GradientDecades",
            "LayerConcentration",
            "LayerDecades",
            "concentration",
            "decade_counts",
            "gradient_decades",
            "layer_concentration",
        ),
        "esper_telemetry.metrics.gradients.gradient_health": ("gradient_health", "gradients_of", "named_parameters"),
        "esper_telemetry.metrics.gradients.norms": (
            "Clipping",
            "GlobalGradient",
            "GradientNorms",
            "GroupGradients",
            "HeadGradients",
            "LayerGradients",
            "TermGradients",
            "clip_coefficients",
            "coefficients",
            "gradient_norms",
            "head_gradients",
            "term_gradients",
            "value_gradient",
        ),
    },
)
