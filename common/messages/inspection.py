"""Questions of operators to a worker, and its answers as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import Address, AttemptId

Subject: TypeAlias = Literal["tokenizer", "prefix_cache_reset"]


@dataclass(frozen=True, slots=True)
class InspectionQuery:
    """Router to worker: describe your tokenizer, or empty your prefix cache and say how it went."""

    TAG: ClassVar[str] = "inspection_query"
    query: AttemptId
    reply: Address
    subject: Subject


@dataclass(frozen=True, slots=True)
class Inspection:
    """Worker to router: the answer to an `InspectionQuery`, a JSON object."""

    TAG: ClassVar[str] = "inspection"
    query: AttemptId
    found_json: bytes
