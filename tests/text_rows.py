"""Text for a router, row by row, as tests look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.messages.failure import Ending
from common.messages.text import Part, PromptScored, TextGenerated, TextOpened, TokenLogprob


class TextRow(NamedTuple):
    """New text of one attempt of the receiving router, and the output ids that it covers."""

    counter: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    ended: Ending | None
    parts: tuple[Part, ...] = ()
    opened: TextOpened | None = None
    scored: tuple[PromptScored, ...] = ()


def rows(message: TextGenerated) -> Iterator[TextRow]:
    """Read a message row by row, in order."""
    ids = tuple(message.token_ids)
    endings = dict(zip(message.ended_rows, message.ended, strict=True))
    openings = {opened.row: opened for opened in message.opened}
    token = 0
    for row, count in enumerate(message.num_tokens):
        yield TextRow(
            message.counters[row],
            message.first_index[row],
            ids[token : token + count],
            message.texts[row],
            message.logprobs[row] if message.logprobs else (),
            endings.get(row),
            message.parts[row] if message.parts else (),
            openings.get(row),
            tuple(scored for scored in message.scored if scored.row == row),
        )
        token += count
