"""A service process: its actor, how that starts, drains and stops, and the `main` of services."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog
import uvloop

from common import errors
from common.beacon import BeaconFile
from common.config import ServiceConfig, Settings, load
from common.host import raise_open_files_limit
from common.link.transport import Transport
from common.messages.address import Address
from common.run_dir import private_run_dir
from common.telemetry import log, trace
from common.telemetry.line_writer import STDERR, LineWriter

S = TypeVar("S", bound=Settings)
TICK_S = 0.1
LINGER_S = 5.0  # for messages that still wait, on an orderly exit
STOP_S = 10.0  # for an actor's own clean-up
LAST_LINES_S = 1.0  # for the log, if its reader is slow
END_S = STOP_S + LINGER_S + 15.0  # for all of the end; a process that takes longer hangs


class Actor(Protocol):
    """A service's actor: private state, one inbox, messages handled one at a time, no blocking.

    It only translates messages; pure domain objects decide. `run_service` calls the handlers on
    the loop, one at a time and to completion: start; then receive, peer_lost and tick in any
    order; drain once; receive, peer_lost and tick again until `drained`; stop.

    An exception from a handler is logged and ends only that call; `FatalError` ends the process.
    The actor raises an exception of one of its tasks again from its next `tick`.
    """

    async def start(self, transport: Transport) -> None:
        """Load what the service needs; messages are delivered after this returns."""

    def receive(self, message: Any, sender: Address) -> None:
        """Handle one message of this actor's inbox union."""

    def peer_lost(self, peer: Address) -> None:
        """End what concerns this peer: its outbox was not drained for too long."""

    def tick(self, now_s: float) -> None:
        """Do what is due at this `time.monotonic()`, such as heartbeats: ten times a second."""

    @property
    def ready(self) -> bool:
        """Whether it can serve now; read on every tick once it has started."""

    @property
    def longest_block_s(self) -> float:
        """How long its calls and tasks may hold up the loop without being ill; 0 if they never do.

        A process that is silent for longer is killed by who supervises it.
        """

    def drain(self) -> None:
        """Become unready, and let nothing new come; what runs or is on its way goes on."""

    @property
    def drained(self) -> bool:
        """Whether all work has ended, so that the process may stop."""

    async def stop(self) -> None:
        """End what still runs (as `moved` where that applies) and release resources."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a running service depends on."""

    run_dir: str = ""  # for the beacon; empty: there is none
    grace_s: float = 30.0  # bounds the drain
    launcher_fd: int | None = None  # EOF on it means that the launcher is gone
    on_tick: Callable[[], None] = lambda: None  # called after each tick of the actor


def run_service(name: str, actor: Actor, transport: Callable[[], Transport], watch: Watch) -> int:
    """Run one actor in this process until a signal; returns the exit status.

    `transport` is called on the loop. The status is 0 after SIGTERM, SIGINT or the launcher's end,
    128 + the signal's number when a second signal cut the drain short, and 1 after a FatalError.
    """
    return uvloop.run(_Life(name, actor, watch).run(transport))


class _Life:
    def __init__(self, name: str, actor: Actor, watch: Watch) -> None:
        self._actor = actor
        self._watch = watch
        self._log = structlog.get_logger()
        self._beacon = BeaconFile(watch.run_dir, name)
        self._wake = asyncio.Event()  # something below changed
        self._starting: asyncio.Task[None] | None = None
        self._draining = False
        self._urgent = 0  # the second signal's number
        self._fatal: errors.FatalError | None = None

    async def run(self, make_transport: Callable[[], Transport]) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        launcher_fd = self._watch.launcher_fd
        if launcher_fd is not None:
            loop.add_reader(launcher_fd, self._launcher_spoke, launcher_fd)
        transport = make_transport()
        try:
            if await self._start(transport):
                peer_lost = partial(self._guarded, "peer_lost", self._actor.peer_lost)
                transport.open(self._receive, peer_lost)
                await self._serve()
        finally:
            with contextlib.suppress(OSError):  # the end goes on without a sign of life, too
                self._beacon.stopping(time.monotonic(), END_S)
            await self._stop(transport)
            self._beacon.remove()
        if self._fatal is not None:
            return errors.EXIT_FATAL
        return errors.EXIT_SIGNALLED + self._urgent if self._urgent else 0

    async def _start(self, transport: Transport) -> bool:
        """Start the actor; returns False if a signal or a fatal error came first."""
        started_s = time.monotonic()
        self._starting = asyncio.ensure_future(self._actor.start(transport))
        try:
            with self._beacon.starting():
                await self._starting
        except asyncio.CancelledError:
            if not self._draining:
                raise
            return False
        except errors.FatalError as error:
            self._die(error)
            return False
        finally:
            self._starting = None
        self._log.info("started", seconds=round(time.monotonic() - started_s, 3))
        return True

    async def _serve(self) -> None:
        """Tick until a signal, then drain within the grace time."""
        if not self._draining:
            await self._tick_until(lambda: self._draining, float("inf"))
        if self._fatal is not None:
            return
        self._log.info("draining", grace_s=self._watch.grace_s)
        self._guarded("drain", self._actor.drain)
        self._tick(time.monotonic())  # its heartbeats announce the drain even if no work is left
        deadline_s = time.monotonic() + self._watch.grace_s
        await self._tick_until(lambda: bool(self._urgent) or self._actor.drained, deadline_s)

    async def _tick_until(self, done: Callable[[], bool], deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        next_s = time.monotonic()
        while self._fatal is None and not done():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return
            if now_s >= next_s:
                self._tick(now_s)
                next_s = max(next_s + TICK_S, now_s + TICK_S / 2)  # no burst after a long step
            self._wake.clear()
            timer = loop.call_later(max(0.0, next_s - now_s), self._wake.set)
            await self._wake.wait()
            timer.cancel()

    def _tick(self, now_s: float) -> None:
        self._guarded("tick", self._actor.tick, now_s)
        self._guarded("on_tick", self._watch.on_tick)
        ready = self._actor.ready and not self._draining
        self._guarded("beacon", self._beacon.update, ready, now_s, self._actor.longest_block_s)

    async def _stop(self, transport: Transport) -> None:
        hurry = bool(self._urgent) or self._fatal is not None
        try:
            await asyncio.wait_for(self._actor.stop(), 1.0 if hurry else STOP_S)
        except Exception as error:
            self._log.error("stop failed", exc_info=error)
        try:
            await transport.close(0.0 if self._urgent else LINGER_S)
        except Exception as error:
            self._log.error("closing the links failed", exc_info=error)
        self._log.info("stopped")

    def _receive(self, message: object, sender: Address) -> None:
        try:
            self._actor.receive(message, sender)
        except errors.FatalError as error:
            self._die(error)
        except Exception as error:
            tag = getattr(message, "TAG", type(message).__name__)
            self._log.error("message failed", tag=tag, sender=sender.endpoint, exc_info=error)

    def _guarded(self, what: str, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except errors.FatalError as error:
            self._die(error)
        except Exception as error:
            self._log.error(f"{what} failed", exc_info=error)

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, errors.FatalError):
            self._die(error)
            return
        self._log.error(
            "callback failed",
            where=str(context.get("message", "")),
            exc_info=error if isinstance(error, BaseException) else None,
        )

    def _die(self, error: errors.FatalError) -> None:
        self._log.critical("fatal", error=str(error), exc_info=error.__cause__ or None)
        self._fatal = error
        self._wake.set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._draining:
            self._urgent = int(number)
            self._wake.set()
            return
        self._begin_drain(number.name)

    def _launcher_spoke(self, fd: int) -> None:
        if os.read(fd, 512):
            return
        asyncio.get_running_loop().remove_reader(fd)
        if not self._draining:
            self._begin_drain("the launcher is gone")

    def _begin_drain(self, why: str) -> None:
        self._log.info("ending", why=why)
        self._draining = True
        self._wake.set()
        if self._starting is not None:
            self._starting.cancel()


def service_main(
    service: str,
    settings_type: type[S],
    inbox: Any,
    make: Callable[[ServiceConfig[S]], Actor],
) -> int:
    """Run one service in this process until a signal; returns the exit status.

    `service` names the table of `settings_type`; `inbox` is the union of the messages that the
    actor takes. If `make` or the actor's `start` raises `ConfigError` or `ModelError`, the status
    is 78, and a launcher does not try again. The setting `grace_s` bounds the drain.
    """
    arguments = _arguments(service)
    stderr = LineWriter(STDERR, log.warn_of_dropped)
    raise_open_files_limit()  # each link takes one or two, and in a router each client one
    try:
        config = load(settings_type, service, arguments.config, os.environ, arguments.name)
        log.configure(config.name, service, config.telemetry, stderr)
        log.warn_of_renamed(config.renamed)
        with private_run_dir(config.links.run_dir) as run_dir:
            links = config.links.model_copy(update={"run_dir": run_dir})
            return _run(replace(config, links=links), inbox, make)
    except (errors.ConfigError, errors.ModelError, errors.InboxTaken) as error:
        stderr.write(f"slipstream {service}: {error}\n")
        return errors.EXIT_FATAL if isinstance(error, errors.InboxTaken) else errors.EXIT_CONFIG
    finally:
        stderr.close(LAST_LINES_S)
        gc.freeze()  # else the interpreter looks at all modules as it ends: 0.6 s of torch's


def _run(config: ServiceConfig[S], inbox: Any, make: Callable[[ServiceConfig[S]], Actor]) -> int:
    # ZeroMQ is loaded after the settings are read: a mistake in them is reported at once.
    from common.link.sockets import ZmqTransport

    def bind() -> Transport:
        transport = ZmqTransport(config.links, config.name, inbox)
        log.describe_process(instance_id=transport.address.instance_id)
        return transport

    watch = Watch(
        run_dir=config.links.run_dir,
        grace_s=float(getattr(config.own, "grace_s", 30.0)),
        launcher_fd=config.launcher_fd,
        on_tick=trace.flush,
    )
    trace.configure(config.name, config.service, config.telemetry)
    try:
        return run_service(config.name, make(config), bind, watch)
    finally:
        trace.shutdown()


def _arguments(service: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}",
        description=f"Run the {service} service alone. `slipstream serve` runs all four.",
        epilog="Every setting can also come from the environment: SLIPSTREAM_TABLE__FIELD.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings, as TOML (default: $SLIPSTREAM_CONFIG)"
    )
    parser.add_argument(
        "--name",
        default=service,
        help="name of this instance, unique in its run_dir (default: %(default)s)",
    )
    return parser.parse_args()
