"""`/v1/messages` requests: from a JSON object to a Job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, OutputRules, StreamSettings, Structure
from services.router.anthropic.conversation import read_conversation
from services.router.anthropic.tools import read_tools
from services.router.errors import bad_field, from_validation
from services.router.job import Job
from services.router.openai.fields import check_unknown
from services.router.openai.rules import make_rules
from services.router.openai.sampling_fields import (
    MAX_INT32,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SEED_MASK,
    check_all_stops,
)
from services.router.openai.schema_prompt import with_schema
from services.router.openai.structure import schema_structure
from services.router.openai.tools import Tools
from services.router.request_warnings import Warnings
from services.router.thinking import thinking_kwargs

# Hints, and servers that only Anthropic's can ask: without them there is still an answer.
WITHOUT_EFFECT: Final = ("container", "context_management", "mcp_servers")
IGNORED: Final = frozenset(
    (
        "betas",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    )
)
_CONFIG = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class Thinking(BaseModel):
    """`thinking`."""

    model_config = _CONFIG

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    """`output_config.format`, or `output_format`, its older place."""

    model_config = _CONFIG

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`."""

    model_config = _CONFIG

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(BaseModel):
    """`metadata`, which is checked and has no effect."""

    model_config = _CONFIG

    user_id: str | None = None


class PromptFields(BaseModel):
    """The fields that make the prompt: those of `/v1/messages/count_tokens`."""

    model_config = _CONFIG

    model: str = Field(min_length=1, max_length=512)
    messages: Any
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def thinks(self) -> bool:
        """Whether reasoning was asked for; with Anthropic, silence is no."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer is to have it."""
        return self.thinks and self.thinking is not None and self.thinking.display != "omitted"


class MessageFields(PromptFields):
    """The fields of `/v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_INT32)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0.0, le=1.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=SEED_MASK)  # ours


KNOWN_FIELDS = frozenset(MessageFields.model_fields) | IGNORED | frozenset(WITHOUT_EFFECT)


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A Messages request: what to generate and how to answer."""

    job: Job
    streaming: bool
    max_tokens: int
    shows_thinking: bool


def parse_message(body: dict[str, Any], warnings: Warnings) -> MessageRequest:
    """Validate a request; ApiError 400 names the field at fault.

    `max_tokens` must be given and clients give what the largest models take, so it is an upper
    bound here: where less fits, that is generated and the answer says why it ended.
    """
    try:
        fields = MessageFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    tools = read_tools(fields.tools, fields.tool_choice, warnings)
    check_all_stops(fields.stop_sequences or (), "stop_sequences")
    job = Job(
        model=fields.model,
        prompts=(_prompt(fields, tools, warnings),),
        prompt_field="messages",
        sampling=_sampling(fields),
        has_seed=fields.seed is not None,
        stream=StreamSettings(
            stop=tuple(dict.fromkeys(fields.stop_sequences or ())),
            parse_tools=tools.use is not None,
            parse_reasoning=True,
        ),
        unset=frozenset(
            name for name in ("temperature", "top_p", "top_k") if getattr(fields, name) is None
        )
        | {"min_p", "repetition_penalty"},
        usual_max_tokens=fields.max_tokens,
        rules=_rules(fields, tools, warnings),
    )
    _warn(body, warnings)
    streaming = bool(fields.stream)
    return MessageRequest(job, streaming, fields.max_tokens, fields.shows_thinking)


def parse_prompt(body: dict[str, Any], warnings: Warnings) -> tuple[str, ChatPrompt]:
    """Validate a count_tokens request; returns the model's name and the prompt."""
    try:
        fields = PromptFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    prompt = _prompt(fields, read_tools(fields.tools, fields.tool_choice, warnings), warnings)
    _warn(body, warnings)
    return fields.model, prompt


def _warn(body: dict[str, Any], warnings: Warnings) -> None:
    for field in WITHOUT_EFFECT:
        if body.get(field) not in (None, [], {}):
            warnings.add(field, "has no effect here")
    check_unknown(body, KNOWN_FIELDS, warnings)


def _prompt(fields: PromptFields, tools: Tools, warnings: Warnings) -> ChatPrompt:
    conversation = read_conversation(fields.system, fields.messages, warnings)
    effort = None if fields.output_config is None else fields.output_config.effort
    prompt = ChatPrompt(
        messages_json=conversation.pack(),
        tools_json=tools.json,
        add_generation_prompt=not conversation.is_open,
        continue_final_message=conversation.is_open,
        template_kwargs_json=thinking_kwargs(fields.thinks, effort),
    )
    return with_schema(prompt, _structure(fields), tools.use)


def _sampling(fields: MessageFields) -> SamplingParams:
    return SamplingParams(
        max_tokens=0,  # as many as fit, and `usual_max_tokens` at most
        seed=0 if fields.seed is None else fields.seed & SEED_MASK,
        temperature=1.0 if fields.temperature is None else float(fields.temperature),
        top_p=1.0 if fields.top_p is None else float(fields.top_p),
        top_k=fields.top_k or 0,
    )


def _rules(fields: MessageFields, tools: Tools, warnings: Warnings) -> OutputRules:
    thinking = fields.thinking
    budget = -1
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_field("thinking.budget_tokens", "is required", "missing_required_parameter")
        if thinking.budget_tokens >= fields.max_tokens:
            raise bad_field(
                "thinking.budget_tokens",
                f"must be less than max_tokens, which is {fields.max_tokens}",
            )
        budget = thinking.budget_tokens
    return make_rules(_structure(fields), tools, warnings, budget)


def _structure(fields: PromptFields) -> Structure | None:
    wanted, field = fields.output_format, "output_format.schema"
    if fields.output_config is not None and fields.output_config.format is not None:
        wanted, field = fields.output_config.format, "output_config.format.schema"
    if wanted is None:
        return None
    return schema_structure(wanted.json_schema, field)
