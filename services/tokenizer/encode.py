"""Makes ids of one prompt, and the rules of its answer. Runs in a process of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from common.messages.guidance import Guidance
from common.messages.tokenize import ChatPrompt, IdsPrompt, OutputRules, TextPrompt
from common.tokenizer_folder import load_tokenizer, read_folder
from services.tokenizer.bad_words import sequences_of
from services.tokenizer.chats import Chats, Rendered
from services.tokenizer.composition import Speech, compose
from services.tokenizer.functions import functions_of
from services.tokenizer.job import Answer, EncoderSettings, Job, Outcome
from services.tokenizer.refusal import Refused, refused
from services.tokenizer.vocabulary import Vocabulary


class PromptEncoder:
    """One vocabulary and its chat templates."""

    def __init__(
        self, settings: EncoderSettings, limits: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Load the folder; ModelError when it cannot be used.

        Whatever a template or a client's grammar makes us do happens inside of `limits()`.
        """
        self._settings = settings
        self._limits = limits
        folder = read_folder(Path(settings.folder), settings.chat_template)
        self._tokenizer = load_tokenizer(folder)
        self._vocabulary = Vocabulary(self._tokenizer)
        self._chats = Chats(folder, settings, limits)

    def run(self, job: Job) -> Outcome:
        """Make ids of the job's prompt, or say why not; raises nothing that a client can cause."""
        try:
            return self._outcome(job)
        except Refused as error:
            return Outcome(array("i"), failure=error.failure, retiring=error.retiring)

    def _outcome(self, job: Job) -> Outcome:
        rendered = None
        match job.prompt:
            case ChatPrompt() as prompt:
                rendered = self._chats.render(prompt, job.now_s)
                # The template writes the special tokens itself.
                ids = self._encode(rendered.text, add_special_tokens=False)
            case TextPrompt() as prompt:
                ids = self._encode(prompt.text, prompt.add_special_tokens)
            case IdsPrompt() as prompt:
                ids = prompt.ids
        strs: tuple[str, ...] = ()
        if job.want_strs:
            strs = tuple(self._tokenizer.id_to_token(token_id) or "" for token_id in ids)
        return Outcome(ids, strs, answer=self._answer(job.rules, rendered))

    def _answer(self, rules: OutputRules, rendered: Rendered | None) -> Answer:
        speech = Speech() if rendered is None else rendered.speech
        guidance = None
        if rules != OutputRules():
            guidance = self._guidance(rules, [] if rendered is None else rendered.tools, speech)
        return Answer(
            guidance=guidance,
            tool_format=speech.tool_format,
            reasoning_format=speech.reasoning_format,
            reasoning_open=speech.stage == "inside",
        )

    def _guidance(self, rules: OutputRules, tools: list[object], speech: Speech) -> Guidance | None:
        banned = sequences_of(rules.bad_words, self._tokenizer)
        try:
            with self._limits():
                use = rules.tools
                functions = [] if use is None else functions_of(tools, use.inputs)
                return compose(rules, functions, speech, self._vocabulary, banned)
        except (MemoryError, RecursionError) as error:
            field = "tools" if rules.structure is None else rules.structure.field
            because = refused(f"{field} is too large or too deep", "invalid_value", field)
            raise Refused(because.failure, retiring=isinstance(error, MemoryError)) from error

    def _encode(self, text: str, add_special_tokens: bool) -> array[int]:
        limit = self._settings.max_prompt_bytes
        if len(text) > limit:
            raise refused(
                f"the prompt is {len(text)} characters long as the chat template renders it; "
                f"at most {limit} are accepted",
                code="prompt_too_large",
                status=413,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise refused(
                f"the prompt is not valid Unicode: half of a surrogate pair at {error.start}",
                code="invalid_unicode",
            ) from error
        # `fast` leaves out the offsets, which nobody reads here.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encodings[0].ids)
