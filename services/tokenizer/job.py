"""What passes between the service and the processes of its pool, and how it is framed.

Each frame is a little-endian 32-bit length and one MessagePack array; never pickle.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from common.link.codec import pack, unpack
from common.messages.failure import Failure
from common.messages.guidance import Guidance
from common.messages.tokenize import ChatPrompt, IdsPrompt, OutputRules, PromptSource, TextPrompt
from services.tokenizer.template_kwargs import WELL_KNOWN

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be made ids of, at Unix time `now_s`; `want_strs` asks for the tokens' texts.

    `rules` are what the client wants of the answer's tokens.
    """

    prompt: PromptSource
    now_s: float
    want_strs: bool = False
    rules: OutputRules = OutputRules()

    @property
    def is_confined(self) -> bool:
        """Whether it runs what is not ours: a template, or a client's schema or grammar."""
        return isinstance(self.prompt, ChatPrompt) or self.rules != OutputRules()


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has loaded its folder and takes jobs."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A process cannot load its folder, and says why before it ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of the answer beforehand: its tokens' rules, and the formats it is in.

    `reasoning_open` says that the prompt ends inside of reasoning.
    """

    guidance: Guidance | None = None
    tool_format: str = ""
    reasoning_format: str = ""
    reasoning_open: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the job that the process was given; `retiring` says that it ends now."""

    ids: array[int]
    strs: tuple[str, ...] = ()
    failure: Failure | None = None
    retiring: bool = False
    answer: Answer = Answer()


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What a process of the pool needs to know; it travels as JSON on its command line."""

    folder: str
    max_prompt_bytes: int
    template_timeout_s: float
    template_memory_mb: int
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    template_kwargs: tuple[str, ...] = WELL_KNOWN
    chat_template: str = ""


Report: TypeAlias = Ready | Broken | Outcome


def size_of(prompt: PromptSource) -> int:
    """Bytes that a prompt weighs in memory and on the way to a process."""
    match prompt:
        case ChatPrompt():
            return (
                len(prompt.messages_json)
                + len(prompt.tools_json)
                + len(prompt.template_kwargs_json)
            )
        case TextPrompt():
            text = prompt.text
            return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        case IdsPrompt():
            return 4 * len(prompt.ids)


def pack_job(job: Job) -> bytes:
    """Frame a job; UnicodeEncodeError when its text holds half a surrogate pair."""
    prompt = job.prompt
    body: tuple[Any, ...]
    match prompt:
        case ChatPrompt():
            body = (
                prompt.TAG,
                prompt.messages_json,
                prompt.tools_json,
                prompt.add_generation_prompt,
                prompt.continue_final_message,
                prompt.template_kwargs_json,
            )
        case TextPrompt():
            body = (prompt.TAG, prompt.text, prompt.add_special_tokens)
        case IdsPrompt():
            body = (prompt.TAG, prompt.ids.tobytes())
    return _framed([job.now_s, job.want_strs, pack(job.rules), *body])


def unpack_job(data: bytes) -> Job:
    """Read a job out of its frame."""
    now_s, want_strs, rules, tag, *fields = msgpack.unpackb(data)
    prompt: PromptSource
    if tag == ChatPrompt.TAG:
        prompt = ChatPrompt(*fields)
    elif tag == TextPrompt.TAG:
        prompt = TextPrompt(*fields)
    else:
        prompt = IdsPrompt(_ids(fields[0]))
    return Job(prompt, now_s, want_strs, unpack(OutputRules, rules))


def pack_report(report: Report) -> bytes:
    """Frame what a process has to say."""
    match report:
        case Ready():
            return _framed(["ready"])
        case Broken():
            return _framed(["broken", report.message])
        case Outcome():
            failure = report.failure
            told = None
            if failure is not None:
                told = [failure.status, failure.code, failure.message, failure.field]
            ids, answer = report.ids.tobytes(), pack(report.answer)
            return _framed(["outcome", ids, report.strs, told, report.retiring, answer])


def unpack_report(data: bytes) -> Report:
    """Read out of its frame what a process had to say."""
    tag, *fields = msgpack.unpackb(data)
    if tag == "ready":
        return Ready()
    if tag == "broken":
        return Broken(*fields)
    ids, strs, told, retiring, answer = fields
    failure = None if told is None else Failure(*told)
    return Outcome(_ids(ids), tuple(strs), failure, retiring, unpack(Answer, answer))


def _ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


def _framed(values: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(values)
    return HEADER.pack(len(packed)) + packed
