"""A whole server as a child process: started by the command line, looked into, ended.

Used by the benchmarks and by the system tests, on Linux: processes are found through /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.beacon import is_ready
from services.launcher.control import CONTROL_SOCKET, ask_control

ROOT = Path(__file__).resolve().parents[1]
READY_WITHIN_S = 240.0  # a machine may be busy
STOPPED_WITHIN_S = 240.0
CLOSED_WITHIN_S = 10.0
POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
URL = re.compile(r"http://[\w.:\[\]-]+")


class StackError(Exception):
    """The server did not do what it was to do; the message ends with its log."""


class Stack:
    """One `slipstream serve`; `settings` are `table.field` names with their values.

    Its log is kept in a file, as JSON lines, or goes to `log_fd`. Every wait has a deadline and
    looks at the process. It runs the code of the checkout `root`, or of this one.
    """

    def __init__(
        self,
        folder: Path | str,
        *options: str,
        settings: Mapping[str, object] | None = None,
        port: int = 0,
        log_fd: int | None = None,
        root: Path | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="slipstream-run-")
        self.log_path = Path(self._scratch.name, "log")
        self._out_path = Path(self._scratch.name, "out")
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("SLIPSTREAM_")
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._api_key = str((settings or {}).get("router.api_keys", "")).partition(",")[0]
        for name, value in (settings or {}).items():
            table, _, field = name.partition(".")
            environment[f"SLIPSTREAM_{table.upper()}__{field.upper()}"] = str(value)
        found = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root or ROOT), found)))
        command = [sys.executable, "-m", "services.cli", "serve", str(folder)]
        command += ["--port", str(port), *options]
        self.command = " ".join(["slipstream", *command[3:]])
        with open(self._out_path, "wb") as out, open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log if log_fd is None else log_fd,
                env=environment,
                cwd=root,  # else `-m` would find this checkout's modules first
            )

    def __enter__(self) -> Stack:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> Stack:
        """Wait for the banner, which comes when all services are ready."""
        try:
            self.wait_until(lambda: "curl" in self._out_path.read_text(), within_s, "ready")
        except BaseException:
            self.close()
            raise
        found = URL.search(self._out_path.read_text())
        assert found is not None
        self.url = found.group()
        self.port = int(self.url.rpartition(":")[2])
        return self

    def wait_until(
        self, condition: Callable[[], object], within_s: float, what: str, alive: bool = True
    ) -> Any:
        """Wait for a condition to hold and return its value; StackError with the log if not."""
        deadline_s = time.monotonic() + within_s
        while not (value := condition()):
            if alive and self.process.poll() is not None:
                raise StackError(f"ended with {self.process.returncode}\n{self.log()[-4000:]}")
            if time.monotonic() > deadline_s:
                raise StackError(f"not {what} within {within_s} s\n{self.log()[-4000:]}")
            time.sleep(POLL_S)
        return value

    def get(self, path: str) -> dict[str, Any]:
        """Ask for a JSON document, whatever its status."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def health(self) -> dict[str, Any]:
        """Return the router's view of the ring."""
        return self.get("/health")

    def pids(self, service: str = "") -> dict[str, int]:
        """Return the service processes that live now, by name; all or one service's."""
        found = {}
        for pid in children_of(self.process.pid):
            arguments = command_line(pid)
            if "--name" in arguments:
                name = arguments[arguments.index("--name") + 1]
                if name.startswith(service):
                    found[name] = pid
        return found

    @property
    def run_dir(self) -> str:
        """The folder of its run, which each service's command names."""
        words = command_line(self.pids("router")["router-0"])
        return os.path.dirname(words[words.index("--config") + 1])

    def scale(self, **counts: int) -> None:
        """Have so many processes of these services, and wait until just those take requests."""
        run_dir = self.run_dir
        ask_control(os.path.join(run_dir, CONTROL_SOCKET), counts)

        def is_so() -> bool:
            known = Counter(each["service"] for each in self.health()["instances"])
            for service, count in counts.items():
                names = [*self.pids(f"{service}-")]
                now_s = time.monotonic()
                if len(names) != count or known.get(service, count) != count:  # no router is known
                    return False
                if not all(is_ready(run_dir, name, now_s) for name in names):
                    return False
            return True

        self.wait_until(is_so, READY_WITHIN_S, f"scaled to {counts}")

    def processes(self) -> dict[str, int]:
        """Return all that live now: the launcher, the services, and under those their children.

        A child is named after its service, its module and its number: `tokenizer-0/worker.1`.
        """
        found = {"launcher": self.process.pid}
        for name, pid in self.pids().items():
            found[name] = pid
            for number, child in enumerate(sorted(descendants_of(pid))):
                if module := module_of(child):
                    found[f"{name}/{module.rpartition('.')[2]}.{number}"] = child
        return found

    def kill(self, name: str) -> None:
        """End one service process without a warning."""
        os.kill(self.pids()[name], signal.SIGKILL)

    def log(self) -> str:
        """Return all that was logged."""
        return self.log_path.read_text(errors="replace")

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the log's entries of one event."""
        entries = []
        for line in self.log().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == event:
                    entries.append(entry)
        return entries

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(number)

    def wait(self, within_s: float = STOPPED_WITHIN_S) -> int:
        """Wait for the end and return the exit status."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise StackError(f"still there after {within_s} s\n{self.log()[-4000:]}") from None

    def stop(self, within_s: float = STOPPED_WITHIN_S) -> int:
        """Drain and end; returns the exit status."""
        self.signal()
        return self.wait(within_s)

    def close(self) -> None:
        """End whatever still runs, at once, and remove the files."""
        left = descendants_of(self.process.pid)
        for _ in range(2):  # the second signal cuts the drain short; the launcher clears up
            if self.process.poll() is None:
                self.signal()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(CLOSED_WITHIN_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._scratch.cleanup()


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all processes below a process."""
    found = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def command_line(pid: int) -> list[str]:
    """Return a process's arguments, none if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def module_of(pid: int) -> str:
    """Return the module that a process of Python's runs, empty if it is none or gone."""
    arguments = command_line(pid)
    return arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and of its own children, user and system."""
    total = 0.0
    for each in (pid, *descendants_of(pid)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return total


def rss_mib(pid: int) -> float:
    """Return the memory that a process has in use."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for models that are made on the spot."""
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as folder:
        yield Path(folder)
