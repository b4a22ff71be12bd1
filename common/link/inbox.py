"""An actor's inbox: binding it, so that no other process has it, and checking what arrives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import structlog
import zmq

from common.config import LinkSettings
from common.errors import ConfigError, InboxTaken, MalformedMessage
from common.link import resolve
from common.link.codec import Codec, Envelope
from common.link.curve import Keys
from common.messages.address import Address, new_instance_id
from common.messages.control import OtherProtocol, RouterAlive, WorkerAlive
from common.run_dir import LOCK_SUFFIX, private_run_dir

# In messages. libzmq gives the sender credit when half of them are read, so messages that merge
# should meet a low mark and wait, merged, in the sender's outbox: with 500 streams and the
# detokenizer behind, a mark of 64 moved 200,000 tokens a second where 4000 moved 100,000, its
# memory stayed at 60 MiB instead of 115, and no outbox was given up for standing still.
# Other messages come at once, and a busy engine may read them only seconds later.
_MERGING_HIGH_WATER_MARK = 64
_HIGH_WATER_MARK = 4000
_KEEPALIVE_S = 10
# May come without an instance id: they find each other.
_CONTROL = (WorkerAlive, RouterAlive, OtherProtocol)
_LOG_INTERVAL_S = 1.0  # a broken or hostile peer must not fill the disk
_PROTOCOL_LOG_INTERVAL_S = 60.0  # it knocks every two seconds for as long as it runs


@dataclass(frozen=True, slots=True)
class BoundInbox:
    """A bound PULL socket, the endpoint that peers use, the lock on an ipc path, the shortcut."""

    socket: zmq.Socket[bytes]
    endpoint: str
    lock: int | None = None
    shortcut: str = ""  # a second path to a tcp inbox, for its own host

    def close(self) -> None:
        self.socket.close(0)
        if self.shortcut:
            with contextlib.suppress(OSError):
                os.unlink(self.shortcut)
        if self.lock is not None:
            os.close(self.lock)


def bind_inbox(
    context: zmq.Context[Any], settings: LinkSettings, name: str, union: Any, keys: Keys | None
) -> BoundInbox:
    """Bind the inbox for the messages of a union; ConfigError, or InboxTaken by another process."""
    endpoint = expand(settings.bind, settings.run_dir, name)
    inbox = _inbox_socket(context, settings, union)
    try:
        if endpoint.startswith("ipc://"):
            if keys is not None:
                keys.protect_inbox(inbox)
            return _bind_ipc(inbox, endpoint, settings)
        return _bind_tcp(inbox, endpoint, settings, keys)
    except BaseException:
        inbox.close(0)
        raise


def expand(endpoint: str, run_dir: str, name: str) -> str:
    """Fill in `{run_dir}` and `{name}`; ConfigError if one is needed and not given."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigError(f"the instance name {name!r} may hold letters, digits and . _ - only")
    if "{run_dir}" in endpoint:
        if not run_dir:
            raise ConfigError(f"[links] run_dir is empty, but {endpoint!r} needs it")
        endpoint = endpoint.replace("{run_dir}", os.path.abspath(run_dir))
    return endpoint.replace("{name}", name)


def check_routers(settings: LinkSettings, keys: Keys | None) -> None:
    """Raise `ConfigError` for a `routers` entry that no message could ever reach."""
    for entry in settings.routers:
        endpoint = expand(entry, settings.run_dir, "router")
        if endpoint.startswith(resolve.LIST_SCHEME):  # its owner may write it later
            continue
        try:
            resolve.require_inbox(endpoint)
            place = resolve.tcp_place(endpoint)
            if place is not None and resolve.is_literal(place.host):
                require_keys(place, keys, settings.insecure)
        except ConfigError as error:
            raise ConfigError(f"[links] routers: {str(error).removeprefix('[links] ')}") from error


def require_keys(place: resolve.TcpPlace, keys: Keys | None, insecure: bool) -> None:
    """Raise `ConfigError` for a tcp place without keys.

    `insecure` is the user's word that the users of this host may join; it opens loopback only.
    """
    is_local = resolve.is_loopback(place.host)
    if keys is None and not (is_local and insecure):
        others = "every user of this host" if is_local else "other hosts"
        raise ConfigError(
            f"[links] {place} can be reached by {others}, so it needs keys: run "
            "`slipstream keys DIR` once per deployment and set curve_dir = DIR everywhere"
        )


def _inbox_socket(
    context: zmq.Context[Any], settings: LinkSettings, union: Any
) -> zmq.Socket[bytes]:
    inbox: zmq.Socket[bytes] = context.socket(zmq.PULL)
    merging = any(hasattr(kind, "merged") for kind in get_args(union) or (union,))
    inbox.setsockopt(zmq.RCVHWM, _MERGING_HIGH_WATER_MARK if merging else _HIGH_WATER_MARK)
    # Of a frame, not of a message: libzmq has no bound on frames, and holds them all before `recv`
    # (20 of 60 MiB: 1.2 GB until they are dropped). Only peers with keys can send any.
    inbox.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
    inbox.setsockopt(zmq.LINGER, 0)
    # A sender whose host is cut off cannot say that it hangs up: its connections would stay.
    inbox.setsockopt(zmq.TCP_KEEPALIVE, 1)
    inbox.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    inbox.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    inbox.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return inbox


def _bind_ipc(inbox: zmq.Socket[bytes], endpoint: str, settings: LinkSettings) -> BoundInbox:
    path = Path(endpoint.removeprefix("ipc://"))
    num_bytes = len(os.fsencode(path))
    if not path.is_absolute() or num_bytes > resolve.MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"[links] bind: {path} has {num_bytes} bytes; an ipc path is absolute and has at most "
            f"{resolve.MAX_IPC_PATH_BYTES}. Set a shorter run_dir"
        )
    with private_run_dir(str(path.parent)):
        lock = _lock(path)
    try:
        inbox.bind(endpoint)  # libzmq replaces the socket file that a dead owner left
    except zmq.ZMQError as error:
        os.close(lock)
        raise ConfigError(f"[links] bind: cannot bind {endpoint}: {error}") from error
    return BoundInbox(inbox, settings.advertise or endpoint, lock)


def _lock(path: Path) -> int:
    """Lock the name beside an ipc socket: without it a second bind would steal the inbox."""
    lock_path = path.with_suffix(LOCK_SUFFIX)
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise InboxTaken(f"{path} belongs to another process that is running") from error
    return descriptor


def _bind_tcp(
    inbox: zmq.Socket[bytes], endpoint: str, settings: LinkSettings, keys: Keys | None
) -> BoundInbox:
    place = resolve.tcp_place(endpoint)
    if place is None:
        raise ConfigError(
            f"[links] bind: {endpoint!r} is neither ipc:///PATH nor tcp://ADDRESS:PORT"
        )
    place = resolve.literal_now(place)
    require_keys(place, keys, settings.insecure)
    unnamed = _bind_unnamed(inbox, settings.local_dir) if settings.local_dir else ""
    if keys is not None:
        keys.protect_inbox(inbox)
    if ":" in place.host:
        inbox.setsockopt(zmq.IPV6, 1)
    try:
        inbox.bind(str(place._replace(port="*")) if place.port == "0" else str(place))
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise InboxTaken(f"{place} belongs to another process that is running") from error
        raise ConfigError(f"[links] bind: cannot bind {place}: {error}") from error
    bound = resolve.tcp_place(inbox.getsockopt_string(zmq.LAST_ENDPOINT))
    assert bound is not None
    endpoint = _advertised(bound, settings)
    shortcut = shortcut_to(endpoint, settings.local_dir)
    if unnamed:
        os.rename(unnamed, shortcut)
    return BoundInbox(inbox, endpoint, shortcut=shortcut)


def _bind_unnamed(inbox: zmq.Socket[bytes], local_dir: str) -> str:
    """Bind the shortcut to a tcp inbox that is bound next and whose port may not be known yet.

    What libzmq binds before a socket has keys does without them: nobody else enters the folder.
    """
    with private_run_dir(local_dir):
        path = os.path.join(local_dir, f"{new_instance_id()}.sock")
    try:
        inbox.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise ConfigError(f"[links] local_dir: cannot bind {path}: {error}") from error
    return path


def shortcut_to(endpoint: str, local_dir: str) -> str:
    """Return the path in `local_dir` of the inbox with this tcp endpoint; empty without one."""
    return os.path.join(local_dir, f"{endpoint.removeprefix('tcp://')}.sock") if local_dir else ""


def _advertised(bound: resolve.TcpPlace, settings: LinkSettings) -> str:
    if settings.advertise:
        place = resolve.tcp_place(settings.advertise)
        if place is None:
            raise ConfigError(f"[links] advertise: {settings.advertise!r} is no tcp://HOST:PORT")
        place = resolve.literal_now(place)
        endpoint = str(place._replace(port=bound.port) if place.port in ("0", "*") else place)
    elif resolve.is_any(bound.host):
        towards = settings.routers[0] if settings.routers else ""
        endpoint = str(bound._replace(host=resolve.own_host(towards)))
    else:
        endpoint = str(bound)
    if not resolve.sendable(endpoint):
        raise ConfigError(f"[links] {endpoint} is no address that peers can connect to")
    return endpoint


@dataclass(slots=True)
class LinkStats:
    """Counters of one actor's links since its start; the last two are of this moment."""

    num_sent: int = 0
    num_malformed: int = 0
    num_misaddressed: int = 0
    num_merged: int = 0
    num_dropped: int = 0  # waited for a peer that was lost or forgotten
    num_peers_lost: int = 0
    num_refused_keys: int = 0
    num_waiting: int = 0
    num_links: int = 0  # over sockets


class MessageReceiver:
    """Accepts messages that parse and are for this instance; counts and drops the others."""

    def __init__(self, codec: Codec, owner: Address, stats: LinkStats) -> None:
        self._codec = codec
        self._owner = owner
        self._stats = stats
        self._log = structlog.get_logger()
        self._logged_s = 0.0
        self._protocol_logged_s = -_PROTOCOL_LOG_INTERVAL_S

    def accept(self, frames: Sequence[bytes]) -> Envelope | None:
        """Return the message, or None if it does not parse or is for another instance."""
        try:
            envelope = self._codec.decode(frames)
        except MalformedMessage as error:
            self._stats.num_malformed += 1
            now_s = time.monotonic()
            if now_s - self._logged_s >= _LOG_INTERVAL_S:
                self._logged_s = now_s
                self._log.warning(
                    "message dropped: it does not parse",
                    num_malformed=self._stats.num_malformed,
                    error=str(error),
                )
            return None
        to = envelope.to_instance_id
        if to == self._owner.instance_id or (not to and isinstance(envelope.message, _CONTROL)):
            if isinstance(envelope.message, OtherProtocol):
                self._log_protocol(envelope.message, envelope.sender)
            return envelope
        self._stats.num_misaddressed += 1
        return None

    def _log_protocol(self, refused: OtherProtocol, sender: Address) -> None:
        now_s = time.monotonic()
        if now_s - self._protocol_logged_s >= _PROTOCOL_LOG_INTERVAL_S:
            self._protocol_logged_s = now_s
            self._log.error(
                "message refused: its sender speaks another protocol; "
                "run releases that are next to each other",
                tag=refused.tag,
                sender=sender.endpoint,
                version=refused.version,
                understood=self._codec.versions,
            )
