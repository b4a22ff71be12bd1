"""`/v1/embeddings`, `/version` and `/v1/models` from HTTP to messages and back."""

from __future__ import annotations

import dataclasses
import json
import struct
from importlib.metadata import version
from typing import Any

from common.messages.failure import Ending, Usage
from common.messages.text import TextGenerated
from common.messages.tokenize import Tokenize
from services.router.embeddings import MAX_AT_ONCE
from tests.flow.router_ring import CARD, Ring, error_of, running_router, waiting

PATH = "/v1/embeddings"
EMBEDDER = dataclasses.replace(CARD, pooling="last")


def embedding_ring(ring: Ring) -> None:
    """Add workers of a model that is made for embeddings."""
    for service in ("tokenizer", "compute", "detokenizer"):
        ring.worker(service, service, EMBEDDER)
    ring.beat()


def embed(ring: Ring, message: Tokenize, *values: float) -> None:
    """Answer with a vector."""
    rows = TextGenerated()
    rows.add(message.attempt.counter, 0, [], "")
    packed = struct.pack(f"={len(values)}f", *values)
    rows.end(Ending("stop", Usage(4, 0, 0), embedding=packed))
    ring.workers["detokenizer"].transport.send(ring.transport.address, rows)


async def test_every_input_is_pooled_and_answered_in_its_place() -> None:
    async with running_router(workers=False) as ring:
        embedding_ring(ring)
        await ring.settle()
        body = {"model": "demo", "input": ["a", "b"], "encoding_format": "float"}
        task = await waiting(ring, body, PATH)
        first, second = ring.workers["tokenizer"].of(Tokenize)
        assert first.pooling and second.pooling
        embed(ring, second, 0.0, 1.0)
        embed(ring, first, 1.0, 0.0)
        status, data = await task
        assert status == 200
        assert b'"embedding":[1.0,0.0]' in data.split(b'"index":1')[0]
        assert b'"usage":{"prompt_tokens":8,"total_tokens":8}' in data
        assert ring.is_empty()


async def test_a_request_has_the_id_that_its_client_gave() -> None:
    async with running_router() as ring:  # whose model makes no embeddings
        body = {"input": "a", "request_id": "mine-1"}
        async with ring.post(PATH, body) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (400, "mine-1")


async def test_many_inputs_go_round_in_parts_and_are_named_by_their_places() -> None:
    async with running_router(workers=False) as ring:
        embedding_ring(ring)
        await ring.settle()
        body = {"model": "demo", "input": ["a"] * (MAX_AT_ONCE + 1)}
        task = await waiting(ring, body, PATH)
        tokenizer = ring.workers["tokenizer"]
        await ring.until(lambda: len(tokenizer.of(Tokenize)) == MAX_AT_ONCE)
        await ring.settle()
        first = list(tokenizer.of(Tokenize))
        assert len(first) == MAX_AT_ONCE
        for message in first:
            embed(ring, message, 1.0)
        await ring.until(lambda: len(tokenizer.of(Tokenize)) == MAX_AT_ONCE + 1)
        last = tokenizer.of(Tokenize)[-1]
        assert last.prompt_field == f"input[{MAX_AT_ONCE}]"
        embed(ring, last, 2.0)
        status, data = await task
        assert status == 200
        vectors = json.loads(data)["data"]
        assert [each["index"] for each in vectors] == list(range(MAX_AT_ONCE + 1))
        assert (vectors[0]["embedding"], vectors[-1]["embedding"]) == ([1.0], [2.0])
        assert json.loads(data)["usage"]["prompt_tokens"] == 4 * (MAX_AT_ONCE + 1)
        assert ring.is_empty()


async def test_a_model_that_makes_no_embeddings_says_what_it_does() -> None:
    async with running_router() as ring:
        async with ring.post(PATH, {"model": "demo", "input": "Hi"}) as answer:
            data = await answer.read()
        assert answer.status == 400
        error = error_of(data)
        assert (error["param"], error["code"]) == ("model", "unsupported_model")
        assert "/v1/embeddings" in error["message"]
        assert "/v1/chat/completions" in error["message"]
        assert not ring.workers["tokenizer"].of(Tokenize)


async def test_other_dimensions_than_the_models_are_a_400() -> None:
    async with running_router(workers=False) as ring:
        embedding_ring(ring)
        await ring.settle()
        task = await waiting(ring, {"model": "demo", "input": "a", "dimensions": 3}, PATH)
        embed(ring, ring.workers["tokenizer"].of(Tokenize)[-1], 1.0, 0.0)
        status, data = await task
        assert status == 400
        assert error_of(data)["param"] == "dimensions"
        assert ring.is_empty()


async def test_the_version_is_the_packages() -> None:
    async with running_router() as ring, ring.session.get("/version") as answer:
        assert answer.status == 200
        assert await answer.json() == {"version": version("slipstream")}


async def test_a_model_is_described_as_openais_are() -> None:
    async with running_router() as ring:
        async with ring.session.get("/v1/models/demo") as answer:
            card: dict[str, Any] = await answer.json()
        assert card["id"] == card["root"] == "demo"
        assert card["object"] == "model"
        assert card["owned_by"] == "slipstream"
        assert card["max_model_len"] == 512
        assert isinstance(card["created"], int)
        async with ring.session.get("/v1/models") as answer:
            assert (await answer.json())["data"] == [card]
