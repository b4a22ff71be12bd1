"""A worker beats every router twice a second and knows which of them live."""

from __future__ import annotations

from common.messages.address import Address
from common.messages.arrays import uint32s, uint64s
from common.messages.control import Load, ModelCard, RouterAlive, WorkerAlive
from common.messages.experts import ExpertLoad
from common.messages.generate import ComputeInbox
from common.messages.text import RouterInbox
from common.registration import (
    BEAT_INTERVAL_S,
    Beat,
    Heartbeats,
    Registration,
    WorkerState,
)
from tests.memory_link import Exchange

ONE, TWO = "tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"
ROUTER = Address(ONE, "r1")


def beating(*endpoints: str) -> Heartbeats:
    beats = Heartbeats()
    beats.resolved(endpoints, 0.0)
    return beats


def registered() -> Heartbeats:
    beats = beating(ONE)
    (beat,) = beats.due(0.0)
    beats.answered(RouterAlive(ROUTER, beat.beat), 0.0)
    return beats


def tick(beats: Heartbeats, start_s: float, end_s: float) -> list[tuple[float, str]]:
    found = []
    for step in range(round(start_s * 10), round(end_s * 10) + 1):
        found += [(step / 10, name) for name in beats.expired(step / 10)]
    return found


def test_the_first_beat_is_for_any_router_at_the_endpoint() -> None:
    assert beating(ONE, TWO).due(0.0) == [Beat(Address(ONE, ""), 1), Beat(Address(TWO, ""), 2)]


def test_once_answered_beats_go_to_that_instance_twice_a_second() -> None:
    beats = registered()
    assert beats.due(0.4) == []
    assert beats.due(0.5) == [Beat(ROUTER, 2)]
    assert beats.registered


def test_at_most_one_beat_is_outstanding() -> None:
    beats = beating(ONE)
    beats.due(0.0)
    assert beats.due(0.5) == []
    assert beats.due(1.9) == []


def test_a_beat_unanswered_for_a_lease_is_taken_for_lost() -> None:
    beats = beating(ONE)
    beats.due(0.0)
    assert beats.due(2.0) == [Beat(Address(ONE, ""), 2)]


def test_a_lost_peer_is_beaten_again_when_it_is_time() -> None:
    beats = beating(ONE, TWO)
    beats.due(0.0)
    beats.lost(Address(ONE, ""))
    assert [beat.to.endpoint for beat in beats.due(0.5)] == [ONE]


def test_a_silent_router_expires_after_two_seconds() -> None:
    beats = registered()
    assert tick(beats, 0.0, 3.0) == [(2.1, "r1")]
    assert not beats.registered
    assert not beats.is_live("r1", 3.0)


def test_after_a_routers_end_its_endpoint_gets_beats_for_any_router() -> None:
    beats = registered()
    tick(beats, 0.0, 3.0)
    assert beats.due(3.0) == [Beat(Address(ONE, ""), 2)]


def test_any_message_of_a_router_renews_its_lease() -> None:
    beats = registered()
    tick(beats, 0.0, 1.5)
    beats.heard(ROUTER, 1.5)
    assert tick(beats, 1.6, 3.5) == []
    assert beats.is_live("r1", 3.5)


def test_a_send_after_the_lease_is_stopped_before_the_next_tick() -> None:
    beats = registered()
    assert beats.is_live("r1", 2.0)
    assert not beats.is_live("r1", 2.05)


def test_a_worker_that_stood_still_drops_no_attempts() -> None:
    beats = registered()
    beats.expired(0.1)
    assert beats.expired(9.0) == []
    assert beats.is_live("r1", 9.0)


def test_a_router_known_only_from_an_attempt_must_be_heard_of_too() -> None:
    beats = beating()
    beats.expect("r9", 0.0)
    assert beats.is_live("r9", 1.0)
    assert not beats.registered
    assert tick(beats, 0.0, 3.0) == [(2.1, "r9")]


def test_an_answer_from_another_address_than_the_name_resolved_to_counts() -> None:
    beats = beating(ONE)
    (beat,) = beats.due(0.0)
    elsewhere = Address("tcp://192.168.0.1:5000", "r1")
    beats.answered(RouterAlive(elsewhere, beat.beat), 0.1)
    assert beats.due(0.5) == [Beat(elsewhere, 2)]


def test_a_name_that_no_longer_resolves_keeps_its_live_router() -> None:
    beats = registered()
    beats.resolved([TWO], 1.0)
    assert {beat.to.endpoint for beat in beats.due(1.0)} == {ONE, TWO}


def test_a_dead_router_that_no_longer_resolves_is_beaten_no_more() -> None:
    beats = registered()
    tick(beats, 0.0, 3.0)
    beats.resolved([TWO], 3.0)
    assert [beat.to.endpoint for beat in beats.due(3.0)] == [TWO]


def test_resolving_the_same_again_beats_no_sooner() -> None:
    beats = beating(ONE)
    beats.due(0.0)
    beats.resolved([ONE], 0.1)
    assert beats.due(0.1) == []


def test_an_unanswered_beat_is_followed_by_one_for_any_router() -> None:
    beats = registered()
    assert beats.due(0.5) == [Beat(ROUTER, 2)]
    assert beats.due(2.5) == [Beat(Address(ONE, ""), 3)]


def test_a_router_that_came_back_ends_its_former_life_though_no_lease_is_ever_judged() -> None:
    beats = registered()
    beats.due(0.5)
    for step in range(1, 5):  # in steps of 0.6 s leases start again with each
        assert beats.expired(step * 0.6) == []
    (beat,) = beats.due(2.5)
    beats.answered(RouterAlive(Address(ONE, "r2"), beat.beat), 2.6)
    assert beats.expired(3.2) == ["r1"]
    assert beats.expired(3.8) == []
    assert beats.is_live("r2", 3.8) and not beats.is_live("r1", 3.8)


def test_a_drain_is_announced_at_once_and_ends_when_every_router_has_nothing_more_to_come() -> None:
    beats = registered()
    assert beats.released
    beats.due(0.5)
    beats.drain()
    (beat,) = beats.due(0.6)
    beats.answered(RouterAlive(ROUTER, beat.beat - 1), 0.61)  # an answer to what came before
    assert not beats.released
    beats.answered(RouterAlive(ROUTER, beat.beat, num_open=1), 0.62)
    assert not beats.released
    (last_beat,) = beats.due(0.8)
    beats.answered(RouterAlive(ROUTER, last_beat.beat), 0.81)
    assert beats.released


def test_a_router_that_never_answers_does_not_keep_a_draining_worker() -> None:
    beats = beating(ONE)
    beats.drain()
    beats.due(0.0)
    assert beats.released


def test_a_router_that_leaves_is_gone_at_once() -> None:
    beats = registered()
    beats.drain()
    assert not beats.released
    beats.answered(RouterAlive(ROUTER, 0, leaving=True), 0.3)
    assert beats.released
    assert beats.expired(0.4) == ["r1"]
    assert not beats.registered
    assert beats.due(0.6) == [Beat(Address(ONE, ""), 2)]


def test_a_known_router_hears_of_experts_every_two_seconds() -> None:
    exchange, now_s, heard_s = Exchange(), 0.0, []
    router = exchange.transport("router", RouterInbox)
    worker = exchange.transport("compute", ComputeInbox)
    registration = Registration("compute", (router.address.endpoint,))

    def hear(message: WorkerAlive, sender: Address) -> None:
        if message.experts is not None:
            heard_s.append(now_s)
        router.send(sender, RouterAlive(router.address, message.beat))

    router.open(hear, lambda peer: None)
    worker.open(lambda answer, sender: registration.answered(answer, now_s), lambda peer: None)
    registration.start(worker, ModelCard("m", "r", 9))
    experts = ExpertLoad(uint32s((0,)), uint64s((1, 2)))
    state = WorkerState(Load(0, 0, 1), 0, 1.0, lambda router: (), experts=experts)
    for step in range(10):
        now_s = step * BEAT_INTERVAL_S
        registration.tick(now_s, state)
        exchange.deliver()
    assert heard_s == [0.5, 2.5, 4.5]
