"""Observations of several parts: an encoder for each, and their features side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_telemetry.ppo.encoders.image import ImageEncoder
from esper_telemetry.ppo.environments.observations import ObservationLayout
from esper_telemetry.ppo.mlp import MLP

NUMBERS_WIDTH = 64
"""Width of the layer that the numbers beside an image go through."""


class ObservationEncoder(nn.Module):
    """Each image through convolutions, the numbers beside them through a layer; what comes out stands side by side.

    Args:
        layout: what stands where in an observation, with at least one image.
        activation: of the numbers' layer.

    Attributes:
        features: width of what comes out.
    """

    def __init__(self, layout: ObservationLayout, activation: str) -> None:
        super().__init__()
        self.layout = layout
        self.numbers = MLP(layout.numbers, (NUMBERS_WIDTH,), activation) if layout.numbers else None
        images = [ImageEncoder(image) for image in layout.images]
        self.images = nn.ModuleList(images)
        self.features = sum(image.features for image in images) + (NUMBERS_WIDTH if layout.numbers else 0)

    def forward(self, rows: Tensor) -> Tensor:
        """Features [N, features] of observations [N, *shape] as they are stored."""
        found = [encode(image) for encode, image in zip(self.images, self.layout.images_of(rows), strict=True)]
        if self.numbers is not None:
            found.append(self.numbers(self.layout.numbers_of(rows).contiguous()))
        return torch.cat(found, -1) if len(found) > 1 else found[0]


class Encoded(nn.Module):
    """Hidden layers behind an encoder, in the place of hidden layers alone.

    Args:
        layout, activation: see `ObservationEncoder`.
        sizes: widths of the hidden layers; none makes the encoder itself.
    """

    def __init__(self, layout: ObservationLayout, sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(layout, activation)
        self.hidden = MLP(self.encoder.features, sizes, activation)
        self.inputs, self.features = math.prod(layout.shape), self.hidden.features

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, F] of observations [N, ...]."""
        features: Tensor = self.hidden(self.encoder(observations))
        return features
