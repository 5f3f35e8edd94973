"""What a seed can become: a blueprint says which of a slot's parameters are there. The others are zero and stay so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.packing import Packing

UNITS = 24
"""Hidden units that a slot has room for."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One kind of seed; all are residual and the identity at birth.

    Attributes:
        scales: it scales and shifts the normalised features.
        units: hidden units of its two-layer network.
        attends: it attends to earlier tokens, so the host must have some.
    """

    name: str
    scales: bool = False
    units: int = 0
    attends: bool = False


BLUEPRINTS = (
    Blueprint("norm", scales=True),
    Blueprint("bottleneck", units=4),
    Blueprint("mlp", units=UNITS),
    Blueprint("attention", attends=True),
)

STYLES = ("add", "sigmoid_add", "multiply", "gated")
"""How a seed's effect joins the features: added with a linear or a sigmoid schedule, as a factor, or through a gate of its own."""

GATE = ("gate", "gate_bias")
ATTENTION = ("query", "key", "value", "out")

ANATOMY = ("scales", "units", "attends", "gated", "multiplied")
"""What seeds may have: parts, and ways to join what these find with the features; see `effects`."""


def seed_packing(width: int, *, attends: bool) -> Packing:
    """Parameters of a slot behind features of that width, with room for attention or without."""
    square = (width, width)
    return Packing(
        {
            "gain": (width,),
            "shift": (width,),
            "enter": (width, UNITS),
            "enter_bias": (UNITS,),
            "leave": (width, UNITS),
            **(dict.fromkeys(ATTENTION, square) if attends else {}),
            "gate": (width, 1),
            "gate_bias": (1,),
        }
    )


def anatomy() -> Tensor:
    """[styles, blueprints, `ANATOMY`], bool: what a seed of that style and blueprint has."""
    rows = [
        [[kind.scales, kind.units > 0, kind.attends, style == "gated", style == "multiply"] for kind in BLUEPRINTS]
        for style in STYLES
    ]
    return torch.tensor(rows)


def presence(packing: Packing) -> Tensor:
    """[styles, blueprints, size], bool: which parameters a seed of that style and blueprint has."""
    rows = [torch.stack([_present(packing, kind, style) for kind in BLUEPRINTS]) for style in STYLES]
    return torch.stack(rows)


def _present(packing: Packing, blueprint: Blueprint, style: str) -> Tensor:
    parts = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in packing.shapes.items()}
    parts["gain"][:] = parts["shift"][:] = blueprint.scales
    parts["enter"][:, : blueprint.units] = True
    parts["enter_bias"][: blueprint.units] = True
    parts["leave"][:, : blueprint.units] = True
    for name in parts.keys() & ATTENTION:
        parts[name][:] = blueprint.attends
    for name in GATE:
        parts[name][:] = style == "gated"
    return packing.pack(parts)


def newborn(packing: Packing, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows [*shape, size] of seeds at birth: what reads the features is drawn, what writes to them is zero."""

    def drawn(name: str, size: tuple[int, ...]) -> Tensor:
        if name in ("enter", "query", "key", "value"):
            scale = ((2 if name == "enter" else 1) / size[0]) ** 0.5
            return torch.randn(*shape, *size, generator=generator, device=generator.device).mul_(scale)
        return torch.zeros(*shape, *size, device=generator.device)

    return packing.pack({name: drawn(name, size) for name, size in packing.shapes.items()})
