"""Batches of prompts, which are sent in turns of the loop: what goes wrong between two of these."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.messages.address import Address
from common.messages.tokenize import Tokenize
from tests.flow.router_ring import TEXT, Ring, running_router


async def test_prompts_whose_compute_goes_before_their_turn_wait_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.turns.MAX_STEPS", 1)
    async with running_router(hold_s=10.0) as ring:
        ring.script = None
        body = {"model": "demo", "prompt": ["a"] * 40}
        task = asyncio.ensure_future(ask(ring, body))
        dispatch = ring.actor.dispatch
        await ring.until(lambda: dispatch.inflight.requests)
        assert len(dispatch.inflight) < 40, "the others have their turns later"
        ring.exchange.kill("compute")
        ring.actor.peer_lost(ring.workers["compute"].transport.address)
        await ring.until(lambda: len(dispatch.inflight.displaced) == 40)
        ring.worker("compute", "compute")
        num_sent = len(ring.workers["tokenizer"].of(Tokenize))
        ring.beat()
        await ring.until(lambda: len(ring.workers["tokenizer"].of(Tokenize)) == num_sent + 40)
        again = ring.workers["tokenizer"].of(Tokenize)[num_sent:]
        address = ring.workers["compute"].transport.address
        assert {message.route.compute for message in again} == {address}
        for message in again:
            ring.text(message.attempt.counter, 0, "a", end="stop")
        status, data = await task
        assert status == 200
        assert len(json.loads(data)["choices"]) == 40
        assert ring.is_empty()


@pytest.mark.parametrize("number", [0, 20])
async def test_a_prompt_that_cannot_be_sent_for_a_fault_of_ours_fails_its_request(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.turns.MAX_STEPS", 1)
    async with running_router() as ring:
        send, prompts = ring.transport.send, []

        def broken(to: Address, message: Any) -> None:
            if isinstance(message, Tokenize):
                prompts.append(message)
                assert len(prompts) <= number, "broken"
            send(to, message)

        monkeypatch.setattr(ring.transport, "send", broken)
        ring.script = None
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        status, _ = await ask(ring, {"model": "demo", "prompt": ["a"] * 40})
        assert status == 500
        assert len(prompts) == number + 1
        await ring.until(ring.is_empty)


async def ask(ring: Ring, body: dict[str, Any]) -> tuple[int, bytes]:
    async with ring.post(TEXT, body) as response:
        return response.status, await response.read()
