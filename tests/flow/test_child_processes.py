"""Real child processes: what they read and write, and every way in which they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop

from common.child_main import HEADER, pack_frame
from common.child_process import PipedChild
from tests.patience import PATIENCE_S

CHILD = """
import os, signal, sys, time
import msgpack
from common.child_main import ResourceLimits, limit_memory, pack_frame, serve


def work(frames, owner):
    print("this must not come between the frames")
    owner.ready()
    for frame in frames:
        match msgpack.unpackb(frame):
            case ["echo", value]:
                owner.write(pack_frame(["echoed", value]))
            case ["exit", status]:
                return status
            case ["hang"]:
                time.sleep(1000)
            case ["too long"]:
                with ResourceLimits(0.2, 1 << 30).held():
                    time.sleep(1000)
            case ["too large"]:
                try:
                    with ResourceLimits(60.0, 64 << 20).held():
                        bytes(1 << 30)
                except MemoryError:
                    owner.write(pack_frame(["caught"]))
            case ["fork"]:
                if os.fork() == 0:
                    time.sleep(1000)
                owner.write(pack_frame(["forked"]))
            case ["garbage"]:
                os.write(owner._fd, b"\\xff" * 8)
                time.sleep(1000)
    return 0


serve(work)
"""


class Talk:
    """One child, what it reported, and its status once it has ended."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.status: int | None = None
        self.child = PipedChild("planted_child", [], self._received, self._exited)

    def say(self, *values: Any) -> None:
        self.child.send(pack_frame(values))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def ready(self) -> Talk:
        await self.until(lambda: bool(self.reports))
        assert self.reports == [["ready"]]
        return self

    async def ended(self) -> int:
        await self.until(lambda: self.status is not None)
        assert self.status is not None
        return self.status

    def _received(self, payload: bytes) -> None:
        self.reports.append(msgpack.unpackb(payload))

    def _exited(self, status: int) -> None:
        self.status = status


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario in a loop of its own, of both kinds: services run on uvloop."""
    (tmp_path / "planted_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return uvloop.run if request.param == "uvloop" else asyncio.run  # type: ignore[no-any-return]


def test_large_frames_go_there_and_back(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        values = [b"x" * 5_000_000, "ä" * 100_000, 7]
        for value in values:
            talk.say("echo", value)
        await talk.until(lambda: len(talk.reports) == 4)
        assert talk.reports[1:] == [["echoed", value] for value in values]
        talk.child.close()

    play(scenario())


@pytest.mark.parametrize(
    ("order", "status"), [(["exit", 0], 0), (["exit", 3], 3), (["too long"], -signal.SIGALRM)]
)
def test_the_status_says_how_a_child_ended(
    order: list[Any], status: int, play: Callable[..., None]
) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say(*order)
        assert await talk.ended() == status
        talk.say("echo", 1)  # nothing reads it, which is no error

    play(scenario())


def test_a_child_that_hangs_is_killed(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say("hang")
        talk.child.kill()
        assert await talk.ended() == -signal.SIGKILL

    play(scenario())


def test_a_child_that_writes_no_frames_is_killed(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say("garbage")
        assert await talk.ended() == -signal.SIGKILL

    play(scenario())


def test_a_closed_child_is_gone_and_reports_nothing(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say("hang")
        talk.child.close()
        talk.child.close()
        with pytest.raises(ProcessLookupError):
            os.kill(talk.child.pid, 0)
        await asyncio.sleep(0.02)
        assert talk.status is None and talk.reports == [["ready"]]

    play(scenario())


def test_what_a_child_has_forked_is_killed_with_it(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say("fork")
        await talk.until(lambda: len(talk.reports) == 2)
        talk.child.kill()
        assert await talk.ended() == -signal.SIGKILL  # the pipe ends with its last writer

    play(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux only")
def test_memory_beyond_the_limit_is_an_exception(play: Callable[..., None]) -> None:
    async def scenario() -> None:
        talk = await Talk().ready()
        talk.say("too large")
        await talk.until(lambda: len(talk.reports) == 2)
        assert talk.reports[1] == ["caught"]
        talk.child.close()

    play(scenario())


def test_a_child_ends_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "planted_child.py").write_text(CHILD)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-m", "planted_child"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0
    assert done.stdout[HEADER.size :] == msgpack.packb(["ready"])
    assert b"between the frames" in done.stderr
