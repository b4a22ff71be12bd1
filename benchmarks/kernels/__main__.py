"""`python -m benchmarks.kernels [--json FILE] [name …]`: times kernels on this machine's GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from pathlib import Path

import torch

import benchmarks.kernels
from benchmarks.kernels.case import line, time_s


def main() -> None:
    """Print a line for each case of the named modules, or of all; and as JSON into a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    found = [m.name for m in pkgutil.iter_modules(benchmarks.kernels.__path__)]
    modules = given.names or [name for name in found if name not in ("__main__", "case")]
    device = torch.cuda.get_device_name()
    print(device, "torch", torch.__version__)
    results = []
    for name in modules:
        module = importlib.import_module(f"benchmarks.kernels.{name}")
        for case in module.cases():
            seconds = time_s(case)
            print(line(case, seconds), flush=True)
            us = {"us": round(seconds * 1e6, 2), "floor_us": round(case.floor_s * 1e6, 2)}
            results.append({"name": case.name, **us})
    if given.json:
        given.json.write_text(json.dumps({"device": device, "cases": results}, indent=1) + "\n")


main()
