"""verl's PPO trainers (`trainer.use_v1`), by `attach_trainer` or the plugin `adapters.verl_plugin`: GRPO and its relatives, and PPO.

The driver has one run. Workers keep references to the columns of their minibatches and the norms of their gradients, and the driver fetches
them after each update: it joins the rows of all data-parallel ranks, and adds up the squared norms of all shards of a gradient. Metrics
are measured as if one process had trained. A minibatch of the critic is joined to the actor's of the same number.

An update is one local update of the trainer, on one batch of completions. Environment steps count completions, as for TRL.

Shapes: B completions of at most T tokens, K parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

try:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("verl is missing: pip install 'esper-telemetry[verl]'", name=missing.name) from missing

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from esper_telemetry.adapters.adapter import Adapter, last_layer, plain_settings
from esper_telemetry.adapters.completions import CompletionsEnd, CompletionsUpdate, TokensEnd, TokensUpdate, minibatch_of
from esper_telemetry.adapters.verl_workers import ACTOR, CRITIC, joined, start_worker, stop_worker, take_steps
from esper_telemetry.core.facts import UNCHECKED_FACT, precision_of
from esper_telemetry.core.record import Level
from esper_telemetry.events import BackwardEnd, EpisodeEnd, RolloutEnd
from esper_telemetry.metrics.language import turns_of
from esper_telemetry.telemetry import Telemetry, session_of

TAPS = {
    "_compute_advantage": "_after_advantage",
    "_update_critic": "_after_critic",
    "_update_actor": "_after_actor",
    "_compute_metrics": "_after_metrics",
}
"""Methods of a trainer, and of the listener that is called after each."""

BATCH = (
    *("uid", "prompts", "responses", "response_mask", "rm_scores", "token_level_rewards", "old_log_probs"),
    *("values", "advantages", "returns", "num_turns"),
)
"""Columns of a batch that the driver reads after advantages are computed."""

CENTRED = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
"""Estimators whose advantages are rewards minus the mean of their group, up to a positive scale."""

CLIPPED = ("vanilla", "gspo", "clip_cov", "geo_mean")
"""Policy losses that clip the ratio as PPO does."""

SINGLE_TURN = 2
"""Number of turns of a prompt and its answer; more turns contain tokens that others wrote."""

SETTINGS = {
    "algorithm": ("adv_estimator", "gamma", "lam", "use_kl_in_reward", "norm_adv_by_std_in_grpo", "rollout_correction"),
    "data": ("train_batch_size", "max_prompt_length", "max_response_length", "seed"),
    "actor_rollout_ref.actor": (
        *("strategy", "ppo_mini_batch_size", "ppo_epochs", "clip_ratio_low", "clip_ratio_high", "entropy_coeff"),
        *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "loss_agg_mode", "policy_loss", "optim", "shuffle"),
    ),
    "actor_rollout_ref.rollout": ("name", "n", "temperature", "top_p", "top_k", "calculate_log_probs"),
    "critic": ("ppo_mini_batch_size", "ppo_epochs", "cliprange_value", "optim"),
    "trainer": ("n_gpus_per_node", "nnodes", "total_training_steps", "project_name", "experiment_name"),
}
"""Settings of a run that are recorded, by section."""

SETTING_NAMES = {
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "clip": "actor_rollout_ref.actor.clip_ratio_low and clip_ratio_high",
    "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
    "num_epochs": "actor_rollout_ref.actor.ppo_epochs",
    "gae_lambda": "algorithm.lam",
    "gamma": "algorithm.gamma",
    "entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
}
"""verl's names of settings, for the advice of alarms."""


class DriverListener(Adapter):
    """Emits the events of a `PPOTrainer` of verl, from `start` to `stop`."""

    prefix = "verl"
    ends_updates = True
    extensions = (CompletionsUpdate, TokensUpdate)

    def __init__(self, telemetry: Telemetry, trainer: Any, *, samples: bool) -> None:
        super().__init__(telemetry)
        self._trainer, self._shows_texts = trainer, samples
        self._taken: dict[str, list[list[dict[str, Any]]]] = {}
        self._single_turn = True
        self._rates: dict[str, float] = {}
        self.emits_steps = False
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        self._max_norm_setting = self._setting(f"{actor}.grad_clip") or None
        self._loss_mode = str(self._setting(f"{actor}.policy_loss.loss_mode", "vanilla"))
        # the ratio then compares with the engine that samples, whose numerics differ
        self._bypassed = bool(self._setting("algorithm.rollout_correction.bypass_mode", False))
        top_p, top_k = self._setting(f"{rollout}.top_p", 1), self._setting(f"{rollout}.top_k", -1)
        self._whole = top_p >= 1 and top_k <= 0  # tokens are sampled from the whole distribution

    def start(self) -> None:
        """Listen to the trainer and to its workers."""
        trainer = self._trainer
        groups = {ACTOR: trainer.actor_rollout_wg} | ({CRITIC: trainer.critic_wg} if trainer.use_critic else {})
        self._handles = {part: list(group.workers) for part, group in groups.items()}
        eos = trainer.tokenizer.eos_token_id
        self._eos = [] if eos is None else [int(eos)]
        sizes: dict[str, dict[str, int]] = {}
        for part in groups:
            sizes[part] = self._on_workers(part, start_worker, self._eos)[0]
            self.until_stop(partial(self._release, part))
        # the driver has no parameters, only their names and sizes
        self.parameters = {name: torch.empty(n, device="meta") for own in sizes.values() for name, n in own.items()}
        self._groups = {part: list(own) for part, own in sizes.items()}
        self._resume()
        self.begin_run(self._config(), self._facts())
        for name, listener in TAPS.items():
            self.listen(trainer, name, getattr(self, listener), timed=True)

    def groups(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the parameters of the actor and of the critic."""
        return self._groups

    def _on_workers(self, part: str, function: Any, *arguments: Any) -> list[Any]:
        """Return what a function returns for each worker of a part; it is called in the workers."""
        calls = [handle.__ray_call__.remote(function, part, *arguments) for handle in self._handles[part]]
        results: list[Any] = ray.get(calls)
        return results

    def _release(self, part: str) -> None:
        self.session.attempt(lambda own: (self._on_workers(own, stop_worker), None)[1], part)

    def _resume(self) -> None:
        """Count the steps of a checkpoint."""
        local = int(self._trainer.parameter_sync_step)
        self.update = int(self._trainer.global_steps) * local
        self.env_step = self.update * self._batch_size // local
        self.gradient_step = self.update * int(self._setting("actor_rollout_ref.actor.ppo_epochs", 1)) * self._minibatches

    def _after_advantage(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A batch has its advantages: the update begins."""
        meta = args[0]
        real = [place for place, tag in enumerate(meta.tags) if not tag.get("is_padding")]
        data = transfer_queue.kv_batch_get(keys=meta.keys, partition_id=meta.partition_id, select_fields=[*BATCH])
        columns = {name: data[name] for name in BATCH if name in data}
        listed = {name: x.unbind() if isinstance(x, Tensor) else [*x] for name, x in columns.items()}
        rows = {name: [column[place] for place in real] for name, column in listed.items()}
        turns = [int(one) for one in rows.get("num_turns", ())]
        self._single_turn, self._taken = max(turns, default=0) <= SINGLE_TURN, {}
        with_critic = self._trainer.use_critic and "values" in rows
        self.begin_update(self.env_step + len(real), partial(self._rollout, rows) if with_critic else None)
        event = self._completions(rows)
        if self._shows_texts:
            event = event.with_samples(partial(self._text, rows))
        self.hooks.emit(event)
        episodes = event.episodes(self.env_step)
        if episodes is not None:
            self.hooks.emit(episodes)

    def _text(self, rows: Mapping[str, list[Tensor]], place: int) -> tuple[str, str]:
        """The prompt and the text of a completion."""
        prompt, text = (self._trainer.tokenizer.decode(rows[name][place].tolist()) for name in ("prompts", "responses"))
        return str(prompt), str(text)

    def _completions(self, rows: Mapping[str, list[Any]]) -> CompletionsEnd:
        groups: dict[str, int] = {}
        uids = [str(getattr(one, "data", one)) for one in rows["uid"]]
        prompts = torch.tensor([groups.setdefault(uid, len(groups)) for uid in uids])
        algorithm = self._trainer.config.algorithm
        centred = algorithm.adv_estimator in CENTRED and not algorithm.use_kl_in_reward
        masks = [mask.bool() for mask in rows["response_mask"]]
        firsts = [own[mask][:1].sum() for own, mask in zip(rows["advantages"], masks, strict=True)]
        last = torch.stack([ids[-1] for ids in rows["responses"]])
        return CompletionsEnd(
            prompts=prompts,
            lengths=torch.tensor([len(ids) for ids in rows["responses"]]),
            rewards={"score": torch.stack([scores.sum() for scores in rows["rm_scores"]])},
            weights=(1.0,),
            truncated=~torch.isin(last, torch.tensor(self._eos)) if self._eos else None,
            advantages=torch.stack(firsts) if centred else None,
            turns=None if self._single_turn else turns_of(pad_sequence(masks, batch_first=True)),
        )

    def _rollout(self, rows: Mapping[str, list[Tensor]]) -> RolloutEnd:
        """Return the event of PPO's rollout [T, B]: the tokens that are learned from, as steps of an episode."""
        masks = [mask.bool() for mask in rows["response_mask"]]

        def column(name: str) -> Tensor:
            return pad_sequence([own[mask] for own, mask in zip(rows[name], masks, strict=True)]).float()

        valid = pad_sequence([mask[mask] for mask in masks])
        ended = valid & ~pad(valid[1:], (0, 0, 0, 1))
        values, returns = column("values"), column("returns")
        return RolloutEnd(
            self.update,
            self.env_step,
            rewards=column("token_level_rewards" if "token_level_rewards" in rows else "rm_scores"),
            values=values,
            advantages=returns - values,  # verl whitens its own
            returns=returns,
            log_probs=column("old_log_probs"),
            ended=ended,
            terminated=ended,
            next_values=pad(values[1:], (0, 0, 0, 1)),
            actions={},
            gamma=float(self._trainer.config.algorithm.gamma),
            valid=valid,
        )

    def episodes(self, rollout: RolloutEnd) -> EpisodeEnd | None:
        """Return None: a completion is an episode, whose reward may differ from the sum of penalised ones."""
        return None

    def _after_critic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._taken[CRITIC] = self._on_workers(CRITIC, take_steps)
        if int(self._trainer.config.trainer.critic_warmup) > self._trainer.global_steps:  # the actor does not learn yet
            self._emit_steps()

    def _after_actor(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._taken[ACTOR] = self._on_workers(ACTOR, take_steps)
        self._emit_steps()

    def _emit_steps(self) -> None:
        """Emit the steps of the update, which all workers have taken together."""
        taken = {part: list(zip(*ranks, strict=True)) for part, ranks in self._taken.items()}
        self._taken = {}
        self._rates = {part: steps[-1][0]["rate"] for part, steps in taken.items() if steps}
        epochs = int(self._setting(f"{'actor_rollout_ref.actor' if ACTOR in taken else CRITIC}.ppo_epochs", 1))
        count = max(map(len, taken.values()), default=0)
        aligned = len({*map(len, taken.values())}) == 1
        for place, parts in enumerate(zip_longest(*taken.values())):
            own = {part: ranks for part, ranks in zip(taken, parts, strict=True) if ranks is not None}
            self.epoch = place * epochs // count
            self._emit_gradients(own)
            columns = {part: joined([one for rank in ranks for one in rank["passes"]]) for part, ranks in own.items()}
            if columns.get(ACTOR):
                self._emit_tokens(columns[ACTOR], columns.get(CRITIC, {}) if aligned else {})
            self.stepped.add(place)
            self.finish_minibatch()

    def _emit_gradients(self, parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Emit the norms of a step's gradients, of the actor and the critic, which are clipped apart."""
        squares: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
        for part, ranks in parts.items():
            for rank in ranks:  # a process may have no shard of a parameter
                shares = rank["norms"].square() * rank["shards"] / len(ranks)
                for name, share in zip(rank["names"], shares, strict=True):
                    squares[part][name] = squares[part].get(name, 0.0) + share
        names = tuple([name for own in squares.values() for name in own])
        norms = torch.stack([square for own in squares.values() for square in own.values()]).sqrt().float()
        apart = tuple(map(frozenset, squares.values())) if len(squares) > 1 else ()
        limit = self._max_norm_setting
        self.hooks.emit(BackwardEnd(self.epoch, self.step, self.parameters, names, norms, limit, clipped_apart=apart))

    def _emit_tokens(self, own: Mapping[str, Tensor], critic: Mapping[str, Tensor]) -> None:
        tokens = TokensEnd(
            step=self.step,
            log_probs=own["log_probs"],
            mask=own["response_mask"].bool(),
            entropy=own.get("entropy"),
            old=own["old_log_probs"],
            reference=own.get("ref_log_prob"),
            sampling=own.get("rollout_log_probs"),
            ends=own.get("ends") if self._single_turn else None,
            whole=self._whole,
        )
        self.hooks.emit(tokens)
        per_completion = self._loss_mode == "gspo"
        compared = not self._bypassed and not getattr(self._trainer, "local_trigger_step", 0)
        minibatch = minibatch_of([(tokens, own["advantages"])], self.epoch, self.step, per_completion=per_completion)
        if minibatch is not None and compared:
            if not per_completion and critic and critic["values"].shape == tokens.mask.shape:
                values, old, returns = (critic[name].flatten() for name in ("values_now", "values", "returns"))
                minibatch = minibatch._replace(values=values, old_values=old, returns=returns)
            self.hooks.emit(minibatch)

    def _after_metrics(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The step is measured: the record is written, with verl's own numbers and times."""
        metrics, timing = args[1], args[2]
        self.logged |= metrics
        self.end_learning(timed=False)
        learning = sum(timing.get(name, 0.0) for name in ("update_critic", "update_actor"))
        self.times.replace({"inference": float(timing.get("gen", 0.0)), "update": float(learning)})
        self.end_update()

    def end_fields(self) -> dict[str, Any]:
        """Return passes and learning rates."""
        rates, self._rates = self._rates, {}
        fields: dict[str, Any] = {"learning_rate": rates.get(ACTOR, rates.get(CRITIC, 0.0))}
        fields["epochs"] = int(self._setting("actor_rollout_ref.actor.ppo_epochs", 1))
        return fields | ({"learning_rates": rates} if len({*rates.values()}) > 1 else {})

    # Settings.

    def _setting(self, name: str, default: Any = None) -> Any:
        found = OmegaConf.select(self._trainer.config, name)
        return default if found is None else found

    @property
    def _batch_size(self) -> int:
        """Completions of a step."""
        return int(self._setting("data.train_batch_size")) * int(self._setting("actor_rollout_ref.rollout.n", 1))

    @property
    def _minibatches(self) -> int:
        prompts = int(self._setting("data.train_batch_size")) // int(self._trainer.parameter_sync_step)
        return max(1, prompts // int(self._setting("actor_rollout_ref.actor.ppo_mini_batch_size")))

    def _config(self) -> dict[str, Any]:
        settings = {
            section: {name: value for name in names if (value := self._setting(f"{section}.{name}")) is not None}
            for section, names in SETTINGS.items()
        }
        plain = OmegaConf.to_container(OmegaConf.create(settings), resolve=True)
        model = str(self._setting("actor_rollout_ref.model.path", ""))
        return {"algorithm": type(self._trainer).__name__, "model": model, **plain_settings(plain)}

    def _facts(self) -> dict[str, Any]:
        trainer, actor = self._trainer, "actor_rollout_ref.actor"
        loss, gae = self._loss_mode, trainer.config.algorithm.adv_estimator == "gae"
        dtype = str(self._setting(f"{actor}.fsdp_config.mixed_precision.param_dtype", "bf16"))
        clip = self._setting(f"{actor}.clip_ratio_low", self._setting(f"{actor}.clip_ratio"))
        penalised = self._setting(f"{actor}.use_kl_loss", False)
        critic = {
            "gamma": float(trainer.config.algorithm.gamma),
            "gae_lambda": float(trainer.config.algorithm.lam),
            "clip_value": float(self._setting("critic.cliprange_value", 0.5)),
            "value_head": last_layer(self._groups.get(CRITIC, ())),
            "normalize_advantages": True,
        }
        return {
            "trainer": f"verl {type(trainer).__name__}",
            "model": "language",
            "setting_names": SETTING_NAMES,
            "total_steps": int(trainer.total_training_steps) * self._batch_size,
            "precision": precision_of(dtype),
            "optimizer": str(self._setting(f"{actor}.optim.optimizer", "AdamW")),
            "groups": self._groups,
            "max_grad_norm": self._max_norm_setting,
            "clip": float(clip) if loss in CLIPPED and clip is not None else None,
            "normalize_minibatches": False,
            "num_epochs": int(self._setting(f"{actor}.ppo_epochs", 1)),
            "num_minibatches": self._minibatches,
            "truncated_sampling": not self._whole,
            "temperature": float(self._setting("actor_rollout_ref.rollout.temperature", 1.0)),
            "beta": float(self._setting(f"{actor}.kl_loss_coef", 0.0)) if penalised else 0.0,
            **(critic if gae else {}),
            UNCHECKED_FACT: dict.fromkeys(("transitions", "executed_actions", "stored_rewards"), "completions have no environment"),
        }


def attach_trainer(telemetry: Telemetry, trainer: Any, *, samples: bool = True) -> None:
    """Record every update of one of verl's `PPOTrainer`; call it after `trainer.init()` and before `trainer.fit(...)`.

        with Telemetry(["tensorboard"], run_dir="auto") as telemetry:
            attach_trainer(telemetry, trainer)
            trainer.fit(agent_loop_manager)

    Nothing that the trainer computes changes: weights are bit-identical. Numbers that verl logs are in the record under `verl/`.

    Args:
        telemetry: receives the records.
        trainer: to listen to, until `telemetry` closes.
        samples: keep prompt and text of the best, the worst and the longest completion as evidence of alarms.

    Raises:
        TypeError: if `trainer` is not one of verl's PPO trainers.
    """
    lacking = [name for name in (*TAPS, "actor_rollout_wg") if not hasattr(trainer, name)]
    if not isinstance(telemetry, Telemetry) or lacking:
        raise TypeError(f"attach_trainer takes a Telemetry and verl's PPOTrainer after init(), got {telemetry!r} and {trainer!r}")
    if telemetry.level is not Level.OFF:
        listener = DriverListener(telemetry, trainer, samples=samples)
        session_of(telemetry).attempt(DriverListener.start, listener)
