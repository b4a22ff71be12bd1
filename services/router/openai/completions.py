"""`/v1/completions` requests: from a JSON object to a GenerateRequest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from common.messages.sampling import SamplingParams
from common.messages.tokenize import PromptSource
from services.router.endpoint import ApiRequest
from services.router.errors import bad_field
from services.router.generate_request import MAX_ALL_CHOICES, MAX_PROMPTS, GenerateRequest
from services.router.openai.chunks import AnswerOptions
from services.router.openai.rules import make_rules
from services.router.openai.sampling import (
    ALL_LOGPROBS,
    MAX_TOP_LOGPROBS,
    SamplingFields,
    num_candidates,
    warn_of_all,
)
from services.router.openai.structure import StructureFields
from services.router.prompts import MAX_INT32, prompts_schema, read_prompts
from services.router.request_model import UNSUPPORTED_FIELDS, RefusedFields
from services.router.request_warnings import Warnings

USUAL_MAX_TOKENS = 16  # OpenAI's, where the client names no number


def _read_prompts(value: Any, info: ValidationInfo) -> tuple[PromptSource, ...]:
    adds = info.data.get("add_special_tokens") is not False
    return read_prompts(value, "prompt", adds, _check_number)


def _check_number(prompts: list[Any]) -> None:
    if not prompts:
        raise bad_field("prompt", "should not be empty", "empty_array")
    if len(prompts) > MAX_PROMPTS:
        most = f"may have {MAX_PROMPTS} prompts at most"
        raise bad_field("prompt", f"{most} (it has {len(prompts)})")


_CHAT_ONLY = "it is a field of chat requests"


class CompletionFields(StructureFields, SamplingFields):
    """A completion request."""

    refused: ClassVar[Mapping[str, RefusedFields]] = {
        **UNSUPPORTED_FIELDS,
        "messages": RefusedFields(why="use prompt, or /v1/chat/completions"),
        "max_completion_tokens": RefusedFields(why="use max_tokens"),
        "top_logprobs": RefusedFields((0,), "use logprobs with a number"),
        "tools": RefusedFields(([],), _CHAT_ONLY),
        "tool_choice": RefusedFields(("none", "auto"), _CHAT_ONLY),
        "functions": RefusedFields(([],), _CHAT_ONLY),
        "function_call": RefusedFields(("none", "auto"), _CHAT_ONLY),
        "reasoning_effort": RefusedFields(why=_CHAT_ONLY),
        "thinking_token_budget": RefusedFields((-1,), _CHAT_ONLY),
        "chat_template_kwargs": RefusedFields(({},), _CHAT_ONLY),
        "documents": RefusedFields(([],), _CHAT_ONLY),
        "continue_final_message": RefusedFields((False,), _CHAT_ONLY),
    }

    prompt: Annotated[
        Any,  # a tuple of PromptSource, whose arrays pydantic does not know
        PlainValidator(_read_prompts),
        WithJsonSchema(prompts_schema(MAX_PROMPTS)),
    ] = Field(
        description=f"a text, token ids, or an array of up to {MAX_PROMPTS:,} of either; "
        "`add_special_tokens` says whether special tokens are added to a text"
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_INT32,
        description=f"the most tokens to generate, {USUAL_MAX_TOKENS} where nothing is said; 0 "
        "with `echo` alone",
    )
    logprobs: int | None = Field(
        None,
        ge=ALL_LOGPROBS,
        le=MAX_TOP_LOGPROBS,
        description="the probability of each token, and of so many others; -1 is "
        f"{MAX_TOP_LOGPROBS}",
    )
    echo: bool | None = Field(
        None, description="the prompt comes back before the answer, with `logprobs` scored"
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "should be greater than or equal to 1 (it is 0)")
        if self.max_tokens == 0 and self.min_tokens:
            raise bad_field("min_tokens", "must not exceed max_tokens, which is 0")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """A completion request: what to generate and how to answer."""

    options: AnswerOptions
    echo: bool


def parse_completion(body: dict[str, Any], warnings: Warnings) -> CompletionRequest:
    """Validate a completion request; ApiError 400 names the field at fault.

    With `echo`, `max_tokens` may be 0: then the prompt is all of the answer. Where its logprobs or
    ids are wanted, too, the ring has to see it, and makes one token that nobody is shown.
    """
    fields = CompletionFields.read(body, warnings)
    num_choices = fields.n or 1
    prompts: tuple[PromptSource, ...] = fields.prompt
    if len(prompts) * num_choices > MAX_ALL_CHOICES:
        raise bad_field(
            "n",
            f"times the number of prompts may be {MAX_ALL_CHOICES} at most "
            f"(it is {num_choices} x {len(prompts)})",
        )
    sampling = _sampling(fields)
    needs_ring = sampling.num_prompt_logprobs >= 0 or bool(fields.return_token_ids)
    prompt_alone = fields.max_tokens == 0
    if prompt_alone and needs_ring:
        sampling = replace(sampling, max_tokens=1)
    request = GenerateRequest(
        model=fields.model or "",
        prompts=prompts,
        prompt_field="prompt",
        sampling=sampling,
        has_seed=fields.seed is not None,
        stream=fields.stream_settings(),
        num_choices=num_choices,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        unset=fields.unset,
        usual_max_tokens=max(USUAL_MAX_TOKENS, fields.min_tokens or 0),
        prompt_only=prompt_alone and not needs_ring,
        rules=make_rules(
            fields.structure, None, warnings, -1, fields.allowed_ids, fields.bad_words
        ),
        truncate_to=fields.truncate_prompt_tokens or 0,
        truncate_side=fields.truncation_side or "left",
    )
    fields.warn(warnings)
    warn_of_all("logprobs", fields.logprobs, warnings)
    options = replace(fields.options(), prompt_alone=prompt_alone)
    return CompletionRequest(
        generate=request,
        streaming=bool(fields.stream),
        given_id=options.given_id,
        wants_ids=options.needs_ids,
        options=options,
        echo=bool(fields.echo),
    )


def _sampling(fields: CompletionFields) -> SamplingParams:
    """Return the sampling settings; an echo has logprobs where the answer has them."""
    num_logprobs = num_candidates(fields.logprobs)
    sampling = fields.sampling(fields.max_tokens or 0, num_logprobs)
    if not fields.echo or num_logprobs <= sampling.num_prompt_logprobs:
        return sampling
    return replace(sampling, num_prompt_logprobs=num_logprobs)
