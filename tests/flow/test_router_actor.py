"""The router from HTTP to mail and back, over the in-memory links."""

from __future__ import annotations

from tests.flow.router_ring import Script, chat, events, running_router


async def test_a_chat_request_is_answered_in_one_piece() -> None:
    async with running_router() as ring:
        async with ring.post("/v1/chat/completions", chat()) as response:
            body = await response.json()
        assert response.status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"]["total_tokens"] == 7
        assert ring.is_empty()


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done() -> None:
    async with running_router() as ring:
        body = chat(stream=True, stream_options={"include_usage": True})
        async with ring.post("/v1/chat/completions", body) as response:
            data = await response.read()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        first, *deltas, finish, usage = events(data)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(each["choices"][0]["delta"]["content"] for each in deltas) == "Hello"
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert finish["usage"] is None
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        await ring.until(ring.is_empty)


async def test_the_connection_of_a_stream_serves_the_next_request() -> None:
    async with running_router() as ring:
        ports = []
        for _ in range(3):
            async with ring.post("/v1/chat/completions", chat(stream=True)) as response:
                ports.append(response.connection.transport.get_extra_info("sockname"))
                events(await response.read())
        assert len(set(ports)) == 1


async def test_a_stop_string_is_named_beside_the_finish_reason() -> None:
    async with running_router() as ring:
        ring.script = Script(stop="###")
        async with ring.post("/v1/chat/completions", chat(stop=["###"])) as response:
            body = await response.json()
        assert body["choices"][0]["stop_reason"] == "###"
