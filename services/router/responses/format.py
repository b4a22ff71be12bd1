"""The events and bodies of `/v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextOpened, TokenLogprob
from services.router.answer import Answer, Delta, ResponseHead
from services.router.errors import error_object
from services.router.responses.custom_input import custom_input
from services.router.responses.items import (
    EventCounter,
    OpenCall,
    OpenItem,
    call_item,
    message_item,
    reasoning_item,
    token_logprobs,
)
from services.router.responses.spoken import spoken
from services.router.responses.tools import ToolName

ID_PREFIX = "resp_"
CALL_KINDS = ("function_call", "custom_tool_call")
_ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
Keep: TypeAlias = Callable[[dict[str, Any]], None]
NO_NAMES: Final[Mapping[str, ToolName]] = {}
_KINDS = {"content": "message", "reasoning": "reasoning"}


class ResponsesFormat:
    """A response as its items; of a stream it is the state, too.

    `echo` has the request's fields that a response repeats, `names` the tools by the names that the
    model knows. Once the response is complete, or has failed, it is `final`; `keep` gets it before
    any client does, who may go on from it at once.
    """

    def __init__(
        self,
        head: ResponseHead,
        echo: Mapping[str, Any],
        names: Mapping[str, ToolName] = NO_NAMES,
        keep: Keep | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.final: dict[str, Any] | None = None
        self._keep = keep
        self._head = head
        self._echo = echo
        self._names = names
        self._clock = clock
        self._counter = EventCounter()
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._tokens: list[TokenLogprob] = []  # since the last message
        self._num_said = 0  # of these, in deltas
        self._thought = ""  # before the message
        self._ended: Ending | None = None

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        """Render the response as it begins."""
        response = {"response": self._response("in_progress")}
        created = self._counter.event("response.created", response)
        return created + self._counter.event("response.in_progress", response)

    def template(self, choice: int) -> None:
        """Return none: every event has a number of its own."""
        return None

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Render what is new, item by item."""
        self._tokens += delta.logprobs
        if delta.parts:
            return b"".join(event for part in delta.parts for event in self._part(part))
        return b"".join(self._grow("message", delta.text)) if delta.text else b""

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the end of the last item; an answer without any is an empty message."""
        self._ended = ended
        events = [] if self._open or self._output else list(self._begin("message"))
        return b"".join((*events, *self._close(_status(ended))))

    def closing(self, usage: Usage) -> bytes:
        """Render the complete response."""
        assert self._ended is not None
        status = _status(self._ended)
        response = self._finished(self._ended, usage, self._output)
        return self._counter.event(f"response.{status}", {"response": response})

    def failed(self, failure: Failure) -> bytes:
        """Render the response as it failed, and the error, which clients raise."""
        self._leave()
        error = error_object(failure)
        response = self._response("failed", self._output)
        response["error"] = {"code": _error_code(failure), "message": failure.message}
        self._end_as(response)
        flat = {key: error[key] for key in ("code", "message", "param")}
        return self._counter.event("response.failed", {"response": response}) + self._counter.event(
            "error", {**flat, "error": error}
        )

    def begun(self, status: str) -> dict[str, Any]:
        """Build the response as it is before there is anything of it."""
        return self._response(status)

    def cancelled(self) -> None:
        """End the response with what there is of it."""
        self._leave()
        self._end_as(self._response("cancelled", self._output))

    def body(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Build the whole response."""
        (answer,) = answers
        return self._finished(answer.ended, usage, self._items(answer))

    def _leave(self) -> None:
        """Take the item that is being written as it is."""
        item, self._open = self._open, None
        if item is not None:
            self._score(item)
            self._output.append(item.item("incomplete"))

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if answer.reasoning:
            items.append(reasoning_item(self._id("reasoning", 0), answer.reasoning, "completed"))
        if answer.text or not (items or answer.calls):
            tokens = spoken(answer.logprobs or [], answer.text, after=answer.reasoning)
            item_id = self._id("message", len(items))
            items.append(message_item(item_id, answer.text, token_logprobs(tokens), "completed"))
        for call in answer.calls:
            tool = self._tool(call.name)
            if tool.is_custom:
                call = replace(call, arguments=custom_input(call.arguments))
            item_id = self._id(_call_kind(tool), len(items))
            items.append(call_item(item_id, call, tool, "completed"))
        items[-1]["status"] = _status(answer.ended)
        return items

    def _part(self, part: Part) -> Iterator[bytes]:
        """Render one part of a parsed answer."""
        if part.kind == "call":
            tool = self._tool(part.text)
            yield from self._begin(_call_kind(tool), OpenCall(part.id, tool))
        elif part.kind == "arguments":
            if self._open is not None and self._open.kind in CALL_KINDS:
                yield self._open.text(part.text)
        else:
            yield from self._grow(_KINDS[part.kind], part.text)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        tokens = self._tokens[self._num_said :] if kind == "message" else []
        self._num_said += len(tokens)
        yield self._open.text(text, spoken(tokens, text))

    def _begin(self, kind: str, call: OpenCall | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        index = len(self._output)
        self._open = OpenItem(self._counter, kind, self._id(kind, index), index, call)
        yield from self._open.opening()

    def _close(self, status: str) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        if rest := item.rest():
            yield rest
        self._score(item)
        self._output.append(item.item(status))
        yield from item.closing(self._output[-1])

    def _score(self, item: OpenItem) -> None:
        """Find the tokens of a complete message: its deltas may have had some too many."""
        if item.kind == "reasoning":
            self._thought += item.said
        elif item.kind == "message" and self._tokens:
            item.score(spoken(self._tokens, item.said, after=self._thought))
            self._tokens, self._num_said, self._thought = [], 0, ""

    def _tool(self, name: str) -> ToolName:
        return self._names.get(name) or ToolName(name)

    def _id(self, kind: str, index: int) -> str:
        """Make an item's id of the response's, so that both are unique alike."""
        return f"{_ITEM_PREFIXES[kind]}_{self._head.id.removeprefix(ID_PREFIX)}{index:02x}"

    def _finished(
        self, ended: Ending, usage: Usage, output: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        status = _status(ended)
        response = self._response(status, output)
        response["usage"] = _usage(usage, ended.reasoning_tokens)
        if status == "completed":
            response["completed_at"] = int(self._clock())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end_as(response)
        return response

    def _end_as(self, response: dict[str, Any]) -> None:
        self.final = response
        if self._keep is not None:
            self._keep(response)

    def _response(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(output),
            **self._echo,
            "usage": None,
        }


def _call_kind(tool: ToolName) -> str:
    return "custom_tool_call" if tool.is_custom else "function_call"


def _status(ended: Ending) -> str:
    return "incomplete" if ended.reason == "length" else "completed"


def _error_code(failure: Failure) -> str:
    """Choose among the codes that OpenAI has for a response's error."""
    if failure.status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if failure.status == 429 else "invalid_prompt"


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
