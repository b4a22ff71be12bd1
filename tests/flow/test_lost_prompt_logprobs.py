"""Prompt logprobs whose message is lost, though every token of the answer arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.messages.text import TextGenerated
from common.messages.tokens import TokensGenerated
from tests.flow.whole_ring import WholeRing, save_vocabulary, whole_ring


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(tmp_path_factory.mktemp("hex"))


async def ask(ring: WholeRing, **fields: Any) -> list[dict[str, Any]]:
    """Ask for logprobs of a prompt of 23 tokens; returns the choices."""
    body = {"model": "sim", "prompt": "prompt 1 of a few pages", "seed": 3, "max_tokens": 5}
    body |= {"echo": True, "logprobs": 1, **fields}
    task = asyncio.get_running_loop().create_task(_post(ring, body))
    await ring.until(task.done, time_passes=True)
    status, answer = task.result()
    assert status == 200, answer
    await ring.pass_time(3.0)
    assert ring.leftovers() == {}
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


async def _post(ring: WholeRing, body: dict[str, Any]) -> tuple[int, Any]:
    async with ring.sessions["router"].post("/v1/completions", json=body) as response:
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 1}], ids=str)
@pytest.mark.parametrize("kind", [TokensGenerated, TextGenerated])
@pytest.mark.parametrize("first", [1, 12])
async def test_their_request_is_tried_again(
    folder: Path, kind: type, first: int, fields: dict[str, Any]
) -> None:
    """Chunks of 11 tokens: the first two have logprobs and no token, the last one the reverse."""
    async with whole_ring(folder, max_prefill_tokens=11) as ring:
        whole = await ask(ring, **fields)
        scores = whole[0]["logprobs"]["token_logprobs"]
        assert scores[0] is None and None not in scores[1:]
        ring.exchange.drop(
            kind=kind, where=lambda message: any(s.first == first for s in message.scored)
        )
        assert await ask(ring, **fields) == whole
        stats = ring.router().dispatch.inflight.stats["sim"]
        assert stats.num_retries
