"""Requests in flight with a sink that keeps everything, and the rows that arrive for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.messages.address import Address, AttemptId, Route
from common.messages.arrays import int32s
from common.messages.control import ModelCard
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.sampling import SamplingParams
from common.messages.text import Part, TextGenerated, TextOpened
from common.messages.tokenize import StreamSettings, TextPrompt, Tokenize, TokenLimits
from services.router.attempts import AbortedAttempt, InflightRequest
from services.router.inflight import InflightTable

CARD = ModelCard("demo", "rev1", 1000, 512, 511, 511)


def route(number: int = 0) -> Route:
    names = (f"tokenizer.{number}", f"compute.{number}", f"detokenizer.{number}", "router.0")
    return Route(*(Address(f"mem://{name}", name) for name in names))


@dataclass
class Recorder:
    """A sink that keeps everything and insists on order."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, Ending] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    prompts: dict[int, TextOpened] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    wants_ids: bool = False

    def opened(self, choice: int, prompt: TextOpened) -> None:
        assert choice not in self.prompts
        self.prompts[choice] = prompt

    def scored(self, choice: int, scored: PromptLogprobs) -> None:
        self.prompt_logprobs.setdefault(choice, Logprobs()).extend(scored.logprobs)

    def delta(
        self,
        choice: int,
        text: str,
        logprobs: Logprobs | None = None,
        parts: tuple[Part, ...] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        assert choice not in self.ends and not self.failures
        self.texts[choice] = self.texts.get(choice, "") + text
        self.parts += parts
        self.token_ids += token_ids

    def waiting(self) -> None: ...

    def finished(self, choice: int, ended: Ending) -> None:
        assert choice not in self.ends and not self.failures
        self.ends[choice] = ended

    def failed(self, failure: Failure) -> None:
        assert not self.failures
        self.failures.append(failure)


def message(num_choices: int = 1) -> Tokenize:
    return Tokenize(
        attempt=AttemptId("router.0", 0),
        route=route(),
        prompt=TextPrompt("Hi"),
        sampling=SamplingParams(0, 1),
        stream=StreamSettings(),
        limits=TokenLimits(512, 511, 511, 1000),
        admitted_at_s=0.0,
        output_ids=int32s(),
        num_choices=num_choices,
    )


def open_request(
    table: InflightTable, num_choices: int = 1, station: int = 0
) -> tuple[Recorder, InflightRequest, int]:
    sink = Recorder()
    request = table.open(sink, num_choices, CARD, 0.0)
    request.messages.append(message(num_choices))
    return sink, request, table.attempt(request.choices, route(station), 0.0)[0].counter


def row(
    counter: int,
    first: int,
    text: str,
    end: EndReason | None = None,
    failure: Failure | None = None,
) -> TextGenerated:
    """Make one row with a token per character."""
    rows = TextGenerated()
    rows.add(counter, first, [ord(each) for each in text], text)
    if end is not None:
        rows.end(Ending(end, Usage(5, 0, first + len(text)), None, failure))
    return rows


def reasons(aborted: list[AbortedAttempt]) -> list[tuple[int, str]]:
    return [(each.counter, each.reason) for each in aborted]


def waiting(table: InflightTable) -> list[list[int]]:
    """Return what waits to be tried again, by the numbers of the choices."""
    return [[choice.index for choice in run] for run in table.to_retry()]
