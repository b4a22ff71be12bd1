"""The router's actor: messages in, decisions by the domain objects, messages and events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from common.link.transport import Transport
from common.messages.address import PREVIOUS_VERSION, PROTOCOL_VERSION, Address, AttemptId
from common.messages.control import Abort, OtherProtocol, RouterAlive, WorkerAlive
from common.messages.queries import Inspection, TimelinePart
from common.messages.text import AttemptRefused, Detokenized, TextGenerated, Tokenized
from common.telemetry import log
from common.telemetry.span_ring import SpanRing
from services.router.admission import AdmissionController, AdmissionLimits, ClientLimits
from services.router.attempts import AbortedAttempt
from services.router.config import RouterSettings
from services.router.dispatch import DRAINING, Dispatch, DispatchLimits
from services.router.fleet import Fleet
from services.router.groups import name_of
from services.router.holding import Patience
from services.router.placement import PLACEMENTS
from services.router.scaling import ScalingSettings
from services.router.server import HttpServer
from services.router.service_signals import ServiceSignals
from services.router.stream import SlowClientLimits, StreamFlusher
from services.router.timeline_handler import TimelineHandler

MISSING_CHECK_S = 0.5  # a heartbeat's interval
KEYS_CHECK_S = 1.0
MAX_ABORTS_PER_BEAT = 256


class RouterActor:
    """Connects HTTP clients with the workers of the ring."""

    def __init__(
        self,
        settings: RouterSettings,
        listen_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = 0  # known once started
        self._settings = settings
        self._listen_fd = listen_fd
        self._clock = clock
        self._fleet = Fleet(PLACEMENTS[settings.placement](), settings.lease_s)
        self._missing_checked_at_s = 0.0
        self._keys_read_at_s = 0.0
        self._log = structlog.get_logger()

    async def start(self, transport: Transport) -> None:
        """Build the parts around the links and listen for clients."""
        settings = self._settings
        self._transport = transport
        self._dispatch = Dispatch(
            transport,
            self._fleet,
            AdmissionController(
                AdmissionLimits(
                    settings.max_in_flight,
                    settings.max_in_flight_tokens,
                    ClientLimits(
                        settings.max_in_flight_per_client,
                        settings.requests_per_s_per_client,
                        settings.tokens_per_minute_per_client,
                        settings.min_priority,
                    ),
                    settings.max_in_flight_choices,
                )
            ),
            DispatchLimits(
                settings.query_timeout_s,
                settings.max_in_flight,
                Patience(settings.hold_s, settings.wake_s, settings.load_s),
                settings.max_wait_s,
                settings.max_ttft_s,
            ),
            self._clock,
        )
        limits = SlowClientLimits(
            settings.slow_client_buffer_bytes,
            settings.slow_client_max_bytes,
            settings.slow_client_timeout_s,
        )
        loop = asyncio.get_running_loop()
        self._flushes = StreamFlusher(loop, limits, self._clock(), self._clock)
        self._texts = SpanRing("text", "take", "rows")
        timeline = TimelineHandler(
            self._dispatch, transport.address, self._clock, (self._texts, self._flushes.spans)
        )
        self._signals = ServiceSignals(
            self._dispatch,
            ScalingSettings(
                settings.scaling_utilization,
                settings.scaling_drain_s,
                settings.scaling_down_after_s,
                settings.scaling_idle_s,
            ),
        )
        self._server = HttpServer(self._dispatch, self._flushes, timeline, self._signals, settings)
        self.port = await self._server.start(self._listen_fd)
        self._log.info("listening", host=settings.host, port=self.port)

    @property
    def dispatch(self) -> Dispatch:
        return self._dispatch

    @property
    def routes(self) -> list[tuple[str, str]]:
        return self._server.routes

    @property
    def ready(self) -> bool:
        return self._dispatch.ready

    @property
    def longest_block_s(self) -> float:
        return 0.0

    def receive(self, message: Any, sender: Address) -> None:
        dispatch = self._dispatch
        match message:
            case TextGenerated():
                began_s = self._clock()
                aborted = dispatch.inflight.text(message, began_s)
                self._texts.note(began_s, self._clock(), len(message.counters))
                if aborted or dispatch.inflight.displaced:
                    self._abort(aborted, sender)
            case WorkerAlive():
                self._heartbeat(message, sender)
                return
            case AttemptRefused():
                refused = dispatch.recovery.judged(message)
                self._abort(dispatch.inflight.refused(refused, self._clock()), sender)
            case Tokenized() | Detokenized() | TimelinePart() | Inspection():
                dispatch.queries.answered(message)
            case OtherProtocol(version, WorkerAlive.TAG):
                readable = f"{PREVIOUS_VERSION} and {PROTOCOL_VERSION}"
                self._refuse(sender, f"it writes protocol {version}, this router reads {readable}")
                # It can read no answer, but it logs where one comes from.
                self._transport.send(sender, RouterAlive(self._transport.address, 0))
        self._fleet.heard(sender.instance_id, self._clock())

    def peer_lost(self, peer: Address) -> None:
        """Give up a worker that is not there, or accepts no messages any more."""
        why = self._transport.why_lost
        self._fleet.remove(peer.instance_id, self._clock(), why)
        self._lose(peer, why)

    def tick(self, now_s: float) -> None:
        """Check leases, probe silent workers, find lost attempts, retry slow clients."""
        self._server.status.ticked_at_s = time.monotonic()
        self._flushes.tick(now_s)
        self._server.tick(now_s)
        if now_s - self._keys_read_at_s >= KEYS_CHECK_S:
            self._keys_read_at_s = now_s
            self._server.keys.reload()
        for expired in self._fleet.judge(now_s, self._transport.inbox_empty):
            self._lose(expired.peer, expired.reason)
        for worker in self._fleet.to_probe(now_s):
            self._transport.probe(worker.address)
        if now_s - self._missing_checked_at_s >= MISSING_CHECK_S:
            self._missing_checked_at_s = now_s
            aborted = self._dispatch.inflight.lose_missing(self._fleet.beaten_since_s, now_s)
            if aborted:
                self._named(aborted).warning("attempts lost on their way")
                self._dispatch.abort(aborted)
        self._dispatch.tick(now_s)
        self._signals.tick(now_s)
        self._report_breakers()

    def drain(self) -> None:
        """Accept no more connections; finish what runs and what comes on those that are open."""
        self._dispatch.draining = True
        self._server.drain()

    @property
    def drained(self) -> bool:
        return self._server.drained

    async def stop(self) -> None:
        """Fail what still runs, send the last events, and close every connection."""
        dispatch = self._dispatch
        dispatch.draining = dispatch.closed = True
        dispatch.abort(dispatch.inflight.fail_all(DRAINING))
        dispatch.queries.fail_all(DRAINING)
        await self._server.stop()
        for worker in self._fleet.workers():
            self._transport.send(
                worker.address, RouterAlive(self._transport.address, 0, leaving=True)
            )

    def _heartbeat(self, message: WorkerAlive, sender: Address) -> None:
        """Register or renew a worker, answer it, and compare its attempts with the table."""
        if message.address.instance_id != sender.instance_id:
            self._log.warning("heartbeat for another instance", sender=sender.endpoint)
            return
        now_s = self._clock()
        if why := self._fleet.mismatch(message.address):
            self._refuse(message.address, why)
            return
        instance_id = message.address.instance_id
        if self._fleet.has_replaced(instance_id):  # it no longer exists
            return
        known = self._fleet.worker(instance_id)
        takes_requests = known is not None and known.accepts
        for replaced in self._fleet.alive(message, now_s):
            self._lose(replaced, "replaced")
        num_open = self._dispatch.num_at(instance_id) if message.draining else 0
        self._transport.send(
            message.address, RouterAlive(self._transport.address, message.beat, num_open)
        )
        worker = self._fleet.worker(instance_id)
        if worker is None:
            return
        if known is None or (worker.accepts and not takes_requests):
            self._log.info(
                "worker loads" if message.model.loading else "worker registered",
                service=message.service,
                endpoint=message.address.endpoint,
                model=message.model.name,
                revision=message.model.revision,
            )
            self._dispatch.arrived()
        dispatch = self._dispatch
        listed = dispatch.inflight.listed(instance_id, message.open_counters, now_s)
        unknown = frozenset(counter for counter in listed if counter not in dispatch.queries)
        # Only if listed twice: an attempt that has just ended may still be in the first list.
        again = sorted(unknown & worker.unknown)[:MAX_ABORTS_PER_BEAT]
        worker.unknown = unknown
        for counter in again:
            attempt = AttemptId(self._transport.address.instance_id, counter)
            self._transport.send(message.address, Abort(attempt, "unknown"))

    def _report_breakers(self) -> None:
        for each in self._fleet.breakers.changes():
            name = name_of(Address(each.endpoint, ""))
            if each.num_failures:
                seconds, failures = round(each.for_s, 1), each.num_failures
                self._log.warning(
                    "replica left alone", name=name, failures=failures, why=each.why, s=seconds
                )
            else:
                self._log.info("replica used again", name=name)

    def _refuse(self, worker: Address, why: str) -> None:
        why += "; run releases that are next to each other"
        if self._fleet.refuse(worker, why, self._clock()):
            self._log.error("worker refused", endpoint=worker.endpoint, why=why)

    def _abort(self, aborted: list[AbortedAttempt], sender: Address) -> None:
        lost = [attempt for attempt in aborted if attempt.reason == "lost"]
        if lost:
            self._named(lost).warning("rows lost", sender=sender.endpoint)
        self._dispatch.abort(aborted)
        self._dispatch.recovery.recover_new()

    def _named(self, aborted: list[AbortedAttempt]) -> FilteringBoundLogger:
        own = self._transport.address.instance_id
        return log.for_attempts(AttemptId(own, attempt.counter) for attempt in aborted)

    def _lose(self, peer: Address, why: str) -> None:
        """Send the requests at a worker that the fleet has removed elsewhere."""
        now_s = self._clock()
        aborted = self._dispatch.inflight.lose_worker(peer.instance_id, now_s)
        self._log.warning("worker lost", why=why, endpoint=peer.endpoint, attempts=len(aborted))
        self._dispatch.abort(aborted)
        self._dispatch.recovery.recover()
        self._dispatch.queries.lose_worker(peer.instance_id)
        if why != "hung":
            self._transport.forget(peer)
