"""API keys, from the settings and from a file that is read again when it changes.

The file is TOML with a table for each key:

    [[key]]
    name = "team-a"                # in logs and metrics; unique
    key = "sk-..."                 # or sha256 = "..." of it, in hexadecimal, to keep no secret here
    max_in_flight = 8              # limits, each of them optional
    requests_per_s = 5.0
    tokens_per_minute = 100_000
    min_priority = -10             # the most urgent that it may ask for; 0 without it
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from services.router.admission import Client, ClientLimits

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096  # every request is compared with all of them: 0.5 us each


class _Key(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    key: str | None = Field(None, min_length=8, max_length=512)
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    max_in_flight: int = Field(0, ge=0)
    requests_per_s: float = Field(0.0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)
    min_priority: int = Field(0, le=0)

    def digest(self) -> bytes:
        """Return the SHA-256 of the key; ValueError unless exactly one form is given."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"key {self.name!r} needs either key or sha256")
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.sha256 or "")

    def client(self) -> Client:
        limits = ClientLimits(
            self.max_in_flight, self.requests_per_s, self.tokens_per_minute, self.min_priority
        )
        return Client(self.name, limits)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    key: list[_Key] = Field(default_factory=list, max_length=MAX_KEYS)


class ApiKeys:
    """The accepted keys; without any, no request needs one.

    If the file can no longer be read, the keys stay as they were and an error is logged: a mistake
    in it must neither lock clients out nor open the server.
    """

    def __init__(self, keys: Iterable[str], file: str = "", metrics_token: str = "") -> None:
        """Take the keys of the settings and of the file; ConfigError if the file is invalid.

        With a file, even an empty one, every request needs a key.
        """
        self._fixed = [(_digest(key), Client(f"key-{number}")) for number, key in enumerate(keys)]
        self._metrics_digest = _digest(metrics_token) if metrics_token else None
        self._path = Path(file) if file else None
        self._stamp: tuple[int, int, int] | None = None
        self._known = list(self._fixed)
        self._log = structlog.get_logger()
        if self._path is not None:
            try:
                self._stamp = _stamp(self._path)
                self._known = self._fixed + _read(self._path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"router.api_keys_file {file}: {_reason(error)}") from error

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._fixed) or self._path is not None

    def client(self, given: str, remote: str) -> Client | None:
        """Return the client of a request; None for an unknown key."""
        if not self.required:
            return Client(remote)
        # All keys are compared, each in constant time. Hashes hide the length of a key.
        digest = _digest(given)
        match: Client | None = None
        for known, client in self._known:
            if hmac.compare_digest(digest, known):
                match = client
        return match if given else None

    def may_observe(self, given: str) -> bool:
        """Whether metrics and instances are for who sends this: a client, or the scraper."""
        if self._metrics_digest is None:
            return self.client(given, "") is not None
        if hmac.compare_digest(_digest(given), self._metrics_digest):
            return True
        return self.required and self.client(given, "") is not None

    def reload(self) -> None:
        """Read the file again if it has changed; cheap enough for once a second."""
        path = self._path
        if path is None:
            return
        try:
            stamp = _stamp(path)
        except OSError as error:
            if self._stamp is not None:
                self._stamp = None
                self._log.error("API keys kept: their file is gone", error=_reason(error))
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = _read(path)
        except (OSError, ValueError) as error:
            self._log.error("API keys kept: their file is not valid", error=_reason(error))
            return
        self._known = self._fixed + keys
        self._log.info("API keys read", file=str(path), keys=len(keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def bearer(authorization: str) -> str:
    """Return the key of an `Authorization: Bearer KEY` header; empty for any other."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return the attributes that show whether a file has changed."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> list[tuple[bytes, Client]]:
    """Read a file of keys; raises OSError or ValueError."""
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    file = _File.model_validate(tomllib.loads(data.decode()))
    names = [key.name for key in file.key]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two keys have the name {name!r}")
    return [(key.digest(), key.client()) for key in file.key]


def _reason(error: Exception) -> str:
    """Describe an error without quoting a key, which pydantic would."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return str(error)[:200]
