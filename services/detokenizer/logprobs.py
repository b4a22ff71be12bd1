"""Texts and bytes for tables of logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages.text import Candidate, TokenLogprob
from common.messages.token_rows import TokenLogprobs
from services.detokenizer.decoding.protocol import Decoding


class LogprobTexts:
    """Names the tokens of a table: each by its own bytes, and by the text they are alone."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[TokenLogprob, ...]:
        """Return an entry for each token."""
        return tuple(
            TokenLogprob(
                self._candidate(token_id, scores.chosen),
                tuple(
                    self._candidate(top_id, top_logprob)
                    for top_id, top_logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
                ),
            )
            for token_id, scores in zip(ids, logprobs, strict=True)
        )

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        data = self._decoding.token_bytes(token_id)
        return Candidate(token_id, data.decode("utf-8", "replace"), data, logprob)
