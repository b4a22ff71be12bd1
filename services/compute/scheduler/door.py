"""The door: which requests can run here at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.messages.failure import Failure
from common.messages.sampling import Guidance, SamplingParams
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.protocol import Request
from services.compute.step import MAX_BIAS, MAX_STOP_IDS, Int32Array

MAX_PROMPT_LOGPROBS = 20  # of a token; what routers let in
MAX_CHOICES = 1024  # far above what routers let in; it only bounds the work of a refusal
MAX_BANNED_TOKENS = 16_384


class Door:
    """Checks what the router should have checked: inner services distrust what comes in."""

    __slots__ = (
        "_eos_token_ids",
        "_capacity_tokens",
        "_generates",
        "_max_model_len",
        "_max_waiting",
        "_pools",
        "_vocab_size",
    )

    def __init__(self, spec: RunnerSpec, page_tokens: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._pools = bool(spec.pooling)
        self._generates = spec.generates
        self._vocab_size = spec.vocab_size
        self._eos_token_ids = spec.eos_token_ids
        self._max_model_len = spec.max_model_len
        self._capacity_tokens = spec.num_pages * page_tokens

    def refusal(self, request: Request) -> Failure | None:
        """Say why this request can never run here, or None."""
        sampling = request.sampling
        if not len(request.prompt):
            return _bad("prompt_empty", "The prompt has no tokens; give at least one.", "prompt")
        if not (self._pools if request.pooling else self._generates):
            return _unsupported(request.pooling)
        if sampling.max_tokens < 1 and not request.pooling:
            return _bad(
                "max_tokens_invalid",
                f"max_tokens is {sampling.max_tokens}; it must be at least 1.",
                "max_tokens",
            )
        max_choices = 1 if request.pooling else MAX_CHOICES
        if not 1 <= request.num_choices <= max_choices:
            return _bad(
                "n_invalid", f"n is {request.num_choices}; it must be 1 to {max_choices}.", "n"
            )
        if sampling.num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
            return _bad(
                "prompt_logprobs_invalid",
                f"prompt_logprobs is {sampling.num_prompt_logprobs}; it must be at most "
                f"{MAX_PROMPT_LOGPROBS}.",
                "prompt_logprobs",
            )
        failure = self._counts(sampling) or self._ids(request)
        if failure is None and sampling.guidance is not None:
            failure = self._guidance(sampling, sampling.guidance)
        if failure is not None:
            return failure
        if request.pooling:
            return self._pooled_length(len(request.prompt))
        return self._length(len(request.prompt), sampling.max_tokens)

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

    def _counts(self, sampling: SamplingParams) -> Failure | None:
        """The runner has room for so many of each sequence."""
        if sampling.stop_token_ids:
            own = () if sampling.ignore_eos else self._eos_token_ids
            stop_ids = {*sampling.stop_token_ids, *own}
            if len(stop_ids) > MAX_STOP_IDS:
                return _bad(
                    "stop_token_ids_too_long",
                    f"stop_token_ids and the model's own come to {len(stop_ids)} ids; at most "
                    f"{MAX_STOP_IDS} are taken.",
                    "stop_token_ids",
                )
        num_biased = len({token for token, _ in sampling.logit_bias})
        if num_biased > MAX_BIAS:
            return _bad(
                "logit_bias_too_long",
                f"logit_bias names {num_biased} tokens; at most {MAX_BIAS} are taken.",
                "logit_bias",
            )
        return None

    def _ids(self, request: Request) -> Failure | None:
        sampling = request.sampling
        return (
            self._vocabulary("prompt", request.prompt.ids_T)
            or self._vocabulary("prompt", request.output_ids)
            or self._vocabulary("stop_token_ids", sampling.stop_token_ids)
            or self._vocabulary("logit_bias", [token for token, _ in sampling.logit_bias])
        )

    def _guidance(self, sampling: SamplingParams, guidance: Guidance) -> Failure | None:
        banned = [token for sequence in guidance.banned_sequences for token in sequence]
        if len(banned) > MAX_BANNED_TOKENS:
            return _bad(
                "bad_words_too_long",
                f"bad_words come to {len(banned)} tokens; at most {MAX_BANNED_TOKENS} are taken.",
                "bad_words",
            )
        return (
            self._grammar(sampling, guidance)
            or self._vocabulary("allowed_token_ids", guidance.allowed_token_ids)
            or self._vocabulary("bad_words", banned)
        )

    def _grammar(self, sampling: SamplingParams, guidance: Guidance) -> Failure | None:
        if not guidance.grammar:
            return None
        if not self._eos_token_ids and not sampling.stop_token_ids:
            return _bad(
                "grammar_unsupported",
                f"This model names no token that ends a text, so that {guidance.field} cannot be "
                "satisfied. Give stop_token_ids.",
                guidance.field,
            )
        return None

    def _vocabulary(self, field: str, ids: Sequence[int] | Int32Array) -> Failure | None:
        if not len(ids):
            return None
        if isinstance(ids, np.ndarray):  # one pass: as unsigned, ids below 0 are the largest
            if int(ids.view(np.uint32).max()) < self._vocab_size:
                return None
        elif min(ids) >= 0 and max(ids) < self._vocab_size:
            return None
        wrong = int(min(ids)) if min(ids) < 0 else int(max(ids))
        return _bad(
            "token_id_invalid",
            f"{field} has token id {wrong}; this model's ids are 0 to {self._vocab_size - 1}.",
            field,
        )

    def _pooled_length(self, num_prompt: int) -> Failure | None:
        longest = min(self._max_model_len, self._capacity_tokens)
        if num_prompt <= longest:
            return None
        return _bad(
            "context_length_exceeded",
            f"The input has {num_prompt} tokens, and this replica takes {longest}. Shorten it.",
            "input",
        )

    def _length(self, num_prompt: int, max_tokens: int) -> Failure | None:
        total = num_prompt + max_tokens
        if total > self._max_model_len:
            return _too_long(
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together "
                f"{total}, but this model takes {self._max_model_len}. Shorten one of them.",
                num_prompt,
                self._max_model_len - 1,
            )
        # The last token is sampled but never computed, so it needs no place.
        if total - 1 > self._capacity_tokens:
            return _too_long(
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together "
                f"{total}, but this replica has memory for {self._capacity_tokens} (see "
                "max_batched_token_mem). Shorten one of them.",
                num_prompt,
                self._capacity_tokens,
            )
        return None


def _unsupported(pooling: bool) -> Failure:
    message = (
        "This model makes no embeddings: its folder does not say how (modules.json of "
        "sentence-transformers). Ask an embedding model."
        if pooling
        else "This model makes embeddings only: it has no head to generate text with. Use "
        "/v1/embeddings, or ask another model."
    )
    return _bad("unsupported_model", message, "model")


def _bad(code: str, message: str, field: str) -> Failure:
    return Failure(400, code, message, field)


def _too_long(message: str, num_prompt: int, longest: int) -> Failure:
    """Refuse a length; it is the prompt's fault where even one token more would not fit."""
    if num_prompt <= longest:
        return _bad("context_length_exceeded", message, "max_tokens")
    return Failure(400, "context_length_exceeded", message, "prompt", False, num_prompt, longest)
