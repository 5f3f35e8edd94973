"""The CPU as verl's accelerator; verl imports this module before it chooses its platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

NUMBERS = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "current_device")
ACTIONS = ("empty_cache", "synchronize", "set_device", "ipc_collect")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):  # type: ignore[misc, unused-ignore]  # verl may be absent
    """The CPU, where verl would use CUDA."""

    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(
        **dict.fromkeys(NUMBERS, lambda *_: 0),
        **dict.fromkeys(ACTIONS, lambda *_: None),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
        get_device_name=lambda *_: "CPU",
        is_available=lambda: True,
        device_count=lambda: 1,
        mem_get_info=lambda *_: (1, 1),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        """See verl's `PlatformBase`."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False: only `VERL_PLATFORM` chooses it."""
        return False

    def current_device(self) -> Any:
        """See verl's `PlatformBase`."""
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        """See verl's `PlatformBase`."""
        return "gloo"
