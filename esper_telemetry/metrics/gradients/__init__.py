"""Gradients: norms, clipping, interference of actor and critic, alignment, sparsity, concentration, noise scale."""

from esper_telemetry.metrics.gradients.concentration import DECADE_EDGES as DECADE_EDGES
from esper_telemetry.metrics.gradients.concentration import Concentration as Concentration
from esper_telemetry.metrics.gradients.concentration import GradientDecades as GradientDecades
from esper_telemetry.metrics.gradients.concentration import LayerConcentration as LayerConcentration
from esper_telemetry.metrics.gradients.concentration import LayerDecades as LayerDecades
from esper_telemetry.metrics.gradients.concentration import concentration as concentration
from esper_telemetry.metrics.gradients.concentration import decade_counts as decade_counts
from esper_telemetry.metrics.gradients.concentration import gradient_decades as gradient_decades
from esper_telemetry.metrics.gradients.concentration import layer_concentration as layer_concentration
from esper_telemetry.metrics.gradients.directions import GradientSigns as GradientSigns
from esper_telemetry.metrics.gradients.directions import GradientZeros as GradientZeros
from esper_telemetry.metrics.gradients.directions import LayerZeros as LayerZeros
from esper_telemetry.metrics.gradients.directions import MinibatchAlignment as MinibatchAlignment
from esper_telemetry.metrics.gradients.directions import SuccessiveAlignment as SuccessiveAlignment
from esper_telemetry.metrics.gradients.directions import gradient_signs as gradient_signs
from esper_telemetry.metrics.gradients.directions import gradient_zeros as gradient_zeros
from esper_telemetry.metrics.gradients.directions import minibatch_alignment as minibatch_alignment
from esper_telemetry.metrics.gradients.directions import successive_alignment as successive_alignment
from esper_telemetry.metrics.gradients.directions import weighted_pair_cosine as weighted_pair_cosine
from esper_telemetry.metrics.gradients.health import gradient_health as gradient_health
from esper_telemetry.metrics.gradients.health import gradients_of as gradients_of
from esper_telemetry.metrics.gradients.health import named_parameters as named_parameters
from esper_telemetry.metrics.gradients.interference import BonusGradient as BonusGradient
from esper_telemetry.metrics.gradients.interference import Interference as Interference
from esper_telemetry.metrics.gradients.interference import PairGradients as PairGradients
from esper_telemetry.metrics.gradients.interference import ParameterInterference as ParameterInterference
from esper_telemetry.metrics.gradients.interference import bonus_gradient as bonus_gradient
from esper_telemetry.metrics.gradients.interference import group_interference as group_interference
from esper_telemetry.metrics.gradients.interference import interference as interference
from esper_telemetry.metrics.gradients.interference import leaf_gradients as leaf_gradients
from esper_telemetry.metrics.gradients.interference import leaf_interference as leaf_interference
from esper_telemetry.metrics.gradients.interference import pair_gradients as pair_gradients
from esper_telemetry.metrics.gradients.interference import parameter_interference as parameter_interference
from esper_telemetry.metrics.gradients.noise_scale import GradientNoise as GradientNoise
from esper_telemetry.metrics.gradients.noise_scale import shard_noise as shard_noise
from esper_telemetry.metrics.gradients.noise_scale import two_batch_noise as two_batch_noise
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

__all__ = [
    "DECADE_EDGES",
    "BonusGradient",
    "Clipping",
    "Concentration",
    "GlobalGradient",
    "GradientDecades",
    "GradientNoise",
    "GradientNorms",
    "GradientSigns",
    "GradientZeros",
    "GroupGradients",
    "HeadGradients",
    "Interference",
    "LayerConcentration",
    "LayerDecades",
    "LayerGradients",
    "LayerZeros",
    "MinibatchAlignment",
    "PairGradients",
    "ParameterInterference",
    "SuccessiveAlignment",
    "TermGradients",
    "bonus_gradient",
    "clip_coefficients",
    "coefficients",
    "concentration",
    "decade_counts",
    "gradient_decades",
    "gradient_health",
    "gradient_norms",
    "gradient_signs",
    "gradient_zeros",
    "gradients_of",
    "group_interference",
    "head_gradients",
    "interference",
    "layer_concentration",
    "leaf_gradients",
    "leaf_interference",
    "minibatch_alignment",
    "named_parameters",
    "pair_gradients",
    "parameter_interference",
    "shard_noise",
    "successive_alignment",
    "term_gradients",
    "two_batch_noise",
    "value_gradient",
    "weighted_pair_cosine",
]
