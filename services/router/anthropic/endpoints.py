"""Anthropic's endpoints, their bodies and events; `/v1/models` in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextOpened
from common.messages.tokenize import ChatPrompt
from common.telemetry import trace
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.anthropic.requests import MessageRequest, parse_message, parse_prompt
from services.router.anthropic_errors import error_body
from services.router.dispatch import Dispatch
from services.router.endpoint import Endpoint, generation, query
from services.router.generate_request import check_prompt_length
from services.router.middleware import REQUEST_ID, WARNINGS
from services.router.sse import TEXT, json_bytes, json_string, named_event

# Nothing is signed here, but clients expect a string that they send back with the block.
SIGNATURE: Final = "slipstream"

# Hidden pieces of reasoning between two pings: proxies cut a stream that is silent for a minute.
PING_EVERY: Final = 32

_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_KINDS: Final = {"content": "text", "reasoning": "thinking", "arguments": "tool_use"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageFormat:
    """Renders one message as content blocks; while streaming it holds the state.

    `max_tokens` is the client's limit: an answer that is cut below it has met the model's own.
    Without `shows_thinking` reasoning is left out.
    """

    def __init__(
        self, head: ResponseHead, max_tokens: int, shows_thinking: bool, request_id: str
    ) -> None:
        self._head = head
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._request_id = request_id
        self._num_blocks = 0
        self._num_calls = 0
        self._num_hidden = 0
        self._open = ""  # the kind of the open block
        self._delta: list[bytes] = []  # the event of its text, around the text
        self._ended: Ending | None = None

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        """Render the start of the message; `prompt` has its usage, if compute reported it."""
        usage = Usage(prompt.prompt_tokens, prompt.cached_tokens, 0) if prompt else Usage(0, 0, 0)
        message = {**self._message([]), "usage": _usage(usage)}
        return named_event("message_start", {"message": message}) + _PING

    def template(self, choice: int) -> None:
        return None  # a block has to be opened before its text

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.parts:
            return b"".join(event for part in delta.parts for event in self._part(part))
        return b"".join(self._grow("text", delta.text)) if delta.text else b""

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the end of the last block; an answer without blocks is an empty text."""
        self._ended = ended
        empty = () if self._num_blocks else self._begin({"type": "text", "text": ""})
        return b"".join((*empty, *self._close()))

    def closing(self, usage: Usage) -> bytes:
        assert self._ended is not None
        fields = {
            "delta": self._stop(self._ended, self._num_calls),
            "usage": _usage(usage, self._ended.reasoning_tokens),
        }
        return named_event("message_delta", fields) + _STOP

    def failed(self, failure: Failure) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(failure, self._request_id)

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        blocks: list[dict[str, Any]] = []
        if answer.reasoning and self._shows_thinking:
            thinking = {"thinking": answer.reasoning, "signature": SIGNATURE}
            blocks.append({"type": "thinking", **thinking})
        if answer.text or not (blocks or answer.calls):
            blocks.append({"type": "text", "text": answer.text})
        blocks += (_tool_use(call.id, call.name, call.arguments_object()) for call in answer.calls)
        return {
            **self._message(blocks),
            **self._stop(answer.ended, len(answer.calls)),
            "usage": _usage(usage, answer.ended.reasoning_tokens),
        }

    def _part(self, part: Part) -> Iterator[bytes]:
        if part.kind == "call":
            self._num_calls += 1
            yield from self._begin(_tool_use(part.id, part.text, {}))
        elif part.kind == "reasoning" and not self._shows_thinking:
            self._num_hidden += 1
            if self._num_hidden % PING_EVERY == 0:
                yield _PING
        elif part.kind != "arguments" or self._open == "tool_use":  # those without a call go
            yield from self._grow(_KINDS[part.kind], part.text)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if kind != self._open:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        yield json_string(text).join(self._delta)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        index = self._num_blocks
        self._num_blocks += 1
        self._open = block["type"]
        name, field = _DELTAS[self._open]
        delta = {"index": index, "delta": {"type": name, field: TEXT}}
        self._delta = named_event("content_block_delta", delta).split(json_bytes(TEXT))
        yield named_event("content_block_start", {"index": index, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        kind, self._open = self._open, ""
        if not kind:
            return
        index = self._num_blocks - 1
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield named_event("content_block_delta", {"index": index, "delta": delta})
        yield named_event("content_block_stop", {"index": index})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self, ended: Ending, num_calls: int) -> dict[str, Any]:
        """Return the stop reason; a stop token counts as the end of the turn."""
        sequence = ended.stop if isinstance(ended.stop, str) else None
        if ended.reason == "length":
            is_full = ended.usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage(usage: Usage, thinking_tokens: int = 0) -> dict[str, Any]:
    """Build `usage`, where `input_tokens` excludes the tokens that were read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    """Translate the card of a model from OpenAI's shape."""
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
        "capabilities": None,
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Translate a list of cards, which is one page."""
    return {
        "data": [model_info(card) for card in cards],
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }


async def _count_tokens(dispatch: Dispatch, parsed: tuple[str, ChatPrompt]) -> dict[str, Any]:
    model, prompt = parsed
    group = await dispatch.available(model)
    tokenized = await dispatch.queries.tokenize(group, prompt, "messages", False)
    check_prompt_length(len(tokenized.ids), group.card, "messages")
    return {"input_tokens": len(tokenized.ids)}


MESSAGES: Endpoint[MessageRequest] = Endpoint(
    "/v1/messages",
    lambda body, request: parse_message(body, request[WARNINGS]),
    generation(
        "msg_",
        lambda call, _, head: MessageFormat(
            head, call.parsed.max_tokens, call.parsed.shows_thinking, call.request[REQUEST_ID]
        ),
    ),
    trace.CHAT,
)
COUNT_TOKENS: Endpoint[tuple[str, ChatPrompt]] = Endpoint(
    "/v1/messages/count_tokens",
    lambda body, request: parse_prompt(body, request[WARNINGS]),
    query(_count_tokens),
)
