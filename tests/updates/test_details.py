"""Records of an attached run beyond its minibatches: DEBUG, normalisers, evaluations, reused data, and missing columns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.events import NONE, BackwardEnd, EpisodeEnd, EvaluationEnd, Hooks, MinibatchEnd, RolloutEnd, RunStart, UpdateEnd

Change = Callable[[PPO], None]
SMALL: dict[str, Any] = {"num_steps": 16, "num_epochs": 2, "num_minibatches": 2, "lstm_size": 8, "hidden_sizes": (8,)}


def records(
    run_dir: Path, env: str = "cue-recall", *, level: str = "debug", updates: int = 3, change: Change | None = None, **settings: Any
) -> list[dict[str, float]]:
    source = PPO(make_env(env, num_envs=4, seed=0), PPOConfig(**SMALL | settings))
    with Telemetry(run_dir=run_dir, offload=False, level=level) as telemetry:
        attach(telemetry, source)
        if change is not None:
            change(source)
        source.learn(updates * 64)
    return [dict(record.values) for record in read_run(run_dir).records]


@pytest.mark.system
def test_a_policy_that_hardly_moves_stays_where_it_was(tmp_path: Path) -> None:
    last = records(tmp_path, policy="lstm", learning_rate=1e-9)[-1]

    assert last["policy/kl_exact"] == pytest.approx(0, abs=1e-9)
    assert last["policy/kl_post"] == pytest.approx(0, abs=1e-9)
    assert last["policy/greedy_agreement"] == 1
    assert last["repr/drift_cos"] == pytest.approx(1)
    assert last["lstm/staleness"] < 1e-5
    assert last["lstm/staleness_first"] < 1e-5
    assert last["value/move_over_std"] < 1e-5


@pytest.mark.system
def test_a_policy_that_leaps_is_far_away_in_the_end(tmp_path: Path) -> None:
    last = records(tmp_path, policy="lstm", learning_rate=0.1)[-1]

    assert last["policy/kl_post"] > 0.01
    assert last["policy/kl_exact"] == pytest.approx(last["policy/kl"], rel=1)
    assert last["lstm/staleness"] > 0.05
    assert last["lstm/staleness_first"] < 1e-5


@pytest.mark.system
def test_exact_kl_of_the_heads_adds_up_where_they_matter(tmp_path: Path) -> None:
    """The joint KL counts `arg` only in relevant rows, so it is between the KL of `op` and the sum."""
    last = records(tmp_path, policy="lstm", learning_rate=0.05)[-1]
    op, arg = (last[f"policy/head/{head}/kl_exact"] for head in ("op", "arg"))

    assert op <= last["policy/kl_exact"] <= op + arg


@pytest.mark.system
def test_training_from_another_state_than_acting_is_seen_before_the_first_step(tmp_path: Path) -> None:
    def zero(source: PPO) -> None:
        source.steps = replace(source.steps, initial_state=lambda states: {name: torch.zeros_like(x) for name, x in states.items()})

    last = records(tmp_path, change=zero, policy="lstm")[-1]

    assert last["lstm/staleness_first"] > 1e-4


@pytest.mark.system
@pytest.mark.parametrize("env", ["CartPole-v1", "cue-recall"])
def test_sign_flips_are_the_same_with_row_numbers_and_by_order(tmp_path: Path, env: str) -> None:
    by_row = records(tmp_path / "debug", env)
    by_order = records(tmp_path / "normal", env, level="normal")

    flips = [values["adv/sign_flip_frac"] for values in by_row]
    assert [values["adv/sign_flip_frac"] for values in by_order] == pytest.approx(flips)
    assert max(flips) > 0


@pytest.mark.system
def test_minibatches_that_are_normalised_one_by_one_have_flips_at_debug_only(tmp_path: Path) -> None:
    debug = records(tmp_path / "debug", normalize_minibatches=True)[-1]
    normal = records(tmp_path / "normal", level="normal", normalize_minibatches=True)[-1]

    assert "adv/sign_flip_frac" in debug
    assert "adv/sign_flip_frac" not in normal


@pytest.mark.system
def test_clipped_values_are_judged_at_normal_and_others_not(tmp_path: Path) -> None:
    clipped = records(tmp_path / "clipped", level="normal", clip_value=1e-4, learning_rate=0.05)[-1]
    others = records(tmp_path / "others", level="normal")[-1]

    assert clipped["value/clip_frac"] > 0.5
    assert clipped["value/move_over_std"] > 0
    assert "value/move_over_std" not in others


def test_what_takes_another_pass_is_left_to_debug(tmp_path: Path) -> None:
    values = records(tmp_path, level="normal", policy="lstm")[-1]
    passes = {"policy/kl_post", "policy/kl_exact", "lstm/ablate_kl", "repr/capacity_loss", "lstm/staleness"}

    assert not passes & values.keys()


@pytest.mark.system
def test_capacity_is_measured_in_every_tenth_update(tmp_path: Path) -> None:
    updates = records(tmp_path, updates=11)

    assert [update for update, values in enumerate(updates, 1) if "repr/capacity_loss" in values] == [1, 11]


@pytest.mark.system
def test_a_normaliser_drifts_over_ten_updates_and_never_drifts_where_there_is_none(tmp_path: Path) -> None:
    updates = records(tmp_path / "on", "Pendulum-v1", level="normal", updates=12, normalize_observations=True)

    assert [update for update, values in enumerate(updates, 1) if "norm/obs/drift" in values] == [11, 12]
    assert all(0 <= values["norm/obs/clip_frac"] < 0.5 for values in updates)
    assert not [key for key in updates[-1] if key.startswith("norm/ret")]


def test_data_that_are_learned_from_twice_have_an_age(tmp_path: Path) -> None:
    """The trainer emits another update without its own rollout."""

    def repeat(source: PPO) -> None:
        again = UpdateEnd(update=9, env_step=64, gradient_step=8, learning_rate=1e-3, seconds={})
        source.hooks.on(RolloutEnd, lambda event: source.hooks.emit(again) if event.update == 2 else None)

    updates = records(tmp_path, level="minimal", updates=1, change=repeat)
    aged = records(tmp_path / "again", level="minimal", updates=3, change=repeat)

    assert updates[0]["buffer/age_updates"] == 0
    assert 7 in [values["buffer/age_updates"] for values in aged]


def test_an_evaluation_joins_the_record_of_the_update_that_ends_next(tmp_path: Path) -> None:
    env = make_env("cue-recall", num_envs=3, seed=1)
    evaluations: list[EvaluationEnd] = []

    def listen(source: PPO) -> None:
        def evaluate(event: RolloutEnd) -> None:
            if event.update == 2:
                source.evaluate(env)

        source.hooks.on(EvaluationEnd, evaluations.append)
        source.hooks.on(RolloutEnd, evaluate)

    updates = records(tmp_path, level="minimal", change=listen)

    assert [values.get("eval/count") for values in updates] == [None, 3, None]
    assert updates[1]["eval/return_mean"] == pytest.approx(sum(evaluations[0].returns) / 3)


@pytest.mark.system
def test_exact_divergences_are_there_at_normal_in_sampled_updates(tmp_path: Path) -> None:
    """In the first and ninth update. The numbers equal the numbers at DEBUG, which samples every update."""
    keys = {"policy/kl_exact", "policy/head/op/kl_exact", "policy/entropy_grad_ratio", "value/move_over_std"}
    runs = {level: records(tmp_path / level, level=level, updates=9, policy="lstm", entropy_coef=0.01) for level in ("normal", "debug")}

    present = [keys <= set(values) for values in runs["normal"]]
    assert present == [True, *[False] * 7, True]
    assert not any(keys & set(values) for values, sampled in zip(runs["normal"], present, strict=True) if not sampled)
    for update in (0, 8):
        exact = {level: {key: values[update][key] for key in keys} for level, values in runs.items()}
        assert exact["normal"] == pytest.approx(exact["debug"], rel=1e-9)


class ReducedSource:
    """Forwards a trainer's events, but events of one type without some of their columns."""

    def __init__(self, source: PPO, reduced: type, **columns: object) -> None:
        self.hooks = Hooks()

        def pass_on(event: Any) -> None:
            change: Any = getattr(reduced, "_replace", replace)  # of a named tuple, or of a dataclass
            self.hooks.emit(change(event, **columns) if isinstance(event, reduced) else event)

        for kind in (RunStart, RolloutEnd, EpisodeEnd, BackwardEnd, MinibatchEnd, UpdateEnd):
            source.hooks.on(kind, pass_on)


@pytest.mark.parametrize("env", ["cue-recall", "Pendulum-v1"])
@pytest.mark.parametrize(
    ("reduced", "columns"),
    [
        (MinibatchEnd, ("logits", "means", "log_std")),
        (MinibatchEnd, ("logits", "log_std")),
        (RolloutEnd, ("logits", "means", "log_std")),
        (RolloutEnd, ("actions", "action_masks")),
    ],
)
def test_a_column_that_a_source_leaves_out_costs_its_own_metrics_alone(
    tmp_path: Path, env: str, reduced: type, columns: tuple[str, ...]
) -> None:
    source = PPO(make_env(env, num_envs=4, seed=0), PPOConfig(**SMALL))
    with Telemetry(run_dir=tmp_path, offload=False, level="debug") as telemetry:
        attach(telemetry, ReducedSource(source, reduced, **dict.fromkeys(columns, NONE)))
        source.learn(3 * 64)
    updates = [record.values for record in read_run(tmp_path).records]

    assert len(updates) == 3
    assert not any(values.get("telemetry/metric_errors") for values in updates)
    assert all({"policy/kl", "adv/raw/std", "value/move_over_std"} <= values.keys() for values in updates)
    assert any("policy/kl_exact" in values for values in updates) == ("actions" in columns)
