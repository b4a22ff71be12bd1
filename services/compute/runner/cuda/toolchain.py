"""What the GPU's kernels need of a machine besides a GPU; asked before minutes go into loading."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

from common.errors import ConfigError

COMPILERS = ("cc", "gcc", "clang")


def check_toolchain(
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    find_program: Callable[[str], str | None] = shutil.which,
) -> None:
    """Raise ConfigError, which says what to install, where Triton could not compile."""
    if not has_module("triton"):
        raise ConfigError(
            "compute.device is cuda, and Triton is not installed; "
            "install it with `pip install triton`, or use cpu."
        )
    if not os.environ.get("CC") and not any(map(find_program, COMPILERS)):
        raise ConfigError(
            "compute.device is cuda, and Triton finds no C compiler for the launchers of its "
            "kernels; install gcc with Python's headers (Debian and Ubuntu: apt install gcc "
            "python3-dev), name one in CC, or use cpu."
        )
