"""Texts and bytes for tables of logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.messages.text import Candidate, TokenLogprob
from common.messages.tokens import PromptScores, TokenLogprobs
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

    def of_prompt(self, scores: PromptScores) -> tuple[TokenLogprob, ...]:
        """Return the same for tokens of a prompt."""
        return tuple(self._prompt_tokens(scores))

    def _prompt_tokens(self, scores: PromptScores) -> Iterator[TokenLogprob]:
        num_top = scores.num_top
        tokens = zip(scores.ids, scores.logprobs, scores.ranks, strict=True)
        for index, (token_id, logprob, rank) in enumerate(tokens):
            entries = slice(index * num_top, (index + 1) * num_top)
            top = zip(
                scores.top_ids[entries],
                scores.top_logprobs[entries],
                strict=True,
            )
            candidates = tuple(self._candidate(*pair) for pair in top)
            yield TokenLogprob(self._candidate(token_id, logprob), candidates, rank)

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        data = self._decoding.token_bytes(token_id)
        return Candidate(token_id, data.decode("utf-8", "replace"), data, logprob)
