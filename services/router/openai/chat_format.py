"""The chunks and bodies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextOpened
from services.router.answer import CompleteAnswer, Delta, ResponseHead, ToolCall
from services.router.openai.chunks import (
    AnswerOptions,
    RunningUsage,
    chat_logprobs,
    closing,
    full_usage,
    head_of,
    prompt_logprobs,
    stop_reason,
)
from services.router.sse import (
    DONE,
    LOGPROBS,
    TEXT,
    EventTemplate,
    TextTemplate,
    error_event,
    event,
)

CHUNK = "chat.completion.chunk"


class ChatFormat:
    """Chat chunks and bodies; of a stream it has the usage so far."""

    def __init__(
        self,
        head: ResponseHead,
        num_choices: int,
        options: AnswerOptions | None = None,
    ) -> None:
        self._head = head
        self._options = options or AnswerOptions()
        self._usage = RunningUsage(num_choices) if self._options.continuous_usage else None
        self._endings: list[Ending] = []
        self._templates = [
            EventTemplate(self._chunk(index, {"content": TEXT}, LOGPROBS))
            for index in range(num_choices)
        ]

        self._part_templates: dict[tuple[int, str, int], TextTemplate] = {}

    def opening(self, choice: int, prompt: TextOpened | None = None) -> bytes:
        """Render the role chunk."""
        if self._usage is not None:
            self._usage.opened(choice, prompt)
        chunk = self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
        if self._options.token_ids and prompt is not None:
            chunk["prompt_token_ids"] = list(prompt.prompt_ids)
        if not self._options.echo:
            return event(chunk)
        return event(chunk) + self._event(choice, {"content": self._options.echo}, None, None)

    def template(self, choice: int) -> EventTemplate | None:
        """Return the content chunk, where it is always the same."""
        return None if self._usage is not None else self._templates[choice]

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Render what is new: a chunk for each part, the first one with logprobs and ids."""
        if self._usage is not None:
            self._usage.grew(choice, len(delta.token_ids))
        elif delta.parts and not delta.logprobs and not self._options.token_ids:
            return b"".join([self._part(choice, part) for part in delta.parts])
        logprobs = None
        if delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._options.tokens_as_ids)
        ids = delta.token_ids if self._options.token_ids else None
        news = [new for part in delta.parts if (new := self._new(part)) is not None]
        if delta.text:
            news.append({"content": delta.text})
        if not news:
            if not logprobs and not ids:
                return b""
            news.append({"content": ""})
        if ids is None and self._usage is None and logprobs and len(news) == 1:
            text = news[0].get("content")
            if text is not None:
                return self._templates[choice].scored(text, logprobs)
        rest = (self._event(choice, new, None, [] if ids else None) for new in news[1:])
        return b"".join((self._event(choice, news[0], logprobs, ids), *rest))

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the chunk with the finish reason."""
        self._endings.append(ended)
        if self._usage is not None:
            self._usage.ended(choice, ended)
        chunk = self._chunk(choice, {}, finish_reason=self._finish_reason(ended))
        chunk["choices"][0].update(stop_reason(ended))
        return event(chunk)

    def closing(self, usage: Usage) -> bytes:
        """Render the usage chunk, if it was asked for, and the end."""
        wanted = full_usage(usage, self._endings) if self._options.include_usage else None
        return closing(head_of(self._head, CHUNK), wanted)

    def failed(self, failure: Failure) -> bytes:
        """Render the error and the end."""
        return error_event(failure) + DONE

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        """Build a `chat.completion`."""
        body = {
            **head_of(self._head, "chat.completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": full_usage(usage, (answer.ended for answer in answers)),
        }
        if self._options.prompt_logprobs:
            scored = max((answer.prompt_logprobs for answer in answers), key=len)
            body["prompt_logprobs"] = prompt_logprobs(scored, self._options.tokens_as_ids)
        if self._options.token_ids:
            prompts = [answer.prompt for answer in answers if answer.prompt is not None]
            body["prompt_token_ids"] = list(prompts[0].prompt_ids) if prompts else None
        return body

    def _choice(self, index: int, answer: CompleteAnswer) -> dict[str, Any]:
        logprobs = None
        if answer.logprobs is not None:
            logprobs = chat_logprobs(answer.logprobs, self._options.tokens_as_ids)
        choice = {
            "index": index,
            "message": self._message(answer),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(answer.ended),
            **stop_reason(answer.ended),
        }
        return {**choice, "token_ids": answer.token_ids} if self._options.token_ids else choice

    def _message(self, answer: CompleteAnswer) -> dict[str, Any]:
        calls = [_whole_call(call) for call in answer.calls]
        reasoning = answer.reasoning if self._options.include_reasoning else ""
        # Line ends between a thought and a call are nobody's content.
        content = "" if calls and not answer.text.strip() else answer.text
        message = {
            "role": "assistant",
            "content": self._options.echo + content or (None if calls else ""),
            "refusal": None,
            "reasoning": reasoning or None,
            "reasoning_content": reasoning or None,
        }
        if calls and self._options.functions:
            return {**message, "function_call": calls[0]["function"]}
        return {**message, "tool_calls": calls} if calls else message

    def _finish_reason(self, ended: Ending) -> str:
        if ended.num_calls and ended.reason == "stop" and not self._options.named_tool:
            return "function_call" if self._options.functions else "tool_calls"
        return ended.reason

    def _part(self, choice: int, part: Part) -> bytes:
        """Render a part with nothing else to say, which is most of what a parsed answer is."""
        if part.kind == "content":
            return self._templates[choice].plain(part.text) if part.text else b""
        new = self._new(part)
        if new is None:
            return b""
        if part.kind == "call":
            return self._event(choice, new, None, None)
        key = (choice, part.kind, part.index)
        template = self._part_templates.get(key)
        if template is None:
            stand_in = self._new(Part(part.kind, TEXT, part.index)) or {}
            template = TextTemplate(self._chunk(choice, stand_in))
            self._part_templates[key] = template
        return template.filled(part.text)

    def _new(self, part: Part) -> dict[str, Any] | None:
        """Return a part as a delta; None where there is nothing to show."""
        if part.kind in ("call", "arguments"):
            return self._new_of_call(part)
        if not part.text or (part.kind == "reasoning" and not self._options.include_reasoning):
            return None
        if part.kind == "content":
            return {"content": part.text}
        return {"reasoning": part.text, "reasoning_content": part.text}

    def _new_of_call(self, part: Part) -> dict[str, Any] | None:
        begins = part.kind == "call"
        if self._options.functions:  # whose form has no place for a second call
            function = {"name": part.text, "arguments": ""} if begins else {"arguments": part.text}
            return None if part.index else {"function_call": function}
        if begins:
            return {"tool_calls": [_begun_call(part)]}
        more = {"index": part.index, "function": {"arguments": part.text}}
        return {"tool_calls": [more]} if part.text else None

    def _event(
        self, choice: int, delta: dict[str, Any], logprobs: Any, ids: list[int] | None
    ) -> bytes:
        chunk = self._chunk(choice, delta, logprobs)
        if ids is not None:
            chunk["choices"][0]["token_ids"] = ids
        return event(chunk)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**head_of(self._head, CHUNK), "choices": [choice]}
        if self._usage is not None:
            return {**chunk, "usage": self._usage.object()}
        return {**chunk, "usage": None} if self._options.include_usage else chunk


def _begun_call(part: Part) -> dict[str, Any]:
    return {
        "index": part.index,
        "id": part.id,
        "type": "function",
        "function": {"name": part.text, "arguments": ""},
    }


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
