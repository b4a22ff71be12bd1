"""The detokenizer's actor between a compute service and routers, over the in-memory link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, ModelCard, RouterAlive, WorkerAlive
from common.messages.failure import Ending, Usage
from common.messages.generate import ComputeInbox, StreamHeader
from common.messages.text import Detokenized, RouterInbox, TextGenerated
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from common.registration import Registration
from services.detokenizer.actor import MAX_PIECE, DetokenizerActor
from services.detokenizer.config import DetokenizerSettings
from tests.memory_link import Exchange, MemoryTransport
from tests.text_rows import rows
from tests.unit.detokenizer.vocabularies import marked

CARD = ModelCard("marked", "r1", 131_072)


class Ring:
    """One detokenizer with a compute service and two routers whose messages the test reads."""

    def __init__(self, folder: Path) -> None:
        self.exchange = Exchange()
        self.routers = {name: self.exchange.transport(name, RouterInbox) for name in ("r1", "r2")}
        self.compute = self.exchange.transport("compute", ComputeInbox)
        self.transport = self.exchange.transport("detokenizer", DetokenizerInbox)
        registration = Registration("detokenizer", ("mem://r1", "mem://r2"))
        self.actor = DetokenizerActor(
            DetokenizerSettings(), folder, CARD, registration, lambda: self.exchange.now_s
        )
        self.got: dict[str, list[Any]] = {"r1": [], "r2": [], "compute": []}
        for name, transport in {**self.routers, "compute": self.compute}.items():
            transport.open(
                lambda message, _, name=name: self.got[name].append(message), lambda _: None
            )

    async def start(self) -> None:
        await self.actor.start(self.transport)
        self.transport.open(self.actor.receive, self.actor.peer_lost)
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.exchange.advance(seconds)
        self.actor.tick(self.exchange.now_s)
        self.exchange.deliver()

    def answer_beats(self, *names: str) -> None:
        for name in names:
            beats = [message for message in self.got[name] if isinstance(message, WorkerAlive)]
            answer = RouterAlive(self.routers[name].address, beats[-1].beat)
            self.routers[name].send(self.transport.address, answer)
        self.exchange.deliver()

    def send(self, message: TokensGenerated) -> None:
        self.compute.send(self.transport.address, message)
        self.exchange.deliver()

    def texts(self, name: str) -> list[str]:
        messages = [m for m in self.got[name] if isinstance(m, TextGenerated)]
        return [row.text for message in messages for row in rows(message)]

    def header(self, router: MemoryTransport, **settings: Any) -> bytes:
        return pack(StreamHeader(reply=router.address, **settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marked")
    marked().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
async def ring(folder: Path) -> Ring:
    ring = Ring(folder)
    await ring.start()
    ring.answer_beats("r1", "r2")
    return ring


def ids_of(text: str) -> list[int]:
    tokenizer = marked()
    return [tokenizer.token_to_id(character) for character in text]


async def test_one_step_becomes_one_message_for_each_router(ring: Ring) -> None:
    step = TokensGenerated(1)
    r1, r2 = ring.routers["r1"], ring.routers["r2"]
    for counter, router in ((1, r1), (2, r2), (3, r1)):
        attempt = AttemptId(router.address.instance_id, counter)
        step.add(attempt, 0, ids_of(f"n{counter}"), header=ring.header(router), prompt=(4, 0))
    ring.send(step)
    assert ring.texts("r1") == ["n1", "n3"]
    assert ring.texts("r2") == ["n2"]
    assert len([m for m in ring.got["r1"] if isinstance(m, TextGenerated)]) == 1
    assert ring.actor.state(0.0).load.num_running == 3


async def test_the_usage_of_a_stopped_stream_says_what_became_of_its_drafts(ring: Ring) -> None:
    router = ring.routers["r1"]
    attempt = AttemptId(router.address.instance_id, 1)
    step = TokensGenerated(1)
    step.add(attempt, 0, ids_of("a"), header=ring.header(router, stop=("XY",)), prompt=(4, 1))
    step.draft(0, 3)
    for number, text in enumerate(("b", "X"), 1):
        step.add(attempt, number, ids_of(text))
        step.draft(number, 5 - number)
    ring.send(step)
    after = TokensGenerated(2)  # a step without drafts
    after.add(attempt, 3, ids_of("Y"))
    ring.send(after)
    *_, message = (m for m in ring.got["r1"] if isinstance(m, TextGenerated))
    *_, row = rows(message)
    assert row.ended is not None
    assert row.ended.usage == Usage(4, 1, 4, 2, 3)


async def test_a_stop_string_ends_the_stream_for_the_router_and_at_compute(ring: Ring) -> None:
    router = ring.routers["r1"]
    attempt = AttemptId(router.address.instance_id, 1)
    step = TokensGenerated(1)
    step.add(attempt, 0, ids_of("abXYc"), header=ring.header(router, stop=("XY",)), prompt=(4, 1))
    ring.send(step)
    (message,) = (m for m in ring.got["r1"] if isinstance(m, TextGenerated))
    (row,) = rows(message)
    assert row.text == "ab"
    assert row.ended is not None
    assert (row.ended.reason, row.ended.stop, row.ended.usage) == ("stop", "XY", Usage(4, 1, 4))
    assert ring.got["compute"] == [Abort(attempt, "stop_string")]
    late = TokensGenerated(2)
    late.add(attempt, 5, ids_of("d"))
    late.end(ring.header(router), Ending("aborted", Usage(4, 1, 6)))
    ring.send(late)
    assert ring.texts("r1") == ["ab"]
    assert ring.actor.idle


async def test_at_its_end_it_tells_the_routers_to_send_its_streams_on(ring: Ring) -> None:
    step = TokensGenerated(1)
    for counter, name in ((1, "r1"), (2, "r2")):
        router = ring.routers[name]
        attempt = AttemptId(router.address.instance_id, counter)
        step.add(attempt, 0, [1] * counter, header=ring.header(router))
    ring.send(step)
    await ring.actor.stop()
    ring.exchange.deliver()
    for counter, name in ((1, "r1"), (2, "r2")):
        message = [each for each in ring.got[name] if isinstance(each, TextGenerated)][-1]
        (row,) = rows(message)
        assert (row.counter, row.first_index, row.text) == (counter, counter, "")
        assert row.ended == Ending("moved", Usage(0, 0, counter))


async def test_heartbeats_tell_each_router_its_own_open_attempts(ring: Ring) -> None:
    router = ring.routers["r1"]
    step = TokensGenerated(1)
    attempt = AttemptId(router.address.instance_id, 9)
    step.add(attempt, 0, ids_of("a"), header=ring.header(router))
    ring.send(step)
    ring.tick(0.6)
    beats = {
        name: [m for m in ring.got[name] if isinstance(m, WorkerAlive)][-1] for name in ("r1", "r2")
    }
    assert list(beats["r1"].open_counters) == [9]
    assert list(beats["r2"].open_counters) == []


async def test_a_router_that_falls_silent_loses_its_streams_and_no_others(ring: Ring) -> None:
    step = TokensGenerated(1)
    for name in ("r1", "r2"):
        router = ring.routers[name]
        attempt = AttemptId(router.address.instance_id, 1)
        step.add(attempt, 0, ids_of("a"), header=ring.header(router))
    ring.send(step)
    ring.exchange.kill("r1")
    for _ in range(8):
        ring.tick(0.4)
        ring.answer_beats("r2")
    assert not ring.actor.idle
    assert ring.got["compute"] == [Abort(AttemptId("r1.1", 1), "lost")]


async def test_an_abort_leaves_no_entry(ring: Ring) -> None:
    router = ring.routers["r1"]
    attempt = AttemptId(router.address.instance_id, 1)
    step = TokensGenerated(1)
    step.add(attempt, 0, ids_of("a"), header=ring.header(router))
    ring.send(step)
    router.send(ring.transport.address, Abort(attempt, "client_gone"))
    ring.exchange.deliver()
    assert ring.actor.idle


async def test_the_log_names_the_attempts_whose_text_was_not_sent(ring: Ring) -> None:
    ring.exchange.max_message_bytes = 10
    router = ring.routers["r1"].address
    query = AttemptId(router.instance_id, 7)
    with structlog.testing.capture_logs() as lines:
        ring.actor.receive(DetokenizeQuery(query, router, int32s(ids_of("hello"))), router)
        ring.actor.receive(DetokenizeQuery(query, router, int32s([200_000])), router)
    assert [(line["event"], line["attempt"]) for line in lines] == [
        ("message not sent", f"{router.instance_id[:8]}:7")
    ] * 2


async def test_queries_are_answered_and_wrong_ids_are_named(ring: Ring) -> None:
    router = ring.routers["r1"]
    for counter, ids in ((1, ids_of("hello")), (2, [5, 200_000])):
        query = AttemptId(router.address.instance_id, counter)
        router.send(ring.transport.address, DetokenizeQuery(query, router.address, int32s(ids)))
    ring.exchange.deliver()
    good, bad = (m for m in ring.got["r1"] if isinstance(m, Detokenized))
    assert good.text == "hello"
    assert bad.failure is not None
    assert (bad.failure.status, bad.failure.field) == (400, "tokens")
    assert "200000" in bad.failure.message


async def test_many_ids_are_decoded_in_turns_between_which_streams_have_theirs(ring: Ring) -> None:
    router, ids = ring.routers["r1"], ids_of("hello") * 20_000
    query = AttemptId(router.address.instance_id, 1)
    router.send(ring.transport.address, DetokenizeQuery(query, router.address, int32s(ids)))
    ring.exchange.deliver()

    def answers() -> list[str]:
        ring.exchange.deliver()
        return [m.text for m in ring.got["r1"] if isinstance(m, Detokenized)]

    assert answers() == [] and not ring.actor.idle, "all in one turn"
    for _ in range(len(ids) // MAX_PIECE):
        await asyncio.sleep(0)
    assert answers() == ["hello" * 20_000]
    assert ring.actor.idle


async def test_a_prompt_that_is_gone_on_with_ends_before_an_unfinished_character(
    ring: Ring,
) -> None:
    router = ring.routers["r1"]
    ids = int32s(ids_of("nÃ"))  # the letter of the byte that begins "é"
    for counter, goes_on in ((1, False), (2, True)):
        query = AttemptId(router.address.instance_id, counter)
        message = DetokenizeQuery(query, router.address, ids, goes_on=goes_on)
        router.send(ring.transport.address, message)
    ring.exchange.deliver()
    texts = [m.text for m in ring.got["r1"] if isinstance(m, Detokenized)]
    assert texts == ["n\ufffd", "n"]
