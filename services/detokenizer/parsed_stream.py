"""One attempt's text as the parts of a parsed answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.messages.failure import EndReason
from common.messages.stream import StreamHeader
from common.messages.text import Part
from services.detokenizer.answer.formats import call_ids, markers, reasoning_parser, tool_parser
from services.detokenizer.answer.parser import AnswerParser
from services.detokenizer.answer.parts import NO_PARTS
from services.detokenizer.stream import TextChunk, TextStream, is_whole
from services.detokenizer.vocabulary import Vocabulary


class ParsedStream:
    """Takes a stream's text, in which stop strings have been looked for, through the parsers.

    A retry's accepted ids are replayed through decoder and parsers both: parts of the text that
    the client has are left out, the others come with the first chunk.
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
        """The output index of the token to come."""
        return self._text.next_index

    def push(self, ids: Sequence[int]) -> TextChunk:
        """Take the ids that follow and return their text, up to a stop string if one is found."""
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
        """Take the last ids and return the rest of the text."""
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
        """Make one chunk of several, behind what a retry has left over of its journal."""
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


def parsed_stream(header: StreamHeader, choice: int, vocabulary: Vocabulary) -> ParsedStream | None:
    """Open the stream of this choice, if its answer is to be parsed."""
    tools = tool_parser(header.tool_format)
    reasoning = reasoning_parser(header.reasoning_format, header.reasoning_open)
    if tools is None and reasoning is None:
        return None
    call_id = partial(call_ids(header.tool_format), header.call_key, choice)
    fresh = replace(header, accepted_ids=(), accepted_characters=0)
    text = TextStream(fresh, vocabulary.decoding, vocabulary.markers(markers(header)))
    return ParsedStream(header, text, AnswerParser(reasoning, tools, call_id))
