"""Text for a router, row by row, as tests look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.messages.failure import Ending
from common.messages.logprobs import Logprobs, PromptLogprobs, TokenLogprob
from common.messages.text import Part, TextGenerated, TextOpened


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
    scored: tuple[PromptLogprobs, ...] = ()


def rows(message: TextGenerated) -> Iterator[TextRow]:
    """Read a message row by row, in order."""
    ids = tuple(message.token_ids)
    endings = dict(zip(message.ended_rows, message.ended, strict=True))
    openings = {opened.row: opened for opened in message.opened}
    logprobs = message.logprobs or Logprobs()
    scores = [tuple(piece) for piece in logprobs.split(message.num_tokens)]
    token = 0
    for row, count in enumerate(message.num_tokens):
        yield TextRow(
            message.counters[row],
            message.first_index[row],
            ids[token : token + count],
            message.texts[row],
            scores[row],
            endings.get(row),
            message.parts[row] if message.parts else (),
            openings.get(row),
            tuple(scored for scored in message.scored if scored.row == row),
        )
        token += count


def columns(*tokens: TokenLogprob) -> Logprobs:
    """Put tokens with their candidates into columns."""
    logprobs = Logprobs()
    pieces: list[bytes] = []
    for token in tokens:
        candidates = (token.chosen, *token.top)
        ids, values = [each.token_id for each in candidates], [each.logprob for each in candidates]
        logprobs.add(ids, values, token.rank)
        pieces += [each.data for each in candidates]
    remaining = iter(pieces)
    logprobs.name(lambda _: next(remaining))
    return logprobs
