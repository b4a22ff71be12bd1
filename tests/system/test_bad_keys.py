"""Who has no valid key gets only the health checks, and a strict server takes known fields only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import Stack
from tests.system.bad_requests import MESSAGES, SOUND
from tests.system.conftest import SimStack
from tests.system.ring import send, wait_empty

KEY = "sk-right-1234567890"
WITHOUT: Mapping[str, dict[str, str]] = {
    "no key": {},
    "an empty key": {"Authorization": "Bearer "},
    "another key": {"Authorization": "Bearer sk-wrong"},
    "a part of the key": {"Authorization": f"Bearer {KEY[:-1]}"},
    "more than the key": {"Authorization": f"Bearer {KEY}0"},
    "the key in capitals": {"Authorization": f"Bearer {KEY.upper()}"},
    "another scheme": {"Authorization": f"Basic {KEY}"},
    "a scheme twice": {"Authorization": f"Bearer Bearer {KEY}"},
    "the key in latin-1": {"Authorization": "Bearer \u00e9"},
    "the key in another header": {"Api-Key": KEY},
    "a cookie": {"Cookie": f"key={KEY}"},
    "a long key": {"Authorization": "Bearer " + "k" * 8000},
    "a wrong key of Anthropic's": {"X-Api-Key": "sk-wrong"},
}
OPEN = ("/live", "/ready", "/health", "/ping", "/")
CLOSED = (
    "/v1/models",
    "/v1/models/strict",
    "/version",
    "/timeline",
    "/metrics",
    "/v1/responses/resp_1",
    "/what",
)


@pytest.fixture(scope="module")
def guarded(strict_folder: Path) -> Iterator[Stack]:
    """A server that wants a key, and knows what it reads."""
    settings = {"router.api_keys": KEY, "router.unknown_fields": "refuse"}
    with SimStack(strict_folder, settings=settings) as stack:
        yield stack


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_key_nothing_is_answered(guarded: Stack, name: str) -> None:
    def ask(path: str) -> Any:
        packed = json.dumps(SOUND[path]).encode()
        return send(guarded, "POST", path, packed, headers=WITHOUT[name])

    with ThreadPoolExecutor(len(SOUND)) as side_by_side:  # each is answered late
        answers = dict(zip(SOUND, side_by_side.map(ask, SOUND), strict=True))
    for path, (status, headers, answer) in answers.items():
        error = json.loads(answer)["error"]
        assert (status, error["type"]) == (401, "authentication_error")
        assert headers["WWW-Authenticate"] == "Bearer"
        assert path.startswith(MESSAGES) or error["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", CLOSED)
def test_a_key_in_the_query_is_none(guarded: Stack, path: str) -> None:
    names = ("key", "api_key", "access_token", "Authorization")

    def status_of(name: str) -> int:
        return send(guarded, "GET", f"{path}?{name}={KEY}")[0]

    with ThreadPoolExecutor(len(names)) as side_by_side:
        assert set(side_by_side.map(status_of, names)) == {401}


@pytest.mark.parametrize("path", OPEN)
def test_health_checks_and_the_page_are_open(guarded: Stack, path: str) -> None:
    assert send(guarded, "GET", path)[0] == 200


def test_the_key_opens_in_both_of_its_places(guarded: Stack) -> None:
    for headers in ({"Authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
        assert send(guarded, "GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.parametrize("path", [path for path in SOUND if path.startswith("/v1")])
def test_a_field_that_nobody_reads_is_refused_by_name(guarded: Stack, path: str) -> None:
    body = json.dumps(SOUND[path] | {"wibble": 1}).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    status, _, answer = send(guarded, "POST", path, body, headers=headers)
    error = json.loads(answer)["error"]
    assert status == 400 and "wibble" in error["message"]
    if not path.startswith(MESSAGES):
        assert (error["code"], error["param"]) == ("unknown_parameter", "wibble")
    wait_empty(guarded)
