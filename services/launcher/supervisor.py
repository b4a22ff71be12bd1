"""The processes of one launch: started, watched, restarted, drained in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from common.beacon import Beacon, beacon_path, is_ready, read_beacon
from common.errors import EXIT_CONFIG, EXIT_FATAL, EXIT_SIGNALLED
from services.launcher.front import Front

POLL_S = 0.05
WATCH_S = 0.5  # between two looks at the beacons
SAY_WAITING_S = 10.0
MAX_EARLY_DEATHS = 3  # of one process, before the ring was ever ready
KILL_AFTER_S = 10.0  # beyond the services' own grace time
UNREADY_GRACE_S = 1.0  # what is still loading has nothing to finish
MAX_LINE_BYTES = 64 << 10
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0


@dataclass(slots=True)
class Child:
    """The process of one service instance, through all restarts; it inherits `env` and `fds`."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    fds: tuple[int, ...]
    num_deaths: int = 0  # in a row, each less than a minute after the start
    started_s: float = 0.0
    hung: bool = False  # and was killed for it
    has_spoken: bool = False  # this process has
    _process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    def start(self) -> int:
        """Start the process; returns the reading end of its output."""
        read_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                pass_fds=self.fds,
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self.started_s = time.monotonic()
        self.hung = self.has_spoken = False
        return read_fd

    def hangs(self, run_dir: str, now_s: float, since_s: float) -> bool:
        """Whether it says nothing for longer than it may, since `since_s`, or never began to."""
        if self._process is None:
            return False
        beacon = read_beacon(run_dir, self.name)
        if beacon is None or beacon.pid != self._process.pid:
            beacon = Beacon(self._process.pid, False, self.started_s)
            return not self.has_spoken and beacon.hangs(now_s, since_s)
        self.has_spoken = True
        return beacon.hangs(now_s, since_s)

    def reap(self) -> int | None:
        """Return the status of a process that has just died, None if it has not."""
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        self.kill()  # what it left behind in its session: the workers of a pool
        self._process = None
        return status

    def back_off(self, now_s: float) -> float:
        """Count a death; return the seconds to wait before the process is started again."""
        if now_s - self.started_s >= HEALTHY_AFTER_S:
            self.num_deaths = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.num_deaths, 10))
        self.num_deaths += 1
        return delay_s

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its own children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def service_command(service: str, name: str, config: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"services.{service}", "--config", config, "--name", name)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Lines:
    """Cuts a child's output into lines and passes them on whole."""

    def __init__(self, fd: int, write: Callable[[str], None]) -> None:
        self.fd = fd
        self._write = write
        self._rest = b""

    def read(self) -> bool:
        """Read what is there; at the end of the pipe close it and return False."""
        try:
            data = os.read(self.fd, MAX_LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if line.strip():
                self._write(line.decode("utf-8", "replace"))
        if not data:
            os.close(self.fd)
        return bool(data)


class Supervisor:
    """Supervises the children of one launch; made and used on one running loop.

    `write` is called with a child's name and each line that it prints. EOF on `starter_fd` means
    that the process that started this launch is gone.
    """

    def __init__(
        self,
        children: list[Child],
        run_dir: str,
        grace_s: float,
        write: Callable[[str, str], None],
        starter_fd: int | None = None,
    ) -> None:
        self._children = children
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._write = write
        self._starter_fd = starter_fd
        self._log = structlog.get_logger()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # a child died or a signal came
        self._outputs: set[Lines] = set()
        self._restarts: dict[str, asyncio.TimerHandle] = {}
        self._was_ready = False
        self._ending = False
        self._urgent = False
        self._status = 0
        self._watch: asyncio.TimerHandle | None = None
        self._watched_s = self._awake_since_s = time.monotonic()

    async def run(self, front: Front, announce: Callable[[float], None]) -> int:
        """Run until a signal; returns the launch's exit status.

        `announce` is called with the seconds that the start took, once all services are ready and
        the API answers. The status is 0 after a drain, 130 if that was cut short, 78 if a service
        cannot work with its settings, and 1 if a process died several times before the ring was
        ready.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if self._starter_fd is not None:
            self._loop.add_reader(self._starter_fd, self._starter_gone, self._starter_fd)
        began_s = time.monotonic()
        try:
            for child in self._children:
                self._start(child)
            self._look()
            if await self._wait_until_ready(front):
                announce(time.monotonic() - began_s)
            while not self._ending:
                await self._wait(None)
            front.close()
            await self._drain()
        finally:
            await self._end(self._children, 0.0)
            if self._watch is not None:
                self._watch.cancel()
            for lines in self._outputs:
                lines.read()
        return self._status

    async def _wait_until_ready(self, front: Front) -> bool:
        say_s = time.monotonic() + SAY_WAITING_S
        while not self._ending:
            now_s = time.monotonic()
            unready = [c.name for c in self._children if not is_ready(self._run_dir, c.name, now_s)]
            if not unready and await front.ready():
                self._was_ready = True
                return True
            if time.monotonic() >= say_s:
                say_s += SAY_WAITING_S
                self._log.info("still starting", waiting_for=", ".join(unready) or "the API")
            await self._wait(POLL_S)
        return False

    def _start(self, child: Child) -> None:
        self._restarts.pop(child.name, None)
        lines = Lines(child.start(), lambda line: self._write(child.name, line))
        self._outputs.add(lines)
        self._loop.add_reader(lines.fd, self._read, lines)

    def _read(self, lines: Lines) -> None:
        if not lines.read():
            self._outputs.discard(lines)
            self._loop.remove_reader(lines.fd)

    def _look(self) -> None:
        """Kill what hangs; it is then started again as everything that dies is."""
        now_s = time.monotonic()
        if now_s - self._watched_s > 2 * WATCH_S:  # this process stood still, the others may have
            self._awake_since_s = now_s
        self._watched_s = now_s
        for child in self._children:
            if not child.hung and child.hangs(self._run_dir, now_s, self._awake_since_s):
                self._log.error("hangs; killing it", process=child.name)
                child.hung = True
                child.kill()
        self._watch = self._loop.call_later(WATCH_S, self._look)

    def _reap(self) -> None:
        for child in self._children:
            status = child.reap()
            if status is not None:
                with contextlib.suppress(OSError):
                    os.unlink(beacon_path(self._run_dir, child.name))
                self._changed.set()
                if not self._ending:
                    self._died(child, status)

    def _died(self, child: Child, status: int) -> None:
        now_s = time.monotonic()
        log = self._log.bind(
            lived_s=round(now_s - child.started_s, 1),
            process=child.name,
            how="killed because it hung" if child.hung else describe_status(status),
        )
        delay_s = child.back_off(now_s)
        if status == EXIT_CONFIG and not self._was_ready:  # later on, the settings have worked
            self._begin_end(EXIT_CONFIG)
        elif not self._was_ready and child.num_deaths >= MAX_EARLY_DEATHS:
            log.error("died again; giving up")
            self._begin_end(EXIT_FATAL)
        else:
            log.error("died; starting it again", in_s=delay_s)
            self._restarts[child.name] = self._loop.call_later(delay_s, self._start, child)

    def _signalled(self, number: signal.Signals) -> None:
        if self._ending:
            self._urgent = True
            self._status = EXIT_SIGNALLED + int(number)
            self._changed.set()
            return
        self._log.info("draining; a second signal ends it at once", signal=number.name)
        self._begin_end()

    def _starter_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        if not self._ending:
            self._log.info("draining; the process that started this server is gone")
            self._begin_end()

    def _begin_end(self, status: int = 0) -> None:
        self._status = status
        self._ending = True
        for timer in self._restarts.values():
            timer.cancel()
        self._changed.set()

    async def _drain(self) -> None:
        if not self._was_ready:
            await self._end(self._children, UNREADY_GRACE_S)
            return
        routers = [child for child in self._children if child.name.startswith("router-")]
        workers = [child for child in self._children if child not in routers]
        # Routers first: the requests that they have accepted still need the workers.
        for stage in (routers, workers):
            await self._end(stage, self._grace_s + KILL_AFTER_S)

    async def _end(self, children: list[Child], within_s: float) -> None:
        """Terminate these children, and kill those that have not ended in time."""
        deadline_s = time.monotonic() + within_s
        if within_s > 0:
            for child in children:
                child.terminate()
        while any(child.alive for child in children):
            left_s = deadline_s - time.monotonic()
            if self._urgent or left_s <= 0:
                break
            await self._wait(left_s)
        for child in children:
            if child.alive:
                self._log.warning("killed", process=child.name)
                child.kill()
        while any(child.alive for child in children):
            self._reap()
            await asyncio.sleep(0.01)

    async def _wait(self, timeout_s: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
