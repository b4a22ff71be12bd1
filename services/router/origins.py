"""Which names of this server, and which web pages, may be in a browser's request.

A page that a user merely visits must not speak to a server on their machine. It can try so in two
ways: openly, when the browser adds the page's `Origin`; or under a name of its own that it lets
point to 127.0.0.1 (DNS rebinding), when only `Host` tells. What is no browser sends no `Origin`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import hdrs, web

from common.link.resolve import is_literal, is_loopback
from common.messages.failure import Failure
from services.router.config import AUTO_ORIGINS, RouterSettings
from services.router.errors import ApiError

ANY = "*"
ALLOWED_METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = "X-Request-Id, Request-Id, Retry-After, X-Should-Retry, Warning"
PREFLIGHT_MAX_AGE_S = 600  # Chromium keeps a preflight for two hours at most, Firefox for a day
_FETCH_SITE = "Sec-Fetch-Site"  # set by the browser; no script can


class AllowedHosts:
    """The names that a request may call this server by.

    Without names from the settings, a server on loopback has those of this machine, any other all.
    Addresses always pass: only a name can be made to point elsewhere.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._names = frozenset(name.lower() for name in settings.allowed_hosts)
        self._checks = ANY not in self._names and bool(self._names or is_local(settings.host))

    def check(self, request: web.Request) -> None:
        """Raise ApiError 421 for another name; HTTP/1.0 may do without any."""
        host = host_of(request.headers.get(hdrs.HOST, ""))
        if not self._checks or not host or is_literal(host) or is_local(host):
            return
        if host not in self._names:
            message = (
                f"this server is not called {host[:100]!r}; if clients know it by that name, add "
                "the name to allowed_hosts under [router]"
            )
            raise ApiError(Failure(421, "host_not_allowed", message))


class AllowedOrigins:
    """The pages that may use the API: the server's own, and those of the allowed origins (CORS)."""

    def __init__(self, settings: RouterSettings, needs_key: bool) -> None:
        """By default pages of this machine are allowed on a loopback address without API keys."""
        self.hosts = AllowedHosts(settings)
        is_auto = settings.allowed_origins == AUTO_ORIGINS
        self._origins = frozenset(() if is_auto else settings.allowed_origins)
        self._allows_local = is_auto and is_local(settings.host) and not needs_key

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin (`https://host:port`, or `null`) may read the answers."""
        if not origin:  # from no browser
            return False
        if self._allows_local and is_local(host_of(_netloc(origin))):
            return True
        return ANY in self._origins or origin in self._origins

    def check(self, request: web.Request) -> None:
        """Raise ApiError 403 if a page of another origin asks, which is not allowed."""
        headers = request.headers
        origin = headers.get(hdrs.ORIGIN, "")
        if not origin or self.allows(origin) or headers.get(_FETCH_SITE) == "same-origin":
            return
        # Older browsers, and all on plain HTTP, do not say `same-origin`. The scheme may differ:
        # a proxy with TLS before this server passes on the host alone.
        asked = headers.get(hdrs.HOST, "").lower()
        if not asked or _netloc(origin) != asked:
            message = (
                f"pages of {origin[:100]!r} may not use this server; to let them, add this origin "
                "to allowed_origins under [router]"
            )
            raise ApiError(Failure(403, "origin_not_allowed", message))

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a preflight, which carries no API key; None for any other request."""
        headers = request.headers
        if (
            request.method != hdrs.METH_OPTIONS
            or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in headers
            or not self.allows(headers.get(hdrs.ORIGIN, ""))
        ):
            return None
        allowed = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: ALLOWED_METHODS,
            # `*` would not include Authorization, so the requested headers are echoed.
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: headers.get(
                hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"
            ),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_MAX_AGE_S),
        }
        return web.Response(status=204, headers=allowed)

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Mark a response, streamed or not, as readable; called before its headers are sent."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        if ANY not in self._origins and (self._origins or self._allows_local):
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self.allows(origin):
            is_public = ANY in self._origins
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if is_public else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED_HEADERS


def host_of(netloc: str) -> str:
    """Return the host in `host:port`, in small letters, IPv6 without brackets; "" if none."""
    host = netloc.rpartition("]")[0] if netloc.startswith("[") else netloc.partition(":")[0]
    return host.removeprefix("[").removesuffix(".").lower()


def is_local(host: str) -> bool:
    """Whether a host is this machine to everyone: browsers never ask a server for `localhost`."""
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
