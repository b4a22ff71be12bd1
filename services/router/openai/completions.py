"""`/v1/completions` requests: from a JSON object to a Job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.arrays import int32s
from common.messages.sampling import SamplingParams
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from services.router.endpoint import ApiRequest
from services.router.errors import bad_field, from_validation, shown
from services.router.generate_request import MAX_ALL_CHOICES, MAX_PROMPTS, GenerateRequest
from services.router.openai.fields import Refused, check_unknown, refuse_unsupported
from services.router.openai.options import AnswerOptions
from services.router.openai.rules import make_rules
from services.router.openai.sampling_fields import (
    ALL_LOGPROBS,
    MAX_TOP_LOGPROBS,
    SamplingFields,
    num_candidates,
    parse_sampling,
    warn_of_all,
)
from services.router.openai.structure import STRUCTURE_FIELDS, parse_structure
from services.router.request_warnings import Warnings
from services.router.token_ids import check_ids

USUAL_MAX_TOKENS = 16  # OpenAI's, where the client names no number


class CompletionFields(BaseModel):
    """Fields that only completion requests have."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=ALL_LOGPROBS, le=MAX_TOP_LOGPROBS)


_CHAT_ONLY = "it is a field of chat requests"
NOT_FOR_COMPLETIONS: Mapping[str, Refused] = {
    "messages": Refused(why="use prompt, or /v1/chat/completions"),
    "max_completion_tokens": Refused(why="use max_tokens"),
    "top_logprobs": Refused((0,), "use logprobs with a number"),
    "tools": Refused(([],), _CHAT_ONLY),
    "tool_choice": Refused(("none", "auto"), _CHAT_ONLY),
    "functions": Refused(([],), _CHAT_ONLY),
    "function_call": Refused(("none", "auto"), _CHAT_ONLY),
    "reasoning_effort": Refused(why=_CHAT_ONLY),
    "thinking_token_budget": Refused((-1,), _CHAT_ONLY),
    "chat_template_kwargs": Refused(({},), _CHAT_ONLY),
    "documents": Refused(([],), _CHAT_ONLY),
    "continue_final_message": Refused((False,), _CHAT_ONLY),
}
KNOWN_FIELDS = (
    frozenset(CompletionFields.model_fields)
    | frozenset(SamplingFields.model_fields)
    | frozenset(STRUCTURE_FIELDS)
    | frozenset(NOT_FOR_COMPLETIONS)
)


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
    shared = parse_sampling(body, may_be_empty=body.get("echo") is True)
    try:
        fields = CompletionFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    refuse_unsupported(body, NOT_FOR_COMPLETIONS)
    if shared.max_tokens == 0 and shared.min_tokens:
        raise bad_field("min_tokens", "must not exceed max_tokens, which is 0")
    num_choices = shared.n or 1
    prompts = parse_prompts(fields.prompt, shared.add_special_tokens is not False)
    if len(prompts) * num_choices > MAX_ALL_CHOICES:
        raise bad_field(
            "n",
            f"times the number of prompts may be {MAX_ALL_CHOICES} at most "
            f"(it is {num_choices} x {len(prompts)})",
        )
    sampling = _sampling(shared, fields)
    needs_ring = sampling.num_prompt_logprobs >= 0 or bool(shared.return_token_ids)
    prompt_alone = shared.max_tokens == 0
    if prompt_alone and needs_ring:
        sampling = replace(sampling, max_tokens=1)
    job = GenerateRequest(
        model=shared.model or "",
        prompts=prompts,
        prompt_field="prompt",
        sampling=sampling,
        has_seed=shared.seed is not None,
        stream=shared.stream_settings(),
        num_choices=num_choices,
        priority=shared.priority or 0,
        cache_salt=shared.cache_salt or "",
        unset=shared.unset,
        usual_max_tokens=max(USUAL_MAX_TOKENS, shared.min_tokens or 0),
        prompt_only=prompt_alone and not needs_ring,
        rules=make_rules(
            parse_structure(body), None, warnings, -1, shared.allowed_ids, shared.banned_words
        ),
        truncate_to=shared.truncate_prompt_tokens or 0,
        truncate_side=shared.truncation_side or "left",
    )
    check_unknown(body, KNOWN_FIELDS, warnings)
    shared.warn(warnings)
    warn_of_all("logprobs", fields.logprobs, warnings)
    options = replace(shared.options(), prompt_alone=prompt_alone)
    return CompletionRequest(
        job=job,
        streaming=bool(shared.stream),
        given_id=options.given_id,
        wants_ids=options.needs_ids,
        options=options,
        echo=bool(fields.echo),
    )


def _sampling(shared: SamplingFields, fields: CompletionFields) -> SamplingParams:
    """Return the sampling settings; an echo has logprobs where the answer has them."""
    num_logprobs = num_candidates(fields.logprobs)
    sampling = shared.sampling(shared.max_tokens or 0, num_logprobs)
    if not fields.echo or num_logprobs <= sampling.num_prompt_logprobs:
        return sampling
    return replace(sampling, num_prompt_logprobs=num_logprobs)


def parse_prompts(prompt: Any, add_special_tokens: bool = True) -> tuple[PromptSource, ...]:
    """Read a prompt in any of OpenAI's forms: a text, ids, or a list of either."""
    if isinstance(prompt, str):
        return (_text(prompt, "prompt", add_special_tokens),)
    if not isinstance(prompt, list):
        raise bad_field(
            "prompt",
            f"should be a string, an array of token ids, or an array of either "
            f"(it is {shown(prompt)})",
        )
    if not prompt:
        raise bad_field("prompt", "should not be empty", "empty_array")
    if type(prompt[0]) is int:
        return (IdsPrompt(int32s(_ids(prompt, "prompt"))),)
    if len(prompt) > MAX_PROMPTS:
        raise bad_field("prompt", f"may have {MAX_PROMPTS} prompts at most (it has {len(prompt)})")
    sources: list[PromptSource] = []
    for at, each in enumerate(prompt):
        field = f"prompt[{at}]"
        if isinstance(each, str):
            sources.append(_text(each, field, add_special_tokens))
        elif isinstance(each, list):
            sources.append(IdsPrompt(int32s(_ids(each, field))))
        else:
            raise bad_field(
                field, f"should be a string or an array of token ids (it is {shown(each)})"
            )
    return tuple(sources)


def _text(text: str, field: str, add_special_tokens: bool) -> TextPrompt:
    if not text:
        raise bad_field(field, "should not be empty", "empty_string")
    return TextPrompt(text, add_special_tokens)


def _ids(ids: list[Any], field: str) -> list[int]:
    if not ids:
        raise bad_field(field, "should not be empty", "empty_array")
    check_ids(ids, field)
    return ids
