"""The Ray actor of one replica: it supervises the service's process on its node.

Ray makes it again, on another node if need be, when it dies; it starts its process again itself.
Nothing here imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from common.beacon import is_ready
from common.config import LAUNCHER_FD_VARIABLE, LISTEN_FD_VARIABLE
from common.errors import EXIT_CONFIG, EXIT_FATAL, ConfigError, ModelError
from common.link.curve import create_keys
from common.link.resolve import is_any
from common.run_dir import private_run_dir, remove_abandoned, shared_run_dir
from common.telemetry.log import STATUS
from services.launcher.child import Child, Lines, describe_status, service_command
from services.launcher.front import Front
from services.launcher.launch import write_settings
from services.launcher.model import find_model
from services.launcher.on_ray.places import Needs, Spot, tables_of_replica
from services.launcher.plan import Counts, Plan, environment_of, toml_text
from services.launcher.preflight import check, look
from services.launcher.supervisor import MAX_EARLY_DEATHS, POLL_S, WATCH_S


@dataclass(frozen=True, slots=True)
class Assignment:
    """What every replica of a service is told; it holds secrets and is never logged."""

    plan: Plan = field(repr=False)
    needs: Needs
    keys: Mapping[str, bytes] = field(repr=False)
    launch_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the launcher learns of a replica; a router says where it can be reached."""

    host: str
    ready: bool = False
    inbox: str = ""
    url: str = ""
    num_restarts: int = 0
    failed: int = 0  # the status with which its process ended for good
    complaint: str = ""


class ServiceProcess:
    """Supervises one process from `begin` on; all methods run on the actor's loop."""

    def __init__(self, name: str, locate: Callable[[], tuple[str, str]]) -> None:
        """`locate` is called on this actor's node and returns the id and the address of that."""
        self._name = name
        self._node_id, self._host = locate()
        self._service, _, index = name.rpartition("-")
        self._index = int(index)
        self._report = Report(self._host)
        self._routers: list[str] = []
        self._spot: Spot | None = None
        self._front: Front | None = None
        self._child: Child | None = None
        self._was_ready = False
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self._name  # Ray writes it before each line of the log

    @property
    def pid(self) -> int:
        """The process's id; 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def begin(self, assignment: Assignment) -> None:
        """Take what this replica is to do; it starts."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(assignment))

    async def report(self, routers: list[str]) -> Report | None:
        """Take the inboxes of all routers, and say how this replica is; None before `begin`."""
        self._routers = routers
        if self._task is None:
            return None
        if self._spot is not None:
            self._write_routers(self._spot)
            ready = is_ready(self._spot.run_dir, self._name, time.monotonic())
            if ready and self._front is not None:
                ready = await self._front.ready()
            self._was_ready |= ready
            self._report = replace(self._report, ready=ready)
        return self._report

    async def end(self, within_s: float) -> None:
        """Drain the process, or kill it when that takes longer; it is not started again."""
        self._ending = True
        if self._front is not None:
            self._front.close()
        if self._child is not None and self._child.alive:
            self._child.terminate()
        elif self._task is not None:  # it waits for something, such as a download
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)
        if self._child is not None:
            self._child.kill()

    async def _run(self, assignment: Assignment) -> None:
        try:
            remove_abandoned(time.time())
            with (
                private_run_dir() as run_dir,
                shared_run_dir(f"{assignment.launch_id} {self._node_id}") as local_dir,
            ):
                await self._serve(assignment, Spot(self._host, run_dir, local_dir))
        except (ConfigError, ModelError) as error:
            self._fail(EXIT_CONFIG, str(error))
        except Exception as error:
            self._fail(EXIT_FATAL, f"{type(error).__name__}: {error}")
            raise

    async def _serve(self, assignment: Assignment, spot: Spot) -> None:
        """Find the model, write the settings, and run the process until the end."""
        plan = assignment.plan
        alone = replace(plan, counts=Counts())  # on this node, as far as this replica knows
        is_compute = self._service == "compute"
        inspect = partial(check, alone, look(os.environ)) if is_compute else lambda folder: None
        with_weights = is_compute and plan.needs_weights
        find = partial(find_model, plan.model, with_weights=with_weights, inspect=inspect)
        model = await asyncio.to_thread(find)
        create_keys(spot.keys, assignment.keys)
        env = environment_of(self._name, plan, os.environ)
        config = os.path.join(spot.run_dir, "slipstream.toml")
        with contextlib.ExitStack() as stack:
            read_fd, write_fd = os.pipe()  # the process notices when this actor ends
            stack.callback(os.close, read_fd)
            stack.callback(os.close, write_fd)
            env[LAUNCHER_FD_VARIABLE] = str(read_fd)
            fds: tuple[int, ...] = (read_fd,)
            if self._service == "router":
                port = int(plan.value("router", "port"))
                self._front = Front(plan.value("router", "host"), port and port + self._index)
                stack.callback(self._front.close)
                env[LISTEN_FD_VARIABLE] = str(self._front.fd)
                fds = (read_fd, self._front.fd)
            command = service_command(self._service, self._name, config)
            self._child = Child(self._name, command, env, fds)
            while not self._ending:
                if self._front is not None:  # a new port each time: the last may not be free
                    spot = replace(spot, inbox_port=_free_port(self._host))
                    host = self._host if is_any(plan.value("router", "host")) else self._front.host
                    url = f"http://{f'[{host}]' if ':' in host else host}:{self._front.port}"
                    self._report = replace(self._report, inbox=spot.inbox, url=url)
                self._write_routers(spot)
                tables = tables_of_replica(plan, model, spot, assignment.needs)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(config)
                write_settings(config, toml_text(tables))
                self._spot = spot
                await self._live(self._child, spot.run_dir)

    async def _live(self, child: Child, run_dir: str) -> None:
        """Run the process once, from its start to its death and the pause after it."""
        loop = asyncio.get_running_loop()
        lines = Lines(child.start(), self._write)
        loop.add_reader(lines.fd, lambda: lines.read() or loop.remove_reader(lines.fd))
        status = await self._death_of(child, run_dir)
        await asyncio.sleep(POLL_S)  # for its last lines
        if self._ending:
            return
        how = "killed because it hung" if child.hung else describe_status(status)
        self._write(f"{self._name} died: {how}")
        delay_s = child.back_off(time.monotonic())
        if status == EXIT_CONFIG and not self._was_ready:
            self._fail(status, self._report.complaint or how)
        elif not self._was_ready and child.num_deaths >= MAX_EARLY_DEATHS:
            self._fail(EXIT_FATAL, self._report.complaint or f"it died {child.num_deaths} times")
        else:
            self._report = replace(self._report, num_restarts=self._report.num_restarts + 1)
            await asyncio.sleep(delay_s)

    async def _death_of(self, child: Child, run_dir: str) -> int:
        """Watch the process, and kill it if it hangs; returns its status."""
        watched_s = awake_since_s = time.monotonic()
        while (status := child.reap()) is None:
            await asyncio.sleep(POLL_S)
            now_s = time.monotonic()
            if now_s - watched_s > 2 * WATCH_S:  # this process stood still, the other may have
                awake_since_s = now_s
            watched_s = now_s
            if not child.hung and child.hangs(run_dir, now_s, awake_since_s):
                self._write(f"{self._name} hangs; killing it")
                child.hung = True
                child.kill()
        return status

    def _fail(self, status: int, complaint: str) -> None:
        self._ending = True
        self._report = replace(self._report, ready=False, failed=status, complaint=complaint)

    def _write_routers(self, spot: Spot) -> None:
        """Write the list anew in one step: the process reads it whenever it likes."""
        text = "".join(f"{inbox}\n" for inbox in self._routers)
        path = Path(spot.routers)
        if not path.exists() or path.read_text() != text:
            new = path.with_suffix(".new")
            new.write_text(text)
            new.replace(path)

    def _write(self, line: str) -> None:
        if line.startswith(STATUS):
            return  # of a progress line, which only a terminal can show
        if line.startswith("slipstream "):
            self._report = replace(self._report, complaint=line.partition(": ")[2])
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as found:
        return int(found.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
