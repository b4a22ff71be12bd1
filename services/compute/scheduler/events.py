"""The log of what happened to sequences, until the engine takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.messages.address import AttemptId
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.tokens import PromptScores, TokenLogprobs
from services.compute.scheduler.protocol import News, Request, SequenceEvent, StepTokens
from services.compute.scheduler.sequence import Sequence


class EventLog:
    """News of each attempt in the order in which they became certain."""

    __slots__ = ("_news",)

    def __init__(self) -> None:
        self._news: list[News] = []

    def take(self) -> list[News]:
        """Hand over what has gathered."""
        taken = self._news
        self._news = []
        return taken

    def went_on(self, tokens: list[StepTokens]) -> None:
        """Sequences have a new token each, and there is nothing else to say."""
        self._news += tokens

    def token(
        self,
        sequence: Sequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        ending: Ending | None,
    ) -> None:
        """A sequence has a new token, the last in its outputs; `ending` when that ends it."""
        self._news.append(
            SequenceEvent(
                sequence.attempt,
                sequence.params.detokenizer,
                sequence.params.header,
                len(sequence.outputs) - 1,
                (token,),
                sequence.params.num_logprobs,
                logprobs,
                not sequence.opened,
                ending,
                sequence.prompt_len,
                sequence.cached_tokens,
            )
        )
        sequence.opened = True

    def scored(self, sequence: Sequence, scores: PromptScores) -> None:
        """More of a sequence's prompt has its logprobs."""
        self._without_token(sequence, scored=(scores,))

    def ended(self, sequence: Sequence, ending: Ending) -> None:
        """A sequence ended without a new token."""
        self._without_token(sequence, ending)

    def never_began(
        self, request: Request, attempt: AttemptId, reason: EndReason, failure: Failure | None
    ) -> None:
        """A choice of a request ended at the door."""
        usage = Usage(len(request.prompt), 0, len(request.output_ids))
        self._news.append(
            SequenceEvent(
                attempt=attempt,
                detokenizer=request.detokenizer,
                header=request.header,
                first_index=len(request.output_ids),
                token_ids=(),
                num_logprobs=request.sampling.num_logprobs,
                opened=True,
                ending=Ending(reason, usage, failure=failure),
            )
        )

    def _without_token(
        self,
        sequence: Sequence,
        ending: Ending | None = None,
        scored: tuple[PromptScores, ...] = (),
    ) -> None:
        self._news.append(
            SequenceEvent(
                attempt=sequence.attempt,
                detokenizer=sequence.params.detokenizer,
                header=sequence.params.header,
                first_index=len(sequence.outputs),
                token_ids=(),
                num_logprobs=sequence.params.num_logprobs,
                opened=not sequence.opened,
                ending=ending,
                prompt_tokens=sequence.prompt_len,
                cached_tokens=sequence.cached_tokens,
                scored=scored,
            )
        )
        sequence.opened = True


def sequence_events(news: Iterable[News]) -> Iterator[SequenceEvent]:
    """Tell the same news with an event for each sequence, to whoever has the time."""
    for item in news:
        if isinstance(item, SequenceEvent):
            yield item
            continue
        columns = (item.counter_S.tolist(), item.index_S.tolist(), item.token_S.tolist())
        for counter, index, token in zip(*columns, strict=True):
            attempt = AttemptId(item.router, counter)
            yield SequenceEvent(attempt, item.detokenizer, b"", index, (token,))
