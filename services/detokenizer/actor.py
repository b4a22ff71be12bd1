"""The detokenizer's actor: tokens in from compute, text out to the routers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from common.busy_share import BusyShare
from common.errors import LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort, Load, ModelCard, RouterAlive, Signals
from common.messages.failure import Failure
from common.messages.queries import TimelineQuery
from common.messages.text import Detokenized, TextGenerated
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from common.registration import Registration, Worker, WorkerState
from common.telemetry import log
from common.telemetry.span_ring import SpanRing, timeline_part
from common.tokenizer_folder import describe_worker
from common.turns import Turns
from services.detokenizer.config import DetokenizerSettings
from services.detokenizer.streams import AbortOrder, Streams
from services.detokenizer.vocabulary import TokenVocabulary

CAPACITY = 1 << 16  # streams; compute's limits bound them long before
MAX_PIECE = 512  # ids of a query that are decoded in one go: 0.2 ms, or 3 by `WindowDecoding`


class DetokenizerActor(Worker):
    """One detokenizer: the streams it has state for, and its place in the fleet."""

    def __init__(
        self,
        settings: DetokenizerSettings,
        folder: Path,
        card: ModelCard,
        registration: Registration,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(registration, clock)
        self._settings = settings
        self._folder = folder
        self._card = card
        self._steps = SpanRing("text", "detokenize", "rows")
        self._turns = Turns(clock)
        self._loop_share = BusyShare(time.thread_time)
        self._progress = 0
        self._has_started = False

    async def start(self, transport: Transport) -> None:
        """Load the vocabulary; ModelError when the model folder cannot be used."""
        self._vocabulary = TokenVocabulary.load(self._folder)
        self._streams = Streams(self._vocabulary)
        self._transport = transport
        self._registration.start(transport, self._card)
        self._has_started = True

    def receive(self, message: DetokenizerInbox, sender: Address) -> None:
        """Handle one message; any message of a router renews its lease."""
        now_s = self._clock()
        self._registration.heard(sender, now_s)
        match message:
            case TokensGenerated():
                self._take_step(message, sender, now_s)
            case DetokenizeQuery():
                self._answer(message)
            case Abort(attempt=attempt):
                self._streams.drop(attempt, now_s)
            case RouterAlive():
                self._registration.answered(message, now_s)
            case TimelineQuery():
                track = self._steps.track(now_s - message.seconds)
                self._send(message.reply, timeline_part(message, self._clock, (track,)))

    def state(self, now_s: float) -> WorkerState:
        num_routers = self._registration.num_routers
        signals = Signals(self._loop_share.at(now_s), num_routers=num_routers)
        return WorkerState(
            load=Load(len(self._streams), 0, CAPACITY, signals=signals),
            progress=self._progress,
            stall_after_s=0.0,  # silence is no sign of trouble here: tokens may pause for any time
            open_counters=self._streams.open_counters,
        )

    @property
    def idle(self) -> bool:
        return not (len(self._streams) or len(self._turns))

    async def stop(self) -> None:
        """Tell the routers to send on what still runs; they have the journal."""
        if not self._has_started:
            return
        for router, text in self._streams.move().items():
            self._send(self._streams.reply_to(router), text)

    def _take_step(self, message: TokensGenerated, compute: Address, now_s: float) -> None:
        """Turn one engine step's rows into one message for each router."""
        self._progress += 1
        for opened in message.opened:
            self._registration.expect(message.routers[message.router_index[opened.row]], now_s)
        outcome = self._streams.take(message, compute, now_s)
        for router, text in outcome.texts.items():
            self._send(self._streams.reply_to(router), text)
        self._abort(outcome.aborts)
        self._steps.note(now_s, self._clock(), len(message.counters))

    def _abort(self, orders: list[AbortOrder]) -> None:
        for order in orders:
            self._send(order.compute, Abort(order.attempt, order.reason))

    def _answer(self, query: DetokenizeQuery) -> None:
        failure = self._refusal(query)
        if failure is None:
            self._turns.begin(self._decode(query))
        else:
            self._send(query.reply, Detokenized(query.query, "", failure))

    def _decode(self, query: DetokenizeQuery) -> Iterator[None]:
        """Answer a query piece by piece: 262,144 ids at once held up all streams for 47 ms."""
        decoder = self._vocabulary.decoding.stream(query.skip_special_tokens)
        texts = []
        for at in range(0, len(query.ids), MAX_PIECE):
            is_end = at + MAX_PIECE >= len(query.ids)
            take = decoder.follow if query.goes_on and is_end else decoder.push
            texts.append(take(query.ids[at : at + MAX_PIECE]))
            yield
        if not query.goes_on:
            texts.append(decoder.flush())
        self._send(query.reply, Detokenized(query.query, "".join(texts)))

    def _refusal(self, query: DetokenizeQuery) -> Failure | None:
        limit, size = self._settings.max_query_ids, query.vocab_size or self._card.vocab_size
        if len(query.ids) > limit:
            message = f"tokens has {len(query.ids)} ids; at most {limit} are accepted"
            return Failure(413, "too_many_tokens", message, "tokens")
        if not query.ids or (0 <= min(query.ids) and max(query.ids) < size):  # 4 ms, not 10
            return None
        wrong = next(i for i in query.ids if not 0 <= i < size)
        message = f"tokens contains {wrong}; ids are 0 to {size - 1}"
        return Failure(400, "invalid_token_id", message, "tokens")

    def drop_router(self, router: str, now_s: float) -> None:
        self._abort(self._streams.drop_router(router, now_s))

    def _send(self, to: Address, message: object) -> None:
        try:
            self._transport.send(to, message)
        except LinkError as error:
            log.for_attempts(_attempts(message, to)).error(
                "message not sent", tag=getattr(message, "TAG", ""), error=str(error)
            )


def _attempts(message: object, to: Address) -> list[AttemptId]:
    """Return the attempts that a message is about; a text's rows are attempts of its router."""
    match message:
        case TextGenerated(counters=counters):
            return [AttemptId(to.instance_id, counter) for counter in counters]
        case Detokenized(query=query):
            return [query]
        case Abort(attempt=attempt):
            return [attempt]
    return []


def load_card(folder: Path, served_names: Sequence[str]) -> ModelCard:
    """Describe the model folder, without lengths: the detokenizer does not decide them."""
    return replace(describe_worker(folder, served_names), max_model_len=0)
