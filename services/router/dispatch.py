"""From a Job to mail: places it, enters it into the table, and sends it round the ring.

What the HTTP side sees of the router; it knows no HTTP itself.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.errors import LinkError, MessageTooLarge
from common.link.transport import Transport
from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, AbortReason, ModelCard, ServiceName
from common.messages.failure import Failure
from common.messages.queries import (
    Inspection,
    InspectionQuery,
    Subject,
    TimelinePart,
    TimelineQuery,
)
from common.messages.sampling import SamplingParams
from common.messages.text import Detokenized, Tokenized
from common.messages.tokenize import (
    IdsPrompt,
    PromptSource,
    Tokenize,
    TokenizeQuery,
    TokenLimits,
)
from common.messages.tokens import DetokenizeQuery
from services.router.admission import AdmissionController, AdmissionTicket, Client
from services.router.errors import ApiError, bad_field
from services.router.fleet import Fleet, Group, ServedRoute, Worker
from services.router.generate_request import TRUNCATE_TO_FIT, GenerateRequest
from services.router.inflight import AbortedAttempt, InflightRequest, InflightTable, Sink
from services.router.queries import Queries
from services.router.token_ids import check_ids

DRAINING = Failure(503, "draining", "the server is stopping; try again", None, True)
MAX_PROMPT_SCORES = 1 << 20  # candidates of one request; 250 bytes each while they wait
MAX_ANSWER_SCORES = 4 << 20  # likewise, of all that its choices may come to
TIMELINE_TIMEOUT_S = 5.0  # of one worker; others are shown without it
MAX_NAMED_MODELS = 8  # in a refusal
NO_WORKER = "no {} is available; try again"


class Dispatch:
    """Brings jobs onto the ring and takes them off again."""

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        admission: AdmissionController,
        query_timeout_s: float,
        max_queries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.inflight = InflightTable()
        self.queries = Queries(max_queries)
        self.draining = False
        self.num_handlers = 0  # HTTP requests being answered
        self._transport = transport
        self.admission = admission
        self._query_timeout_s = query_timeout_s
        self._clock = clock

    @property
    def ready(self) -> bool:
        """Whether new work is taken."""
        return not self.draining and self.fleet.ready

    @property
    def idle(self) -> bool:
        """Whether nothing is open: no request, no question, no HTTP handler."""
        return not (len(self.inflight) or len(self.queries) or self.num_handlers)

    def num_at(self, worker: str) -> int:
        """Count what may still come to a worker (an instance) or is there."""
        return self.inflight.num_at(worker) + self.queries.num_at(worker)

    def group(self, model: str) -> Group:
        """Find the workers of a model; ApiError 404 if it is not served, 503 if it cannot be now.

        An empty `model` stands for the one that is served; with several of them it is a 400.
        """
        if self.draining:
            raise ApiError(DRAINING, 1.0)
        groups = self.fleet.groups()
        if not model and groups:
            model = _only_model(groups)
        group = self.fleet.group(model)
        if group is None and groups:
            message = f"the model {model[:100]!r} does not exist; /v1/models lists those that do"
            raise ApiError(Failure(404, "model_not_found", message, "model"))
        missing = self.fleet.missing if group is None else group.missing
        if group is None or missing:
            message = NO_WORKER.format(" and no ".join(missing))
            raise ApiError(Failure(503, "no_worker", message, None, True), 1.0)
        return group

    def admit(self, client: Client, job: GenerateRequest, group: Group) -> AdmissionTicket:
        """Check a job against the model and the bounds; ApiError 400, 429 or 503."""
        _check_vocabulary(job, group.card.vocab_size)
        _check_scores(job, group.card.max_model_len)
        cost = job.cost_tokens(group.card.max_model_len)
        return self.admission.admit(client, cost, self._clock())

    def release(self, ticket: AdmissionTicket, used_tokens: int = 0) -> None:
        """Give back what `admit` gave, and say how many tokens the request took."""
        self.admission.release(ticket, used_tokens)

    def submit(
        self, job: GenerateRequest, group: Group, sink: Sink, traceparent: str = ""
    ) -> InflightRequest:
        """Send a job round the ring; its choices go to the sink until `close`.

        Every prompt of a batch is placed by itself, so a batch uses all replicas; all within one
        model revision, so that they answer alike.
        """
        now_s, wall_s = self._clock(), time.time()
        count = job.num_choices
        entry = self.inflight.open(sink, job.num_all_choices)
        for number, prompt in enumerate(job.prompts):
            way = self.fleet.way(group, self._transport.address, now_s)
            choices = entry.choices[number * count : (number + 1) * count]
            first = self.inflight.attempt(choices, way.route, now_s)[0].counter
            message = Tokenize(
                attempt=AttemptId(self._transport.address.instance_id, first),
                route=way.route,
                prompt=prompt,
                sampling=_seeded(job),
                stream=job.stream,
                limits=_limits(way, job),
                admitted_at_s=wall_s,
                output_ids=int32s(),
                num_choices=count,
                priority=job.priority,
                cache_salt=job.cache_salt,
                prompt_field=job.field_of(number),
                traceparent=traceparent,
                rules=job.rules,
                truncate_to=truncate_to(job, way.card),
                truncate_side=job.truncate_side,
                pooling=job.pooling,
            )
            try:
                self._transport.send(way.route.tokenizer, message)
            except LinkError as error:
                self.close(entry)
                raise _unsendable(error, job.field_of(number)) from error
        return entry

    def close(self, entry: InflightRequest, reason: AbortReason = "client_gone") -> None:
        """Take a request off the ring, in whatever state it is."""
        self.abort(self.inflight.close(entry, reason))

    def abort(self, doomed: Iterable[AbortedAttempt]) -> None:
        """Tell the stages that may work on these attempts to stop.

        Compute ends an attempt downstream, too, so the detokenizer is told only where compute is
        gone, and the tokenizer only as long as it may still have the attempt.
        """
        for each in doomed:
            way = each.route
            message = Abort(
                AttemptId(self._transport.address.instance_id, each.counter), each.reason
            )
            compute = self.fleet.worker(way.compute.instance_id)
            stages = [way.detokenizer if compute is None else way.compute]
            if not each.past_tokenizer:
                stages.append(way.tokenizer)
            for stage in stages:
                if self.fleet.worker(stage.instance_id) is not None:
                    self._transport.send(stage, message)

    async def tokenize(
        self, group: Group, prompt: PromptSource, field: str, with_strings: bool
    ) -> Tokenized:
        """Ask a tokenizer for the ids of a prompt."""
        self.queries.check_room()
        worker = self.fleet.place(group, "tokenizer", self._clock())
        query = self._query_id()
        message = TokenizeQuery(query, self._transport.address, prompt, field, with_strings)
        try:
            self._transport.send(worker.address, message)
        except LinkError as error:
            raise _unsendable(error, field) from error
        answer: Tokenized = await self.queries.answer(
            query.counter, worker.address.instance_id, self._query_timeout_s
        )
        return answer

    async def prompt_lengths(self, job: GenerateRequest, group: Group) -> list[int]:
        """Count the tokens of every prompt, one after the other; ApiError 400 for one too long."""
        lengths = []
        for number, prompt in enumerate(job.prompts):
            field = job.field_of(number)
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
        """Ask a detokenizer for the text of ids; with `goes_on` without an unfinished character."""
        check_ids(list(ids.ids), field, group.card.vocab_size or 1 << 31)
        self.queries.check_room()
        worker = self.fleet.place(group, "detokenizer", self._clock())
        query = self._query_id()
        message = DetokenizeQuery(query, self._transport.address, ids.ids, goes_on=goes_on)
        try:
            self._transport.send(worker.address, message)
        except LinkError as error:
            raise _unsendable(error, field) from error
        answer: Detokenized = await self.queries.answer(
            query.counter, worker.address.instance_id, self._query_timeout_s
        )
        return answer.text

    async def timeline(self, worker: Worker, seconds: float) -> TimelinePart:
        """Ask a worker what it did in the last seconds; ApiError 503 if it does not say."""
        self.queries.check_room()
        query = self._query_id()
        self._transport.send(worker.address, TimelineQuery(query, self._transport.address, seconds))
        answer: TimelinePart = await self.queries.answer(
            query.counter, worker.address.instance_id, TIMELINE_TIMEOUT_S
        )
        return answer

    def place(self, group: Group, service: ServiceName) -> Worker:
        """Choose a worker of a service for one question."""
        return self.fleet.place(group, service, self._clock())

    async def inspect(self, worker: Worker, subject: Subject) -> dict[str, Any]:
        """Ask a worker an operator's question; ApiError 503 if it does not answer."""
        self.queries.check_room()
        query = self._query_id()
        self._transport.send(
            worker.address, InspectionQuery(query, self._transport.address, subject)
        )
        answer: Inspection = await self.queries.answer(
            query.counter, worker.address.instance_id, self._query_timeout_s
        )
        found: dict[str, Any] = json.loads(answer.found_json)
        return found

    def _query_id(self) -> AttemptId:
        return AttemptId(self._transport.address.instance_id, self.inflight.take_counters(1))


def _only_model(groups: Sequence[Group]) -> str:
    complete = [group for group in groups if not group.missing]
    names = sorted({group.card.name for group in complete or groups})
    if len(names) > 1:
        served = ", ".join(names[:MAX_NAMED_MODELS])
        message = f"is required where several are served: {served}"
        raise bad_field("model", message, "missing_required_parameter")
    return names[0]


def _seeded(job: GenerateRequest) -> SamplingParams:
    """Draw 63 random bits where the client gave no seed: they go with the request everywhere."""
    if job.has_seed:
        return job.sampling
    return dataclasses.replace(job.sampling, seed=secrets.randbits(63))


def _limits(way: ServedRoute, job: GenerateRequest) -> TokenLimits:
    """Say what fits; a limit that is not the client's own must shrink to it, not be refused."""
    card = way.card
    bounds = (card.max_output_length, 0 if job.sampling.max_tokens else job.usual_max_tokens)
    return TokenLimits(
        max_model_len=card.max_model_len,
        max_input_length=card.max_input_length,
        max_output_length=min(filter(None, bounds), default=0),
        vocab_size=card.vocab_size,
    )


def check_prompt_length(length: int, card: ModelCard, field: str) -> None:
    """Refuse a prompt that the model could not take (0: the model sets no limit)."""
    most = card.max_input_length or card.max_model_len
    if 0 < most < length:
        message = f"{field}: has {length} tokens; this model takes {most} at most"
        code = "context_length_exceeded"
        raise ApiError(Failure(400, code, message, field, False, length, most))


def truncate_to(job: GenerateRequest, card: ModelCard) -> int:
    """Return how many tokens of a prompt are kept; 0 is all of them.

    "As many as fit" leaves room for what is to be generated, a token at least; a limit that
    leaves no prompt any room says nothing of how much that is.
    """
    if job.truncate_to != TRUNCATE_TO_FIT:
        return job.truncate_to
    room = card.max_model_len
    if room and not job.pooling:
        wanted = job.sampling.max_tokens or job.usual_max_tokens
        room = max(1, room - (wanted if 1 <= wanted < room else 1))
    return min(filter(None, (room, card.max_input_length)), default=0)


def _check_vocabulary(job: GenerateRequest, vocab_size: int) -> None:
    """Refuse ids that the model does not have (`vocab_size` 0: unknown)."""
    if not vocab_size:
        return
    for number, prompt in enumerate(job.prompts):
        if isinstance(prompt, IdsPrompt) and max(prompt.ids) >= vocab_size:
            check_ids(list(prompt.ids), job.field_of(number), vocab_size)
    check_ids(list(job.sampling.stop_token_ids), "stop_token_ids", vocab_size)
    check_ids(list(job.rules.allowed_token_ids), "allowed_token_ids", vocab_size)
    for token_id, _ in job.sampling.logit_bias:
        if token_id >= vocab_size:
            raise bad_field("logit_bias", f"{token_id} is no token id; there are {vocab_size}")


def _check_scores(job: GenerateRequest, max_model_len: int) -> None:
    """Bound the logprobs of a request: this process holds them all until they are answered."""
    per_token = job.sampling.num_prompt_logprobs + 1
    most = MAX_PROMPT_SCORES // max(1, per_token)
    if per_token and job.most_prompt_tokens(max_model_len) > most:
        raise bad_field(
            job.prompt_field, f"may have {most} tokens at most with so many logprobs of them"
        )
    output = job.sampling.max_tokens or job.usual_max_tokens or max_model_len
    most = MAX_ANSWER_SCORES // max(1, job.num_all_choices * (job.sampling.num_logprobs + 1))
    if min(output, max_model_len or output) > most:
        raise bad_field(
            job.max_tokens_field,
            f"may be {most} at most with so many logprobs of {job.num_all_choices} choices",
        )


def _unsendable(error: LinkError, field: str) -> ApiError:
    if isinstance(error, MessageTooLarge):
        return ApiError(Failure(413, "request_too_large", f"{field}: is too large", field))
    return bad_field(field, f"cannot be sent on: {error}")
