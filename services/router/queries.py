"""Queries to workers: each gets one answer, from another worker if the first one cannot give it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import AttemptId
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
from services.router.fleet import Fleet, Group, RegisteredWorker
from services.router.generate_request import GenerateRequest, check_prompt_length
from services.router.holding import HoldQueue
from services.router.prompts import check_ids

Query: TypeAlias = TokenizeQuery | DetokenizeQuery | TimelineQuery | InspectionQuery
ModelQuery: TypeAlias = TokenizeQuery | DetokenizeQuery

TIMELINE_TIMEOUT_S = 5.0  # of one worker; the others are shown without it
ASK_AGAIN = ("worker_lost", "draining", "overloaded")  # failures of one worker's, not of a query


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """So many queries are open at once, each for so long at one worker."""

    max_open: int
    timeout_s: float


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
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, counter: int) -> bool:
        return counter in self._open

    def num_at(self, worker: str) -> int:
        """Count the queries that a worker (an instance) has not answered."""
        return sum(addressee == worker for addressee, _ in self._open.values())

    async def tokenize(
        self, group: Group, prompt: PromptSource, field: str, with_strings: bool
    ) -> Tokenized:
        """Ask a tokenizer for the ids of a prompt."""
        answer: Tokenized = await self._ask_any(
            group,
            "tokenizer",
            lambda query: TokenizeQuery(
                query, self._transport.address, prompt, field, with_strings
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
            lambda query: DetokenizeQuery(query, self._transport.address, ids.ids, goes_on=goes_on),
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

    def answered(self, message: Tokenized | Detokenized | TimelinePart | Inspection) -> None:
        """Give an answer to its caller; a late one is ignored."""
        _, future = self._open.get(message.query.counter, (None, None))
        if future is not None and not future.done():
            failure = getattr(message, "failure", None)
            future.set_result(message if failure is None else failure)

    def lose_worker(self, instance_id: str, failure: Failure = WORKER_LOST) -> None:
        """Fail the queries that a dead worker has not answered."""
        for worker, future in self._open.values():
            if worker == instance_id and not future.done():
                future.set_result(failure)

    def fail_all(self, failure: Failure) -> None:
        for _, future in self._open.values():
            if not future.done():
                future.set_result(failure)

    async def _ask_any(
        self,
        group: Group,
        service: ServiceName,
        make: Callable[[AttemptId], ModelQuery],
        field: str,
    ) -> Any:
        """Ask a worker of a service, and another one where it could not answer."""
        refused: set[str] = set()
        # Of a group that was found a while ago, some may be gone; a query to them has no answer.
        able = self._fleet.of_revision(group.card)
        able = able if able.workers[service] else group
        with self._holds.place(self._holds.deadline()) as place:
            while True:
                worker = self.place(able, service)
                try:
                    answer = await self._ask(worker, make(self._query_id()), field)
                    self._fleet.breakers.succeeded(worker.address.endpoint)
                    return answer
                except ApiError as error:
                    if error.failure.code not in ASK_AGAIN:
                        raise
                    if error.failure.code != "worker_lost":  # a lost one that is back may answer
                        refused.add(worker.address.instance_id)
                    is_full = error.failure.code == "overloaded"
                    if is_full and not self._fleet.retries.take(self._holds.clock()):
                        raise self._refusal(error.failure) from error
                    while not (able := self._able(group, refused)).workers[service]:
                        if is_full or not await self._holds.wait(place):
                            raise self._refusal(error.failure) from error

    def _able(self, group: Group, refused: Collection[str]) -> Group:
        return self._fleet.of_revision(group.card).without(refused)

    async def _ask(
        self,
        worker: RegisteredWorker,
        query: Query,
        field: str | None = None,
        timeout_s: float = 0.0,
    ) -> Any:
        """Send a query and wait for its answer; a failure to send it names the client's `field`."""
        if len(self._open) >= self._limits.max_open:
            raise ApiError(FULL, 1.0)
        try:
            self._transport.send(worker.address, query)
        except LinkError as error:
            if field is None:
                raise
            raise unsendable(error, field) from error
        return await self._answer(
            query.query.counter, worker.address.instance_id, timeout_s or self._limits.timeout_s
        )

    async def _answer(self, counter: int, worker: str, timeout_s: float) -> Any:
        """Wait for the answer of a worker (an instance); ApiError when it fails or is late."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[counter] = (worker, future)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            timeout = Failure(503, "timeout", "no answer in time; try again", None, True)
            raise ApiError(timeout, 1.0) from None
        finally:
            self._open.pop(counter, None)
        if isinstance(answer, Failure):
            raise ApiError(answer, 1.0 if answer.retryable else None)
        return answer

    def _query_id(self) -> AttemptId:
        return AttemptId(self._transport.address.instance_id, self._take_counters(1))
