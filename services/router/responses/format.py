"""The output items, events and bodies of `/v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import TokenLogprob
from common.messages.text import Part, TextOpened
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.errors import error_object
from services.router.openai.chunks import chat_logprobs
from services.router.responses.tools import CustomInput, ToolName
from services.router.sse import json_bytes, json_string, named_event

ID_PREFIX: Final = "resp_"
NO_NAMES: Final[Mapping[str, ToolName]] = {}
Keep: TypeAlias = Callable[[dict[str, Any]], None]


class _Kind(NamedTuple):
    """The properties of an item type; `event` and `field` belong to its text."""

    id_prefix: str
    event: str
    field: str


_KINDS: Final = {
    "message": _Kind("msg", "response.output_text", "text"),
    "reasoning": _Kind("rs", "response.reasoning_text", "text"),
    "function_call": _Kind("fc", "response.function_call_arguments", "arguments"),
    "custom_tool_call": _Kind("ctc", "response.custom_tool_call_input", "input"),
}


class OutputItem:
    """An output item and its text so far; `tool` is the one that a call names."""

    def __init__(
        self, kind: str, item_id: str, index: int, call_id: str = "", tool: ToolName | None = None
    ) -> None:
        self.kind = kind
        self.tool = tool
        self.logprobs: list[Any] = []
        self.index = index
        self.place: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if tool is None:
            self.place["content_index"] = 0
        self._call_id = call_id
        self._reader = CustomInput() if kind == "custom_tool_call" else None
        self._texts: list[str] = []

    def push(self, text: str) -> str:
        """Take more text and return what is new; a custom input may hold it back."""
        if self._reader is not None:
            text = self._reader.push(text)
        self._texts.append(text)
        return text

    def finish(self) -> str:
        """Take and return the text that was held back."""
        rest = "" if self._reader is None else self._reader.finish()
        self._texts.append(rest)
        return rest

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        text = {"annotations": [], "logprobs": self.logprobs, "text": self.text}
        return {"type": "output_text", **text}

    def object(self, status: str) -> dict[str, Any]:
        item = {"id": self.place["item_id"], "type": self.kind, "status": status}
        if self.tool is not None:
            namespace = {"namespace": self.tool.namespace} if self.tool.namespace else {}
            call = {"call_id": self._call_id, "name": self.tool.name}
            return {**item, **call, _KINDS[self.kind].field: self.text, **namespace}
        if self.kind == "reasoning":  # without a summary, which no model here writes
            return {**item, "summary": [], "content": [self.part()], "encrypted_content": None}
        return {**item, "role": "assistant", "content": [self.part()]}


class ResponsesFormat:
    """Renders one response as its output items; while streaming it holds the state.

    `echo` has the request's fields that a response repeats; `names` maps the model's tool names to
    the client's. A response that has completed or failed is `final`. `keep` gets it before the
    client, which may continue from it at once.
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
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._delta_prefix = b""  # of the open item's text events
        self._tokens: list[TokenLogprob] = []  # since the last message
        self._num_sent_tokens = 0  # of these, in deltas
        self._reasoning = ""  # before the message
        self._ended: Ending | None = None

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        response = self.response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def template(self, choice: int) -> None:
        return None  # every event has a number of its own

    def delta(self, choice: int, delta: Delta) -> bytes:
        self._tokens += delta.logprobs or ()
        if delta.parts:
            return b"".join(event for part in delta.parts for event in self._part(part))
        return b"".join(self._grow("message", delta.text)) if delta.text else b""

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the end of the last item; an answer without items is an empty message."""
        self._ended = ended
        empty = () if self._open or self._output else self._begin("message")
        return b"".join((*empty, *self._close(_status(ended))))

    def closing(self, usage: Usage) -> bytes:
        assert self._ended is not None
        response = self._finished(self._ended, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: Failure) -> bytes:
        """Render the failed response, and the error, which clients raise."""
        code = {"code": _error_code(failure), "message": failure.message}
        failed = self._event("response.failed", response=self._broken_off("failed", error=code))
        error = error_object(failure)
        flat = {key: error[key] for key in ("code", "message", "param")}
        return failed + self._event("error", **flat, error=error)

    def cancelled(self) -> None:
        self._broken_off("cancelled")

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        self._tokens = list(answer.logprobs or ())
        if answer.reasoning:
            self._add(self._new_item("reasoning"), answer.reasoning)
        if answer.text or not (answer.reasoning or answer.calls):
            self._add(self._new_item("message"), answer.text)
        for call in answer.calls:
            tool = self._tool(call.name)
            self._add(self._new_item(tool.item_kind, call.id, tool), call.arguments)
        self._output[-1]["status"] = _status(answer.ended)
        return self._finished(answer.ended, usage)

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(self._output),
            **self._echo,
            "usage": None,
            **fields,
        }

    def _part(self, part: Part) -> Iterator[bytes]:
        match part.kind:
            case "content":
                yield from self._grow("message", part.text)
            case "reasoning":
                yield from self._grow("reasoning", part.text)
            case "call":
                tool = self._tool(part.text)
                yield from self._begin(tool.item_kind, part.id, tool)
            case "arguments":
                if self._open is not None and self._open.tool is not None:
                    if text := self._open.push(part.text):
                        yield self._text_delta(text)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.push(text)
        if kind == "reasoning":
            yield self._text_delta(text)
            return
        tokens = self._tokens[self._num_sent_tokens :]
        self._num_sent_tokens += len(tokens)
        logprobs = json_bytes(_logprobs(visible_tokens(tokens, text))) if tokens else b"[]"
        yield self._text_delta(text, b',"logprobs":%b' % logprobs)

    def _begin(self, kind: str, call_id: str = "", tool: ToolName | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        item = self._open = self._new_item(kind, call_id, tool)
        delta = named_event(f"{_KINDS[kind].event}.delta", {**item.place, "delta": ""})
        self._delta_prefix = delta.removesuffix(b'""}\n\n')
        content: dict[str, Any] = {"content": []} if tool is None else {}
        start = {**item.object("in_progress"), **content}
        yield self._event("response.output_item.added", output_index=item.index, item=start)
        if tool is None:
            yield self._event("response.content_part.added", **item.place, part=item.part())

    def _close(self, status: str) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        if rest := item.finish():
            yield self._text_delta(rest)
        self._take(item, status)
        kind = _KINDS[item.kind]
        fields: dict[str, Any] = {**item.place, kind.field: item.text}
        if item.kind == "message":
            fields["logprobs"] = item.logprobs
        if item.kind == "function_call" and item.tool is not None:
            fields["name"] = item.tool.name
        yield self._event(f"{kind.event}.done", **fields)
        if item.tool is None:
            yield self._event("response.content_part.done", **item.place, part=item.part())
        whole = self._output[item.index]
        yield self._event("response.output_item.done", output_index=item.index, item=whole)

    def _add(self, item: OutputItem, text: str) -> None:
        item.push(text)
        item.finish()
        self._take(item, "completed")

    def _take(self, item: OutputItem, status: str) -> None:
        """Add an item to the output; a message gets the logprobs of its own tokens only."""
        if item.kind == "reasoning":
            self._reasoning += item.text
        elif item.kind == "message" and self._tokens:
            tokens = visible_tokens(self._tokens, item.text, after=self._reasoning)
            item.logprobs = _logprobs(tokens)
            self._tokens, self._num_sent_tokens, self._reasoning = [], 0, ""
        self._output.append(item.object(status))

    def _new_item(self, kind: str, call_id: str = "", tool: ToolName | None = None) -> OutputItem:
        # The ids of a response and of its items are equally unique.
        index = len(self._output)
        item_id = f"{_KINDS[kind].id_prefix}_{self._head.id.removeprefix(ID_PREFIX)}{index:02x}"
        return OutputItem(kind, item_id, index, call_id, tool)

    def _tool(self, name: str) -> ToolName:
        return self._names.get(name) or ToolName(name)

    def _finished(self, ended: Ending, usage: Usage) -> dict[str, Any]:
        fields: dict[str, Any] = {"usage": _usage(usage, ended.reasoning_tokens)}
        status = _status(ended)
        if status == "completed":
            fields["completed_at"] = int(self._clock())
        else:
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._end(self.response(status, **fields))

    def _broken_off(self, status: str, **fields: Any) -> dict[str, Any]:
        """End the response with the output that it has; the open item is incomplete."""
        item, self._open = self._open, None
        if item is not None:
            self._take(item, "incomplete")
        return self._end(self.response(status, **fields))

    def _end(self, response: dict[str, Any]) -> dict[str, Any]:
        self.final = response
        if self._keep is not None:
            self._keep(response)
        return response

    def _text_delta(self, text: str, more: bytes = b"") -> bytes:
        pieces = (self._delta_prefix, json_string(text), more, self._next_number())
        return b'%b%b%b,"sequence_number":%d}\n\n' % pieces

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"sequence_number": self._next_number(), **fields})

    def _next_number(self) -> int:
        number = self._num_events
        self._num_events = number + 1
        return number


def visible_tokens(
    tokens: Sequence[TokenLogprob], text: str, after: str = ""
) -> list[TokenLogprob]:
    """Return the tokens of `text`, which comes somewhere after `after`; others were not shown.

    If the tokens' bytes do not contain the text as it stands, it was changed on its way. Then it
    gets all tokens: too many are better than the wrong ones.
    """
    generated = b"".join(token.chosen.data for token in tokens)
    before = generated.find(after.encode())
    start = generated.find(text.encode(), before + len(after.encode()) if before >= 0 else 0)
    if start < 0:
        return list(tokens)
    end = start + len(text.encode())
    stops = accumulate(len(token.chosen.data) for token in tokens)
    return [
        token
        for token, stop in zip(tokens, stops, strict=True)
        if stop > start and stop - len(token.chosen.data) < end
    ]


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[Any]:
    logprobs: list[Any] = chat_logprobs(tokens)["content"]
    return logprobs


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
