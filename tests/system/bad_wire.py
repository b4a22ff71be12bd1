"""Bytes that are no sound HTTP, or abuse it: what must come back first, or that nothing may."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.system.bad_requests import SOUND, TEXT

BODY = json.dumps(SOUND[TEXT]).encode()
LENGTH = f"Content-Length: {len(BODY)}"
CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"


def head(
    *lines: str,
    path: str = TEXT,
    method: str = "POST",
    version: str = "HTTP/1.1",
    host: str = "Host: localhost",
) -> bytes:
    """Write a request's head with these lines."""
    fixed = (f"{method} {path} {version}", host, "Content-Type: application/json")
    return "\r\n".join([*filter(None, fixed), *lines, "", ""]).encode("latin-1")


def request(*lines: str, **changes: str) -> bytes:
    """Write a sound request, but for these lines and changes."""
    return head(*lines, LENGTH, CLOSE, **changes) + BODY


def chunks(*sizes: bytes) -> bytes:
    """Send the body in a chunk of this size, as it is written."""
    return head(CHUNKED, CLOSE) + b"".join(size + BODY + b"\r\n" for size in sizes) + b"0\r\n\r\n"


_SIZE = b"%x\r\n" % len(BODY)

LONG = ("a huge request line", "a huge query", "a huge header", "a huge name")  # by a 431
REFUSED: Mapping[str, bytes] = {  # by a 400, but for LONG
    "no HTTP": b"\x00\x01\x02\x03" * 50 + b"\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + b"\x00" * 200,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "version 2.0": request(version="HTTP/2.0"),
    "version 9.9": request(version="HTTP/9.9"),
    "a method in small letters": request(method="post"),
    "an unknown method": request(method="WIBBLE"),
    "a long method": request(method="A" * 3000),
    "two lengths": request(LENGTH),
    "two different lengths": request("Content-Length: 5"),
    "a list of lengths": head(f"Content-Length: {len(BODY)}, {len(BODY)}", CLOSE) + BODY,
    "a length and chunks": head(LENGTH, CHUNKED, CLOSE) + _SIZE + BODY + b"\r\n0\r\n\r\n",
    "chunks and a length": head(CHUNKED, "Content-Length: 4", CLOSE)
    + _SIZE
    + BODY
    + b"\r\n0\r\n\r\n",
    "length -5": head("Content-Length: -5", CLOSE) + BODY,
    "length +5": head("Content-Length: +5", CLOSE) + BODY,
    "length 0x20": head("Content-Length: 0x20", CLOSE) + BODY,
    "length 10**30": head("Content-Length: " + "9" * 30, CLOSE) + BODY,
    "an unknown encoding": head("Transfer-Encoding: gzip", CLOSE) + BODY,
    "chunks twice": head("Transfer-Encoding: chunked, chunked", CLOSE) + _SIZE + BODY,
    "xchunked": head("Transfer-Encoding: xchunked", CLOSE) + _SIZE + BODY,
    "chunk zz": chunks(b"zz\r\n"),
    "chunk -5": chunks(b"-5\r\n"),
    "chunk 16**20": chunks(b"f" * 20 + b"\r\n"),
    "a chunk too short": chunks(b"5\r\n"),
    "many trailers": head(CHUNKED, CLOSE)
    + _SIZE
    + BODY
    + b"\r\n0\r\n"
    + b"X: y\r\n" * 2000
    + b"\r\n",
    "NUL in a header": request("X-A: a\0b"),
    "NUL in the path": request(path="/v1/\0completions"),
    "line feeds alone": request().replace(b"\r\n", b"\n"),
    "a carriage return alone": request("X-A: a\rX-B: b"),
    "a folded header": request("X-A: a\r\n b"),
    "a blank before the colon": request("X-A : a"),
    "no colon": request("wibble"),
    "a header without a name": request(": x"),
    "a header with another name": request("X-\u00e9: x"),
    "no host": request(host=""),
    "two hosts": request("Host: other"),
    "two content types": request("Content-Type: text/plain"),
    "a path in latin-1": head(CLOSE, method="GET", path="/\u00e9"),
    "a huge request line": request(path="/" + "a" * 20_000),
    "a huge query": request(path=f"{TEXT}?{'a' * 20_000}"),
    "a huge header": request("X-A: " + "a" * 20_000),
    "a huge name": request("X" * 20_000 + ": a"),
    "500 headers": request(*(f"X-{at}: a" for at in range(500))),
    "an absolute URI with a port": request(path="http://test:99999/v1/completions"),
    "a broken URI": request(path="http://[/v1/completions"),
    "a second request that is none": head(LENGTH) + BODY + b"wibble\r\n\r\n",
    "more body than said": head("Content-Length: 5") + BODY,
}
OTHERWISE: Mapping[str, tuple[int, bytes]] = {
    "a body over the limit": (413, head("Content-Length: 1000000000", CLOSE)),
    "chunks over the limit": (
        413,
        head(CHUNKED, CLOSE) + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 12 + b"0\r\n\r\n",
    ),
    "gzip behind identity": (
        415,
        request("Content-Encoding: identity", "Content-Encoding: gzip"),
    ),
    "another expectation": (417, request("Expect: wibble")),
    "CONNECT": (404, head(CLOSE, method="CONNECT", path="a:1")),
    "OPTIONS *": (404, head(CLOSE, method="OPTIONS", path="*")),
    "a broken escape": (404, request(path="/v1/%zz")),
    "a model of broken escapes": (404, head(CLOSE, method="GET", path="/v1/models/%ff%fe")),
    "a web socket": (
        405,
        head("Upgrade: websocket", "Connection: Upgrade, close", method="GET"),
    ),
}
SERVED: Mapping[str, bytes] = {  # odd, but nothing is wrong with them
    "HTTP/1.0": head(LENGTH, version="HTTP/1.0", host="") + BODY,
    "empty lines before": b"\r\n\r\n" + request(),
    "an absolute URI": request(path="http://elsewhere/v1/completions"),
    "a header in latin-1": request("X-A: \u00e9\u00ff"),
    "a key in latin-1": request("Authorization: Bearer \u00ff\u00fe"),
    "a broken trace": request("traceparent: 00-zz-zz-01", "tracestate: " + "a=b," * 1000),
    "a broken id": request("X-Request-Id: a b", "X-Request-Id: c"),
    "another address": request("X-Forwarded-For: 1.2.3.4", "Forwarded: for=1.2.3.4"),
    "an expectation": request("Expect: 100-continue"),
    "an upgrade to HTTP/2": request("Upgrade: h2c", "Connection: HTTP2-Settings"),
}
