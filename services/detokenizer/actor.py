"""The detokenizer's actor: tokens in from compute, text out to the routers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort, Load, ModelCard, RouterAlive
from common.messages.failure import Failure
from common.messages.text import Detokenized, TextEnded, TextGenerated
from common.messages.text_rows import TextRows
from common.messages.timeline import TimelineQuery
from common.messages.token_rows import rows
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from common.model_folder import describe
from common.registration import Registration, WorkerState
from common.telemetry import log
from common.telemetry.span_ring import SpanRing, timeline_part
from services.detokenizer.config import DetokenizerSettings
from services.detokenizer.spans import StreamSpans
from services.detokenizer.streams import AbortOrder, Outcome, Streams, TextEnd, TextNews
from services.detokenizer.vocabulary import Vocabulary

CAPACITY = 1 << 16  # streams; compute's limits bound them long before


class DetokenizerActor:
    """One detokenizer: the streams it has state for, and its place in the fleet."""

    def __init__(
        self,
        settings: DetokenizerSettings,
        folder: Path,
        card: ModelCard,
        registration: Registration,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._card = card
        self._registration = registration
        self._clock = clock
        self._spans = StreamSpans()
        self._steps = SpanRing("text", "detokenize", "rows")
        self._draining = False
        self._progress = 0

    async def start(self, transport: Transport) -> None:
        """Load the vocabulary; ModelError when the model folder cannot be used."""
        self._vocabulary = Vocabulary.load(self._folder)
        self._streams = Streams(self._vocabulary)
        self._transport = transport
        self._registration.start(transport, self._card)

    def receive(self, message: DetokenizerInbox, sender: Address) -> None:
        """Handle one message; any mail of a router renews its lease."""
        now_s = self._clock()
        self._registration.heard(sender, now_s)
        match message:
            case TokensGenerated():
                self._take_step(message, sender, now_s)
            case DetokenizeQuery():
                self._answer(message)
            case Abort(attempt=attempt):
                self._streams.drop(attempt, now_s)
                self._spans.end(attempt, "aborted")
            case RouterAlive():
                self._registration.answered(message, now_s)
            case TimelineQuery():
                track = self._steps.track(now_s - message.seconds)
                self._send(message.reply, timeline_part(message, self._clock, (track,)))

    def peer_lost(self, peer: Address) -> None:
        """A router that takes no mail loses its streams; a compute's end with its terminals."""
        self._registration.lost(peer)
        self._drop_router(peer.instance_id, self._clock())

    def tick(self, now_s: float) -> None:
        """Beat, and end the streams of routers whose lease ran out."""
        self._streams.expire(now_s)
        state = WorkerState(
            load=Load(len(self._streams), 0, CAPACITY),
            progress=self._progress,
            stall_after_s=0.0,  # silence is no sign of trouble here: tokens come when they come
            draining=self._draining,
            open_counters=self._streams.open_counters,
        )
        for router in self._registration.tick(now_s, state):
            self._drop_router(router, now_s)

    def drain(self) -> None:
        """Routers learn of it from the next heartbeat and place no more requests here."""
        self._draining = True
        self._registration.drain()

    @property
    def drained(self) -> bool:
        """Whether every stream has ended, and no router has one on its way here."""
        return len(self._streams) == 0 and self._registration.released

    @property
    def ready(self) -> bool:
        """Whether a router knows of this detokenizer."""
        return self._registration.registered

    @property
    def num_open(self) -> int:
        """Streams with state here."""
        return len(self._streams)

    async def stop(self) -> None:
        """Nothing of a stream is worth keeping: the routers have the journal."""

    def _take_step(self, message: TokensGenerated, compute: Address, now_s: float) -> None:
        """Turn one engine step's rows into one message for each router."""
        self._progress += 1
        mails: dict[Address, TextRows] = {}
        for row in rows(message):
            if row.header is not None:
                self._registration.expect(row.attempt.router, now_s)
                self._spans.begin(row.attempt, row.header)
            for outcome in self._streams.take(row, compute, now_s):
                self._note(outcome, mails)
        for reply, builder in mails.items():
            self._send(reply, builder.build())
        self._steps.note(now_s, self._clock(), len(message.counters))

    def _note(self, outcome: Outcome, mails: dict[Address, TextRows]) -> None:
        match outcome:
            case TextNews(reply=reply, attempt=attempt, end=end):
                builder = mails.setdefault(reply, TextRows())
                builder.add(
                    attempt.counter,
                    outcome.first_index,
                    outcome.token_ids,
                    outcome.text,
                    outcome.logprobs,
                    outcome.parts,
                )
                if (opened := outcome.opened) is not None:
                    builder.open(opened.prompt_tokens, opened.cached_tokens, opened.prompt_ids)
                for scored in outcome.scored:
                    builder.score(scored.first, scored.tokens)
                if end is not None:
                    builder.end_as(_ended(end))
                    self._spans.end(attempt, end.reason, end.usage.completion_tokens)
            case AbortOrder(compute=compute, attempt=attempt, reason=reason):
                self._send(compute, Abort(attempt, reason))

    def _answer(self, query: DetokenizeQuery) -> None:
        if len(query.ids) > self._settings.max_query_ids:
            limit = self._settings.max_query_ids
            message = f"tokens has {len(query.ids)} ids; at most {limit} are accepted"
            failure = Failure(413, "too_many_tokens", message, "tokens")
            self._send(query.reply, Detokenized(query.query, "", failure))
            return
        wrong = next((i for i in query.ids if not 0 <= i < self._card.vocab_size), None)
        if wrong is not None:
            message = f"tokens contains {wrong}; ids are 0 to {self._card.vocab_size - 1}"
            failure = Failure(400, "invalid_token_id", message, "tokens")
            self._send(query.reply, Detokenized(query.query, "", failure))
            return
        if query.goes_on:
            decoder = self._vocabulary.decoding.stream(query.skip_special_tokens)
            text = decoder.follow(query.ids)
        else:
            text = self._vocabulary.decode(list(query.ids), query.skip_special_tokens)
        self._send(query.reply, Detokenized(query.query, text))

    def _drop_router(self, router: str, now_s: float) -> None:
        for outcome in self._streams.drop_router(router, now_s):
            if isinstance(outcome, AbortOrder):
                self._spans.end(outcome.attempt, "aborted")
            self._note(outcome, {})

    def _send(self, to: Address, message: object) -> None:
        try:
            self._transport.send(to, message)
        except LinkError as error:
            log.for_attempts(_attempts(message, to)).error(
                "mail not sent", tag=getattr(message, "TAG", ""), error=str(error)
            )


def _attempts(message: object, to: Address) -> list[AttemptId]:
    """Return what a message is about; text is for the router whose attempts its rows are."""
    match message:
        case TextGenerated(counters=counters):
            return [AttemptId(to.instance_id, counter) for counter in counters]
        case Detokenized(query=query):
            return [query]
        case Abort(attempt=attempt):
            return [attempt]
    return []


def _ended(end: TextEnd) -> TextEnded:
    """Put a terminal into the message's words; its row is filled in by the builder."""
    return TextEnded(
        0,
        end.reason,
        end.usage,
        end.stop,
        end.failure,
        end.num_calls,
        end.reasoning_tokens,
        end.embedding,
    )


def load_card(folder: Path, served_names: Sequence[str]) -> ModelCard:
    """Describe the model folder; the detokenizer decides no lengths, so it names none."""
    return replace(describe(folder, served_names), max_model_len=0)
