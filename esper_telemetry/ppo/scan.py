"""Linear recurrences over time in log2(T) passes over whole tensors (Hillis and Steele 1986)."""

from __future__ import annotations

from torch import Tensor


def running_sums(amounts: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + d_t y_{t-1} from x and d, [T, B] both; what stands in d_0 does not matter."""
    return remaining_sums(amounts.flip(0), decay.flip(0)).flip(0)


def remaining_sums(amounts: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + d_t y_{t+1} from x and d, [T, B] both; what stands in d_{T-1} does not matter."""
    sums, decay = amounts.clone(), decay.clone()
    distance = 1
    while distance < len(sums):
        sums[:-distance] += decay[:-distance] * sums[distance:]
        decay[:-distance] = decay[:-distance] * decay[distance:]
        distance *= 2
    return sums
