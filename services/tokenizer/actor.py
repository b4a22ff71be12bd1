"""The tokenizer's actor: prompts in, ids out to compute; refusals and answers back to routers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from opentelemetry.trace import Span, Status, StatusCode

from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, Load, ModelCard, RouterAlive
from common.messages.failure import Failure
from common.messages.queries import Inspection, InspectionQuery, TimelineQuery
from common.messages.sampling import SamplingParams
from common.messages.text import AttemptRefused, Tokenized
from common.messages.tokenize import (
    IdsPrompt,
    OutputRules,
    Tokenize,
    TokenizeQuery,
    TokenizerInbox,
)
from common.registration import Registration, Worker, WorkerState
from common.telemetry import log, trace
from common.telemetry.span_ring import SpanRing, timeline_part
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import Job, Outcome, size_of
from services.tokenizer.limits import (
    check_ids,
    check_prompt_len,
    check_rules,
    resolve_max_tokens,
    truncated,
)
from services.tokenizer.pool import Pool
from services.tokenizer.work_table import Work, WorkTable, generate_messages

_STALL_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """The actor's clocks: Unix seconds for prompts, monotonic seconds for leases."""

    unix_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic


class TokenizerActor(Worker):
    """One tokenizer: a table of open requests, a pool that works on them, leases of the routers."""

    def __init__(
        self,
        settings: TokenizerSettings,
        card: ModelCard,
        pool: Pool,
        registration: Registration,
        clocks: Clocks | None = None,
        about: bytes = b"{}",
    ) -> None:
        """`about` is a JSON object that describes the tokenizer to operators."""
        super().__init__(registration)
        self._settings = settings
        self._card = card
        self._pool = pool
        self._about = about
        self._clocks = clocks or Clocks()
        self._work = WorkTable(settings.max_pending_requests, settings.max_pending_bytes)
        self._spans: dict[Work, Span] = {}
        self._encoded = SpanRing("prompts", "tokenize", "tokens")
        self._transport: Transport | None = None

    @property
    def idle(self) -> bool:
        return not self._work

    @property
    def num_open(self) -> int:
        return len(self._work)

    async def start(self, transport: Transport) -> None:
        """Start the pool; ModelError when the model folder cannot be used."""
        self._transport = transport
        await self._pool.start()
        self._registration.start(transport, self._card)

    async def stop(self) -> None:
        """Refuse the open requests, so that routers place them elsewhere, and end the pool."""
        failure = Failure(
            status=503,
            code="draining",
            message="the tokenizer shut down before it came to this prompt",
            retryable=True,
        )
        for work in list(self._spans):
            self._work.close(work)
            self._fail(work, failure)
        self._pool.stop()

    def receive(self, message: TokenizerInbox, sender: Address) -> None:
        """Handle one message; any message renews its sender's lease."""
        now_s = self._clocks.monotonic_s()
        self._registration.heard(sender, now_s)
        match message:
            case Tokenize() | TokenizeQuery():
                self._take(message, now_s)
            case Abort(attempt=attempt):
                work = self._work.abort(attempt, now_s)
                if work is not None:
                    self._drop(work)
            case RouterAlive():
                self._registration.answered(message, now_s)
            case TimelineQuery():
                self._show_timeline(message, now_s)
            case InspectionQuery():
                self._links.send(message.reply, Inspection(message.query, self._about))

    def peer_lost(self, peer: Address) -> None:
        """End the requests of a router that does not accept messages.

        The router itself notices a lost compute: this tokenizer keeps no state for it.
        """
        self._registration.lost(peer)
        self.drop_router(peer.instance_id, self._clocks.monotonic_s())

    def tick(self, now_s: float) -> None:
        """Watch the pool, end the requests of routers whose lease has expired, send heartbeats."""
        self._pool.tick()
        self._work.expire(now_s)
        self.beat(now_s)

    def _take(self, message: Tokenize | TokenizeQuery, now_s: float) -> None:
        size = size_of(message.prompt)
        work = Work(message, size, began_s=now_s)
        parent = trace.context_from(message.traceparent)
        span = trace.tracer().start_span("tokenize", parent, attributes=_attributes(work))
        self._spans[work] = span
        failure = self._refusal(message, size)
        if failure is not None:
            self._fail(work, failure)
            return
        if not self._work.open(work, now_s):
            self._drop(work)
            return
        self._registration.expect(work.first.router, now_s)
        # A retry renders the date of its admission, so that it continues the same prompt.
        if isinstance(message, Tokenize):
            job = Job(message.prompt, message.admitted_at_s, rules=message.rules)
        else:
            job = Job(message.prompt, self._clocks.unix_s(), message.return_token_strs)
        if isinstance(job.prompt, IdsPrompt) and not job.want_strs and job.rules == OutputRules():
            self._done(work, Outcome(job.prompt.ids))
            return
        try:
            work.job = self._pool.submit(
                job, lambda outcome: self._done(work, outcome), work.first, message.traceparent
            )
        except UnicodeEncodeError as error:
            self._work.close(work)
            self._fail(work, _not_unicode(error))

    def _refusal(self, message: Tokenize | TokenizeQuery, size: int) -> Failure | None:
        if self._registration.draining:
            return Failure(
                status=503,
                code="draining",
                message="the tokenizer is shutting down",
                retryable=True,
            )
        if size > self._settings.max_prompt_bytes:
            return Failure(
                status=413,
                code="prompt_too_large",
                message=f"{message.prompt_field} is {size} bytes; "
                f"at most {self._settings.max_prompt_bytes} are accepted",
                field=message.prompt_field,
            )
        if isinstance(message, Tokenize):
            vocab_size = message.limits.vocab_size
            failure = check_rules(message.rules, vocab_size, self._settings.max_structure_bytes)
            if failure is not None:
                return failure
        return self._work.refusal(size)

    def _done(self, work: Work, outcome: Outcome) -> None:
        self._work.close(work)
        self._encoded.note(work.began_s, self._clocks.monotonic_s(), len(outcome.ids))
        message = work.message
        failure = outcome.failure
        if failure is None:
            vocab_size = self._card.vocab_size
            if isinstance(message, Tokenize):
                vocab_size = message.limits.vocab_size
                ids = truncated(outcome.ids, message.truncate_to, message.truncate_side)
                outcome = replace(outcome, ids=ids)
            failure = check_ids(outcome.ids, vocab_size, message.prompt_field)
        if failure is not None:
            self._fail(work, failure)
        elif isinstance(message, Tokenize):
            self._forward(work, message, outcome)
        else:
            self._end_span(work, len(outcome.ids))
            self._send(work, message.reply, Tokenized(message.query, outcome.ids, outcome.strs))

    def _forward(self, work: Work, message: Tokenize, outcome: Outcome) -> None:
        about = (message.limits, len(outcome.ids), message.prompt_field)
        sampling: SamplingParams | Failure
        if message.pooling:
            sampling = check_prompt_len(*about) or message.sampling
        else:
            sampling = resolve_max_tokens(message.sampling, *about)
        if isinstance(sampling, Failure):
            self._fail(work, sampling)
            return
        traceparent = trace.traceparent_of(self._spans[work]) or message.traceparent
        try:
            for generate in generate_messages(work, message, outcome, sampling, traceparent):
                self._links.send(message.route.compute, generate)
                first = generate.attempt.counter
                work.aborted.update(range(first, first + generate.num_choices))  # not ours now
        except LinkError as error:
            self._fail(work, _too_large(str(error)))
            return
        self._end_span(work, len(outcome.ids))

    def _fail(self, work: Work, failure: Failure) -> None:
        message = work.message
        if failure.field is None and failure.status < 500:
            failure = Failure(failure.status, failure.code, failure.message, message.prompt_field)
        span = self._spans.pop(work)
        span.set_attribute(trace.ERROR_TYPE, failure.code)
        span.set_status(Status(StatusCode.ERROR, failure.message))
        span.end()
        if isinstance(message, TokenizeQuery):
            self._send(work, message.reply, Tokenized(message.query, int32s(), failure=failure))
            return
        for offset, num_choices in work.live_runs():
            first = AttemptId(work.first.router, work.first.counter + offset)
            self._send(work, message.route.reply, AttemptRefused(first, num_choices, failure))

    def _drop(self, work: Work) -> None:
        """Forget a request whose answer is no longer wanted."""
        if work.job:
            self._pool.cancel(work.job)
        self._spans.pop(work).end()

    def drop_router(self, router: str, now_s: float) -> None:
        for work in self._work.lose_router(router):
            self._drop(work)

    def _end_span(self, work: Work, num_tokens: int) -> None:
        span = self._spans.pop(work)
        span.set_attribute(trace.USAGE_INPUT_TOKENS, num_tokens)
        span.end()

    def state(self, now_s: float) -> WorkerState:
        settings = self._settings
        num_running = self._pool.num_running
        return WorkerState(
            load=Load(
                num_running=num_running,
                num_waiting=max(0, len(self._work) - num_running),
                capacity=settings.max_pending_requests,
            ),
            progress=self._pool.num_finished,
            stall_after_s=settings.template_timeout_s + settings.encode_timeout_s + _STALL_MARGIN_S,
            open_counters=self._work.open_counters,
        )

    def _show_timeline(self, query: TimelineQuery, now_s: float) -> None:
        track = self._encoded.track(now_s - query.seconds)
        self._links.send(query.reply, timeline_part(query, self._clocks.monotonic_s, (track,)))

    def _send(self, work: Work, to: Address, message: object) -> None:
        try:
            self._links.send(to, message)
        except LinkError as error:
            log.for_attempts((work.first,), (work.message.traceparent,)).error(
                "message not sent", tag=getattr(message, "TAG", ""), error=str(error)
            )

    @property
    def _links(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the actor has not been started")
        return self._transport


def _attributes(work: Work) -> dict[str, str]:
    first = work.first
    return {trace.ATTEMPT: f"{first.router}:{first.counter}", trace.STAGE: "tokenizer"}


def _too_large(why: str) -> Failure:
    return Failure(
        status=413,
        code="prompt_too_large",
        message=f"the tokenized prompt cannot be sent on: {why}",
    )


def _not_unicode(error: UnicodeEncodeError) -> Failure:
    return Failure(
        status=400,
        code="invalid_unicode",
        message=f"the prompt is not valid Unicode: half of a surrogate pair at {error.start}",
    )
