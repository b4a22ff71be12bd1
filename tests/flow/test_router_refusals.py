"""What the router refuses, with which status and in which shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.messages.control import ModelCard
from common.messages.failure import Failure
from common.messages.tokenize import Tokenize, TokenizeQuery
from tests.flow.router_ring import (
    CHAT,
    TEXT,
    Script,
    chat,
    error_of,
    last_counter,
    running_router,
    waiting,
)


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        ({"data": b"{}"}, 415, "unsupported_media_type"),
        ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_media_type"),
        (
            {
                "data": b"x",
                "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            },
            415,
            "unsupported_media_type",
        ),
        ({"json": {"model": "demo", "messages": [], "x": "y" * 5000}}, 413, "request_too_large"),
        ({"json": chat(model="other")}, 404, "model_not_found"),
        ({"json": chat(logit_bias={"1000": 1})}, 400, "invalid_value"),
        ({"json": chat(stop_token_ids=[1000])}, 400, "invalid_value"),
    ],
)
async def test_a_refused_request_reaches_nobody(
    arguments: dict[str, Any], status: int, code: str
) -> None:
    async with running_router(max_body_bytes=4096) as ring:
        async with ring.session.post(CHAT, **arguments) as response:
            assert response.status == status
            assert error_of(await response.read())["code"] == code
        assert ring.workers["tokenizer"].of(Tokenize) == []
        await ring.until(ring.is_empty)


async def test_a_chunked_body_over_the_limit_is_a_413() -> None:
    async def body() -> Any:
        for _ in range(10):
            yield b" " * 1000

    async with running_router(max_body_bytes=4096) as ring:
        headers = {"Content-Type": "application/json"}
        async with ring.session.post(CHAT, data=body(), headers=headers) as response:
            assert response.status == 413


async def test_wrong_paths_and_methods_answer_in_the_same_shape() -> None:
    async with running_router() as ring:
        async with ring.session.get("/v1/nothing") as response:
            assert response.status == 404
            assert error_of(await response.read())["code"] == "not_found"
        async with ring.session.get(CHAT) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            error = error_of(await response.read())
            assert error["code"] == "method_not_allowed"
            assert error["message"] == "GET is not allowed here; use POST"
        async with ring.post("/ready", {}) as response:
            assert response.headers["Allow"] == "GET, HEAD"
            error = error_of(await response.read())
            assert error["message"] == "POST is not allowed here; use GET or HEAD"


async def test_a_stage_cannot_answer_with_a_status_that_is_no_error() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat())
        ring.refuse(ring.workers["tokenizer"].of(Tokenize)[-1], Failure(200, "odd", "odd"))
        assert (await task)[0] == 500


async def test_prompt_ids_outside_the_vocabulary_are_named() -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": [[1, 2], [3, 1000]]}
        async with ring.post(TEXT, body) as response:
            assert error_of(await response.read())["param"] == "prompt[1][1]"


async def test_an_echo_alone_is_refused_like_any_request() -> None:
    async with running_router(workers=False, max_in_flight=1) as ring:
        ring.worker("tokenizer", "tokenizer")
        ring.worker("compute", "compute", ModelCard("demo", "rev1", 1000, 512, 2, 511))
        ring.worker("detokenizer", "detokenizer")
        ring.beat()
        await ring.settle()
        body = {"model": "demo", "echo": True, "max_tokens": 0}
        for prompt, field in (("long", "prompt"), ([[1], [1, 2, 3]], "prompt[1]")):
            async with ring.post(TEXT, {**body, "prompt": prompt}) as response:
                assert response.status == 400
                error = error_of(await response.read())
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
            assert "3 tokens" in error["message"] and "2 at most" in error["message"]
        async with ring.post(TEXT, {**body, "prompt": [1, 1000]}) as response:
            assert error_of(await response.read())["param"] == "prompt[1]"
        task = await waiting(ring, chat())
        async with ring.post(TEXT, {**body, "prompt": "a"}) as response:
            assert response.status == 503
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task
        await ring.until(ring.is_empty)


async def test_a_message_that_no_inbox_takes_is_a_413() -> None:
    async with running_router() as ring:
        ring.exchange.max_message_bytes = 2000
        long = [{"role": "user", "content": "x" * 3000}]
        async with ring.post(CHAT, chat(messages=long)) as response:
            assert response.status == 413
            assert error_of(await response.read())["param"] == "messages"
        await ring.until(ring.is_empty)


async def test_keys_are_asked_for_everywhere_but_at_the_health_checks() -> None:
    async with running_router(api_keys=("secret",)) as ring:
        for path in (CHAT, "/tokenize"):
            async with ring.post(path, chat()) as response:
                assert response.status == 401
                assert error_of(await response.read())["code"] == "invalid_api_key"
        async with ring.session.get("/v1/models") as response:
            assert response.status == 401
        for path in ("/live", "/ready", "/health"):
            async with ring.session.get(path) as response:
                assert response.status == 200
                assert "Retry-After" not in response.headers
        headers = {"Authorization": "Bearer secret"}
        async with ring.post(CHAT, chat(), headers=headers) as response:
            assert response.status == 200


async def test_a_full_router_says_when_to_come_back() -> None:
    async with running_router(max_in_flight=1) as ring:
        task = await waiting(ring, chat())
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        ring.text(last_counter(ring), 0, "a", end="stop")
        assert (await task)[0] == 200
        ring.script = Script()
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 200


async def test_a_client_over_its_share_gets_a_429() -> None:
    async with running_router(max_in_flight_per_client=1) as ring:
        task = await waiting(ring, chat())
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task


async def test_a_key_names_the_client_whose_turn_it_is_and_bounds_its_priority(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "a"\nkey = "sk-first-key"\nmin_priority = -2\n')
    async with running_router(api_keys_file=str(file)) as ring:
        ring.script = Script()
        headers = {"Authorization": "Bearer sk-first-key"}
        async with ring.session.post(CHAT, json=chat(priority=-3), headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "priority_not_allowed"
        async with ring.session.post(CHAT, json=chat(priority=-2), headers=headers) as response:
            assert response.status == 200
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        assert (message.client, message.priority) == ("a", -2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [72]}),
        ("/v1/messages/count_tokens", {"model": "demo", **chat()}),
        ("/v1/responses/input_tokens", {"model": "demo", "input": "Hi"}),
    ],
)
async def test_queries_count_against_the_limits_of_their_client(
    path: str, body: dict[str, Any]
) -> None:
    async with running_router(max_in_flight_per_client=1) as ring:
        task = await waiting(ring, chat())
        async with ring.post(path, body) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task
    async with running_router(requests_per_s_per_client=1.0) as ring:
        statuses = []
        for _ in range(2):
            async with ring.post(path, body) as response:
                statuses.append(response.status)
        assert statuses == [200, 429]
        await ring.until(ring.is_empty)


async def test_an_echo_is_admitted_before_its_prompt_is_tokenized_and_once() -> None:
    body = {"model": "demo", "prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 1}
    async with running_router(max_in_flight_per_client=1) as ring:
        task = await waiting(ring, chat())
        async with ring.post(TEXT, body) as response:
            assert response.status == 429
        assert ring.workers["tokenizer"].of(TokenizeQuery) == []
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task
    for max_tokens in (0, 1):
        async with running_router(requests_per_s_per_client=1.0) as ring:
            ring.script = Script(prompt_tokens=1)  # the first token has no logprobs
            statuses = []
            for _ in range(2):
                async with ring.post(TEXT, {**body, "max_tokens": max_tokens}) as response:
                    statuses.append(response.status)
            assert statuses == [200, 429]
            await ring.until(ring.is_empty)


async def test_queries_pay_for_the_tokens_of_their_text() -> None:
    async with running_router(tokens_per_minute_per_client=1000) as ring:
        statuses = []
        for _ in range(2):
            async with ring.post("/tokenize", {"prompt": "a" * 8000}) as response:
                statuses.append(response.status)
        assert statuses == [200, 429]


async def test_a_full_house_refuses_queries_too() -> None:
    async with running_router(max_in_flight=1) as ring:
        task = await waiting(ring, chat())
        async with ring.post("/tokenize", {"prompt": "Hi"}) as response:
            assert response.status == 503
            assert error_of(await response.read())["code"] == "overloaded"
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task


async def test_choices_have_a_bound_of_their_own() -> None:
    async with running_router(max_in_flight_choices=4) as ring:
        task = await waiting(ring, chat())
        async with ring.post(CHAT, chat(n=4)) as response:
            assert response.status == 503
            assert error_of(await response.read())["code"] == "overloaded"
            assert "Retry-After" in response.headers
        ring.text(last_counter(ring), 0, "a", end="stop")
        await task
        assert ring.actor.dispatch.admission.num_choices == 0


async def test_a_key_file_that_changes_lets_in_whom_it_names_now(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "a"\nkey = "sk-first-key"\n')
    async with running_router(api_keys_file=str(file)) as ring:

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with ring.session.get("/v1/models", headers=headers) as response:
                return response.status

        assert await status("sk-first-key") == 200
        file.write_text('[[key]]\nname = "b"\nkey = "sk-another-key"\n')
        await ring.tick(1.1)
        assert (await status("sk-first-key"), await status("sk-another-key")) == (401, 200)


async def test_a_key_over_its_tokens_a_minute_waits(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "a"\nkey = "sk-first-key"\ntokens_per_minute = 6\n')
    headers = {"Authorization": "Bearer sk-first-key"}
    async with running_router(api_keys_file=str(file)) as ring:
        async with ring.post(CHAT, chat(), headers=headers) as response:  # 5 of prompt, 2 answered
            assert response.status == 200
        async with ring.post(CHAT, chat(), headers=headers) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "20"
            assert error_of(await response.read())["code"] == "rate_limit_exceeded"
