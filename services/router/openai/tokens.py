"""`/tokenize` and `/detokenize`, which the workers with the vocabulary answer."""

from __future__ import annotations

import asyncio
from array import array
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from common.messages.arrays import Int32s, int32s
from common.messages.failure import Failure
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from services.router import json_schema
from services.router.dispatch import Dispatch
from services.router.endpoint import Endpoint, query
from services.router.errors import ApiError, bad_field
from services.router.openai.chat import ConversationFields
from services.router.openai.sampling import WHICH_MODEL, NumLogprobs
from services.router.prompts import MAX_INT32, TOKEN_ID, check_ids
from services.router.request_fields import check_type
from services.router.request_model import OpenAIModel, RequestModel
from services.router.sse import json_bytes

MAX_IDS = (
    1 << 20
)  # looking at so many takes 20 ms; a detokenizer takes fewer, by its `max_query_ids`
MAX_PIECE = 1 << 15  # ids that are written in one go: 4 ms


def _read_ids(ids: Any) -> Int32s:
    if not isinstance(ids, array):  # of `json_child`
        check_type(ids, list, "tokens", "an array of token ids")
    if len(ids) > MAX_IDS:
        message = f"tokens has {len(ids)} ids; at most {MAX_IDS} are accepted"
        raise ApiError(Failure(413, "too_many_tokens", message, "tokens"))
    if isinstance(ids, array):
        return ids
    check_ids(ids, "tokens")
    return int32s(ids)


_CHECKED = "checked, without effect"
_Model = Annotated[str | None, Field(description=WHICH_MODEL)]
_Strings = Annotated[bool | None, Field(description="answer with the tokens' names, too")]


class TokenizeTextFields(OpenAIModel):
    """A `/tokenize` request with a `prompt`."""

    model: _Model = None
    prompt: str
    """a text"""
    messages: None = None
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its special tokens to the prompt, as it does by default"""
    return_token_strs: _Strings = None

    @property
    def source(self) -> PromptSource:
        return TextPrompt(self.prompt, self.add_special_tokens is not False)


class TokenizeChatFields(ConversationFields):
    """A `/tokenize` request with `messages` and the other fields of a conversation."""

    # Fields about the answer of a chat.
    parallel_tool_calls: bool | None = Field(None, description=_CHECKED)
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT32, description=_CHECKED)
    include_reasoning: bool | None = Field(None, description=_CHECKED)
    separate_reasoning: bool | None = Field(None, description=_CHECKED)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description=_CHECKED)
    logprobs: bool | None = Field(None, description=_CHECKED)
    top_logprobs: NumLogprobs = Field(None, description=_CHECKED)
    echo: bool | None = Field(None, description=_CHECKED)
    model: _Model = None
    prompt: None = None
    add_special_tokens: bool | None = Field(None, description=_CHECKED)
    return_token_strs: _Strings = None

    @property
    def source(self) -> PromptSource:
        return self.template_input(self.offered_tools)


class DetokenizeFields(RequestModel):
    """A `/detokenize` request."""

    model: _Model = None
    tokens: Annotated[
        Any,  # a column of ids, a type that pydantic does not know
        PlainValidator(_read_ids),
        WithJsonSchema(json_schema.array(TOKEN_ID)),
    ]
    """token ids"""


async def _tokenize(dispatch: Dispatch, fields: TokenizeTextFields | TokenizeChatFields) -> bytes:
    group = await dispatch.available(fields.model or "")
    field = "prompt" if fields.messages is None else "messages"
    with_strings = bool(fields.return_token_strs)
    answer = await dispatch.queries.tokenize(group, fields.source, field, with_strings)
    head = {"count": len(answer.ids), "max_model_len": group.card.max_model_len}
    strs = json_bytes(list(answer.token_strs) if with_strings else None)
    ids = await _written(answer.ids)
    return b'%b,"tokens":[%b],"token_strs":%b}' % (json_bytes(head)[:-1], ids, strs)


async def _written(ids: Int32s) -> bytes:
    """Write ids in pieces between which the loop turns: a million takes 0.13 s."""
    pieces = []
    for at in range(0, len(ids), MAX_PIECE):
        pieces.append(",".join(map(str, ids[at : at + MAX_PIECE])))
        await asyncio.sleep(0)
    return ",".join(pieces).encode()


async def _detokenize(dispatch: Dispatch, fields: DetokenizeFields) -> dict[str, Any]:
    group = await dispatch.available(fields.model or "")
    text = ""
    if fields.tokens:
        text = await dispatch.queries.detokenize(group, IdsPrompt(fields.tokens), "tokens")
    return {"prompt": text}


def parse_tokenize(body: dict[str, Any]) -> TokenizeTextFields | TokenizeChatFields:
    """Validate a `/tokenize` request; ApiError 400 names the field at fault."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise bad_field("prompt", "give either prompt or messages")
    model = TokenizeTextFields if body.get("messages") is None else TokenizeChatFields
    return model.read(body)


TOKENIZE: Endpoint[TokenizeTextFields | TokenizeChatFields] = Endpoint(
    "/tokenize", lambda body, _: parse_tokenize(body), query(_tokenize)
)
DETOKENIZE: Endpoint[DetokenizeFields] = Endpoint(
    "/detokenize", lambda body, _: DetokenizeFields.read(body), query(_detokenize)
)
