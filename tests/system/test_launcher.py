"""The launcher with real processes: started, restarted with back-off, drained in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest
import structlog

from common.beacon import SILENT_S, is_ready, read_beacon
from common.errors import ConfigError
from services.launcher.child import Child
from services.launcher.front import Front
from services.launcher.supervisor import Supervisor
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub_service.py")
NAMES = ("compute-0", "router-0", "router-1", "tokenizer-0")


class Launch:
    """One run of a ring of stubs."""

    def __init__(self, run_dir: Path, grace_s: float = PATIENCE_S, **words: str) -> None:
        self.run_dir = run_dir
        self.grace_s = grace_s
        self.words = words
        self.lines: list[tuple[str, str]] = []
        self.told: list[str] = []  # the children that there are
        self.children: list[Child] = []
        self.ready_s: list[float] = []
        self.supervisor: Supervisor
        self.task: asyncio.Task[None] | None = None

    def run(self, when_ready: Callable[[Launch], None]) -> int:
        """Run until `when_ready`, called once the API answers, has had its way."""
        front = Front("127.0.0.1", 0)
        env = {**os.environ, "SLIPSTREAM_LISTEN_FD": str(front.fd), "PYTHONPATH": str(ROOT)}

        def child_of(name: str) -> Child:
            words = self.words.get(name.replace("-", "_"), "").split()
            command = (sys.executable, str(STUB), str(self.run_dir), name, *words)
            self.children.append(Child(name, command, env, (front.fd,)))
            return self.children[-1]

        def tell(names: Sequence[str]) -> None:
            self.told = [*names]

        def announce(seconds: float) -> None:
            self.ready_s.append(seconds)
            when_ready(self)

        async def supervise() -> int:
            self.supervisor = Supervisor(
                NAMES,
                child_of,
                str(self.run_dir),
                self.grace_s,
                lambda name, line: self.lines.append((name, line)),
                tell,
            )
            self.supervisor.heed_signals()
            return await self.supervisor.run(front, announce)

        return asyncio.run(supervise())

    def ready(self, service: str) -> int:
        """How many processes of a service live, -1 while one of them does not serve yet."""
        names = [child.name for child in self.children if child.alive]
        names = [name for name in names if name.startswith(service)]
        now_s = time.monotonic()
        return len(names) if all(is_ready(str(self.run_dir), n, now_s) for n in names) else -1

    @property
    def history(self) -> list[str]:
        return (self.run_dir / "history").read_text().splitlines()


def interrupt(_: Launch) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def twice(launch: Launch) -> None:
    interrupt(launch)
    asyncio.get_running_loop().call_later(0.3, interrupt, launch)


def test_ctrl_c_ends_the_routers_before_the_workers(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.run(interrupt) == 0
    ended = [line.split()[0] for line in launch.history if line.endswith("ended")]
    assert sorted(ended[:2]) == ["router-0", "router-1"]
    assert sorted(ended[2:]) == ["compute-0", "tokenizer-0"]
    assert sorted(launch.lines) == sorted((name, f"{name} says hello") for name in NAMES)


def test_a_child_that_dies_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    launch = Launch(tmp_path, compute_0="crash-once")
    with structlog.testing.capture_logs() as logs:
        assert launch.run(interrupt) == 0
    assert launch.history.count("compute-0 started") == 2
    (said,) = [line for line in logs if line["event"].startswith("died")]
    assert said["process"] == "compute-0"
    assert said["how"] == "killed by SIGKILL (out of memory?)"
    assert said["in_s"] == 0.5


def test_a_child_that_is_killed_while_serving_comes_back(tmp_path: Path) -> None:
    def kill_the_tokenizer(launch: Launch) -> None:
        launch.children[3].kill()
        when_started("tokenizer-0", 2)(launch)

    assert Launch(tmp_path).run(kill_the_tokenizer) == 0


def when_started(name: str, times: int) -> Callable[[Launch], None]:
    """Return what waits for one of a child's lives and then ends the launch."""

    def wait(launch: Launch) -> None:
        if launch.history.count(f"{name} started") == times:
            interrupt(launch)
        else:
            asyncio.get_running_loop().call_later(0.05, wait, launch)

    return wait


def killed_for_hanging(logs: list[structlog.typing.EventDict]) -> list[str]:
    how = "killed because it hung"
    return [line["process"] for line in logs if line.get("how") == how]


@pytest.mark.parametrize("name", ["compute-0", "router-1"])
def test_a_child_that_hangs_is_killed_and_started_again(tmp_path: Path, name: str) -> None:
    launch = Launch(tmp_path, **{name.replace("-", "_"): "hang-once"})
    with structlog.testing.capture_logs() as logs:
        assert launch.run(when_started(name, 2)) == 0
    assert [line["process"] for line in logs if line["event"].startswith("hangs")] == [name]
    assert killed_for_hanging(logs) == [name]


def test_a_child_that_is_stopped_is_killed_however_long_its_steps_may_be(tmp_path: Path) -> None:
    def stop_compute(launch: Launch) -> None:
        beacon = read_beacon(str(tmp_path), "compute-0")
        assert beacon is not None
        os.kill(beacon.pid, signal.SIGSTOP)
        when_started("compute-0", 2)(launch)

    with structlog.testing.capture_logs() as logs:
        assert Launch(tmp_path, compute_0="slow").run(stop_compute) == 0
    assert killed_for_hanging(logs) == ["compute-0"]


def test_a_child_in_a_long_step_that_it_announced_is_left_alone(tmp_path: Path) -> None:
    def wait(_: Launch) -> None:
        asyncio.get_running_loop().call_later(SILENT_S + 2.0, interrupt, None)

    launch = Launch(tmp_path, compute_0="slow hang-once busy")
    assert launch.run(wait) == 0
    assert launch.history.count("compute-0 started") == 1


@pytest.mark.parametrize("how", ["slow hang-once", "stop-once"])
def test_a_child_that_sleeps_in_a_long_step_or_never_begins_to_speak_is_killed(
    tmp_path: Path, how: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert Launch(tmp_path, compute_0=how).run(when_started("compute-0", 2)) == 0
    assert killed_for_hanging(logs) == ["compute-0"]


def test_a_child_that_cannot_start_ends_the_launch(tmp_path: Path) -> None:
    launch = Launch(tmp_path, compute_0="crash")
    assert launch.run(interrupt) == 1
    assert launch.ready_s == []
    assert launch.history.count("compute-0 started") == 3


def test_settings_that_cannot_work_are_not_tried_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path, tokenizer_0="misconfigured")
    assert launch.run(interrupt) == 78
    assert launch.history.count("tokenizer-0 started") == 1
    assert ("tokenizer-0", "tokenizer-0 says hello") in launch.lines


def test_a_child_whose_settings_have_worked_is_tried_again(tmp_path: Path) -> None:
    def kill_the_tokenizer(launch: Launch) -> None:
        launch.children[3].kill()
        when_started("tokenizer-0", 3)(launch)

    assert Launch(tmp_path, tokenizer_0="misconfigured-later").run(kill_the_tokenizer) == 0


def then(
    steps: Callable[[Launch], Coroutine[None, None, None]],
) -> Callable[[Launch], None]:
    """Return what takes these steps and then ends the launch."""

    def begin(launch: Launch) -> None:
        async def take() -> None:
            try:
                await asyncio.wait_for(steps(launch), PATIENCE_S)
            finally:
                interrupt(launch)

        launch.task = asyncio.get_running_loop().create_task(take())

    return begin


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_more_children_start_and_the_last_ones_end_while_the_others_run(tmp_path: Path) -> None:
    async def up_and_down(launch: Launch) -> None:
        for count in (3, 1, 2):
            await launch.supervisor.scale("tokenizer", count)
            names = [*NAMES, "tokenizer-1", "tokenizer-2"][: 3 + count]
            await until(lambda: launch.ready("tokenizer") == count and launch.told == names)  # noqa: B023

    launch = Launch(tmp_path)
    assert launch.run(then(up_and_down)) == 0
    lives = [launch.history.count(f"tokenizer-{number} started") for number in range(3)]
    assert lives == [1, 2, 1]
    assert launch.history.count("tokenizer-0 ended") == 1


def test_a_child_that_is_wanted_again_while_it_ends_is_started_again(tmp_path: Path) -> None:
    async def back_and_forth(launch: Launch) -> None:
        await launch.supervisor.scale("compute", 0)
        await launch.supervisor.scale("compute", 1)
        await until(lambda: launch.history.count("compute-0 started") == 2)

    with structlog.testing.capture_logs() as logs:
        assert Launch(tmp_path).run(then(back_and_forth)) == 0
    assert [line for line in logs if line["event"].startswith("died")] == []


def test_the_server_goes_on_without_an_added_child_that_cannot_work(tmp_path: Path) -> None:
    async def add(launch: Launch) -> None:
        await launch.supervisor.scale("tokenizer", 2)
        await until(lambda: launch.supervisor.count("tokenizer") == 1)

    with structlog.testing.capture_logs() as logs:
        assert Launch(tmp_path, tokenizer_1="misconfigured").run(then(add)) == 0
    assert [line["process"] for line in logs if "goes on without" in line["event"]] == [
        "tokenizer-1"
    ]


def test_a_second_ctrl_c_kills_what_does_not_end(tmp_path: Path) -> None:
    launch = Launch(tmp_path, grace_s=1e6, router_0="stubborn")
    assert launch.run(twice) == 130
    assert not any(child.alive for child in launch.children)


def test_a_taken_port_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            Front("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: not an address of this machine"):
        Front("192.0.2.1", 0)
