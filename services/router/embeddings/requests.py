"""`/v1/embeddings` requests: from a JSON object to a Job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, PromptSource, StreamSettings
from services.router.embeddings.inputs import read_inputs
from services.router.errors import bad_field, from_validation, unsupported
from services.router.job import TRUNCATE_TO_FIT, Job
from services.router.openai.chat import chat_prompt, parse_fields
from services.router.openai.fields import check_unknown, refuse_unsupported
from services.router.openai.sampling_fields import MAX_INT32
from services.router.openai.tools import Tools
from services.router.request_warnings import Warnings

MAX_DIMENSIONS: Final = 1 << 20
TEMPLATE_FIELDS: Final = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class EmbeddingFields(BaseModel):
    """The fields of an embeddings request."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = Field(None, max_length=512)
    input: Any = None
    messages: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT32)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-MAX_INT32, le=MAX_INT32)
    cache_salt: str | None = Field(None, max_length=256)
    request_id: str | None = None
    rid: str | None = None
    user: str | None = None


# What is refused where it asks for something is no unknown field where it does not.
KNOWN_FIELDS: Final = frozenset(EmbeddingFields.model_fields) | {"stream"}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """An embeddings request: what to embed and how to answer."""

    job: Job
    as_base64: bool
    dimensions: int | None


def parse_embedding(body: dict[str, Any], warnings: Warnings) -> EmbeddingRequest:
    """Validate a request; ApiError 400 names the field at fault."""
    try:
        fields = EmbeddingFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    refuse_unsupported(body)
    if body.get("stream") is not None and body["stream"] is not False:
        raise unsupported("stream", "an embedding comes in one piece")
    if fields.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "should be -1 or greater than 0 (it is 0)")
    prompts: tuple[PromptSource, ...]
    if fields.input is None and fields.messages is None:
        raise bad_field("input", "is required", "missing_required_parameter")
    if fields.messages is None:
        prompts = read_inputs(fields.input, fields.add_special_tokens is not False)
    else:
        prompts = (_conversation(fields, body),)
    job = Job(
        model=fields.model or "",
        prompts=prompts,
        prompt_field="input" if fields.messages is None else "messages",
        sampling=SamplingParams(max_tokens=0, seed=0),
        has_seed=True,  # nothing is drawn
        stream=StreamSettings(),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        usual_max_tokens=1,
        truncate_to=_truncate_to(fields.truncate_prompt_tokens),
        truncate_side=fields.truncation_side or "right",
        pooling=True,
    )
    check_unknown(body, KNOWN_FIELDS, warnings)
    return EmbeddingRequest(job, fields.encoding_format == "base64", fields.dimensions)


def _conversation(fields: EmbeddingFields, body: dict[str, Any]) -> ChatPrompt:
    """Read one input in the form of a chat, as vLLM takes it: no answer is begun behind it."""
    if fields.input is not None:
        raise bad_field("input", "cannot be used together with messages")
    if fields.add_special_tokens:
        raise unsupported("add_special_tokens", "the chat template writes them")
    given = {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}
    chat = {"add_generation_prompt": False, **given, "messages": fields.messages}
    return chat_prompt(parse_fields(chat), Tools())


def _truncate_to(wanted: int | None) -> int:
    return TRUNCATE_TO_FIT if wanted == -1 else wanted or 0
