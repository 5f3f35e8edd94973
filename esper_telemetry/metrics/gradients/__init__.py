"""Gradients: norms, clipping, interference of actor and critic, alignment, sparsity, concentration, noise scale."""

from esper_telemetry.metrics.gradients.alignment import (
    MinibatchAlignment,
    SuccessiveAlignment,
    minibatch_alignment,
    successive_alignment,
    weighted_pair_cosine,
)
from esper_telemetry.metrics.gradients.clipping import Clipping, clip_coefficients, coefficients
from esper_telemetry.metrics.gradients.concentration import (
    Concentration,
    LayerConcentration,
    concentration,
    layer_concentration,
)
from esper_telemetry.metrics.gradients.decades import (
    DECADE_EDGES,
    GradientDecades,
    LayerDecades,
    decade_counts,
    gradient_decades,
)
from esper_telemetry.metrics.gradients.entropy import BonusGradient, bonus_gradient
from esper_telemetry.metrics.gradients.groups import (
    GlobalGradient,
    GroupGradients,
    HeadGradients,
    LayerGradients,
    TermGradients,
)
from esper_telemetry.metrics.gradients.health import gradient_health, gradients_of, named_parameters
from esper_telemetry.metrics.gradients.interference import (
    Interference,
    ParameterInterference,
    group_interference,
    interference,
    leaf_gradients,
    leaf_interference,
    parameter_interference,
)
from esper_telemetry.metrics.gradients.noise_scale import GradientNoise, shard_noise, two_batch_noise
from esper_telemetry.metrics.gradients.norms import (
    GradientNorms,
    gradient_norms,
    head_gradients,
    term_gradients,
    value_gradient,
)
from esper_telemetry.metrics.gradients.pairs import PairGradients, pair_gradients
from esper_telemetry.metrics.gradients.sparsity import (
    GradientSigns,
    GradientZeros,
    LayerZeros,
    gradient_signs,
    gradient_zeros,
)

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
