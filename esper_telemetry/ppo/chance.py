"""The global random generators of Python, NumPy and torch: the trainer draws from its own, an environment may draw from these."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

LARGEST_SEED = 2**31


def new_seed(generator: torch.Generator) -> int:
    """A seed drawn from the generator."""
    return int(torch.randint(LARGEST_SEED, (), generator=generator))


def generator_states() -> dict[str, Any]:
    """The states of all of them, as tensors and plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Makes all of them go on from there; those of devices that are not here are left out."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
