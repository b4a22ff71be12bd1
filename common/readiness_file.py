"""The readiness beacon: a file that a service keeps fresh while it can serve.

`slipstream health NAME` reads it, so this module imports next to nothing.
"""

from __future__ import annotations

import os
import time

REFRESH_S = 1.0
FRESH_S = 10.0  # a CPU engine can sit in one long step for seconds without being ill


class ReadinessFile:
    """Writes `{run_dir}/{name}.ready` while its owner is ready."""

    def __init__(self, run_dir: str, name: str) -> None:
        self.path = path_of(run_dir, name)
        self._lit = False
        self._touched_s = 0.0

    def show(self, ready: bool, now_s: float) -> None:
        """Light, refresh or put out; costs a comparison between two refreshes."""
        if not ready:
            self.put_out()
        elif not self._lit or now_s - self._touched_s >= REFRESH_S:
            with open(self.path, "w", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
            self._lit = True
            self._touched_s = now_s

    def put_out(self) -> None:
        """Remove the file, if it is this process that lit it."""
        if self._lit:
            self._lit = False
            try:
                os.unlink(self.path)
            except OSError:
                pass  # the folder is gone already: not ready either


def path_of(run_dir: str, name: str) -> str:
    """Where the beacon of a service is."""
    return os.path.join(run_dir, f"{name}.ready")


def is_fresh(run_dir: str, name: str) -> bool:
    """Whether the service said within the last ten seconds that it is ready."""
    try:
        return time.time() - os.stat(path_of(run_dir, name)).st_mtime <= FRESH_S
    except OSError:
        return False
