"""The compute service's inbox: prompts as ids, to be continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from common.messages.address import Address, AttemptId
from common.messages.arrays import Int32s, PackedInt32s, require_choices
from common.messages.control import Abort, RouterAlive
from common.messages.inspection import InspectionQuery
from common.messages.sampling import SamplingParams
from common.messages.timeline import TimelineQuery


@dataclass(frozen=True, slots=True)
class Generate:
    """Tokenizer to compute: continue these ids, `num_choices` times over.

    Choice i is the attempt `attempt.counter + i` and draws its noise for choice number
    `first_choice + i` of the seed. `output_ids` are what an earlier attempt already produced:
    kept apart from the prompt so that noise, penalties and limits count from the request's start.
    `header` is a packed `StreamHeader`, handed on unread. With `pooling` nothing is generated: the
    prompt's embedding is the answer.
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

    def check(self) -> None:
        """Raise `MalformedMessage` unless the choices are countable."""
        require_choices(self.num_choices, self.first_choice)


ComputeInbox: TypeAlias = Generate | Abort | RouterAlive | TimelineQuery | InspectionQuery
