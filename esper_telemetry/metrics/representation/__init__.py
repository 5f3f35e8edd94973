"""What the network makes of observations: inactive units, ranks, norms and drift of features, and what they do to the ratios."""

from esper_telemetry.metrics.representation.activity import ActivityGroups, LayerActivity, UnitActivity, unit_activity
from esper_telemetry.metrics.representation.capacity import CapacityLoss, capacity_loss
from esper_telemetry.metrics.representation.excess import ExcessRatio, excess_ratio
from esper_telemetry.metrics.representation.features import FeatureDrift, FeatureNorm, feature_drift, feature_norm
from esper_telemetry.metrics.representation.rank import FeatureRank, feature_rank
from esper_telemetry.metrics.representation.spread import LayerResponses, layer_responses

__all__ = [
    "ActivityGroups",
    "CapacityLoss",
    "ExcessRatio",
    "FeatureDrift",
    "FeatureNorm",
    "FeatureRank",
    "LayerActivity",
    "LayerResponses",
    "UnitActivity",
    "capacity_loss",
    "excess_ratio",
    "feature_drift",
    "feature_norm",
    "feature_rank",
    "layer_responses",
    "unit_activity",
]
