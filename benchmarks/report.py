"""Writes a benchmark's figures to benchmarks/results/, with all that they depend on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


class Report:
    """One page: what was measured, on what, how, and what came out."""

    def __init__(self, name: str, title: str, purpose: str) -> None:
        self._name = name
        self._parts = [f"# {title}", purpose, _circumstances(name)]

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; all columns but the first are numbers."""
        lines = [_row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
        lines += [_row(row) for row in rows]
        self._parts.append("\n".join(lines))

    @property
    def page(self) -> str:
        """The page as Markdown."""
        return "\n\n".join(self._parts) + "\n"

    def write(self) -> Path:
        """Write the page, print it, and return its path."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._name}.md"
        path.write_text(self.page)
        print(self.page)
        return path


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _circumstances(name: str) -> str:
    script, arguments = Path(sys.argv[0]), ""
    if script.parent.name == "benchmarks" and script.stem != "__main__":
        name, arguments = script.stem, " ".join(sys.argv[1:])
    return "\n".join(
        (
            f"- command: `python -m benchmarks.{name}{' ' if arguments else ''}{arguments}`",
            f"- hardware: {_cpu()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
            f"- software: Python {platform.python_version()}, Linux {platform.release()}",
            f"- date: {time.strftime('%Y-%m-%d')}, commit {_commit()}",
        )
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.check_output(command, cwd=RESULTS.parent, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
