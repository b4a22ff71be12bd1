"""A service starts, serves, drains at a signal and ends with the right status."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.beacon import is_ready, read_beacon
from common.errors import FatalError
from common.link.transport import Deliver, PeerLost
from common.messages.address import Address
from common.service import Watch, run_service

HERE = Address("here", "1")


@dataclass
class Note:
    TAG = "note"
    text: str


class ListTransport:
    """Hands over what the test puts in, when the inbox opens."""

    def __init__(self, *messages: Any) -> None:
        self.address = HERE
        self.messages = messages
        self.linger_s: float | None = None

    def open(self, deliver: Deliver, peer_lost: PeerLost) -> None:
        for message in self.messages:
            deliver(message, HERE)

    def send(self, to: Address, message: Any) -> None: ...

    def forget(self, peer: Address) -> None: ...

    async def close(self, linger_s: float) -> None:
        self.linger_s = linger_s


class Recorder:
    """An actor that writes down what is done to it and does, on a tick, what the test says."""

    def __init__(self, on_tick: Callable[[Recorder], None]) -> None:
        self.calls: list[str] = []
        self.ready = True
        self.drained = True
        self.longest_block_s = 0.0
        self.on_tick = on_tick
        self.num_ticks = 0

    async def start(self, transport: Any) -> None:
        self.calls.append("start")

    def receive(self, message: Any, sender: Address) -> None:
        self.calls.append(message.text)
        if message.text == "broken":
            raise ValueError("cannot be handled")
        if message.text == "fatal":
            raise FatalError("the device is lost")

    def peer_lost(self, peer: Address) -> None: ...

    def tick(self, now_s: float) -> None:
        self.num_ticks += 1
        self.on_tick(self)

    def drain(self) -> None:
        self.calls.append("drain")

    async def stop(self) -> None:
        self.calls.append("stop")


def terminate(actor: Recorder) -> None:
    if actor.num_ticks == 1:
        terminate_again(actor)


def terminate_again(_: Recorder) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_drains_stops_and_ends_with_status_0() -> None:
    actor, transport = Recorder(terminate), ListTransport()
    assert run_service("x", actor, lambda: transport, Watch()) == 0
    assert actor.calls == ["start", "drain", "stop"]
    assert transport.linger_s == 5.0


def test_messages_are_delivered_only_after_the_start() -> None:
    actor = Recorder(terminate)
    run_service("x", actor, lambda: ListTransport(Note("hello")), Watch())
    assert actor.calls == ["start", "hello", "drain", "stop"]


def test_a_drain_waits_until_the_work_is_done() -> None:
    def step(actor: Recorder) -> None:
        if actor.num_ticks == 1:
            actor.drained = False
            terminate(actor)
        actor.drained = actor.num_ticks >= 4

    actor = Recorder(step)
    assert run_service("x", actor, ListTransport, Watch()) == 0
    assert actor.num_ticks == 4


def test_the_actor_ticks_once_more_before_it_ends_so_that_others_hear_of_the_drain() -> None:
    actor = Recorder(terminate)
    assert run_service("x", actor, ListTransport, Watch()) == 0
    assert actor.num_ticks == 2


def test_a_drain_ends_with_the_grace_time() -> None:
    actor = Recorder(lambda actor: terminate(actor) if actor.num_ticks == 1 else None)
    actor.drained = False
    assert run_service("x", actor, ListTransport, Watch(grace_s=0.25)) == 0
    assert actor.calls[-1] == "stop"
    assert 2 <= actor.num_ticks <= 6


def test_a_second_signal_ends_it_at_once() -> None:
    actor, transport = Recorder(terminate_again), ListTransport()
    actor.drained = False
    assert run_service("x", actor, lambda: transport, Watch(grace_s=60)) == 128 + signal.SIGTERM
    assert actor.calls[-1] == "stop"
    assert transport.linger_s == 0.0


def test_a_message_that_breaks_a_handler_is_logged_by_its_tag_and_ends_nothing() -> None:
    actor = Recorder(terminate)
    with structlog.testing.capture_logs() as lines:
        status = run_service(
            "x", actor, lambda: ListTransport(Note("broken"), Note("next")), Watch()
        )
    assert status == 0
    assert actor.calls == ["start", "broken", "next", "drain", "stop"]
    failed = [line for line in lines if line["event"] == "message failed"]
    assert [line["tag"] for line in failed] == ["note"]


def test_a_fatal_error_ends_the_process_with_status_1() -> None:
    actor = Recorder(lambda _: None)
    assert run_service("x", actor, lambda: ListTransport(Note("fatal")), Watch()) == 1
    assert actor.calls == ["start", "fatal", "stop"]


def test_a_fatal_error_in_a_tick_ends_the_process_too() -> None:
    def fail(_: Recorder) -> None:
        raise FatalError("the engine is gone")

    assert run_service("x", Recorder(fail), ListTransport, Watch()) == 1


def test_what_start_raises_comes_out_after_the_links_are_closed() -> None:
    class Broken(Recorder):
        async def start(self, transport: Any) -> None:
            raise ValueError("no model")

    transport = ListTransport()
    with pytest.raises(ValueError, match="no model"):
        run_service("x", Broken(terminate), lambda: transport, Watch())
    assert transport.linger_s is not None


def test_the_end_of_the_launcher_drains_the_service() -> None:
    read_fd, write_fd = os.pipe()
    actor = Recorder(lambda actor: os.close(write_fd) if actor.num_ticks == 1 else None)
    assert run_service("x", actor, ListTransport, Watch(launcher_fd=read_fd)) == 0
    assert actor.calls == ["start", "drain", "stop"]
    os.close(read_fd)


def test_the_beacon_says_while_the_actor_is_ready(
    tmp_path: Path,
) -> None:
    seen = []

    def step(actor: Recorder) -> None:
        seen.append(is_ready(str(tmp_path), "x", time.monotonic()))
        actor.ready = actor.num_ticks in (2, 3)
        if actor.num_ticks == 5:
            terminate_again(actor)

    run_service("x", Recorder(step), ListTransport, Watch(run_dir=str(tmp_path)))
    assert seen[:5] == [False, False, True, True, False]
    assert list(tmp_path.iterdir()) == []


def test_the_beacon_goes_on_through_the_drain_with_the_time_that_the_loop_may_block(
    tmp_path: Path,
) -> None:
    def step(actor: Recorder) -> None:
        if actor.num_ticks == 1:
            actor.drained, actor.longest_block_s = False, 60.0
            terminate(actor)
        if actor.num_ticks == 4:
            seen.append(read_beacon(str(tmp_path), "x"))
            actor.drained = True

    seen: list[Any] = []
    run_service("x", Recorder(step), ListTransport, Watch(run_dir=str(tmp_path)))
    assert (seen[0].pid, seen[0].is_ready, seen[0].silent_s) == (os.getpid(), False, 60.0)


def test_a_service_whose_beacon_cannot_be_written_stops_in_order(tmp_path: Path) -> None:
    actor, transport = Recorder(terminate), ListTransport()
    watch = Watch(run_dir=str(tmp_path / "gone"))
    assert run_service("x", actor, lambda: transport, watch) == 0
    assert actor.calls == ["start", "drain", "stop"]
    assert transport.linger_s == 5.0


def test_the_tick_hook_runs_with_every_tick() -> None:
    ticks: list[int] = []
    actor = Recorder(lambda actor: terminate_again(actor) if actor.num_ticks == 3 else None)
    run_service("x", actor, ListTransport, Watch(on_tick=lambda: ticks.append(1)))
    assert len(ticks) == actor.num_ticks
