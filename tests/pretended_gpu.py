"""A simulated GPU: CPU tensors that report the device `cuda:0` and fail if a GPU's tensors would.

Each tensor is marked with the device that it would be on. Torch's function mode sees every call. A call that mixes tensors of both
devices raises, and so does `numpy` on a marked tensor. Every operation that reads numbers from the device is counted. Unmarked tensors
from autograd's hooks are treated as tensors on the device.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cuda:0"), torch.device("cpu")

FACTORIES: Final = frozenset(
    {"zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "tensor"}
    | {"as_tensor", "asarray", "scalar_tensor"}
)
"""Functions that make tensors where no argument says on which device."""

MIXING: Final = frozenset({"__getitem__", "__setitem__", "copy_", "to", "cpu", "cuda", "index_put_", "index_put", "type"})
"""Functions that take tensors of both devices."""

VIEWS: Final = frozenset(
    {"view", "detach", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "alias", "as_strided"}
    | {"permute", "split", "unbind", "_unsafe_view", "split_with_sizes", "chunk", "narrow"}
)
"""Operations that start nothing on a device."""

READS: Final = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "unique", "equal"})
"""Functions that wait for the device."""


def mark(tensor: object, device: torch.device | None) -> None:
    if isinstance(tensor, Tensor) and device is not None:
        tensor._pretended = device  # type: ignore[attr-defined]


def device_of(tensor: Tensor) -> torch.device | None:
    """The device that a tensor is marked with; None if it is not marked."""
    device: torch.device | None = tensor.__dict__.get("_pretended")
    return device


def named_device(name: Any) -> torch.device:
    return GPU if torch.device(name).type == "cuda" else HOST


class PretendedGPU(TorchFunctionMode):
    """The function mode; see the module docstring.

    Attributes:
        reads: number of reads from the device, by function and by the innermost calling file of the package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` and mark its result."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args[0])
        if name in ("__set__", "__delete__"):
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {device_of(tensor) for tensor in given if tensor.dim() > 0}
        if {GPU, HOST} <= devices and name not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {GPU} and {HOST} ({name})")
        if name == "numpy" and device_of(given[0]) == GPU:
            raise TypeError(f"can't convert {GPU} device type tensor to numpy")
        if name in READS and GPU in {device_of(tensor) for tensor in given}:
            self.reads[name, _asking_file()] += 1
        kwargs.pop("pin_memory", None)
        if name in ("to", "cuda", "cpu"):
            return self._moved(name, *args, **kwargs)
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = HOST
            device: torch.device | None = named_device(wanted)
        elif given:
            known = [one for one in map(device_of, given) if one is not None]
            device = GPU if GPU in known else HOST if known else None
        else:
            device = HOST if name in FACTORIES else None
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if not any(leaf is one for one in given):
                mark(leaf, device)
        return result

    def _attribute(self, get: Any, tensor: Tensor) -> Any:
        name, device = getattr(get.__self__, "__name__", ""), device_of(tensor) or GPU
        if name in ("device", "is_cuda", "is_cpu"):
            return {"device": device, "is_cuda": device == GPU, "is_cpu": device == HOST}[name]
        result = get(tensor)
        mark(result, device_of(tensor))
        return result

    def _moved(self, name: str, tensor: Tensor, *where: Any, **options: Any) -> Tensor:
        """A copy with another type or on the other device; the tensor itself if it has both already."""
        own = device_of(tensor) or GPU
        device, dtype = {"cuda": GPU, "cpu": HOST}.get(name, own), tensor.dtype
        for one in (*where, options.get("device"), options.get("dtype"), options.get("other")):
            if isinstance(one, str | torch.device):
                device = named_device(one)
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, Tensor):
                device, dtype = device_of(one) or GPU, one.dtype
        if own == GPU and device == HOST:
            self.reads[name, _asking_file()] += 1
        moved = Tensor.to(tensor, dtype, copy=device != own or bool(options.get("copy")))
        mark(moved, device)
        return moved


def _asking_file() -> str:
    """The innermost file of the package on the stack, or an empty string."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, name = frame.f_code.co_filename.rpartition("/esper_telemetry/")
        if found and "/tests/" not in frame.f_code.co_filename:
            return str(name)
        frame = frame.f_back
    return ""


class DeviceCalls(TorchDispatchMode):
    """Counts the operations that would start work on a device.

    Attributes:
        count: number of operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name.removeprefix("aten::") not in VIEWS
        return function(*args, **(kwargs or {}))


class Event:
    """A device event that is always complete."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: the event is complete already."""

    def synchronize(self) -> None:
        """Return at once: the event is complete already."""

    def query(self) -> bool:
        return True


@contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    from_numpy, move = torch.from_numpy, nn.Module.to

    def marked_from_numpy(array: Any) -> Tensor:
        tensor = from_numpy(array)
        mark(tensor, HOST)
        return tensor

    def moved(module: nn.Module, *where: Any, **options: Any) -> nn.Module:
        device = next((one for one in (*where, options.get("device")) if isinstance(one, str | torch.device)), None)
        if device is None:
            return move(module, *where, **options)
        for tensor in (*module.parameters(), *module.buffers()):
            mark(tensor, named_device(device))
        return module

    cuda = {
        "Event": Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "memory_reserved": lambda device=None: 1 << 20,
        "mem_get_info": lambda device=None: (1 << 29, 1 << 30),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, function in cuda.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch, "from_numpy", marked_from_numpy)
        patch.setattr(nn.Module, "to", moved)
        with PretendedGPU() as mode:
            yield mode
