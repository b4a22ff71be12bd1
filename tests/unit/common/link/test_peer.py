"""An outbox keeps order, merges what merges and knows when a peer has had its time."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
import zmq

from common.link.peer import Outbox, connect
from common.messages.address import Address, AttemptId
from common.messages.control import Abort, RouterAlive
from common.messages.tokens import TokensGenerated

A = AttemptId("r", 1)
ABORT = Abort(A, "lost")


def step(index: int) -> TokensGenerated:
    builder = TokensGenerated(index)
    builder.add(A, index, (index,))
    return builder


def filled(*messages: object, max_message_bytes: int = 1000) -> Outbox:
    outbox = Outbox(max_message_bytes)
    for message in messages:
        outbox.put(message, [b"x" * 10], 10, 0.0)
    return outbox


def test_steps_share_one_slot_however_many_wait() -> None:
    outbox = filled(*[step(index) for index in range(20)])
    assert len(outbox) == 1
    (row,) = outbox.first.message.runs()
    assert row.token_ids.tolist() == list(range(20))
    assert outbox.first.frames is None
    assert outbox.num_merged == 19


def test_messages_never_overtake_each_other() -> None:
    outbox = filled(step(0), ABORT, step(1))
    kinds = []
    while outbox:
        kinds.append(type(outbox.first.message))
        outbox.sent(0.0)
    assert kinds == [TokensGenerated, Abort, TokensGenerated]


def test_a_merged_message_never_grows_beyond_the_limit_of_messages() -> None:
    outbox = filled(*[step(index) for index in range(20)], max_message_bytes=100)
    sizes = []
    while outbox:
        sizes.append(outbox.first.num_bytes)
        outbox.sent(0.0)
    assert sizes == [50, 50, 50, 50]


def test_two_seconds_without_movement_are_too_long() -> None:
    outbox = filled(ABORT, ABORT)
    assert not outbox.overdue(1.9)
    assert outbox.overdue(2.0)


def test_one_message_that_leaves_buys_two_more_seconds() -> None:
    outbox = filled(ABORT, ABORT)
    outbox.sent(1.5)
    assert not outbox.overdue(3.0)
    assert outbox.overdue(3.5)


def test_an_empty_outbox_is_never_overdue() -> None:
    outbox = filled(ABORT)
    outbox.sent(1.0)
    assert not outbox.overdue(100.0)


def test_time_counts_from_the_first_that_waits_anew() -> None:
    outbox = filled(ABORT)
    outbox.sent(0.0)
    outbox.put(ABORT, [b""], 10, 50.0)
    assert not outbox.overdue(51.0)


def test_a_peer_that_makes_too_many_bytes_wait_is_overdue_at_once() -> None:
    outbox = filled(*[ABORT] * 21, max_message_bytes=100)
    assert outbox.overdue(0.0)


def test_a_heartbeat_alone_holds_up_no_end() -> None:
    assert not filled().holds_up
    assert not filled(RouterAlive(Address("mem://router", "r"), 1)).holds_up
    assert filled(RouterAlive(Address("mem://router", "r"), 1), ABORT).holds_up


def test_who_lacks_a_descriptor_to_look_with_gives_nobody_up_and_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    context = zmq.Context()
    peer = connect(context, Address(f"ipc://{tmp_path}/none", "1"), Outbox(1000), None)
    try:
        peer.to_probe = True
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", no_descriptor_left)
            assert peer.why_gone(1.0) == ""
        assert peer.why_gone(1.1) == "", "not at once again"
        assert peer.why_gone(2.0) == "its process has ended"
    finally:
        peer.close()
        context.term()
