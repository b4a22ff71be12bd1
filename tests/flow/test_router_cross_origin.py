"""Which pages of other origins may use the API, as browsers ask."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.config import RouterSettings
from services.router.middleware import origins_of
from tests.flow.router_ring import CHAT, chat, running_router

PAGE = "https://page.example"
QUESTION = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def preflight(ring: Any, headers: dict[str, str] | None = None) -> Any:
    async with ring.session.options(CHAT, headers=headers or QUESTION) as response:
        return response


async def test_on_loopback_without_keys_every_page_may_ask() -> None:
    async with running_router() as ring:
        response = await preflight(ring)
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_answers_and_streams_may_be_read(streaming: bool) -> None:
    async with running_router() as ring:
        body = chat(stream=streaming)
        async with ring.post(CHAT, body, headers={"Origin": PAGE}) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


async def test_refusals_may_be_read_too() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, {}, headers={"Origin": PAGE}) as response:
            assert response.status == 400
            assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_a_request_of_no_page_is_not_marked() -> None:
    async with running_router() as ring, ring.post(CHAT, chat()) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_with_keys_pages_have_to_be_named() -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        assert (await preflight(ring)).status in (401, 405)
    named = {"api_keys": ("secret-key-1",), "allowed_origins": (PAGE,)}
    async with running_router(**named) as ring:
        response = await preflight(ring)  # browsers send no key with it
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
        async with ring.post(CHAT, chat(), headers={"Origin": PAGE}) as refused:
            assert refused.status == 401
            assert refused.headers["Access-Control-Allow-Origin"] == PAGE


async def test_a_page_that_is_not_named_gets_no_mark() -> None:
    async with running_router(allowed_origins=(PAGE,)) as ring:
        other = {**QUESTION, "Origin": "https://other.example"}
        assert (await preflight(ring, other)).status == 405
        async with ring.post(CHAT, chat(), headers={"Origin": other["Origin"]}) as response:
            assert response.status == 200
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("host", "needs_key", "allowed"),
    [
        ("127.0.0.1", False, ("*",)),
        ("localhost", False, ("*",)),
        ("::1", False, ("*",)),
        ("127.0.0.1", True, ()),
        ("0.0.0.0", False, ()),
        ("server.example", False, ()),
    ],
)
def test_by_default_all_pages_are_allowed_only_where_nobody_else_can_ask(
    host: str, needs_key: bool, allowed: tuple[str, ...]
) -> None:
    assert origins_of(RouterSettings(host=host), needs_key) == allowed
