"""Jobs for the pool's processes, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from common.child_main import pack_frame
from common.link.codec import pack, unpack
from common.messages.arrays import Int32s
from common.messages.failure import TOO_LONG, Failure
from common.messages.tokenize import ChatPrompt, IdsPrompt, OutputRules, PromptSource, TextPrompt
from common.tokenized import ExpectedAnswer


class Refused(Exception):
    """A request that cannot be served; without a field it blames the prompt's.

    `retiring` means that this process should end after it.
    """

    def __init__(
        self,
        message: str,
        code: str = "template_error",
        field: str | None = None,
        status: int = 400,
        retiring: bool = False,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(status, code, message, field)
        self.retiring = retiring


@dataclass(frozen=True, slots=True)
class TextBound:
    """How much text is encoded for a prompt of up to `max_tokens` tokens; 0 is no bound.

    No text is that dense, so that a longer one would be encoded only to be refused: 8 MB took 10 s.
    Where the prompt may be cut, its text is cut at the same side.
    """

    max_tokens: int = 0
    max_chars_per_token: int = 0
    cut_side: Literal["left", "right", ""] = ""

    def refusal(self, text: str) -> Failure | None:
        """Return why a text is too long, if it is and may not be cut."""
        most = self.max_tokens * self.max_chars_per_token
        if self.cut_side or not 0 < most < len(text):
            return None
        num_tokens = -(-len(text) // self.max_chars_per_token)
        message = (
            f"this model takes prompts of {self.max_tokens} tokens at most, but this one has at "
            f"least {num_tokens}, in {len(text)} characters; shorten it"
        )
        return Failure(400, TOO_LONG, message, None, False, num_tokens, self.max_tokens)

    def cut(self, text: str) -> str:
        """Cut a text to what is encoded of it."""
        most = self.max_tokens * self.max_chars_per_token
        if not self.cut_side or not 0 < most < len(text):
            return text
        return text[-most:] if self.cut_side == "left" else text[:most]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to tokenize, as of Unix time `now_s`; `want_strs` asks for the tokens' texts.

    `rules` are the constraints on the answer, `prediction` is what it is expected to repeat.
    """

    prompt: PromptSource
    now_s: float
    want_strs: bool = False
    rules: OutputRules = OutputRules()
    bound: TextBound = TextBound()
    prediction: str = ""

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return size_of(self.prompt) + size_of(TextPrompt(self.prediction))

    @property
    def is_confined(self) -> bool:
        """Whether it runs untrusted code: a template, or a client's schema or grammar."""
        return isinstance(self.prompt, ChatPrompt) or self.rules != OutputRules()


# Where a prompt leaves the model: inside its reasoning, before it, or behind it.
ReasoningStage: TypeAlias = Literal["inside", "before", "behind"]


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """How a model writes its answer to this prompt; formats are empty where it has none."""

    tool_format: str = ""
    reasoning_format: str = ""
    stage: ReasoningStage = "behind"
    template: str = ""
    several_calls: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job; `retiring` means that the process ends after it."""

    ids: Int32s
    strs: tuple[str, ...] = ()
    failure: Failure | None = None
    retiring: bool = False
    answer: ExpectedAnswer = ExpectedAnswer()


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings of a process of the pool; they travel as JSON on its command line."""

    folder: str
    max_prompt_bytes: int
    template_timeout_s: float
    template_memory_mb: int
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    template_kwargs: tuple[str, ...] = ()  # that requests may set
    chat_template: str = ""


def size_of(prompt: PromptSource) -> int:
    """Return the bytes that a prompt takes in memory and on its way to a process."""
    match prompt:
        case ChatPrompt():
            kwargs = prompt.template_kwargs_json
            return len(prompt.messages_json) + len(prompt.tools_json) + len(kwargs)
        case TextPrompt():
            text = prompt.text
            return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        case IdsPrompt():
            return 4 * len(prompt.ids)


def pack_outcome(outcome: Outcome) -> bytes:
    """Frame an outcome, with `strs` apart: there may be more than a packed list can hold."""
    return pack_frame(["outcome", outcome.strs, pack(replace(outcome, strs=()))])


def unpack_outcome(report: list[Any]) -> Outcome:
    _, strs, packed = report
    return replace(unpack(Outcome, packed), strs=tuple(strs))
