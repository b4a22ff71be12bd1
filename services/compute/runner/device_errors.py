"""Which failures end the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from common.errors import FatalError

P = ParamSpec("P")
T = TypeVar("T")


def fatal_if_the_device_fails(method: Callable[P, T]) -> Callable[P, T]:
    """After a device error no later call can be trusted: the process has to end."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except torch.AcceleratorError as error:
            raise FatalError(f"the device failed: {error}") from error

    return guarded
