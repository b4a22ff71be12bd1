"""One launch of the whole server on this machine, from the plan to the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from common.config import (
    LAUNCHER_FD_VARIABLE,
    LISTEN_FD_VARIABLE,
    SERVICE_TABLES,
    inherited_fd,
)
from common.errors import EXIT_CONFIG, ConfigError
from common.model_folder import read_pooling
from common.run_dir import private_run_dir, remove_abandoned
from common.telemetry import log
from common.telemetry.line_writer import STDERR, STDOUT, LineWriter
from services.launcher.autoscale import Autoscaler
from services.launcher.child import Child, service_command
from services.launcher.control import CONTROL_SOCKET, serve_control
from services.launcher.drafter import with_drafter
from services.launcher.front import Front, desired_replicas
from services.launcher.model import find_model
from services.launcher.plan import (
    INBOX,
    ROUTERS_FILE,
    SETTINGS,
    Cores,
    Counts,
    Plan,
    check_gpus_for,
    cores_of,
    environment_of,
    gpus_in,
    tables_of_run,
    toml_text,
)
from services.launcher.preflight import check, check_ranks, device_of, inspect, look
from services.launcher.supervisor import Supervisor
from services.launcher.terminal import Terminal

LAST_LINES_S = 1.0  # for standard output and the log, if nobody reads them
QUESTION = "What is the capital of France?"


def launch(plan: Plan, env: Mapping[str, str]) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError or ModelError."""
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(opened_console(plan))
        out, err, terminal = console.out, console.err, console.terminal
        front = Front(plan.value("router", "host"), plan.port)
        stack.callback(front.close)
        machine = look(env)
        check_ranks(plan, device_of(plan, machine), len(gpus_in(env)))
        inspected = partial(inspect, plan, machine)
        model = find_model(plan.model, with_weights=plan.needs_weights, inspect=inspected)
        drafting = with_drafter(plan, partial(check, machine=machine, folder=Path(model.path)))
        for abandoned in remove_abandoned(time.time()):
            structlog.get_logger().info("removed the folder of a killed run", path=abandoned)
        run_dir = stack.enter_context(private_run_dir())
        config = os.path.join(run_dir, "slipstream.toml")
        tables = tables_of_run(drafting, model, run_dir, console.log_format)
        write_settings(config, toml_text(tables))
        read_fd, write_fd = os.pipe()  # the services notice when its writing end closes
        stack.callback(os.close, read_fd)
        stack.callback(os.close, write_fd)
        cores = cores_of(plan, env)
        family = _Family(plan, env, config, (read_fd, front.fd), cores)
        if cores is not None:
            stack.enter_context(_kept_off(cores))

        def write(name: str, line: str) -> None:
            # The user never saw this file.
            terminal.line(name, line.replace(f"{config}: ", ""))

        def tell(names: Sequence[str]) -> None:
            routers = [name for name in names if name.startswith("router-")]
            inboxes = [INBOX.format(run_dir=run_dir, name=name) for name in routers]
            with contextlib.suppress(OSError):  # the disk is full: the next time
                write_anew(os.path.join(run_dir, ROUTERS_FILE), "\n".join(inboxes))

        def announce(seconds: float) -> None:
            terminal.clear()
            name, embeds = model.served_name[0], read_pooling(Path(model.path)) is not None
            out.write(banner(front.url, name, seconds, has_api_keys(plan), embeds))

        async def supervise() -> int:
            names = _first_names(plan.counts)
            supervisor = Supervisor(names, family.child, run_dir, plan.grace_s, write, tell)
            supervisor.heed_signals(inherited_fd(env, LAUNCHER_FD_VARIABLE))
            token = str(tables.get("router", {}).get("metrics_token", ""))
            desired = partial(desired_replicas, front.url, token)
            async with scalable(Autoscaler(supervisor, plan.autoscale, desired), run_dir):
                return await supervisor.run(front, announce)

        status = asyncio.run(supervise())
        if status == EXIT_CONFIG:  # in the log it stands above the ends of the other services
            for name, complaint in terminal.complaints.items():
                err.write(f"slipstream serve: {name} cannot work: {complaint}\n")
        return status


@contextlib.asynccontextmanager
async def scalable(scaler: Autoscaler, run_dir: str) -> AsyncIterator[None]:
    """Let counts change by themselves and by commands."""
    async with serve_control(os.path.join(run_dir, CONTROL_SOCKET), scaler):
        task = asyncio.get_running_loop().create_task(scaler.run())
        try:
            yield
        finally:
            task.cancel()


@dataclass(frozen=True, slots=True)
class Console:
    """Where a launch writes, and in which format logs go to the terminal."""

    out: LineWriter
    err: LineWriter
    terminal: Terminal
    log_format: str


@contextlib.contextmanager
def opened_console(plan: Plan) -> Iterator[Console]:
    """Set up this process's log; at the end wait for the last lines, if somebody reads them."""
    log_format = plan.telemetry.log_format
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    width = max(len(name) for service in SERVICE_TABLES for name in plan.counts.names(service))
    out, err = LineWriter(STDOUT), LineWriter(STDERR, log.warn_of_dropped)
    try:
        terminal = Terminal(err, log_format == "console", width)
        telemetry = plan.telemetry.model_copy(update={"log_format": log_format})
        log.configure("launcher", "launcher", telemetry, terminal)
        log.warn_of_renamed(plan.renamed)
        yield Console(out, err, terminal, log_format)
    finally:
        err.close(LAST_LINES_S)
        out.close(LAST_LINES_S)


def banner(url: str, model: str, seconds: float, needs_key: bool, embeds: bool = False) -> str:
    path = "embeddings" if embeds else "chat/completions"
    asked = QUESTION if embeds else [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": model, "input" if embeds else "messages": asked})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    default_port = SETTINGS["router"].model_fields["port"].default
    chat = "chat" if url.endswith(f":{default_port}") else f"chat {url}"
    talk = f"In a browser: {url}/\nIn a terminal: {_program()} {chat}\n"
    return (
        f"\nSlipstream serves {model} at {url}/v1 (ready after {seconds:.1f} s).\n"
        f"{'' if embeds else talk}In a program:\n"
        f"\n  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{body}'\n"
        "\nCtrl-C ends it.\n\n"
    )


def has_api_keys(plan: Plan) -> bool:
    return bool(plan.value("router", "api_keys").strip("[]()"))


def _program() -> str:
    """`slipstream`, or its path where the shell finds no such command, as after `make serve`."""
    is_named = os.path.basename(sys.argv[0]) == "slipstream"
    return sys.argv[0] if is_named and not shutil.which("slipstream") else "slipstream"


def write_settings(path: str, text: str) -> None:
    """Write them for this user alone, since they may hold API keys; ConfigError if they cannot."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_anew(path: str, text: str) -> None:
    """Let a file say this, in one step, as it is read at any time; OSError."""
    file, new = Path(path), Path(f"{path}.new")
    if not file.exists() or file.read_text() != text:
        new.write_text(text)
        new.replace(file)


@contextlib.contextmanager
def _kept_off(cores: Cores) -> Iterator[None]:
    """Keep this process and its children off `cores.own`, to which compute threads move later."""
    before = os.sched_getaffinity(0)
    logger = structlog.get_logger()
    try:
        os.sched_setaffinity(0, cores.common)
        logger.info("cores given away", own=list(cores.own), common=sorted(cores.common))
    except OSError as error:
        logger.warning("the cores given away cannot be kept free", error=str(error))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class _Family:
    """What all children of a launch have in common; `fds` are its pipe and listening socket."""

    plan: Plan
    env: Mapping[str, str]
    config: str
    fds: tuple[int, int]
    cores: Cores | None

    def child(self, name: str) -> Child:
        """Return a process that is not yet started, such as `compute-0`."""
        service, _, number = name.rpartition("-")
        if service == "compute":
            check_gpus_for(int(number), self.plan, self.env)
        pipe, listening = self.fds
        inherited = environment_of(name, self.plan, self.env)
        inherited[LAUNCHER_FD_VARIABLE] = str(pipe)
        passed: tuple[int, ...] = (pipe,)
        if service == "router":
            inherited[LISTEN_FD_VARIABLE] = str(listening)
            passed = self.fds
        if service == "compute" and self.cores is not None:
            inherited |= self.cores.environment_of(int(number), self.plan.num_processes)
        return Child(name, service_command(service, name, self.config), inherited, passed)


def _first_names(counts: Counts) -> list[str]:
    # Compute first: it takes longest to start.
    services = sorted(SERVICE_TABLES, key=lambda service: service != "compute")
    return [name for service in services for name in counts.names(service)]
