"""The part of the adapter of verl that runs in verl's workers: what each optimizer step of the actor and of the critic is taken for.

Workers keep references until the driver takes the steps of an update, so that a step copies nothing and waits for nothing.

Shapes: B completions of at most T tokens, K parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    from verl.workers.utils.padding import no_padding_2_padding
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("verl is missing: pip install 'esper-telemetry[verl]'", name=missing.name) from missing

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from esper_telemetry.adapters.taps import SurroundingTap, Tap, contained, listen
from esper_telemetry.core import tensors as ops

ACTOR, CRITIC = "actor", "critic"
"""Parts that learn. Parameters of the critic have its name as prefix."""

COLUMNS = {
    ACTOR: ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs"),
    CRITIC: ("response_mask", "values", "returns"),
}
"""Columns of a minibatch that workers keep, by part, if verl has them."""


class WorkerListener:
    """Keeps what the steps of one of verl's `TrainingWorker` are taken for, until the driver takes it.

    Args:
        worker: of the actor or of the critic.
        part: which of them.
        ends: end tokens.
    """

    def __init__(self, worker: Any, part: str, ends: Sequence[int]) -> None:
        self._worker, self._part, self._ends = worker, part, torch.tensor(ends)
        self._steps: list[dict[str, Any]] = []
        self._passes: list[dict[str, Tensor]] = []
        self._step: dict[str, Any] = {}
        self._remove = listen(worker, "loss_fn", contained(self._after_loss))
        SurroundingTap(worker.engine, "optimizer_step", contained(self._before_step), contained(self._after_step))

    def stop(self) -> None:
        """Restore the worker."""
        self._remove()
        tap = vars(self._worker.engine).get("optimizer_step")
        if isinstance(tap, Tap):
            tap.remove()

    def take(self) -> list[dict[str, Any]]:
        """Return the steps since the last call, on the CPU."""
        steps, self._steps = self._steps, []
        for step in steps:
            step["passes"] = [{name: x.cpu() for name, x in one.items()} for one in step["passes"]]
            step["norms"] = step["norms"].cpu()
        return steps if self._worker.engine.is_mp_src_rank_with_outputs() else [one | {"passes": []} for one in steps]

    def parameters(self) -> dict[str, int]:
        """Number of entries of each parameter of this process by name; shards of one flat parameter are parts."""
        return {name: parameter.numel() for name, parameter in self._named() if parameter.requires_grad}

    def _named(self) -> list[tuple[str, Any]]:
        prefix = f"{CRITIC}." if self._part == CRITIC else ""
        named = self._worker.engine.module.named_parameters()
        return [(prefix + name.replace("_fsdp_wrapped_module.", ""), parameter) for name, parameter in named]

    def _after_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        outputs, data = kwargs.get("model_output"), kwargs["data"]
        if outputs is None or not torch.is_grad_enabled():  # a loss also serves as a function of logits, and evaluates
            return
        names = [name for name in COLUMNS[self._part] if name in data]
        columns = dict(data.select(*names).to_padded_tensor().items())
        now = {"log_probs": "log_probs", "entropy": "entropy", "values": "values_now"}
        computed = {own: outputs[name] for name, own in now.items() if outputs.get(name) is not None}
        columns |= {own: no_padding_2_padding(x, data).detach() for own, x in computed.items()}
        if self._part == ACTOR and len(self._ends):
            responses, inside = data["responses"], torch.ones_like(data["responses"])
            tokens, inside = (torch.nested.to_padded_tensor(x, 0) for x in (responses, inside))
            columns["ends"] = torch.isin(tokens, self._ends.to(tokens.device)) & inside.bool()
        self._passes.append(columns)

    @torch.no_grad()
    def _before_step(self) -> None:
        """Measure the shards of gradients that this process has, before they are clipped."""
        engine, scaler = self._worker.engine, getattr(self._worker.engine, "scaler", None)
        named = [(name, parameter.grad) for name, parameter in self._named() if parameter.grad is not None]
        sharded = any(isinstance(gradient, DTensor) or "_flat_param" in name for name, gradient in named)
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for _, gradient in named]
        norms = ops.gradient_norms(local).double()
        self._step = {
            "names": tuple([name for name, _ in named]),
            "norms": norms / scaler.get_scale() if scaler is not None else norms,
            "shards": int(engine.device_mesh.shape[-1]) if sharded else 1,
            "rate": float(engine.optimizer.param_groups[0]["lr"]),
        }

    def _after_step(self) -> None:
        step, passes = self._step, self._passes
        self._step, self._passes = {}, []
        if step:
            self._steps.append(step | {"passes": passes})


def training_worker(actor: Any, part: str) -> Any:
    """Return verl's `TrainingWorker` of the actor or the critic in one of Ray's actors, which may hold several workers."""
    workers = {**getattr(actor, "worker_dict", {}), **getattr(actor, "fused_worker_dict", {})} or {"": actor}
    named = [worker for name, worker in workers.items() if (str(name) == CRITIC) == (part == CRITIC)]
    found = [one for one in (getattr(worker, "actor", worker) for worker in named) if hasattr(one, "engine")]
    return found[0]


def start_worker(actor: Any, part: str, ends: Sequence[int]) -> dict[str, int]:
    """Listen to a worker; return its parameters."""
    worker = training_worker(actor, part)
    worker.telemetry_listener = listener = WorkerListener(worker, part, ends)
    return listener.parameters()


def take_steps(actor: Any, part: str) -> list[dict[str, Any]]:
    """Return the steps of a worker since the last call."""
    listener: WorkerListener = training_worker(actor, part).telemetry_listener
    return listener.take()


def stop_worker(actor: Any, part: str) -> None:
    """Stop listening to a worker."""
    vars(training_worker(actor, part)).pop("telemetry_listener").stop()


def joined(passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the columns of several passes as one, padded to the longest completion; rows without tokens are left out."""
    if not passes:
        return {}
    width = max(one["response_mask"].shape[1] for one in passes)
    names = [name for name in passes[0] if all(name in one for one in passes)]
    columns = {name: torch.cat([pad(one[name], (0, width - one[name].shape[1])) for one in passes]) for name in names}
    learned = columns["response_mask"].bool().any(-1)
    return {name: column[learned] for name, column in columns.items()}
