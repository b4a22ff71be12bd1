"""The events and bodies of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextOpened
from services.router.answer import Answer, Delta, ResponseHead, ToolCall
from services.router.anthropic_errors import error_body
from services.router.sse import json_bytes, json_string

ID_PREFIX = "msg_"

# Nothing is signed here: clients want a string that they give back with the block.
SIGNATURE: Final = "slipstream"

# Pieces of thinking that is not shown: proxies cut a stream that is silent for a minute.
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
    """A message as its content blocks; of a stream it is the state, too.

    `max_tokens` is the client's limit: an answer that ends before it by its length has met the
    model's own. Without `shows_thinking` reasoning is left out, as for clients that asked for none.
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
        self._open = ""  # the kind of the block that is being written
        self._before = b""  # of its deltas
        self._ended: Ending | None = None

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        """Render the message as it begins; `prompt` says what it took, where the ring does."""
        taken = Usage(prompt.prompt_tokens, prompt.cached_tokens, 0) if prompt else Usage(0, 0, 0)
        usage = _usage(taken)
        message = {**self._message([]), "usage": usage}
        return _event("message_start", {"message": message}) + _PING

    def template(self, choice: int) -> None:
        """Return none: a block has to be opened before its text."""
        return None

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Render what is new, block by block."""
        if delta.parts:
            return b"".join(event for part in delta.parts for event in self._part(part))
        return b"".join(self._grow("text", delta.text)) if delta.text else b""

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the end of the last block; an answer without any is an empty text."""
        self._ended = ended
        begun = () if self._num_blocks else self._begin("text", {"text": ""})
        return b"".join((*begun, *self._close()))

    def closing(self, usage: Usage) -> bytes:
        """Render why it ended and what it took."""
        assert self._ended is not None
        fields = {
            "delta": self._stop(self._ended, self._num_calls),
            "usage": _usage(usage, self._ended.reasoning_tokens),
        }
        return _event("message_delta", fields) + _STOP

    def failed(self, failure: Failure) -> bytes:
        """Render the error, which clients raise."""
        return b"event: error\ndata: %b\n\n" % error_body(failure, self._request_id)

    def body(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Build the whole message."""
        (answer,) = answers
        ended = answer.ended
        return {
            **self._message(self._blocks(answer)),
            **self._stop(ended, len(answer.calls)),
            "usage": _usage(usage, ended.reasoning_tokens),
        }

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if answer.reasoning and self._shows_thinking:
            thinking = {"thinking": answer.reasoning, "signature": SIGNATURE}
            blocks.append({"type": "thinking", **thinking})
        if answer.text or not (blocks or answer.calls):
            blocks.append({"type": "text", "text": answer.text})
        calls = (_tool_use(call, _input(call.arguments)) for call in answer.calls)
        blocks.extend({"type": "tool_use", **call} for call in calls)
        return blocks

    def _part(self, part: Part) -> Iterator[bytes]:
        """Render one part of a parsed answer."""
        if part.kind == "call":
            self._num_calls += 1
            yield from self._begin("tool_use", _tool_use(ToolCall(part.id, part.text, ""), {}))
        elif part.kind != "reasoning" or self._shows_thinking:
            yield from self._grow(_KINDS[part.kind], part.text)
        else:
            self._num_hidden += 1
            if self._num_hidden % PING_EVERY == 0:
                yield _PING

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            if kind == "tool_use":  # arguments of no call
                return
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(kind, {kind: "", **signed})
        yield b"%b%b}}\n\n" % (self._before, json_string(text))

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        index = self._num_blocks
        self._num_blocks += 1
        self._open = kind
        name, field = _DELTAS[kind]
        delta = {"index": index, "delta": {"type": name, field: ""}}
        self._before = _event("content_block_delta", delta).removesuffix(b'""}}\n\n')
        block = {"type": kind, **fields}
        yield _event("content_block_start", {"index": index, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        kind, self._open = self._open, ""
        if not kind:
            return
        index = self._num_blocks - 1
        if kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", {"index": index, "delta": signed})
        yield _event("content_block_stop", {"index": index})

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
        """Say why it ended; a stop token counts as the end of the turn."""
        sequence = ended.stop if isinstance(ended.stop, str) else None
        if ended.reason == "length":
            is_full = ended.usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "input": arguments}


def _input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments; of one that was cut off the text is handed over as it is."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _usage(usage: Usage, thinking_tokens: int = 0) -> dict[str, Any]:
    """Build `usage`: what was read from the cache is not counted among the input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **fields}))
