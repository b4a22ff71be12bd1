"""All processes of one launch: started, watched, started again, drained in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

import structlog

from common.exit_status import EXIT_CONFIG, EXIT_FATAL, EXIT_SIGNALLED
from common.readiness_file import is_fresh, path_of
from services.launcher.child import Child, Lines, describe_status
from services.launcher.front import Front

POLL_S = 0.05
SAY_WAITING_S = 10.0
MAX_EARLY_DEATHS = 3  # of one process, before the ring was ever ready
KILL_AFTER_S = 10.0  # beyond the services' own grace time
UNREADY_GRACE_S = 1.0  # what is still loading has nothing to finish


class Ring:
    """Supervises the children of one launch; made and used on one running loop.

    `write` takes the children's lines with the name of the child. EOF on `starter_fd` says that
    whoever the launch was started for is gone.
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

    async def run(self, front: Front, announce: Callable[[float], None]) -> int:
        """Run until told to end; returns the launch's exit status.

        `announce` is called with the seconds that the start took, once all beacons are lit and
        the API answers. The status is 0 after a drain, 130 when that was cut
        short, 78 when a service cannot work with its settings, and 1 when a process died again
        and again before the ring was ready.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._told_to_end, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if self._starter_fd is not None:
            self._loop.add_reader(self._starter_fd, self._starter_gone, self._starter_fd)
        began_s = time.monotonic()
        try:
            for child in self._children:
                self._start(child)
            if await self._becomes_ready(front):
                announce(time.monotonic() - began_s)
            while not self._ending:
                await self._wait(None)
            front.close()
            await self._drain()
        finally:
            await self._end(self._children, 0.0)
            while self._outputs:
                self._read(next(iter(self._outputs)), to_the_end=True)
        return self._status

    async def _becomes_ready(self, front: Front) -> bool:
        say_s = time.monotonic() + SAY_WAITING_S
        while not self._ending:
            dark = [c.name for c in self._children if not is_fresh(self._run_dir, c.name)]
            if not dark and await front.ready():
                self._was_ready = True
                return True
            if time.monotonic() >= say_s:
                say_s += SAY_WAITING_S
                self._log.info("still starting", waiting_for=", ".join(dark) or "the API")
            await self._wait(POLL_S)
        return False

    def _start(self, child: Child) -> None:
        self._restarts.pop(child.name, None)
        lines = Lines(child.start(), lambda line: self._write(child.name, line))
        self._outputs.add(lines)
        self._loop.add_reader(lines.fd, self._read, lines)

    def _read(self, lines: Lines, to_the_end: bool = False) -> None:
        open_still = lines.read()
        if not open_still or to_the_end:
            self._outputs.discard(lines)
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(lines.fd)

    def _reap(self) -> None:
        for child in self._children:
            status = child.reap()
            if status is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path_of(self._run_dir, child.name))
                self._changed.set()
                if not self._ending:
                    self._died(child, status)

    def _died(self, child: Child, status: int) -> None:
        now_s = time.monotonic()
        what = {"process": child.name, "how": describe_status(status)}
        lived_s = round(now_s - child.started_s, 1)
        delay_s = child.policy.died(now_s)
        if status == EXIT_CONFIG:
            self._give_up(EXIT_CONFIG)
        elif not self._was_ready and child.policy.num_deaths >= MAX_EARLY_DEATHS:
            self._log.error("died again; giving up", lived_s=lived_s, **what)
            self._give_up(EXIT_FATAL)
        else:
            self._log.error("died; starting it again", lived_s=lived_s, in_s=delay_s, **what)
            self._restarts[child.name] = self._loop.call_later(delay_s, self._start, child)

    def _give_up(self, status: int) -> None:
        self._status = status
        self._begin_end()

    def _told_to_end(self, number: signal.Signals) -> None:
        if self._ending:
            self._urgent = True
            self._status = EXIT_SIGNALLED + int(number)
            self._changed.set()
            return
        self._log.info("draining; once more ends it at once", signal=number.name)
        self._begin_end()

    def _starter_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        if not self._ending:
            self._log.info("draining; who started it is gone")
            self._begin_end()

    def _begin_end(self) -> None:
        self._ending = True
        for timer in self._restarts.values():
            timer.cancel()
        self._changed.set()

    async def _drain(self) -> None:
        """Routers first: what they have accepted still needs the workers."""
        within_s = self._grace_s + KILL_AFTER_S if self._was_ready else UNREADY_GRACE_S
        routers = [child for child in self._children if child.service == "router"]
        workers = [child for child in self._children if child.service != "router"]
        if not self._was_ready:
            routers, workers = self._children, []
        for stage in (routers, workers):
            await self._end(stage, within_s)

    async def _end(self, children: list[Child], within_s: float) -> None:
        """Tell these to end, and kill those that have not in time."""
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
