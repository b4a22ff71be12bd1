"""Characters that end, or stay unfinished, behind the ids that began them."""

from __future__ import annotations

import codecs

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
