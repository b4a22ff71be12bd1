"""Responses that are kept: gone on from, made in the background, read, cancelled, deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.failure import Failure
from common.messages.text import Part
from common.messages.tokenize import ChatPrompt, Tokenize
from tests.flow.parsed_answers import MIXED, asked, fail, play
from tests.flow.router_ring import Ring, error_of, running_router
from tests.unit.router.answers import named_events

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def response(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "Hi", **more}


async def post(ring: Ring, path: str = PATH, **more: Any) -> dict[str, Any]:
    async with ring.post(path, response(**more)) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


async def call(ring: Ring, method: str, path: str, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with ring.session.request(method, f"{PATH}/{path}", headers=headers) as answer:
        return answer.status, await answer.json()


def last_messages(ring: Ring) -> list[dict[str, Any]]:
    message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
    assert isinstance(message.prompt, ChatPrompt)
    messages: list[dict[str, Any]] = json.loads(message.prompt.messages_json)
    return messages


async def begun(ring: Ring, **more: Any) -> tuple[dict[str, Any], Tokenize]:
    """Begin a response in the background that the ring does not answer yet."""
    ring.script = None
    body = await post(ring, background=True, **more)
    return body, ring.workers["tokenizer"].of(Tokenize)[-1]


async def test_a_conversation_goes_on_from_the_response_before() -> None:
    async with running_router() as ring:
        first = await post(ring, instructions="Be kind.")
        assert first["store"] is True
        second = await post(ring, input="And now?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        assert last_messages(ring) == [  # instructions are those of one request
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And now?"},
        ]
        await post(ring, input="So?", previous_response_id=second["id"])
        assert len(last_messages(ring)) == 5


async def test_a_streamed_response_is_stored_before_its_last_event_leaves() -> None:
    async with running_router() as ring:
        task, message = await asked(ring, PATH, response(stream=True, tools=[TOOL]))
        play(ring, message, MIXED)
        _, data = await task
        last = named_events(data)[-1]["response"]
        assert (await call(ring, "get", last["id"]))[1] == last


async def test_an_item_is_referred_to_by_its_id() -> None:
    async with running_router() as ring:
        first = await post(ring)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await post(ring, input=[{"role": "user", "content": "Hi"}, reference])
        assert last_messages(ring)[1] == {"role": "assistant", "content": "Hello"}


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with running_router() as ring:
        body = await post(ring, store=False)
        assert body["store"] is False
        status, error = await call(ring, "get", body["id"])
        assert status == 404
        assert "another router of this server" in error["error"]["message"]
    async with running_router(responses_max=0) as ring:
        async with ring.post(PATH, response(store=True)) as answer:
            body = await answer.json()
            assert "responses_max is 0" in answer.headers["Warning"]
        assert body["store"] is False
        assert (await call(ring, "get", body["id"]))[0] == 404


async def test_input_items_come_in_pages_the_latest_first() -> None:
    async with running_router() as ring:
        first = await post(ring, input=[{"role": "user", "content": "Hi"}] * 3)
        _, page = await call(ring, "get", f"{first['id']}/input_items?limit=2")
        assert page["object"] == "list" and page["has_more"] is True
        assert page["data"][0] == {
            "id": page["first_id"],
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}],
        }
        path = f"{first['id']}/input_items"
        _, rest = await call(ring, "get", f"{path}?limit=2&after={page['last_id']}")
        assert len(rest["data"]) == 1 and rest["has_more"] is False
        _, ascending = await call(ring, "get", f"{path}?order=asc")
        assert ascending["first_id"] == rest["last_id"]
        for query in ("limit=0", "limit=x", "order=up", "after=msg_0"):
            status, error = await call(ring, "get", f"{path}?{query}")
            assert (status, error["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_deleted_response_is_gone() -> None:
    async with running_router() as ring:
        body = await post(ring)
        status, deleted = await call(ring, "delete", body["id"])
        assert (status, deleted["deleted"]) == (200, True)
        for method, path in (("get", ""), ("delete", ""), ("get", "/input_items")):
            assert (await call(ring, method, body["id"] + path))[0] == 404


async def test_one_keys_responses_are_not_anothers() -> None:
    async with running_router(api_keys=("key-one", "key-two")) as ring:
        headers = {"Authorization": "Bearer key-one"}
        async with ring.post(PATH, response(), headers=headers) as answer:
            body = await answer.json()
        assert (await call(ring, "get", body["id"], "key-one"))[0] == 200
        for method, below in (
            ("get", ""),
            ("delete", ""),
            ("post", "/cancel"),
            ("get", "/input_items"),
        ):
            assert (await call(ring, method, body["id"] + below, "key-two"))[0] == 404
        other = {"Authorization": "Bearer key-two"}
        request = response(previous_response_id=body["id"])
        async with ring.post(PATH, request, headers=other) as answer:
            assert answer.status == 404
            assert error_of(await answer.read())["param"] == "previous_response_id"
        request = response(input=[{"id": body["output"][0]["id"]}])
        async with ring.post(PATH, request, headers=other) as answer:
            assert answer.status == 400


async def test_a_response_in_the_background_is_polled_to_its_end() -> None:
    async with running_router() as ring:
        body, message = await begun(ring)
        assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
        assert (await call(ring, "get", body["id"]))[1]["status"] == "in_progress"
        async with ring.post(PATH, response(previous_response_id=body["id"])) as answer:
            assert "in_progress" in error_of(await answer.read())["message"]
        play(ring, message, MIXED)
        await ring.until(ring.is_empty)
        status, final = await call(ring, "get", body["id"])
        assert (status, final["status"]) == (200, "completed")
        assert [item["type"] for item in final["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]


async def test_its_events_are_followed_from_any_place_by_anybody() -> None:
    async with running_router() as ring:
        body, message = await begun(ring, stream=False)
        path = f"{PATH}/{body['id']}?stream=true"
        play(ring, message, MIXED[1:2], None)
        async with ring.session.get(path) as live:
            assert (await live.content.readline()) == b"event: response.created\n"
            play(ring, message, MIXED[1:3])
            whole = named_events(b"event: response.created\n" + await live.read())
        assert whole[-1]["type"] == "response.completed"
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        async with ring.session.get(f"{path}&starting_after=4") as again:
            assert named_events(await again.read()) == whole[5:]
        async with ring.session.get(f"{path}&starting_after=x") as refused:
            assert refused.status == 400


async def test_a_stream_of_the_background_goes_on_without_its_client() -> None:
    async with running_router() as ring:
        ring.script = None
        async with ring.post(PATH, response(background=True, stream=True)) as live:
            message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
            play(ring, message, MIXED[1:2], None)
            await live.content.readline()
            created = json.loads((await live.content.readline()).removeprefix(b"data: "))
        await ring.settle()
        assert not ring.is_empty()
        play(ring, message, MIXED[1:3])
        await ring.until(ring.is_empty)
        _, final = await call(ring, "get", created["response"]["id"])
        assert final["status"] == "completed"


async def test_a_cancelled_response_is_off_the_ring_with_what_it_has() -> None:
    async with running_router() as ring:
        body, message = await begun(ring)
        play(ring, message, MIXED[1:2], None)
        await ring.settle()
        status, final = await call(ring, "post", f"{body['id']}/cancel")
        assert (status, final["status"]) == (200, "cancelled")
        assert final["output"][0]["content"][0]["text"] == "It is "
        assert ring.is_empty()
        assert ring.aborts("compute") == [message.attempt.counter]
        assert (await call(ring, "post", f"{body['id']}/cancel"))[1] == final
        waited = await post_plain(ring)
        status, error = await call(ring, "post", f"{waited['id']}/cancel")
        assert status == 400 and "not of the background" in error["error"]["message"]
        status, error = await call(ring, "get", f"{waited['id']}?stream=true")
        assert (status, error["error"]["param"]) == (400, "stream")


async def post_plain(ring: Ring) -> dict[str, Any]:
    task, message = await asked(ring, PATH, response())
    play(ring, message, [Part("content", "Hello")])
    body: dict[str, Any] = json.loads((await task)[1])
    return body


async def test_a_deleted_response_is_made_no_longer() -> None:
    async with running_router() as ring:
        body, _ = await begun(ring)
        assert (await call(ring, "delete", body["id"]))[0] == 200
        await ring.until(ring.is_empty)
        assert (await call(ring, "get", body["id"]))[0] == 404


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_failure_in_the_background_is_the_responses(is_begun: bool) -> None:
    async with running_router() as ring:
        body, message = await begun(ring)
        if is_begun:
            play(ring, message, MIXED[1:2], None)
            await ring.settle()
            fail(ring, message, 1, Failure(500, "internal_error", "it broke"))
        else:
            ring.refuse(message, Failure(400, "context_length_exceeded", "it broke", "input"))
        await ring.until(ring.is_empty)
        _, final = await call(ring, "get", body["id"])
        assert final["status"] == "failed"
        assert final["error"]["message"] == "it broke"
        async with ring.session.get(f"{PATH}/{body['id']}?stream=true") as events:
            kinds = [event["type"] for event in named_events(await events.read())]
        assert kinds[0] == "response.created" and kinds[-2:] == ["response.failed", "error"]


async def test_a_full_server_says_so_at_once() -> None:
    async with running_router(max_in_flight=1) as ring:
        await begun(ring)
        async with ring.post(PATH, response(background=True)) as answer:
            assert answer.status == 503
            assert error_of(await answer.read())["code"] == "overloaded"


async def test_only_responses_are_below_responses() -> None:
    async with running_router() as ring:
        for method, path in (("post", "compact"), ("get", "compact"), ("get", "chatcmpl-1")):
            status, error = await call(ring, method, path)
            assert (status, error["error"]["code"]) == (404, "not_found")
