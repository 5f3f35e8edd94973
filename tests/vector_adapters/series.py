"""Compute history metrics from the inputs of a reference case."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from esper_telemetry.core.metric import Array
from esper_telemetry.history.derive import LOW, PairEvidence, diagnose_pair, pair_intensity
from esper_telemetry.history.deviations import (
    FAST,
    N_MIN,
    SCALE_MIN,
    SLOW,
    Cusum,
    Ema,
    LogDrift,
    PageHinkley,
    decades,
    n_eff,
    robust_z,
)
from esper_telemetry.history.gradient_history import (
    CLAMP_EXPLODE,
    CLAMP_VANISH,
    DECADES_EXPLODE,
    DECADES_VANISH,
    FACTOR_WEIGHTS,
    SPREADS,
    adaptive_thresholds,
    explode_severity,
    gradient_condition,
    vanish_severity,
)
from esper_telemetry.history.trend import (
    CORRELATION_WINDOW,
    acf,
    advantage_gradient,
    goertzel,
    lr_response,
    mann_kendall,
    periods,
    prewhiten,
    theil_sen,
)
from vector_adapters.inputs import Inputs, Values, of_formula, of_keys


def array(values: Iterable[Any]) -> Array:
    """Return a series in which "nan" and "inf" are non-finite numbers."""
    return np.array([float(value) for value in values], dtype=np.float64)


def number(value: Any) -> float | None:
    """Return a number of one series, None if it is undefined."""
    result = float(np.asarray(value).reshape(-1)[0])
    return None if math.isnan(result) else result


def listed(values: Iterable[Any]) -> list[float | None]:
    """Return the numbers of one series over time."""
    return [number(value) for value in values]


@of_keys("*/", "ema ew_std")
def level(inputs: Inputs) -> Values:
    ema = Ema(1, inputs["beta"])
    rows = []
    for x in inputs["x"]:
        ema.step(array([x]))
        rows.append((ema.mean, ema.std, n_eff(ema.t, ema.beta)))
    means, stds, samples = zip(*rows, strict=True)
    return {"*/ema": listed(means), "*/ew_std": listed(stds), "aux:n_eff": listed(samples)}


@of_keys("*/", "drift macd")
def drift(inputs: Inputs) -> Values:
    """T2, against the last average, and between a fast and a slow average."""
    assert (inputs.get("beta_fast", inputs.get("beta", FAST)), inputs.get("beta_slow", SLOW)) == (FAST, SLOW)
    state = LogDrift(1)
    steps = [state.step(array([x])) for x in inputs["x"]]
    return {"*/drift": listed(s.drift for s in steps), "*/macd": listed(s.macd for s in steps)}


@of_keys("*/robust_z")
def robust(inputs: Inputs) -> Values:
    history = decades(array(inputs["history"]))[None]
    x = decades(array([inputs["x"]]))
    assert inputs["n_min"] == N_MIN
    z = robust_z(x, history, scale_min=inputs["scale_min"])
    return {"*/robust_z": number(z.robust_z)}


@of_formula("T3 without prewhitening", "T3: tie-corrected", "T3: all tied")
def trend(inputs: Inputs) -> Values:
    """T3 on the raw series."""
    return _test(array(inputs["x"]), theil_sen(array(inputs["x"])))


@of_formula("T3: a=")
def whitened_trend(inputs: Inputs) -> Values:
    """T3 on the prewhitened series."""
    white = prewhiten(array(inputs["x"]))
    extra = {"aux:acf1_detrended": white.acf1, "aux:a": white.a, "aux:y": white.y.tolist()}
    return {**_test(white.y, white.slope), **extra}


def _test(x: Array, slope: float) -> Values:
    test = mann_kendall(x)
    return {"*/trend/slope": slope, "*/trend/mk_z": test.z, "aux:S": test.s, "aux:var": test.variance, "aux:tau_a": test.tau}


@of_formula("T4: biased autocorrelation")
@of_keys("*/", "period/g period/p period/length acf1")
def period(inputs: Inputs) -> Values:
    """T4, and the autocorrelation at `lag`, 1 by default."""
    x = array(inputs["x"])
    results = periods([x])
    length = number(results.length)
    return {
        "*/period/g": number(results.g),
        "*/period/p": number(results.p),
        "*/period/length": length,
        "*/acf1": acf(x, 1),
        "aux:acf": acf(x, inputs.get("lag", 1)),
        "aux:ordinates": (len(x) - 1) // 2,
        "aux:freq_index": None if length is None else len(x) / length,
    }


@of_keys("*/period/goertzel")
def known_period(inputs: Inputs) -> Values:
    """T4 at a declared frequency."""
    return {"*/period/goertzel": goertzel(array(inputs["x"]), inputs["k"])}


@of_formula("T5: the detector")
@of_keys("*/cusum")
def cusum(inputs: Inputs) -> Values:
    """T5: the sums that never reset, and the alarms of a detector that resets them."""
    free, reset = Cusum(1, inputs["k"]), Cusum(1, inputs["k"])
    values, ups, downs, alarms = [], [], [], []
    for index, z in enumerate(inputs["z"], 1):
        values.append(number(free.step(array([z])).cusum))
        ups.append(number(free.up))
        downs.append(number(free.down))
        over = np.asarray(reset.step(array([z])).cusum) > inputs["h"]
        alarms += [index] if over[0] else []
        reset.reset(over)
    first = next((i for i, value in enumerate(values, 1) if value is not None and value > inputs["h"]), None)
    return {"*/cusum": values, "aux:pos": ups, "aux:neg": downs, "aux:first_alarm": first, "aux:alarms": alarms}


@of_keys("*/page_hinkley")
def page_hinkley(inputs: Inputs) -> Values:
    """T5, one-sided."""
    state = PageHinkley(1, inputs["delta"])
    values = listed(state.step(array([x])).page_hinkley for x in inputs["x"])
    first = next((i for i, value in enumerate(values, 1) if value is not None and value > inputs["lam"]), None)
    return {"*/page_hinkley": values, "aux:first_alarm": first}


@of_keys("*/lr_response")
def response(inputs: Inputs) -> Values:
    norms = array(inputs["update_norm"])
    return {"*/lr_response": lr_response(array(inputs["lr"]), norms).lr_response}


@of_keys("adv/grad_corr")
def leak(inputs: Inputs) -> Values:
    assert inputs["window"] == CORRELATION_WINDOW
    return advantage_gradient(array(inputs["x"]), array(inputs["y"])).values()


@of_keys("grad/{g}/", "severity_vanish severity_explode")
def severity(inputs: Inputs) -> Values:
    norms = array(inputs["norms"])
    assert (inputs["decades_vanish"], inputs["decades_explode"]) == (DECADES_VANISH, DECADES_EXPLODE)
    vanish = vanish_severity(norms, inputs["tau_vanish"])
    explode = explode_severity(norms, inputs["tau_explode"])
    return {"grad/{g}/severity_vanish": vanish.tolist(), "grad/{g}/severity_explode": explode.tolist()}


@of_keys("grad/{g}/", "threshold_explode threshold_vanish")
def thresholds(inputs: Inputs) -> Values:
    assert (inputs["n_min"], inputs["scale_min"], inputs["k"]) == (N_MIN, SCALE_MIN, SPREADS)
    assert (tuple(inputs["clamp_explode"]), tuple(inputs["clamp_vanish"])) == (CLAMP_EXPLODE, CLAMP_VANISH)
    result = adaptive_thresholds(decades(array(inputs["history"]))[None], inputs["max_grad_norm"])
    return {
        "grad/{g}/threshold_explode": number(result.explode),
        "grad/{g}/threshold_vanish": number(result.vanish),
        "aux:median_log10": number(result.median),
        "aux:scale": number(result.scale),
    }


@of_keys("grad/", "health health_cause")
def health(inputs: Inputs) -> Values:
    assert tuple(inputs["factor_weights"]) == FACTOR_WEIGHTS
    weights = inputs.get("layer_weights")
    results = gradient_condition(
        array(inputs["layer_norms"]),
        tau_vanish=inputs["tau_vanish"],
        tau_explode=inputs["tau_explode"],
        zero_frac=inputs["zero_frac"],
        layer_weights=None if weights is None else array(weights),
    )
    faults = ("vanish", "explode", "imbalance", "zero")
    return {**results.values(), "grad/health_cause": results.cause, **{f"aux:{f}": getattr(results, f) for f in faults}}


@of_keys("grad/pair/{pair}/intensity_ratio")
def intensity(inputs: Inputs) -> Values:
    """G13, the ratio."""
    key = "grad/pair/{pair}/intensity_ratio"
    return {key: [pair_intensity("x", **case).intensity_ratio for case in inputs["cases"]]}


@of_keys("grad/pair/{pair}/cause")
def diagnosis(inputs: Inputs) -> Values:
    """G13, the cause."""
    assert inputs["low"] == LOW
    causes = []
    for case in inputs["cases"]:
        fields = {name: value for name, value in case.items() if name != "seed_zero_frac"}
        evidence = PairEvidence(zero_frac=case["seed_zero_frac"], **{n: _z(v) for n, v in fields.items()})
        causes.append(diagnose_pair(evidence).cause)
    return {"grad/pair/{pair}/cause": causes}


def _z(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
