"""The parser's process: one body at a time, once more if it dies, and never a wait without end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.child_main import HEADER, pack_frame
from common.child_process import Exited, Received
from services.router.errors import ApiError
from services.router.json_child import answer
from services.router.json_parser import PARSE_TIMEOUT_S, JsonParser


class ScriptedChild:
    """Keeps what it gets; answers and ends when the test says so."""

    is_stopped = False

    def __init__(self, received: Received, exited: Exited) -> None:
        self._received = received
        self.die = exited
        self.bodies: list[bytes] = []
        self.is_killed = self.is_closed = False

    def send(self, frame: bytes) -> None:
        self.bodies.append(frame[HEADER.size :])

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None:
        self.is_closed = True

    def ready(self) -> None:
        self._received(pack_frame(["ready"])[HEADER.size :])

    def answer(self) -> None:
        self._received(pack_frame(answer(self.bodies[-1]))[HEADER.size :])


class Bench:
    """A parser, its processes so far, and its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.children: list[ScriptedChild] = []
        self.parser = JsonParser(self._spawn, lambda: self.now_s)

    def _spawn(self, received: Received, exited: Exited) -> ScriptedChild:
        self.children.append(ScriptedChild(received, exited))
        return self.children[-1]

    async def parsing(self, value: Any) -> asyncio.Task[dict[str, Any]]:
        task = asyncio.create_task(self.parser.parse(json.dumps(value).encode()))
        await asyncio.sleep(0)
        return task


async def test_there_is_no_process_before_there_is_a_large_body() -> None:
    bench = Bench()
    bench.parser.tick(bench.now_s)
    assert bench.children == []


async def test_bodies_are_parsed_one_after_the_other() -> None:
    bench = Bench()
    tasks = [await bench.parsing({"at": at}) for at in range(3)]
    (child,) = bench.children
    assert child.bodies == []
    child.ready()
    for at, task in enumerate(tasks):
        assert len(child.bodies) == at + 1
        child.answer()
        assert await task == {"at": at}


async def test_what_is_no_json_is_the_same_400() -> None:
    bench = Bench()
    task = await bench.parsing([1])
    bench.children[0].ready()
    bench.children[0].answer()
    with pytest.raises(ApiError, match="must be a JSON object"):
        await task


async def test_a_client_that_leaves_takes_its_body_along() -> None:
    bench = Bench()
    first, second, third = [await bench.parsing({"at": at}) for at in range(3)]
    (child,) = bench.children
    child.ready()
    for task in (first, second):
        task.cancel()
        await asyncio.wait([task])
    child.answer()
    assert json.loads(child.bodies[-1]) == {"at": 2}
    child.answer()
    assert await third == {"at": 2}


async def test_a_process_that_dies_is_replaced_and_its_body_tried_once_more() -> None:
    bench = Bench()
    first, second = await bench.parsing({"at": 1}), await bench.parsing({"at": 2})
    for number in range(2):
        bench.children[number].ready()
        assert json.loads(bench.children[number].bodies[0]) == {"at": 1}
        bench.children[number].die(-9)
    with pytest.raises(ApiError) as caught:
        await first
    assert caught.value.failure.status == 503 and caught.value.failure.retryable
    bench.children[2].ready()
    bench.children[2].answer()
    assert await second == {"at": 2}


async def test_a_process_that_hangs_is_killed() -> None:
    bench = Bench()
    task = await bench.parsing({"at": 1})
    bench.children[0].ready()
    bench.parser.tick(bench.now_s + PARSE_TIMEOUT_S - 1.0)
    assert not bench.children[0].is_killed
    bench.now_s += PARSE_TIMEOUT_S
    bench.parser.tick(bench.now_s)
    assert bench.children[0].is_killed
    bench.children[0].die(-9)
    bench.children[1].ready()
    bench.children[1].answer()
    assert await task == {"at": 1}
    bench.parser.close()
    assert bench.children[1].is_closed


async def test_a_real_process_parses_as_this_one_does() -> None:
    parser = JsonParser()
    try:
        body = {"prompt": list(range(300_000)), "text": "\N{SNOWMAN}" * 100_000}
        fields = await parser.parse(json.dumps(body).encode())
        assert {**fields, "prompt": list(fields["prompt"])} == body
    finally:
        parser.close()
