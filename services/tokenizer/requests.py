"""Open requests: their table and their limits.

Pure decisions: nothing is sent here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from opentelemetry.trace import INVALID_SPAN, Span

from common.messages.address import AttemptId
from common.messages.arrays import int64s
from common.messages.failure import TOO_LONG, Failure
from common.messages.sampling import SamplingParams
from common.messages.tokenize import (
    OutputRules,
    TextPrompt,
    Tokenize,
    TokenizeQuery,
    TokenLimits,
)
from common.tombstones import Tombstones
from services.tokenizer.jobs import TextBound, size_of


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One open request: its message, its size in bytes, and the counters of aborted attempts.

    A request with several choices is several attempts.
    """

    message: Tokenize | TokenizeQuery
    size: int
    span: Span = INVALID_SPAN
    job: int = 0
    began_s: float = 0.0
    aborted: set[int] = field(default_factory=set)

    @property
    def first(self) -> AttemptId:
        """Id of the request's first attempt, or of the query."""
        message = self.message
        return message.attempt if isinstance(message, Tokenize) else message.query

    @property
    def attempts(self) -> list[AttemptId]:
        router, first = self.first.router, self.first.counter
        num_choices = self.message.num_choices if isinstance(self.message, Tokenize) else 1
        return [AttemptId(router, counter) for counter in range(first, first + num_choices)]

    def live_runs(self) -> list[tuple[int, int]]:
        """Return (offset of the first choice, number of choices) of each run not aborted."""
        runs: list[tuple[int, int]] = []
        for offset, attempt in enumerate(self.attempts):
            if attempt.counter in self.aborted:
                continue
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((offset, 1))
        return runs


class RequestTable:
    """Every open request, bounded in number and bytes, and the tombstones of early aborts."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._by_attempt: dict[AttemptId, PendingRequest] = {}
        self._requests: dict[PendingRequest, None] = {}  # in the order of arrival
        self._tombstones = Tombstones()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def refusal(self, size: int) -> Failure | None:
        """Return why a request of so many bytes cannot be accepted now; another replica may."""
        if len(self) < self._max_requests and self.num_bytes + size <= self._max_bytes:
            return None
        message = "the tokenizer has as many prompts in work as it may; try again shortly"
        return Failure(503, "overloaded", message, retryable=True)

    def open(self, request: PendingRequest, now_s: float) -> bool:
        """Add a request; False when it is known already or was aborted before it arrived."""
        attempts = request.attempts
        if any(attempt in self._by_attempt for attempt in attempts):
            return False
        for attempt in attempts:
            if self._tombstones.is_buried(attempt, now_s):
                request.aborted.add(attempt.counter)
        if len(request.aborted) == len(attempts):
            return False
        self._by_attempt.update(dict.fromkeys(attempts, request))
        self._requests[request] = None
        self.num_bytes += request.size
        return True

    def close(self, request: PendingRequest) -> None:
        """Remove a finished request; idempotent."""
        if request not in self._requests:
            return
        del self._requests[request]
        self.num_bytes -= request.size
        for attempt in request.attempts:
            del self._by_attempt[attempt]

    def abort(self, attempt: AttemptId, now_s: float) -> PendingRequest | None:
        """End an attempt; return its request, now closed, if that was its last live attempt."""
        request = self._by_attempt.get(attempt)
        if request is None:
            self._tombstones.bury(attempt, now_s)
            return None
        request.aborted.add(attempt.counter)
        if request.live_runs():
            return None
        self.close(request)
        return request

    def lose(self, router: str | None = None) -> list[PendingRequest]:
        """Close and return the requests of a router instance, or of all."""
        lost = [request for request in self._requests if router in (None, request.first.router)]
        for request in lost:
            self.close(request)
        return lost

    def open_counters(self, router: str) -> array[int]:
        """Return the live attempts of a router, for its heartbeat; queries are not attempts."""
        return int64s(
            attempt.counter
            for request in self._requests
            if request.first.router == router and isinstance(request.message, Tokenize)
            for attempt in request.attempts
            if attempt.counter not in request.aborted
        )


def check_ids(ids: array[int], vocab_size: int, field: str) -> Failure | None:
    """Refuse an empty prompt and ids outside [0, vocab_size)."""
    if not ids:
        message = "the prompt has no tokens; give at least one"
        return Failure(400, "empty_prompt", message, field)
    column = np.frombuffer(ids, dtype=np.int32)  # 500,000 ids in 0.1 ms, not 15 ms in Python
    outside = (column < 0) | (column >= vocab_size)
    if not outside.any():
        return None
    at = int(outside.argmax())
    message = (
        f"token id {ids[at]} at position {at} does not exist; "
        f"this model's ids go from 0 to {vocab_size - 1}"
    )
    return Failure(400, "invalid_token_id", message, field)


def check_rules(rules: OutputRules, max_structure_bytes: int) -> Failure | None:
    structure = rules.structure
    if structure is None or len(structure.text) <= max_structure_bytes:
        return None
    message = (
        f"{structure.field} is {len(structure.text)} characters long; "
        f"at most {max_structure_bytes} are accepted"
    )
    return Failure(400, "invalid_value", message, structure.field)


def truncated(ids: array[int], truncate_to: int, side: Literal["left", "right"]) -> array[int]:
    """Cut a prompt to `truncate_to` tokens (0: no limit), at one side."""
    if not 0 < truncate_to < len(ids):
        return ids
    return ids[-truncate_to:] if side == "left" else ids[:truncate_to]


def text_bound(message: Tokenize, max_chars_per_token: int) -> TextBound:
    """Return how much text of a request is worth encoding; none of it may exceed its limits."""
    limits, kept = message.limits, message.truncate_to
    context = limits.max_model_len if message.pooling else max(0, limits.max_model_len - 1)
    most = min(filter(None, (limits.max_input_length, context)), default=0)
    if kept and (not most or kept <= most):
        return TextBound(kept, max_chars_per_token, message.truncate_side)
    return TextBound(most, max_chars_per_token)


def size_of_request(message: Tokenize | TokenizeQuery) -> int:
    size = size_of(message.prompt)
    if isinstance(message, Tokenize):
        size += size_of(TextPrompt(message.prediction))
    return size


def predicted_text(message: Tokenize, max_chars_per_token: int) -> str:
    """Return what of a prediction an answer has room for."""
    bound = TextBound(message.limits.max_model_len, max_chars_per_token, "right")
    return bound.cut(message.prediction)


def check_prompt_len(limits: TokenLimits, prompt_len: int, field: str) -> Failure | None:
    """Refuse a prompt that is longer than the model or its settings allow; 0 is no limit."""
    bounds = (("input", limits.max_input_length), ("context", limits.max_model_len))
    for what, most in bounds:
        if 0 < most < prompt_len:
            message = (
                f"this model's maximum {what} length is {most} tokens, "
                f"but {field} has {prompt_len}; shorten it"
            )
            return Failure(400, TOO_LONG, message, field, False, prompt_len, most)
    return None


def resolve_max_tokens(
    sampling: SamplingParams, limits: TokenLimits, prompt_len: int, field: str
) -> SamplingParams | Failure:
    """Fit `max_tokens` into the model's limits; 0 means as many as fit.

    A limit of 0 in `limits` means no limit. A prompt that leaves no room is refused.
    """
    context = limits.max_model_len
    too_long = check_prompt_len(replace(limits, max_model_len=0), prompt_len, field)
    if too_long is not None:
        return too_long
    if 0 < context <= prompt_len:
        message = (
            f"this model's maximum context length is {context} tokens, but {field} alone has "
            f"{prompt_len}, which leaves none to generate; shorten it"
        )
        return Failure(400, TOO_LONG, message, field, False, prompt_len, context - 1)
    wanted = sampling.max_tokens
    bounds = (context - prompt_len if context > 0 else 0, limits.max_output_length)
    room = min(filter(None, bounds), default=0)
    if wanted and not 0 < room < wanted:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
