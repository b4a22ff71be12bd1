"""Questions to workers, such as /tokenize: asked again where one could not answer, or is late."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.text import Detokenized, Tokenized
from common.messages.tokenize import IdsPrompt, TokenizeQuery
from common.messages.tokens import DetokenizeQuery
from services.router.breaker import MAX_FAILURES
from services.router.errors import ApiError
from services.router.failover import RETRIES_PER_S, RETRY_BURST, RetryBudget
from services.router.queries import ASK_AGAIN_S
from tests.flow.router_ring import Ring, Script, add, error_of, running_router

QUESTIONS: dict[str, tuple[str, dict[str, Any], type, type]] = {
    "tokenizer": ("/tokenize", {"prompt": "a"}, TokenizeQuery, Tokenized),
    "detokenizer": ("/detokenize", {"tokens": [1]}, DetokenizeQuery, Detokenized),
}
FULL = Failure(503, "overloaded", "this worker is full", None, True)


@pytest.mark.parametrize("service", QUESTIONS)
async def test_a_worker_that_answers_a_question_has_done_well(service: str) -> None:
    path, body, _, _ = QUESTIONS[service]
    async with running_router() as ring:
        breakers = ring.actor.dispatch.fleet.breakers
        for seconds in range(MAX_FAILURES, 0, -1):
            breakers.failed(f"mem://{service}", ring.now_s - seconds, "dead")
        assert not breakers.allows(f"mem://{service}", ring.now_s)
        assert (await ask(ring, body, path))[0] == 200
        assert breakers.allows(f"mem://{service}", ring.now_s)


@pytest.mark.parametrize("service", QUESTIONS)
async def test_a_question_is_asked_again(service: str) -> None:
    path, body, kind, _ = QUESTIONS[service]
    async with running_router() as ring:
        await add(ring, service)
        ring.script = None
        task = asyncio.ensure_future(ask(ring, body, path))
        names = (service, f"{service}2")
        await ring.until(lambda: any(ring.workers[name].of(kind) for name in names))
        (asked,) = [name for name in names if ring.workers[name].of(kind)]
        ring.script = Script()
        ring.exchange.kill(asked)
        ring.actor.peer_lost(ring.workers[asked].transport.address)
        assert (await task)[0] == 200


@pytest.mark.parametrize("num_retries", [0, 1])
async def test_a_question_that_a_full_tokenizer_refuses_is_asked_again_at_the_rate_of_retries(
    num_retries: int,
) -> None:
    async with running_router() as ring:
        await add(ring, "tokenizer")
        retries = ring.actor.dispatch.fleet.retries
        while retries.take(ring.now_s):
            pass
        ring.now_s += num_retries / RETRIES_PER_S
        ring.script = None
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: asked(ring))
        ((name, query),) = asked(ring)
        ring.script = Script()
        full = Tokenized(query.query, int32s(), (), FULL)
        ring.workers[name].transport.send(ring.transport.address, full)
        status, data = await task
        assert len(asked(ring)) == 1 + num_retries
        assert status == (200 if num_retries else 503)
        assert num_retries or error_of(data)["code"] == "overloaded"


async def test_a_question_does_not_go_to_a_worker_that_has_gone_since_its_model_was_found() -> None:
    async with running_router() as ring:
        await add(ring, "detokenizer")
        dispatch = ring.actor.dispatch
        group = dispatch.group("demo")
        ring.exchange.kill("detokenizer")
        ring.actor.peer_lost(ring.workers["detokenizer"].transport.address)
        for _ in range(2):
            await dispatch.queries.detokenize(group, IdsPrompt(int32s([1])), "tokens")
        assert len(ring.workers["detokenizer2"].of(DetokenizeQuery)) == 2


async def test_a_question_is_asked_again_at_the_same_worker_if_its_host_was_cut_off() -> None:
    async with running_router(hold_s=10.0) as ring:
        ring.script = None
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: ring.workers["tokenizer"].of(TokenizeQuery))
        ring.actor.peer_lost(ring.workers["tokenizer"].transport.address)
        await ring.tick()
        ring.script = Script()
        ring.beat("tokenizer")
        await ring.settle()
        for _ in range(110):  # until its wait would be over
            if not task.done():
                ring.beat()
                await ring.tick()
        assert (await task)[0] == 200


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("service", QUESTIONS)
@pytest.mark.parametrize("loses", ["query", "answer"])
async def test_a_question_that_a_healed_link_has_lost_is_asked_again(
    num_workers: int, service: str, loses: str
) -> None:
    path, body, query, answer = QUESTIONS[service]
    async with running_router(query_timeout_s=3600.0) as ring:
        names = [service, f"{service}2"][:num_workers]
        if num_workers > 1:
            await add(ring, service)
        ring.exchange.drop(kind=query if loses == "query" else answer)
        task = asyncio.ensure_future(ask(ring, body, path))
        await ring.until(lambda: ring.actor.dispatch.queries)
        await pass_time(ring, ASK_AGAIN_S - 0.2)
        assert not task.done()
        await pass_time(ring, 0.3)
        await ring.until(task.done)
        assert (await task)[0] == 200
        counts = [len(ring.workers[name].of(query)) for name in names]
        assert sum(counts) == (1 if loses == "query" else 2)
        assert num_workers == 1 or max(counts) == 1, "another worker is asked"
        await ring.until(ring.is_empty)


@pytest.mark.parametrize("first", [0, 1])
async def test_of_a_question_that_is_asked_twice_the_first_answer_counts(first: int) -> None:
    async with running_router(query_timeout_s=3600.0) as ring:
        await add(ring, "tokenizer")
        ring.script = None
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: asked(ring))
        await pass_time(ring, ASK_AGAIN_S + 0.1)
        queries = sorted(asked(ring), key=lambda entry: entry[1].query.counter)
        assert [name for name, _ in queries] in (
            ["tokenizer", "tokenizer2"],
            ["tokenizer2", "tokenizer"],
        )
        for number, at in enumerate((first, 1 - first)):
            name, query = queries[at]
            answer = Tokenized(query.query, int32s([number]), ())
            ring.workers[name].transport.send(ring.transport.address, answer)
            await ring.settle()
        status, data = await task
        assert (status, json.loads(data)["tokens"]) == (200, [0])
        assert ring.is_empty()


@pytest.mark.parametrize("lost_at", [0, 1])
async def test_a_worker_that_is_lost_while_another_is_asked_too_costs_nothing(lost_at: int) -> None:
    async with running_router(query_timeout_s=3600.0) as ring:
        await add(ring, "tokenizer")
        ring.script = None
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: asked(ring))
        await pass_time(ring, ASK_AGAIN_S + 0.1)
        queries = sorted(asked(ring), key=lambda entry: entry[1].query.counter)
        lost, query = queries[lost_at][0], queries[1 - lost_at]
        ring.actor.peer_lost(ring.workers[lost].transport.address)
        await ring.settle()
        answer = Tokenized(query[1].query, int32s([7]), ())
        ring.workers[query[0]].transport.send(ring.transport.address, answer)
        assert (await task)[0] == 200
        await ring.until(ring.is_empty)


async def test_a_late_question_is_asked_again_less_and_less_often_at_the_rate_of_retries() -> None:
    async with running_router(query_timeout_s=3600.0) as ring:
        ring.script = None
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: asked(ring))
        counts = []
        for _ in range(30):
            await pass_time(ring, 1.0)
            counts.append(len(asked(ring)))
        assert [counts.count(number) for number in (1, 2, 3)] == [4, 8, 16]
        task.cancel()
        ring.actor.dispatch.fleet.retries = RetryBudget(0.0, 0.0)
        number = len(asked(ring))
        task = asyncio.ensure_future(ask(ring, {"prompt": "a"}, "/tokenize"))
        await ring.until(lambda: len(asked(ring)) > number)
        await pass_time(ring, 2 * ASK_AGAIN_S)
        assert len(asked(ring)) == number + 1
        task.cancel()


async def test_a_router_whose_own_table_is_full_says_so_and_spends_no_retries() -> None:
    async with running_router(max_in_flight=1) as ring:
        ring.script = None
        dispatch = ring.actor.dispatch
        group = dispatch.group("demo")
        ids = IdsPrompt(int32s([1]))
        task = asyncio.ensure_future(dispatch.queries.detokenize(group, ids, "tokens"))
        await ring.until(lambda: dispatch.queries)
        with pytest.raises(ApiError, match="full"):
            await dispatch.queries.detokenize(group, ids, "tokens")
        num_left = 0
        while dispatch.fleet.retries.take(ring.now_s):
            num_left += 1
        assert num_left == RETRY_BURST
        task.cancel()


def asked(ring: Ring) -> list[tuple[str, TokenizeQuery]]:
    """Return the queries that tokenizers have got."""
    workers = [(name, worker) for name, worker in ring.workers.items() if "token" in name]
    return [(name, query) for name, worker in workers for query in worker.of(TokenizeQuery)]


async def pass_time(ring: Ring, seconds: float) -> None:
    """Let time pass at a router whose workers live."""
    for _ in range(round(seconds * 10)):
        ring.beat()
        await ring.tick()


async def ask(ring: Ring, body: dict[str, Any], path: str) -> tuple[int, bytes]:
    async with ring.post(path, body) as response:
        return response.status, await response.read()
