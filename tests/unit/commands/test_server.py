"""Which server `slipstream chat` and `complete` talk to."""

from __future__ import annotations

import argparse
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.commands import server
from services.commands.server import Api, ServerError, open_target


class Answers(http.server.BaseHTTPRequestHandler):
    """Says of `/v1/models` what the test wants."""

    status = 200
    body = b'{"data": [{"id": "one"}, {"id": "two"}]}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


class Wanted(Exception):
    """Raised in place of a start, with the model that was to be served."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    """What answers at the usual address; starts are not made."""

    class Here(Answers):
        pass

    def start(model: str, env: Any) -> Any:
        raise Wanted(model)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(
        "services.commands.server.DEFAULT_URL", f"http://127.0.0.1:{server.server_address[1]}"
    )
    monkeypatch.setattr("services.commands.server._started", start)
    yield Here
    server.shutdown()
    server.server_close()


def model_at(wanted: str | None = None, model: str | None = None) -> str:
    options = argparse.Namespace(target=wanted, model=model, api_key=None)
    with open_target(options, {}) as found:
        assert found.api.url == server.DEFAULT_URL
        return found.model


@pytest.mark.usefixtures("here")
def test_a_server_that_runs_here_is_asked() -> None:
    assert model_at() == "one"
    assert model_at(model="two") == "two"


@pytest.mark.usefixtures("here")
def test_a_model_that_the_server_here_has_is_not_started_again() -> None:
    assert model_at("two") == "two"
    with pytest.raises(Wanted, match="three"):
        model_at("three")


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"not found"), (200, b"<html>"), (200, b'{"data": []}')]
)
def test_something_else_at_the_usual_address_is_no_server(
    here: type[Answers], status: int, body: bytes
) -> None:
    here.status, here.body = status, body
    with pytest.raises(Wanted, match="models/demo"):
        model_at()


def test_a_server_here_that_wants_a_key_is_said_to(here: type[Answers]) -> None:
    here.status, here.body = 401, b'{"error": {"message": "no key"}}'
    with pytest.raises(ServerError, match=r"no key \(status 401; --api-key gives a key\)"):
        model_at()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    assert Api(url).url == "http://h:1"
