"""Questions to workers, such as /tokenize: asked again where one could not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.text import Tokenized
from common.messages.tokenize import IdsPrompt, TokenizeQuery
from common.messages.tokens import DetokenizeQuery
from services.router.failover import RETRIES_PER_S
from tests.flow.router_ring import Ring, Script, add, error_of, running_router

FULL = Failure(503, "overloaded", "this worker is full", None, True)


@pytest.mark.parametrize(
    ("path", "body", "service", "kind"),
    [
        ("/tokenize", {"prompt": "a"}, "tokenizer", TokenizeQuery),
        ("/detokenize", {"tokens": [1]}, "detokenizer", DetokenizeQuery),
    ],
)
async def test_a_question_is_asked_again(
    path: str, body: dict[str, Any], service: str, kind: type
) -> None:
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

        def asked() -> list[tuple[str, TokenizeQuery]]:
            names = ("tokenizer", "tokenizer2")
            return [
                (name, query) for name in names for query in ring.workers[name].of(TokenizeQuery)
            ]

        await ring.until(asked)
        ((name, query),) = asked()
        ring.script = Script()
        full = Tokenized(query.query, int32s(), (), FULL)
        ring.workers[name].transport.send(ring.transport.address, full)
        status, data = await task
        assert len(asked()) == 1 + num_retries
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


async def ask(ring: Ring, body: dict[str, Any], path: str) -> tuple[int, bytes]:
    async with ring.post(path, body) as response:
        return response.status, await response.read()
