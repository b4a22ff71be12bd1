"""Run benchmarks one after the other: `python -m benchmarks [NAME …]`, all of them by default.

Each is a module of its own that can also be run alone, with its own arguments; every one writes
what it found to benchmarks/results/. Those that need a GPU run by default only where there is one.
One that takes an hour runs only if it is named.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Return the modules of this folder that can be run."""
    return [
        path.stem
        for path in sorted(FOLDER.glob("*.py"))
        if not path.stem.startswith("_") and '__name__ == "__main__"' in path.read_text()
    ]


def needs_gpu(name: str) -> bool:
    """Whether a module says that it measures a GPU."""
    return "\nNEEDS_GPU = True" in (FOLDER / f"{name}.py").read_text()


def is_by_name_only(name: str) -> bool:
    """Whether a module says that it runs only if it is named."""
    return "\nBY_NAME_ONLY = True" in (FOLDER / f"{name}.py").read_text()


def default_names() -> list[str]:
    """Return the modules that this machine can run, but for those that take too long."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return [
        name for name in names() if (has_gpu or not needs_gpu(name)) and not is_by_name_only(name)
    ]


def main(chosen: list[str]) -> int:
    """Run the chosen ones; returns how many failed."""
    known = names()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    num_failed = 0
    for name in chosen or default_names():
        print(f"== {name}", flush=True)
        ran = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=FOLDER.parent)
        num_failed += ran.returncode != 0
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
