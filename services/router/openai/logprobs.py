"""Logprobs in OpenAI's two forms, and those of a prompt in vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from common.messages.text import Candidate, TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


def chat_logprobs(tokens: Iterable[TokenLogprob], as_ids: bool = False) -> dict[str, Any]:
    """Build the `logprobs` object of a chat choice: a list of tokens."""
    return {
        "content": [
            {
                **_scored(token.chosen, as_ids),
                "top_logprobs": [_scored(each, as_ids) for each in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> list[Any]:
    """Build vLLM's `prompt_logprobs`: the first token has none, the others candidates by id."""
    positions: list[Any] = [None]
    for token in tokens:
        entries = {
            str(each.token_id): _ranked(each, rank, as_ids)
            for rank, each in enumerate(token.top, 1)
        }
        chosen = token.chosen
        entries[str(chosen.token_id)] = _ranked(chosen, token.rank or None, as_ids)
        positions.append(entries)
    return positions


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion choice, chunk after chunk: columns.

    Offsets count characters begun: bytes that are no continuation bytes of UTF-8, so that they
    are right also where one character takes several tokens. One that the prompt began, and that is
    not echoed, is the text's first.
    """

    __slots__ = ("_as_ids", "_offset")

    def __init__(self, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._offset = 0

    def take(
        self, tokens: Iterable[TokenLogprob], first: Candidate | None = None
    ) -> dict[str, Any]:
        """Build the object for the next tokens; `top_logprobs` has the chosen token, too.

        `first` is the first token of an echoed prompt, which has no logprob.
        """
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if first is not None:
            self._add(columns, first, None, None)
        for token in tokens:
            top = {self._name(each): _finite(each.logprob) for each in token.top}
            logprob = _finite(token.chosen.logprob)
            top.setdefault(self._name(token.chosen), logprob)
            self._add(columns, token.chosen, logprob, top)
        return columns

    def _add(
        self,
        columns: dict[str, list[Any]],
        chosen: Candidate,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        columns["tokens"].append(self._name(chosen))
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(self._offset)
        continues = [byte & 0xC0 == 0x80 for byte in chosen.data]
        self._offset += continues.count(False) + (self._offset == 0 and any(continues[:1]))

    def _name(self, candidate: Candidate) -> str:
        return name_of(candidate, self._as_ids)


def name_of(candidate: Candidate, as_ids: bool) -> str:
    """Name a token by its text, or by its id, which is always one token's alone."""
    return f"token_id:{candidate.token_id}" if as_ids else candidate.text


def _scored(candidate: Candidate, as_ids: bool) -> dict[str, Any]:
    return {
        "token": name_of(candidate, as_ids),
        "logprob": _finite(candidate.logprob),
        "bytes": list(candidate.data),
    }


def _ranked(candidate: Candidate, rank: int | None, as_ids: bool) -> dict[str, Any]:
    return {
        "logprob": _finite(candidate.logprob),
        "rank": rank,
        "decoded_token": name_of(candidate, as_ids),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
