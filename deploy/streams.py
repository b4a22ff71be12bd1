"""Streams that begin anew as soon as they end, while a check does things."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass(slots=True)
class Load:
    """Streams that begin anew as soon as they end; what fails is kept."""

    urls: list[str]
    max_tokens: int
    num_streams: int
    api_key: str = ""
    done: int = 0
    tokens: int = 0
    longest_gap_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(
                *(self._stream(session, number) for number in range(self.num_streams))
            )

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.stopping:
            number += 1
            url = self.urls[number % len(self.urls)]
            try:
                await self._request(session, url)
            except aiohttp.ClientConnectorError:
                continue  # nobody listens there (any more): as a balancer, try the next one
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.errors.append(f"{url}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _request(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        last_s, ended, usage = time.monotonic(), False, ""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                now_s = time.monotonic()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                if line.startswith(b'data: {"error"'):
                    raise ValueError(line.decode()[:300])
                usage = line.decode() if b'"usage":{' in line else usage
                ended |= line.startswith(b"data: [DONE]")
        if not ended or f'"completion_tokens":{self.max_tokens}' not in usage:
            raise ValueError(f"a stream ended early: {usage[:300]}")
        self.done += 1
        self.tokens += self.max_tokens
