"""`/v1/messages` requests: from a JSON object to a GenerateRequest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, StreamSettings, Structure
from services.router.anthropic.conversation import ROLES, read_conversation
from services.router.endpoint import ApiRequest
from services.router.errors import bad_field
from services.router.generate_request import GenerateRequest
from services.router.json_schema import OBJECT, STRING, array, either, nullable, one_of, partial
from services.router.openai.rules import make_rules, with_schema
from services.router.openai.sampling import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MODEL_DEFAULTS,
    SEED_MASK,
    Timeout,
    check_all_stops,
)
from services.router.openai.structure import schema_structure
from services.router.openai.template import thinking_kwargs
from services.router.openai.tools import (
    MAX_TOOLS,
    Choice,
    ToolChoice,
    Tools,
    check_function,
    check_names,
    make_tools,
)
from services.router.prompts import MAX_INT32
from services.router.request_fields import (
    MAX_MESSAGES,
    check_type,
    choice_in,
    object_at,
    objects_at,
    tool_name_in,
    unsupported_type,
)
from services.router.request_model import IGNORED, WARNED, RequestModel
from services.router.request_warnings import Warnings

SCHEMA: Final = "input_schema"
_CHOICES: Final[Mapping[str, Choice]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}
# Tools that Anthropic runs or defines: their types end with a date, except for these two.
_SERVER_TOOLS = re.compile(r"[a-z][a-z_]{1,48}_\d{8}|tool_search_tool_\w{1,32}|mcp_toolset")
# Hints, and servers that only Anthropic can call: a request can be answered without them.
WITHOUT_EFFECT: Final = ("container", "context_management", "mcp_servers")


_BLOCKS: Final = either(STRING, array(OBJECT))
_MESSAGE: Final = partial(role=one_of(*ROLES), content=_BLOCKS)


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    """`output_config.format`, or `output_format`, its older place."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(RequestModel):
    user_id: str | None = None


class PromptFields(RequestModel):
    """The fields that make the prompt: those of `/v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=512, description="one of `/v1/models`")
    messages: Annotated[Any, WithJsonSchema(array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES))]
    """turns of user, assistant and system; a text, or blocks"""
    system: Annotated[Any, WithJsonSchema(nullable(_BLOCKS))] = None
    """the system prompt; a text, or blocks"""
    tools: Annotated[Any, WithJsonSchema(nullable(array(OBJECT, maxItems=MAX_TOOLS)))] = None
    """[tools](tools.md) that the answer may call"""
    tool_choice: Annotated[Any, WithJsonSchema(nullable(OBJECT))] = None
    """whether the answer may, must or must not call a [tool](tools.md), and which one"""
    thinking: Thinking | None = None
    """[reasoning](tools.md#reasoning), which is off unless it is requested"""
    output_config: OutputConfig | None = None
    """`effort`, and a `format` that [the answer must match](structured.md)"""
    output_format: OutputFormat | None = None
    """the older place of `output_config.format`"""
    container: Any = Field(None, description=WARNED)
    context_management: Any = Field(None, description=WARNED)
    mcp_servers: Any = Field(None, description=WARNED)
    betas: Any = Field(None, description=IGNORED)
    cache_control: Any = Field(None, description=IGNORED)
    diagnostics: Any = Field(None, description=IGNORED)
    inference_geo: Any = Field(None, description=IGNORED)
    service_tier: Any = Field(None, description=IGNORED)
    speed: Any = Field(None, description=IGNORED)
    user_profile_id: Any = Field(None, description=IGNORED)
    workspace_id: Any = Field(None, description=IGNORED)

    @property
    def thinks(self) -> bool:
        """Whether reasoning is requested; as with Anthropic, the default is no."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinks and self.thinking is not None and self.thinking.display != "omitted"

    @property
    def structure(self) -> Structure | None:
        if self.output_config is not None and self.output_config.format is not None:
            schema, field = self.output_config.format.json_schema, "output_config.format.schema"
        elif self.output_format is not None:
            schema, field = self.output_format.json_schema, "output_format.schema"
        else:
            return None
        return schema_structure(schema, field)

    def prompt(self, tools: Tools, warnings: Warnings) -> ChatPrompt:
        conversation = read_conversation(self.system, self.messages, warnings)
        continues = conversation.ends_with_assistant
        effort = None if self.output_config is None else self.output_config.effort
        prompt = ChatPrompt(
            messages_json=conversation.pack(),
            tools_json=tools.json,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs_json=thinking_kwargs(self.thinks, effort),
        )
        return with_schema(prompt, self.structure, tools.use)


class MessageFields(PromptFields):
    """The fields of `/v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_INT32)
    """the most tokens to generate, or as many as fit if that is less"""
    stream: bool | None = None
    """events instead of one body"""
    temperature: float | None = Field(None, ge=0.0, le=1.0)
    """how random the choice of tokens is, from 0 to 1; by default the model's own"""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """sample among the likeliest tokens of this total probability; by default the model's own"""
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    """sample among this many of the likeliest, 0 for all; by default the model's own"""
    seed: int | None = Field(None, ge=-(1 << 63), le=SEED_MASK)
    """the same seed gives the same random numbers"""
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = Field(None, description=f"up to {MAX_STOPS} texts that end the answer")
    metadata: Metadata | None = Field(None, description=IGNORED)
    timeout: Timeout = None

    @property
    def thinking_budget(self) -> int:
        """The most tokens of reasoning, -1 for no limit; ApiError 400."""
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return -1
        where = "thinking.budget_tokens"
        if thinking.budget_tokens is None:
            raise bad_field(where, "is required", "missing_required_parameter")
        if thinking.budget_tokens >= self.max_tokens:
            raise bad_field(where, f"must be less than max_tokens, which is {self.max_tokens}")
        return thinking.budget_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(ApiRequest):
    max_tokens: int
    shows_thinking: bool


def parse_message(body: dict[str, Any], warnings: Warnings) -> MessageRequest:
    """Validate a request; ApiError 400 names the field at fault.

    Anthropic requires `max_tokens`, and clients send what the largest models take. It is an upper
    bound here: if less fits, that much is generated, and the answer says why it ended.
    """
    fields = MessageFields.read(body)
    tools = read_tools(fields.tools, fields.tool_choice, warnings)
    stops = fields.stop_sequences or ()
    check_all_stops(stops, "stop_sequences")
    request = GenerateRequest(
        model=fields.model,
        prompts=(fields.prompt(tools, warnings),),
        prompt_field="messages",
        sampling=SamplingParams(
            max_tokens=0,  # as many as fit, at most `usual_max_tokens`
            seed=0 if fields.seed is None else fields.seed & SEED_MASK,
            temperature=1.0 if fields.temperature is None else float(fields.temperature),
            top_p=1.0 if fields.top_p is None else float(fields.top_p),
            top_k=fields.top_k or 0,
        ),
        has_seed=fields.seed is not None,
        stream=StreamSettings(
            stop=tuple(dict.fromkeys(stops)),
            parse_tools=tools.use is not None,
            parse_reasoning=True,
        ),
        unset=frozenset(name for name in MODEL_DEFAULTS if getattr(fields, name, None) is None),
        usual_max_tokens=fields.max_tokens,
        timeout_s=fields.timeout or 0.0,
        rules=make_rules(fields.structure, tools, warnings, fields.thinking_budget),
    )
    _warn(fields, body, warnings)
    return MessageRequest(
        generate=request,
        streaming=bool(fields.stream),
        max_tokens=fields.max_tokens,
        shows_thinking=fields.shows_thinking,
    )


def parse_prompt(body: dict[str, Any], warnings: Warnings) -> tuple[str, ChatPrompt]:
    """Validate a count_tokens request; returns the model's name and the prompt."""
    fields = PromptFields.read(body)
    tools = read_tools(fields.tools, fields.tool_choice, warnings)
    prompt = fields.prompt(tools, warnings)
    _warn(fields, body, warnings)
    return fields.model, prompt


def _warn(fields: PromptFields, body: dict[str, Any], warnings: Warnings) -> None:
    for name in WITHOUT_EFFECT:
        if getattr(fields, name) not in (None, [], {}):
            warnings.add(name, "has no effect here")
    MessageFields.check_others(body, warnings)  # clients count with the fields of a message


def read_tools(tools: Any, tool_choice: Any, warnings: Warnings) -> Tools:
    """Check and translate both fields; ApiError 400 names the tool at fault.

    Tools that Anthropic runs or defines are left out, and so is a choice of one of them.
    """
    functions, places, hosted_names = [], [], set()
    expected = f"an array of at most {MAX_TOOLS} tools"
    for tool, where in objects_at([] if tools is None else tools, "tools", expected, MAX_TOOLS):
        kind = tool.get("type")
        if isinstance(kind, str) and _SERVER_TOOLS.fullmatch(kind):
            warnings.add(where, f"tools of the type {kind} do not run here; left out")
            hosted_names.add(str(tool.get("name")))
        elif kind in (None, "custom"):
            places.append(where)
            functions.append(_function(tool, where))
        else:
            raise unsupported_type(kind, where, "; only custom tools are")
    check_names(functions, places)
    choice, parallel = _choice(tool_choice)
    if hosted_names and (not functions or choice.name in hosted_names):
        if choice.choice != "none":
            choice = ToolChoice()
    elif not functions and choice.choice in ("required", "named"):
        raise bad_field("tool_choice", "is only allowed together with tools")
    return make_tools(functions, choice, parallel, "tool_choice.name")


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a tool and translate it into a function as OpenAI defines it."""
    if tool.get(SCHEMA) is None:
        raise bad_field(f"{where}.{SCHEMA}", "is required", "missing_required_parameter")
    check_function(tool, where, SCHEMA)
    function = {"name": tool["name"], "parameters": tool[SCHEMA]}
    optional = ("description", "strict")
    return function | {name: tool[name] for name in optional if tool.get(name) is not None}


def _choice(value: Any) -> tuple[ToolChoice, bool]:
    """Read a choice, and whether parallel calls are allowed."""
    if value is None:
        return ToolChoice(), True
    single = object_at(value, "tool_choice").get("disable_parallel_tool_use")
    check_type(single, bool | None, "tool_choice.disable_parallel_tool_use", "true or false")
    kind = choice_in(value, "type", _CHOICES, "tool_choice")
    name = tool_name_in(value, "tool_choice") if kind == "tool" else ""
    return ToolChoice(_CHOICES[kind], name), not single
