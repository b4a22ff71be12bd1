"""Who listens is told from who has ended, and from a host that says nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.link.probe import ANSWER_S, Probe


def verdict(endpoint: str) -> str:
    """Look until it is known, which takes a moment at most."""
    probe = Probe(endpoint, 0.0)
    try:
        while (why := probe.why_gone(0.0)) is None:
            pass
        return why
    finally:
        probe.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_listened_at_or_not(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        assert verdict(endpoint) == ""
    assert verdict(endpoint) == "its process has ended"


def test_so_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "box.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert verdict(f"ipc://{path}") == ""
    assert verdict(f"ipc://{path}") == "its process has ended"
    assert verdict(f"ipc://{tmp_path / 'none.sock'}") == "its process has ended"


def test_a_host_that_does_not_answer_is_waited_for_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]  # more than the kernel takes in
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        probe = Probe(f"tcp://127.0.0.1:{address[1]}", 5.0)
        assert probe.why_gone(5.0) is None
        assert probe.why_gone(5.0 + 0.9 * ANSWER_S) is None
        assert probe.why_gone(5.0 + ANSWER_S) == "its host does not answer"
        for each in (probe, *waiting):
            each.close()
