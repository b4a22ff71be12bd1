"""Who is let in: nobody before there are workers or after the end has begun, and not too many."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from services.router.listener import ALONE_S, MAX_REFUSALS, Listener, max_connections
from tests.patience import PATIENCE_S

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def listening(shared: socket.socket | None, limit: int = 100) -> AsyncIterator[Listener]:
    """A listener on the shared socket, or on one of its own, which says hello."""

    async def hello(_: web.BaseRequest) -> web.Response:
        return web.Response(text="hello")

    server = web.Server(hello)
    listener = Listener(server, limit)
    fd = None if shared is None else shared.dup().detach()
    listener.port = await listener.open("127.0.0.1", 0, fd)  # type: ignore[attr-defined]
    try:
        yield listener
    finally:
        listener.close()
        await server.shutdown(1.0)


@asynccontextmanager
async def shared_socket() -> AsyncIterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as shared:
        yield shared


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def status(port: int) -> bytes:
    """Ask on a connection of its own; returns the status line."""
    reader, writer = await connect(port)
    writer.write(REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        line = await reader.readline()
    writer.close()
    return line


def port_of(shared: socket.socket) -> int:
    return int(shared.getsockname()[1])


async def test_on_a_shared_socket_it_accepts_when_it_can_serve() -> None:
    async with shared_socket() as shared, listening(shared) as listener:
        asked = asyncio.create_task(status(port_of(shared)))
        listener.tick(100.0, ready=False, idle=True)
        await asyncio.sleep(0.1)
        assert not asked.done()
        listener.tick(100.1, ready=True, idle=True)
        assert await asked == b"HTTP/1.1 200 OK\r\n"


async def test_without_workers_it_accepts_after_a_while() -> None:
    async with shared_socket() as shared, listening(shared) as listener:
        asked = asyncio.create_task(status(port_of(shared)))
        for now_s in (100.0, 100.0 + ALONE_S - 0.1):
            listener.tick(now_s, ready=False, idle=True)
            await asyncio.sleep(0.05)
            assert not asked.done()
        listener.tick(100.0 + ALONE_S, ready=False, idle=True)
        assert await asked == b"HTTP/1.1 200 OK\r\n"


async def test_once_closed_it_leaves_the_socket_to_its_siblings() -> None:
    async with shared_socket() as shared, listening(shared) as first, listening(shared) as second:
        first.tick(100.0, ready=True, idle=True)
        await asyncio.sleep(0)
        first.close()
        first.tick(100.1, ready=True, idle=True)
        asked = [asyncio.create_task(status(port_of(shared))) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asked)
        second.tick(100.0, ready=True, idle=True)
        assert set(await asyncio.gather(*asked)) == {b"HTTP/1.1 200 OK\r\n"}
        assert first.is_quiet


async def test_beyond_its_bound_a_connection_is_told_so_and_closed() -> None:
    async with listening(None, limit=3) as listener:
        port: int = listener.port  # type: ignore[attr-defined]
        held = [await connect(port) for _ in range(3)]
        for _, writer in held:
            writer.write(REQUEST)
        assert [await reader.readline() for reader, _ in held] == [b"HTTP/1.1 200 OK\r\n"] * 3
        for sent in (b"", REQUEST):
            reader, writer = await connect(port)
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_S):
                said = await reader.read()
            writer.close()
            assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"Retry-After: 1\r\nConnection: close\r\n" in said
            assert b'"code": "too_many_connections"' in said
        held[0][1].close()
        for _ in range(1_000):
            if await status(port) == b"HTTP/1.1 200 OK\r\n":
                break
        else:
            raise AssertionError("who left keeps its place")
        for _, writer in held:
            writer.close()


async def test_refusals_themselves_are_bounded() -> None:
    async with listening(None, limit=0) as listener:
        port: int = listener.port  # type: ignore[attr-defined]
        told = 0
        held = [await connect(port) for _ in range(MAX_REFUSALS + 8)]
        for reader, _ in held:
            async with asyncio.timeout(PATIENCE_S):
                try:
                    told += (await reader.read()).startswith(b"HTTP/1.1 503 ")
                except ConnectionError:
                    continue
        assert 0 < told <= MAX_REFUSALS
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("max_open_files", "connections"), [(65_536, 65_280), (1024, 768), (256, 128), (64, 32)]
)
def test_links_keep_descriptors_of_their_own(max_open_files: int, connections: int) -> None:
    assert max_connections(max_open_files) == connections
