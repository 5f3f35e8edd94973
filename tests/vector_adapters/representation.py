"""Compute the metrics of features from the inputs of a reference case."""

from esper_telemetry.metrics.representation import (
    DORMANT,
    dormant_scores,
    excess_ratio,
    feature_drift,
    feature_norm,
    feature_rank,
    unit_activity,
)
from esper_telemetry.metrics.statistics import keep
from vector_adapters.inputs import Inputs, Values, floats, of_keys


@of_keys("repr/", "dormant_frac dead_frac")
def activity(inputs: Inputs) -> Values:
    x = floats(inputs["activations"])
    result = unit_activity({"trunk": x}, activation=inputs.get("activation", "relu"), threshold=inputs.get("tau", DORMANT))
    return {**result.all.values(), "aux:scores": dormant_scores(keep(x.t(), None)).tolist()}


@of_keys("repr/", "effective_rank srank pca99 feature_rank")
def rank(inputs: Inputs) -> Values:
    return feature_rank(floats(inputs["features"]), delta=inputs["delta"]).values()


@of_keys("repr/feature_norm")
def norm(inputs: Inputs) -> Values:
    return feature_norm(floats(inputs["preactivations"])).values()


@of_keys("repr/drift_cos")
def drift(inputs: Inputs) -> Values:
    return feature_drift(floats(inputs["features_old"]), floats(inputs["features"])).values()


@of_keys("repr/excess_ratio/", "high low")
def excess(inputs: Inputs) -> Values:
    return excess_ratio(floats(inputs["logratio"]), clip=inputs["clip_eps"]).values()
