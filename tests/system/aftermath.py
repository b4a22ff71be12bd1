"""What must hold of a server after whatever was done to it: it serves, and has forgotten all."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass

from benchmarks.stack import Stack, descendants_of, rss_mib
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty

MAX_GROWTH_MIB = 200.0  # of all processes together, by buffers that allocators keep
ALARMS = ("error", "critical")


@dataclass(slots=True)
class Aftermath:
    """One server as it was before; `check` says whether it came to harm since."""

    stack: Stack
    pids: dict[str, int]
    rss_mib: float
    logged: int

    @classmethod
    def of(cls, stack: Stack) -> Aftermath:
        """Look at a server before anything is done to it."""
        answers_well(stack)
        return cls(stack, stack.pids(), _rss_mib(stack), len(stack.log()))

    def check(self) -> None:
        """Assert that it serves, that its tables are empty, and that nothing was lost or logged."""
        stack = self.stack
        answers_well(stack)
        wait_empty(stack)
        assert stack.pids() == self.pids, "a process was started again"
        alarms = self.alarms()
        assert not alarms, alarms[:3]
        growth_mib = _rss_mib(stack) - self.rss_mib
        assert growth_mib < MAX_GROWTH_MIB, f"{growth_mib:.0f} MiB more than before"

    def alarms(self) -> list[str]:
        """Return the log's lines since that tell of a fault of the server's own."""
        found = []
        for line in self.stack.log()[self.logged :].splitlines():
            try:
                level = json.loads(line)["level"]
            except (ValueError, KeyError):
                level = ALARMS[0]  # what is no entry was printed by an accident
            if level in ALARMS or "Traceback" in line:
                found.append(line[:2000])
        return found


def answers_well(stack: Stack) -> None:
    """Assert that a good request gets its answer."""
    model = stack.get("/v1/models")["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def _rss_mib(stack: Stack) -> float:
    return sum(map(rss_mib, descendants_of(stack.process.pid)))
