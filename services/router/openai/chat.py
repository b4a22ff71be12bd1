"""`/v1/chat/completions` requests: from a JSON object to a Job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, StreamSettings
from services.router.endpoint import ApiRequest
from services.router.errors import bad_field, from_validation
from services.router.generate_request import GenerateRequest
from services.router.openai.chat_messages import final_words, pack_messages
from services.router.openai.fields import Refused, check_unknown, refuse_unsupported
from services.router.openai.options import AnswerOptions
from services.router.openai.rules import make_rules
from services.router.openai.sampling_fields import (
    ALL_LOGPROBS,
    MAX_INT32,
    MAX_TOP_LOGPROBS,
    SamplingFields,
    num_candidates,
    parse_sampling,
    warn_of_all,
)
from services.router.openai.schema_prompt import with_schema
from services.router.openai.structure import STRUCTURE_FIELDS, parse_structure
from services.router.openai.template_fields import Effort, pack_variables
from services.router.openai.tools import Tools, parse_functions, parse_tools
from services.router.request_warnings import Warnings


class ChatFields(BaseModel):
    """Fields that only chat requests have."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    echo: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=ALL_LOGPROBS, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Any = None
    documents: Any = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT32)
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


NOT_FOR_CHAT: Mapping[str, Refused] = {
    "prompt": Refused(why="use messages, or /v1/completions"),
    "add_special_tokens": Refused((False,), "the chat template writes them"),
}
KNOWN_FIELDS = (
    frozenset(ChatFields.model_fields)
    | frozenset(SamplingFields.model_fields)
    | frozenset(STRUCTURE_FIELDS)
    | frozenset(NOT_FOR_CHAT)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A chat request: what to generate and how to answer."""

    options: AnswerOptions


def parse_chat(body: dict[str, Any], warnings: Warnings) -> ChatRequest:
    """Validate a chat request; ApiError 400 names the field at fault."""
    shared = parse_sampling(body)
    chat = parse_fields(body)
    refuse_unsupported(body, NOT_FOR_CHAT)
    tools = chat_tools(chat)
    structure = parse_structure(body)
    budget = chat.thinking_token_budget
    job = GenerateRequest(
        model=shared.model or "",
        prompts=(with_schema(chat_prompt(chat, tools), structure, tools.use),),
        prompt_field="messages",
        sampling=_sampling(shared, chat),
        has_seed=shared.seed is not None,
        stream=_stream_settings(shared, chat, tools),
        num_choices=shared.n or 1,
        priority=shared.priority or 0,
        cache_salt=shared.cache_salt or "",
        unset=shared.unset,
        max_tokens_field="max_tokens" if shared.max_tokens else "max_completion_tokens",
        rules=make_rules(
            structure,
            tools,
            warnings,
            -1 if budget is None else budget,
            shared.allowed_ids,
            shared.banned_words,
        ),
        truncate_to=shared.truncate_prompt_tokens or 0,
        truncate_side=shared.truncation_side or "left",
    )
    check_unknown(body, KNOWN_FIELDS, warnings)
    shared.warn(warnings)
    warn_of_all("top_logprobs", chat.top_logprobs, warnings)
    options = replace(
        shared.options(),
        include_reasoning=chat.include_reasoning is not False,
        named_tool=tools.use is not None and tools.use.choice == "named",
        functions=bool(chat.functions),
        echo=final_words(chat.messages) if chat.echo else "",
        prompt_logprobs=job.sampling.num_prompt_logprobs >= 0,
    )
    return ChatRequest(
        job=job,
        streaming=bool(shared.stream),
        given_id=options.given_id,
        wants_ids=options.needs_ids,
        options=options,
    )


def parse_fields(body: dict[str, Any]) -> ChatFields:
    """Validate what only chat (and /tokenize) requests have; ApiError 400."""
    try:
        return ChatFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def chat_tools(chat: ChatFields) -> Tools:
    """Read the tools of a chat or /tokenize request, in today's form or that of before."""
    if chat.functions not in (None, []) or chat.function_call is not None:
        if chat.tools:
            raise bad_field("functions", "cannot be used together with tools")
        return parse_functions(chat.functions, chat.function_call)
    return parse_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)


def chat_prompt(chat: ChatFields, tools: Tools) -> ChatPrompt:
    """Check and pack the conversation of a chat or /tokenize request."""
    continues = bool(chat.continue_final_message)
    adds = (not continues) if chat.add_generation_prompt is None else chat.add_generation_prompt
    if continues and adds:
        raise bad_field(
            "continue_final_message", "cannot be used together with add_generation_prompt"
        )
    return ChatPrompt(
        messages_json=pack_messages(chat.messages),
        tools_json=tools.json,
        add_generation_prompt=adds,
        continue_final_message=continues,
        template_kwargs_json=pack_variables(
            chat.chat_template_kwargs, chat.documents, chat.reasoning_effort
        ),
    )


def _stream_settings(shared: SamplingFields, chat: ChatFields, tools: Tools) -> StreamSettings:
    """Return the detokenizer's settings; reasoning that is not to be shown must be found first."""
    return replace(
        shared.stream_settings(),
        parse_tools=tools.use is not None,
        parse_reasoning=chat.separate_reasoning is not False or chat.include_reasoning is False,
    )


def _sampling(shared: SamplingFields, chat: ChatFields) -> SamplingParams:
    """Return the sampling settings; an echo has logprobs where the answer has them, as in vLLM."""
    num_logprobs = _num_logprobs(chat)
    sampling = shared.sampling(_max_tokens(shared, chat), num_logprobs)
    if not chat.echo or shared.stream or shared.prompt_logprobs is not None:
        return sampling
    return replace(sampling, num_prompt_logprobs=num_logprobs)


def _max_tokens(shared: SamplingFields, chat: ChatFields) -> int:
    """Resolve the two names of one limit; 0, as much as fits, where neither is given."""
    old, new = shared.max_tokens, chat.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_field("max_completion_tokens", f"contradicts max_tokens, which is {old}")
    return new or old or 0


def _num_logprobs(chat: ChatFields) -> int:
    if not chat.logprobs:
        if chat.top_logprobs:
            raise bad_field("top_logprobs", "is only allowed together with logprobs: true")
        return -1
    return num_candidates(chat.top_logprobs or 0)
