"""Remarks: unusual properties of a run that need not be wrong, each reported once as a journal event.

Correct runs have remarks too. If a return stays flat or declines, they are the first candidates for an explanation. Remarks that apply to
many correct runs have `quiet` in their data and are shown only with such a return.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from esper_telemetry.alarms.rule import View
from esper_telemetry.alarms.verdict.published_settings import (
    INITIAL_STD,
    MIN_SEEN_SHARE,
    PUBLISHED,
    SMALL_FEATURES,
    is_outside,
    outside_settings,
    range_sentence,
    with_logged_rate,
)
from esper_telemetry.core.messages import number, percent, span
from esper_telemetry.equations.equation import EQUATION_KEY, equation_results

REMARK: Final = "remark"  # type of the journal event
MIN_STEPS: Final = 5000  # environment steps without a reward that cause a remark
MIN_EPISODES: Final = 10  # episodes with the same end that cause a remark
MOSTLY: Final = 0.5  # share of episodes that time limits end above which their treatment may explain a return
TIME_LIMITS_END: Final = f"{EQUATION_KEY}advantages_time_limits_end"
MIN_LIMITED_STEPS: Final = 20  # episode length above which the length may be a time limit
LIMIT_SURPRISE: Final = 0.5  # bound of value/bias_terminated, in standard deviations of the returns
SHORT_EPISODE: Final = 2.0  # length up to which episodes end as soon as they begin
TINY_REWARD: Final = 1e-3  # largest reward below which the scale of rewards causes a remark

SAME_STD: Final = 0.8
"""Smallest over mean standard deviation above which a head has the same one in all states, as the setting says."""

WHOLE_NUMBERS: Final = re.compile(r"Box\((?P<low>-?[\d.]+), (?P<high>[\d.]+), \(\d+,\), (?P<dtype>u?int\d+)\)")
"""A space of vectors of whole numbers, as a fact."""
FEW_VALUES: Final = 10.0  # span of such a space that hardly tells anything of real numbers

UNEQUAL_FEATURES: Final = 1000.0  # largest over smallest feature of an observation

NO_ACTION_EFFECT: Final = ((2000, 1.4), (1000, 1.0), (600, 0.9))
"""Steps with a measured effect, and means of `policy/action_effect` below which actions have none: chance gives about 0.9 for any number of
steps, and the weakest healthy run 1.3 in 500 steps and 1.8 in 2,000."""

LOGGED_SETTINGS: Final = {"opt/lr": "learning_rate", "loss/entropy_coef": "entropy_coef"}
"""Keys of settings that a schedule may change."""

LOW_RATE: Final = 1e-3  # share of the first learning rate below which updates hardly change the policy
LOW_RATE_UPDATES: Final = 3  # updates at such a rate that cause a remark,
LOW_RATE_SHARE: Final = 0.2  # if they are this share of all: the end of a schedule is shorter
FAR_OUTSIDE: Final = 10.0  # multiple of the highest published value beyond which a schedule's value causes a remark
LATER: Final = " later"  # end of the name of a remark on it

MIN_ENDED_EARLY: Final = 10  # updates from the start that must all end early
MAX_STEPS_TAKEN: Final = 0.1  # share of the planned optimizer steps that each of them takes at most
OTHER_REWARDS: Final = (10, 0.5)
"""Updates, and mean correlation below which the rewards in training are other ones than the environment's."""
OWN_BOUNDS, OWN_BOUNDS_UPDATES, OWN_BOUNDS_CHANGE = 0.8, 10, 0.015
"""Part of the range that actions of another range reach, the number of first updates, and by how much their largest one may exceed their
mean: for Gaussian actions 0.05 and more, for up to a million numbers."""
MIN_LATER_UPDATES: Final = 2
"""Updates in which a further mistake must show."""
EARLY_END: Final = "early end"
INITIAL_SPREAD: Final = "initial std"
OWN_RANGE: Final = "own range"
"""Names of remarks."""

Remark = tuple[str, dict[str, Any]]  # name, and data of the event: `text`, `key`, `value`, `limit`, `quiet`


@dataclass(slots=True)
class Remarks:
    """Remarks on one run, each reported once, and the rewards, ends of episodes and effects of actions in all records so far.

    Attributes:
        names: of the remarks so far.
        reward_steps: environment steps with rewards.
        largest, spread: largest magnitude of a reward, and standard deviation within a record.
        values: mean rewards of records in which all rewards were equal.
        episodes: number that ended.
        truncated: number of them that a time limit ended.
        shortest, longest: lengths of terminated episodes.
        shortest_cut, longest_cut: lengths of episodes that a time limit ended.
        newest: length of the longest episode of the last record.
        length: mean length of the latest episodes.
        effect_records, effect_steps: records and steps with `policy/action_effect`.
        effect: sum of `policy/action_effect`.
        reached: parts of their range that the actions of each head have reached, in the first updates.
        correlations: number and sum of `reward/trained_correlation`.
        first_rate: learning rate of the first update that has one.
        rated, low_rated: updates with a learning rate, and those at which it was below `LOW_RATE` of the first one.
        stepped, most_steps: updates with a known number of optimizer steps, and the largest one.
        differing: number of updates in which a known mistake explained an equation's difference, by equation; 0 for those seen first.
    """

    names: set[str] = field(default_factory=set)
    reward_steps: int = 0
    largest: float = 0.0
    spread: float = 0.0
    values: set[float] = field(default_factory=set)
    episodes: float = 0.0
    truncated: float = 0.0
    shortest: float = float("inf")
    longest: float = 0.0
    shortest_cut: float = float("inf")
    longest_cut: float = 0.0
    newest: float = 0.0
    length: float | None = None
    effect_records: int = 0
    effect_steps: int = 0
    effect: float = 0.0
    reached: dict[str, list[float]] = field(default_factory=dict)
    correlations: tuple[int, float] = (0, 0.0)
    first_rate: float = 0.0
    rated: int = 0
    low_rated: int = 0
    stepped: int = 0
    most_steps: int = 0
    differing: dict[str, int] = field(default_factory=dict)

    def _add_ends(self, view: View) -> None:
        """Add the episodes of a record."""
        count = view.get("episode/count") or 0.0
        self.episodes += count
        cut_off = view.get("episode/truncated_frac") or 0.0
        self.truncated += count * cut_off
        self.length = view.get("episode/length_mean") or self.length
        # not every record has the shortest length; a mean that differs shows that the lengths do
        mean = None if cut_off else view.get("episode/length_mean")
        self.shortest = min(self.shortest, view.get("episode/terminated_length_min") or mean or self.shortest)
        terminated, cut = (view.get(f"episode/{end}_length_max") or 0.0 for end in ("terminated", "truncated"))
        self.longest, self.longest_cut = max(self.longest, terminated), max(self.longest_cut, cut)
        self.shortest_cut = min(self.shortest_cut, view.get("episode/truncated_length_min") or self.shortest_cut)
        self.newest = max(terminated, cut)

    def step(self, view: View) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the events of an update."""
        events: list[tuple[str, Mapping[str, Any]]] = []
        for name, data in self._remarks(view):
            if name not in self.names:
                self.names.add(name)
                events.append((REMARK, {"name": name, "update": view.update, **data}))
        return events

    def _remarks(self, view: View) -> Iterator[Remark]:
        if view.update == 1:
            for name, value, limit, text in outside_settings(with_logged_rate(view.facts, view.get("opt/lr"))):
                yield name, {"text": text, "key": "", "value": value, "limit": limit, "quiet": False}
            yield from initial_spread(view)
            yield from in_loss(view)
            yield from weight_decay(view)
            yield from whole_numbers(view)
        yield from changed_settings(view)
        yield from self._low_rate(view)
        yield from self._early_ends(view)
        self._add_ends(view)
        yield from self._horizon(view)
        yield from self._fixed_length(view)
        yield from self._time_limits(view)
        yield from self._short_episodes()
        yield from self._rewards(view)
        yield from self._effect(view)
        yield from self._reached(view)
        yield from self._other_rewards(view)
        yield from self._later_equations(view)
        yield from feature_sizes(view)
        yield from features_and_gradients(view)

    def _low_rate(self, view: View) -> Iterator[Remark]:
        """A learning rate that a schedule has brought to almost 0 long before the end."""
        rate = view.get("opt/lr")
        if rate is None or rate < 0:
            return
        self.first_rate = self.first_rate or rate
        self.rated, self.low_rated = self.rated + 1, self.low_rated + (rate < LOW_RATE * self.first_rate)
        if self.low_rated >= max(LOW_RATE_UPDATES, LOW_RATE_SHARE * self.rated):
            name = view.facts.setting_names.get("learning_rate", "learning_rate")
            text = (
                f"{name} has been below a thousandth of its first value for {self.low_rated:,} of {self.rated:,} updates: it is "
                f"{number(rate)}, and was {number(self.first_rate)}: step a schedule once per update, not per minibatch or epoch"
            )
            yield "low learning rate", _data(text, "opt/lr", rate, LOW_RATE * self.first_rate)

    def _early_ends(self, view: View) -> Iterator[Remark]:
        """Updates that all end after a small part of their optimizer steps."""
        facts, rollout = view.facts, (view.facts.num_steps or 0) * (view.facts.num_envs or 0)
        whole = (facts.num_epochs or 0) * (facts.num_minibatches or 0)
        if view.steps is None or not view.transitions or not whole or not rollout:
            return
        planned = round(whole * view.transitions / rollout)  # several rollouts may share a record
        self.stepped, self.most_steps = self.stepped + 1, max(self.most_steps, view.steps)
        if self.stepped >= MIN_ENDED_EARLY and 0 < self.most_steps <= MAX_STEPS_TAKEN * planned:
            name = facts.setting_names.get("target_kl", "target_kl")
            limit = "" if facts.target_kl is None else f": {name} is {number(facts.target_kl)}"
            text = f"every update has ended after at most {self.most_steps:,} of {planned:,} optimizer steps{limit}"
            yield EARLY_END, _data(text, "", self.most_steps, MAX_STEPS_TAKEN * planned)

    def _horizon(self, view: View) -> Iterator[Remark]:
        """A discount factor that looks only a few steps ahead in long episodes."""
        gamma, length = view.facts.gamma, self.length
        if gamma is None or not 0 <= gamma < 1 or not length or self.episodes < MIN_EPISODES:
            return
        seen = 1 / (1 - gamma)
        if seen < MIN_SEEN_SHARE * length:
            text = (
                f"gamma is {number(gamma)}, which looks about {number(seen)} steps ahead, {percent(seen / length)} of an episode of "
                f"{number(length)} steps; published settings look ahead over 1.5 % or more"
            )
            yield "discount horizon", _data(text, "episode/length_mean", length, seen / MIN_SEEN_SHARE)

    def _fixed_length(self, view: View) -> Iterator[Remark]:
        """Episodes that all terminate after the same number of steps; an unlikely cause if the critic is not surprised by their ends."""
        few = self.episodes < MIN_EPISODES or self.longest < MIN_LIMITED_STEPS
        if few or self.truncated or self.shortest != self.longest:
            return
        text = (
            f"all {number(self.episodes)} episodes have terminated after exactly {number(self.longest)} steps: if this is a time limit, "
            "report it as truncated, so that returns are bootstrapped from the critic's estimate"
        )
        at_ends, bias, std = (view.get(key) for key in ("value/bias_terminated", "value/bias", "ret/std"))
        surprised = at_ends is not None and bias is not None and std is not None and abs(at_ends - bias) > LIMIT_SURPRISE * std
        data = _data(text, "episode/terminated_length_max", self.longest, self.longest)
        yield "fixed length", {**data, "unlikely": not surprised}

    def _time_limits(self, view: View) -> Iterator[Remark]:
        """Advantages that treat time limits as terminations, if most episodes end by one."""
        share = self.truncated / max(1.0, self.episodes)
        if self.episodes < MIN_EPISODES or share <= MOSTLY or TIME_LIMITS_END not in view.values:
            return
        place = view.facts.equation_places.get("advantages", "")
        text = (
            f"time limits have ended {percent(share)} of the episodes, and the advantages{place and f' ({place})'} treat them as "
            "terminations: bootstrap with the value of the last observation if only truncated is set"
        )
        yield "time limits", _data(text, "episode/truncated_frac", share, MOSTLY, quiet=True)

    def _short_episodes(self) -> Iterator[Remark]:
        """Episodes that end as soon as they begin, after longer ones."""
        longest = max(self.longest, self.longest_cut)
        if self.episodes >= MIN_EPISODES and 0 < self.newest <= SHORT_EPISODE and longest >= MIN_LIMITED_STEPS:
            steps = f"{number(self.newest)} step{'s' * (self.newest > 1)}"
            text = (
                f"all episodes of an update have ended after {steps}, and earlier ones after up to {number(longest)}: check that reset() "
                "of the environment resets its step counter and its flags"
            )
            data = _data(text, "episode/length_mean", self.newest, SHORT_EPISODE, quiet=True)
            yield "short episodes", {**data, "certain": True}

    def _rewards(self, view: View) -> Iterator[Remark]:
        """Rewards that are all 0, tiny or equal."""
        largest, spread = view.get("reward/absmax"), view.get("reward/std")
        if largest is None or spread is None:
            return
        self.reward_steps += view.rollout_steps
        self.largest, self.spread = max(self.largest, largest), max(self.spread, spread)
        if spread == 0 and len(self.values) < 2:
            self.values.add(view.get("reward/mean") or 0.0)
        if self.reward_steps < MIN_STEPS:
            return
        if self.largest == 0:
            text = f"the first {self.reward_steps:,} steps have all had a reward of 0"
            yield "no reward", _data(text, "reward/absmax", 0.0, 0.0)
        elif self.largest < TINY_REWARD:
            text = f"rewards are at most {number(self.largest)}, so the critic's targets are close to 0; scale rewards to about 1"
            yield "tiny rewards", _data(text, "reward/absmax", self.largest, TINY_REWARD)
        elif self.spread == 0 and len(self.values) == 1:
            (value,) = self.values
            text = f"the first {self.reward_steps:,} steps have all had the same reward, {number(value)}: "
            length = max(self.longest, self.longest_cut)
            fixed = self.episodes >= MIN_EPISODES and min(self.shortest, self.shortest_cut) == length
            if fixed:
                never = "" if self.longest else ", and none has terminated"
                text += (
                    f"all {number(self.episodes)} episodes have lasted {number(length)} steps{never}, so all returns are equal and show "
                    "nothing to learn from: check the condition in `step` that ends an episode or pays a reward"
                )
            else:
                text += "only the length of an episode matters"
            yield "equal rewards", {**_data(text, "reward/std", 0.0, 0.0, quiet=True), "unlikely": not fixed}

    def _reached(self, view: View) -> Iterator[Remark]:
        """Actions that have bounds of their own, far within those of the action space."""
        for head, key, share in view.labelled("policy/head/", "/range_reached"):
            shares = self.reached.setdefault(head, [])
            if len(shares) == OWN_BOUNDS_UPDATES:
                continue
            shares.append(share)
            mean = sum(shares) / len(shares)
            if len(shares) == OWN_BOUNDS_UPDATES and mean < OWN_BOUNDS and max(shares) - mean <= OWN_BOUNDS_CHANGE * mean:
                of_head = "" if head == "action" else f" of {head}"
                text = (
                    f"the actions{of_head} go at most {percent(mean)} of the way from the middle of their range to its bounds in every "
                    "update, as if they had bounds of their own: scale the policy's output, such as that of a tanh, a sigmoid or a Beta "
                    "distribution, to `low` and `high`"
                )
                yield f"{OWN_RANGE} {head}", _data(text, key, mean, OWN_BOUNDS)

    def _other_rewards(self, view: View) -> Iterator[Remark]:
        """Rewards in training that hardly depend on the environment's rewards."""
        correlation, (updates, limit) = view.get("reward/trained_correlation"), OTHER_REWARDS
        if correlation is None:
            return
        count, total = self.correlations = self.correlations[0] + 1, self.correlations[1] + correlation
        mean = total / count
        if count >= updates and mean < limit:
            text = (
                f"training gets other rewards than the environment's: their correlation is {number(mean)}, so what wrappers "
                "change decides what is learned: check its sign and size, or train without it"
            )
            yield "other rewards", _data(text, "reward/trained_correlation", mean, limit, quiet=True)

    def _later_equations(self, view: View) -> Iterator[Remark]:
        """Mistakes that show after the alarm about another one has been raised; a gradient without a term follows from a wrong loss."""
        results = [one for one in equation_results(view.values, view.facts) if not one.holds and one.explanations]
        if not self.differing:
            self.differing = {one.equation.name: 0 for one in results}
            return
        for one in results:
            name = one.equation.name
            terms = {hypothesis.name.removesuffix("_missing") for hypothesis in one.hypotheses}
            if self.differing.get(name) == 0 or any(self.differing.get(f"{term}_loss") == 0 for term in terms):
                continue
            self.differing[name] = self.differing.get(name, 0) + 1
            if self.differing[name] >= MIN_LATER_UPDATES:
                text = f"{one.sentence}: {one.advice[:1].lower()}{one.advice[1:].rstrip('.')}"
                yield f"also {name}", _data(text, EQUATION_KEY + name, one.error or 0.0, one.tolerance)

    def _effect(self, view: View) -> Iterator[Remark]:
        """Observations that do not depend on the actions."""
        effect = view.get("policy/action_effect")
        if effect is None:
            return
        self.effect_records, self.effect_steps = self.effect_records + 1, self.effect_steps + view.rollout_steps
        self.effect += effect
        mean = self.effect / self.effect_records
        limit = next((limit for steps, limit in NO_ACTION_EFFECT if self.effect_steps >= steps), 0.0)
        if mean < limit:
            text = (
                f"in {self.effect_steps:,} steps observations have not depended on the policy's actions: check that env.step "
                "receives the actions unchanged, also inside wrappers (in a bandit actions never change observations)"
            )
            yield "ignored actions", _data(text, "policy/action_effect", mean, limit, quiet=True)


LOW_RANK: Final = 2.0
"""Effective rank of the features below which a policy can hardly tell states apart; correct small networks have 2.3 and more."""

DOMINANT_CRITIC: Final = 3.5
"""Decades by which the critic's gradient may exceed the actor's; correct runs with unscaled returns stay below 3."""


def features_and_gradients(view: View) -> Iterator[Remark]:
    """Features with an effective rank below 2, and a critic whose gradient is thousands of times the actor's."""
    rank, ratio = view.get("repr/effective_rank"), view.get("grad/interference/log_ratio")
    if rank is not None and rank < LOW_RANK:
        text = f"the features of the policy use only {number(rank)} dimensions: inputs are unscaled, or units are saturated or dormant"
        yield "low rank", _data(text, "repr/effective_rank", rank, LOW_RANK, quiet=True)
    if ratio is not None and ratio > DOMINANT_CRITIC:
        factor = 10 ** min(ratio, 300.0)
        text = f"the critic's gradient is {number(factor)} times the actor's: returns are unscaled, or the value loss is a sum, not a mean"
        yield "dominant critic", _data(text, "grad/interference/log_ratio", ratio, DOMINANT_CRITIC, quiet=True)


def _data(text: str, key: str, value: float, limit: float, *, quiet: bool = False) -> dict[str, Any]:
    return {"text": text, "key": key, "value": value, "limit": limit, "quiet": quiet}


def is_setting(name: str) -> bool:
    """Return whether a remark of that name is about a setting, from which other findings may follow."""
    return name.removesuffix(LATER) in PUBLISHED or name.startswith((INITIAL_SPREAD, EARLY_END, "weight decay"))


def changed_settings(view: View) -> Iterator[Remark]:
    """Settings that a schedule has taken far beyond all published values."""
    for key, name in LOGGED_SETTINGS.items():
        value, limit, stated = view.get(key), FAR_OUTSIDE * PUBLISHED[name].highest, getattr(view.facts, name)
        if value is not None and value > limit >= (stated or 0.0):
            yield (name if stated is None else name + LATER, _data(range_sentence(name, value, view.facts), key, value, limit))


def initial_spread(view: View) -> Iterator[Remark]:
    """Initial standard deviations that no published configuration has, neither themselves nor relative to half the range of actions."""
    for head, key, value in view.labelled("policy/head/", "/std/mean"):
        constant = view.values.get(f"policy/head/{head}/std/min", value) > SAME_STD * value  # otherwise it depends on the state
        is_low = value < INITIAL_STD.lowest
        relative = view.values.get(f"policy/head/{head}/std_of_range", value)
        nearest = max(value, relative) if is_low else min(value, relative)
        if constant and is_outside(INITIAL_STD, value) and is_outside(INITIAL_STD, nearest):
            low, high = INITIAL_STD.lowest, INITIAL_STD.highest
            text = f"the initial standard deviation is {number(value)} (published settings: {span(low, high)})"
            yield f"{INITIAL_SPREAD} {head}", _data(text, key, value, low if is_low else high)


MAX_WEIGHT_DECAY: Final = 0.01  # AdamW's default; published settings of PPO have none


def weight_decay(view: View) -> Iterator[Remark]:
    """A decay of the weights that outweighs the loss."""
    value = view.facts.weight_decay
    if value is not None and value > MAX_WEIGHT_DECAY and view.facts.model != "language":
        text = f"the optimizer's weight_decay is {number(value)} (published settings of PPO have 0): every step pulls the weights to 0"
        yield "weight decay", _data(text, "", value, MAX_WEIGHT_DECAY)


IN_LOSS: Final = {
    "softmax_twice": (
        "softmax twice",
        "the policy{} takes a softmax of the outputs of another softmax, so one action is at most e times as likely as another one: pass "
        "the outputs of the last layer as `logits`, or the softmax as `probs`",
    ),
    "detached_state": (
        "detached state",
        "in the policy's loss{} no gradient flows from one step of the recurrent cell to the step before, so it does not learn what to "
        "keep: remove `.detach()` and `torch.no_grad()` from the state between the steps of a sequence",
    ),
    "loss_pairs": (
        "loss of pairs",
        "the policy's loss{} has N² numbers for N rows: [N, 1] was broadcast against [N], or `probs[:, actions]` takes the actions of all "
        "rows for each row: give log-probabilities and advantages the shape [N], and choose each row's action with `gather`",
    ),
}
"""Names and texts of remarks on the graph of the policy's loss, by fact."""


def in_loss(view: View) -> Iterator[Remark]:
    """What the graph of the policy's loss shows."""
    place = view.facts.equation_places.get("policy_loss", "")
    for fact, (name, text) in IN_LOSS.items():
        if getattr(view.facts, fact):
            yield name, _data(text.format(place and f" ({place})"), "", 1.0, 0.0)


def whole_numbers(view: View) -> Iterator[Remark]:
    """Observations of a continuous task whose space has only a few whole numbers."""
    space, actions = (str(view.facts.get(f"{name}_space", "")) for name in ("observation", "action"))
    whole = WHOLE_NUMBERS.fullmatch(space)
    if whole and "float" in actions and float(whole["high"]) - float(whole["low"]) <= FEW_VALUES:
        text = (
            f"observations are whole numbers from {whole['low']} to {whole['high']} ({whole['dtype']}): if the environment computes real "
            "numbers, its space cuts them; give the space dtype=np.float32"
        )
        yield "whole numbers", _data(text, "", float(whole["high"]), FEW_VALUES)


def feature_sizes(view: View) -> Iterator[Remark]:
    """Observations with some features far smaller than others, or with small features only."""
    ratio, largest = view.get("obs/rms_ratio"), view.get("obs/rms_max")
    if ratio is not None and ratio > UNEQUAL_FEATURES and not view.facts.normalize_observations:
        text = f"one entry of the observations is {number(ratio)} times as large as another one: normalise observations"
        yield "unequal features", _data(text, "obs/rms_ratio", ratio, UNEQUAL_FEATURES, quiet=True)
    if largest is not None and largest < SMALL_FEATURES:
        text = f"the largest entry of the observations is about {number(largest)}: scale observations to about 1"
        yield "small features", _data(text, "obs/rms_max", largest, SMALL_FEATURES, quiet=True)
