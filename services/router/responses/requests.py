"""`/v1/responses` requests, and the fields that a response repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from common.messages.tokenize import ChatPrompt, Structure
from services.router.endpoint import ApiRequest
from services.router.errors import bad_field, shown
from services.router.generate_request import TRUNCATE_TO_FIT, GenerateRequest
from services.router.json_schema import OBJECT, STRING, array, either, nullable, one_of
from services.router.openai.rules import make_rules, with_schema
from services.router.openai.sampling import MAX_TOP_LOGPROBS, SamplingFields, StreamOptions
from services.router.openai.structure import named_schema
from services.router.openai.template import Effort, budget_of, thinking_kwargs
from services.router.openai.tools import MAX_TOOLS
from services.router.prompts import MAX_INT32
from services.router.request_fields import UNSUPPORTED
from services.router.request_model import IGNORED, UNSUPPORTED_FIELDS, RefusedFields, RequestModel
from services.router.request_warnings import Warnings
from services.router.responses.input_items import pack_input, read_input
from services.router.responses.store import FORGETFUL, STORE_OFF, History
from services.router.responses.tools import ResponseTools, read_tools

REFUSED: Final[Mapping[str, RefusedFields]] = {
    "conversation": RefusedFields(why="use previous_response_id, or send the whole conversation"),
    "prompt": RefusedFields(why="it keeps no prompts: send its text as instructions or input"),
    "context_management": RefusedFields(([],), "use truncation"),
    "image": RefusedFields(({},)),
    "access_programs": RefusedFields(({},)),
    "n": RefusedFields((1,), "a response is one answer"),
    "max_tokens": RefusedFields(why="it is called max_output_tokens here"),
    "max_completion_tokens": RefusedFields(why="it is called max_output_tokens here"),
    "reasoning_effort": RefusedFields(why="it is called reasoning.effort here"),
    "response_format": RefusedFields(({"type": "text"},), "it is called text.format here"),
    "structured_outputs": RefusedFields(why="use text.format"),
    "truncate_prompt_tokens": RefusedFields(why="use truncation"),
    "prompt_logprobs": RefusedFields(why="/v1/completions has them"),
    "return_token_ids": RefusedFields((False,), "/v1/chat/completions has them"),
    "return_tokens_as_token_ids": RefusedFields((False,), "/v1/chat/completions has them"),
}
REPEATED: Final = "repeated in the response, without effect"
_MODES: Final = one_of("none", "auto", "required")
PLAIN: Final = {"type": "text"}
FORMAT_FIELDS: Final = ("type", "name", "description", "schema", "strict")
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = frozenset(  # most are of items that no response here has
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class TextConfig(RequestModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    """`reasoning`; a `summary` has no effect, since no model here writes summaries."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


def _check_include(include: list[str] | None) -> list[str] | None:
    for at, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise bad_field(f"include[{at}]", f"{shown(name)} is nothing that can be included")
    return include


class ResponsesFields(SamplingFields):
    """The fields of a Responses request."""

    refused: ClassVar[Mapping[str, RefusedFields]] = {**UNSUPPORTED_FIELDS, **REFUSED}

    input: Annotated[Any, WithJsonSchema(either(STRING, array(OBJECT, minItems=1)))]
    """a text, or an array of items"""
    instructions: str | None = None
    """the system message"""
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    """the most tokens to generate, by default as many as fit"""
    tools: Annotated[Any, WithJsonSchema(nullable(array(OBJECT, maxItems=MAX_TOOLS)))] = None
    """[tools](#tools) that the answer may call"""
    tool_choice: Annotated[Any, WithJsonSchema(nullable(either(_MODES, OBJECT)))] = None
    """whether the answer may, must or must not call a [tool](#tools), and which one"""
    parallel_tool_calls: bool | None = None
    """false for one [call](#tools) at most"""
    max_tool_calls: int | None = Field(None, ge=1, description=IGNORED)  # no tools run here
    text: TextConfig | None = None
    """a `format` that [the answer must match](structured.md); `verbosity` has no effect"""
    reasoning: Reasoning | None = None
    """the `effort` of [reasoning](tools.md#reasoning); summaries are not written"""
    include: Annotated[list[str] | None, Field(max_length=32), AfterValidator(_check_include)] = (
        Field(None, description=f"`{LOGPROBS}`; the others are of items that no response has")
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """log probabilities of each token and of this many of the most likely, up to 20"""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` cuts off the beginning of a prompt that is too long"""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description=REPEATED)
    user: str | None = Field(None, description=REPEATED)
    safety_identifier: str | None = Field(None, description=REPEATED)
    prompt_cache_key: str | None = Field(None, description=REPEATED)
    background: bool | None = None
    """answer at once and generate [in the background](#in-the-background)"""
    store: bool | None = None
    """whether the response is [stored](#conversations), as it is by default"""
    previous_response_id: str | None = Field(None, max_length=256)
    """a stored response whose [conversation](#conversations) continues"""
    service_tier: str | None = Field(None, description=IGNORED)
    client_metadata: Any = Field(None, description=IGNORED)  # of Codex, for the operator
    truncation_side: Literal["left", "right"] | None = Field(None, description=IGNORED)
    add_special_tokens: bool | None = Field(None, description=IGNORED)
    stream: bool | None = None
    """events instead of one body"""
    stream_options: StreamOptions | None = Field(None, description=f"{IGNORED}; only with `stream`")
    request_id: str | None = None
    """1 to 128 letters, digits or `._:-`; returned as `X-Request-Id`, unless the request has that
    header"""

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, value in body.items():  # some have the names of sampling fields
            if name in cls.refused:
                cls.refused[name].check(name, value)
        return body

    @property
    def num_logprobs(self) -> int:
        """The number of candidates per token; -1 if no logprobs are requested."""
        if self.top_logprobs is None and LOGPROBS not in (self.include or ()):
            return -1
        return self.top_logprobs or 0

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The prompt, its items, and the tools and structure of the answer.

    The first `num_before` of the items come from previous responses.
    """

    prompt: ChatPrompt
    items: tuple[dict[str, Any], ...]
    num_before: int
    tools: ResponseTools
    structure: Structure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ApiRequest):
    fields: ResponsesFields
    input: ResponseInput
    is_stored: bool = False

    def echo(self, request: GenerateRequest) -> dict[str, Any]:
        """Build what the response repeats; `request` has the model's defaults in place.

        `store` tells whether the response is stored, whatever the request asked for.
        """
        fields = self.fields
        text = fields.text or TextConfig()
        layout = text.format or PLAIN
        shown_fields = FORMAT_FIELDS if layout["type"] == "json_schema" else ("type",)
        text_format = {field: layout.get(field) for field in shown_fields}
        return {
            "background": bool(fields.background),
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": fields.effort, "summary": None},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": request.sampling.temperature,
            "text": {"format": text_format, "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": list(self.input.tools.echo),
            "top_logprobs": max(0, fields.num_logprobs),
            "top_p": request.sampling.top_p,
            "truncation": fields.truncation or "disabled",
            "user": fields.user,
        }


def parse_response(
    body: dict[str, Any], warnings: Warnings, history: History = FORGETFUL
) -> ResponsesRequest:
    """Validate a request; ApiError 400 names the field at fault."""
    fields = ResponsesFields.read(body, warnings)
    response_input = _input(fields, warnings, history)
    tools = response_input.tools.offer
    stream, structure = fields.stream_settings(), response_input.structure
    budget = budget_of(fields.effort)
    request = fields.generate_request(
        prompts=(response_input.prompt,),
        prompt_field="input",
        sampling=fields.sampling(fields.max_output_tokens or 0, fields.num_logprobs),
        stream=replace(stream, parse_tools=tools.use is not None, parse_reasoning=True),
        rules=make_rules(structure, tools, warnings, budget, fields.allowed_ids, fields.bad_words),
        max_tokens_field="max_output_tokens",
        truncate_to=TRUNCATE_TO_FIT if fields.truncation == "auto" else 0,
        truncate_side="left",
    )
    fields.warn(warnings)
    is_stored = history.store.keeps and fields.store is not False
    if fields.background and not is_stored:
        why = "cannot be used together with store false" if history.store.keeps else STORE_OFF
        raise bad_field("background", why, UNSUPPORTED)
    if fields.store and not is_stored:
        warnings.add("store", STORE_OFF)
    return ResponsesRequest(
        generate=request,
        streaming=bool(fields.stream),
        fields=fields,
        input=response_input,
        is_stored=is_stored,
    )


def parse_input(
    body: dict[str, Any], warnings: Warnings, history: History = FORGETFUL
) -> tuple[str, ChatPrompt]:
    """Validate a request to count its input; returns the model's name and the prompt."""
    fields = ResponsesFields.read(body, warnings)
    return fields.model or "", _input(fields, warnings, history).prompt


def _input(fields: ResponsesFields, warnings: Warnings, history: History) -> ResponseInput:
    before = history.before(fields.previous_response_id) if fields.previous_response_id else ()
    items = (*before, *read_input(fields.input, history.item))
    places = [(item, f"input[{max(0, at - len(before))}]") for at, item in enumerate(items)]
    parallel = fields.parallel_tool_calls
    tools = read_tools(fields.tools, fields.tool_choice, parallel, warnings, places)
    structure = _structure(fields.text)
    effort = fields.effort
    prompt = ChatPrompt(
        messages_json=pack_input(fields.instructions, places),
        tools_json=tools.offer.json,
        template_kwargs_json=thinking_kwargs(None if effort is None else effort != "none", effort),
    )
    prompt = with_schema(prompt, structure, tools.offer.use)
    return ResponseInput(prompt, items, len(before), tools, structure)


def _structure(text: TextConfig | None) -> Structure | None:
    layout = (text and text.format) or PLAIN
    match layout.get("type"):
        case "text":
            return None
        case "json_object":
            return Structure("json_object", "", "text.format")
        case "json_schema":
            return named_schema(layout, "text.format")
        case other:
            kinds = "text, json_object or json_schema"
            raise bad_field("text.format.type", f"should be {kinds} (it is {shown(other)})")
