"""The server that a command talks to: one that runs, or one that is started for the occasion."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from common.config import DEMO_MODEL, LAUNCHER_FD_VARIABLE, child_environment
from common.errors import EXIT_SIGNALLED
from services.commands.command import Parser, api_key_of

DEFAULT_URL = "http://127.0.0.1:8000"
READY_LINE = re.compile(r"Slipstream serves .* at (http://\S+)/v1 ")
STOP_WITHIN_S = 30.0
CONNECT_WITHIN_S = 10.0
ANSWER_WITHIN_S = 600.0
_BROKEN = (OSError, ValueError, http.client.HTTPException)  # a connection or an answer


class ServerError(Exception):
    """The server refused, with this status, or could not be reached: then `status` is 0."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Api:
    """A client of one server; its address may end with /v1."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urllib.parse.urlsplit(self.url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ServerError(f"{url} is no address of a server; one looks like http://HOST:PORT")
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        listed = self.call("GET", "/v1/models").get("data") or []
        return [str(model.get("id")) for model in listed if isinstance(model, dict)]

    def target(self, model: str | None) -> Target:
        """Choose the named model or the first one; ServerError if it is not served."""
        served = self.models()
        if not served:
            raise ServerError(f"{self.url} serves no model")
        if model and model not in served:
            raise ServerError(f"{self.url} serves no {model}; it serves {', '.join(served)}")
        return Target(self, model or served[0])

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._response(method, path, body, f"{self.url}{path} gave no JSON") as response:
            return json.loads(response.read())

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Request a stream and yield its events; closing the iterator ends the request."""
        body = {**body, "stream": True}
        with self._response("POST", path, body, "the answer was cut off") as response:
            for line in response:
                data = line.partition(b"data:")[2].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(_message(event) or data.decode())
                    yield event

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, complaint: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer that is not an error; `complaint` begins the error of reading it."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = self._parts.hostname or ""
        opened = kind(host, self._parts.port, timeout=CONNECT_WITHIN_S)
        with contextlib.closing(opened) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(ANSWER_WITHIN_S)
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._parts.path + path, data, self.headers)
                response = connection.getresponse()
                refusal = response.read(1 << 16) if response.status >= 300 else b""
            except _BROKEN as error:
                raise ServerError(f"{self.url} does not answer: {error}") from error
            if response.status >= 300:
                raise ServerError(_refusal(response.status, refusal), response.status)
            try:
                yield response
            except _BROKEN as error:
                raise ServerError(f"{complaint}: {error}") from error


def _refusal(status: int, body: bytes) -> str:
    try:
        text = _message(json.loads(body))
    except ValueError:
        text = ""
    text = text or body[:200].decode(errors="replace").strip() or "nothing more was said"
    return f"{text} (status {status}{'; --api-key gives a key' if status == 401 else ''})"


def _message(document: Any) -> str:
    """Return the message of an error of OpenAI's shape or one like it."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message") or ""
    return str(error)


class NoServer(Exception):
    """The server could not be started; it has said why."""


def with_target(
    command: str,
    options: argparse.Namespace,
    env: Mapping[str, str],
    use: Callable[[Target], int],
) -> int:
    """Run `use` with the server that the options name; returns the command's exit status."""
    try:
        with open_target(options, env) as target:
            return use(target)
    except ServerError as error:
        sys.stderr.write(f"slipstream {command}: {error}\n")
        return 1
    except NoServer:
        return 2
    except KeyboardInterrupt:
        return 130


@dataclass(frozen=True, slots=True)
class Target:
    api: Api
    model: str


def add_target_options(parser: Parser) -> None:
    target = (
        "a model, as for `slipstream serve`, for which a server is started and stopped again; or "
        f"the address of a server (default: {DEFAULT_URL} where one runs, else the demo model)"
    )
    parser.add_argument("target", nargs="?", metavar="MODEL|URL", help=target)
    parser.add_argument("--model", metavar="NAME", help="which model, where the server has several")
    parser.add_api_key()


@contextlib.contextmanager
def open_target(options: argparse.Namespace, env: Mapping[str, str]) -> Iterator[Target]:
    """Find the server, or start one and stop it at the end; raises ServerError or NoServer."""
    api_key = api_key_of(options, env)
    target = options.target or ""
    if re.match(r"https?://", target):
        yield Api(target, api_key).target(options.model)
        return
    running = Api(DEFAULT_URL, api_key)
    try:
        served = running.models()
    except ServerError as error:
        if error.status in (401, 403) and not target:  # with another status it has another API
            raise
        served = []
    if served and (not target or target in served):
        yield running.target(options.model or target)
        return
    api_key = api_key or env.get("SLIPSTREAM_ROUTER__API_KEYS", "").partition(",")[0].strip()
    with _started(target or DEMO_MODEL, env) as url:
        yield Api(url, api_key).target(options.model)


def add_answer_options(parser: Parser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask this and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always answers the same")
    parser.add_argument("--seed", type=int, metavar="N", help="of the dice")


def answer_settings(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    return {name: value for name, value in given.items() if value is not None}


@contextlib.contextmanager
def _started(model: str, env: Mapping[str, str]) -> Iterator[str]:
    """Serve a model on a free port while the context lasts; yields the address."""
    sys.stderr.write(f"starting a server for {Path(model).name} ...\n")
    command = [sys.executable, "-m", "services.cli", "serve", model]
    for number in (signal.SIGTERM, signal.SIGHUP):  # to stop the server too
        signal.signal(number, _end)
    read_fd, write_fd = os.pipe()  # the server notices when its writing end closes
    with subprocess.Popen(
        [*command, "--port", "0", "--log-level", "warning"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(read_fd,),
        start_new_session=True,  # Ctrl-C stops an answer and not the server
        env={**child_environment(env), LAUNCHER_FD_VARIABLE: str(read_fd)},
        text=True,
    ) as server:
        os.close(read_fd)
        try:
            assert server.stdout is not None
            ready = next(filter(None, map(READY_LINE.match, server.stdout)), None)
            if ready is None:
                raise NoServer
            yield ready[1]
        finally:
            _stop(server)
            os.close(write_fd)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNALLED + number)


def _stop(server: subprocess.Popen[str]) -> None:
    """Let the server drain; end it at once if that takes long or at Ctrl-C."""
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            server.send_signal(signal.SIGTERM)  # the second one cuts the drain short
            server.wait()
