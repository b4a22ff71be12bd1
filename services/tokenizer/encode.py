"""Makes ids of one prompt: JSON, chat template, vocabulary. Runs in a process of the pool."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.messages.failure import Failure
from common.messages.tokenize import ChatPrompt, IdsPrompt, TextPrompt
from common.tokenizer_folder import TokenizerFolder, load_tokenizer, read_folder
from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Conversation
from services.tokenizer.conversation import (
    ContentForms,
    UnsupportedContent,
    for_template,
    probe,
)
from services.tokenizer.job import EncoderSettings, Job, Outcome

# Arguments of apply_chat_template that a request decides by other fields, or not at all.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)


class _Refused(Exception):
    def __init__(self, failure: Failure, retiring: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retiring = retiring


class PromptEncoder:
    """One vocabulary and its chat templates."""

    def __init__(
        self, settings: EncoderSettings, limits: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Load the folder; ModelError when it cannot be used.

        Whatever a template does happens inside of `limits()`.
        """
        self._settings = settings
        self._limits = limits
        self._folder: TokenizerFolder = read_folder(Path(settings.folder))
        self._tokenizer = load_tokenizer(self._folder)
        self._templates: dict[str, ChatTemplate | str] = {}  # by source; a text says what is wrong
        self._forms: dict[str, ContentForms] = {}
        for source in self._folder.templates.values():
            self._compile(source)

    def run(self, job: Job) -> Outcome:
        """Make ids of the job's prompt, or say why not; raises nothing that a client can cause."""
        try:
            ids = self._ids(job)
        except _Refused as refused:
            return Outcome(array("i"), failure=refused.failure, retiring=refused.retiring)
        strs: tuple[str, ...] = ()
        if job.want_strs:
            strs = tuple(self._tokenizer.id_to_token(token_id) or "" for token_id in ids)
        return Outcome(ids, strs)

    def _ids(self, job: Job) -> array[int]:
        match job.prompt:
            case ChatPrompt() as prompt:
                # The template writes the special tokens itself.
                return self._encode(self._render(prompt, job.now_s), add_special_tokens=False)
            case TextPrompt() as prompt:
                return self._encode(prompt.text, prompt.add_special_tokens)
            case IdsPrompt() as prompt:
                return prompt.ids

    def _encode(self, text: str, add_special_tokens: bool) -> array[int]:
        limit = self._settings.max_prompt_bytes
        if len(text) > limit:
            raise _refused(
                f"the prompt is {len(text)} characters long as the chat template renders it; "
                f"at most {limit} are accepted",
                code="prompt_too_large",
                status=413,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _refused(
                f"the prompt is not valid Unicode: half of a surrogate pair at {error.start}",
                code="invalid_unicode",
            ) from error
        # `fast` leaves out the offsets, which nobody reads here.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encodings[0].ids)

    def _compile(self, source: str) -> None:
        try:
            with self._limits():
                self._templates[source] = ChatTemplate(source, self._folder.special_tokens)
        except (ChatTemplateError, MemoryError, RecursionError) as error:
            self._templates[source] = str(error)

    def _render(self, prompt: ChatPrompt, now_s: float) -> str:
        try:
            with self._limits():
                return self._rendered(prompt, now_s)
        except (_Refused, UnsupportedContent) as error:
            if isinstance(error, _Refused):
                raise
            raise _refused(str(error), code="unsupported_content", field=error.field) from error
        except MemoryError as error:
            # What was allocated stays mapped here and there; a fresh process is cheaper than doubt.
            limit = self._settings.template_memory_mb
            raise _Refused(
                _failure(f"the chat template needs more than {limit} MiB for this conversation"),
                retiring=True,
            ) from error
        except (ChatTemplateError, TemplateError) as error:
            raise _refused(f"the chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template can raise anything that Python can
            raise _refused(
                f"the chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from error

    def _rendered(self, prompt: ChatPrompt, now_s: float) -> str:
        messages = _parsed(prompt.messages_json, list, "messages", "a list of messages")
        tools = variables = None
        if prompt.tools_json:
            tools = _parsed(prompt.tools_json, list, "tools", "a list of tools")
            if not all(isinstance(tool, dict) for tool in tools):
                raise _refused("every tool must be an object", field="tools", code="invalid_value")
        if prompt.template_kwargs_json:
            field = "chat_template_kwargs"
            variables = _parsed(prompt.template_kwargs_json, dict, field, "an object")
            for name in sorted(_RESERVED & variables.keys()):
                raise _refused(
                    f"{field} must not set {name}; the request has a field of its own for it, "
                    "or the server decides it",
                    field=f"{field}.{name}",
                    code="invalid_value",
                )
        template = self._template(has_tools=tools is not None)
        conversation = Conversation(
            messages=for_template(messages, self._forms_of(template)),
            tools=tools,
            variables=variables,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
        )
        return template.render(conversation, now_s)

    def _template(self, has_tools: bool) -> ChatTemplate:
        source = self._folder.template_for(has_tools)
        if source is None:
            raise _refused(
                "this model has no chat template; use /v1/completions with a prompt instead",
                code="no_chat_template",
            )
        template = self._templates[source]
        if isinstance(template, str):
            raise _refused(f"this model's chat template is not valid: {template}")
        return template

    def _forms_of(self, template: ChatTemplate) -> ContentForms:
        forms = self._forms.get(template.source)
        if forms is None:
            forms = self._forms[template.source] = probe(template)
        return forms


def _parsed(data: bytes, kind: type, field: str, what: str) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{field} is not valid JSON: {error}", "invalid_json", field) from error
    if not isinstance(value, kind):
        raise _refused(f"{field} must be {what}", code="invalid_value", field=field)
    return value


def _refused(
    message: str, code: str = "template_error", field: str | None = None, status: int = 400
) -> _Refused:
    return _Refused(_failure(message, code, field, status))


def _failure(
    message: str, code: str = "template_error", field: str | None = None, status: int = 400
) -> Failure:
    return Failure(status=status, code=code, message=message, field=field)
