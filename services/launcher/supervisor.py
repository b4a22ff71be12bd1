"""The processes of one launch: started, watched, restarted, drained in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from common.beacon import beacon_path, is_ready
from common.errors import EXIT_CONFIG, EXIT_FATAL, EXIT_SIGNALLED, ConfigError
from services.launcher.child import Child, Lines, describe_status
from services.launcher.front import Front
from services.launcher.replicas import MAX_PROCESSES, ScaleError, check_count

POLL_S = 0.05
WATCH_S = 0.5  # between two looks at the beacons
SAY_WAITING_S = 10.0
MAX_EARLY_DEATHS = 3  # of one process, before the ring was ever ready
KILL_AFTER_S = 10.0  # beyond the services' own grace time
UNREADY_GRACE_S = 1.0  # what is still loading has nothing to finish


class Supervisor:
    """Supervises the children of one launch, its `Replicas`; made and used on one running loop.

    `names` are the first ones, of which `child_of` makes processes, and of others later.
    `write` is called with a child's name and each line that it prints, `tell` with the names of all
    that there are, before they start and twice a second.
    """

    def __init__(
        self,
        names: Iterable[str],
        child_of: Callable[[str], Child],
        run_dir: str,
        grace_s: float,
        write: Callable[[str, str], None],
        tell: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        self._child_of = child_of
        self._children = [child_of(name) for name in names]
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._write = write
        self._tell = tell
        self._log = structlog.get_logger()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # a child died or a signal came
        self._outputs: set[Lines] = set()
        # By name: when a dead child starts again, or one that was told to end is killed.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._was_ready = False
        self._ending = False
        self._urgent = False
        self._status = 0
        self._watch: asyncio.TimerHandle | None = None
        self._watched_s = self._awake_since_s = time.monotonic()

    def heed_signals(self, starter_fd: int | None = None) -> None:
        """End at a signal, or at EOF on `starter_fd`: its starter is gone. On the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if starter_fd is not None:
            self._loop.add_reader(starter_fd, self._starter_gone, starter_fd)

    async def run(self, front: Front | None, announce: Callable[[float], None]) -> int:
        """Run until the end is asked for; returns the launch's exit status.

        `announce` is called with the seconds that the start took, once all services are ready and
        the API answers, if there is one here. The status is 0 after a drain, 130 if that was cut
        short, 78 if a service cannot work with its settings, and 1 if a process died several times
        before the ring was ready.
        """
        began_s = time.monotonic()
        self._look()
        try:
            for child in self._children:
                self._start(child)
            if await self._wait_until_ready(front):
                announce(time.monotonic() - began_s)
            while not self._ending:
                await self._wait(None)
            if front is not None:
                front.close()
            await self._drain()
        finally:
            await self._end(self._children, 0.0)
            if self._watch is not None:
                self._watch.cancel()
            for lines in tuple(self._outputs):
                self._read(lines)
        return self._status

    def end(self, urgent: bool = False) -> None:
        """Begin to drain, for as long as the grace time; what is left if `urgent` is killed."""
        if not self._ending:
            self._begin_end()
        self._urgent |= urgent
        self._changed.set()

    async def _wait_until_ready(self, front: Front | None) -> bool:
        say_s = time.monotonic() + SAY_WAITING_S
        while not self._ending:
            now_s = time.monotonic()
            unready = [c.name for c in self._children if not is_ready(self._run_dir, c.name, now_s)]
            if not unready and (front is None or await front.ready()):
                self._was_ready = True
                for child in self._children:
                    child.has_served = True
                return True
            if time.monotonic() >= say_s:
                say_s += SAY_WAITING_S
                self._log.info("still starting", waiting_for=", ".join(unready) or "the API")
            await self._wait(POLL_S)
        return False

    def count(self, service: str) -> int:
        return sum(child.wanted for child in self._of(service))

    async def scale(self, service: str, count: int) -> None:
        """Start more processes, or drain the last ones; one that still ends is started again."""
        check_count(service, count)
        if self._ending or not self._was_ready:
            state = "ending" if self._ending else "still starting"
            raise ScaleError(f"the server is {state}")
        if count != (before := self.count(service)):
            self._log.info("scaled", service=service, before=before, now=count)
        children = self._of(service)
        for child in children[:count]:
            child.wanted = True
        for child in children[count:]:
            self._retire(child)
        names = {f"{service}-{index}" for index in range(MAX_PROCESSES)}
        free = sorted(names - {child.name for child in children}, key=_number_of)
        for name in free[: max(0, count - len(children))]:
            child = self._child_of(name)
            self._children.append(child)
            self._start(child)

    def _of(self, service: str) -> list[Child]:
        """Return a service's children in the order of their numbers."""
        children = [child for child in self._children if child.name.startswith(f"{service}-")]
        return sorted(children, key=lambda child: _number_of(child.name))

    def _retire(self, child: Child) -> None:
        """Let a child end what it has, and then go."""
        child.wanted = False
        if child.retiring:
            return
        if (timer := self._timers.pop(child.name, None)) is not None:
            timer.cancel()
        if not child.alive:  # it was to be started again
            self._children.remove(child)
            return
        child.retiring = True
        child.terminate()
        within_s = self._grace_s + KILL_AFTER_S if child.has_served else UNREADY_GRACE_S
        self._timers[child.name] = self._loop.call_later(within_s, child.kill)

    def _start(self, child: Child) -> None:
        self._timers.pop(child.name, None)
        try:
            read_fd = child.start()
        except (OSError, ConfigError) as error:
            self._died(child, EXIT_FATAL, f"cannot be started: {error}")
            return
        lines = Lines(read_fd, lambda line: self._write(child.name, line))
        self._outputs.add(lines)
        self._loop.add_reader(lines.fd, self._read, lines)

    def _read(self, lines: Lines) -> None:
        if not lines.read():
            self._loop.remove_reader(lines.fd)  # before it is closed: a call may be due already
            self._outputs.discard(lines)
            os.close(lines.fd)

    def _look(self) -> None:
        """Kill what hangs; it is then started again as everything that dies is."""
        self._tell([child.name for child in self._children])
        self._reap()  # where no signal says that one died
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
        for child in tuple(self._children):
            status = child.reap()
            if status is not None:
                with contextlib.suppress(OSError):
                    os.unlink(beacon_path(self._run_dir, child.name))
                self._changed.set()
                if not self._ending and child.retiring:
                    self._retired(child)
                elif not self._ending:
                    self._died(child, status)

    def _retired(self, child: Child) -> None:
        self._timers.pop(child.name).cancel()
        if child.wanted:  # again
            self._start(child)
        else:
            self._children.remove(child)

    def _died(self, child: Child, status: int, how: str = "") -> None:
        now_s = time.monotonic()
        log = self._log.bind(
            lived_s=round(now_s - child.started_s, 1),
            process=child.name,
            how=how or ("killed because it hung" if child.hung else describe_status(status)),
        )
        delay_s = child.back_off(now_s)
        if status == EXIT_CONFIG and not self._was_ready:  # later on, the settings have worked
            self._begin_end(EXIT_CONFIG)
        elif not self._was_ready and child.num_deaths >= MAX_EARLY_DEATHS:
            log.error("died again; giving up")
            self._begin_end(EXIT_FATAL)
        elif not child.has_served and (
            status == EXIT_CONFIG or child.num_deaths >= MAX_EARLY_DEATHS
        ):
            log.error("does not start; the server goes on without it")
            self._children.remove(child)
        else:
            log.error("died; starting it again", in_s=delay_s)
            self._timers[child.name] = self._loop.call_later(delay_s, self._start, child)

    def _signalled(self, number: signal.Signals) -> None:
        if self._ending:
            self._status = EXIT_SIGNALLED + int(number)
        else:
            self._log.info("draining; a second signal ends it at once", signal=number.name)
        self.end(urgent=self._ending)

    def _starter_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        if not self._ending:
            self._log.info("draining; the process that started this server is gone")
            self._begin_end()

    def _begin_end(self, status: int = 0) -> None:
        self._status = status
        self._ending = True
        for timer in self._timers.values():
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


def _number_of(name: str) -> int:
    return int(name.rpartition("-")[2])
