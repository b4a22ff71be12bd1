"""The links of one actor over ZeroMQ: its bound inbox and a PUSH to each peer, on its own loop.

A ZeroMQ descriptor is edge-triggered: it signals a change once, and any call on its socket may
consume the signal. A reader must therefore continue, or come back, until EVENTS is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from dataclasses import replace
from typing import Any

import structlog
import zmq

from common.config import LinkSettings
from common.errors import ConfigError, MessageTooLarge
from common.link import curve, inbox
from common.link.codec import MAX_FRAMES, Codec
from common.link.peer import PATIENCE_S, Outbox, Peer, connect
from common.link.probe import ENDED
from common.link.resolve import Resolver, sendable, tcp_place
from common.link.transport import Deliver, PeerLost
from common.messages.address import Address, new_instance_id

# Plain integers: an enum of pyzmq's takes 1 us more. EVENTS is asked first, because an empty `recv`
# raises: 5 us in a turn of one message.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_MAX_SOCKETS = 4096  # libzmq's default of 1023 is fewer than a large fleet's links
_BUDGET = 512  # messages a turn: beyond, timers and outboxes have their go
_BUDGET_S = 0.002
_SWEEP_S = 0.1
_FLUSH_S = 0.005
_HANG_UP_S = 0.1
_IDLE_S = 300.0  # a link unused for so long is closed; the next message opens it again


class ZmqTransport:
    """`common.link.transport.Transport` over ZeroMQ; made, used and closed on one running loop."""

    def __init__(self, settings: LinkSettings, name: str, union: Any) -> None:
        """Bind the inbox of the instance `name`; raises `ConfigError` or `InboxTaken`."""
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger()
        self._settings = settings
        self._stats = inbox.LinkStats()
        self._keys: curve.Keys | None = None
        self._authenticator: curve.Authenticator | None = None
        if settings.curve_dir:
            if settings.make_keys:
                curve.make_missing_keys(settings.curve_dir)
            self._keys = curve.load_keys(settings.curve_dir, curve.service_of(name))
        inbox.check_routers(settings, self._keys)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        try:
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            if self._keys is not None:  # before bind: until it runs, libzmq accepts every client
                self._authenticator = curve.Authenticator(self._context, self._keys)
            self._inbox = inbox.bind_inbox(self._context, settings, name, union, self._keys)
        except BaseException:
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.destroy(0)
            raise
        self._inbox_fd = int(self._inbox.socket.getsockopt(zmq.FD))
        self._codec = Codec(union)
        self._address = Address(self._inbox.endpoint, new_instance_id(), self._codec.version)
        self._receiver = inbox.MessageReceiver(self._codec, self._address, self._stats)
        self._resolver = Resolver()
        self._peers: dict[Address, Peer] = {}
        self._inbox_empty = False
        self._drain_handle: asyncio.Handle | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._deliver: Deliver | None = None
        self._peer_lost: PeerLost | None = None
        self._outboxes_empty: asyncio.Event | None = None  # while closing
        self._closed = False
        # A context that is garbage-collected unclosed would wait for ever for its sockets.
        self._abandoned = weakref.finalize(
            self, _close_all, self._context, self._inbox, self._peers, self._authenticator
        )
        self.budget = _BUDGET
        self.why_lost = ""
        self.patience_s = PATIENCE_S

    @property
    def address(self) -> Address:
        return self._address

    @property
    def inbox_empty(self) -> bool:
        return self._inbox_empty

    def stats(self) -> inbox.LinkStats:
        outboxes = [peer.outbox for peer in self._peers.values()]
        return replace(
            self._stats,
            num_waiting=sum(map(len, outboxes)),
            num_links=len(outboxes),
            num_merged=self._stats.num_merged + sum(outbox.num_merged for outbox in outboxes),
            num_refused_keys=self._authenticator.num_refused if self._authenticator else 0,
        )

    def resolve(self, endpoint: str) -> tuple[str, ...]:
        return self._resolver.endpoints(inbox.expand(endpoint, self._settings.run_dir, "router"))

    def open(self, deliver: Deliver, peer_lost: PeerLost) -> None:
        self._deliver = deliver
        self._peer_lost = peer_lost
        self._loop.add_reader(self._inbox_fd, self._drain)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if self._drain_handle is None and not self._closed:
            self._drain_handle = self._loop.call_soon(self._drain)

    def _cancel_drain(self) -> None:
        if self._drain_handle is not None:
            self._drain_handle.cancel()
            self._drain_handle = None

    def _drain(self) -> None:
        """Deliver what has come, within a budget; then come back until EVENTS is empty."""
        self._cancel_drain()
        self._inbox_empty = False
        try:
            self._inbox_empty = self._drain_some()
        finally:
            # Also after an exception of the actor: what is left in the socket signals nothing.
            if not self._inbox_empty:
                self._drain_soon()

    def _drain_some(self) -> bool:
        """Return whether the inbox is empty."""
        deadline_s = time.monotonic() + _BUDGET_S
        for _ in range(self.budget):
            if self._deliver is None:
                return True
            if not int(self._inbox.socket.getsockopt(_EVENTS)) & _POLLIN:
                return True
            frames = self._receive()
            if frames is None:
                continue
            envelope = self._receiver.accept(frames)
            if envelope is not None:
                self._deliver(envelope.message, envelope.sender)
            if time.monotonic() >= deadline_s:
                return False
        return False

    def _receive(self) -> list[bytes] | None:
        socket = self._inbox.socket
        try:
            frames = [socket.recv(_NOBLOCK)]
        except zmq.Again:
            return None
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(_NOBLOCK)
            if len(frames) <= MAX_FRAMES:  # one too many makes it malformed; the rest is read off
                frames.append(frame)
        return frames

    def send(self, to: Address, message: Any) -> None:
        """Send as `Transport.send` does; a peer that no link can be opened to counts as lost."""
        frames = self._codec.encode(message, to, self._address)
        num_bytes = sum(map(len, frames))
        if num_bytes > self._settings.max_message_bytes:
            raise MessageTooLarge(
                f"{type(message).__name__} of {num_bytes} bytes; the limit of [links] "
                f"max_message_bytes is {self._settings.max_message_bytes}"
            )
        peer = self._peers.get(to) or self._connect(to)
        if peer is None:
            return
        now_s = time.monotonic()
        peer.used_s = now_s
        if not peer.outbox and peer.push(frames):
            self._stats.num_sent += 1
            return
        peer.outbox.put(message, frames, num_bytes, now_s)
        self._watch(peer)

    async def all_sent(self, within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while self._resolver.busy or any(peer.outbox for peer in self._peers.values()):
            if time.monotonic() >= until_s:
                return
            await asyncio.sleep(_FLUSH_S)

    def probe(self, to: Address) -> None:
        peer = self._peers.get(to) or self._connect(to)
        if peer is not None:
            peer.to_probe = True

    def _connect(self, to: Address) -> Peer | None:
        if self._closed:
            return None
        try:
            place = tcp_place(to.endpoint)
            if not sendable(to.endpoint):
                raise ConfigError(f"{to.endpoint!r:.80} is no address to connect to")
            shortcut = ""
            if place is not None:
                inbox.require_keys(place, self._keys, self._settings.insecure)
                shortcut = inbox.shortcut_to(to.endpoint, self._settings.local_dir)
            outbox = Outbox(self._settings.max_message_bytes)
            shortcut = shortcut if os.path.exists(shortcut) else ""
            peer = connect(self._context, to, outbox, self._keys, shortcut)
        except (ConfigError, zmq.ZMQError) as error:
            self._log.warning("no link", peer=to.endpoint[:120], error=str(error))
            self._stats.num_dropped += 1
            self._loop.call_soon(self._tell_lost, to, "there can be no link to it")
            return None
        if to.instance_id:  # else it may be for one of those that there are links to
            for other in self._peers.values():
                if other.address.endpoint == to.endpoint and other.address.instance_id:
                    other.succeeded = True
        self._peers[to] = peer
        self._sweep_soon()
        return peer

    def _watch(self, peer: Peer) -> None:
        """Read the link's descriptor while something waits for it."""
        self._sweep_soon()
        if not peer.watched:
            peer.watched = True
            self._loop.add_reader(peer.fd, self._flush, peer)
            self._loop.call_soon(self._flush, peer)

    def _unwatch(self, peer: Peer) -> None:
        if peer.watched:
            peer.watched = False
            self._loop.remove_reader(peer.fd)
        if self._outboxes_empty is not None and not self._held_up:
            self._outboxes_empty.set()

    def _flush(self, peer: Peer) -> None:
        """Send what waits, within a budget, until EVENTS allows no more."""
        if peer.socket.closed:
            return
        outbox = peer.outbox
        for _ in range(self.budget):
            if not outbox:
                self._unwatch(peer)
                return
            first = outbox.first
            if first.frames is None:
                first.frames = self._codec.encode(first.message, peer.address, self._address)
            if not peer.push(first.frames):
                return
            outbox.sent(time.monotonic())
            self._stats.num_sent += 1
        self._loop.call_soon(self._flush, peer)

    def _sweep_soon(self) -> None:
        if self._sweep_handle is None and not self._closed:
            self._sweep_handle = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Give up peers whose messages do not leave, and close links that are not used."""
        self._sweep_handle = None
        now_s = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.takes_messages and peer.outbox:
                self._flush(peer)  # this process may have stood still, not the peer
            why = peer.why_gone(now_s)
            if not why and peer.outbox.overdue(now_s, self.patience_s):
                why = "its messages do not leave"
            if why:
                # A process that has ended says so itself, and its supervisor how; of a link that is
                # cut nobody else does.
                log = self._log.info if why == ENDED else self._log.warning
                log(
                    f"peer lost: {why}",
                    peer=peer.address.endpoint,
                    num_waiting=len(peer.outbox),
                )
                self.forget(peer.address)
                self._stats.num_peers_lost += 1
                self._tell_lost(peer.address, why)
            elif not peer.outbox and now_s - peer.used_s > self._idle_s(peer):
                self.forget(peer.address)
        if self._peers:
            self._sweep_soon()

    def _idle_s(self, peer: Peer) -> float:
        # A link to an earlier instance closes early: no restart should cost a socket for minutes.
        # Not at once: a late message to that instance would open it again, and the new link would
        # look like the successor of the live one.
        return self.patience_s if peer.succeeded else _IDLE_S

    def _tell_lost(self, peer: Address, why: str) -> None:
        self.why_lost = why
        if self._peer_lost is not None and not self._closed:
            self._peer_lost(peer)

    def forget(self, peer: Address) -> None:
        link = self._peers.pop(peer, None)
        if link is not None:
            self._unwatch(link)
            self._stats.num_dropped += len(link.outbox)
            self._stats.num_merged += link.outbox.num_merged
            link.close()

    async def close(self, linger_s: float) -> None:
        if self._closed:
            return
        deadline_s = time.monotonic() + linger_s
        self._loop.remove_reader(self._inbox_fd)
        self._deliver = None
        self._cancel_drain()
        if self._held_up:
            self._outboxes_empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outboxes_empty.wait(), linger_s)
        # libzmq throws away what a full inbox has not read yet when its sender hangs up: 450 of
        # 20,000 messages in one case of two (benchmarks/links.py); a moment is enough to read it.
        await asyncio.sleep(min(_HANG_UP_S, linger_s))
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        self._resolver.close()
        self._inbox.close()
        linger_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
        for peer in self._peers.values():
            self._unwatch(peer)
            self._stats.num_dropped += len(peer.outbox)
            peer.close(linger_ms)
        self._peers.clear()
        if self._authenticator is not None:
            self._authenticator.close()
        self._abandoned.detach()
        # Waits until libzmq has sent what it had taken; the loop goes on meanwhile.
        await self._loop.run_in_executor(None, self._context.term)

    @property
    def _held_up(self) -> bool:
        return any(peer.outbox.holds_up for peer in self._peers.values())


def _close_all(
    context: zmq.Context[Any],
    bound_inbox: inbox.BoundInbox,
    peers: dict[Address, Peer],
    authenticator: curve.Authenticator | None,
) -> None:
    bound_inbox.close()
    for peer in peers.values():
        peer.close()
    if authenticator is not None:
        authenticator.socket.close(0)
    context.term()
