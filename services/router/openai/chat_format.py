"""The chunks and bodies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.messages.failure import Ending, Usage
from common.messages.text import Part, TextOpened
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.openai.chunks import (
    AnswerOptions,
    ChunkFormat,
    chat_logprobs,
    full_usage,
    prompt_logprobs,
    stop_reason,
)
from services.router.sse import LOGPROBS, TEXT, EventTemplate, TextTemplate, event


class ChatFormat(ChunkFormat):
    def __init__(
        self, head: ResponseHead, num_choices: int, options: AnswerOptions | None = None
    ) -> None:
        super().__init__("chat.completion.chunk", head, options, num_choices)
        self._templates = [
            EventTemplate(self._delta(index, {"content": TEXT}, LOGPROBS))
            for index in range(num_choices)
        ]
        self._part_templates: dict[tuple[int, str, int], TextTemplate] = {}

    def opening(self, choice: int, prompt: TextOpened | None = None) -> bytes:
        """Render the role chunk."""
        if self._usage is not None:
            self._usage.opened(choice, prompt)
        chunk = self._delta(choice, {"role": "assistant", "content": "", "refusal": None})
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
        deltas = [new for part in delta.parts if (new := self._part_delta(part)) is not None]
        if delta.text:
            deltas.append({"content": delta.text})
        if not deltas:
            if not logprobs and not ids:
                return b""
            deltas.append({"content": ""})
        if ids is None and self._usage is None and logprobs and len(deltas) == 1:
            text = deltas[0].get("content")
            if text is not None:
                return self._templates[choice].scored(text, logprobs)
        rest = (self._event(choice, more, None, [] if ids else None) for more in deltas[1:])
        return b"".join((self._event(choice, deltas[0], logprobs, ids), *rest))

    def ending(self, choice: int, ended: Ending) -> bytes:
        self._endings.append(ended)
        if self._usage is not None:
            self._usage.ended(choice, ended)
        chunk = self._chunk(choice, {"delta": {}}, finish_reason=self._finish_reason(ended))
        chunk["choices"][0].update(stop_reason(ended))
        return event(chunk)

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        """Build a `chat.completion`."""
        body = {
            **self._head_of("chat.completion"),
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
        calls = [_call(call.id, call.name, call.arguments) for call in answer.calls]
        reasoning = answer.reasoning if self._options.include_reasoning else ""
        # Line ends between reasoning and a call are no content.
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
        """Render a part alone, without logprobs or ids, as most parts of parsed answers are."""
        if part.kind == "content":
            return self._templates[choice].plain(part.text) if part.text else b""
        delta = self._part_delta(part)
        if delta is None:
            return b""
        if part.kind == "call":
            return self._event(choice, delta, None, None)
        key = (choice, part.kind, part.index)
        template = self._part_templates.get(key)
        if template is None:
            stand_in = self._part_delta(Part(part.kind, TEXT, part.index)) or {}
            template = TextTemplate(self._delta(choice, stand_in))
            self._part_templates[key] = template
        return template.filled(part.text)

    def _part_delta(self, part: Part) -> dict[str, Any] | None:
        """Return a part as a delta; None where there is nothing to show."""
        if part.kind in ("call", "arguments"):
            return self._call_delta(part)
        if not part.text or (part.kind == "reasoning" and not self._options.include_reasoning):
            return None
        if part.kind == "content":
            return {"content": part.text}
        return {"reasoning": part.text, "reasoning_content": part.text}

    def _call_delta(self, part: Part) -> dict[str, Any] | None:
        begins = part.kind == "call"
        if self._options.functions:  # which have room for one call
            function = {"name": part.text, "arguments": ""} if begins else {"arguments": part.text}
            return None if part.index else {"function_call": function}
        if begins:
            call = _call(part.id, part.text, "")
            return {"tool_calls": [{"index": part.index, **call}]}
        more = {"index": part.index, "function": {"arguments": part.text}}
        return {"tool_calls": [more]} if part.text else None

    def _event(
        self, choice: int, delta: dict[str, Any], logprobs: Any, ids: list[int] | None
    ) -> bytes:
        chunk = self._delta(choice, delta, logprobs)
        if ids is not None:
            chunk["choices"][0]["token_ids"] = ids
        return event(chunk)

    def _delta(self, choice: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return self._chunk(choice, {"delta": delta}, logprobs)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
