"""The tokenizer's inbox: prompts as clients send them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import Address, AttemptId, Route
from common.messages.arrays import Int32s, require_choices
from common.messages.control import Abort, RouterAlive
from common.messages.queries import InspectionQuery, TimelineQuery
from common.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template; its JSON texts were parsed once, by the router."""

    TAG: ClassVar[str] = "chat"
    messages_json: bytes
    tools_json: bytes = b""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs_json: bytes = b""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A plain text, with or without the tokenizer's special tokens around it."""

    TAG: ClassVar[str] = "text"
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt that is token ids already."""

    TAG: ClassVar[str] = "ids"
    ids: Int32s


PromptSource: TypeAlias = ChatPrompt | TextPrompt | IdsPrompt


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """How many tokens one request may have, as the compute service of its route declares."""

    max_model_len: int
    max_input_length: int
    max_output_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The client's wishes for the text stream; the tokenizer makes the stream header of them.

    `parse_tools` and `parse_reasoning` ask for tool calls and reasoning apart from the text, if the
    model's chat format has them.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    parse_tools: bool = False
    parse_reasoning: bool = False
    return_prompt_ids: bool = False


StructureKind: TypeAlias = Literal[
    "json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"
]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the whole answer must look like.

    `text` is a JSON schema, a regular expression, a JSON array of the choices, a grammar (Lark,
    GBNF or EBNF), or the format of a structural tag as JSON; of a `json_object` it is empty.
    `field` is where the client wrote it. JSON that is `compact` stands on one line; a schema that
    is not `strict` may have keywords that no grammar holds.
    """

    kind: StructureKind
    text: str
    field: str
    compact: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolInput:
    """The Lark grammar of what a tool takes: of the text that is its one argument, `input`."""

    tool: str
    lark: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools of the prompt the answer may call (auto) or must call (required, named).

    `inputs` has the grammars of tools whose argument is a text.
    """

    choice: Literal["auto", "required", "named"]
    name: str = ""
    parallel: bool = True
    inputs: tuple[ToolInput, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What the answer's tokens have to obey; the tokenizer makes a `GrammarSpec` of it.

    `thinking_budget` bounds the tokens of reasoning; -1 leaves them unbounded.
    """

    structure: Structure | None = None
    tools: ToolUse | None = None
    thinking_budget: int = -1
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Router to tokenizer: make ids of this prompt and send them on to compute.

    `num_choices` attempts start at `attempt.counter`. `output_ids` and `accepted_characters` are
    a retry's journal and empty at first. Times are Unix seconds, fixed at admission. A prompt of
    more than `truncate_to` tokens (if that is not 0) is cut at its `truncate_side`.
    With `pooling` the answer is the prompt's embedding. `prediction` is what the answer is expected
    to repeat, to draft from.
    """

    TAG: ClassVar[str] = "tokenize"
    attempt: AttemptId
    route: Route
    prompt: PromptSource
    sampling: SamplingParams
    stream: StreamSettings
    limits: TokenLimits
    admitted_at_s: float
    output_ids: Int32s
    accepted_characters: int = 0
    num_choices: int = 1
    first_choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    prompt_field: str = "prompt"
    traceparent: str = ""
    rules: OutputRules = OutputRules()
    truncate_to: int = 0
    truncate_side: Literal["left", "right"] = "left"
    pooling: bool = False
    client: str = ""
    prediction: str = ""

    def check(self) -> None:
        require_choices(self.num_choices, self.first_choice)


@dataclass(frozen=True, slots=True)
class TokenizeQuery:
    """Router to tokenizer: make ids of this prompt and send them back (`/tokenize`).

    `limits` are those of the model that the client asks for.
    """

    TAG: ClassVar[str] = "tokenize_query"
    query: AttemptId
    reply: Address
    prompt: PromptSource
    prompt_field: str = "prompt"
    return_token_strs: bool = False
    traceparent: str = ""
    limits: TokenLimits | None = None


TokenizerInbox: TypeAlias = (
    Tokenize | TokenizeQuery | Abort | RouterAlive | TimelineQuery | InspectionQuery
)
