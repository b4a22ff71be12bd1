"""`/v1/embeddings`: texts to vectors, where the model that is served is made for that."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.arrays import int32s
from common.messages.control import Matryoshka
from common.messages.failure import Failure, Usage
from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, IdsPrompt, PromptSource, StreamSettings, TextPrompt
from common.telemetry import names
from services.router.answer import CompleteAnswer, ResponseHead
from services.router.endpoint import ApiRequest, Call, Endpoint, json_response, prepare
from services.router.errors import ApiError, bad_field, from_validation, shown, unsupported
from services.router.fleet import Group
from services.router.generate_request import TRUNCATE_TO_FIT, GenerateRequest
from services.router.generation import Generation, RequestContext, response_head
from services.router.middleware import WARNINGS
from services.router.openai.chat import chat_prompt, parse_fields
from services.router.openai.fields import check_unknown, refuse_unsupported
from services.router.openai.sampling_fields import MAX_INT32
from services.router.openai.tools import Tools
from services.router.request_warnings import Warnings
from services.router.token_ids import check_ids

MAX_INPUTS: Final = 2048  # OpenAI's
MOST_AT_ONCE: Final = 256  # inputs; a tokenizer and a compute take 1024, which others use, too
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ApiRequest):
    """An embeddings request: what to embed and how to answer."""

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
    job = GenerateRequest(
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
    as_base64 = fields.encoding_format == "base64"
    return EmbeddingRequest(job=job, as_base64=as_base64, dimensions=fields.dimensions)


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


def read_inputs(value: Any, add_special_tokens: bool) -> tuple[PromptSource, ...]:
    """Check and translate the field; ApiError 400 names the input at fault."""
    if isinstance(value, str):
        return (_read_input(value, "input", add_special_tokens),)
    if not isinstance(value, list):
        raise bad_field(
            "input",
            f"should be a string, an array of token ids, or an array of either "
            f"(it is {shown(value)})",
        )
    if value and type(value[0]) is int:
        return (_read_input(value, "input", add_special_tokens),)
    if not 1 <= len(value) <= MAX_INPUTS:
        code = "invalid_value" if value else "empty_array"
        raise bad_field(
            "input", f"should have 1 to {MAX_INPUTS} entries (it has {len(value)})", code
        )
    return tuple(
        _read_input(each, f"input[{at}]", add_special_tokens) for at, each in enumerate(value)
    )


def _read_input(value: Any, field: str, add_special_tokens: bool) -> PromptSource:
    if isinstance(value, str):
        if not value:
            raise bad_field(field, "should not be empty", "empty_string")
        return TextPrompt(value, add_special_tokens)
    if not isinstance(value, list):
        raise bad_field(
            field, f"should be a string or an array of token ids (it is {shown(value)})"
        )
    if not value:
        raise bad_field(field, "should not be empty", "empty_array")
    check_ids(value, field)
    return IdsPrompt(int32s(value))


class EmbeddingFormat:
    """Vectors as numbers or, with `as_base64`, as the bytes of little-endian float32.

    `dimensions`, if the client named a number, must be the model's, or fewer that are enough for
    one that is `matryoshka`.
    """

    def __init__(
        self,
        head: ResponseHead,
        as_base64: bool,
        dimensions: int | None,
        matryoshka: Matryoshka | None = None,
    ) -> None:
        self._head = head
        self._as_base64 = as_base64
        self._dimensions = dimensions
        self._matryoshka = matryoshka

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        """Build the list of embeddings; ApiError 400 for other dimensions than the model's."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(answer)}
            for index, answer in enumerate(answers)
        ]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self._head.model, "usage": tokens}

    def _vector(self, answer: CompleteAnswer) -> str | list[float]:
        packed = answer.ended.embedding
        if not packed:
            raise ApiError(Failure(500, "internal_error", "the model made no embedding"))
        vector = self._cut(array("f", packed))
        if not self._as_base64:
            return vector.tolist()
        if sys.byteorder == "big":
            vector.byteswap()
        return base64.b64encode(vector.tobytes()).decode()

    def _cut(self, vector: array[float]) -> array[float]:
        """Keep the first numbers that were asked for; ApiError 400 where they are no embedding."""
        wanted, cut = self._dimensions, self._matryoshka
        if wanted is None or wanted == len(vector):
            return vector
        if cut is None or wanted > len(vector) or (cut.sizes and wanted not in cut.sizes):
            sizes = () if cut is None else cut.sizes
            most = f"1 to {len(vector)}" if cut is not None and not sizes else f"{len(vector)}"
            may = ", ".join(map(str, (*(size for size in sizes if size < len(vector)), most)))
            raise bad_field(
                "dimensions",
                f"may only be {may}, which this model's embeddings have (it is {wanted})",
            )
        kept = vector[:wanted]
        length = math.hypot(*kept) if cut.normalize else 1.0
        return array("f", (value / (length or 1.0) for value in kept))


async def _embed(call: Call[EmbeddingRequest]) -> web.Response:
    parsed, backend = call.parsed, call.backend
    group = backend.dispatch.group(parsed.job.model)
    _check_pooling(group)
    head = response_head("embd-", group)
    layout = EmbeddingFormat(head, parsed.as_base64, parsed.dimensions, group.card.matryoshka)
    context = prepare(call, group, parsed.job, layout, head.id)
    answers, usage = await _collect(backend.generation, context)
    return json_response(layout.body(answers, usage))


async def _collect(
    generation: Generation, context: RequestContext[EmbeddingFormat]
) -> tuple[list[CompleteAnswer], Usage]:
    """Wait for all inputs, part after part; ApiError if one of them fails."""
    answers: list[CompleteAnswer] = []
    num_tokens = num_cached = 0
    for job in context.request.in_parts(MOST_AT_ONCE):
        sink = await generation.collect(replace(context, request=job))
        answers += sink.answers()
        num_tokens += sink.usage.prompt_tokens
        num_cached += sink.usage.cached_tokens
    usage = Usage(num_tokens, num_cached, 0)
    context.span.set_response(usage, [answer.ended.reason for answer in answers])
    return answers, usage


def _check_pooling(group: Group) -> None:
    """Refuse a model that is not made for embeddings; ApiError 400."""
    if any(worker.model.pooling for worker in group.workers["compute"]):
        return
    raise bad_field(
        "model",
        f"{group.card.name} makes no embeddings, so that /v1/embeddings is not served; "
        "it generates text: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages",
        "unsupported_model",
    )


EMBEDDINGS: Endpoint[EmbeddingRequest] = Endpoint(
    "/v1/embeddings",
    lambda body, request: parse_embedding(body, request[WARNINGS]),
    _embed,
    names.EMBEDDINGS,
    adopts_request_id=True,
)
