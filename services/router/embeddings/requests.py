"""`/v1/embeddings` requests: from a JSON object to a Job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.sampling import SamplingParams
from common.messages.tokenize import StreamSettings
from services.router.embeddings.inputs import read_inputs
from services.router.errors import bad_field, from_validation, unsupported
from services.router.job import TRUNCATE_TO_FIT, Job
from services.router.openai.fields import check_unknown
from services.router.openai.sampling_fields import MAX_INT32
from services.router.request_warnings import Warnings

MAX_DIMENSIONS: Final = 1 << 20


class EmbeddingFields(BaseModel):
    """The fields of an embeddings request."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=512)
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT32)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-MAX_INT32, le=MAX_INT32)
    cache_salt: str | None = Field(None, max_length=256)
    user: str | None = None


# What is refused where it asks for something is no unknown field where it does not.
KNOWN_FIELDS: Final = frozenset(EmbeddingFields.model_fields) | {"messages", "stream"}


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
    if body.get("messages") is not None:
        raise unsupported("messages", "input takes texts")
    if body.get("stream"):
        raise unsupported("stream", "an embedding comes in one piece")
    if fields.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "should be -1 or greater than 0 (it is 0)")
    job = Job(
        model=fields.model,
        prompts=read_inputs(fields.input, fields.add_special_tokens is not False),
        prompt_field="input",
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


def _truncate_to(wanted: int | None) -> int:
    return TRUNCATE_TO_FIT if wanted == -1 else wanted or 0
