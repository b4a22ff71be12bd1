"""A server with the real page and a scripted API: the test decides when which event leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from services.router.chat_page import PageHandler
from tests.patience import PATIENCE_S

MODEL = "scripted"


class ScriptedStream:
    """One answer on its way to the page."""

    def __init__(self, request: web.Request, body: Any, response: web.StreamResponse) -> None:
        self.body: dict[str, Any] = body
        self.authorization = request.headers.get("Authorization", "")
        self._request = request
        self._response = response
        self.ended = asyncio.Event()

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self._response.write(data)

    async def event(self, value: Any) -> None:
        """Send one event."""
        await self.raw(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    async def delta(self, **delta: Any) -> None:
        """Send a chunk with that delta."""
        await self.event(chunk(delta))

    async def finish(self, reason: str = "stop", tokens: int = 5) -> None:
        """Send the ending, the usage and the end."""
        await self.event(chunk({}, finish_reason=reason))
        usage = {
            "prompt_tokens": 12,
            "completion_tokens": tokens,
            "total_tokens": 12 + tokens,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        await self.event({**chunk({}), "choices": [], "usage": usage})
        await self.raw(b"data: [DONE]\n\n")
        self.ended.set()

    def break_off(self) -> None:
        """Close the connection in the middle, as a server does that dies."""
        transport = self._request.transport
        assert transport is not None
        transport.abort()
        self.ended.set()


class ScriptedServer:
    """Serves the page; every chat request waits for the test, or for a refusal set before."""

    def __init__(self) -> None:
        self.refusals: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self.card: dict[str, Any] = {}  # what the model's entry in the list has besides
        self.left = asyncio.Event()  # a client went before the end
        self._asked: asyncio.Queue[ScriptedStream] = asyncio.Queue()
        app = web.Application()
        app.add_routes(PageHandler().routes())
        app.add_routes(
            [web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    async def start(self) -> None:
        """Listen on any port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    def refuse(
        self, status: int, error: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        """Answer the next chat request with an error."""
        self.refusals.append((status, {"error": error}, headers or {}))

    async def asked(self) -> ScriptedStream:
        """Wait for the next chat request."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._asked.get()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "test"}
        return web.json_response({"object": "list", "data": [{**card, **self.card}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refusals:
            status, refusal, headers = self.refusals.pop(0)
            return web.json_response(refusal, status=status, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        stream = ScriptedStream(request, body, response)
        self._asked.put_nowait(stream)
        try:
            await stream.ended.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response


def chunk(
    delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    """Make one chunk of a chat completion."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
