"""One attempt's text, as it is or in the parts of a parsed answer: ids in, certain text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from common.messages.failure import EndReason
from common.messages.generate import StreamHeader
from common.messages.text import Part
from common.parameter_kinds import unpack_kinds
from services.detokenizer.answer.formats import call_ids, markers, reasoning_parser, tool_parser
from services.detokenizer.answer.parser import NO_PARTS, AnswerParser
from services.detokenizer.decoding import Decoding
from services.detokenizer.stops import StopMatch, StopMatcher
from services.detokenizer.vocabulary import TokenVocabulary


class TextChunk(NamedTuple):
    """Text of the first `num_ids` of the ids given; `stop` is the stop string that was found.

    `parts` are those of a parsed answer. Its last chunk has the counts of its calls and of its
    reasoning tokens.
    """

    text: str
    num_ids: int
    stop: str | None = None
    parts: tuple[Part, ...] = ()
    num_calls: int = 0
    reasoning_tokens: int = 0


def is_whole(reason: EndReason) -> bool:
    """Whether this ends the answer, and not only one attempt at it."""
    return reason in ("stop", "length")


class TextStream:
    """Decodes one attempt's output in the context of its prompt and watches for stop strings.

    A retry's accepted ids are replayed first. The first chunk has the part of their text that the
    client does not have yet.
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


class ParsedStream:
    """Passes a stream's text, cut at its stop string, through the parsers.

    A retry's accepted ids are replayed through the decoder and the parsers. Parts that the client
    has are left out; the others come with the first chunk.
    """

    __slots__ = ("_parser", "_reasoning_tokens", "_replayed", "_text", "header")

    def __init__(self, header: StreamHeader, text: TextStream, parser: AnswerParser) -> None:
        """Take a text stream that starts at the beginning of the answer, journal or not."""
        self.header = header
        self._text = text
        self._parser = parser
        self._reasoning_tokens = 0
        self._replayed: TextChunk | None = None
        if header.accepted_ids:
            self._replayed = self._replay(header.accepted_ids, header.accepted_characters)

    @property
    def next_index(self) -> int:
        return self._text.next_index

    def push(self, ids: Sequence[int]) -> TextChunk:
        if len(ids) < 2 or not self._parser.may_reason:
            chunk = self._take(ids)
            return chunk if self._replayed is None else self._joined((chunk,))
        done: list[TextChunk] = []
        for token_id in ids:  # whether a token is reasoning is known only token by token
            done.append(self._take((token_id,)))
            if done[-1].stop is not None:
                break
        return self._joined(done)

    def finish(self, ids: Sequence[int], reason: EndReason) -> TextChunk:
        done = [self.push(ids[:-1])]
        if done[0].stop is None:
            chunk = self._text.finish(ids[-1:], reason)
            ends = chunk.stop is not None or is_whole(reason)
            is_text = len(ids) > 0 and (chunk.stop is not None or reason != "stop")
            done.append(self._parsed(chunk, int(is_text), ends))
        return self._joined(done)

    def _take(self, ids: Sequence[int]) -> TextChunk:
        chunk = self._text.push(ids)
        return self._parsed(chunk, chunk.num_ids, chunk.stop is not None)

    def _parsed(self, chunk: TextChunk, num_tokens: int, ends: bool) -> TextChunk:
        """Put a chunk's text through the parsers; `num_tokens` of its tokens stand for text."""
        reasoned = self._parser.reasons
        parts = self._parser.push(chunk.text)
        if reasoned and self._parser.reasons:
            self._reasoning_tokens += num_tokens
        if ends:
            parts += self._parser.finish()
        return TextChunk(
            chunk.text,
            chunk.num_ids,
            chunk.stop,
            parts,
            self._parser.num_calls,
            self._reasoning_tokens,
        )

    def _joined(self, chunks: Sequence[TextChunk]) -> TextChunk:
        """Join chunks into one, after the rest of a retry's journal."""
        texts: list[str] = []
        parts: list[Part] = []
        if self._replayed is not None:
            chunks = (self._replayed, *chunks)
            self._replayed = None
        for chunk in chunks:
            texts.append(chunk.text)
            parts += chunk.parts
        return TextChunk(
            "".join(texts),
            sum(chunk.num_ids for chunk in chunks),
            chunks[-1].stop,
            tuple(part for part in parts if part.kind == "call" or part.text) or NO_PARTS,
            self._parser.num_calls,
            self._reasoning_tokens,
        )

    def _replay(self, ids: Sequence[int], characters: int) -> TextChunk:
        """Take ids that the client has with so many characters; return text and parts beyond."""
        texts: list[str] = []
        parts: list[Part] = []
        for token_id in ids:
            chunk = self._text.push((token_id,))
            known, new = chunk.text[:characters], chunk.text[characters:]
            characters -= len(known)
            reasoned = self._parser.reasons
            self._parser.push(known)
            parts += self._parser.push(new)
            if reasoned and self._parser.reasons:
                self._reasoning_tokens += 1
            texts.append(new)
        return TextChunk("".join(texts), 0, parts=tuple(parts))


AttemptStream: TypeAlias = TextStream | ParsedStream


def parsed_stream(
    header: StreamHeader, choice: int, vocabulary: TokenVocabulary
) -> ParsedStream | None:
    """Open the stream of this choice, if its answer is to be parsed."""
    tools = tool_parser(header.tool_format, unpack_kinds(header.parameter_kinds))
    reasoning = reasoning_parser(header.reasoning_format, header.reasoning_open)
    if tools is None and reasoning is None:
        return None
    call_id = partial(call_ids(header.tool_format), header.call_key, choice)
    fresh = replace(header, accepted_ids=(), accepted_characters=0)
    text = TextStream(fresh, vocabulary.decoding, vocabulary.markers(markers(header)))
    return ParsedStream(header, text, AnswerParser(reasoning, tools, call_id))
