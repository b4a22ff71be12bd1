"""One attempt's text: ids in, certain text out, ended by compute or by a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from common.messages.failure import EndReason
from common.messages.stream import StreamHeader
from common.messages.text import Part
from services.detokenizer.decoding.protocol import Decoding
from services.detokenizer.stops import StopMatch, StopMatcher


class TextChunk(NamedTuple):
    """Text of the first `num_ids` of the ids given; `stop` is the stop string that was found.

    `parts` are what a parsed answer's text came to; the counts of its calls and of its tokens of
    reasoning come with its last chunk.
    """

    text: str
    num_ids: int
    stop: str | None = None
    parts: tuple[Part, ...] = ()
    num_calls: int = 0
    reasoning_tokens: int = 0


class Stream(Protocol):
    """One attempt's output: ids in, what the client gets out."""

    @property
    def header(self) -> StreamHeader:
        """What the request asks of its text."""
        ...

    @property
    def next_index(self) -> int:
        """The output index of the token to come."""
        ...

    def push(self, ids: Sequence[int]) -> TextChunk:
        """Take the ids that follow and return their text, up to a stop string if one is found."""
        ...

    def finish(self, ids: Sequence[int], reason: EndReason) -> TextChunk:
        """Take the last ids and return the rest of the text."""
        ...


def is_whole(reason: EndReason) -> bool:
    """Whether an answer that ends so is complete, and not only one attempt at it."""
    return reason in ("stop", "length")


class TextStream:
    """Decodes one attempt's output in the context of its prompt and watches for stop strings.

    A retry's accepted ids are replayed first; of their text only what the client has not got yet
    comes out, with the first chunk.
    """

    __slots__ = ("_decoder", "_min_tokens", "_replayed", "_stops", "header", "next_index")

    def __init__(
        self, header: StreamHeader, decoding: Decoding, shown: frozenset[int] = frozenset()
    ) -> None:
        self.header = header
        self.next_index = 0
        self._decoder = decoding.stream(header.skip_special_tokens, shown)
        self._decoder.follow(header.prompt_tail_ids)
        self._stops = StopMatcher(header.stop, header.include_stop_str_in_output)
        self._min_tokens = header.min_tokens if header.stop else 0
        self._replayed = ""
        if header.accepted_ids:
            replayed = self.push(header.accepted_ids).text
            self._replayed = replayed[header.accepted_characters :]

    def push(self, ids: Sequence[int]) -> TextChunk:
        """Take the ids that follow and return their text, up to a stop string if one is found."""
        if not self.header.stop:
            self.next_index += len(ids)
            return self._chunk(self._decoder.push(ids), len(ids))
        parts: list[str] = []
        for count, token_id in enumerate(ids, 1):
            self.next_index += 1
            found = self._search(self._decoder.push((token_id,)))
            if isinstance(found, StopMatch):
                parts.append(found.text)
                return self._chunk("".join(parts), count, found.stop)
            parts.append(found)
        return self._chunk("".join(parts), len(ids))

    def finish(self, ids: Sequence[int], reason: EndReason) -> TextChunk:
        """Take the last ids and return the rest of the text.

        With `stop` the last id is what ended the stream (EOS or a stop token): like a stop string
        it is shown only if the request wants its stops in the output. What is held back stays so
        where the answer has not ended: another attempt may go on with it.
        """
        stopped = reason == "stop"
        shown = ids[:-1] if stopped and not self.header.include_stop_str_in_output else ids
        chunk = self.push(shown)
        if chunk.stop is not None:
            return chunk
        self.next_index += len(ids) - len(shown)
        if not is_whole(reason):
            return TextChunk(chunk.text, len(ids))
        rest = self._search(self._decoder.flush())
        if isinstance(rest, StopMatch):
            return TextChunk(chunk.text + rest.text, len(ids), rest.stop)
        return TextChunk(chunk.text + rest + self._stops.flush(), len(ids))

    def _search(self, text: str) -> str | StopMatch:
        if self.next_index <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _chunk(self, text: str, num_ids: int, stop: str | None = None) -> TextChunk:
        if self._replayed:
            text, self._replayed = self._replayed + text, ""
        return TextChunk(text, num_ids, stop)
