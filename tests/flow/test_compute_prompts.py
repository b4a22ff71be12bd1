"""Scored prompts and embeddings through the compute actor, from message to message."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from common.messages.sampling import SamplingParams
from tests.flow.compute_ring import Ring

PROMPT = [7 + number % 90 for number in range(150)]


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    made = Ring(max_prefill_tokens=64)
    await made.start()
    yield made
    await made.actor.stop()


async def test_a_prompts_scores_come_before_its_tokens_in_the_mail(ring: Ring) -> None:
    sampling = SamplingParams(max_tokens=3, seed=1, num_prompt_logprobs=2)
    plain = ring.ask(1, prompt=PROMPT)
    attempt = ring.ask(2, prompt=PROMPT, sampling=sampling)
    await ring.until(lambda: bool(ring.endings(attempt) and ring.endings(plain)))
    mine = [row for row in ring.rows if row.attempt == attempt]
    scores = [scores for row in mine for scores in row.scored]
    assert [row.opened is not None for row in mine].index(True) == 0
    assert [token for each in scores for token in each.logprobs.ids[::3]] == PROMPT[1:]
    assert [each.first for each in scores] == sorted(each.first for each in scores)
    assert scores[0].first == 1
    assert all(set(each.logprobs.num_candidates) == {3} for each in scores)
    assert all(set(each.logprobs.ranks) == {1} for each in scores)
    first_token = next(number for number, row in enumerate(mine) if row.token_ids)
    assert not any(row.scored for row in mine[first_token + 1 :])
    assert len(ring.tokens(attempt)) == 3
    assert not any(row.scored for row in ring.rows if row.attempt == plain)


async def test_an_embedding_comes_with_the_terminal(ring: Ring) -> None:
    attempts = [
        ring.ask(number, prompt=PROMPT[: 50 * number], pooling=True) for number in (1, 2, 3)
    ]
    attempts.append(ring.ask(9, prompt=PROMPT[:50], pooling=True))
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    vectors = []
    for attempt in attempts:
        (ended,) = ring.ended(attempt)
        assert ended.reason == "stop"
        assert ended.usage.completion_tokens == 0
        vectors.append(array("f", ended.embedding).tolist())
    assert [len(vector) for vector in vectors] == [64] * 4
    assert vectors[0] == vectors[3] != vectors[1]
    assert ring.actor.idle


async def test_an_abort_of_either_ends_it_once(ring: Ring) -> None:
    sampling = SamplingParams(max_tokens=400, seed=1, num_prompt_logprobs=0, ignore_eos=True)
    attempts = [
        ring.ask(1, prompt=PROMPT, sampling=sampling),
        ring.ask(2, prompt=PROMPT, sampling=replace(sampling, max_tokens=1), pooling=True),
    ]
    await asyncio.sleep(0)
    for attempt in attempts:
        ring.abort(attempt)
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert [len(ring.endings(attempt)) for attempt in attempts] == [1, 1]
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total
