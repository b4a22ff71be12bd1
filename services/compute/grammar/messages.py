"""What passes between compute and its mask worker: settings, orders and reports.

The settings travel as JSON on the worker's command line, the rest in frames (`common.child_main`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
from pydantic import Field

from common.child_main import pack_frame
from common.config import Settings
from common.messages.sampling import GrammarSpec
from services.compute.step import Int32Array


class GrammarSettings(Settings):
    """The model's side of masks, and the limits of what a grammar may cost.

    `folder` may be without a tokenizer.json: then there are no grammars, but lists of tokens.
    """

    folder: str
    vocab_size: int = Field(ge=1)  # width of the logits
    eos_token_ids: tuple[int, ...]
    num_slots: int = Field(ge=1)
    compile_timeout_s: float = 5.0
    step_timeout_s: float = 10.0
    memory_mb: int = 1024  # of the process, beside what the tokenizer takes
    max_grammar_bytes: int = 1 << 20
    cores: tuple[int, ...] = ()  # that the process may use; none: those of its parent
    cache_entries: int = 256
    cache_bytes: int = 4 << 20  # of grammars' text; compiled they take 70 to 95 times as much


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Compile a grammar and keep it; a `GrammarCompiled` of the same number answers."""

    number: int
    grammar: str


@dataclass(frozen=True, slots=True)
class StartSequence:
    """A sequence has taken a slot: write the mask of the token after `output_ids`.

    It ends with one of the model's own `eos_ids` or of the client's `stop_ids`.
    """

    slot: int
    epoch: int
    grammar_spec: GrammarSpec
    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    max_tokens: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcceptTokens:
    """Tokens of sequences, each to be followed by the next mask.

    Columns: slot, epoch, output index, token.
    """

    rows_R4: Int32Array


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """A grammar can be used, or `error` says why it cannot be."""

    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class MasksWritten:
    """New masks are in the shared memory, and named."""


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A sequence gets no further mask: a 400 where its grammar is at fault, else a 500."""

    slot: int
    epoch: int
    message: str
    status: int = 400


Order: TypeAlias = CompileGrammar | StartSequence | AcceptTokens
Report: TypeAlias = GrammarCompiled | MasksWritten | SequenceFailed


def pack_order(order: Order) -> bytes:
    """Frame an order; UnicodeEncodeError for half a surrogate pair."""
    match order:
        case AcceptTokens():
            return pack_frame(["accept", order.rows_R4.tobytes()])
        case CompileGrammar():
            return pack_frame(["compile", order.number, order.grammar])
        case StartSequence():
            fields = [getattr(order, name) for name in order.__slots__]
            fields[2] = [getattr(order.grammar_spec, name) for name in order.grammar_spec.__slots__]
            return pack_frame(["start", *fields])


def unpack_order(data: bytes) -> Order:
    tag, *fields = msgpack.unpackb(data, use_list=False)
    if tag == "accept":
        return AcceptTokens(np.frombuffer(fields[0], dtype=np.int32).reshape(-1, 4))
    if tag == "compile":
        return CompileGrammar(*fields)
    slot, epoch, grammar_spec, *rest = fields
    return StartSequence(slot, epoch, GrammarSpec(*grammar_spec), *rest)


def pack_report(report: Report) -> bytes:
    match report:
        case MasksWritten():
            return pack_frame(["masks"])
        case GrammarCompiled():
            return pack_frame(["compiled", report.number, report.error])
        case SequenceFailed():
            return pack_frame(["failed", *astuple(report)])


def unpack_report(report: list[Any]) -> Report:
    tag, *fields = report
    if tag == "masks":
        return MasksWritten()
    return GrammarCompiled(*fields) if tag == "compiled" else SequenceFailed(*fields)
