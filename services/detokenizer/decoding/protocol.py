"""Ids to text, piece by piece, for one stream, and characters that the ids leave unfinished."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TextDecoder(Protocol):
    """The state of one stream of ids; text that later ids could change is held back.

    What `push` and `flush` return, joined, is what decoding all the ids at once gives. Behind a
    prompt it is what they add to its text.
    """

    def follow(self, prompt_ids: Iterable[int]) -> str:
        """Start behind the end of a prompt; return its text up to an unfinished character.

        If later ids complete that character, their text has all of it; otherwise nothing of it.
        """
        ...

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids and return the text that is certain now."""
        ...

    def flush(self) -> str:
        """End the stream and return the rest."""
        ...


class Decoding(Protocol):
    """What a vocabulary's decoder does; makes one `TextDecoder` per stream."""

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> TextDecoder:
        """Start a stream at the beginning of a text.

        Special tokens are left out of it or written out; those in `shown` are written out.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this token stands for, alone and inside a text."""
        ...


new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def unfinished(data: bytes) -> bytes:
    """Return the bytes at the end that begin a character and do not finish it."""
    decoder = new_utf8_decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def num_completing(begun: bytes, data: bytes) -> int | None:
    """Say how many bytes of `data` complete the character that was begun: 0 if they do not.

    None says that more bytes are needed to know.
    """
    decoder = new_utf8_decoder("strict")
    decoder.decode(begun)
    for size in range(1, len(data) + 1):
        try:
            if decoder.decode(data[size - 1 : size]):
                return size
        except UnicodeDecodeError:
            return 0
    return None
