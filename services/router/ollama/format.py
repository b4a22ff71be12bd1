"""Ollama's answers: a JSON object, or one on each line of a stream (NDJSON)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextOpened, TokenLogprob
from services.router.answer import Answer, Delta, ResponseHead, ToolCall
from services.router.openai.logprobs import chat_logprobs
from services.router.sse import json_bytes

NDJSON: Final = "application/x-ndjson"

Piece = dict[str, Any]  # content, thinking, tool_calls: what is new


def as_message(piece: Piece) -> dict[str, Any]:
    """Put what is new as `/api/chat` does."""
    return {"message": {"role": "assistant", "content": "", **piece}}


def as_response(piece: Piece) -> dict[str, Any]:
    """Put what is new as `/api/generate` does."""
    rest = {key: value for key, value in piece.items() if key != "content"}
    return {"response": piece.get("content", ""), **rest}


class OllamaFormat:
    """Lines and bodies of one answer; of a stream it has the call that is being made."""

    def __init__(
        self,
        head: ResponseHead,
        model: str,
        put: Callable[[Piece], dict[str, Any]],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take the name by which the client called the model, which it gets back."""
        self._head = head
        self._model = model
        self._put = put
        self._clock_ns = clock_ns
        self._began_ns = self._opened_ns = clock_ns()
        self._call: ToolCall | None = None
        self._reason = "stop"

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        """Render nothing: the time of the prompt ends here."""
        self._opened_ns = self._clock_ns()
        return b""

    def template(self, choice: int) -> None:
        """Return none: every line has the time at which it was written."""
        return None

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Render what is new, a line for each piece of it."""
        pieces = [piece for part in delta.parts for piece in self._pieces(part)]
        if delta.text:
            pieces.append({"content": delta.text})
        lines = [self._fields(piece) for piece in pieces]
        if delta.logprobs:
            lines = lines or [self._fields({})]
            lines[0]["logprobs"] = _logprobs(delta.logprobs)
        return b"".join(map(_line, lines))

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the last call, whose end nothing else has shown."""
        self._reason = ended.reason
        return b"".join(_line(self._fields(piece)) for piece in self._finished_call())

    def closing(self, usage: Usage) -> bytes:
        """Render the last line, with what the answer took."""
        return _line({**self._fields({}, True), **self._spent(usage, self._reason)})

    def failed(self, failure: Failure) -> bytes:
        """Render the error, which clients raise."""
        return _line({"error": failure.message})

    def body(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Build the whole answer."""
        (answer,) = answers
        piece: Piece = {"content": answer.text}
        if answer.reasoning:
            piece["thinking"] = answer.reasoning
        if answer.calls:
            piece["tool_calls"] = [_called(call) for call in answer.calls]
        fields = {**self._fields(piece, True), **self._spent(usage, answer.ended.reason)}
        if answer.logprobs is not None:
            fields["logprobs"] = _logprobs(answer.logprobs)
        return fields

    def loaded(self) -> dict[str, Any]:
        """Build the answer to a request without a question: the model is there."""
        return {**self._fields({}, True), "done_reason": "load"}

    def _pieces(self, part: Part) -> list[Piece]:
        match part.kind:
            case "call":
                finished = self._finished_call()
                self._call = ToolCall(part.id, part.text, "")
                return finished
            case "arguments":
                if self._call is not None:
                    call = self._call
                    self._call = ToolCall(call.id, call.name, call.arguments + part.text)
                return []
        name = "thinking" if part.kind == "reasoning" else "content"
        return [*self._finished_call(), {name: part.text}] if part.text else []

    def _finished_call(self) -> list[Piece]:
        """Return the call that was being made: Ollama's clients want its arguments as an object."""
        call, self._call = self._call, None
        return [] if call is None else [{"tool_calls": [_called(call)]}]

    def _fields(self, piece: Piece, done: bool = False) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **self._put(piece), "done": done}

    def _spent(self, usage: Usage, reason: str) -> dict[str, Any]:
        """Say why it ended, and the tokens and nanoseconds that it took."""
        now_ns = self._clock_ns()
        opened_ns = max(self._opened_ns, self._began_ns)
        return {
            "done_reason": reason,
            "total_duration": now_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": opened_ns - self._began_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": now_ns - opened_ns,
        }


def _called(call: ToolCall) -> dict[str, Any]:
    """Build a call; arguments that were cut off are handed over as the text that they are."""
    try:
        arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"INVALID_JSON": call.arguments}
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _logprobs(scored: list[TokenLogprob]) -> Any:
    return chat_logprobs(scored, False)["content"]


def _line(fields: dict[str, Any]) -> bytes:
    return json_bytes(fields) + b"\n"
