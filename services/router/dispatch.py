"""From a GenerateRequest to messages: admit it, place it, and send it round the ring.

This is the HTTP side's view of the router; it knows no HTTP itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import AttemptId, Route
from common.messages.arrays import int32s
from common.messages.control import Abort, AbortReason, ModelCard
from common.messages.failure import Failure
from common.messages.tokenize import Tokenize
from common.turns import Turns
from services.router.admission import AdmissionController, AdmissionTicket, Client
from services.router.answer import Sink
from services.router.attempts import FAILED, WORKER_LOST, AbortedAttempt, Choice, InflightRequest
from services.router.breaker import LeftAlone
from services.router.caller import ANYBODY, TIMED_OUT, Caller
from services.router.drain_rate import retry_after
from services.router.early_refusal import check_first_token, has_queue, num_ahead, waiting_choices
from services.router.errors import ApiError, unsendable
from services.router.failover import Setback
from services.router.first_stage import first_stage
from services.router.fleet import Fleet
from services.router.generate_request import GenerateRequest, estimated_tokens, expected_tokens
from services.router.groups import Group, only_model
from services.router.holding import HoldQueue, Patience
from services.router.inflight import InflightTable
from services.router.queries import Queries, QueryLimits
from services.router.recovery import Recovery

DRAINING = Failure(503, "draining", "the server is stopping; try again", None, True)
NO_WORKER = "no {} is available; try again"
KEEP_ALIVE_S = 2.0  # between two signs of life to the client of an answer that waits


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """So many queries are open, for so long each.

    `max_wait_s` is how long a request may be without its first token; if that is expected to take
    longer than `max_ttft_s`, it is not admitted. 0 means for ever.
    """

    query_timeout_s: float
    max_queries: int
    patience: Patience
    max_wait_s: float = 0.0
    max_ttft_s: float = 0.0


class Dispatch:
    """Sends requests and queries round the ring and takes them off again."""

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        admission: AdmissionController,
        limits: DispatchLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.admission = admission
        self.inflight = InflightTable(fleet.breakers)
        self.draining = False  # not ready any more
        self.closed = False  # takes no more requests
        self.num_handlers = 0  # HTTP requests being answered
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self._turns = Turns(clock)
        self.holds = HoldQueue(limits.patience, admission, clock)
        self.queries = Queries(
            transport,
            fleet,
            self.holds,
            self.error,
            self.inflight.take_counters,
            QueryLimits(limits.max_queries, limits.query_timeout_s),
        )
        self.recovery = Recovery(
            fleet, self.inflight, self._turns, limits.patience, self._retry, self.abort
        )
        self._lacking_since_s = clock()  # since when no model has had a worker of every service
        self._signed_at_s = 0.0

    @property
    def ready(self) -> bool:
        return not self.draining and (self.fleet.ready or self.waits_to_wake)

    @property
    def waits_to_wake(self) -> bool:
        """Whether requests are held for a model that is asleep, or loads, until it is there."""
        wakes = self._limits.patience.wake_s > 0
        return wakes and any(each.status in ("asleep", "loading") for each in self.fleet.groups())

    @property
    def idle(self) -> bool:
        """Whether no request, query or HTTP handler is open."""
        return not (self.inflight.num_requests or len(self.queries) or self.num_handlers)

    def left_alone(self) -> list[LeftAlone]:
        """Return the replicas that have failed again and again."""
        return self.fleet.breakers.left_alone(self._clock())

    def num_at(self, instance_id: str) -> int:
        """Count the attempts and queries that a worker has or may still get."""
        return self.inflight.num_at(instance_id) + self.queries.num_at(instance_id)

    def caller(self, client: Client, request: GenerateRequest) -> Caller:
        """Say until when a client's request, which has just come, may begin and end."""
        now_s, max_wait_s, timeout_s = self._clock(), self._limits.max_wait_s, request.timeout_s
        return Caller(
            client,
            request.prompt_tokens,
            now_s + max_wait_s if max_wait_s else math.inf,
            now_s + timeout_s if timeout_s else math.inf,
        )

    def group(self, model: str) -> Group:
        """Find the workers of a model; ApiError 404 if it is not served, 503 if it cannot be now.

        An empty `model` means the one that is served; with several of them it is a 400.
        """
        if self.closed:
            raise ApiError(DRAINING, 1.0)
        group = self._known(model)
        if group is None and self.fleet.groups():
            message = f"the model {model[:100]!r} does not exist; /v1/models lists those that do"
            raise ApiError(Failure(404, "model_not_found", message, "model"))
        missing = self.fleet.missing if group is None else group.missing
        if group is None or missing:
            message = NO_WORKER.format(" and no ".join(missing))
            raise self.error(Failure(503, "no_worker", message, None, True))
        return group

    def _known(self, model: str) -> Group | None:
        groups = self.fleet.groups()
        return self.fleet.group(only_model(groups) if groups and not model else model)

    async def available(self, model: str, caller: Caller | None = None) -> Group:
        """Find the workers of a model, as `group` does, but wait for those that it lacks.

        A query, which has been admitted before, has no `caller`.
        """
        try:
            return self.group(model)
        except ApiError as error:
            self._check_wait(error)
        by_s = math.inf if caller is None else min(caller.begin_by_s, caller.end_by_s)
        with self.holds.place(by_s, caller) as place:
            self.holds.learn(place, self._known(model))
            while await self.holds.wait(place):
                try:
                    return self.group(model)
                except ApiError as error:
                    self._check_wait(error)
                self.holds.learn(place, self._known(model))
            if caller is not None and (spent := caller.spent(self._clock(), has_begun=False)):
                raise self.error(spent)
            return self.group(model)

    def _check_wait(self, error: ApiError) -> None:
        """Raise a refusal unless it may be worth a wait."""
        if error.failure.code != "no_worker":
            raise error
        if self.draining:  # its own workers may be ending with it: others may have some
            raise ApiError(DRAINING, 1.0) from error

    @asynccontextmanager
    async def within(self, caller: Caller) -> AsyncIterator[None]:
        """Bound what a request asks before it goes round the ring; ApiError when its time is up."""
        by_s = min(caller.begin_by_s, caller.end_by_s)
        try:
            async with asyncio.timeout(None if by_s == math.inf else by_s - self._clock()):
                yield
        except TimeoutError:
            raise self.error(caller.spent(by_s, has_begun=False) or TIMED_OUT) from None

    def error(self, failure: Failure) -> ApiError:
        """Make the refusal of a failed request, which says when it is worth another try."""
        if not failure.retryable:
            return ApiError(failure)
        now_s = self._clock()
        if failure.code == "overloaded" and self.fleet.ready:
            return ApiError(failure, self.inflight.starts.wait_s(now_s))
        # Without workers: an outage that has lasted for so long may well last as long again.
        lacking_s = 0.0 if self.fleet.ready else now_s - self._lacking_since_s
        return ApiError(failure, retry_after(lacking_s))

    def admit(self, caller: Caller, request: GenerateRequest, group: Group) -> AdmissionTicket:
        """Check a request against the model and the limits; ApiError 400, 429 or 503."""
        request.check(group.card)
        client = caller.client
        self.admission.check_priority(client, request.priority)
        max_ttft_s = self._limits.max_ttft_s
        if max_ttft_s and not caller.has_begun and has_queue(group.workers["compute"]):
            waiting = waiting_choices(self.inflight.requests, request.priority)
            ahead = num_ahead(waiting, client.name)
            check_first_token(ahead, self.inflight.starts, max_ttft_s, self._clock())
        cost = request.cost_tokens(group.card.max_model_len)
        return self.admission.admit(client, cost, self._clock(), request.num_all_choices)

    def admit_query(self, client: Client, num_bytes: int) -> AdmissionTicket:
        """Check a query with a body of this size against the limits; ApiError 429 or 503."""
        return self.admission.admit(client, estimated_tokens(num_bytes), self._clock())

    def release(self, ticket: AdmissionTicket, used_tokens: int = 0) -> None:
        """Undo `admit`, and charge the tokens that the request took."""
        self.admission.release(ticket, self._clock(), used_tokens)

    def submit(
        self,
        request: GenerateRequest,
        group: Group,
        sink: Sink,
        caller: Caller = ANYBODY,
        traceparent: str = "",
    ) -> InflightRequest:
        """Send a client's request round the ring; its choices go to the sink until `close`.

        Each prompt of a batch is placed separately, so that a batch uses all replicas, but within
        one model revision, so that they answer alike.
        """
        inflight = self.inflight.open(
            sink, request.num_all_choices, group.card, self._clock(), caller
        )
        prompts = self._send_prompts(inflight, request, group, traceparent)
        try:
            next(prompts)
        except Exception:
            self.close(inflight)
            raise
        self._turns.begin(self._further(inflight, prompts))
        return inflight

    def _send_prompts(
        self, inflight: InflightRequest, request: GenerateRequest, group: Group, traceparent: str
    ) -> Iterator[None]:
        """Start the attempts of one prompt after the other: a thousand take 50 ms, in turns."""
        wall_s, count = time.time(), request.num_choices
        for number, prompt in enumerate(request.prompts):
            if not inflight.num_open:
                return  # it has ended meanwhile
            now_s, current = self._clock(), self.fleet.of_revision(group.card)
            group = group if current.missing else current
            num_tokens = expected_tokens(prompt, request.sampling.max_tokens)
            route, card = self.fleet.route(
                group, self._transport.address, now_s, num_tokens=num_tokens
            )
            message = Tokenize(
                attempt=self._attempt_id(0),
                route=route,
                prompt=prompt,
                sampling=request.seeded(),
                stream=request.stream,
                limits=request.token_limits(card),
                admitted_at_s=wall_s,
                output_ids=int32s(),
                num_choices=count,
                priority=request.priority,
                cache_salt=request.cache_salt,
                prompt_field=request.field_of(number),
                traceparent=traceparent,
                rules=request.rules,
                truncate_to=request.num_kept_tokens(card),
                truncate_side=request.truncate_side,
                pooling=request.pooling,
                client=inflight.caller.client.name,
                prediction=request.prediction,
            )
            inflight.messages.append(message)
            choices = inflight.choices[number * count : (number + 1) * count]
            if not current.missing:
                self._start(choices, route, card)
            else:  # nobody of a service is left, so they wait for one as if it had just died
                for choice in choices:
                    self.inflight.displace(choice, Setback(WORKER_LOST), now_s)
            yield

    def _further(self, inflight: InflightRequest, prompts: Iterator[None]) -> Iterator[None]:
        """Send the prompts after the first; one that cannot be sent fails the request."""
        try:
            yield from prompts
        except ApiError as error:
            self.abort(self.inflight.fail(inflight, error.failure))
        except Exception:
            self.abort(self.inflight.fail(inflight, FAILED))
            raise

    def _start(self, choices: Sequence[Choice], route: Route, card: ModelCard) -> None:
        """Begin an attempt at neighbouring choices of a prompt: fresh ones, or only one."""
        choice = choices[0]
        attempts = self.inflight.attempt(choices, route, self._clock())
        message = replace(
            choice.message,
            attempt=self._attempt_id(attempts[0].counter),
            route=route,
            limits=replace(
                choice.message.limits,
                max_model_len=card.max_model_len,
                max_input_length=card.max_input_length,
            ),
            output_ids=choice.token_ids[:],
            accepted_characters=choice.num_characters,
            num_choices=len(choices),
            first_choice=choice.index % choice.message.num_choices,
        )
        station, sent = first_stage(message)
        for attempt in attempts:
            attempt.past_tokenizer = station is route.compute
        try:
            self._transport.send(station, sent)
        except LinkError as error:
            raise unsendable(error, message.prompt_field) from error

    def tick(self, now_s: float) -> None:
        """Try again what waits for a worker, and end what has waited for too long."""
        if self.fleet.ready:
            self._lacking_since_s = now_s
        for request, failure in self.inflight.spent(now_s):
            self.abort(self.inflight.fail(request, failure))
        self.recovery.recover()
        self.queries.tick(now_s)
        self.holds.wake(float("inf") if self.draining else now_s)
        if now_s - self._signed_at_s >= KEEP_ALIVE_S:
            self._signed_at_s = now_s
            for request in {choice.request for choice in self.inflight.displaced}:
                request.sink.waiting()

    def arrived(self) -> None:
        """Go on with what has waited for a worker: one has come."""
        self.recovery.recover()
        self.holds.wake()

    def _retry(self, choices: Sequence[Choice], group: Group, now_s: float) -> Failure | None:
        """Begin another attempt; a failure ends the request."""
        setbacks = choices[0].setbacks
        kept = setbacks.kept_compute if choices[0].token_ids else ""
        reply, num_tokens = self._transport.address, choices[0].expected_tokens
        route, card = self.fleet.route(group, reply, now_s, kept, setbacks.avoided, num_tokens)
        try:
            self._start(choices, route, card)
        except ApiError as error:
            return error.failure
        choices[0].request.stats.num_retries += len(choices)
        return None

    def close(self, inflight: InflightRequest, reason: AbortReason = "client_gone") -> None:
        """Take a request off the ring, whatever its state."""
        self.abort(self.inflight.close(inflight, reason))

    def abort(self, aborted: Iterable[AbortedAttempt]) -> None:
        """Tell the stages that may work on these attempts to stop."""
        for attempt in aborted:
            route = attempt.route
            message = Abort(self._attempt_id(attempt.counter), attempt.reason)
            # Compute tells the detokenizer, which gets a message from here only if compute is gone.
            compute = self.fleet.worker(route.compute.instance_id)
            stages = [route.detokenizer if compute is None else route.compute]
            if not attempt.past_tokenizer:
                stages.append(route.tokenizer)
            for stage in stages:
                if self.fleet.worker(stage.instance_id) is not None:
                    self._transport.send(stage, message)

    def _attempt_id(self, counter: int) -> AttemptId:
        return AttemptId(self._transport.address.instance_id, counter)
