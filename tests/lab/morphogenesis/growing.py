"""Helpers for the tests of morphogenesis: small environments, random actions, and plain single networks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry import PPO, Record, Telemetry, attach, read_run
from esper_telemetry.lab.morphogenesis.controllers import RandomController, ScriptedRun
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.training import Data


def tiny(num_envs: int = 8, **settings: object) -> Morphogenesis:
    """Return an environment with so little data that a step takes one or two milliseconds."""
    env = Morphogenesis(num_envs, seed=0, **settings)  # type: ignore[arg-type]  # as they are named
    task = env.colony.task
    rows = 16 * task.tokens
    train, validation = (Data(data.inputs[:rows], data.targets[:rows]) for data in (task.train, task.validation))
    env.colony.task = replace(task, batch=8, train_batches=1, train=train, validation=validation)
    env.reset()
    return env


def play(env: Morphogenesis, steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Take random valid actions; return the stages before and after each step, [B, S], and the rewards [B]."""
    choose, steps_taken = RandomController(seed), []
    for _ in range(steps):
        before = env.slots.stage
        step = env.step(choose(env))
        steps_taken.append((before, env.slots.stage, step.rewards))
    return steps_taken


def recorded(run: PPO | ScriptedRun, run_dir: Path, steps: int, **settings: Any) -> Sequence[Record]:
    """Records of a run of that many environment steps."""
    with Telemetry(run_dir=run_dir, offload=False, **settings) as telemetry:
        attach(telemetry, run)
        run.learn(steps)
    return read_run(run_dir).records


def plain_loss(host: dict[str, Tensor], seeds: list[dict[str, Tensor]], plan: dict[str, object]) -> Tensor:
    """Return the loss of one network, computed layer by layer without batching; `plan` describes the seeds."""
    x = plan["inputs"]
    assert isinstance(x, Tensor)
    for slot, seed in enumerate(seeds):
        h = x @ host[f"weight_{slot}"].T + host[f"bias_{slot}"]
        h = h.relu() if plan["relu"] else h
        style, isolated, alpha = plan["styles"][slot], plan["isolated"][slot], plan["alphas"][slot]  # type: ignore[index]
        features = h.detach() if isolated else h
        normed = F.layer_norm(features, features.shape[-1:])
        effect = normed * seed["gain"] + seed["shift"]
        effect = effect + (features @ seed["enter"] + seed["enter_bias"]).relu() @ seed["leave"].T
        if plan["tokens"] != 1:
            effect = effect + plain_attention(normed, seed, int(plan["tokens"]))  # type: ignore[call-overload]
        if style == "multiply":
            effect = features * effect.tanh()
        if style == "gated":
            effect = torch.sigmoid(features @ seed["gate"] + seed["gate_bias"]) * effect
        x = h + (effect - effect.detach()) if isolated else h + alpha * effect
    last = len(seeds)
    targets = plan["targets"]
    assert isinstance(targets, Tensor)
    return F.cross_entropy(x @ host[f"weight_{last}"].T + host[f"bias_{last}"], targets)


def plain_attention(x: Tensor, seed: dict[str, Tensor], tokens: int) -> Tensor:
    """Return causal attention, computed window by window from its definition."""
    out = []
    for window in x.split(tokens):
        scores = (window @ seed["query"].T) @ (window @ seed["key"].T).T / x.shape[-1] ** 0.5
        future = torch.ones(tokens, tokens).triu(1).bool()
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ (window @ seed["value"].T))
    return torch.cat(out) @ seed["out"].T
