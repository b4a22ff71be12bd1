"""What the chaos strikes: the processes of a `slipstream serve`, and when they have recovered."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.stack import Stack, children_of, command_line, is_running

WORKERS = ("tokenizer", "compute", "detokenizer")
MASKS = "services.compute.grammar.mask_worker"
CHILDREN = {  # of a service: its module
    "compute": ("mask process", MASKS),
    "tokenizer": ("pool process", "services.tokenizer.worker"),
    "router": ("parser", "services.router.json_child"),
}
FOLLOWER = "services.compute.runner.follower"  # of a compute, which ends with it
KILL, STOP, TERM = "SIGKILL", "SIGSTOP", "SIGTERM"
DROP, DOWN = "cut (drop)", "cut (down)"
EXPECTED_ERRORS = (
    "died; starting it again",
    "hangs; killing it",
    "a rank is lost, and the group ends",
    "the leader is stopped, and the group ends",
    "rank failed",  # of one whose leader is gone
)


@dataclass(frozen=True, slots=True)
class Target:
    """What can be struck: an instance of a service, one of its children, or a host.

    `services` are those that the routers lose with it, none for a child.
    """

    name: str
    kind: str
    services: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Strike:
    """A fault that has happened; `is_over` says whether all is as it was before.

    A cut does not end by itself: `heal` is called at `heal_at_s`, if `is_found` by then.
    """

    target: Target
    fault: str
    at_s: float
    is_over: Callable[[], bool]
    heal: Callable[[], None] | None = None
    heal_at_s: float = 0.0
    is_found: Callable[[], bool] = lambda: True
    over_s: float = 0.0  # when it was found to be

    def poll(self, now_s: float) -> bool:
        """Heal what is to be healed by now; return whether all is as it was."""
        if self.heal is not None and now_s >= self.heal_at_s and self.is_found():
            self.heal()
            self.heal, self.heal_at_s = None, now_s
        if self.heal is None and not self.over_s and self.is_over():
            self.over_s = now_s
        return bool(self.over_s)

    @property
    def recovery_s(self) -> float:
        """Seconds until all was as before, of a cut since it was healed."""
        return self.over_s - max(self.at_s, self.heal_at_s)


class Ring(Protocol):
    """A server whose parts can be struck."""

    port: int

    def targets(self) -> list[Target]:
        """Return what can be struck now."""

    def faults(self, target: Target) -> tuple[str, ...]:
        """Return what can befall a target."""

    def strike(self, target: Target, fault: str, now_s: float) -> Strike:
        """Strike; the process is dead, or stopped, or cut off, when this returns."""


class StackRing:
    """The processes of one `slipstream serve`, which starts again what dies or hangs."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.port = stack.port
        self._names = frozenset(stack.pids())
        self._instances = frozenset(each["name"] for each in stack.health()["instances"])
        (tokenizer, *_) = stack.pids("tokenizer").values()
        pool = CHILDREN["tokenizer"][1]
        self._num_children = {module: 1 for _, module in CHILDREN.values()}
        self._num_children[pool] = len(_children(tokenizer, pool))

    def targets(self) -> list[Target]:
        """Return the instances and their children that live now."""
        found = []
        for name, pid in self.stack.pids().items():
            service = name.rpartition("-")[0]
            found.append(Target(name, service, (service,)))
            if _children(pid, FOLLOWER):
                found.append(Target(f"follower of {name}", "follower", (service,)))
            kind, module = CHILDREN.get(service, ("", ""))
            if module and _children(pid, module):
                found.append(Target(f"{kind} of {name}", kind))
        return found

    def faults(self, target: Target) -> tuple[str, ...]:
        """Return what can befall a target; a child ends by SIGTERM as by SIGKILL."""
        return (KILL, STOP, TERM) if target.kind in target.services else (KILL, STOP)

    def strike(self, target: Target, fault: str, now_s: float) -> Strike:
        """Send a signal to a process."""
        name = target.name.rpartition(" ")[2]
        pid = self.stack.pids()[name]
        if target.services:
            former = self._instance_ids()
            struck = _children(pid, FOLLOWER)[0] if target.kind == "follower" else pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(struck, signal.Signals[fault])
            return Strike(target, fault, now_s, lambda: self._is_back(name, pid, former))
        module = next(module for kind, module in CHILDREN.values() if kind == target.kind)
        child = _children(pid, module)[0]
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.Signals[fault])
        return Strike(
            target, fault, now_s, lambda: not is_running(child) and self._has_child(name, module)
        )

    def health(self) -> dict[str, Any]:
        """Return a router's view of the ring; nothing where it gives none."""
        try:
            return self.stack.health()
        except (OSError, ValueError, urllib.error.URLError):
            return {}

    def _instance_ids(self) -> dict[str, str]:
        return {each["name"]: each["instance_id"] for each in self.health().get("instances", ())}

    def _has_child(self, name: str, module: str) -> bool:
        """Whether an instance has its children of a kind, a mask process with its second one."""
        children = _children(self.stack.pids().get(name, 0), module)
        if module == MASKS:
            return any(map(children_of, children))
        return len(children) >= self._num_children[module]

    def _is_back(self, name: str, former_pid: int, former: dict[str, str]) -> bool:
        """Whether another process has taken its place and the routers have all workers."""
        if self.stack.pids().get(name, former_pid) == former_pid:
            return False
        now = self._instance_ids()
        return self._instances <= now.keys() and (
            name not in now or now[name] != former.get(name, "")
        )


def _children(pid: int, module: str) -> list[int]:
    return [child for child in children_of(pid) if module in command_line(child)]


class Serving(Protocol):
    """A server, on one host or on several."""

    url: str

    def log(self) -> str:
        """Return all that was logged."""


def num_retries(server: Serving) -> int:
    """Return how many attempts there were after the first ones, by a router's account."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60.0) as answer:
        text = answer.read().decode()
    counts = re.findall(r"^slipstream_request_retries_total{.*} (\d+)\.0$", text, re.M)
    return sum(map(int, counts))


def unexpected_errors(server: Serving) -> list[str]:
    """Return the log's errors that do not only tell of what was struck."""
    found = []
    for line in server.log().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            found.append(line[:200])
            continue
        if entry.get("level") in ("error", "critical") and entry["event"] not in EXPECTED_ERRORS:
            found.append(line[:300])
    return found


def left_of(processes: list[int]) -> list[str]:
    """Name the processes and files that an ended server has left behind."""
    left = [f"process {pid}: {command_line(pid)[:4]}" for pid in processes if is_running(pid)]
    run_dirs = {
        argument.removesuffix("/slipstream.toml")
        for pid in processes
        for argument in command_line(pid)
        if argument.endswith("/slipstream.toml")
    }
    return left + [f"folder {path}" for path in run_dirs if Path(path).exists()]
