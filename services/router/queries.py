"""Queries to workers: each gets one answer, from another worker if the first one cannot give it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.control import ServiceName
from common.messages.failure import Failure
from common.messages.queries import (
    Inspection,
    InspectionQuery,
    Subject,
    TimelinePart,
    TimelineQuery,
)
from common.messages.text import Detokenized, Tokenized
from common.messages.tokenize import IdsPrompt, PromptSource, TokenizeQuery
from common.messages.tokens import DetokenizeQuery
from services.router.attempts import WORKER_LOST
from services.router.errors import FULL, ApiError, unsendable
from services.router.fleet import Fleet
from services.router.generate_request import GenerateRequest, check_prompt_length, token_limits
from services.router.groups import Group, RegisteredWorker
from services.router.holding import HeldPlace, HoldQueue
from services.router.prompts import check_ids

Query: TypeAlias = TokenizeQuery | DetokenizeQuery | TimelineQuery | InspectionQuery
ModelQuery: TypeAlias = TokenizeQuery | DetokenizeQuery

TIMELINE_TIMEOUT_S = 5.0  # of one worker; the others are shown without it
# A link gives up after 3 s what nobody acknowledges, so what is later than this is probably lost.
# The pause doubles each time, lest a worker with too much to do gets more and more of it.
ASK_AGAIN_S = 4.0
LATE = Failure(503, "timeout", "no answer in time; try again", None, True)
ASK_AGAIN = ("worker_lost", "draining", "overloaded")  # failures of one worker's, not of a query


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """So many queries are open at once, and their callers wait for so long."""

    max_open: int
    timeout_s: float


class Question:
    """What one caller wants to know, in as many queries as it takes: the first answer counts."""

    def __init__(self) -> None:
        self.asked: dict[int, Address] = {}  # who has not answered, by the query's counter
        self.num_late = 0
        self.refused_by: set[str] = set()  # instances
        self.late_at_s = math.inf
        self.outcomes: asyncio.Queue[tuple[Address, Any]] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        """Whether there may be another outcome."""
        return bool(self.asked) or not self.outcomes.empty()

    def sent(self, counter: int, worker: Address, now_s: float) -> None:
        self.asked[counter] = worker
        self.late_at_s = now_s + ASK_AGAIN_S * (1 << self.num_late)

    def tick(self, now_s: float) -> None:
        """Count a late answer as an outcome, while it may still come."""
        if now_s >= self.late_at_s:
            self.num_late += 1
            self.late_at_s = now_s + ASK_AGAIN_S * (1 << self.num_late)
            self.outcomes.put_nowait((next(iter(self.asked.values())), LATE))


class Queries:
    """The table of open queries by counter; a query leaves it when its caller stops waiting."""

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        holds: HoldQueue,
        refusal: Callable[[Failure], ApiError],
        take_counters: Callable[[int], int],
        limits: QueryLimits,
    ) -> None:
        """Take the queue for queries that no worker can answer now, and what to say at last."""
        self._transport = transport
        self._fleet = fleet
        self._holds = holds
        self._refusal = refusal
        self._take_counters = take_counters
        self._limits = limits
        self._open: dict[int, Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, counter: int) -> bool:
        return counter in self._open

    def num_at(self, worker: str) -> int:
        """Count the queries that a worker (an instance) has not answered."""
        return sum(each.asked[query].instance_id == worker for query, each in self._open.items())

    async def tokenize(
        self, group: Group, prompt: PromptSource, field: str, with_strings: bool
    ) -> Tokenized:
        """Ask a tokenizer for the ids of a prompt."""
        answer: Tokenized = await self._ask_any(
            group,
            "tokenizer",
            lambda query: TokenizeQuery(
                query,
                self._transport.address,
                prompt,
                field,
                with_strings,
                limits=token_limits(group.card),
            ),
            field,
        )
        return answer

    async def prompt_lengths(self, request: GenerateRequest, group: Group) -> list[int]:
        """Count the tokens of every prompt in turn; ApiError 400 for one that is too long."""
        lengths = []
        for number, prompt in enumerate(request.prompts):
            field = request.field_of(number)
            if isinstance(prompt, IdsPrompt):
                length = len(prompt.ids)
            else:
                length = len((await self.tokenize(group, prompt, field, False)).ids)
            check_prompt_length(length, group.card, field)
            lengths.append(length)
        return lengths

    async def detokenize(
        self, group: Group, ids: IdsPrompt, field: str, goes_on: bool = False
    ) -> str:
        """Ask a detokenizer for the text of ids; `goes_on` omits an unfinished last character."""
        check_ids(ids.ids, field, group.card.vocab_size or 1 << 31)
        answer: Detokenized = await self._ask_any(
            group,
            "detokenizer",
            lambda query: DetokenizeQuery(
                query,
                self._transport.address,
                ids.ids,
                goes_on=goes_on,
                vocab_size=group.card.vocab_size,
            ),
            field,
        )
        return answer.text

    async def timeline(self, worker: RegisteredWorker, seconds: float) -> TimelinePart:
        """Ask a worker for its spans of the last seconds; ApiError 503 if it does not answer."""
        query = TimelineQuery(self._query_id(), self._transport.address, seconds)
        answer: TimelinePart = await self._ask(worker, query, timeout_s=TIMELINE_TIMEOUT_S)
        return answer

    async def inspect(self, worker: RegisteredWorker, subject: Subject) -> dict[str, Any]:
        """Ask a worker an operator's question; ApiError 503 if it does not answer."""
        query = InspectionQuery(self._query_id(), self._transport.address, subject)
        answer: Inspection = await self._ask(worker, query)
        found: dict[str, Any] = json.loads(answer.found_json)
        return found

    def place(self, group: Group, service: ServiceName) -> RegisteredWorker:
        return self._fleet.place(group, service, self._holds.clock())

    def tick(self, now_s: float) -> None:
        """Let those whose answer is late ask another worker, too."""
        for question in set(self._open.values()):
            question.tick(now_s)

    def answered(self, message: Tokenized | Detokenized | TimelinePart | Inspection) -> None:
        """Give an answer to its caller; one that comes after another is ignored."""
        failure = getattr(message, "failure", None)
        self._end(message.query.counter, message if failure is None else failure)

    def lose_worker(self, instance_id: str, failure: Failure = WORKER_LOST) -> None:
        """Fail the queries that a dead worker has not answered."""
        for counter, question in [*self._open.items()]:
            if question.asked[counter].instance_id == instance_id:
                self._end(counter, failure)

    def fail_all(self, failure: Failure) -> None:
        for counter in [*self._open]:
            self._end(counter, failure)

    async def _ask_any(
        self,
        group: Group,
        service: ServiceName,
        make: Callable[[AttemptId], ModelQuery],
        field: str,
    ) -> Any:
        """Ask a worker of a service, and another one where it cannot answer or is late."""
        # Of a group that was found a while ago, some may be gone; a query to them has no answer.
        current = self._fleet.of_revision(group.card)
        able: Group | None = current if current.workers[service] else group
        with self._holds.place() as place:
            async with self._question(self._limits.timeout_s) as question:
                while True:
                    if able is not None:
                        worker = self.place(able, service)
                        self._send(question, worker, make(self._query_id()), field)
                    address, outcome = await question.outcomes.get()
                    if not isinstance(outcome, Failure):
                        self._fleet.breakers.succeeded(address.endpoint)
                        return outcome
                    if outcome is not LATE and outcome.code not in ASK_AGAIN:
                        raise _refused(outcome)
                    if outcome.code in ("draining", "overloaded"):  # a lost one may be back
                        question.refused_by.add(address.instance_id)
                    able = await self._others(question, group, service, outcome, place)

    async def _others(
        self,
        question: Question,
        group: Group,
        service: ServiceName,
        failure: Failure,
        place: HeldPlace,
    ) -> Group | None:
        """Return who can be asked next: None while an answer may still come, ApiError at last."""
        is_full = failure.code == "overloaded"
        may_ask = len(self._open) < self._limits.max_open
        if is_full or failure is LATE:
            may_ask = may_ask and self._fleet.retries.take(self._holds.clock())
        while True:
            able = self._fleet.of_revision(group.card).without(question.refused_by)
            if may_ask and able.workers[service]:
                waiting = {worker.instance_id for worker in question.asked.values()}
                fresh = able.without(waiting)
                return fresh if fresh.workers[service] else able
            if question.is_open:
                return None
            if is_full or not may_ask or not await self._holds.wait(place):
                raise self._refusal(failure)

    async def _ask(self, worker: RegisteredWorker, query: Query, timeout_s: float = 0.0) -> Any:
        """Wait for the answer of this one worker; ApiError when it fails or is late."""
        async with self._question(timeout_s or self._limits.timeout_s) as question:
            self._send(question, worker, query)
            question.late_at_s = math.inf
            _, answer = await question.outcomes.get()
        if isinstance(answer, Failure):
            raise _refused(answer)
        return answer

    def _send(
        self, question: Question, worker: RegisteredWorker, query: Query, field: str = ""
    ) -> None:
        """Send a query; a failure to do so names the client's `field`."""
        if len(self._open) >= self._limits.max_open:
            raise ApiError(FULL, 1.0)
        try:
            self._transport.send(worker.address, query)
        except LinkError as error:
            if not field:
                raise
            raise unsendable(error, field) from error
        self._open[query.query.counter] = question
        question.sent(query.query.counter, worker.address, self._holds.clock())

    @asynccontextmanager
    async def _question(self, timeout_s: float) -> AsyncIterator[Question]:
        """Wait for the outcomes of a question; ApiError when that takes too long."""
        question = Question()
        try:
            async with asyncio.timeout(timeout_s):
                yield question
        except TimeoutError:
            raise _refused(LATE) from None
        finally:
            for counter in question.asked:
                del self._open[counter]

    def _end(self, counter: int, outcome: Any) -> None:
        question = self._open.pop(counter, None)
        if question is not None:
            question.outcomes.put_nowait((question.asked.pop(counter), outcome))

    def _query_id(self) -> AttemptId:
        return AttemptId(self._transport.address.instance_id, self._take_counters(1))


def _refused(failure: Failure) -> ApiError:
    return ApiError(failure, 1.0 if failure.retryable else None)
