"""A process of the pool: tokenizes prompts and composes answers' grammars, one job at a time.

SIGALRM, with its default action, ends the process when a template takes too long.
"""

from __future__ import annotations

import gc
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from common.chat_formats import TOOL_FORMATS
from common.child_main import FrameWriter, ResourceLimits, limit_memory, serve
from common.errors import ModelError
from common.link.codec import unpack
from common.messages.arrays import int32s
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import ChatPrompt, IdsPrompt, OutputRules, TextPrompt
from common.parameter_kinds import pack_kinds
from common.tokenized import ExpectedAnswer
from common.tokenizer_folder import load_tokenizer, read_folder
from services.tokenizer.answer_grammar import compose
from services.tokenizer.chat_renderer import ChatRenderer, RenderedChat
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import (
    EncoderSettings,
    Job,
    Outcome,
    Refused,
    pack_outcome,
)
from services.tokenizer.lark import Vocabulary
from services.tokenizer.parameter_values import kinds_by_function

# What encoding may take, above what the process has: 8 MB of text took 1.5 GB, 190 bytes for each.
# A normalizer that makes two characters of one, forty times, would take all there is.
ENCODE_MEMORY_BYTES: Final = 256 << 20
ENCODE_MEMORY_RATIO: Final = 256
MAX_STRS: Final = 1 << 17  # packing and unpacking so many holds each loop for 10 ms


class PromptEncoder:
    """One vocabulary and its chat templates."""

    def __init__(
        self, settings: EncoderSettings, limits: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Load the folder; ModelError when it cannot be used.

        The code of templates and clients' grammars runs inside `limits()`.
        """
        self._settings = settings
        self._limits = limits
        folder = read_folder(Path(settings.folder), settings.chat_template)
        self._tokenizer = load_tokenizer(folder)
        self._vocabulary = Vocabulary(self._tokenizer)
        self._chats = ChatRenderer(folder, settings, limits)

    def run(self, job: Job) -> Outcome:
        """Tokenize the job's prompt, or refuse it; raises nothing that a client can cause."""
        try:
            return self._outcome(job)
        except Refused as error:
            return Outcome(int32s(), failure=error.failure, retiring=error.retiring)

    def _outcome(self, job: Job) -> Outcome:
        chat = RenderedChat()
        match job.prompt:
            case ChatPrompt() as prompt:
                chat = self._chats.render(prompt, job.now_s)
                # The template writes the special tokens itself.
                if (failure := job.bound.refusal(chat.text)) is not None:
                    return Outcome(int32s(), failure=failure)
                ids = self._encode(job.bound.cut(chat.text), add_special_tokens=False)
            case TextPrompt() as prompt:
                ids = self._encode(prompt.text, prompt.add_special_tokens)
            case IdsPrompt() as prompt:
                ids = prompt.ids
        strs: tuple[str, ...] = ()
        if job.want_strs:
            if len(ids) > MAX_STRS:
                message = f"may name {MAX_STRS} tokens at most (there are {len(ids)})"
                raise Refused(f"return_token_strs: {message}", "invalid_value", "return_token_strs")
            strs = tuple(self._tokenizer.id_to_token(token_id) or "" for token_id in ids)
        grammar_spec, format = self._grammar_spec(job.rules, chat), chat.answer_format
        is_open = format.stage == "inside"
        kinds = self._parameter_kinds(job.rules, chat)
        predicted = self._encode(job.prediction, False, "prediction") if job.prediction else ids[:0]
        answer = ExpectedAnswer(
            *(grammar_spec, format.tool_format, format.reasoning_format, is_open, kinds),
            prediction_ids=predicted.tobytes(),
        )
        return Outcome(ids, strs, answer=answer)

    def _grammar_spec(self, rules: OutputRules, chat: RenderedChat) -> GrammarSpec | None:
        if rules == OutputRules():
            return None
        try:
            with self._limits():
                return compose(rules, chat.tools, chat.answer_format, self._vocabulary)
        except (MemoryError, RecursionError) as error:
            field = "tools" if rules.structure is None else rules.structure.field
            message, retiring = f"{field} is too large or too deep", isinstance(error, MemoryError)
            raise Refused(message, "invalid_value", field, retiring=retiring) from error

    def _parameter_kinds(self, rules: OutputRules, chat: RenderedChat) -> bytes:
        """Return the packed kinds of the tools' parameters, where the answer's parser needs any."""
        markers = TOOL_FORMATS.get(chat.answer_format.tool_format)
        if rules.tools is None or markers is None or markers.parameters is None:
            return b""
        with self._limits():
            return pack_kinds(kinds_by_function(functions_of(chat.tools, rules.tools.inputs)))

    def _encode(self, text: str, add_special_tokens: bool, field: str | None = None) -> array[int]:
        limit, what = self._settings.max_prompt_bytes, field or "the prompt"
        if len(text) > limit:
            message = (
                f"{what} is {len(text)} characters long as the chat template renders it; "
                f"at most {limit} are accepted"
            )
            raise Refused(message, "prompt_too_large", field, status=413)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{what} is not valid Unicode: half of a surrogate pair at {error.start}"
            raise Refused(message, "invalid_unicode", field) from error
        # `fast` leaves out the offsets, which nothing reads here.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return int32s(encodings[0].ids)


def work(jobs: Iterator[bytes], owner: FrameWriter) -> int:
    """Serve until the jobs end; the command line has `EncoderSettings` as JSON."""
    try:
        settings = EncoderSettings(**json.loads(sys.argv[1]))
        limits = ResourceLimits(settings.template_timeout_s, settings.template_memory_mb << 20)
        encoder = PromptEncoder(settings, limits.held)
    except ModelError as error:
        owner.broken(str(error))
        return 1
    gc.freeze()
    limit_memory(ENCODE_MEMORY_BYTES + ENCODE_MEMORY_RATIO * settings.max_prompt_bytes)
    owner.ready()
    for job in jobs:
        outcome = encoder.run(unpack(Job, job))
        owner.write(pack_outcome(outcome))
        if outcome.retiring:
            break
    return 0


if __name__ == "__main__":
    serve(work)
