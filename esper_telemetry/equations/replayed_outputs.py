"""Equations of the stored log-probabilities and values: the policy reproduces them from the stored inputs before the first step.

The policy runs again on the stored observations, states and masks. If the result differs from the stored numbers, it also runs on the
inputs that known mistakes would use.

Shapes: N rows, which may have several axes [T, B].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, mistake
from esper_telemetry.equations.log_probs import shifted
from esper_telemetry.metrics.statistics import same_shape

FIRST_DIFFERENCE = 1e-2
"""Error of a first minibatch, relative to the largest number, that a device's arithmetic does not explain."""

Alternatives = Mapping[str, Callable[[], "ArrayLike | None"]]
"""Passes of the policy on other inputs, by the names of hypotheses."""


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """A pass of the policy on the rollout before the first step.

    Attributes:
        stored: [N], at collection.
        replayed: [N], of the pass.
        alternative: (name of a hypothesis) -> [N], of a pass on other inputs; None if there is no such pass.
    """

    stored: Tensor
    replayed: Tensor
    alternative: Callable[[str], Tensor | None]


SIMILAR_SIZE = 3.0
"""Largest ratio of two random differences that count as equally large."""

CORRELATED = 0.9
"""Correlation above which differences of two passes share a cause: unrelated passes differ from a third with a correlation of 0.5."""


def _other_mode(inputs: ReplayInputs) -> Tensor | None:
    """The pass in the other mode; the stored numbers if the pass differs as they do, because the batches were different."""
    other, again = inputs.alternative("other_mode"), inputs.alternative("random_passes")
    if other is None or (again is not None and bool((again != inputs.replayed).any())):
        return other  # random passes differ from each other as much as modes do
    moved, explained = inputs.stored - inputs.replayed, other - inputs.replayed
    if not _similar_size(moved, explained):
        return other
    together = torch.corrcoef(torch.stack([moved.flatten(), explained.flatten()]))[0, 1]
    return inputs.stored if together > CORRELATED else other


def _random_passes(inputs: ReplayInputs) -> Tensor | None:
    """The stored numbers, if two passes differ from each other as much as the stored numbers differ from one of them."""
    again = inputs.alternative("random_passes")
    return inputs.stored if again is not None and _similar_size(inputs.stored - inputs.replayed, again - inputs.replayed) else None


def _similar_size(first: Tensor, second: Tensor) -> bool:
    sizes = first.square().mean().sqrt(), second.square().mean().sqrt()
    return bool(min(sizes) > 0 and max(sizes) <= SIMILAR_SIZE * min(sizes))


def _of_step(inputs: ReplayInputs, name: str, steps: int) -> Tensor | None:
    """The pass of that name; if it is not given, as for values, the replayed numbers `steps` later."""
    given = inputs.alternative(name)
    return shifted(inputs.replayed, steps, inputs.stored) if given is None else given


def _pass(name: str) -> Callable[[ReplayInputs], Tensor | None]:
    return lambda inputs: inputs.alternative(name)


INPUT_HYPOTHESES = (
    mistake("other_observations", "the outputs for the observations that the policy received, which differ from the stored observations")
    .predicts("f(o'), stored o ≠ o'", _pass("other_observations"))
    .advises("Store the same observation that is passed to the policy.", source="program: script-obs_alias"),
    mistake("other_statistics", "the outputs for observations normalised with other statistics than the stored observations")
    .predicts("f((o - m') / s'), stored (o - m) / s", _pass("other_statistics"))
    .advises("Normalise an observation once, before the policy receives it, and store the normalised observation.")
    .cites("https://github.com/leggedrobotics/rsl_rl/pull/225"),
    mistake("other_scale", "the outputs for observations on another scale than in the loss")
    .predicts("f(o), in the loss f(c o)", _pass("other_scale"))
    .advises("Scale observations in one place that acting and training share, such as the network's `forward`.")
    .cites("program: script-other_scale"),
    mistake("older_weights", "the outputs of the policy with the weights of an earlier update")
    .predicts("f(o; θ'), θ' before the last update", _pass("older_weights"))
    .advises("Copy the weights to the policy that acts before each rollout.")
    .cites("program: loop-stale_weights"),
    mistake("observation_before", "the outputs for the previous step's observations")
    .predicts("f(o_{t-1})", partial(_of_step, name="observation_before", steps=-1))
    .advises("Pass the policy the observation that the last `env.step` returned.")
    .cites("program: subclass-obs_alias"),
    mistake("observation_after", "the outputs for the next step's observations")
    .predicts("f(o_{t+1})", partial(_of_step, name="observation_after", steps=1))
    .advises("Store the observation before the action, not the observation after it.")
    .cites("program: test_collection"),
    mistake("other_mode", "the outputs of a policy whose dropout or batch norm is in the other mode")
    .predicts("f_train(o) instead of f_eval(o), or the reverse", _other_mode)
    .advises("Act and train in the same mode, without dropout and with frozen batch statistics.")
    .cites("https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.eval"),
    mistake("random_passes", "the outputs of a policy whose passes differ at random, because dropout is active")
    .predicts("f(o, ε), ε drawn again in every pass", _random_passes)
    .advises("Switch dropout off: the ratio must compare two policies, not two dropout masks.")
    .cites("https://github.com/huggingface/trl/issues/4"),
    mistake("memory_zero", "the outputs of a memory that is empty at the beginning of the rollout")
    .predicts("h_0 = 0", _pass("memory_zero"))
    .given(of="memory")
    .advises("Start the pass over a sequence with the hidden state from the start of the rollout.")
    .cites("program: bundled-h0_zero"),
    mistake("memory_stored_late", "the outputs for the states before each step, while the states after it are stored")
    .predicts("f(o_t, h_t), stored h_{t+1}", _pass("memory_stored_late"))
    .given(of="memory")
    .advises("Store the hidden state that the policy received with the observation, before the next one replaces it.")
    .cites("program: sb3_collection"),
    mistake("other_memory", "the outputs for the states that the policy received, which differ from the stored states")
    .predicts("f(o, h'), stored h ≠ h'", _pass("other_memory"))
    .advises("Store the same hidden state that is passed to the policy.")
    .cites("program: test_script_equations"),
    mistake("memory_not_reset", "the outputs of a memory that is not reset when an episode begins")
    .predicts("h_t carried over the ends of episodes", _pass("memory_not_reset"))
    .given(of="memory")
    .advises("Set the hidden state to zero when an episode begins, both when acting and in training.")
    .cites("https://github.com/ikostrikov/pytorch-a2c-ppo-acktr-gail/issues/206"),
    mistake("memory_reset_late", "the outputs of a memory that is reset one step late")
    .predicts("h_t = 0 in the second step of an episode", _pass("memory_reset_late"))
    .given(of="memory")
    .advises("Shift the flags: `episode_starts[t]` belongs to the step that begins with the reset.")
    .cites("https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/169"),
    mistake("memory_reset_early", "the outputs of a memory that is reset one step early")
    .predicts("h_t = 0 in the last step of an episode", _pass("memory_reset_early"))
    .given(of="memory")
    .advises("Shift the flags: `episode_starts[t]` belongs to the step that begins with the reset.")
    .cites("https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/169"),
    mistake("memory_empty", "the outputs of a policy whose memory is empty in every step")
    .predicts("h_t = 0", _pass("memory_empty"))
    .given(of="memory")
    .advises("Pass the hidden state of each step to the next step.", source="program: test_collection"),
    mistake("mask_missing", "the outputs of the policy without action masks")
    .predicts("π(a | o) over all choices", _pass("mask_missing"))
    .advises("Store the mask of every step, and apply it both when acting and in training.")
    .cites("2006.14171"),
)

REPLAYED_LOG_PROBS = Equation(
    name="replayed_log_probs",
    rank=16,
    quantity="the log-probabilities of the acting policy",
    equation="log π(a | s) of the policy before the first step, on the stored observations, states and masks",
    source="1707.06347: the ratio of a policy to itself is 1",
    inputs="a policy that can be run before the first step, and its stored inputs",
    check="check_replayed_log_probs",
    compute=lambda inputs: inputs.replayed,
    tolerance=1.0,  # healthy runs in single precision reach 2.5e-7, with and without an LSTM
    hypotheses=(
        *INPUT_HYPOTHESES,
        mistake("drawn_again", "the log-probabilities of the stored actions, while the loss draws new ones")
        .predicts("log π(a | s), in the loss log π(a' | s), a' ~ π(s)", _pass("drawn_again"))
        .advises("Pass the stored actions to the function that computes log-probabilities in the update.")
        .cites("program: script-drawn_again"),
        mistake("scaled_actions", "the log-probabilities of the actions before they were scaled, while the loss uses them after it")
        .predicts("log π(u | s), in the loss log π(a | s), a = c u + d", _pass("scaled_actions"))
        .advises("Store the action as it was drawn, and scale only the copy that the environment receives.")
        .cites("program: force-scaled_stored"),
        mistake("other_spread", "the outputs of a distribution with the same modes and another width")
        .predicts("π(a | s)^c / Z, or N(μ, c σ)", _pass("other_spread"))
        .advises("Use one temperature, and one standard deviation, for acting and in the loss.")
        .cites("program: test_script_runs"),
        mistake("whole_actions", "the log-probabilities of the actions before they became whole numbers, which the loss uses")
        .predicts("log π(u | s), in the loss log π(a | s), a = trunc u", _pass("whole_actions"))
        .advises("Store continuous actions as real numbers: `long()`, or a buffer of whole numbers, cuts off their fractions.")
        .cites("program: test_script_runs"),
        mistake("cut_actions", "the log-probabilities of the actions before they were cut at bounds, while the loss uses them after it")
        .predicts("log π(u | s), in the loss log π(a | s), a = clip(u, low, high)", _pass("cut_actions"))
        .advises("Store the action as it was drawn, and cut only the copy that the environment receives.")
        .cites("program: test_script_runs"),
        mistake("mean_in_loss", "sums over the action dimensions, while the loss has their means")
        .predicts("Σ_i log π(a_i | s) instead of 1/D Σ_i log π(a_i | s)", _pass("mean_in_loss"))
        .advises("Sum the new log-probabilities over the action dimensions, too.")
        .cites("program: test_log_ratios"),
        mistake("mean_at_collection", "means over the action dimensions, while the loss has their sums")
        .predicts("1/D Σ_i log π(a_i | s) instead of Σ_i log π(a_i | s)", _pass("mean_at_collection"))
        .advises("Sum the stored log-probabilities over the action dimensions, too.")
        .cites("program: test_log_ratios"),
        mistake("squashed_once", "log-probabilities with the correction of the tanh in only one of acting and training")
        .predicts("log N(u) or log N(u) - Σ log(1 - tanh² u), the other in the loss", _pass("squashed_once"))
        .advises("Compute both log-probabilities by one function, with or without the correction of the tanh.")
        .cites("program: test_squashed_actions"),
        mistake(
            "squashed_in_loss",
            "log-probabilities of the actions before the tanh, while the loss uses the actions after it as if they were before it",
        )
        .predicts("log π(u | s), stored a = tanh u", _pass("squashed_in_loss"))
        .advises("Store the action before the tanh and the scale, and pass the environment the one after them.")
        .cites("program: test_squashed_actions"),
    ),
    advice="Look for differences between acting and training: observations, states, masks, modes, and weights of an earlier update.",
)

VALUES = Equation(
    name="values",
    rank=17,
    quantity="the values at collection",
    equation="V(s) of the critic before the first step, on the stored observations and states",
    source="1506.02438",
    inputs="a critic that can be run before the first step, and its stored inputs",
    check="check_values",
    compute=lambda inputs: inputs.replayed,
    tolerance=1.0,  # healthy runs in single precision reach 2.5e-7, with and without an LSTM
    hypotheses=(
        *INPUT_HYPOTHESES[:-1],
        mistake("other_rows", "the outputs for the observations of other rows")
        .predicts("V(s_j), j ≠ i", _pass("other_rows"))
        .advises("Compute values in the order of the rollout: no shuffling loader and no other index may come between both.")
        .cites("program: test_script_targets"),
        mistake("other_output", "another output than the one that the value loss trains")
        .predicts("f_j(o), j ≠ V", _pass("other_output"))
        .advises("Store the output that the value loss reads: the same network, head and column.")
        .cites("program: test_script_targets"),
    ),
    advice="Look for differences between acting and training: observations, states, modes, and weights of an earlier update.",
)


@checked_arguments(tolerance=0)
@no_grad
def check_replayed_log_probs(
    log_probs: ArrayLike,
    replayed: ArrayLike,
    *,
    alternatives: Alternatives | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of stored log-probabilities with the policy's log-probabilities before the first step.

    Args:
        log_probs: [T, B] or [N], at collection.
        replayed: same shape, of the same actions, from a pass of the policy on the stored observations.
        alternatives: functions that return log-probabilities of passes on other inputs, or with other weights, by the hypothesis:
            `other_observations`, `other_statistics`, `older_weights`, `observation_before`, `observation_after`, `mask_missing`,
            `memory_zero`, `memory_not_reset`, `other_output` and so on; called only if `log_probs` and `replayed` differ.
        valid: same shape, bool; None if every entry counts.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises ValueError if a name is not a hypothesis, or shapes differ.
    """
    return _check_replay(REPLAYED_LOG_PROBS, log_probs, replayed, alternatives, valid, precision, tolerance)


@checked_arguments(tolerance=0)
@no_grad
def check_values(
    values: ArrayLike,
    replayed: ArrayLike,
    *,
    alternatives: Alternatives | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of stored values with the critic's values before the first step; see `check_replayed_log_probs`."""
    return _check_replay(VALUES, values, replayed, alternatives, valid, precision, tolerance)


def _check_replay(
    equation: Equation,
    stored: ArrayLike,
    replayed: ArrayLike,
    alternatives: Alternatives | None,
    valid: ArrayLike | None,
    precision: str | None,
    tolerance: float | None,
) -> EquationCheck:
    claimed = as_tensor(stored).detach().double()
    now = as_tensor(replayed, claimed).detach().double()
    same_shape(stored=claimed, replayed=now)
    names = list(dict.fromkeys([one.name for one in (*REPLAYED_LOG_PROBS.hypotheses, *VALUES.hypotheses)]))
    unknown = sorted(set(alternatives or {}) - set(names))
    if unknown:
        raise ValueError(f"alternatives must be among {', '.join(names)}, got {', '.join(unknown)}")

    def alternative(name: str) -> Tensor | None:
        run = (alternatives or {}).get(name)
        column = None if run is None else run()
        return None if column is None else as_tensor(column, claimed).detach().double().reshape(claimed.shape)

    inputs = ReplayInputs(claimed, now, alternative)
    settings: dict[str, Any] = {"valid": as_mask(valid, claimed), "precision": precision, "tolerance": tolerance}
    return compare(equation, inputs, claimed, magnitudes=(torch.ones(1),), **settings)
