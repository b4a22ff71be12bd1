"""`python -m benchmarks.kernels [name …]`: times the kernels on this machine's GPU."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import torch

import benchmarks.kernels
from benchmarks.kernels.case import line, time_s


def main() -> None:
    """Print a line for each case of the named modules, or of all."""
    found = [m.name for m in pkgutil.iter_modules(benchmarks.kernels.__path__)]
    modules = sys.argv[1:] or [name for name in found if name not in ("__main__", "case")]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in modules:
        module = importlib.import_module(f"benchmarks.kernels.{name}")
        for case in module.cases():
            print(line(case, time_s(case)), flush=True)


main()
