"""Renders conversations by the chat templates of a model folder, and knows how its answers look."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from common.chat_formats import (
    REASONING_FORMATS,
    opens_reasoning,
    reasoning_format_of,
    tool_format_of,
)
from common.errors import ModelError
from common.messages.tokenize import ChatPrompt
from common.tokenizer_folder import TokenizerFolder
from services.tokenizer import template_kwargs
from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Conversation
from services.tokenizer.composition import Speech
from services.tokenizer.conversation import UnsupportedContent, for_template
from services.tokenizer.forms import MessageForms, probe
from services.tokenizer.job import EncoderSettings
from services.tokenizer.refusal import Refused, refused
from services.tokenizer.thinking import Stage, stage_of


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model reads it, its tools, and how the model's answer will look."""

    text: str
    tools: list[Any]
    speech: Speech


class Chats:
    """The chat templates of one folder; whatever they do happens inside of `limits()`."""

    def __init__(
        self,
        folder: TokenizerFolder,
        settings: EncoderSettings,
        limits: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Compile the templates; one that is not valid refuses its conversations later.

        ModelError for one that was chosen by the settings: whoever did is there to mend it.
        """
        self._folder = folder
        self._settings = settings
        self._limits = limits
        self._templates: dict[str, ChatTemplate | str] = {}  # by source; a text says what is wrong
        self._forms: dict[str, MessageForms] = {}
        for source in folder.templates.values():
            self._compile(source)
            if settings.chat_template and isinstance(why := self._templates[source], str):
                raise ModelError(f"{settings.chat_template}: {why}")

    def render(self, prompt: ChatPrompt, now_s: float) -> Rendered:
        """Render at Unix time `now_s`; Refused says why a conversation cannot be."""
        try:
            with self._limits():
                return self._rendered(prompt, now_s)
        except Refused:
            raise
        except UnsupportedContent as error:
            raise refused(str(error), "unsupported_content", error.field) from error
        except MemoryError as error:
            # What was allocated stays mapped here and there; a fresh process is cheaper than doubt.
            limit = self._settings.template_memory_mb
            because = refused(
                f"the chat template needs more than {limit} MiB for this conversation"
            )
            raise Refused(because.failure, retiring=True) from error
        except (ChatTemplateError, TemplateError) as error:
            raise refused(f"the chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template can raise anything that Python can
            raise refused(
                f"the chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from error

    def _compile(self, source: str) -> None:
        try:
            with self._limits():
                self._templates[source] = ChatTemplate(source, self._folder.special_tokens)
        except (ChatTemplateError, MemoryError, RecursionError) as error:
            self._templates[source] = str(error)

    def _rendered(self, prompt: ChatPrompt, now_s: float) -> Rendered:
        messages = _parsed(prompt.messages_json, list, "messages", "a list of messages")
        tools = variables = None
        if prompt.tools_json:
            tools = _parsed(prompt.tools_json, list, "tools", "a list of tools")
            if not all(isinstance(tool, dict) for tool in tools):
                raise refused("every tool must be an object", "invalid_value", "tools")
        template = self._template(has_tools=tools is not None)
        if prompt.template_kwargs_json:
            field = template_kwargs.FIELD
            variables = _parsed(prompt.template_kwargs_json, dict, field, "an object")
            template_kwargs.check(variables, self._settings.template_kwargs, template.source)
        forms = self._forms_of(template)
        conversation = Conversation(
            messages=for_template(messages, forms),
            tools=tools,
            variables=variables,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            keep_null_content=forms.call_content == "null",
        )
        text = template.render(conversation, now_s)
        continued = _final_text(messages) if prompt.continue_final_message else None
        return Rendered(text, tools or [], self._speech(template, text, continued))

    def _speech(self, template: ChatTemplate, text: str, continued: str | None) -> Speech:
        tool_format = self._settings.tool_format
        if tool_format == "auto":
            tool_format = tool_format_of(template.source)
        reasoning_format = self._settings.reasoning_format
        if reasoning_format == "auto":
            reasoning_format = reasoning_format_of(template.source)
        stage: Stage = "behind"
        if reasoning_format in REASONING_FORMATS:
            stage = stage_of(text, REASONING_FORMATS[reasoning_format], continued)
        # Models of deepseek_r1 may leave the first tag out; the others are asked not to reason.
        is_switched_off = reasoning_format == "think" and opens_reasoning(template.source)
        if stage == "before" and is_switched_off:
            stage = "behind"
        return Speech(
            tool_format="" if tool_format == "none" else tool_format,
            reasoning_format="" if reasoning_format == "none" else reasoning_format,
            stage=stage,
            template=template.source,
            makes_several_calls=self._forms_of(template).several_calls,
        )

    def _template(self, has_tools: bool) -> ChatTemplate:
        source = self._folder.template_for(has_tools)
        if source is None:
            raise refused(
                "this model has no chat template; use /v1/completions with a prompt instead",
                "no_chat_template",
            )
        template = self._templates[source]
        if isinstance(template, str):
            raise refused(f"this model's chat template is not valid: {template}")
        return template

    def _forms_of(self, template: ChatTemplate) -> MessageForms:
        forms = self._forms.get(template.source)
        if forms is None:
            forms = self._forms[template.source] = probe(template)
        return forms


def _final_text(messages: list[Any]) -> str:
    """Return the text of the message that the model continues."""
    content = messages[-1].get("content") if messages and isinstance(messages[-1], dict) else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _parsed(data: bytes, kind: type, field: str, what: str) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refused(f"{field} is not valid JSON: {error}", "invalid_json", field) from error
    if not isinstance(value, kind):
        raise refused(f"{field} must be {what}", "invalid_value", field)
    return value
