"""`/tokenize` and `/detokenize`: questions to the stages that have the vocabulary."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from common.messages.arrays import int32s
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from services.router.dispatch import Dispatch
from services.router.endpoint import Endpoint, query
from services.router.errors import bad_field, from_validation, shown
from services.router.openai.chat import chat_prompt, chat_tools, parse_fields
from services.router.openai.fields import refuse_unsupported
from services.router.token_ids import check_ids


class TokenizeFields(BaseModel):
    """A `/tokenize` request: a `prompt`, or `messages` with what chat requests have beside them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(BaseModel):
    """A `/detokenize` request."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: str | None = None
    tokens: Any


async def _tokenize(
    dispatch: Dispatch, parsed: tuple[TokenizeFields, PromptSource]
) -> dict[str, Any]:
    """Answer with the ids of a prompt or a conversation."""
    fields, prompt = parsed
    group = dispatch.group(fields.model or "")
    field = "prompt" if fields.messages is None else "messages"
    with_strings = bool(fields.return_token_strs)
    answer = await dispatch.tokenize(group, prompt, field, with_strings)
    computes = group.workers["compute"]
    return {
        "count": len(answer.ids),
        "max_model_len": max(worker.model.max_model_len for worker in computes),
        "tokens": list(answer.ids),
        "token_strs": list(answer.token_strs) if with_strings else None,
    }


async def _detokenize(dispatch: Dispatch, fields: DetokenizeFields) -> dict[str, Any]:
    """Answer with the text of ids."""
    group = dispatch.group(fields.model or "")
    text = ""
    if fields.tokens:
        text = await dispatch.detokenize(group, IdsPrompt(int32s(fields.tokens)), "tokens")
    return {"prompt": text}


def parse_tokenize(body: dict[str, Any]) -> tuple[TokenizeFields, PromptSource]:
    """Validate a `/tokenize` request; ApiError 400 names the field at fault."""
    refuse_unsupported(body)
    try:
        fields = TokenizeFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    return fields, _prompt(fields, body)


def parse_detokenize(body: dict[str, Any]) -> DetokenizeFields:
    """Validate a `/detokenize` request; ApiError 400 names the field at fault."""
    try:
        fields = DetokenizeFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    if not isinstance(fields.tokens, list):
        raise bad_field("tokens", f"should be an array of token ids (it is {shown(fields.tokens)})")
    check_ids(fields.tokens, "tokens")
    return fields


def _prompt(fields: TokenizeFields, body: dict[str, Any]) -> PromptSource:
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if fields.prompt is None:
        chat = parse_fields(body)
        return chat_prompt(chat, chat_tools(chat))
    return TextPrompt(fields.prompt, fields.add_special_tokens is not False)


TOKENIZE: Endpoint[tuple[TokenizeFields, PromptSource]] = Endpoint(
    "/tokenize", lambda body, _: parse_tokenize(body), query(_tokenize)
)
DETOKENIZE: Endpoint[DetokenizeFields] = Endpoint(
    "/detokenize", lambda body, _: parse_detokenize(body), query(_detokenize)
)
