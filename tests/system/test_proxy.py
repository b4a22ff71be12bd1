"""The proxy in front of several routers, where HAProxy is installed: whom it asks for what."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.stack import ROOT
from tests.patience import PATIENCE_S

CONFIG = ROOT / "deploy" / "haproxy.cfg"
pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="no HAProxy here")


class Router:
    """Answers probes as it is told to, and requests with its name; or it ends at the first one."""

    def __init__(self, name: str, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.ends_at_requests = False
        self.num_probed = 0
        router = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                router.num_probed += self.path == "/ready"
                self._answer(200 if self.path == "/live" or router.is_ready else 503, "")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if router.ends_at_requests:
                    router.end()
                    return
                senders = self.headers.get_all("X-Forwarded-For") or []
                self._answer(200, f"{name} for {', '.join(senders)}")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def proxy(folder: Path, *routers: Router) -> Iterator[int]:
    """HAProxy by the shipped file, but that routers have addresses, not a name; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    lines = "\n".join(f"    server router{r.port} 127.0.0.1:{r.port}" for r in routers)
    text, num = re.subn(r"^    server-template .*$", lines, text, flags=re.M)
    assert num == 2
    text = re.sub(r"^resolvers .*?\n\n", "", text, flags=re.M | re.S)
    text = text.replace(" resolvers docker init-addr none", "").replace(":8000", f":{port}")
    text = text.replace("abns@living", f"abns@living-{port}")
    written = folder / "haproxy.cfg"
    written.write_text(text)
    process = subprocess.Popen(["haproxy", "-db", "-f", str(written)], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(r.num_probed > 1 for r in routers):  # the first has been looked at
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
        for router in routers:
            router.end()


def ask(port: int) -> tuple[int, str]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as wire:
        wire.request("POST", "/v1/completions", b"{}", {"Content-Type": "application/json"})
        answer = wire.getresponse()
        return answer.status, answer.read().decode()


def test_a_router_that_is_ready_is_asked_and_knows_the_client(tmp_path: Path) -> None:
    ready, waits = Router("ready", is_ready=True), Router("waits", is_ready=False)
    with proxy(tmp_path, ready, waits) as port:
        answers = [ask(port) for _ in range(4)]
    assert answers == [(200, "ready for 127.0.0.1")] * 4


def test_where_none_is_ready_one_that_lives_is_asked(tmp_path: Path) -> None:
    with proxy(tmp_path, Router("waits", is_ready=False)) as port:
        assert ask(port) == (200, "waits for 127.0.0.1")


def test_what_the_only_ready_router_has_not_answered_goes_to_one_that_lives(
    tmp_path: Path,
) -> None:
    ends, waits = Router("ends", is_ready=True), Router("waits", is_ready=False)
    ends.ends_at_requests = True
    with proxy(tmp_path, ends, waits) as port, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, [port] * 4))
    assert answers == [(200, "waits for 127.0.0.1")] * 4
