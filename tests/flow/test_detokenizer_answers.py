"""Parsed answers through the detokenizer's actor, over the in-memory link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.arrays import float32s, int32s
from common.messages.control import ModelCard
from common.messages.failure import Ending, Usage
from common.messages.generate import ComputeInbox, StreamHeader
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokens import DetokenizerInbox, TokensGenerated
from common.registration import Registration
from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.config import DetokenizerSettings
from tests.memory_link import Exchange
from tests.text_rows import TextRow, rows
from tests.unit.detokenizer.vocabularies import marked

DEMO = Path(__file__).parents[2] / "models" / "demo"
ANSWER = (
    "<think>\nRome, then.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 < 3"}}\n</tool_call>'
)


class Answering:
    """One detokenizer with a compute service and a router whose rows the test reads."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.exchange = Exchange()
        self.router = self.exchange.transport("router", RouterInbox)
        self.compute = self.exchange.transport("compute", ComputeInbox)
        self.transport = self.exchange.transport("detokenizer", DetokenizerInbox)
        card = ModelCard("marked", "r1", tokenizer.get_vocab_size())
        self.actor = DetokenizerActor(
            DetokenizerSettings(),
            folder,
            card,
            Registration("detokenizer", ("mem://router",)),
            lambda: self.exchange.now_s,
        )
        self.rows: list[TextRow] = []
        self.router.open(self._take, lambda _: None)
        self.compute.open(lambda _message, _sender: None, lambda _: None)

    async def start(self) -> Answering:
        await self.actor.start(self.transport)
        self.transport.open(self.actor.receive, self.actor.peer_lost)
        return self

    def header(self, **settings: Any) -> bytes:
        return pack(StreamHeader(reply=self.router.address, call_key="key", **settings))

    def answer(self, text: str, header: bytes, ids_a_row: int = 1) -> list[TextRow]:
        """Send a text as rows of tokens and its terminal; return the rows for the router."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        attempt = AttemptId(self.router.address.instance_id, 1)
        for first in range(0, len(ids), ids_a_row):
            step = TokensGenerated(first)
            head = None if first else header
            step.add(attempt, first, ids[first : first + ids_a_row], header=head, prompt=(4, 1))
            if first + ids_a_row >= len(ids):
                step.end(header, Ending("length", Usage(4, 1, len(ids))))
            self.compute.send(self.transport.address, step)
        self.exchange.deliver()
        return self.rows

    def _take(self, message: object, _sender: object) -> None:
        if isinstance(message, TextGenerated):
            self.rows += rows(message)


@pytest.fixture(params=["special", "plain"])
async def answering(request: pytest.FixtureRequest, tmp_path: Path) -> Answering:
    """Markers as special tokens of a small vocabulary, and as plain text of the demo model."""
    if request.param == "plain":
        return await Answering(DEMO, Tokenizer.from_file(str(DEMO / "tokenizer.json"))).start()
    marked().save(str(tmp_path / "tokenizer.json"))
    return await Answering(tmp_path, marked()).start()


@pytest.mark.parametrize("ids_a_row", [1, 5, 1_000])
async def test_reasoning_and_calls_reach_the_router_apart(
    answering: Answering, ids_a_row: int
) -> None:
    header = answering.header(tool_format="hermes", reasoning_format="think", first_counter=1)
    got = answering.answer(ANSWER, header, ids_a_row)
    assert all(row.parts for row in got)
    parts = [part for row in got for part in row.parts]

    def text(kind: str, index: int = 0) -> str:
        return "".join(part.text for part in parts if (part.kind, part.index) == (kind, index))

    assert text("reasoning") == "Rome, then."
    assert text("content") == "One moment."
    assert (text("call"), text("arguments")) == ("get_weather", '{"city": "Rome"}')
    assert (text("call", 1), text("arguments", 1)) == ("calculator", '{"expression": "2 < 3"}')
    assert "".join(row.text for row in got) == ANSWER
    assert got[0].opened is not None
    assert (got[0].opened.prompt_tokens, got[0].opened.cached_tokens) == (4, 1)
    assert not any(row.opened for row in got[1:])
    ended = got[-1].ended
    assert ended is not None
    assert (ended.reason, ended.num_calls) == ("length", 2)
    assert 0 < ended.reasoning_tokens <= len("\nRome, then.\n")


async def test_an_answer_that_nobody_wants_parsed_has_no_parts(answering: Answering) -> None:
    got = answering.answer("One moment.", answering.header())
    assert "".join(row.text for row in got) == "One moment."
    assert not any(row.parts for row in got)


async def test_scores_ids_and_embeddings_of_prompts_reach_the_router(answering: Answering) -> None:
    attempt = AttemptId(answering.router.address.instance_id, 1)
    ids = int32s(answering.tokenizer.encode("ab", add_special_tokens=False).ids)
    header = answering.header(prompt_ids=ids.tobytes())
    count = len(ids)
    logprobs = Logprobs()
    for rank, token_id in enumerate(ids, 1):
        logprobs.add((token_id, token_id), (-1.0, -1.0), rank)
    embedding = float32s((1.0, 2.0)).tobytes()
    step = TokensGenerated(1)
    step.add(attempt, 0, (), header=header, prompt=(count, 0))
    step.score(PromptLogprobs(0, 1, logprobs))
    step.end(header, Ending("stop", Usage(count, 0, 0), embedding=embedding))
    answering.compute.send(answering.transport.address, step)
    answering.exchange.deliver()
    (row,) = answering.rows
    assert row.opened is not None
    assert row.opened.prompt_ids == ids
    (scored,) = row.scored
    assert [token.rank for token in scored.logprobs] == list(range(1, count + 1))
    assert "".join(token.chosen.text for token in scored.logprobs) == "ab"
    assert row.ended is not None
    assert row.ended.embedding == embedding
