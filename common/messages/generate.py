"""The compute service's inbox: prompts as ids, to be continued, and the header of their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from common.messages.address import Address, AttemptId
from common.messages.arrays import Int32s, PackedInt32s, require, require_choices
from common.messages.control import Abort, RouterAlive
from common.messages.queries import InspectionQuery, TimelineQuery
from common.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """Settings of one request's text stream, packed to bytes inside `Generate`.

    `prompt_tail_ids` are the last ids of the prompt, so that the first output token is decoded in
    its context. `accepted_ids` (a retry's journal) are output ids that the client has already;
    their text is replayed for stop strings and suppressed.

    `tool_format` and `reasoning_format` name the parsers of the answer, where it needs any;
    `reasoning_open` says that the prompt itself ends inside of reasoning. Ids of tool calls are
    made of `call_key`, the same for a retry, and of the choice: the attempt's counter less
    `first_counter`. `prompt_ids` are packed int32, and there only where the client wants them back.
    `parameter_kinds` (packed `Kinds`) are there where the tool format writes values as they are.
    """

    reply: Address
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int = -1
    min_tokens: int = 0  # no stop string ends the stream before this many output tokens
    prompt_tail_ids: tuple[int, ...] = ()
    accepted_ids: tuple[int, ...] = ()
    accepted_characters: int = 0
    traceparent: str = ""
    tool_format: str = ""
    reasoning_format: str = ""
    reasoning_open: bool = False
    call_key: str = ""
    first_counter: int = 0
    prompt_ids: bytes = b""
    parameter_kinds: bytes = b""


@dataclass(frozen=True, slots=True)
class Generate:
    """To compute, from a tokenizer or, of ids, a router: continue these, `num_choices` times over.

    Choice i is the attempt `attempt.counter + i` and draws its noise for choice number
    `first_choice + i` of the seed. `output_ids` are what an earlier attempt already produced:
    kept apart from the prompt so that noise, penalties and limits count from the request's start.
    `header` is a packed `StreamHeader`, handed on unread. With `pooling` nothing is generated: the
    prompt's embedding is the answer. `client` is who asks, so that none takes another's turn.
    `prediction_ids`, packed int32, are what the answer is expected to repeat, to draft from.
    """

    TAG: ClassVar[str] = "generate"
    attempt: AttemptId
    detokenizer: Address
    prompt_ids: PackedInt32s
    output_ids: Int32s
    sampling: SamplingParams
    header: bytes
    admitted_at_s: float
    num_choices: int = 1
    first_choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    pooling: bool = False
    client: str = ""
    prediction_ids: bytes = b""  # no column: the release before would not pass over it

    def check(self) -> None:
        require(len(self.prediction_ids) % 4 == 0, "prediction_ids are no 32-bit integers")
        require_choices(self.num_choices, self.first_choice)


ComputeInbox: TypeAlias = Generate | Abort | RouterAlive | TimelineQuery | InspectionQuery
