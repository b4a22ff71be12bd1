"""The control socket of a run: a line of JSON asks for counts, a line of JSON answers.

It lies in the run's private folder, so that only the user who started the server can ask. It knows
nothing of how the processes are placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from services.launcher.replicas import (
    Replicas,
    ScaleError,
    check_count,
    counts_of,
    service_named,
)

CONTROL_SOCKET = "control.sock"
MAX_LINE_BYTES = 4096
READ_S = 5.0  # for a question
ANSWER_S = 120.0  # for the answer: to place a process may take a scheduler its time


@contextlib.asynccontextmanager
async def serve_control(path: str, replicas: Replicas) -> AsyncIterator[None]:
    """Answer at `path` for as long as this is open; only this user can connect."""
    answer = partial(_answer, replicas)
    server = await asyncio.start_unix_server(answer, path, limit=MAX_LINE_BYTES)
    try:
        os.chmod(path, 0o600)
        yield
    finally:
        server.close()
        with contextlib.suppress(OSError):
            os.unlink(path)


def ask_control(path: str, counts: Mapping[str, int]) -> dict[str, int]:
    """Change these counts of a run and return all; ScaleError says why it cannot be."""
    question = json.dumps({"scale": dict(counts)}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.settimeout(ANSWER_S)
            link.connect(path)
            link.sendall(question)
            answer = json.loads(link.makefile("rb").readline() or b"{}")
        except (OSError, ValueError) as error:
            raise ScaleError(f"no answer from {path}: {error}") from error
    if "counts" not in answer:
        raise ScaleError(str(answer.get("error", f"no answer from {path}: it ended")))
    return {str(service): int(count) for service, count in answer["counts"].items()}


async def _answer(
    replicas: Replicas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(OSError):  # it left
        try:
            async with asyncio.timeout(READ_S):
                wanted = _counts_in(await reader.readline())
            for service, count in wanted.items():
                check_count(service, count)
            for service, count in wanted.items():
                await replicas.scale(service, count)
            answer: dict[str, Any] = {"counts": counts_of(replicas)}
        except TimeoutError:
            answer = {"error": f"no question came within {READ_S:.0f} s"}
        except (ScaleError, ValueError) as error:  # or the line is too long
            answer = {"error": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
    writer.close()


def _counts_in(line: bytes) -> dict[str, int]:
    """Read `{"scale": {"compute": 2}}`; ScaleError for anything else."""
    try:
        counts = json.loads(line)["scale"]
        if all(type(count) is int for count in counts.values()):
            return {service_named(service): count for service, count in counts.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ScaleError('the question should be a line such as {"scale": {"compute": 2}}')
