"""All attempts that a detokenizer has state for: rows of tokens in, rows of text out.

Synchronous and given the clock; the actor sends what comes out.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from opentelemetry.trace import Span

from common.errors import MalformedMessage
from common.link.codec import unpack
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import AbortReason
from common.messages.failure import Ending, Failure, Usage
from common.messages.generate import StreamHeader
from common.messages.text import TextGenerated
from common.messages.tokens import TokenRow, TokensGenerated
from common.telemetry import trace
from common.tombstones import Tombstones
from services.detokenizer.stream import AttemptStream, TextChunk, TextStream, parsed_stream
from services.detokenizer.vocabulary import TokenVocabulary

LOST = Failure(503, "tokens_lost", "Part of the answer was lost on its way.", retryable=True)


class AbortOrder(NamedTuple):
    """Compute should stop working on this attempt."""

    compute: Address
    attempt: AttemptId
    reason: AbortReason


@dataclass(slots=True)
class StepOutcome:
    """The text of one step by router (its instance), and the attempts to abort."""

    texts: defaultdict[str, TextGenerated] = field(
        default_factory=lambda: defaultdict(TextGenerated)
    )
    aborts: list[AbortOrder] = field(default_factory=list)


@dataclass(slots=True)
class _OpenStream:
    """One attempt's state; without a stream it has ended here and waits for compute's ending.

    `opened` says that the router has the prompt's counts, or gets them with the current row.
    """

    stream: AttemptStream | None
    compute: Address
    prompt_tokens: int
    cached_tokens: int
    opened: bool
    span: Span | None
    drafted: tuple[int, int] = (0, 0)  # accepted and rejected so far


class Streams:
    """The table of attempts, and what to do with each row that arrives."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes_of = vocabulary.decoding.token_bytes
        self._entries: dict[str, dict[int, _OpenStream]] = {}  # by router and counter
        self._replies: dict[str, Address] = {}  # by router
        self._tombstones = Tombstones()  # of what was dropped

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def reply_to(self, router: str) -> Address:
        return self._replies[router]

    def take(self, message: TokensGenerated, compute: Address, now_s: float) -> StepOutcome:
        """Handle the rows of a step from this compute."""
        outcome = StepOutcome()
        entries = self._entries
        for row in message.runs():
            entry = entries[row.router].get(row.counter) if row.router in entries else None
            if entry is None:
                entry = self._open(row, compute, now_s, outcome)
                if entry is None:
                    continue
            if row.drafted is not None:
                entry.drafted = row.drafted
            stream = entry.stream
            if stream is None:  # a stop string ended it: the rest is compute's last steps
                if row.ended is not None:
                    del entries[row.router][row.counter]
            elif row.first_index != stream.next_index:
                self._lose(row, entry, stream, now_s, outcome)
            elif row.ended is not None:
                self._finish(row, entry, stream, row.ended, outcome)
            else:
                chunk = stream.push(row.token_ids)
                self._write(row, stream, chunk, outcome)
                if chunk.stop is not None:
                    self._stop(row, entry, chunk, outcome)
        return outcome

    def drop(self, attempt: AttemptId, now_s: float) -> None:
        """Forget an attempt; rows of it that still come are dropped without an answer."""
        entry = self._entries.get(attempt.router, {}).pop(attempt.counter, None)
        if entry is not None:
            _end_span(entry, "aborted")
        self._tombstones.bury(attempt, now_s)

    def drop_router(self, router: str, now_s: float) -> list[AbortOrder]:
        """Forget every attempt of a router that is gone; compute need not go on with them."""
        orders = [
            AbortOrder(entry.compute, AttemptId(router, counter), "lost")
            for counter, entry in self._entries.get(router, {}).items()
        ]
        for order in orders:
            self.drop(order.attempt, now_s)
        self._entries.pop(router, None)
        self._replies.pop(router, None)
        return orders

    def move(self) -> dict[str, TextGenerated]:
        """End every stream here as moved, by router: another detokenizer may go on with it."""
        texts: defaultdict[str, TextGenerated] = defaultdict(TextGenerated)
        for router, entries in self._entries.items():
            for counter, entry in entries.items():
                if entry.stream is not None:
                    at = entry.stream.next_index
                    texts[router].add(counter, at, (), "")
                    usage = Usage(entry.prompt_tokens, entry.cached_tokens, at)
                    texts[router].end(Ending("moved", usage))
                    _end_span(entry, "moved", at)
        self._entries.clear()
        return texts

    def open_counters(self, router: str) -> list[int]:
        return list(self._entries.get(router, ()))

    def _open(
        self, row: TokenRow, compute: Address, now_s: float, outcome: StepOutcome
    ) -> _OpenStream | None:
        """Make the state of an attempt that is new here; None if it cannot have one."""
        attempt = AttemptId(row.router, row.counter)
        if self._tombstones.is_buried(attempt, now_s):
            return None
        opened = row.opened
        try:
            # Without a header the first message was lost, or the attempt was forgotten.
            header = unpack(StreamHeader, row.header)
            stream = self._stream(header, row.counter)
        except MalformedMessage:
            self.drop(attempt, now_s)
            outcome.aborts.append(AbortOrder(compute, attempt, "lost"))
            return None
        counts = opened or (row.ended and row.ended.usage)
        prompt = (counts.prompt_tokens, counts.cached_tokens) if counts else (0, 0)
        span = None if opened is None else _start_span(attempt, header.traceparent)
        entry = _OpenStream(stream, compute, *prompt, opened is not None, span)
        self._replies[row.router] = header.reply
        self._entries.setdefault(row.router, {})[row.counter] = entry
        return entry

    def _stream(self, header: StreamHeader, counter: int) -> AttemptStream:
        """Make the stream that this header asks for."""
        if len(header.prompt_ids) % int32s().itemsize:
            raise MalformedMessage("prompt_ids of a stream header are no 32-bit integers")
        parsed = parsed_stream(header, counter - header.first_counter, self._vocabulary)
        return parsed or TextStream(header, self._vocabulary.decoding)

    def _stop(
        self, row: TokenRow, entry: _OpenStream, chunk: TextChunk, outcome: StepOutcome
    ) -> None:
        """End an attempt with a stop string, here and at compute."""
        entry.stream = None
        num_tokens = row.first_index + chunk.num_ids
        usage = Usage(entry.prompt_tokens, entry.cached_tokens, num_tokens, *entry.drafted)
        self._end(row, entry, _stopped(chunk, usage), outcome)
        attempt = AttemptId(row.router, row.counter)
        outcome.aborts.append(AbortOrder(entry.compute, attempt, "stop_string"))

    def _finish(
        self,
        row: TokenRow,
        entry: _OpenStream,
        stream: AttemptStream,
        ending: Ending,
        outcome: StepOutcome,
    ) -> None:
        """End an attempt as compute does, or with a stop string in its last tokens."""
        del self._entries[row.router][row.counter]
        usage = ending.usage
        chunk = stream.finish(row.token_ids, ending.reason)
        text = self._write(row, stream, chunk, outcome)
        if not entry.opened and ending.reason != "refused":  # its only row
            prompt_ids = array("i", stream.header.prompt_ids)
            text.open(usage.prompt_tokens, usage.cached_tokens, prompt_ids)
        if chunk.stop is not None:
            usage = replace(usage, completion_tokens=row.first_index + chunk.num_ids)
            ending = _stopped(chunk, usage)
        elif chunk.num_calls or chunk.reasoning_tokens:
            ending = replace(
                ending, num_calls=chunk.num_calls, reasoning_tokens=chunk.reasoning_tokens
            )
        self._end(row, entry, ending, outcome)

    def _lose(
        self,
        row: TokenRow,
        entry: _OpenStream,
        stream: AttemptStream,
        now_s: float,
        outcome: StepOutcome,
    ) -> None:
        """Tokens before this row are lost: end the attempt at the router and at compute."""
        attempt = AttemptId(row.router, row.counter)
        usage = Usage(entry.prompt_tokens, entry.cached_tokens, stream.next_index)
        outcome.texts[row.router].add(row.counter, stream.next_index, (), "")
        self._end(row, entry, Ending("failed", usage, failure=LOST), outcome)
        self.drop(attempt, now_s)
        if row.ended is None:
            outcome.aborts.append(AbortOrder(entry.compute, attempt, "lost"))

    def _write(
        self, row: TokenRow, stream: AttemptStream, chunk: TextChunk, outcome: StepOutcome
    ) -> TextGenerated:
        """Add a row's text to that of its router."""
        text = outcome.texts[row.router]
        ids = row.token_ids
        if chunk.num_ids < len(ids):
            ids = ids[: chunk.num_ids]
        logprobs = row.logprobs
        if logprobs is not None:
            if len(ids) < len(logprobs):
                (logprobs,) = logprobs.split((len(ids),))
            logprobs.name(self._bytes_of)
        text.add(row.counter, row.first_index, ids, chunk.text, logprobs, chunk.parts)
        if (opened := row.opened) is not None:
            prompt_ids = array("i", stream.header.prompt_ids)
            text.open(opened.prompt_tokens, opened.cached_tokens, prompt_ids, opened.queued_s)
        for scores in row.scored:
            scores.logprobs.name(self._bytes_of)
            text.score(scores.first, scores.logprobs)
        return text

    def _end(self, row: TokenRow, entry: _OpenStream, ending: Ending, outcome: StepOutcome) -> None:
        outcome.texts[row.router].end(ending)
        _end_span(entry, ending.reason, ending.usage.completion_tokens)


def _stopped(chunk: TextChunk, usage: Usage) -> Ending:
    return Ending(
        "stop",
        usage,
        chunk.stop,
        num_calls=chunk.num_calls,
        reasoning_tokens=chunk.reasoning_tokens,
    )


def _start_span(attempt: AttemptId, traceparent: str) -> Span | None:
    """Start a stream's span as a child of the request's; none for one that is not traced."""
    if not traceparent:
        return None
    span = trace.tracer().start_span("detokenize", trace.context_from(traceparent))
    if not span.is_recording():
        return None
    span.set_attribute(trace.ATTEMPT, f"{attempt.router}:{attempt.counter}")
    span.set_attribute(trace.STAGE, "detokenizer")
    return span


def _end_span(entry: _OpenStream, reason: str, num_tokens: int = 0) -> None:
    span, entry.span = entry.span, None
    if span is not None:
        span.set_attribute(trace.RESPONSE_FINISH_REASONS, [reason])
        span.set_attribute(trace.USAGE_OUTPUT_TOKENS, num_tokens)
        span.end()
