"""Encoders of observations with images: convolutions for each image, a layer for the other numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.environment_protocol import Image, ObservationLayout
from esper_telemetry.ppo.networks.mlp import MLP, orthogonal


class Convolution(NamedTuple):
    """Number of filters, their width, and the stride."""

    filters: int
    width: int
    stride: int


class Architecture(NamedTuple):
    """Convolutions, and the width of the linear layer after them; for images whose shorter side is at least `smallest`."""

    smallest: int
    convolutions: Sequence[Convolution]
    features: int


ARCHITECTURES = (
    Architecture(36, (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)), 512),  # Mnih et al. 2015
    Architecture(16, (Convolution(32, 4, 2), Convolution(64, 3, 2), Convolution(64, 3, 1)), 256),
    Architecture(8, (Convolution(16, 3, 1), Convolution(32, 3, 2)), 128),  # as for MinAtar's 10x10
)


MAX_PIXEL_RANGE = 2.0**16
"""Wider ranges are not bounds of pixels; such images are not scaled."""


class ImageEncoder(nn.Module):
    """Convolutions and a linear layer, each with a ReLU; orthogonal weights with gain √2, zero biases.

    Args:
        image: the input image; its range is mapped to 0 to 1 on the device.

    Attributes:
        features: width of the output.

    Raises:
        ValueError: a side is shorter than 8.
    """

    def __init__(self, image: Image) -> None:
        super().__init__()
        channels, *sides = image.channels_first
        design = architecture(image)
        self.image, self.features = image, design.features
        self.convolutions = nn.ModuleList()
        for filters, width, stride in design.convolutions:
            self.convolutions.append(orthogonal(nn.Conv2d(channels, filters, width, stride), gain=2**0.5))
            channels, sides = filters, [(side - width) // stride + 1 for side in sides]
        self.linear = orthogonal(nn.Linear(channels * math.prod(sides), design.features), gain=2**0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Features [N, features] of images [N, *shape] as they are stored."""
        rows = self.scaled(images.permute(0, 3, 1, 2) if self.image.channels_last else images)
        for convolution in self.convolutions:
            rows = torch.relu(convolution(rows))
        return torch.relu(self.linear(rows.flatten(1)))

    def scaled(self, images: Tensor) -> Tensor:
        """The images as floats, their range mapped to 0 to 1."""
        low, high = self.image.low, self.image.high
        rows = images.float()
        if (low, high) == (0.0, 1.0) or not 0.0 < high - low <= MAX_PIXEL_RANGE:
            return rows
        return (rows - low) * (1.0 / (high - low))


def architecture(image: Image) -> Architecture:
    """Return the architecture for images of that size; raise ValueError if they are too small."""
    side = min(image.channels_first[1:])
    for parts in ARCHITECTURES:
        if side >= parts.smallest:
            return parts
    raise ValueError(f"images must be at least {ARCHITECTURES[-1].smallest} pixels on each side, got {image.shape}")


NUMBERS_WIDTH = 64
"""Width of the layer for the numbers next to an image."""


class ObservationEncoder(nn.Module):
    """Convolutions for each image and a layer for the numbers, with concatenated outputs.

    Args:
        layout: positions of the parts of an observation, with at least one image.
        activation: activation of the numbers' layer.

    Attributes:
        features: width of the output.
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
        parts = [encode(image) for encode, image in zip(self.images, self.layout.images_of(rows), strict=True)]
        if self.numbers is not None:
            parts.append(self.numbers(self.layout.numbers_of(rows).contiguous()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class Encoded(nn.Module):
    """An encoder followed by hidden layers, which replaces plain hidden layers.

    Args:
        layout, activation: see `ObservationEncoder`.
        sizes: widths of the hidden layers; an empty sequence gives only the encoder.
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
