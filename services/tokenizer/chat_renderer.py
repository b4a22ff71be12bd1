"""Renders conversations with a model's chat templates, and detects the format of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from common.chat_formats import (
    REASONING_FORMATS,
    formats_of,
    opens_reasoning,
    sorts_tools,
    turns_off,
)
from common.errors import ModelError
from common.messages.tokenize import ChatPrompt
from common.tokenizer_folder import TokenizerFolder
from services.tokenizer.answer_grammar import stage_of
from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Conversation
from services.tokenizer.jobs import EncoderSettings, ReasoningStage, Refused, TemplateFormat
from services.tokenizer.template_capabilities import (
    TemplateCapabilities,
    adapt_messages,
    probe_capabilities,
)

_KWARGS_FIELD = "chat_template_kwargs"
# Arguments of apply_chat_template, which a request decides by other fields or not at all.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_MAX_VALUES = 4096


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it, its tools, and the format of the model's answer."""

    text: str = ""
    tools: list[Any] = field(default_factory=list)
    answer_format: TemplateFormat = TemplateFormat()


class ChatRenderer:
    """The chat templates of one folder; all of their code runs inside `limits()`."""

    def __init__(
        self,
        folder: TokenizerFolder,
        settings: EncoderSettings,
        limits: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Compile the templates; an invalid one refuses its conversations later.

        ModelError for an invalid one that the settings name: the operator can correct it now.
        """
        self._folder = folder
        self._settings = settings
        self._limits = limits
        self._templates: dict[str, ChatTemplate | str] = {}  # by source; a str is the error
        self._capabilities: dict[str, TemplateCapabilities] = {}
        for source in folder.templates.values():
            self._compile(source)
            if settings.chat_template and isinstance(why := self._templates[source], str):
                raise ModelError(f"{settings.chat_template}: {why}")

    def render(self, prompt: ChatPrompt, now_s: float) -> RenderedChat:
        """Render a conversation as of Unix time `now_s`; Refused says why it cannot be rendered."""
        try:
            with self._limits():
                return self._rendered(prompt, now_s)
        except Refused:
            raise
        except MemoryError as error:
            # Parts of the memory may stay allocated; a fresh process is the safe choice.
            limit = self._settings.template_memory_mb
            message = f"the chat template needs more than {limit} MiB for this conversation"
            raise Refused(message, retiring=True) from error
        except (ChatTemplateError, TemplateError) as error:
            raise Refused(f"the chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template can raise anything that Python can
            reason = f"{type(error).__name__}: {error}"
            raise Refused(f"the chat template fails on this conversation: {reason}") from error

    def _compile(self, source: str) -> None:
        try:
            with self._limits():
                self._templates[source] = ChatTemplate(source, self._folder.special_tokens)
        except (ChatTemplateError, MemoryError, RecursionError) as error:
            self._templates[source] = str(error)

    def _rendered(self, prompt: ChatPrompt, now_s: float) -> RenderedChat:
        messages = json.loads(prompt.messages_json)
        tools = json.loads(prompt.tools_json) if prompt.tools_json else None
        template = self._template(has_tools=tools is not None)
        variables: dict[str, Any] | None = None
        if prompt.template_kwargs_json:
            variables = json.loads(prompt.template_kwargs_json)
            check_kwargs(variables, self._settings.template_kwargs, template.source)
        capabilities = self._capabilities_of(template)
        conversation = Conversation(
            messages=adapt_messages(messages, capabilities),
            tools=_sorted(tools) if sorts_tools(template.source) else tools,
            variables=variables,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            keep_null_content=capabilities.call_content == "null",
        )
        text = template.render(conversation, now_s)
        continued = _final_text(messages) if prompt.continue_final_message else None
        format = self._answer_format(template, text, continued)
        kind = format.reasoning_format
        if format.stage == "before" and turns_off(template.source, kind, variables or {}):
            format = replace(format, stage="behind")
        return RenderedChat(text, tools or [], format)

    def _answer_format(
        self, template: ChatTemplate, text: str, continued: str | None
    ) -> TemplateFormat:
        source, settings = template.source, self._settings
        formats = formats_of(source, settings.tool_format, settings.reasoning_format)
        tool_format, reasoning_format = ("" if name == "none" else name for name in formats)
        stage: ReasoningStage = "behind"
        if reasoning_format in REASONING_FORMATS:
            stage = stage_of(text, REASONING_FORMATS[reasoning_format], continued)
        # Models of deepseek_r1 may leave the first tag out; the others are asked not to reason.
        if stage == "before" and reasoning_format == "think" and opens_reasoning(source):
            stage = "behind"
        return TemplateFormat(
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            stage=stage,
            template=source,
            several_calls=self._capabilities_of(template).several_calls,
        )

    def _template(self, has_tools: bool) -> ChatTemplate:
        source = self._folder.template_for(has_tools)
        if source is None:
            raise Refused(
                "this model has no chat template: /v1/completions takes a prompt without one, "
                "/v1/embeddings if it makes those; --chat-template FILE would give it one",
                "no_chat_template",
            )
        template = self._templates[source]
        if isinstance(template, str):
            raise Refused(f"this model's chat template is not valid: {template}")
        return template

    def _capabilities_of(self, template: ChatTemplate) -> TemplateCapabilities:
        if template.source not in self._capabilities:
            self._capabilities[template.source] = probe_capabilities(template)
        return self._capabilities[template.source]


def _sorted(tools: list[Any] | None) -> list[Any] | None:
    return tools and json.loads(json.dumps(tools, sort_keys=True))


def _final_text(messages: list[Any]) -> str:
    """Return the text of the final message, which the model continues."""
    content = messages[-1].get("content") if messages and isinstance(messages[-1], dict) else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def check_kwargs(variables: dict[str, Any], allowed: Collection[str], template: str) -> None:
    """Raise Refused, naming the variable, for one that is not allowed or too large."""
    for name in sorted(variables):
        field, code = f"{_KWARGS_FIELD}.{name}", "invalid_value"
        message = ""
        if name in RESERVED_KWARGS:
            message = (
                f"{_KWARGS_FIELD} must not set {name}; the request has a field of its own for it, "
                "or the server decides it"
            )
        elif name not in allowed:
            message = (
                f"{_KWARGS_FIELD} must not set {name}; this server lets requests set "
                f"{', '.join(sorted(allowed)) or 'none'} (its setting tokenizer.template_kwargs)"
            )
        elif name == "documents" and variables[name] and name not in template:
            message = (
                "this model's chat template has no place for documents; put them into a message"
            )
            # It is a field of the request, too, and mostly comes from there.
            field, code = name, "unsupported_value"
        if message:
            raise Refused(message, code, field)
        if _num_values(variables[name]) > _MAX_VALUES:
            raise Refused(f"{field} holds more than {_MAX_VALUES} values", "invalid_value", field)


def _num_values(value: Any) -> int:
    """Count the values inside, whose depth the router has bounded."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + (sum(map(_num_values, value)) if isinstance(value, list) else 0)
