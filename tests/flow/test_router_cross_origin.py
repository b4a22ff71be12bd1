"""Which pages may use the API, and by which names of the server, as browsers ask."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from services.router.config import RouterSettings
from services.router.errors import ApiError
from services.router.origins import AllowedHosts, AllowedOrigins
from tests.flow.router_ring import CHAT, chat, running_router

PAGE = "https://page.example"
LOCAL = ("http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]", "http://ui.localhost")
OWN = ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "[::1]", "ui.localhost")
QUESTION = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def preflight(ring: Any, headers: dict[str, str] | None = None) -> Any:
    async with ring.session.options(CHAT, headers=headers or QUESTION) as response:
        return response


async def test_on_loopback_without_keys_pages_of_this_machine_may_ask() -> None:
    async with running_router() as ring:
        for origin in LOCAL:
            response = await preflight(ring, {**QUESTION, "Origin": origin})
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == origin
            assert response.headers["Vary"] == "Origin"
            allowed = response.headers["Access-Control-Allow-Headers"]
            assert allowed == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_answers_and_streams_may_be_read(streaming: bool) -> None:
    async with running_router() as ring:
        body = chat(stream=streaming)
        async with ring.post(CHAT, body, headers={"Origin": LOCAL[0]}) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == LOCAL[0]
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


async def test_refusals_may_be_read_too() -> None:
    async with running_router(allowed_origins=("*",)) as ring:
        async with ring.post(CHAT, {}, headers={"Origin": PAGE}) as response:
            assert response.status == 400
            assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1.example", "http://["])
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/models", "/timeline", "/health"])
async def test_a_page_of_another_site_is_refused(origin: str, path: str) -> None:
    async with running_router() as ring:
        method = "POST" if path in (CHAT, "/tokenize") else "GET"
        request = ring.session.request(method, path, json=chat(), headers={"Origin": origin})
        async with request as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (403, "origin_not_allowed")
            assert "allowed_origins" in error["message"]
            assert "Access-Control-Allow-Origin" not in response.headers
        assert ring.is_empty()


@pytest.mark.parametrize("host", ["slipstream.example", "slipstream.example:8000", "10.0.0.7:80"])
@pytest.mark.parametrize("scheme", ["http", "https"])  # behind a proxy with TLS
async def test_the_servers_own_page_may_ask(scheme: str, host: str) -> None:
    async with running_router(allowed_hosts=("slipstream.example",), allowed_origins=()) as ring:
        own = {"Host": host, "Origin": f"{scheme}://{host}"}
        async with ring.post(CHAT, chat(), headers=own) as response:
            assert response.status == 200
        # A proxy may hide the name that the page was asked by; the browser knows better.
        hidden = {"Origin": PAGE, "Sec-Fetch-Site": "same-origin"}
        async with ring.post(CHAT, chat(), headers=hidden) as response:
            assert response.status == 200
        async with ring.post(CHAT, chat(), headers={**own, "Origin": PAGE}) as response:
            assert response.status == 403


@pytest.mark.parametrize("path", ["/", "/v1/models", "/timeline", "/health", "/metrics", CHAT])
async def test_on_loopback_a_foreign_name_is_refused(path: str) -> None:
    async with running_router() as ring:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example"):
            method = "POST" if path == CHAT else "GET"
            request = ring.session.request(method, path, json=chat(), headers={"Host": host})
            async with request as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (421, "host_not_allowed")
                assert "allowed_hosts" in error["message"]


async def test_the_names_of_this_machine_are_known_with_any_port() -> None:
    async with running_router() as ring:
        for host in (*OWN, *(f"{name}:4711" for name in OWN)):
            async with ring.session.get("/v1/models", headers={"Host": host}) as response:
                assert response.status == 200, host


async def test_health_checks_may_call_it_what_they_like() -> None:
    async with running_router(allowed_hosts=("api.example",)) as ring:
        for path in ("/live", "/ready", "/ping"):
            async with ring.session.get(path, headers={"Host": "pod-7"}) as response:
                assert response.status == 200


def named(name: str, **settings: Any) -> int:
    """Return the status for a request to `name`, 200 where it is allowed."""
    request = make_mocked_request("GET", "/v1/models", headers={"Host": name})
    try:
        AllowedHosts(RouterSettings(**settings)).check(request)
    except ApiError as error:
        return error.failure.status
    return 200


def test_other_names_are_the_operators_word() -> None:
    assert named("API.example.:443", host="127.0.0.1", allowed_hosts=("api.Example",)) == 200
    assert named("evil.example", host="127.0.0.1", allowed_hosts=("api.example",)) == 421
    assert named("evil.example", host="127.0.0.1", allowed_hosts=("*",)) == 200
    assert named("evil.example", host="::1") == 421
    assert named("evil.example", host="0.0.0.0") == 200
    assert named("evil.example", host="0.0.0.0", allowed_hosts=("api.example",)) == 421
    assert named("10.0.0.7:8000", host="0.0.0.0", allowed_hosts=("api.example",)) == 200
    assert named("[::1]:8000", host="0.0.0.0", allowed_hosts=("api.example",)) == 200
    assert named("", host="127.0.0.1") == 200


async def test_a_request_of_no_page_is_not_marked() -> None:
    async with running_router() as ring, ring.post(CHAT, chat()) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_with_keys_pages_have_to_be_named() -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        assert (await preflight(ring)).status == 403
    settings = {"api_keys": ("secret-key-1",), "allowed_origins": (PAGE,)}
    async with running_router(**settings) as ring:
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
        assert (await preflight(ring, other)).status == 403
        async with ring.post(CHAT, chat(), headers={"Origin": other["Origin"]}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("host", "needs_key", "allowed"),
    [
        ("127.0.0.1", False, True),
        ("localhost", False, True),
        ("::1", False, True),
        ("127.0.0.1", True, False),
        ("0.0.0.0", False, False),
        ("server.example", False, False),
    ],
)
def test_by_default_pages_are_allowed_only_where_nobody_else_can_ask(
    host: str, needs_key: bool, allowed: bool
) -> None:
    origins = AllowedOrigins(RouterSettings(host=host), needs_key)
    assert [origins.allows(origin) for origin in LOCAL] == [allowed] * len(LOCAL)
    assert not origins.allows(PAGE)
