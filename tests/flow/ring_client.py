"""A client of the whole ring, which knows what its answer has to be."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.flow.whole_ring import WholeRing, scripted_text


@dataclass
class Client:
    """One request and all that came back for it."""

    seed: int
    num_tokens: int = 20
    num_choices: int = 1
    stop: str | None = None
    streaming: bool = True
    router: str = "router"
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    num_errors: int = 0
    num_done: int = 0
    task: asyncio.Task[None] | None = None

    def start(self, ring: WholeRing) -> Client:
        self.task = asyncio.get_running_loop().create_task(self._run(ring))
        return self

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def leave(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self, ring: WholeRing) -> None:
        body = {
            "model": "sim",
            "prompt": f"prompt {self.seed % 3} of a few pages",
            "max_tokens": self.num_tokens,
            "seed": self.seed,
            "n": self.num_choices,
            "stop": self.stop,
            "stream": self.streaming,
        }
        if self.streaming:
            body["stream_options"] = {"include_usage": True}
        async with ring.sessions[self.router].post("/v1/completions", json=body) as response:
            self.status = response.status
            if not self.streaming or response.status != 200:
                self._take(await response.json())
                return
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    self.num_done += 1
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        self.num_errors += "error" in event
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.finishes.setdefault(index, []).append(choice["finish_reason"])

    def check(self) -> None:
        """Exactly one end, and of the text a beginning or all of it, nothing twice."""
        assert self.task is not None
        self.task.result()
        for choice in range(self.num_choices):
            whole = scripted_text(self.seed, choice, self.num_tokens, self.stop)
            text, finishes = self.texts.get(choice, ""), self.finishes.get(choice, [])
            assert whole.startswith(text)
            assert len(finishes) <= 1
            assert not finishes or text == whole
            assert self.num_errors or finishes
        assert self.num_errors + (len(self.finishes) == self.num_choices) == 1
        assert self.num_done == (self.streaming and self.status == 200)
