"""Request bodies over HTTP: what is large, costly or unfinished harms nobody else."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import MessageTooLarge
from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.generate import Generate
from common.messages.tokenize import TextPrompt, Tokenize
from services.router.body_reader import SMALL_BYTES, SMALL_ELEMENTS
from tests.flow.router_ring import CHAT, TEXT, Ring, ask, chat, error_of, running_router

JSON = {"Content-Type": "application/json"}
MIB = 1 << 20
# More elements than the loop parses, in a field that is ignored.
COSTLY = {"metadata": {f"x{at}": 1 for at in range(SMALL_ELEMENTS)}}


async def held(chunks: int, release: asyncio.Event) -> AsyncIterator[bytes]:
    """Send so many MiB of a body, and the rest never."""
    yield b'{"prompt": "'
    for _ in range(chunks):
        yield b"a" * MIB
    await release.wait()


async def refusal(ring: Ring, path: str, data: Any, status: int) -> tuple[dict[str, Any], str]:
    sent = io.BytesIO(data) if isinstance(data, bytes) else data
    async with ring.session.post(path, data=sent, headers=JSON) as response:
        assert response.status == status
        return json.loads(await response.read()), response.headers.get("Retry-After", "")


async def test_bytes_of_unfinished_bodies_have_one_budget() -> None:
    async with running_router(max_unfinished_body_bytes=4 * MIB) as ring:
        budget = ring.actor._server.bodies.budget
        release = asyncio.Event()
        halves = [asyncio.create_task(refusal(ring, TEXT, held(2, release), 400))]
        await ring.until(lambda: budget.num_bytes > MIB)
        body, retry_after = await refusal(ring, TEXT, held(2, release), 503)
        assert body["error"]["code"] == "overloaded" and int(retry_after) >= 1
        announced = json.dumps({"prompt": "a" * (3 * MIB)}).encode()
        body, _ = await refusal(ring, "/v1/messages", announced, 529)
        assert body["type"] == "error" and body["error"]["type"] == "overloaded_error"
        async with ring.post(CHAT, chat()) as response:  # a small one is served meanwhile
            assert response.status == 200
        release.set()
        await asyncio.gather(*halves)
        assert budget.num_bytes == 0
        sent = io.BytesIO(announced)
        async with ring.session.post(TEXT, data=sent, headers=JSON) as response:
            assert response.status == 200


async def test_nothing_is_held_before_the_key_is_known() -> None:
    async with running_router(api_keys=("sk-right",)) as ring:
        budget = ring.actor._server.bodies.budget
        release = asyncio.Event()
        task = asyncio.create_task(refusal(ring, TEXT, held(4, release), 401))
        body, _ = await task
        assert body["error"]["code"] == "invalid_api_key"
        assert budget.num_bytes == 0 and not budget._of_clients


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/tokenize", "/invocations"])
async def test_too_many_elements_are_a_400(path: str) -> None:
    data = b'{"model":"demo","prompt":[' + b"[]," * 700_000 + b"[]]}"
    async with running_router() as ring:
        async with ring.session.post(path, data=io.BytesIO(data), headers=JSON) as response:
            error = error_of(await response.read())
        assert (response.status, error["code"]) == (400, "invalid_json")
        assert "700,005 objects, arrays and fields" in error["message"]
        assert ring.workers["tokenizer"].of(Tokenize) == []


async def test_errors_of_large_bodies_have_the_shape_of_their_api() -> None:
    data = b'{"model":"demo","messages":[' + b"{}," * 200_000 + b"{}]}"
    async with running_router() as ring:
        body, _ = await refusal(ring, "/v1/messages", data, 400)
        assert body["error"]["type"] == "invalid_request_error"
        body, _ = await refusal(ring, "/api/chat", data, 400)
        assert "objects, arrays and fields" in body["error"]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        (list(range(500)), [int32s(range(500)).tobytes()]),
        ([[7] * 400] * 500, [int32s([7] * 400).tobytes()] * 500),
        ("a, b: [c]" * 40_000, [TextPrompt("a, b: [c]" * 40_000)]),
    ],
    ids=["ids", "lists of ids", "text"],
)
async def test_a_large_body_is_served_like_a_small_one(
    prompt: Any, sent: list[bytes | TextPrompt]
) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, **COSTLY}
    body.update({f"x{at}": 1 for at in range(1000)})
    data = json.dumps(body).encode()
    async with running_router() as ring:
        for path in (TEXT, "/invocations"):
            async with ring.session.post(path, data=io.BytesIO(data), headers=JSON) as response:
                assert response.status == 200
                assert response.headers["Warning"].count("unknown request field") == 8
        texts = [message.prompt for message in ring.workers["tokenizer"].of(Tokenize)]
        ids = [message.prompt_ids for message in ring.workers["compute"].of(Generate)]
        assert texts + ids == sent * 2


async def test_too_many_ids_are_refused_before_they_are_looked_at() -> None:
    async with running_router() as ring:
        data = json.dumps({"tokens": [2000] * ((1 << 20) + 1)}).encode()  # there are 1000 ids
        body, _ = await refusal(ring, "/detokenize", data, 413)
        assert (body["error"]["code"], body["error"]["param"]) == ("too_many_tokens", "tokens")
        for prompt, status in (([2000] * 513, "prompt"), (["a", [2000] * 513], "prompt[1]")):
            data = json.dumps({"model": "demo", "prompt": prompt}).encode()
            body, _ = await refusal(ring, TEXT, data, 400)
            assert body["error"]["code"] == "context_length_exceeded"
            assert body["error"]["param"] == status
        assert ring.workers["tokenizer"].of(Tokenize) == []


@pytest.mark.parametrize("ids", [list(range(500)) * 200, [*range(500)] * 200 + [1000]])
async def test_many_ids_are_detokenized(ids: list[int]) -> None:
    async with running_router() as ring:
        async with ring.post("/detokenize", {"tokens": ids}) as response:
            data = await response.read()
            assert response.status == (200 if len(ids) == 100_000 else 400)
        if response.status == 400:
            assert error_of(data)["param"] == "tokens[100000]"


async def test_the_loop_parses_only_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(body: bytes) -> Any:
        raise AssertionError("parsed on the loop")

    async with running_router() as ring:
        monkeypatch.setattr("services.router.body_reader.parse", too_large)
        for body in (chat(**COSTLY), chat(metadata={"a": "b" * SMALL_BYTES})):
            async with ring.post(CHAT, body) as response:
                assert response.status == 200


async def test_a_thousand_prompts_are_sent_in_turns_between_which_others_have_theirs() -> None:
    async with running_router() as ring:
        ring.script = None
        tokenizer = ring.workers["tokenizer"]
        many = asyncio.create_task(ask(ring, TEXT, {"prompt": ["a"] * 1024}))
        await ring.until(lambda: tokenizer.of(Tokenize))
        assert len(tokenizer.of(Tokenize)) <= 512, "all in one turn"
        await ring.until(lambda: len(tokenizer.of(Tokenize)) == 1024)
        sent = [message.prompt_field for message in tokenizer.of(Tokenize)]
        assert sent == [f"prompt[{number}]" for number in range(1024)]
        many.cancel()
        await ring.until(ring.is_empty)


async def test_of_a_request_that_ends_meanwhile_no_more_prompts_are_sent() -> None:
    async with running_router() as ring:
        ring.script = None
        tokenizer = ring.workers["tokenizer"]
        full = Failure(400, "context_length_exceeded", "prompt[0] is too long", "prompt[0]")
        many = asyncio.create_task(
            refusal(ring, TEXT, b'{"prompt": ["a"' + b', "a"' * 1023 + b"]}", 400)
        )
        await ring.until(lambda: tokenizer.of(Tokenize))
        (first, *_) = tokenizer.of(Tokenize)
        ring.refuse(first, full)
        await many
        assert len(tokenizer.of(Tokenize)) < 1024
        await ring.until(ring.is_empty)


async def test_a_later_prompt_that_cannot_be_sent_fails_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_router() as ring:
        ring.script = None
        send = ring.transport.send

        def send_short(to: Any, message: Any) -> None:
            if isinstance(message, Tokenize) and message.prompt_field == "prompt[700]":
                raise MessageTooLarge("it is too large")
            send(to, message)

        monkeypatch.setattr(ring.transport, "send", send_short)
        async with ring.post(TEXT, {"prompt": ["a"] * 1024}) as response:
            assert response.status == 413
            assert error_of(await response.read())["param"] == "prompt[700]"
        await ring.until(ring.is_empty)
        assert {*range(700)} <= {*ring.aborts("tokenizer")}
