"""Host arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device, in stream order and without waiting for it.

    On the CPU it is the array's own memory. For CUDA it goes through pinned memory, since a copy
    from pageable memory above 64 KiB waits until the kernels launched before it are done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
