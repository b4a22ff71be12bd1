"""Clients that break HTTP, stop in the middle, or are slow: each is told or cut, none waits."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.aftermath import Aftermath
from tests.system.bad_requests import CHAT, MESSAGES, MODEL, RESPONSES, SOUND, TEXT
from tests.system.bad_wire import (
    BODY,
    CHUNKED,
    CLOSE,
    LENGTH,
    LONG,
    OTHERWISE,
    REFUSED,
    SERVED,
    head,
    request,
)
from tests.system.ring import wait_empty

NUM_IDLE = 1000
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
RESET = struct.pack("ii", 1, 0)


@pytest.fixture
def aftermath(strict_stack: Stack) -> Iterator[Aftermath]:
    """A server that is looked at before and after."""
    found = Aftermath.of(strict_stack)
    yield found
    found.check()


@contextlib.contextmanager
def connected(stack: Stack, receive_bytes: int = 0) -> Iterator[socket.socket]:
    """Connect; with a small window where `receive_bytes` says so."""
    with socket.socket() as wire:
        if receive_bytes:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        wire.settimeout(PATIENCE_S)
        wire.connect(("127.0.0.1", stack.port))
        yield wire


def said(stack: Stack, data: bytes) -> bytes:
    """Send bytes and return all that comes until the server closes, which it must."""
    with connected(stack) as wire:
        wire.sendall(data)
        return rest_of(wire)


def rest_of(wire: socket.socket) -> bytes:
    """Read until the other end closes or resets."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := wire.recv(1 << 16):
            found += part
    return found


def status_of(answer: bytes) -> int:
    """Return the first status, 0 where there is none."""
    return int(answer.split(None, 2)[1]) if answer.startswith(b"HTTP/") else 0


def asking(body: dict[str, Any], path: str = TEXT, *lines: str) -> bytes:
    """Write a request with this body."""
    packed = json.dumps(SOUND[path] | body).encode()
    return head(f"Content-Length: {len(packed)}", *lines, path=path) + packed


def test_broken_http_is_a_400_and_the_end_of_the_connection(
    strict_stack: Stack, aftermath: Aftermath
) -> None:
    found = {name: said(strict_stack, data) for name, data in REFUSED.items()}
    expected = {name: 431 if name in LONG else 400 for name in REFUSED}
    assert {name: status_of(answer) for name, answer in found.items()} == expected
    for name, answer in found.items():
        is_told(re.split(rb"HTTP/1.[01] \d{3} ", answer)[-1], name)


def test_what_http_has_a_status_for_gets_it(strict_stack: Stack, aftermath: Aftermath) -> None:
    found = {name: said(strict_stack, data) for name, (_, data) in OTHERWISE.items()}
    expected = {name: status for name, (status, _) in OTHERWISE.items()}
    assert {name: status_of(answer) for name, answer in found.items()} == expected
    for name, answer in found.items():
        is_told(answer, name)


def is_told(answer: bytes, name: str) -> None:
    """Assert that a refusal is JSON in OpenAI's shape, and names no software's version."""
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nContent-Type: application/json" in lines, name
    assert b"\r\nServer: slipstream\r\n" in lines + b"\r\n", name
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, name
    assert error["type"] == "invalid_request_error" and "b'" not in error["message"], name


def test_what_is_odd_but_sound_is_served(strict_stack: Stack, aftermath: Aftermath) -> None:
    for name, data in SERVED.items():
        answer = said(strict_stack, data)
        assert b" 200 OK\r\n" in answer, name
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 8


def test_pipelined_requests_are_answered_in_their_order(
    strict_stack: Stack, aftermath: Aftermath
) -> None:
    lengths = [3, 1, 7]
    asked = [asking({"max_tokens": length, "ignore_eos": True}) for length in lengths]
    last = head(CLOSE, method="GET", path="/v1/models")
    answer = said(strict_stack, b"".join(asked) + last)
    bodies = [json.loads(part[: part.rindex(b"}") + 1]) for part in answer.split(b"\r\n\r\n")[1:]]
    assert [each["usage"]["completion_tokens"] for each in bodies[:3]] == lengths
    assert bodies[3]["object"] == "list"


def test_who_sends_no_whole_head_is_cut(strict_stack: Stack, aftermath: Aftermath) -> None:
    halves = [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", head(LENGTH)[:-2]]
    with contextlib.ExitStack() as held:
        wires = [held.enter_context(connected(strict_stack)) for _ in halves]
        for wire, half in zip(wires, halves, strict=True):
            wire.sendall(half)
        assert [rest_of(wire) for wire in wires] == [b""] * len(halves)


def test_half_a_body_is_a_408(strict_stack: Stack, aftermath: Aftermath) -> None:
    with contextlib.ExitStack() as held:
        wires = [held.enter_context(connected(strict_stack)) for _ in SOUND]
        for wire, path in zip(wires, SOUND, strict=True):
            wire.sendall(head(LENGTH, CLOSE, path=path) + BODY[:10])
        answers = [rest_of(wire) for wire in wires]
    assert all(status_of(answer) == 408 for answer in answers)
    assert all(b"within 1.5 s" in answer for answer in answers)


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
def test_a_body_that_drips_is_a_408(
    strict_stack: Stack, aftermath: Aftermath, framing: str
) -> None:
    with connected(strict_stack) as wire:
        wire.sendall(head(framing, CLOSE))
        wire.settimeout(0.2)  # a piece so often
        answer = b""
        for piece in BODY:
            drop = bytes([piece])
            wire.sendall(drop if framing == LENGTH else b"1\r\n" + drop + b"\r\n")
            with contextlib.suppress(TimeoutError):
                answer += wire.recv(1 << 16)
            if answer:
                break
    assert status_of(answer) == 408


@pytest.mark.parametrize("reset", [False, True])
def test_who_leaves_in_the_middle_of_a_request_leaves_nothing(
    strict_stack: Stack, aftermath: Aftermath, reset: bool
) -> None:
    for cut in range(1, len(head(LENGTH) + BODY), 3):
        with connected(strict_stack) as wire:
            wire.sendall((head(LENGTH) + BODY)[:cut])
            if reset:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.parametrize("reset", [False, True])
def test_who_leaves_in_the_middle_of_a_stream_leaves_nothing(
    strict_stack: Stack, aftermath: Aftermath, reset: bool
) -> None:
    for path in (TEXT, CHAT, MESSAGES, RESPONSES) * 5:
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        with connected(strict_stack) as wire:
            wire.sendall(asking({limit: 8000, "stream": True}, path))
            assert status_of(wire.recv(1000)) == 200
            if reset:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def test_who_closes_its_half_still_gets_its_answer_or_is_gone(
    strict_stack: Stack, aftermath: Aftermath
) -> None:
    with connected(strict_stack) as wire:
        wire.sendall(request())
        wire.shutdown(socket.SHUT_WR)
        assert status_of(rest_of(wire)) in (0, 200)


def test_who_does_not_read_its_stream_is_dropped(strict_stack: Stack, aftermath: Aftermath) -> None:
    wide = {"stream": True, "n": 32, **ENDLESS, "max_tokens": 4000, "logprobs": 20}
    with connected(strict_stack, receive_bytes=4096) as wire:
        wire.sendall(asking(wide))
        assert status_of(wire.recv(1000)) == 200
        wait_empty(strict_stack)
        assert b"[DONE]" not in rest_of(wire)


def holds(stack: Stack, wire: socket.socket) -> bool:
    """Whether the server still has its end of a connection open."""
    ends = [f":{port:04X}" for port in (stack.port, wire.getsockname()[1])]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [row for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]
    return any(row[3] == "01" for row in ours)  # established


def test_who_does_not_read_its_answer_is_cut(strict_stack: Stack, aftermath: Aftermath) -> None:
    large = {"prompt": ["Hi there" * 950] * 16, "n": 64, "echo": True, "max_tokens": 1}  # 8 MB
    with connected(strict_stack, receive_bytes=4096) as wire:
        wire.sendall(asking(large))
        answer = wire.recv(1000)
        strict_stack.wait_until(lambda: not holds(strict_stack, wire), PATIENCE_S, "cut")
        answer += rest_of(wire)
    length = re.search(rb"Content-Length: (\d+)", answer)
    assert length is not None
    assert len(answer) < int(length[1]), "it all came"


def test_a_thousand_idle_connections_keep_nobody_out(
    strict_stack: Stack, aftermath: Aftermath
) -> None:
    with contextlib.ExitStack() as held:
        wires = [held.enter_context(connected(strict_stack)) for _ in range(NUM_IDLE)]
        for wire in wires[::2]:
            wire.sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
        assert status_of(said(strict_stack, request())) == 200
        assert all(rest_of(wire) == b"" for wire in wires)
    assert MODEL in strict_stack.get("/v1/models")["data"][0]["id"]
