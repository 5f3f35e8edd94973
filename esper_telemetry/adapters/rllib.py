"""RLlib's PPO on the new API stack, by `attach_config`: telemetry in its learner, which is local or consists of several Ray actors.

Several learners share a process group, so their records are merged like the records of other ranks. A learner's batch consists of chunks of
episodes, each followed by a row that RLlib appends to bootstrap from. Several chunks make a column of the rollout [T, B]; a chunk whose
episode continues is the last one of its column. A minibatch has rows of every module. Each of several modules is a head of the policy.

Shapes: T steps, B columns, R rows of a module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

try:
    import tree
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.callbacks.callbacks import RLlibCallback
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
    from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
    from ray.tune.utils import flatten_dict
except ModuleNotFoundError as none:
    raise ModuleNotFoundError("RLlib is missing: pip install 'esper-telemetry[rllib]'", name=none.name) from none

import torch
from torch import Tensor

from esper_telemetry.adapters.adapter import PLAIN_TYPES, Adapter, last_layer
from esper_telemetry.adapters.columns import FinishedEpisode, RowColumns, as_grid, episodes_event, places_of_chunks
from esper_telemetry.adapters.taps import SurroundingTap, contained
from esper_telemetry.core.facts import UNCHECKED_FACT
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level
from esper_telemetry.events import EpisodeEnd, RolloutEnd
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.update import JoinedMinibatches

OWN_KEY = "esper_telemetry"
"""Key of the telemetry in `learner_config_dict`, of finished episodes in `timesteps`, and of the places of rows in a batch."""

SETTING_NAMES = {
    "learning_rate": "lr",
    "gae_lambda": "lambda_",
    "clip": "clip_param",
    "rollout_size": "train_batch_size_per_learner x num_learners",
    "value_coef": "vf_loss_coeff",
    "entropy_coef": "entropy_coeff",
    "max_grad_norm": "grad_clip",
}
"""RLlib's names of settings, if they differ."""

PARTS = {"actor": "actor", "pi": "actor", "critic": "critic", "vf": "critic"}
"""Parts of a module by a word in the name of a parameter; parameters without such a word are shared."""

COLLECTED = (Columns.OBS, Columns.ACTIONS, Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS, "rewards", "value_targets")
"""Columns of a batch that are read."""

COLUMNS = {"advantages": "advantages", "returns": "value_targets", "valid": Columns.LOSS_MASK, "rows": OWN_KEY}
KEPT = (*COLUMNS.values(), Columns.ACTIONS, Columns.ACTION_LOGP)
"""RLlib's names of columns of a minibatch, by ours, and of columns that are kept until the update ends."""

LOSSES = {"policy_loss": "policy", "vf_loss": "value", "entropy": "entropy", "mean_kl_loss": "kl"}
SCALES = {"value": 0.5, "entropy": -1.0}
"""Names of losses, by RLlib's, and their factors: RLlib's value loss is the squared error."""

SKIPPED = re.compile("timer|connector|throughput|lifetime|duration|seq_no|sum_episodes|trainable|time_between|__all_")
"""Names in a result of `train` that are not copied: times, counts of the whole run, and sizes."""


class LearnerListener(Adapter):
    """Emits the events of a `PPOTorchLearner`, from `start` to `stop`."""

    prefix = "rllib"
    ends_updates = True

    def __init__(self, telemetry: Telemetry, learner: Any) -> None:
        super().__init__(telemetry, join=self.joined)
        self._learner, self._config = learner, learner.config
        self._modules = {name: learner.module[name].unwrapped() for name in [*learner.module.keys()]}
        self._distributions = {name: module.get_train_action_dist_cls() for name, module in self._modules.items()}
        self._several = len(self._modules) > 1
        self._named = {
            name: {f"{name}." * self._several + path: x for path, x in module.named_parameters() if x.requires_grad}
            for name, module in self._modules.items()
        }
        self._max_norm_setting = self._config.grad_clip if self._config.grad_clip_by == "global_norm" else None
        self._envs = max(1, int(self._config.num_env_runners)) * int(self._config.num_envs_per_env_runner)
        self._timesteps: Mapping[str, Any] = {}
        self._chunks: list[tuple[str, int, bool, bool]] = []  # module, steps, ended, terminated
        self._values, self._losses = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        self._coefficients, self._kl_coefficients = dict[str, float](), dict[str, Tensor]()
        self._unfinished: dict[str, tuple[float, int]] = {}
        self._rows, self._rows_taken, self._collected, self._begun = 0, 0, 0, False

    def start(self) -> None:
        """Listen to the learner and its parts."""
        learner, parts = self._learner, self._named.values()
        self.listen(learner, "_make_batch_if_necessary", self._after_batch)
        self.listen(learner, "compute_losses", self._after_losses)
        self.listen(learner, "compute_gradients", lambda *_: self.emit_gradients(self._max_norm_setting))
        self.listen(learner.metrics, "log_dict", self._after_log)
        for name, module in self._modules.items():
            self.listen(module, "compute_values", partial(self._after_values, name))
        optimizers = [one for name in self._modules for _, one in learner.get_optimizers_for_module(name)]
        parameters = {path: x for part in parts for path, x in part.items()}
        self.follow(optimizers, parameters, [tuple(part) for part in parts if self._several])

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """The learner is about to update. It appends a row to each chunk of an episode, and marks the chunk as truncated."""
        self._timesteps, only = arguments["timesteps"], next(iter(self._modules))
        self._collected = int(self._timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME) or 0)
        if not self._begun:
            self._begun, self.update = True, int(self._learner._weights_seq_no)
            if self.update:  # the learner continues from a checkpoint
                self.env_step = max(0, self._collected - self._config.total_train_batch_size)
            settings = {name: x for name, x in self._config.to_dict().items() if isinstance(x, PLAIN_TYPES)}
            self.begin_run(settings, self._facts())
        episodes = ConnectorV2.single_agent_episode_iterator(arguments["training_data"].episodes, False)
        self._chunks = [(x.module_id or only, len(x), bool(x.is_done), bool(x.is_terminated)) for x in episodes]

    def report(self, results: Mapping[str, float]) -> None:
        """Write the record of the update, with numbers that RLlib reports about it; without a call, the next update writes it."""
        if self.updating:
            self.logged |= results
            self.end_update()
            self.times.begin()

    def _after_values(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        self._values[name] = result.detach().flatten()

    def _after_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The batch has its advantages: the update begins."""
        learner, config, batch = self._learner, self._config, result.policy_batches
        names = [name for name in batch if name in self._values and learner.should_module_be_updated(name, result)]
        entropy = learner.entropy_coeff_schedulers_per_module[names[0]].get_current_value()
        self._coefficients = {"value": 2 * config.vf_loss_coeff, "entropy": float(entropy)}
        coefficients, adapted = learner.curr_kl_coeffs_per_module, names if config.use_kl_loss else []
        self._kl_coefficients = {name: coefficients[name].clone() for name in adapted}
        self._rows, self._rows_taken = len(self._values[names[0]]), 0
        self.begin_update(self._collected, partial(self._rollout, {name: batch[name] for name in names}))

    def _rollout(self, batch: Mapping[str, Any]) -> RolloutEnd:
        """Return the event of the rollout; a new column of the batch has the place t B + b of each row in it."""
        chunks, modules = [chunk for chunk in self._chunks if chunk[0] in batch], []
        lengths, ends = [length for _, length, *_ in chunks], [ended for _, _, ended, _ in chunks]
        begins, envs = places_of_chunks(lengths, ends, max(1, self._envs // self.session.ranks))
        for name, rows in batch.items():
            mask, offset, parts = rows[Columns.LOSS_MASK], 0, []
            width = mask.shape[1] if mask.dim() > 1 else 1  # of a sequence; the last one of a chunk is padded
            for (module, length, *flags), begin in zip(chunks, begins, strict=True):
                if module == name:
                    time = torch.arange(length)
                    last = [(time == length - 1) & flag for flag in flags]
                    parts.append(torch.stack([time + offset, begin + time * envs, *last]))
                    offset += -(-(length + 1) // width) * width
            index, places, ended, terminated = torch.cat(parts, 1).to(mask.device)
            found = {key: rows[key] for key in COLLECTED if isinstance(rows.get(key), Tensor)}
            in_sequences = {key for key, x in found.items() if mask.dim() > 1 and x.shape[:2] == mask.shape}
            own = {key: (x.flatten(0, 1) if key in in_sequences else x)[index] for key, x in found.items()}
            values, targets = self._values[name], own["value_targets"]
            columns = {
                "places": places,
                "rewards": own[Columns.REWARDS].float(),
                "values": values[index],
                "returns": targets,
                "advantages": targets - values[index],
                "log_probs": own[Columns.ACTION_LOGP],
                "ended": ended.bool(),
                "terminated": terminated.bool(),
                "valid": torch.ones_like(ended, dtype=torch.bool),
                "next_values": torch.where(terminated.bool(), 0.0, values[index + 1]),
            }
            if not self._several and own.get(Columns.OBS, mask).is_floating_point():
                columns["observations"] = own[Columns.OBS]
            actions = dict.fromkeys(self._kinds(name), own.get(Columns.ACTIONS, mask))
            modules.append(RowColumns(columns, self._heads(name, own[Columns.ACTION_DIST_INPUTS]) | {"actions": actions}))
            rows[OWN_KEY] = torch.zeros_like(values, dtype=torch.long).index_copy_(0, index, places).view(mask.shape)
        joined = RowColumns.joined(modules)
        joined = joined.map(partial(as_grid, rows=joined.columns.pop("places"), num_envs=envs))
        return RolloutEnd(self.update, self.env_step, gamma=self._config.gamma, **joined.arguments)

    def episodes(self, rollout: RolloutEnd) -> EpisodeEnd | None:
        """Return the event of the episodes that ended in the rollouts of all learners; the first learner reports them."""
        finished: list[FinishedEpisode] = []
        if self.session.ranks == 1 or torch.distributed.get_rank() == 0:
            for identity, returned, length, ended in self._timesteps.get(OWN_KEY, ()):
                earlier = self._unfinished.pop(identity, (0.0, 0))
                self._unfinished[identity] = earlier[0] + returned, earlier[1] + length
                if ended:
                    finished.append(FinishedEpisode(*self._unfinished.pop(identity), len(finished)))
        return episodes_event(finished, rollout.env_step)

    def _kinds(self, name: str) -> dict[str, str]:
        """Kind of the head of a module by its name; empty for distributions of another type."""
        head, distribution = segment(name) if self._several else "action", self._distributions[name]
        if issubclass(distribution, TorchCategorical):
            return {head: "categorical"}
        return {head: "continuous"} if issubclass(distribution, TorchDiagGaussian) else {}

    def _heads(self, name: str, outputs: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return the parameters of the distribution that a module's outputs [R, K] are, and the rows in which it counts."""
        kinds = self._kinds(name)
        names = ("means", "log_std") if "continuous" in kinds.values() else ("logits",)
        parts = dict(zip(names, outputs.chunk(len(names), -1), strict=True)) if kinds else {}
        if self._several:
            parts["relevance"] = outputs.new_ones(len(outputs), dtype=torch.bool)
        return {key: dict.fromkeys(kinds, part) for key, part in parts.items()}

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters by part, and by module if there are several."""
        groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": []}
        for name, own in self._named.items():
            for path in own:
                words = re.split("[._]", path.removeprefix(f"{name}."))
                groups[next((PARTS[word] for word in words if word in PARTS), "shared")].append(path)
            groups |= {f"head:{segment(name)}": [*own]} if self._several else {}
        return {part: names for part, names in groups.items() if names}

    def _after_log(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.learning and "policy_loss" in args[0]:
            self._losses[kwargs["key"]] = {ours: args[0][theirs].detach() for theirs, ours in LOSSES.items()}

    def _after_losses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Mapping[str, Tensor]) -> None:
        """The losses of a minibatch are computed. One that begins in a pass and ends in the next counts for the latter."""
        modules: dict[str, dict[str, Any]] = {}
        for name in (name for name in result if name in self._losses):
            outputs, columns = kwargs["fwd_out"][name], kwargs["batch"][name]
            own = {key: columns[key] for key in KEPT} | {"outputs": outputs[Columns.ACTION_DIST_INPUTS].detach()}
            losses = self._losses.pop(name) | {"total": result[name].detach()}
            modules[name] = own | {"values": self._values.pop(name), "losses": losses}
        if modules:
            self._rows_taken += len(next(iter(modules.values()))["values"])
            self.begin_minibatch(min((self._rows_taken - 1) // self._rows, self._config.num_epochs - 1))
            self.row = self.epoch, modules

    @torch.no_grad()
    def joined(self, rows: Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]]) -> JoinedMinibatches:
        """Return all minibatches of the update; the rows of several modules follow one another in each minibatch."""
        modules, losses = [], dict[str, Tensor]()
        for name in rows[0][1]:
            parts = [row[name] for _, row in rows]
            modules.append(self._evaluated(name, parts))
            own = {loss: torch.stack([part["losses"][loss] for part in parts]) for loss in parts[0]["losses"]}
            # RLlib adds the divergence to a module's loss, and the losses of modules to one another
            own["total"] = own["total"] - self._kl_coefficients.get(name, 0.0) * own.pop("kl")
            losses = {loss: SCALES.get(loss, 1.0) * one + losses.get(loss, 0.0) for loss, one in own.items()}
        sizes = torch.tensor([[part["values"].shape[0] for part in row.values()] for _, row in rows]).t()
        order = torch.cat([torch.repeat_interleave(own) for own in sizes]).argsort(stable=True)
        joined = RowColumns.joined(modules).map(lambda x: x[order] if self._several else x)
        return JoinedMinibatches(tuple([epoch for epoch, _ in rows]), tuple(sizes.sum(0).tolist()), losses=losses, **joined.arguments)

    def _evaluated(self, name: str, parts: Sequence[Mapping[str, Any]]) -> RowColumns:
        in_rows = parts[0][Columns.LOSS_MASK].dim() == 1

        def cat(*columns: Tensor) -> Tensor:
            return torch.cat(columns) if in_rows or columns[0].dim() == 1 else torch.cat(columns).flatten(0, 1)

        own = {key: tree.map_structure(cat, *(part[key] for part in parts)) for key in (*KEPT, "outputs", "values")}
        log_ratio = self._distributions[name].from_logits(own["outputs"]).logp(own[Columns.ACTIONS]) - own[Columns.ACTION_LOGP]
        assert self.rollout_event is not None
        columns = {ours: own[theirs] for ours, theirs in COLUMNS.items()}
        columns |= {"log_ratio": log_ratio, "old_values": self.rollout_event.values.flatten()[columns["rows"]]}
        heads = self._heads(name, own["outputs"])
        ratios = dict.fromkeys(heads.get("relevance", ()), log_ratio)
        return RowColumns(columns | {"values": own["values"]}, heads | {"head_log_ratios": ratios})

    def end_fields(self) -> dict[str, Any]:
        """Return passes and coefficients, which schedules change."""
        return {"epochs": self._config.num_epochs, "coefficients": self._coefficients}

    def _facts(self) -> dict[str, Any]:
        config, groups, several = self._config, self.groups(), self._several
        rate, entropy = (x if isinstance(x, int | float) else x[0][1] for x in (config.lr, config.entropy_coeff))
        unchecked = {
            **dict.fromkeys(("transitions", "executed_actions", "stored_rewards"), "environments may run elsewhere"),
            "log_ratios": "RLlib keeps its ratios to itself",
            "minibatches": "RLlib's minibatches continue from one pass into the next",
            "normalized_advantages": "RLlib's mean and standard deviation include the rows that it appends to episodes",
            "schedules": "RLlib does not know how many steps a run will take",
        }
        if math.isfinite(config.vf_clip_param):
            unchecked["value_loss"] = "RLlib clips each squared error at vf_clip_param"
        if several:
            terms = ("policy_loss", "value_loss", "entropy_loss", "total_loss")
            unchecked |= dict.fromkeys(terms, "RLlib adds up the losses of several modules")
        return {
            "trainer": f"RLlib {type(self._learner).__name__.removeprefix('Telemetry')}",
            "setting_names": SETTING_NAMES,
            "value_coef_scale": 0.5,  # RLlib's value loss is the mean squared error, ours half of it
            "num_envs": self._envs,
            "ranks": self.session.ranks,
            "precision": "fp32",
            "groups": groups,
            "value_head": [] if several else last_layer(groups.get("critic", ())),
            "heads": {head: kind for name in self._modules for head, kind in self._kinds(name).items()},
            "max_grad_norm": self._max_norm_setting,
            "gamma": config.gamma,
            "gae_lambda": config.lambda_,
            "clip": config.clip_param,
            "num_epochs": config.num_epochs,
            "num_steps": config.total_train_batch_size // self._envs,
            "num_minibatches": round(config.train_batch_size_per_learner / (config.minibatch_size or math.inf)) or 1,
            "learning_rate": float(rate),
            "value_coef": 2 * config.vf_loss_coeff,
            "entropy_coef": float(entropy),
            "policy": "lstm" if any(module.is_stateful() for module in self._modules.values()) else "mlp",
            "normalize_advantages": True,  # over rows that include appended ones: neither the minibatch's nor the rollout's
            **dict.fromkeys(("normalize_rewards", "squashed", "correlated_noise"), False),
            UNCHECKED_FACT: unchecked,
        }


class TelemetryLearner:
    """Mix-in of a `PPOTorchLearner` that records each update; `attach_config` adds it to the learner of a configuration."""

    telemetry: Telemetry
    _listener: LearnerListener | None = None

    def build(self) -> None:
        """See RLlib's `Learner`."""
        super().build()  # type: ignore[misc]  # of the learner
        if not hasattr(self, "telemetry"):
            self.telemetry = self.config.learner_config_dict[OWN_KEY]()  # type: ignore[attr-defined]  # of the learner
            if self.telemetry.level is not Level.OFF:
                session_of(self.telemetry).attempt(TelemetryLearner._listen, self)

    def _listen(self) -> None:
        listener = LearnerListener(self.telemetry, self)
        listener.start()
        self._listener = listener

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """See RLlib's `Learner`. An exception ends the run as failed."""
        self.call(partial(LearnerListener.begin, arguments=kwargs))
        try:
            result = super().update(*args, **kwargs)  # type: ignore[misc]  # of the learner
        except BaseException as error:
            self.telemetry.__exit__(type(error), error, error.__traceback__)
            raise
        self.call(LearnerListener.end_learning)
        return result

    def shutdown(self) -> None:
        """See RLlib's `Learner`. The run ends."""
        super().shutdown()  # type: ignore[misc]  # of the learner
        self.telemetry.close()

    def call(self, function: Callable[[LearnerListener], None]) -> None:
        """Call a method of the listener, if there is one; an exception costs a warning."""
        if self._listener is not None:
            session_of(self.telemetry).attempt(function, self._listener)


class AlgorithmCallback(RLlibCallback):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    """Gives the learners what only the algorithm knows: whole episodes, results, and the end of the run."""

    @contained
    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """See RLlib's `RLlibCallback`."""
        group = algorithm.learner_group
        SurroundingTap(group, "update", self._before_update, lambda: None)
        SurroundingTap(algorithm, "cleanup", lambda: group.foreach_learner(TelemetryLearner.shutdown), lambda: None)

    @contained
    def on_train_result(self, *, algorithm: Any, result: Mapping[str, Any], **kwargs: Any) -> None:
        """See RLlib's `RLlibCallback`."""
        flat = flatten_dict({name: result.get(name, {}) for name in ("env_runners", "learners", "evaluation")})
        numbers = {key: float(x) for key, x in flat.items() if isinstance(x, Real) and not SKIPPED.search(key)}
        results = {key: x for key, x in numbers.items() if not math.isnan(x)}
        algorithm.learner_group.foreach_learner(lambda one: one.call(partial(LearnerListener.report, results=results)))

    @contained
    def _before_update(self, *, episodes: Sequence[Any] = (), timesteps: dict[str, Any], **kwargs: Any) -> None:
        """Give the learners the chunks of all episodes, because one episode may be in several rollouts and several learners."""
        timesteps[OWN_KEY] = [(x.id_, float(x.get_return()), len(x), bool(x.is_done)) for x in episodes]


def attach_config(config: Any, telemetry: Callable[[], Telemetry]) -> Any:
    """Make the learners of a `PPOConfig` record every update with the `Telemetry` that each of them makes; returns the configuration.

        attach_config(config, lambda: Telemetry(["tensorboard"], run_dir="auto"))

    Set a learner and callbacks of your own before. Nothing that learners compute changes: weights are bit-identical.

    Raises:
        TypeError: if the configuration's learner is not RLlib's PPO, or `telemetry` cannot be called.
    """
    base = getattr(config, "learner_class", None)
    if not isinstance(base, type) or not issubclass(base, PPOTorchLearner) or not callable(telemetry):
        raise TypeError(f"attach_config takes RLlib's PPOConfig and a function, got {config!r} and {telemetry!r}")
    callbacks = config.callbacks_class if isinstance(config.callbacks_class, list) else [config.callbacks_class]
    learner = type(f"Telemetry{base.__name__}", (TelemetryLearner, base), {})
    config.learners(learner_class=learner, learner_config_dict={OWN_KEY: telemetry})
    return config.callbacks([*callbacks, AlgorithmCallback])
