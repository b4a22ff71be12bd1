"""Chat templates as transformers renders them: sandboxed jinja2, character for character the same.

It knows neither tokens nor limits; the process that renders bounds time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]

# The spellings under which clients send a model's reasoning back; templates read the first two.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# transformers' own mark: a template that looks at its content's end must see the same character.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(Exception):
    """A conversation that this template, or any template, cannot be applied to."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is applied to; `variables` are further ones, such as `enable_thinking`.

    Null fields count as absent; with `keep_null_content`, a message with calls keeps a null
    content, which some templates require.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    keep_null_content: bool = False


class ChatTemplate:
    """One compiled template of a model folder."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile the source; ChatTemplateError when it is not valid."""
        self.source = source
        self._special_tokens = special_tokens
        self._now_s = 0.0
        try:
            self._template = _environment(self._strftime_now).from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, conversation: Conversation, now_s: float) -> str:
        """Render as `transformers.apply_chat_template(tokenize=False)` would at Unix time `now_s`.

        Raises ChatTemplateError for what transformers refuses, and whatever a template raises.
        """
        if not conversation.messages:
            raise ChatTemplateError("the conversation is empty; give at least one message")
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        messages = [
            _completed(message, conversation.keep_null_content) for message in conversation.messages
        ]
        final = ""
        if conversation.continue_final_message:
            final = self._mark_final(messages[-1])
        self._now_s = now_s
        variables = {**self._special_tokens, **(conversation.variables or {})}
        rendered = self._template.render(
            **{"documents": None, **variables},
            messages=messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
        )
        return _cut_at_mark(rendered, final) if conversation.continue_final_message else rendered

    def _mark_final(self, final: Message) -> str:
        """Mark where the final message's text ends, and return that text."""
        content = final.get("content")
        if content is None:
            raise ChatTemplateError("continue_final_message: the final message has no content")
        if "content" not in self.source:
            raise ChatTemplateError("continue_final_message: the template does not use content")
        if isinstance(content, str):
            final["content"] = content + _MARK
            return content
        if not isinstance(content, list):
            raise ChatTemplateError("continue_final_message: the final message is not a text")
        for at in reversed(range(len(content))):
            if "text" in content[at]:
                text = str(content[at]["text"])
                marked = {**content[at], "text": text + _MARK}
                final["content"] = [*content[:at], marked, *content[at + 1 :]]
                return text
        raise ChatTemplateError("continue_final_message: the final message has no text part")

    def _strftime_now(self, format: str) -> str:
        return datetime.fromtimestamp(self._now_s).strftime(format)


def _completed(message: Message, keep_null_content: bool) -> Message:
    """Copy a message without null fields, its reasoning under each name that templates read."""
    if not isinstance(message, dict):
        raise ChatTemplateError("every message must be an object with a role and content")
    copied = {key: value for key, value in message.items() if value is not None}
    if keep_null_content and "tool_calls" in copied:
        copied.setdefault("content", None)
    for key in REASONING_KEYS:
        if key in copied:
            return {"thinking": copied[key], **copied, "reasoning_content": copied[key]}
    return copied


def _cut_at_mark(rendered: str, final: str) -> str:
    mark = _MARK.strip()
    if final.strip() not in rendered or mark not in rendered:
        raise ChatTemplateError(
            "continue_final_message: the final message does not appear as it is in what the "
            "template renders, so it cannot be continued"
        )
    at = rendered.rindex(mark)
    if rendered.startswith(_MARK, at):
        return rendered[:at]
    return rendered[:at].rstrip()  # the template strips its content, so the end was stripped too


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words; here it only renders.

    It renders through a call, as transformers does: what is set inside is not seen outside.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_words"), [], [], body).set_lineno(line)

    def _words(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` of a template, without the type object that would come with the builtin."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, which could reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not start with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes <, > and &, which would change what the model reads.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(strftime_now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # A plain function: a bound method would carry a way to its object into the sandbox.
    environment.globals["strftime_now"] = lambda format: strftime_now(format)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
