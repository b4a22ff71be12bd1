"""The door: which requests can run here at all."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.failure import Failure
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.protocol import Request

MAX_CHOICES = 1024  # far above what routers let in; it only bounds the work of a refusal


class Door:
    """Checks what the router should have checked: inner services distrust what comes in."""

    __slots__ = ("_capacity_tokens", "_max_model_len", "_max_waiting", "_vocab_size")

    def __init__(self, spec: RunnerSpec, page_tokens: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._vocab_size = spec.vocab_size
        self._max_model_len = spec.max_model_len
        self._capacity_tokens = spec.num_pages * page_tokens

    def refusal(self, request: Request) -> Failure | None:
        """Say why this request can never run here, or None."""
        sampling = request.sampling
        if not request.prompt_ids:
            return _bad("prompt_empty", "The prompt has no tokens; give at least one.", "prompt")
        if sampling.max_tokens < 1:
            return _bad(
                "max_tokens_invalid",
                f"max_tokens is {sampling.max_tokens}; it must be at least 1.",
                "max_tokens",
            )
        if not 1 <= request.num_choices <= MAX_CHOICES:
            return _bad(
                "n_invalid", f"n is {request.num_choices}; it must be 1 to {MAX_CHOICES}.", "n"
            )
        for field, ids in (
            ("prompt", request.prompt_ids),
            ("prompt", request.output_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ):
            failure = self._vocabulary(field, ids)
            if failure is not None:
                return failure
        return self._length(len(request.prompt_ids), sampling.max_tokens)

    def overload(self, request: Request, num_waiting: int) -> Failure | None:
        """Say that the line is too long for this request, or None; an empty line takes any."""
        if not num_waiting or num_waiting + request.num_choices <= self._max_waiting:
            return None
        return Failure(
            503,
            "overloaded",
            f"{num_waiting} sequences wait here and the limit is {self._max_waiting}. "
            "Try again later.",
            retryable=True,
        )

    def _vocabulary(self, field: str, ids: Iterable[int]) -> Failure | None:
        lowest, highest = min(ids, default=0), max(ids, default=0)
        if lowest >= 0 and highest < self._vocab_size:
            return None
        wrong = lowest if lowest < 0 else highest
        return _bad(
            "token_id_invalid",
            f"{field} has token id {wrong}; this model's ids are 0 to {self._vocab_size - 1}.",
            field,
        )

    def _length(self, num_prompt: int, max_tokens: int) -> Failure | None:
        total = num_prompt + max_tokens
        if total > self._max_model_len:
            return _bad(
                "context_length_exceeded",
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together "
                f"{total}, but this model takes {self._max_model_len}. Shorten one of them.",
                "max_tokens" if num_prompt < self._max_model_len else "prompt",
            )
        # The last token is sampled but never computed, so it needs no place.
        if total - 1 > self._capacity_tokens:
            return _bad(
                "context_length_exceeded",
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together "
                f"{total}, but this replica has memory for {self._capacity_tokens} (see "
                "max_batched_token_mem). Shorten one of them.",
                "max_tokens" if num_prompt < self._capacity_tokens else "prompt",
            )
        return None


def _bad(code: str, message: str, field: str) -> Failure:
    return Failure(400, code, message, field)
