"""Serves the chat page at `/` and `/page/...` from the files in `web/`, read once at the start.

The files need no API key. The page's own API requests carry the key that its user typed and pass
the same checks as any other request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ETag, web

STATIC = Path(__file__).resolve().parents[2] / "web"  # beside `services`, installed or not
INDEX = "index.html"
PREFIX = "/page/"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}

# Nothing inline, nothing from elsewhere; and no text can become markup by a mistake in a script.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the files of two releases must not mix
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, ready to be sent."""

    body: bytes
    content_type: str
    tag: str


class PageHandler:
    """The handler of all files of the page; `paths` are those that it answers."""

    def __init__(self, folder: Path = STATIC) -> None:
        files = {
            f"{PREFIX}{path.relative_to(folder).as_posix()}": _read(path)
            for path in sorted(folder.rglob("*"))
            if path.suffix in CONTENT_TYPES
        }
        files["/"] = files.pop(f"{PREFIX}{INDEX}")
        files["/favicon.ico"] = files[f"{PREFIX}mark.svg"]  # of tabs with answers of the API
        self._files = files
        self.paths = frozenset(files)

    def routes(self) -> list[web.RouteDef]:
        """Return a route for each file; aiohttp answers HEAD by the same handler."""
        return [web.get(path, self.file) for path in sorted(self.paths)]

    async def file(self, request: web.Request) -> web.Response:
        """Send a file, or say that the client's copy of it is good."""
        found = self._files[request.path]
        known = request.if_none_match or ()
        if any(tag.value in ("*", found.tag) for tag in known):
            response = web.Response(status=304, headers=HEADERS)
        else:
            headers = {**HEADERS, "Content-Type": found.content_type}
            response = web.Response(body=found.body, headers=headers)
        response.etag = ETag(found.tag)
        return response


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    tag = hashlib.sha256(body).hexdigest()[:32]
    return PageFile(body, CONTENT_TYPES[path.suffix], tag)
