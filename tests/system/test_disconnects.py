"""Clients that come in numbers and leave when they like; afterwards nothing of them is left."""

from __future__ import annotations

import asyncio
import random

import pytest
from openai import APITimeoutError, AsyncOpenAI

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.conftest import async_client_of, client_of
from tests.system.ring import num_running, num_steps, wait_empty

NUM_STREAMS = 100


async def stream(client: AsyncOpenAI, num_tokens: int, leave_after: int | None) -> int:
    """Read one stream, whole or until so many chunks have come; returns the tokens used, or -1."""
    chunks = await client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "Count. " * (1 + num_tokens % 50)}],
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    num_chunks = 0
    used = -1
    async for chunk in chunks:
        if num_chunks == leave_after:
            await chunks.close()
            return -1
        num_chunks += 1
        if chunk.usage is not None:
            used = chunk.usage.completion_tokens
    return used


async def leave_before_the_first_token(client: AsyncOpenAI, num_tokens: int) -> int:
    """Ask for an answer in one piece and do not wait for it."""
    try:
        await client.with_options(timeout=0.02).completions.create(
            model="sim", prompt="Count", max_tokens=num_tokens, extra_body={"ignore_eos": True}
        )
    except APITimeoutError:
        return -1
    raise AssertionError("it was there in no time")


async def test_a_hundred_streams_of_mixed_lengths_with_random_disconnects(sim_stack: Stack) -> None:
    dice = random.Random(11)
    expected: list[int] = []
    async with async_client_of(sim_stack) as client:
        tasks = []
        for _ in range(NUM_STREAMS):
            num_tokens = dice.choice((1, 2, 17, 60, 150, 400))
            kind = dice.random()
            if kind < 0.2:
                tasks.append(leave_before_the_first_token(client, 4000))
                expected.append(-1)
            elif kind < 0.5:
                tasks.append(stream(client, 4000, leave_after=dice.randrange(1, 40)))
                expected.append(-1)
            else:
                tasks.append(stream(client, num_tokens, leave_after=None))
                expected.append(num_tokens)
        assert await asyncio.gather(*tasks) == expected
    wait_empty(sim_stack)


async def test_a_hundred_streams_that_all_stay_get_every_token(sim_stack: Stack) -> None:
    lengths = [1 + (number * 37) % 300 for number in range(NUM_STREAMS)]
    async with async_client_of(sim_stack) as client:
        used = await asyncio.gather(*(stream(client, length, None) for length in lengths))
    assert used == lengths
    wait_empty(sim_stack)


@pytest.mark.parametrize("streamed", [True, False])
def test_pages_are_free_within_a_few_steps_of_a_disconnect(
    mortal_stack: Stack, streamed: bool
) -> None:
    stack = mortal_stack
    asked = {
        "model": "sim",
        "prompt": "Count",
        "max_tokens": 4000,
        "extra_body": {"ignore_eos": True},
    }
    steps_before = num_steps(stack)
    with client_of(stack) as client:
        if streamed:
            chunks = client.completions.create(**asked, stream=True)
            next(iter(chunks))
            stack.wait_until(lambda: num_running(stack) == [1], PATIENCE_S, "running")
            chunks.close()
        else:
            with pytest.raises(APITimeoutError):
                client.with_options(timeout=1.0).completions.create(**asked)
    wait_empty(stack)
    # A second or so of steps until it was cut, of the 80 s that it had asked for; where the
    # client is not given a processor for a while, some more.
    assert 1 <= num_steps(stack) - steps_before < 2000
