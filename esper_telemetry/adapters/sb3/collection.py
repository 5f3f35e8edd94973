"""Steps of the environments as Stable-Baselines3 takes them, and passes of its policy over the inputs that it collected.

Of a step small parts of the observations, the rewards and the actions on their way are copied; everything else happens when the rollout is
complete. Passes also take the inputs that a known mistake would use.

See `event_parts.CollectionReplay`. Shapes: T steps, B environments, N = T B transitions counted time by time, H width of a recurrent state,
F width of latents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import Array
from esper_telemetry.adapters.sb3.distributions import ActionHeads, last_distribution
from esper_telemetry.adapters.sb3.replay import CHUNK_ROWS, StoredRollout, distribution_of
from esper_telemetry.adapters.taps import in_mode, without_trace
from esper_telemetry.core.event_parts import CollectionReplay, Outputs, Transitions
from esper_telemetry.core.tensors import are_rescaled
from esper_telemetry.equations.transitions import MAX_CHECKSUM_ENTRIES, checksums, informative
from esper_telemetry.events import RolloutEnd

MAX_KEPT_ENTRIES = 1 << 12
"""Entries of a step's observations up to which they are copied as the policy received them."""

STEP_FUNCTIONS = ("step_wait", "step")
"""Methods of environments that step together, which also reset those whose episodes have ended."""

MAX_KEPT_ROLLOUT_ENTRIES = 1 << 22
"""The same of a rollout: 16 megabytes."""

End = tuple[int, Array, Array, Sequence[Mapping[str, Any]]]
"""A step in which episodes ended: its number, `dones`, rewards and infos."""


class Answer(NamedTuple):
    """What the environments returned in a step: some entries of the observations, [B, n], None of several parts; rewards [B]."""

    observations: Array | None
    rewards: Array


class CollectedSteps(NamedTuple):
    """A rollout as it was collected.

    Attributes:
        transitions: what the environments returned; None where observations have several parts.
        acted: [T, B, ...], observations as the policy received them; None of large ones.
    """

    transitions: Transitions | None
    acted: Tensor | None


class StepRecorder:
    """Records the steps of one rollout after another.

    Args:
        env: of the model.

    Attributes:
        innermost: the environments beneath its wrappers.
    """

    def __init__(self, env: Any) -> None:
        innermost = env
        while hasattr(innermost, "venv"):
            innermost = innermost.venv
        self.innermost = innermost
        self._answers: list[Answer] = []
        self.begin()

    def begin(self) -> None:
        """Forget all steps: a rollout begins."""
        self._acted: list[Tensor] = []
        self._returned: list[Array] = []
        self._shown: list[Array] = []
        self._rewards: list[Array] = []
        self._paid: list[Array] = []
        self._sent: list[Array] = []
        self._received: list[Array] = []

    def after_action(self, args: tuple[Any, ...]) -> None:
        """The policy was called with these arguments."""
        if args and isinstance(args[0], Tensor) and args[0].numel() <= MAX_KEPT_ENTRIES:
            self._acted.append(args[0].clone())

    def after_answer(self, observations: Any, rewards: Array) -> None:
        """The environments returned these to the collecting loop, which may change them before it shows them."""
        kept = _entries(observations).copy() if isinstance(observations, np.ndarray) else None
        self._answers.append(Answer(kept, np.array(rewards)))

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered; `variables` are the local ones of the collecting loop."""
        returned = variables.get("new_obs")
        sent = variables.get("clipped_actions", variables.get("actions"))  # MaskablePPO cuts none
        answers, self._answers = self._answers, []
        last = answers[-1].observations if answers else None
        # a loop may give them another name
        shown = _entries(returned).copy() if isinstance(returned, np.ndarray) else last
        if shown is not None:
            self._shown.append(shown)
            self._returned.append(last if last is not None and last.shape == shown.shape else shown)
        rewards = variables["rewards"].copy()
        self._rewards.append(rewards)
        # a loop that repeats its actions adds the rewards of several answers
        self._paid.append(
            answers[0].rewards if len(answers) == 1 and answers[0].rewards.shape == rewards.shape else rewards
        )
        received = getattr(self.innermost, "actions", None)
        if isinstance(sent, np.ndarray) and isinstance(received, np.ndarray) and received.shape == sent.shape:
            self._sent.append(sent)
            self._received.append(received if received is sent else received.copy())

    def rewards(self) -> Array:
        """Rewards [T, B] as the collecting loop received them."""
        return np.stack(self._rewards)

    def finish(self, stored: Any, ends: Sequence[End], resets: ResetCounter) -> CollectedSteps:
        """Return the rollout, of which the buffer has stored these observations; `ends` are its ends of episodes."""
        acted = self._acted
        is_complete_copy = (
            len(acted) == len(self._rewards) and sum(map(torch.Tensor.numel, acted)) <= MAX_KEPT_ROLLOUT_ENTRIES
        )
        complete = len(self._returned) == len(self._rewards) > 0 and isinstance(stored, np.ndarray)
        return CollectedSteps(
            self._transitions(stored, ends, resets) if complete else None,
            torch.stack(acted) if is_complete_copy and acted else None,
        )

    def _transitions(self, stored: Array, ends: Sequence[End], resets: ResetCounter) -> Transitions | None:
        observations = torch.from_numpy(stored)
        returned, shown = np.stack(self._returned), np.stack(self._shown)
        kept, delayed = (shown == returned).all(-1), (shown[1:] == returned[:-1]).all(-1)
        # a loop that exchanges some of them, or delays all, makes a mistake; one that scales them acts on what it shows
        if 2 * max(kept.mean(), delayed.mean() if delayed.size else 0.0) < 1:
            returned = shown
        own = _entries(stored.reshape(-1, *stored.shape[2:])).reshape(*stored.shape[:2], -1)
        if own.shape != returned.shape:
            return None
        places, rows = [], []
        for step, dones, _, infos in ends:
            for index in map(int, np.flatnonzero(dones)):
                final = infos[index].get("terminal_observation")
                if isinstance(final, np.ndarray | np.generic) and final.size == stored[0, 0].size:
                    places.append((step, index))
                    rows.append(np.asarray(final, stored.dtype).reshape(-1))
        finals = torch.full(own.shape[:2], torch.nan, dtype=torch.float64)
        if places:
            at = torch.tensor(places)
            finals[at[:, 0], at[:, 1]] = checksums(torch.from_numpy(_entries(np.stack(rows)).copy()).unsqueeze(0))[0]
        sent = received = _action_sums(self._sent, len(self._rewards))
        if any(one is not other for one, other in zip(self._sent, self._received, strict=True)):
            received = _action_sums(self._received, len(self._rewards))
        return Transitions(
            inputs=checksums(torch.from_numpy(np.ascontiguousarray(own))),
            outcomes=checksums(torch.from_numpy(returned.astype(stored.dtype))),
            finals=finals,
            rewards=torch.from_numpy(np.stack(self._paid).astype(np.float64)),
            informative=informative(observations),
            sent=sent,
            received=received,
            resets=resets.take(),
        )


class ResetCounter:
    """Counts resets of the training environments that are not part of their steps, where the trainer acts on what it saw before.

    An evaluation in these environments is such a reset. A program that resets them on purpose replaces the model's last observation.

    Args:
        innermost: environments of the model, beneath wrappers of all of them.
    """

    def __init__(self, model: Any, innermost: Any) -> None:
        self._model, self._innermost = model, innermost
        self._returned: Any = None
        self._before: list[Any] = []
        self._pending = self._count = 0

    @property
    def owners(self) -> list[object]:
        """Objects whose `reset` begins an episode: single environments where they are in this process, shared with others or not."""
        envs = getattr(self._innermost, "envs", None)
        present = [getattr(env, "unwrapped", env) for env in envs] if isinstance(envs, list) else [self._innermost]
        return [owner for owner in {id(one): one for one in present}.values() if hasattr(owner, "__dict__")]

    def after_reset(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An environment was reset: in a step of the model's environments, or by anything else."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_code.co_name in STEP_FUNCTIONS and frame.f_locals.get("self") is self._innermost:
                return
            frame = frame.f_back
        self._pending += 1
        self._before += [self._model._last_obs, self._returned]

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered an action, which was chosen for the model's last observation."""
        if self._pending:
            if any(self._model._last_obs is one for one in self._before):
                self._count += self._pending
            self._pending, self._before = 0, []
        self._returned = variables.get("new_obs")

    def take(self) -> int:
        """Return the number since the last call."""
        count, self._count = self._count, 0
        return count


def _entries(observations: Array) -> Array:
    """Some entries of each observation [B, ...], [B, n], those of which checksums are taken."""
    rows = observations.reshape(len(observations), -1)
    return rows[:, :: max(1, -(-rows.shape[1] // MAX_CHECKSUM_ENTRIES))]


def _action_sums(actions: Sequence[Array], steps: int) -> Tensor | None:
    if len(actions) != steps:
        return None
    stacked = torch.from_numpy(np.stack(actions).astype(np.float64))
    return checksums(stacked if stacked.dim() > 2 else stacked.unsqueeze(-1))


MODE_LAYERS = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
"""Layers that work differently in training."""

MAX_OLDER_ENTRIES = 1 << 20
"""Entries of the weights that are copied in a sampled update, to be compared with in the next one."""

LstmState: TypeAlias = tuple[Tensor, Tensor]
"""h and c, [layers, B, H] each."""


class Memory(NamedTuple):
    """States in which the first step of a rollout began; `critic` is None where the critic has no LSTM of its own."""

    actor: LstmState
    critic: LstmState | None

    @classmethod
    def stored(cls, buffer: Any, device: torch.device) -> Memory | None:
        """Return a copy of what a full buffer has stored; None without states."""
        actor, critic = (cls._first(buffer, part, device) for part in ("pi", "vf"))
        return None if actor is None else cls(actor, critic)

    @classmethod
    def received(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], of_lstm: LstmState) -> Memory:
        """Return what the policy was called with; `of_lstm` is what its actor's LSTM was called with."""
        states: Any = args[1] if len(args) > 1 else kwargs.get("lstm_states")
        return cls(states.pi, states.vf) if hasattr(states, "pi") and hasattr(states, "vf") else cls(of_lstm, None)

    @staticmethod
    def _first(buffer: Any, part: str, device: torch.device) -> LstmState | None:
        arrays = [getattr(buffer, f"{name}_{part}", None) for name in ("hidden_states", "cell_states")]
        if any(array is None for array in arrays):
            return None
        hidden, cell = (torch.as_tensor(array[0], device=device) for array in arrays if array is not None)
        return hidden.clone(), cell.clone()

    def empty(self) -> Memory:
        """Return states of zeros."""
        actor, critic = (None if s is None else (torch.zeros_like(s[0]), torch.zeros_like(s[1])) for s in self)
        assert actor is not None
        return Memory(actor, critic)

    def equals(self, other: Memory, starts: Array) -> bool:
        """Return whether the actor's states are the same in the environments [B] whose episode does not begin with the step."""
        going = torch.as_tensor(~starts.astype(bool))
        pairs = zip(self.actor, other.actor, strict=True)
        return all(torch.equal(one.cpu()[:, going], two.cpu()[:, going]) for one, two in pairs)


class CollectionPasses:
    """Passes of a model's policy over a rollout, by the name of a hypothesis.

    Args:
        inputs: of the rollout, as they were stored.
        acted: observations [T, B, ...] as the policy received them; None where they were not kept.
        stored, received: states before the first step, by the buffer and as the policy was called; None for a feed-forward policy.
        after: states of the actor after the first step; None where they are not known.
        older: weights of the policy in the sampled update before; empty where there are none.
    """

    def __init__(
        self,
        model: Any,
        heads: ActionHeads,
        inputs: StoredRollout,
        *,
        acted: Tensor | None,
        stored: Memory | None,
        received: Memory | None,
        after: LstmState | None,
        older: Sequence[Tensor] = (),
    ) -> None:
        self._policy, self._heads, self._inputs = model.policy, heads, inputs
        self._acted, self._older = acted, older
        self._memory, self._received_memory, self._after = stored, received, after

    def event(self, rollout: RolloutEnd, device: torch.device) -> CollectionReplay:
        """Return what `BeforeUpdate` holds."""
        rows = torch.arange(rollout.rewards.numel(), device=device)
        has_modes = any(isinstance(module, MODE_LAYERS) for module in self._policy.modules())
        return CollectionReplay(rollout.values, rollout.actions, rows, self.outputs, has_modes)

    @torch.no_grad()
    def outputs(self, hypothesis: str) -> Outputs | None:
        """Outputs for the stored inputs, or for those of a hypothesis; None where that does not apply."""
        run = getattr(self, f"_{hypothesis}", None) if hypothesis else self._pass
        with without_trace(self._policy):
            result: Outputs | None = None if run is None else run()
        return result

    def _other_observations(self) -> Outputs | None:
        observations = self._received()
        return None if observations is None or self._affine(observations) else self._pass(observations=observations)

    def _other_statistics(self) -> Outputs | None:
        observations = self._received()
        return (
            self._pass(observations=observations) if observations is not None and self._affine(observations) else None
        )

    def _older_weights(self) -> Outputs | None:
        parameters = list(self._policy.parameters())
        if len(self._older) != len(parameters):
            return None
        now = [parameter.data for parameter in parameters]
        try:
            for parameter, weights in zip(parameters, self._older, strict=True):
                parameter.data = weights
            return self._pass()
        finally:
            for parameter, weights in zip(parameters, now, strict=True):
                parameter.data = weights

    def _other_mode(self) -> Outputs | None:
        policy = self._policy
        set_mode: Callable[[bool], object] | None = getattr(policy, "set_training_mode", None)
        with in_mode(policy, training=not policy.training, set_mode=set_mode):
            return self._pass()

    def _random_passes(self) -> Outputs | None:
        torch.manual_seed(0)  # of the copy that `without_trace` made
        return self._pass()

    def _training(self) -> Outputs | None:
        set_mode: Callable[[bool], object] | None = getattr(self._policy, "set_training_mode", None)
        with in_mode(self._policy, training=True, set_mode=set_mode):
            return self._pass()

    def _mask_missing(self) -> Outputs | None:
        return None if self._inputs.masks is None else self._pass(masked=False)

    def _memory_zero(self) -> Outputs | None:
        return None if self._memory is None else self._pass(memory=self._memory.empty())

    def _other_memory(self) -> Outputs | None:
        received = self._differing_memory()
        return None if received is None or self._stores_late() else self._pass(memory=received)

    def _memory_stored_late(self) -> Outputs | None:
        received = self._differing_memory()
        return self._pass(memory=received) if received is not None and self._stores_late() else None

    def _differing_memory(self) -> Memory | None:
        """Return the states that the policy received, where these are neither the stored ones nor zeros."""
        stored, received, starts = self._memory, self._received_memory, self._inputs.starts[0]
        if stored is None or received is None:
            return None
        return None if received.equals(stored, starts) or received.equals(received.empty(), starts) else received

    def _stores_late(self) -> bool:
        """Return whether the stored states are those after the first step."""
        if self._memory is None or self._after is None:
            return False
        return self._memory.equals(Memory(self._after, None), np.zeros_like(self._inputs.starts[0]))

    def _memory_not_reset(self) -> Outputs | None:
        return self._with_starts(lambda starts: np.zeros_like(starts))

    def _memory_empty(self) -> Outputs | None:
        return self._with_starts(lambda starts: np.ones_like(starts))

    def _memory_reset_late(self) -> Outputs | None:
        return self._with_starts(lambda starts: np.concatenate([np.zeros_like(starts[:1]), starts[:-1]]))

    def _memory_reset_early(self) -> Outputs | None:
        return self._with_starts(lambda starts: np.concatenate([starts[1:], np.zeros_like(starts[:1])]))

    def _with_starts(self, change: Callable[[Array], Array]) -> Outputs | None:
        return None if self._memory is None else self._pass(starts=change(self._inputs.starts))

    def _received(self) -> Tensor | None:
        """Observations as the policy received them, where these are neither the stored ones nor those of a step before or after."""
        stored, acted = self._inputs.observations, self._acted
        if acted is None or not isinstance(stored, np.ndarray) or acted.numel() != stored.size:
            return None
        own, other = acted.cpu().reshape(stored.shape), torch.from_numpy(stored)
        pairs = [(own, other), (own[1:], other[:-1]), (own[:-1], other[1:])]
        return None if any(bool((one == two).all()) for one, two in pairs) else acted

    def _affine(self, observations: Tensor) -> bool:
        return are_rescaled(torch.from_numpy(self._inputs.observations).flatten(0, 1), observations.flatten(0, 1))

    def _pass(
        self,
        *,
        observations: Tensor | None = None,
        masked: bool = True,
        starts: Array | None = None,
        memory: Memory | None = None,
    ) -> Outputs:
        """Outputs in the policy's present mode, of other inputs where they are given."""
        policy, inputs = self._policy, self._inputs
        rows = np.arange(inputs.starts.size)
        latents, critics, begun, hidden = [], [], memory or self._memory, None
        if begun is None:
            for actor, critic in self._features(observations, rows):
                latents.append(policy.mlp_extractor.forward_actor(actor))
                critics.append(policy.mlp_extractor.forward_critic(critic))
            latent, latent_critic = torch.cat(latents), torch.cat(critics)
        else:
            begins = inputs.starts if starts is None else starts
            hidden, latent_critic = self._recurrent(observations, rows, begins, begun)
            latent = policy.mlp_extractor.forward_actor(hidden)
            latent_critic = policy.mlp_extractor.forward_critic(latent_critic)
        distribution_of(policy, latent, inputs if masked else inputs._replace(masks=None), rows)
        columns = self._heads.columns(last_distribution(policy))
        values = policy.value_net(latent_critic).flatten()
        return Outputs(columns.logits, columns.means, columns.log_std, {}, hidden, latent, values)

    def _features(self, observations: Tensor | None, rows: Array) -> Iterator[tuple[Tensor, Tensor]]:
        """Features of the actor and of the critic, some rows after the others."""
        policy = self._policy
        flat = None if observations is None else observations.flatten(0, 1).to(policy.device)
        for start in range(0, len(rows), CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS]
            inputs = self._inputs.rows(part, policy.device) if flat is None else flat[start : start + CHUNK_ROWS]
            features = policy.extract_features(inputs)
            yield features if isinstance(features, tuple) else (features, features)

    def _recurrent(
        self, observations: Tensor | None, rows: Array, starts: Array, first: Memory
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] of the actor, and what the critic reads."""
        policy = self._policy
        actor, critic = (torch.cat(parts) for parts in zip(*self._features(observations, rows), strict=True))
        begins = torch.as_tensor(starts, dtype=torch.float32, device=policy.device)
        hidden = self._through(actor, first.actor, begins, policy.lstm_actor)
        if getattr(policy, "lstm_critic", None) is not None and first.critic is not None:
            return hidden, self._through(critic, first.critic, begins, policy.lstm_critic)
        return hidden, hidden if getattr(policy, "shared_lstm", False) else policy.critic(critic)

    def _through(self, features: Tensor, state: Any, begins: Tensor, lstm: nn.Module) -> Tensor:
        outputs = []
        for row, starts in zip(features.unflatten(0, begins.shape), begins, strict=True):
            output, state = self._policy._process_sequence(row, state, starts, lstm)
            outputs.append(output)
        return torch.cat(outputs)


def copied_weights(policy: nn.Module) -> list[Tensor]:
    """Return copies of the weights of a policy; none of a large one."""
    parameters = list(policy.parameters())
    small = sum(parameter.numel() for parameter in parameters) <= MAX_OLDER_ENTRIES
    return [parameter.detach().clone() for parameter in parameters] if small else []
