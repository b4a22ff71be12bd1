"""What the chunks and bodies of chat and text completions share: options, usage, logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import TextOpened
from services.router.answer import ResponseHead
from services.router.sse import DONE, error_event, event, usage_object


def stop_reason(ended: Ending) -> dict[str, Any]:
    """Name the stop string or token that matched; absent otherwise, as OpenAI's API lacks it."""
    return {} if ended.stop is None else {"stop_reason": ended.stop}


def full_usage(usage: Usage, endings: Iterable[Ending]) -> dict[str, Any]:
    """Build OpenAI's `usage` with the tokens of reasoning."""
    return usage_object(usage, sum(ended.reasoning_tokens for ended in endings))


class RunningUsage:
    """What a stream has used so far, for clients that want usage in every chunk."""

    __slots__ = ("_choices", "_choices_per_prompt", "_endings", "_prompts")

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = max(1, choices_per_prompt)
        self._prompts: dict[int, TextOpened] = {}
        self._choices: dict[int, int] = {}
        self._endings: list[Ending] = []

    def opened(self, choice: int, prompt: TextOpened | None) -> None:
        """Take the usage of a prompt: once for all its choices, with the fewest cached tokens."""
        if prompt is None:
            return
        number = choice // self._choices_per_prompt
        known = self._prompts.get(number)
        if known is None or prompt.cached_tokens < known.cached_tokens:
            self._prompts[number] = prompt

    def grew(self, choice: int, num_tokens: int) -> None:
        self._choices[choice] = self._choices.get(choice, 0) + num_tokens

    def ended(self, choice: int, ended: Ending) -> None:
        """Take the end of a choice, whose usage is exact."""
        self._choices[choice] = ended.usage.completion_tokens
        self._endings.append(ended)

    def object(self) -> dict[str, Any]:
        """Build OpenAI's `usage` as of now."""
        prompts = self._prompts.values()
        usage = Usage(
            sum(prompt.prompt_tokens for prompt in prompts),
            sum(prompt.cached_tokens for prompt in prompts),
            sum(self._choices.values()),
            sum(ended.usage.accepted_tokens for ended in self._endings),
            sum(ended.usage.rejected_tokens for ended in self._endings),
        )
        return full_usage(usage, self._endings)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the client wants its answer written.

    With `named_tool` the answer is one call of the tool that the client named and ends by "stop",
    as OpenAI's does; with `functions` a call has the form that preceded tools. `echo` stands
    before the answer of a chat. With `prompt_alone` nothing was to be generated: the token that
    the ring generates to score the prompt is not shown.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    include_reasoning: bool = True
    named_tool: bool = False
    functions: bool = False
    echo: str = ""
    prompt_alone: bool = False

    @property
    def needs_ids(self) -> bool:
        """Whether the ids of the tokens have to be known, to be shown or to be counted."""
        return self.token_ids or self.continuous_usage


class ChunkFormat:
    """What the chunks of chat and text completions share; of a stream it has the usage so far."""

    def __init__(
        self, kind: str, head: ResponseHead, options: AnswerOptions | None, choices_per_prompt: int
    ) -> None:
        """Take the `object` that chunks are."""
        self._kind = kind
        self._head = head
        self._options = options or AnswerOptions()
        self._endings: list[Ending] = []
        self._usage = RunningUsage(choices_per_prompt) if self._options.continuous_usage else None

    def closing(self, usage: Usage) -> bytes:
        """Render the usage chunk, if the client wants one, and the end."""
        if not self._options.include_usage:
            return DONE
        total = full_usage(usage, self._endings)
        return event({**self._head_of(self._kind), "choices": [], "usage": total}) + DONE

    def failed(self, failure: Failure) -> bytes:
        return error_event(failure) + DONE

    def _head_of(self, kind: str) -> dict[str, Any]:
        """Build the fields that every chunk or body begins with."""
        return {
            "id": self._head.id,
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
        }

    def _chunk(
        self,
        index: int,
        output: dict[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **output, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head_of(self._kind), "choices": [choice]}
        if self._usage is not None:
            return {**chunk, "usage": self._usage.object()}
        return {**chunk, "usage": None} if self._options.include_usage else chunk


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


def prompt_logprobs(tokens: Iterable[TokenLogprob], as_ids: bool = False) -> list[Any]:
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

    Offsets count the characters that have begun, that is the bytes that are no continuation bytes
    of UTF-8, since a character may take several tokens. A character that the prompt began and that
    is not echoed is the text's first.
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
            top = {name_of(each, self._as_ids): _finite(each.logprob) for each in token.top}
            logprob = _finite(token.chosen.logprob)
            top.setdefault(name_of(token.chosen, self._as_ids), logprob)
            self._add(columns, token.chosen, logprob, top)
        return columns

    def _add(
        self,
        columns: dict[str, list[Any]],
        chosen: Candidate,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        columns["tokens"].append(name_of(chosen, self._as_ids))
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(self._offset)
        continues = [byte & 0xC0 == 0x80 for byte in chosen.data]
        self._offset += continues.count(False) + (self._offset == 0 and any(continues[:1]))


def name_of(candidate: Candidate, as_ids: bool) -> str:
    """Name a token by its text, or by its id, which is unique."""
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
