"""`/v1/completions`: its request and its endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from aiohttp import web
from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from common.messages.arrays import int32s
from common.messages.failure import Ending, Usage
from common.messages.logprobs import Candidate
from common.messages.sampling import SamplingParams
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from common.telemetry import trace
from services.router.admission import AdmissionTicket
from services.router.answer import CompleteAnswer
from services.router.dispatch import Dispatch
from services.router.endpoint import ApiRequest, Call, Endpoint, caller_of, json_response, prepare
from services.router.errors import bad_field
from services.router.generate_request import MAX_ALL_CHOICES, MAX_PROMPTS, GenerateRequest
from services.router.generation import STREAM_HEADERS, RequestContext, response_head
from services.router.groups import Group
from services.router.middleware import WARNINGS
from services.router.openai.chunks import AnswerOptions
from services.router.openai.completion_format import CompletionFormat, Echo
from services.router.openai.rules import make_rules
from services.router.openai.sampling import (
    MAX_TOP_LOGPROBS,
    NumLogprobs,
    SamplingFields,
    num_candidates,
    warn_of_all,
)
from services.router.openai.structure import StructureFields
from services.router.prompts import MAX_INT32, prompts_schema, read_prompts
from services.router.request_model import UNSUPPORTED_FIELDS, RefusedFields
from services.router.request_warnings import Warnings
from services.router.sse import AnswerFormat

USUAL_MAX_TOKENS = 16  # OpenAI's default


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
        description=f"the most tokens to generate, {USUAL_MAX_TOKENS} by default; 0 "
        "with `echo` alone",
    )
    logprobs: NumLogprobs = Field(
        None,
        description="log probabilities of each token and of this many of the most likely, up to "
        f"{MAX_TOP_LOGPROBS}; -1 means {MAX_TOP_LOGPROBS}",
    )
    echo: bool | None = None
    """repeat the prompt before the answer; with `logprobs` it is scored"""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "should be greater than or equal to 1 (it is 0)")
        if self.max_tokens == 0 and self.min_tokens:
            raise bad_field("min_tokens", "must not exceed max_tokens, which is 0")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ApiRequest):
    options: AnswerOptions
    echo: bool


def parse_completion(body: dict[str, Any], warnings: Warnings) -> CompletionRequest:
    """Validate a completion request; ApiError 400 names the field at fault.

    With `echo`, `max_tokens` may be 0: then the prompt is the whole answer. If its logprobs or ids
    are wanted, too, it has to go round the ring, and the one generated token is not shown.
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
    rules = make_rules(fields.structure, None, warnings, -1, fields.allowed_ids, fields.bad_words)
    request = fields.generate_request(
        prompts=prompts,
        prompt_field="prompt",
        sampling=sampling,
        stream=fields.stream_settings(),
        rules=rules,
        usual_max_tokens=max(USUAL_MAX_TOKENS, fields.min_tokens or 0),
        prompt_only=prompt_alone and not needs_ring,
    )
    fields.warn(warnings)
    warn_of_all("logprobs", fields.logprobs, warnings)
    options = replace(fields.options(), prompt_alone=prompt_alone)
    return CompletionRequest(
        generate=request,
        streaming=bool(fields.stream),
        given_id=fields.given_id,
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


async def _complete(call: Call[CompletionRequest]) -> web.StreamResponse:
    """Continue the prompts; those that are only echoed do not go round the ring."""
    dispatch, parsed = call.backend.dispatch, call.parsed
    caller = caller_of(call)
    group = await dispatch.available(parsed.generate.model, caller)
    request = parsed.generate.with_defaults(group.card.sampling_defaults)
    echoes: list[Echo] = []
    ticket: AdmissionTicket | None = None
    with contextlib.ExitStack() as held:
        if parsed.echo:  # its prompts are tokenized first, which has to be admitted, too
            ticket = dispatch.admit(caller, request, group)
            held.callback(dispatch.release, ticket)
            goes_on = not parsed.options.prompt_alone
            async with dispatch.within(caller):
                request, echoes = await _with_echo(dispatch, group, request, goes_on)
        lengths = []
        if request.prompt_only:
            async with dispatch.within(caller):
                lengths = await dispatch.queries.prompt_lengths(request, group)
        head = response_head("cmpl-", group, parsed.given_id)
        layout = CompletionFormat(
            head, request.num_all_choices, parsed.options, echoes, len(request.prompts)
        )
        context = prepare(call, caller, group, request, layout, head.id)
        if request.prompt_only:
            return _echoed(context, lengths, parsed.streaming)
        held.pop_all()  # the answer releases it
    context = replace(context, ticket=ticket)
    return await call.backend.generation.answer(call.request, context, parsed.streaming)


async def _with_echo(
    dispatch: Dispatch, group: Group, request: GenerateRequest, goes_on: bool
) -> tuple[GenerateRequest, list[Echo]]:
    """Return the texts of the prompts; ApiError if a worker cannot make them.

    Prompts that are cut or shown token by token are tokenized here, so that the returned request
    has exactly the echoed tokens. If the answer `goes_on`, a character that the prompt leaves
    unfinished is not part of its echo: the answer has all of it or none.
    """
    by_token = request.sampling.num_logprobs >= 0
    echoes: list[Echo] = []
    prompts: list[PromptSource] = []
    firsts: dict[int, str] = {}
    kept = request.num_kept_tokens(group.card)
    for number, prompt in enumerate(request.prompts):
        field = request.field_of(number)
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        if isinstance(prompt, TextPrompt) and (by_token or kept):
            answer = await dispatch.queries.tokenize(group, prompt, field, False)
            prompt = IdsPrompt(answer.ids)
        if isinstance(prompt, IdsPrompt):
            ids = prompt.ids
            if 0 < kept < len(ids):
                ids = ids[-kept:] if request.truncate_side == "left" else ids[:kept]
                prompt, text = IdsPrompt(ids), None
            if text is None:
                text = await dispatch.queries.detokenize(group, prompt, field, goes_on)
            if by_token and len(ids) and ids[0] not in firsts:
                alone = IdsPrompt(int32s(ids[:1]))
                firsts[ids[0]] = await dispatch.queries.detokenize(group, alone, field)
        assert text is not None  # a chat has no echo
        prompts.append(prompt)
        first = None
        if by_token and isinstance(prompt, IdsPrompt) and len(prompt.ids):
            first = _first(prompt.ids[0], firsts[prompt.ids[0]], text)
        echoes.append(Echo(text, first))
    return replace(request, prompts=tuple(prompts), truncate_to=0), echoes


def _first(token_id: int, name: str, text: str) -> Candidate:
    """Describe a first token; one that the tokenizer added is not part of the text."""
    data = name.encode() if text.startswith(name) else b""
    return Candidate(token_id, name, data, 0.0)


def _echoed(
    context: RequestContext[AnswerFormat], lengths: Sequence[int], streaming: bool
) -> web.Response:
    """Answer with the prompts alone; a stream has all its events at once."""
    request, layout = context.request, context.layout
    ended = Ending("length", Usage(0, 0, 0))
    usage = Usage(sum(lengths), 0, 0)
    context.span.set_response(usage, [ended.reason] * request.num_all_choices)
    if not streaming:
        answers = [CompleteAnswer("", None, ended)] * request.num_all_choices
        return json_response(layout.body(answers, usage))
    events: list[bytes] = []
    for choice in range(request.num_all_choices):
        events += (layout.opening(choice, None), layout.ending(choice, ended))
    events.append(layout.closing(usage))
    return web.Response(body=b"".join(events), headers=STREAM_HEADERS)


COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions",
    lambda body, request: parse_completion(body, request[WARNINGS]),
    _complete,
    trace.TEXT_COMPLETION,
    adopts_request_id=True,
)
