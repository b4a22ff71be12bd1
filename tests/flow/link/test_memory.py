"""The in-memory links behave as the real ones: order, instances, outboxes, losses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import InboxTaken, MessageTooLarge
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s, int64s
from common.messages.control import Abort, Load, ModelCard, RouterAlive, WorkerAlive
from common.messages.generate import ComputeInbox
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from tests.memory_link import Exchange, MemoryTransport, endpoint_of

A = AttemptId("r", 1)


class Box:
    """An inbox that keeps what it gets."""

    def __init__(self, exchange: Exchange, name: str, inbox: Any) -> None:
        self.transport: MemoryTransport = exchange.transport(name, inbox)
        self.got: list[Any] = []
        self.senders: list[Address] = []
        self.lost: list[Address] = []
        self.transport.open(self.deliver, self.lost.append)

    def deliver(self, message: Any, sender: Address) -> None:
        self.got.append(message)
        self.senders.append(sender)


def abort(counter: int) -> Abort:
    return Abort(AttemptId("r", counter), "lost")


def step(index: int) -> TokensGenerated:
    builder = TokensGenerated(index)
    builder.add(A, index, (index,))
    return builder


def pair(exchange: Exchange) -> tuple[Box, Box]:
    return Box(exchange, "compute-0", ComputeInbox), Box(
        exchange, "detokenizer-0", DetokenizerInbox
    )


def test_nothing_arrives_before_the_test_says_so() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    compute.transport.send(detokenizer.transport.address, step(0))
    assert detokenizer.got == []
    assert exchange.deliver() == 1
    assert detokenizer.got == [step(0)]
    assert detokenizer.senders == [compute.transport.address]


def test_messages_are_delivered_one_by_one_in_order() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    for counter in range(3):
        detokenizer.transport.send(compute.transport.address, abort(counter))
    exchange.deliver(2)
    assert [message.attempt.counter for message in compute.got] == [0, 1]
    assert exchange.num_in_flight == 1


async def test_auto_delivers_in_the_next_turn_of_the_loop() -> None:
    exchange = Exchange(auto=True)
    compute, detokenizer = pair(exchange)
    detokenizer.transport.send(compute.transport.address, abort(1))
    assert compute.got == []
    await asyncio.sleep(0)
    assert compute.got == [abort(1)]


def test_a_message_for_a_former_instance_is_dropped_and_counted() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    old = compute.transport.address
    exchange.kill("compute-0")
    reborn = Box(exchange, "compute-0", ComputeInbox)
    assert reborn.transport.address.endpoint == old.endpoint
    detokenizer.transport.send(old, abort(1))
    detokenizer.transport.send(reborn.transport.address, abort(2))
    exchange.deliver()
    assert reborn.got == [abort(2)]
    assert reborn.transport.stats().num_misaddressed == 1


def test_only_control_messages_may_be_for_any_instance() -> None:
    exchange = Exchange()
    compute, _ = pair(exchange)
    router = Box(exchange, "router-0", RouterInbox)
    anybody = Address(endpoint_of("router-0"), "")
    alive = WorkerAlive(
        service="compute",
        address=compute.transport.address,
        model=ModelCard("m", "1", 10),
        load=Load(0, 0, 1),
        beat=1,
        progress=0,
        stall_after_s=5.0,
        draining=False,
        open_counters=int64s(),
    )
    compute.transport.send(anybody, alive)
    compute.transport.send(anybody, TextGenerated())
    router.transport.send(
        Address(endpoint_of("compute-0"), ""), RouterAlive(router.transport.address, 1)
    )
    exchange.deliver()
    assert router.got == [alive]
    assert router.transport.stats().num_misaddressed == 1
    assert compute.got == [RouterAlive(router.transport.address, 1)]


def test_messages_wait_merged_while_a_peer_takes_none() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.refuse("detokenizer-0")
    for index in range(50):
        compute.transport.send(detokenizer.transport.address, step(index))
    assert compute.transport.stats().num_waiting == 1
    exchange.accept("detokenizer-0")
    exchange.deliver()
    (message,) = detokenizer.got
    (row,) = message.runs()
    assert row.token_ids.tolist() == list(range(50))


def test_a_peer_that_takes_none_for_two_seconds_is_lost_with_its_messages() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    router = Box(exchange, "router-0", RouterInbox)
    exchange.refuse("detokenizer-0")
    compute.transport.send(detokenizer.transport.address, step(0))
    exchange.advance(1.9)
    assert compute.lost == []
    exchange.advance(0.2)
    assert compute.lost == [detokenizer.transport.address]
    exchange.accept("detokenizer-0")
    exchange.deliver()
    assert detokenizer.got == []
    assert compute.transport.stats().num_dropped == 1
    assert router.lost == []


def test_a_message_to_an_absent_peer_waits_for_its_two_seconds() -> None:
    exchange = Exchange()
    compute = Box(exchange, "compute-0", ComputeInbox)
    compute.transport.send(Address(endpoint_of("detokenizer-0"), "x"), step(0))
    exchange.advance(2.0)
    assert [address.instance_id for address in compute.lost] == ["x"]


def test_forgetting_a_peer_drops_what_waits_for_it() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.refuse("detokenizer-0")
    compute.transport.send(detokenizer.transport.address, step(0))
    compute.transport.forget(detokenizer.transport.address)
    exchange.advance(5.0)
    assert compute.lost == []
    assert compute.transport.stats().num_dropped == 1


def test_chosen_messages_can_be_lost_on_the_way() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.drop(1, to="detokenizer-0", kind=TokensGenerated)
    detokenizer.transport.send(compute.transport.address, abort(1))
    for index in range(2):
        compute.transport.send(detokenizer.transport.address, step(index))
    exchange.deliver()
    assert compute.got == [abort(1)]
    assert detokenizer.got == [step(1)]


def test_delayed_messages_come_when_they_are_released() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.delay("detokenizer-0")
    compute.transport.send(detokenizer.transport.address, step(0))
    detokenizer.transport.send(compute.transport.address, abort(1))
    exchange.deliver()
    assert (detokenizer.got, compute.got) == ([], [abort(1)])
    exchange.release("detokenizer-0")
    exchange.deliver()
    assert detokenizer.got == [step(0)]


def test_a_malformed_message_is_counted_and_stops_nothing() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.inject("compute-0", [b"\xc1", b"rubbish"])
    detokenizer.transport.send(compute.transport.address, abort(1))
    exchange.deliver()
    assert compute.got == [abort(1)]
    assert compute.transport.stats().num_malformed == 1


def test_a_message_of_another_inbox_is_malformed() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    query = DetokenizeQuery(A, compute.transport.address, int32s())
    detokenizer.transport.send(compute.transport.address, query)
    exchange.deliver()
    assert compute.transport.stats().num_malformed == 1


def test_a_message_over_the_limit_is_refused_to_its_sender() -> None:
    exchange = Exchange(max_message_bytes=1000)
    compute, detokenizer = pair(exchange)
    query = DetokenizeQuery(A, compute.transport.address, int32s(range(1000)))
    with pytest.raises(MessageTooLarge, match="DetokenizeQuery"):
        compute.transport.send(detokenizer.transport.address, query)


def test_messages_that_come_before_open_are_kept() -> None:
    exchange = Exchange()
    compute, _ = pair(exchange)
    late = exchange.transport("router-0", RouterInbox)
    compute.transport.send(late.address, TextGenerated())
    exchange.deliver()
    assert not late.inbox_empty
    got: list[Any] = []
    late.open(lambda message, sender: got.append(message), lambda peer: None)
    assert len(got) == 1
    assert late.inbox_empty


def test_a_name_has_one_inbox_at_a_time() -> None:
    exchange = Exchange()
    pair(exchange)
    with pytest.raises(InboxTaken):
        exchange.transport("compute-0", ComputeInbox)


async def test_closing_an_old_life_leaves_the_new_one_alone() -> None:
    exchange = Exchange()
    compute, detokenizer = pair(exchange)
    exchange.kill("compute-0")
    reborn = Box(exchange, "compute-0", ComputeInbox)
    await compute.transport.close(1.0)
    detokenizer.transport.send(reborn.transport.address, abort(1))
    exchange.deliver()
    assert reborn.got == [abort(1)]
