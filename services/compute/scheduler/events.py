"""The log of what happened to sequences, until the engine takes it."""

from __future__ import annotations

from common.messages.address import AttemptId
from common.messages.failure import Failure, Usage
from common.messages.tokens import EndReason
from services.compute.scheduler.protocol import Ending, Request, SequenceEvent
from services.compute.scheduler.sequence import Sequence
from services.compute.step import TokenLogprobs


class EventLog:
    """Events in the order in which they became certain. Rows that just go on are appended to
    `events` by commit itself."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[SequenceEvent] = []

    def take(self) -> list[SequenceEvent]:
        """Hand over what has gathered."""
        taken = self.events
        self.events = []
        return taken

    def token(
        self,
        sequence: Sequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        ending: Ending | None,
    ) -> None:
        """A sequence has a new token, the last in its outputs; `ending` when that ends it."""
        self.events.append(
            SequenceEvent(
                sequence.attempt,
                sequence.detokenizer,
                sequence.header,
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

    def ended(self, sequence: Sequence, ending: Ending) -> None:
        """A sequence ended without a new token."""
        self.events.append(
            SequenceEvent(
                attempt=sequence.attempt,
                detokenizer=sequence.detokenizer,
                header=sequence.header,
                first_index=len(sequence.outputs),
                token_ids=(),
                num_logprobs=sequence.params.num_logprobs,
                opened=not sequence.opened,
                ending=ending,
                prompt_tokens=sequence.prompt_len,
                cached_tokens=sequence.cached_tokens,
            )
        )
        sequence.opened = True

    def never_began(
        self, request: Request, attempt: AttemptId, reason: EndReason, failure: Failure | None
    ) -> None:
        """A choice of a request ended at the door."""
        usage = Usage(len(request.prompt_ids), 0, len(request.output_ids))
        self.events.append(
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
