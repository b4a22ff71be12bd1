"""`/v1/embeddings`: texts to vectors, if the model is an embedding model."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from aiohttp import web
from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema

from common.messages.control import Matryoshka
from common.messages.failure import Failure, Usage
from common.messages.sampling import SamplingParams
from common.messages.tokenize import PromptSource, StreamSettings
from common.telemetry import trace
from services.router.answer import CompleteAnswer, ResponseHead
from services.router.endpoint import ApiRequest, Call, Endpoint, caller_of, json_response, prepare
from services.router.errors import ApiError, bad_field
from services.router.generate_request import TRUNCATE_TO_FIT, GenerateRequest
from services.router.generation import Generation, RequestContext, response_head
from services.router.groups import Group
from services.router.json_schema import NULL
from services.router.middleware import WARNINGS
from services.router.openai.messages import Messages
from services.router.openai.sampling import TRUNCATION, CacheSalt, ModelName, Priority, Timeout
from services.router.openai.template import (
    NoSpecialTokens,
    TemplateKwargs,
    chat_prompt,
    pack_variables,
)
from services.router.openai.tools import Tools
from services.router.prompts import MAX_INT32, prompts_schema, read_prompts
from services.router.request_model import IGNORED, UNSUPPORTED_FIELDS, OpenAIModel, RefusedFields
from services.router.request_warnings import Warnings

MAX_INPUTS: Final = 2048  # OpenAI's
MAX_AT_ONCE: Final = 256  # inputs; a tokenizer and a compute take 1024, shared with others
MAX_DIMENSIONS: Final = 1 << 20


def _check_truncation(length: int | None) -> int | None:
    if length == 0:
        raise bad_field("truncate_prompt_tokens", "should be -1 or greater than 0 (it is 0)")
    return length


def _read_inputs(value: Any, info: ValidationInfo) -> tuple[PromptSource, ...]:
    if value is None:
        raise bad_field("input", "is required", "missing_required_parameter")
    adds = info.data.get("add_special_tokens") is not False
    return read_prompts(value, "input", adds, _check_number)


def _check_number(inputs: list[Any]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        code = "invalid_value" if inputs else "empty_array"
        message = f"should have 1 to {MAX_INPUTS} entries (it has {len(inputs)})"
        raise bad_field("input", message, code)


def _refuse_input(value: Any) -> None:
    if value is not None:
        raise bad_field("input", "cannot be used together with messages")


class EmbeddingFields(OpenAIModel):
    refused: ClassVar[Mapping[str, RefusedFields]] = {
        **UNSUPPORTED_FIELDS,
        "stream": RefusedFields((False,), "an embedding comes in one piece"),
    }

    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = None
    """`float` for numbers, or `base64` of the bytes of little-endian float32"""
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)
    """the model's own number, or fewer if its embeddings allow that"""
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, le=MAX_INT32), AfterValidator(_check_truncation), TRUNCATION
    ] = None
    """cut longer inputs to this many tokens; -1 means as many as the model takes"""
    truncation_side: Literal["left", "right"] | None = None
    """the side on which `truncate_prompt_tokens` cuts inputs, by default `right`"""
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    request_id: str | None = None
    """1 to 128 letters, digits or `._:-`; returned as `X-Request-Id`, unless the request has that
    header"""
    rid: str | None = None
    """another name for `request_id`, which comes first"""
    user: str | None = Field(None, description=IGNORED)
    add_generation_prompt: bool | None = None
    """with `messages`: whether the template begins the assistant's turn"""
    continue_final_message: bool | None = None
    """with `messages`: whether the last message stays open, without the end of its turn"""


class InputFields(EmbeddingFields):
    """A request with `input`."""

    chat_template_kwargs: dict[str, Any] | None = None
    """with `messages`: variables of the chat template"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its special tokens to texts, as it does by default"""
    input: Annotated[
        Any,  # a tuple of PromptSource, whose arrays pydantic does not know
        PlainValidator(_read_inputs),
        WithJsonSchema(prompts_schema(MAX_INPUTS)),
    ] = Field(description=f"a text, token ids, or an array of up to {MAX_INPUTS:,} of either")
    messages: None = None

    @property
    def prompts(self) -> tuple[PromptSource, ...]:
        return cast(tuple[PromptSource, ...], self.input)


class MessagesFields(EmbeddingFields):
    """A request with one input in the form of a chat, as vLLM takes it."""

    messages: Messages
    """instead of `input`: a conversation, rendered by the chat template"""
    input: Annotated[None, PlainValidator(_refuse_input), WithJsonSchema(NULL)] = None
    chat_template_kwargs: TemplateKwargs = None
    """variables of the chat template, as far as the server lets requests set them"""
    add_special_tokens: NoSpecialTokens = None

    @property
    def prompts(self) -> tuple[PromptSource, ...]:
        variables = pack_variables(self.chat_template_kwargs)
        adds, continues = bool(self.add_generation_prompt), bool(self.continue_final_message)
        return (chat_prompt(self.messages, Tools(), adds, continues, variables),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ApiRequest):
    as_base64: bool
    dimensions: int | None


def parse_embedding(body: dict[str, Any], warnings: Warnings) -> EmbeddingRequest:
    """Validate a request; ApiError 400 names the field at fault."""
    has_input = body.get("messages") is None
    fields = (InputFields if has_input else MessagesFields).read(body, warnings)
    cut_at = fields.truncate_prompt_tokens
    request = GenerateRequest(
        model=fields.model or "",
        prompts=fields.prompts,
        prompt_field="input" if has_input else "messages",
        sampling=SamplingParams(max_tokens=0, seed=0),
        has_seed=True,  # nothing is sampled
        stream=StreamSettings(),
        priority=fields.priority or 0,
        timeout_s=fields.timeout or 0.0,
        cache_salt=fields.cache_salt or "",
        usual_max_tokens=1,
        truncate_to=TRUNCATE_TO_FIT if cut_at == -1 else cut_at or 0,
        truncate_side=fields.truncation_side or "right",
        pooling=True,
    )
    as_base64 = fields.encoding_format == "base64"
    return EmbeddingRequest(generate=request, as_base64=as_base64, dimensions=fields.dimensions)


class EmbeddingFormat:
    """Vectors as numbers or, with `as_base64`, as the bytes of little-endian float32.

    `dimensions`, if given, must be the model's, or fewer if its embeddings are `matryoshka`.
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
        """Keep the first `dimensions`; ApiError 400 if the model has no such embeddings."""
        wanted, cut, most = self._dimensions, self._matryoshka, len(vector)
        if wanted is None or wanted == most:
            return vector
        if cut is None or wanted > most or (cut.sizes and wanted not in cut.sizes):
            sizes = [f"{size}" for size in (cut.sizes if cut else ()) if size < most]
            sizes.append(f"1 to {most}" if cut is not None and not cut.sizes else f"{most}")
            may = f"may only be {', '.join(sizes)}, which this model's embeddings have"
            raise bad_field("dimensions", f"{may} (it is {wanted})")
        kept = vector[:wanted]
        length = math.hypot(*kept) if cut.normalize else 1.0
        return array("f", (value / (length or 1.0) for value in kept))


async def _embed(call: Call[EmbeddingRequest]) -> web.Response:
    parsed, backend = call.parsed, call.backend
    caller = caller_of(call)
    group = await backend.dispatch.available(parsed.generate.model, caller)
    _check_pooling(group)
    head = response_head("embd-", group)
    layout = EmbeddingFormat(head, parsed.as_base64, parsed.dimensions, group.card.matryoshka)
    context = prepare(call, caller, group, parsed.generate, layout, head.id)
    answers, usage = await _collect(backend.generation, context)
    return json_response(layout.body(answers, usage))


async def _collect(
    generation: Generation, context: RequestContext[EmbeddingFormat]
) -> tuple[list[CompleteAnswer], Usage]:
    """Embed all inputs, part after part; ApiError if one of them fails."""
    answers: list[CompleteAnswer] = []
    num_tokens = num_cached = 0
    for request in context.request.in_parts(MAX_AT_ONCE):
        sink = await generation.collect(replace(context, request=request))
        context = replace(context, caller=context.caller.after_begin())
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
    trace.EMBEDDINGS,
    adopts_request_id=True,
)
