"""The Ray actor of one replica: the service's process on its node, with a supervisor of its own.

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
from common.telemetry import log
from common.telemetry.log import STATUS
from services.launcher.child import Child, describe_status, service_command
from services.launcher.drafter import with_drafter
from services.launcher.front import Front
from services.launcher.launch import write_anew, write_settings
from services.launcher.model import find_model
from services.launcher.on_ray.places import Needs, Spot, tables_of_replica
from services.launcher.plan import Counts, Plan, environment_of, toml_text
from services.launcher.preflight import check, inspect, look
from services.launcher.supervisor import Supervisor


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
    failed: int = 0  # the status with which its process ended for good
    complaint: str = ""


class ServiceProcess:
    """Has one process supervised from `begin` on; all methods run on the actor's loop."""

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
        self._supervisor: Supervisor | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self._name  # Ray writes it before each line of the log

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
            write_anew(self._spot.routers, "\n".join(routers))
            ready = is_ready(self._spot.run_dir, self._name, time.monotonic())
            if ready and self._front is not None:
                ready = await self._front.ready()
            self._report = replace(self._report, ready=ready)
        return self._report

    async def end(self, urgent: bool) -> None:
        """Drain the process, or kill it; it is not started again."""
        if self._supervisor is not None:
            self._supervisor.end(urgent)
        elif self._task is not None:  # it waits for something, such as a download
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, assignment: Assignment) -> None:
        log.configure(self._name, self._service, assignment.plan.telemetry)
        try:
            remove_abandoned(time.time())
            with (
                private_run_dir() as run_dir,
                shared_run_dir(f"{assignment.launch_id} {self._node_id}") as local_dir,
            ):
                status = await self._serve(assignment, Spot(self._host, run_dir, local_dir))
            if status:
                self._fail(status, self._report.complaint or describe_status(status))
        except (ConfigError, ModelError) as error:
            self._fail(EXIT_CONFIG, str(error))
        except Exception as error:
            self._fail(EXIT_FATAL, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._spot = None  # the folder is gone

    async def _serve(self, assignment: Assignment, spot: Spot) -> int:
        """Find the model, and have the process run until the end; returns its status."""
        plan = assignment.plan
        alone = replace(plan, counts=Counts())  # on this node, as far as this replica knows
        is_compute = self._service == "compute"
        machine = look(os.environ) if is_compute else None
        inspected = partial(inspect, alone, machine) if machine else lambda folder: None
        with_weights = is_compute and plan.needs_weights
        find = partial(find_model, plan.model, with_weights=with_weights, inspect=inspected)
        model = await asyncio.to_thread(find)
        if machine:
            check_plan = partial(check, machine=machine, folder=Path(model.path))
            alone = await asyncio.to_thread(with_drafter, alone, check_plan)
            plan = replace(alone, counts=plan.counts)
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
                port = plan.port and plan.port + self._index
                self._front = Front(plan.value("router", "host"), port)
                stack.callback(self._front.close)
                env[LISTEN_FD_VARIABLE] = str(self._front.fd)
                fds = (read_fd, self._front.fd)

            def prepare() -> None:
                placed = self._place(spot, plan)
                write_anew(placed.routers, "\n".join(self._routers))
                tables = tables_of_replica(plan, model, placed, assignment.needs)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(config)
                write_settings(config, toml_text(tables))

            command = service_command(self._service, self._name, config)
            child = Child(self._name, command, env, fds, prepare)
            self._supervisor = Supervisor(
                [self._name], lambda name: child, spot.run_dir, plan.grace_s, self._write
            )
            return await self._supervisor.run(self._front, lambda seconds: None)

    def _place(self, spot: Spot, plan: Plan) -> Spot:
        """Give a router a new port for its inbox, as the last one may not be free any more."""
        if self._front is not None:
            spot = replace(spot, inbox_port=_free_port(self._host))
            host = self._host if is_any(plan.value("router", "host")) else self._front.host
            url = f"http://{f'[{host}]' if ':' in host else host}:{self._front.port}"
            self._report = replace(self._report, inbox=spot.inbox, url=url)
        self._spot = spot
        return spot

    def _fail(self, status: int, complaint: str) -> None:
        self._report = replace(self._report, ready=False, failed=status, complaint=complaint)

    def _write(self, name: str, line: str) -> None:
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
