"""Cross-origin resource sharing: which pages of other origins may read the answers (Fetch, W3C)."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import hdrs, web

from common.link.resolve import is_loopback
from services.router.config import AUTO_ORIGINS, RouterSettings

ANY = "*"
METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, Warning"
PREFLIGHT_MAX_AGE_S = 600  # Chromium keeps a preflight for two hours at most, Firefox for a day


class CrossOrigin:
    """Answers preflights and marks responses for the origins that are allowed."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin (`https://host:port`, or `null`) may read the answers."""
        return bool(origin) and (ANY in self._origins or origin in self._origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a browser's question before the request itself; None for anything else.

        It carries no API key, since browsers send none with it.
        """
        headers = request.headers
        asked = headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None:
            return None
        if not self.allows(headers.get(hdrs.ORIGIN, "")):
            return None
        answer = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
            # `*` would not stand for Authorization, so the wish itself is granted.
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: headers.get(
                hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"
            ),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_MAX_AGE_S),
        }
        return web.Response(status=204, headers=answer)

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Mark a response, streamed or not, as readable; called before its headers leave."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        if ANY not in self._origins and self._origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self.allows(origin):
            every = ANY in self._origins
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if every else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED


def origins_of(settings: RouterSettings, needs_key: bool) -> tuple[str, ...]:
    """Resolve the setting: by default every origin, where only this machine can ask and no key is.

    With keys, or on an address that others reach, a page of elsewhere has to be named.
    """
    if settings.allowed_origins != AUTO_ORIGINS:
        return settings.allowed_origins
    is_local = settings.host == "localhost" or is_loopback(settings.host)
    return (ANY,) if is_local and not needs_key else ()
