"""A ring around a real router: scripted workers on the in-memory links, a real HTTP client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from common.link.codec import SPOKEN, unpack
from common.link.shapes import Shapes
from common.messages.address import Address
from common.messages.arrays import int32s, int64s
from common.messages.control import (
    Abort,
    Load,
    ModelCard,
    RouterAlive,
    ServiceName,
    WorkerAlive,
)
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.generate import ComputeInbox, Generate, StreamHeader
from common.messages.logprobs import TokenLogprob
from common.messages.queries import Inspection, InspectionQuery
from common.messages.text import (
    AttemptRefused,
    Detokenized,
    Part,
    RouterInbox,
    TextGenerated,
    Tokenized,
)
from common.messages.tokenize import Tokenize, TokenizeQuery, TokenizerInbox
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox
from services.router.actor import RouterActor
from services.router.config import RouterSettings
from tests.memory_link import Exchange, MemoryTransport
from tests.text_rows import columns

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CARD = ModelCard("demo", "rev1", 1000, 512, 511, 511)
INBOXES: dict[str, Any] = {
    "tokenizer": TokenizerInbox,
    "compute": ComputeInbox,
    "detokenizer": DetokenizerInbox,
}


@dataclass
class Worker:
    """A scripted worker: keeps what it gets."""

    service: ServiceName
    transport: MemoryTransport
    card: ModelCard = CARD
    got: list[Any] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # what it answers operators
    beats: int = 0

    def of(self, kind: type) -> list[Any]:
        """Return the messages of one kind, in order."""
        return [message for message in self.got if isinstance(message, kind)]


@dataclass
class Script:
    """What the ring answers to each prompt: pieces of text, a token each, then the end.

    Of a parsed answer `parts` are what each piece came to. `scored` are the prompt's tokens from
    the second on, said of the first choice where the request wants them, in two messages; the
    prompt has as many then.
    """

    pieces: tuple[str, ...] = ("Hel", "lo")
    reason: EndReason = "stop"
    stop: str | int | None = None
    prompt_tokens: int = 5
    logprobs: Callable[[int], TokenLogprob] | None = None
    parts: tuple[tuple[Part, ...], ...] = ()
    scored: tuple[TokenLogprob, ...] = ()
    reasoning_tokens: int = 0
    queued_s: float | None = None
    drafts: tuple[int, int] = (0, 0)  # that were right, and not

    @property
    def num_calls(self) -> int:
        """Tool calls among the parts."""
        return sum(part.kind == "call" for parts in self.parts for part in parts)

    def answering(self, message: Tokenize | Generate) -> Script:
        """The same for a request, whose prompt is as long as its logprobs say if it wants them."""
        if message.sampling.num_prompt_logprobs < 0:
            return self
        return replace(self, prompt_tokens=1 + len(self.scored))


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "calculator"}},
]
CALLS = Script(
    pieces=("<think>", "hm", "</think>", "<tool_call>…", "…", "…</tool_call>", "…"),
    parts=(
        (Part("content", ""),),
        (Part("reasoning", "hm"),),
        (Part("content", "\n"),),
        (Part("call", "get_weather", 0, "call_1"), Part("arguments", '{"city":', 0)),
        (Part("arguments", '"Oslo"}', 0),),
        (Part("call", "calculator", 1, "call_2"),),
        (Part("arguments", "{}", 1),),
    ),
    reasoning_tokens=3,
)


def next_beat(worker: Worker, **changes: Any) -> WorkerAlive:
    """Return what a worker beats next, idle unless the changes say otherwise."""
    worker.beats += 1
    fields: dict[str, Any] = {
        "service": worker.service,
        "address": worker.transport.address,
        "model": worker.card,
        "load": Load(0, 0, 64),
        "beat": worker.beats,
        "progress": worker.beats,
        "stall_after_s": 2.0,
        "draining": False,
        "open_counters": int64s(),
        **changes,
    }
    return WorkerAlive(**fields)


class Ring:
    """The router under test, its workers and a client session."""

    def __init__(self, settings: RouterSettings) -> None:
        self.exchange = Exchange(auto=True)
        self.now_s = 100.0
        self.transport = self.exchange.transport("router", RouterInbox)
        self.actor = RouterActor(settings, clock=lambda: self.now_s)
        self.workers: dict[str, Worker] = {}
        self.script: Script | None = Script()
        self.num_tokens = 3  # of every prompt that is asked about
        self.session: aiohttp.ClientSession

    def worker(
        self,
        name: str,
        service: ServiceName,
        card: ModelCard = CARD,
        spoken: Mapping[int, Shapes] = SPOKEN,
    ) -> Worker:
        """Add a worker; it registers with its first `beat`."""
        transport = self.exchange.transport(name, INBOXES[service], spoken)
        worker = Worker(service, transport, card)
        worker.transport.open(lambda message, sender: self._got(worker, message), lambda peer: None)
        self.workers[name] = worker
        return worker

    def beat(self, *names: str, **changes: Any) -> None:
        """Send a heartbeat of the workers named, or of all."""
        for name in names or tuple(self.workers):
            worker = self.workers[name]
            worker.transport.send(self.transport.address, next_beat(worker, **changes))

    async def settle(self, turns: int = 8) -> None:
        """Let the loop turn until messages and events are through."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Turn the loop until something is true."""
        for _ in range(1_000_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")

    async def tick(self, seconds: float = 0.1) -> None:
        """Let time pass at the router."""
        self.now_s += seconds
        self.actor.tick(self.now_s)
        self.exchange.advance(seconds)
        await self.settle()

    def text(
        self,
        counter: int,
        first_index: int,
        text: str,
        num_tokens: int = 1,
        end: EndReason | Failure | None = None,
    ) -> None:
        """Send one row of text, with the attempt's end if given."""
        rows = TextGenerated()
        rows.add(counter, first_index, [7] * num_tokens, text)
        usage = Usage(5, 0, first_index + num_tokens)
        if isinstance(end, Failure):
            rows.end(Ending("failed", usage, None, end))
        elif end is not None:
            rows.end(Ending(end, usage))
        self.workers["detokenizer"].transport.send(self.transport.address, rows)

    def refuse(self, message: Tokenize, failure: Failure) -> None:
        """Refuse a request at the tokenizer."""
        refusal = AttemptRefused(message.attempt, message.num_choices, failure)
        self.workers["tokenizer"].transport.send(self.transport.address, refusal)

    def refuse_at_compute(self, message: Tokenize, failure: Failure) -> None:
        """Refuse a request at compute, which says so by way of the detokenizer."""
        rows = TextGenerated()
        for choice in range(message.num_choices):
            rows.add(message.attempt.counter + choice, 0, [], "")
            rows.end(Ending("refused", Usage(5, 0, 0), None, failure))
        self.workers["detokenizer"].transport.send(self.transport.address, rows)

    def post(self, path: str, body: Any, **more: Any) -> Any:
        """Post JSON."""
        return self.session.post(path, json=body, **more)

    def aborts(self, name: str) -> list[int]:
        """Return the counters that a worker was told to abort."""
        return [message.attempt.counter for message in self.workers[name].of(Abort)]

    def is_empty(self) -> bool:
        """Whether the router has nothing open."""
        dispatch = self.actor.dispatch
        admission = dispatch.admission
        return (
            dispatch.idle
            and dispatch.inflight.num_requests == 0
            and admission.num_requests == 0
            and admission.num_tokens == 0
        )

    def _got(self, worker: Worker, message: Any) -> None:
        worker.got.append(message)
        if isinstance(message, RouterAlive) or self.script is None:
            return
        reply = self.transport.address
        if isinstance(message, Tokenize):
            wants_ids = message.stream.return_prompt_ids
            self._generate(message, message.route.detokenizer, wants_ids, reply)
        elif isinstance(message, Generate):
            wants_ids = bool(unpack(StreamHeader, message.header).prompt_ids)
            self._generate(message, message.detokenizer, wants_ids, reply)
        elif isinstance(message, TokenizeQuery):
            ids = int32s(range(1, self.num_tokens + 1))
            strs = ("a", "b", "c") if message.return_token_strs else ()
            worker.transport.send(reply, Tokenized(message.query, ids, strs))
        elif isinstance(message, InspectionQuery):
            worker.transport.send(
                reply, Inspection(message.query, json.dumps(worker.about).encode())
            )
        elif isinstance(message, DetokenizeQuery):
            worker.transport.send(reply, Detokenized(message.query, "text of ids"))

    def _generate(
        self, message: Tokenize | Generate, at: Address, wants_ids: bool, reply: Address
    ) -> None:
        """Answer a prompt, which tokenizer or compute got, as the detokenizer at that address."""
        assert self.script is not None
        (detokenizer,) = (each for each in self.workers.values() if each.transport.address == at)
        first = message.attempt.counter
        counters = range(first, first + message.num_choices)
        script = self.script.answering(message)
        for rows in (*self._prompt(message, script, wants_ids), *_steps(counters, script)):
            detokenizer.transport.send(reply, rows)

    def _prompt(
        self, message: Tokenize | Generate, script: Script, wants_ids: bool
    ) -> list[TextGenerated]:
        """Say what the prompt took, and what its tokens are worth, before the first text."""
        ids = int32s(range(script.prompt_tokens))
        rows = TextGenerated()
        first = message.attempt.counter
        for counter in range(first, first + message.num_choices):
            rows.add(counter, 0, [], "")
            wanted = ids if wants_ids else int32s()
            rows.open(len(ids), 0, wanted, script.queued_s)
        if message.sampling.num_prompt_logprobs < 0 or not script.scored:
            return [rows]
        scores = []
        for at, tokens in ((1, script.scored[:1]), (2, script.scored[1:])):
            scores.append(TextGenerated())
            scores[-1].add(first, 0, [], "")
            scores[-1].score(at, columns(*tokens))
        return [rows, *scores]


def _steps(counters: range, script: Script) -> Iterator[TextGenerated]:
    """Make the messages of an answer: one for each piece, and one for the end."""
    for index, piece in enumerate(script.pieces):
        rows = TextGenerated()
        logprobs = columns(script.logprobs(index)) if script.logprobs else None
        for counter in counters:
            parts = script.parts[index] if script.parts else ()
            rows.add(counter, index, [index], piece, logprobs, parts)
        yield rows
    rows = TextGenerated()
    for counter in counters:
        rows.add(counter, len(script.pieces), [], "")
        usage = Usage(script.prompt_tokens, 0, len(script.pieces), *script.drafts)
        calls, thoughts = script.num_calls, script.reasoning_tokens
        ended = Ending(script.reason, usage, script.stop, None, calls, thoughts)
        rows.end(ended)
    yield rows


async def add(ring: Ring, *services: Any) -> None:
    """Register a second worker of some services."""
    for service in services:
        ring.worker(f"{service}2", service)
        ring.beat(f"{service}2")
    await ring.settle()


@asynccontextmanager
async def running_router(workers: bool = True, **settings: Any) -> AsyncIterator[Ring]:
    """Start a router on a free loopback port with one worker of each service.

    Unless a setting says otherwise, requests do not wait for workers.
    """
    ring = Ring(RouterSettings(port=0, **{"hold_s": 0.0, **settings}))
    await ring.actor.start(ring.transport)
    ring.transport.open(ring.actor.receive, ring.actor.peer_lost)
    if workers:
        ring.worker("tokenizer", "tokenizer")
        ring.worker("compute", "compute")
        ring.worker("detokenizer", "detokenizer")
        ring.beat()
        await ring.settle()
    base = f"http://127.0.0.1:{ring.actor.port}"
    async with aiohttp.ClientSession(base) as session:
        ring.session = session
        try:
            yield ring
        finally:
            await session.close()
            await ring.actor.stop()


def chat(**more: Any) -> dict[str, Any]:
    """Make a chat request."""
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **more}


def events(data: bytes) -> list[Any]:
    """Parse a stream of events; the last must be [DONE]."""
    *parts, end = data.split(b"\n\n")
    assert end == b""
    assert all(part.startswith(b"data: ") for part in parts)
    assert parts[-1] == b"data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-1]]


async def ask(ring: Ring, path: str, body: dict[str, Any]) -> Any:
    async with ring.post(path, body) as response:
        data = await response.read()
        assert response.status == 200, data
    return events(data) if body.get("stream") else json.loads(data)


def deltas_of(chunks: Iterable[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


async def waiting(ring: Ring, body: dict[str, Any], path: str = CHAT) -> asyncio.Task[Any]:
    """Post a request that the ring leaves unanswered, and wait until it is on the ring."""
    ring.script = None
    known = len(ring.workers["tokenizer"].of(Tokenize))

    async def ask() -> tuple[int, bytes]:
        async with ring.post(path, body) as response:
            return response.status, await response.read()

    task = asyncio.ensure_future(ask())
    await ring.until(lambda: len(ring.workers["tokenizer"].of(Tokenize)) > known)
    return task


def last_counter(ring: Ring) -> int:
    """Return the counter of the attempt that came last."""
    message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
    return message.attempt.counter


def error_of(data: bytes) -> dict[str, Any]:
    """Return the error of a body in OpenAI's shape."""
    body: dict[str, Any] = json.loads(data)
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    return error
