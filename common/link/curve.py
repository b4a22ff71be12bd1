"""CURVE: the keys of a deployment, and which clients may send to an inbox.

All inboxes of a deployment share one server key pair; each service has a client key pair. ZeroMQ
asks the authenticator about every client; it answers on the actor's own loop, without a thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from common.errors import ConfigError

SERVICES = ("router", "tokenizer", "compute", "detokenizer")
_SERVER = "server"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks; its name is part of ZeroMQ RFC 27
_DOMAIN = b"slipstream"
_KEY_CHARACTERS = 40  # 32 bytes in Z85


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that one service needs, as Z85 text; `clients` are the public keys it accepts."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    clients: frozenset[bytes]

    def protect_inbox(self, inbox: zmq.Socket[bytes]) -> None:
        """Turn an inbox that is not bound yet into a CURVE server that asks about each client."""
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)
        inbox.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        inbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_link(self, link: zmq.Socket[bytes]) -> None:
        """Let a link that is not connected yet speak CURVE with this service's client key."""
        link.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        link.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        link.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)


def new_keys() -> dict[str, bytes]:
    """Make the keys of a new deployment in memory, by the names of their files."""
    keys = {}
    for name in (_SERVER, *SERVICES):
        keys[f"{name}.public"], keys[f"{name}.secret"] = zmq.curve_keypair()
    return keys


def keys_for(service: str, keys: Mapping[str, bytes]) -> dict[str, bytes]:
    """Choose what a host needs on which only this service runs."""
    own = (f"{_SERVER}.secret", f"{service}.secret")
    return {name: key for name, key in keys.items() if name.endswith(".public") or name in own}


def create_keys(folder: str | Path, keys: Mapping[str, bytes] | None = None) -> list[Path]:
    """Write keys, by default those of a new deployment, and return the files; ConfigError if some
    are there.

    The folder gets mode 0700 and every file 0600. A host needs the server's pair, the public
    keys of all services and the secret ones of the services that run there.
    """
    folder = Path(folder)
    paths = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        for name, key in (new_keys() if keys is None else keys).items():
            path = folder / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key + b"\n")
            paths.append(path)
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} is there already; new keys would lock out every running service. "
            "Choose an empty folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error}") from error
    return paths


def make_missing_keys(folder: str | Path) -> None:
    """Make keys in a folder that has none; of services that start at once, one makes them."""
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"[links] curve_dir: cannot open {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.listdir(descriptor):
            create_keys(folder)
    finally:
        os.close(descriptor)


def load_keys(folder: str | Path, service: str) -> Keys:
    """Read what one service needs; ConfigError says which file is missing or wrong."""
    folder = Path(folder)
    clients = frozenset(
        _read(path) for path in sorted(folder.glob("*.public")) if path.stem != _SERVER
    )
    return Keys(
        server_public=_read(folder / f"{_SERVER}.public"),
        server_secret=_read_secret(folder / f"{_SERVER}.secret"),
        client_public=_read(folder / f"{service}.public"),
        client_secret=_read_secret(folder / f"{service}.secret"),
        clients=clients,
    )


def service_of(name: str) -> str:
    """Return the service whose keys an instance uses: `compute` for `compute-0`."""
    for service in SERVICES:
        if name == service or name.startswith(f"{service}-"):
            return service
    raise ConfigError(
        f"[links] curve_dir: there are no keys for the instance name {name!r}; "
        f"it must begin with one of {', '.join(SERVICES)}"
    )


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        if len(key) == _KEY_CHARACTERS and len(z85.decode(key)) == 32:
            return key
    except OSError as error:
        raise ConfigError(
            f"[links] curve_dir: cannot read {path}: {error.strerror}; "
            "`slipstream keys DIR` makes the keys of a deployment"
        ) from error
    except (ValueError, KeyError, struct.error):
        pass
    raise ConfigError(f"[links] curve_dir: {path} holds no key of {_KEY_CHARACTERS} characters")


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    status = path.stat()
    if is_open_to_others(status.st_mode, status.st_uid, os.geteuid()):
        raise ConfigError(f"[links] curve_dir: {path} is open to others; chmod 600 {path}")
    return key


def is_open_to_others(mode: int, owner: int, reader: int) -> bool:
    """Whether others than its reader may read or write a file of this mode.

    What root owns may be readable by a group: so Kubernetes hands Secrets to a pod's one user.
    """
    return bool(mode & (0o037 if owner == 0 != reader else 0o077))


class Doorkeeper:
    """Answers libzmq's question whether a client's key is one of ours (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        self.num_refused = 0
        self._allowed = {z85.decode(key) for key in keys.clients}
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer_all(self) -> None:
        """Answer until no question is left: the descriptor signals the first one only."""
        while not self.socket.closed and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.socket.send_multipart(self._answer(self.socket.recv_multipart(zmq.NOBLOCK)))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, domain, _address, _identity, mechanism, *credentials = question
        known = (
            version == b"1.0"
            and domain == _DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and credentials[0] in self._allowed
        )
        if not known:
            self.num_refused += 1
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [b"1.0", request_id, *status, b"", b""]


class Authenticator(Doorkeeper):
    """One that answers on an actor's loop."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        super().__init__(context, keys)
        self._loop = asyncio.get_running_loop()
        self._fd = self.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self.answer_all)
        self._loop.call_soon(self.answer_all)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self.socket.close(0)
