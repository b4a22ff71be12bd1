"""The tokenizer's actor: prompts in, ids out to compute; refusals and answers back to routers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from opentelemetry.trace import Status, StatusCode

from common.busy_share import BusyShare
from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, Load, ModelCard, RouterAlive, Signals
from common.messages.failure import Failure
from common.messages.queries import Inspection, InspectionQuery, TimelineQuery
from common.messages.sampling import SamplingParams
from common.messages.text import AttemptRefused, Tokenized
from common.messages.tokenize import (
    IdsPrompt,
    OutputRules,
    TextPrompt,
    Tokenize,
    TokenizeQuery,
    TokenizerInbox,
)
from common.registration import Registration, Worker, WorkerState
from common.telemetry import log, trace
from common.telemetry.span_ring import SpanRing, timeline_part
from common.tokenized import generate_messages
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import Job, Outcome, TextBound
from services.tokenizer.pool import Pool
from services.tokenizer.requests import (
    PendingRequest,
    RequestTable,
    check_ids,
    check_prompt_len,
    check_rules,
    predicted_text,
    resolve_max_tokens,
    size_of_request,
    text_bound,
    truncated,
)

_STALL_MARGIN_S = 5.0


class TokenizerActor(Worker):
    """One tokenizer: a table of open requests, a pool that works on them, leases of the routers."""

    def __init__(
        self,
        settings: TokenizerSettings,
        card: ModelCard,
        pool: Pool,
        registration: Registration,
        clock: Callable[[], float] = time.monotonic,
        about: bytes = b"{}",
    ) -> None:
        """`about` is a JSON object that describes the tokenizer to operators.

        Where a query does not say how long its text may be, the length in the model's folder bounds
        it.
        """
        super().__init__(registration, clock)
        self._settings = settings
        self._card = card
        self._pool = pool
        self._about = about
        self._query_bound = TextBound(card.max_model_len, settings.max_chars_per_token)
        self._requests = RequestTable(settings.max_pending_requests, settings.max_pending_bytes)
        self._encoded = SpanRing("prompts", "tokenize", "tokens")
        self._pool_share = BusyShare(lambda: pool.busy_s)
        self._loop_share = BusyShare(time.thread_time)

    @property
    def idle(self) -> bool:
        return not self._requests

    async def start(self, transport: Transport) -> None:
        """Start the pool; ModelError when the model folder cannot be used."""
        self._transport = transport
        await self._pool.start()
        # Lengths are 0 in a card of a worker that does not decide them.
        self._registration.start(transport, replace(self._card, max_model_len=0))

    async def stop(self) -> None:
        """Refuse the open requests, so that routers place them elsewhere, and end the pool."""
        message = "the tokenizer shut down before it came to this prompt"
        failure = Failure(503, "draining", message, retryable=True)
        for request in self._requests.lose():
            self._fail(request, failure)
        self._pool.stop()

    def receive(self, message: TokenizerInbox, sender: Address) -> None:
        """Handle one message; any message renews its sender's lease."""
        now_s = self._clock()
        self._registration.heard(sender, now_s)
        match message:
            case Tokenize() | TokenizeQuery():
                self._take(message, now_s)
            case Abort(attempt=attempt):
                request = self._requests.abort(attempt, now_s)
                if request is not None:
                    self._drop(request)
            case RouterAlive():
                self._registration.answered(message, now_s)
            case TimelineQuery():
                track = self._encoded.track(now_s - message.seconds)
                part = timeline_part(message, self._clock, (track,))
                self._transport.send(message.reply, part)
            case InspectionQuery():
                self._transport.send(message.reply, Inspection(message.query, self._about))

    def tick(self, now_s: float) -> None:
        self._pool.tick()
        super().tick(now_s)

    def _take(self, message: Tokenize | TokenizeQuery, now_s: float) -> None:
        size = size_of_request(message)
        request = PendingRequest(message, size, began_s=now_s)
        first = request.first
        request.span = trace.tracer().start_span(
            "tokenize",
            trace.context_from(message.traceparent),
            attributes={trace.ATTEMPT: f"{first.router}:{first.counter}", trace.STAGE: "tokenizer"},
        )
        bound = self._query_bound
        if isinstance(message, Tokenize):
            bound = text_bound(message, self._settings.max_chars_per_token)
        elif message.limits is not None:
            bound = replace(bound, max_tokens=message.limits.max_model_len)
        failure = self._refusal(message, size, bound)
        if failure is not None:
            self._fail(request, failure)
            return
        if not self._requests.open(request, now_s):
            self._drop(request)
            return
        self._registration.expect(first.router, now_s)
        # A retry renders the date of its admission, so that it continues the same prompt.
        prompt = message.prompt
        if isinstance(prompt, TextPrompt):
            prompt = replace(prompt, text=bound.cut(prompt.text))
        if isinstance(message, Tokenize):
            predicted = predicted_text(message, self._settings.max_chars_per_token)
            job = Job(prompt, message.admitted_at_s, False, message.rules, bound, predicted)
        else:
            job = Job(prompt, time.time(), message.return_token_strs, bound=bound)
        done = partial(self._done, request)
        if isinstance(job.prompt, IdsPrompt) and not job.want_strs and job.rules == OutputRules():
            done(Outcome(job.prompt.ids))
        else:
            request.job = self._pool.submit(job, done, first, message.traceparent)

    def _refusal(
        self, message: Tokenize | TokenizeQuery, size: int, bound: TextBound
    ) -> Failure | None:
        if size > self._settings.max_prompt_bytes:
            field, most = message.prompt_field, self._settings.max_prompt_bytes
            predicts = isinstance(message, Tokenize) and message.prediction
            what = f"{field} and prediction are" if predicts else f"{field} is"
            too_large = f"{what} {size} bytes; at most {most} are accepted"
            return Failure(413, "prompt_too_large", too_large, field)
        failure = None
        if isinstance(message.prompt, TextPrompt):
            failure = bound.refusal(message.prompt.text)
        if isinstance(message, Tokenize):
            failure = failure or check_rules(message.rules, self._settings.max_structure_bytes)
        return failure or self._requests.refusal(size)

    def _done(self, request: PendingRequest, outcome: Outcome) -> None:
        self._requests.close(request)
        self._encoded.note(request.began_s, self._clock(), len(outcome.ids))
        message = request.message
        failure = outcome.failure
        if failure is None:
            limits = message.limits
            vocab_size = self._card.vocab_size if limits is None else limits.vocab_size
            if isinstance(message, Tokenize):
                ids = truncated(outcome.ids, message.truncate_to, message.truncate_side)
                outcome = replace(outcome, ids=ids)
            failure = check_ids(outcome.ids, vocab_size, message.prompt_field)
            if predicted := array("i", outcome.answer.prediction_ids):
                failure = failure or check_ids(predicted, vocab_size, "prediction")
        if failure is not None:
            self._fail(request, failure)
        elif isinstance(message, Tokenize):
            self._forward(request, message, outcome)
        else:
            self._end_span(request, len(outcome.ids))
            self._send(request, message.reply, Tokenized(message.query, outcome.ids, outcome.strs))

    def _forward(self, request: PendingRequest, message: Tokenize, outcome: Outcome) -> None:
        about = (message.limits, len(outcome.ids), message.prompt_field)
        sampling: SamplingParams | Failure
        if message.pooling:
            sampling = check_prompt_len(*about) or message.sampling
        else:
            sampling = resolve_max_tokens(message.sampling, *about)
        if isinstance(sampling, Failure):
            self._fail(request, sampling)
            return
        traceparent = trace.traceparent_of(request.span) or message.traceparent
        try:
            runs = request.live_runs()
            made = generate_messages(
                message, outcome.ids, outcome.answer, sampling, runs, traceparent
            )
            for generate in made:
                self._transport.send(message.route.compute, generate)
                first = generate.attempt.counter
                request.aborted.update(range(first, first + generate.num_choices))  # not ours now
        except LinkError as error:
            too_large = f"the tokenized prompt cannot be sent on: {error}"
            self._fail(request, Failure(413, "prompt_too_large", too_large))
            return
        self._end_span(request, len(outcome.ids))

    def _fail(self, request: PendingRequest, failure: Failure) -> None:
        message = request.message
        if failure.field is None and failure.status < 500:
            failure = replace(failure, field=message.prompt_field)
        request.span.set_attribute(trace.ERROR_TYPE, failure.code)
        request.span.set_status(Status(StatusCode.ERROR, failure.message))
        request.span.end()
        if isinstance(message, TokenizeQuery):
            self._send(request, message.reply, Tokenized(message.query, int32s(), failure=failure))
            return
        for offset, num_choices in request.live_runs():
            first = AttemptId(request.first.router, request.first.counter + offset)
            self._send(request, message.route.reply, AttemptRefused(first, num_choices, failure))

    def _drop(self, request: PendingRequest) -> None:
        """Forget a request whose answer is no longer wanted."""
        if request.job:
            self._pool.cancel(request.job)
        request.span.end()

    def drop_router(self, router: str, now_s: float) -> None:
        for request in self._requests.lose(router):
            self._drop(request)

    def _end_span(self, request: PendingRequest, num_tokens: int) -> None:
        request.span.set_attribute(trace.USAGE_INPUT_TOKENS, num_tokens)
        request.span.end()

    def state(self, now_s: float) -> WorkerState:
        settings, num_running = self._settings, self._pool.num_running
        num_waiting = max(0, len(self._requests) - num_running)
        utilization = max(self._pool_share.at(now_s), self._loop_share.at(now_s))
        num_routers = self._registration.num_routers
        signals = Signals(utilization, self._pool.queue_age_s, num_routers=num_routers)
        return WorkerState(
            load=Load(num_running, num_waiting, settings.max_pending_requests, signals=signals),
            progress=self._pool.num_finished,
            stall_after_s=settings.template_timeout_s + settings.encode_timeout_s + _STALL_MARGIN_S,
            open_counters=self._requests.open_counters,
        )

    def _send(self, request: PendingRequest, to: Address, message: object) -> None:
        try:
            self._transport.send(to, message)
        except LinkError as error:
            log.for_attempts((request.first,), (request.message.traceparent,)).error(
                "message not sent", tag=getattr(message, "TAG", ""), error=str(error)
            )
