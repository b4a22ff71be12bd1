"""A small client of the API, for the commands that ask a server: JSON and server-sent events."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Generator, Mapping
from typing import Any

CONNECT_WITHIN_S = 10.0
ANSWER_WITHIN_S = 600.0


class ApiError(Exception):
    """The server could not be asked or refused; the text says why, `status` is 0 for the former."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Api:
    """One server, by its address with or without /v1."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urllib.parse.urlsplit(self.url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ApiError(f"{url} is no address of a server; one looks like http://HOST:PORT")
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Return what it serves."""
        listed = self.call("GET", "/v1/models").get("data") or []
        return [str(model.get("id")) for model in listed if isinstance(model, dict)]

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask for a document."""
        connection, response = self._open(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiError(f"{self.url}{path} gave no JSON: {error}") from error
        finally:
            connection.close()

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Ask for a stream and give its events; closing the iterator ends the request."""
        connection, response = self._open("POST", path, {**body, "stream": True})
        try:
            for line in response:
                data = line.partition(b"data:")[2].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ApiError(_message(event) or data.decode())
                    yield event
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiError(f"the answer was cut off: {error}") from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = self._parts.hostname or ""
        connection = kind(host, self._parts.port, timeout=CONNECT_WITHIN_S)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_WITHIN_S)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path + path, data, self.headers)
            response = connection.getresponse()
            if response.status < 300:
                return connection, response
            said = response.read(1 << 16)
        except (OSError, ValueError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(f"{self.url} does not answer: {error}") from error
        connection.close()
        raise ApiError(_refusal(response.status, said), response.status)


def _refusal(status: int, said: bytes) -> str:
    try:
        text = _message(json.loads(said))
    except ValueError:
        text = ""
    text = text or said[:200].decode(errors="replace").strip() or "nothing more was said"
    return f"{text} (status {status}{'; --api-key gives a key' if status == 401 else ''})"


def _message(document: Any) -> str:
    """Find the words in an error of OpenAI's shape or one like it."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message") or ""
    return str(error)
