"""One client request, validated and resolved: all that the ring needs, nothing of HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.messages.control import ModelCard
from common.messages.failure import TOO_LONG, Failure
from common.messages.sampling import SamplingParams
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    OutputRules,
    PromptSource,
    StreamSettings,
    TokenLimits,
)
from services.router.errors import ApiError, bad_field
from services.router.prompts import check_ids

MAX_PROMPTS = 1024
MAX_ALL_CHOICES = 1024  # prompts x n of one call
TRUNCATE_TO_FIT = -1
MAX_PROMPT_SCORES = 1 << 20  # candidates of one request; 250 bytes each while they wait
MAX_ANSWER_SCORES = 4 << 20  # the same for all tokens that its choices may have


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to generate: `num_choices` answers to every prompt.

    `prompt_field` and `max_tokens_field` are the names under which the client gave the prompts and
    its limit. `sampling.seed` counts only with `has_seed`; otherwise each prompt gets a seed at
    admission. `unset` names the sampling settings that the client left to the model. Where it gave
    no limit (`sampling.max_tokens` 0), `usual_max_tokens` applies, or what fits if that is less; 0
    means all that fits. A `prompt_only` request generates nothing and never goes round the ring.

    The tokens of the answers must obey `rules`. A prompt longer than `truncate_to` tokens is cut at
    its `truncate_side`; 0 means never, `TRUNCATE_TO_FIT` as many as the model takes. With `pooling`
    the answer is the prompt's embedding. `first_prompt` is the index of the first prompt in the
    client's request, where that was cut into several parts. After `timeout_s` it ends; 0 is never.
    `prediction` is what the answers are expected to repeat, to draft from.
    """

    model: str
    prompts: tuple[PromptSource, ...]
    prompt_field: str
    sampling: SamplingParams
    has_seed: bool
    stream: StreamSettings
    num_choices: int = 1
    priority: int = 0
    cache_salt: str = ""
    max_tokens_field: str = "max_tokens"
    unset: frozenset[str] = frozenset()
    usual_max_tokens: int = 0
    prompt_only: bool = False
    rules: OutputRules = OutputRules()
    truncate_to: int = 0
    truncate_side: Literal["left", "right"] = "left"
    pooling: bool = False
    first_prompt: int = 0
    timeout_s: float = 0.0
    prediction: str = ""

    @property
    def num_all_choices(self) -> int:
        """Choices in the response; those of prompt p begin at p * num_choices."""
        return len(self.prompts) * self.num_choices

    def with_defaults(self, defaults: Iterable[tuple[str, float]]) -> GenerateRequest:
        """Replace the settings that the client left out by the model's own."""
        values: dict[str, Any] = {name: value for name, value in defaults if name in self.unset}
        if not values:
            return self
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))  # -1 is another name for "off"
        return replace(self, sampling=replace(self.sampling, **values))

    def field_of(self, prompt: int) -> str:
        """Name the request field of one prompt."""
        if len(self.prompts) == 1 and not self.first_prompt:
            return self.prompt_field
        return f"{self.prompt_field}[{self.first_prompt + prompt}]"

    def in_parts(self, most_prompts: int) -> Iterator[GenerateRequest]:
        """Split a request of many prompts into several."""
        for first in range(0, len(self.prompts), most_prompts):
            prompts = self.prompts[first : first + most_prompts]
            yield replace(self, prompts=prompts, first_prompt=first)

    @property
    def prompt_tokens(self) -> int:
        """Estimate the tokens of the prompts, at 4 bytes a token."""
        return sum(_estimated_tokens(source) for source in self.prompts)

    def cost_tokens(self, max_model_len: int) -> int:
        """Estimate the tokens that this request may occupy."""
        prompt = self.prompt_tokens
        if self.prompt_only or self.pooling:
            return prompt
        output = self.sampling.max_tokens or self.usual_max_tokens or max_model_len
        return prompt + self.num_all_choices * min(output, max_model_len or output)

    def seeded(self) -> SamplingParams:
        """Return the sampling settings, with 63 random bits where the client gave no seed."""
        if self.has_seed:
            return self.sampling
        return replace(self.sampling, seed=secrets.randbits(63))

    def token_limits(self, card: ModelCard) -> TokenLimits:
        """Return what fits the model; a limit that is not the client's shrinks to fit."""
        usual = 0 if self.sampling.max_tokens else self.usual_max_tokens
        most = min(filter(None, (card.max_output_length, usual)), default=0)
        return replace(token_limits(card), max_output_length=most)

    def num_kept_tokens(self, card: ModelCard) -> int:
        """Return how many tokens of a prompt are kept; 0 means all.

        `TRUNCATE_TO_FIT` leaves room for the output, at least one token. A `max_tokens` that would
        leave no room for the prompt does not count.
        """
        if self.truncate_to != TRUNCATE_TO_FIT:
            return self.truncate_to
        room = card.max_model_len
        if room and not self.pooling:
            output = self.sampling.max_tokens or self.usual_max_tokens
            room = max(1, room - (output if 1 <= output < room else 1))
        return min(filter(None, (room, card.max_input_length)), default=0)

    def check(self, card: ModelCard) -> None:
        """Raise ApiError 400 unless the model has all token ids and the logprobs are bounded.

        So is a prompt of ids that is too long, before its ids are looked at: a million take 20 ms.
        """
        if not self.truncate_to:
            for number, prompt in enumerate(self.prompts):
                if isinstance(prompt, IdsPrompt):
                    check_prompt_length(len(prompt.ids), card, self.field_of(number))
        if card.vocab_size:
            self._check_vocabulary(card.vocab_size)
        self._check_scores(card.max_model_len)

    def _check_vocabulary(self, vocab_size: int) -> None:
        for number, prompt in enumerate(self.prompts):
            if isinstance(prompt, IdsPrompt):
                check_ids(prompt.ids, self.field_of(number), vocab_size)
        check_ids(list(self.sampling.stop_token_ids), "stop_token_ids", vocab_size)
        check_ids(list(self.rules.allowed_token_ids), "allowed_token_ids", vocab_size)
        for token_id, _ in self.sampling.logit_bias:
            if token_id >= vocab_size:
                raise bad_field("logit_bias", f"{token_id} is no token id; there are {vocab_size}")

    def _check_scores(self, max_model_len: int) -> None:
        # This process holds all logprobs of a request until they are answered.
        per_token = self.sampling.num_prompt_logprobs + 1
        most = MAX_PROMPT_SCORES // max(1, per_token)
        if per_token and self._max_prompt_tokens(max_model_len) > most:
            raise bad_field(
                self.prompt_field, f"may have {most} tokens at most with so many logprobs of them"
            )
        output = self.sampling.max_tokens or self.usual_max_tokens or max_model_len
        most = MAX_ANSWER_SCORES // max(1, self.num_all_choices * (self.sampling.num_logprobs + 1))
        if min(output, max_model_len or output) > most:
            raise bad_field(
                self.max_tokens_field,
                f"may be {most} at most with so many logprobs of {self.num_all_choices} choices",
            )

    def _max_prompt_tokens(self, max_model_len: int) -> int:
        """Bound the tokens of all prompts, at a character each (0: the model sets no limit)."""
        return sum(min(_max_tokens(source), max_model_len or 1 << 31) for source in self.prompts)


def token_limits(card: ModelCard) -> TokenLimits:
    """Return what fits the model, whatever the request."""
    return TokenLimits(
        card.max_model_len, card.max_input_length, card.max_output_length, card.vocab_size
    )


def expected_tokens(prompt: PromptSource, max_tokens: int) -> int:
    """Estimate the length of a prompt with its answer, at least one token; ids are counted."""
    return _estimated_tokens(prompt) + max(1, max_tokens)


def check_prompt_length(length: int, card: ModelCard, field: str) -> None:
    """Raise ApiError 400 for a prompt that the model could not take (0: it sets no limit)."""
    most = card.max_input_length or card.max_model_len
    if 0 < most < length:
        message = f"{field}: has {length} tokens; this model takes {most} at most"
        raise ApiError(Failure(400, TOO_LONG, message, field, False, length, most))


def _max_tokens(source: PromptSource) -> int:
    if isinstance(source, IdsPrompt):
        return len(source.ids)
    return 4 * _estimated_tokens(source) + 4


def _estimated_tokens(source: PromptSource) -> int:
    if isinstance(source, IdsPrompt):
        return len(source.ids)
    if isinstance(source, ChatPrompt):
        size = len(source.messages_json) + len(source.tools_json) + len(source.template_kwargs_json)
        return estimated_tokens(size)
    return estimated_tokens(len(source.text))


def estimated_tokens(num_bytes: int) -> int:
    return num_bytes // 4
