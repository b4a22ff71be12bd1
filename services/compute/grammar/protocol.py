"""The mask worker, seen from compute: masks, settings, orders, reports, and the memory they share.

The settings travel as JSON on the worker's command line, the rest in frames (`common.child_main`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgpack
import numpy as np
from pydantic import Field

from common.child_main import pack_frame
from common.config import Settings
from common.host import shared_memory
from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    Int64Array,
    SlotDelta,
    StepPlan,
    StepResult,
    mask_words,
)

MOST_FORCED = 15
"""Tokens in a row that are known to be the only ones, as far as the worker goes ahead at once."""

NUM_PLANES = 2
NUM_THREADS = 4  # two of each plane
_HEAD_BYTES = 64
_NAME_INTS = 5 + MOST_FORCED
_NAME_BYTES = 4 * _NAME_INTS
_NAME = struct.Struct("=5i")  # without what is forced
_FORCED_BYTES = 4 * MOST_FORCED
_NONE_FORCED = bytes(_FORCED_BYTES)
_MAX_NAMED_BYTES = 1 << 16  # of one read: what a pipe holds


class MaskStatus(NamedTuple):
    """Which of a plan's masks are there."""

    ready: BoolArray  # [G]: of sample plan.structured[g]
    failures: dict[int, Failure]  # of samples that will never get a mask


class MaskSource(Protocol):
    """Makes masks of structured samples beside the engine's loop; no method waits for one."""

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        """Sequences take slots; have the first masks of those with a grammar made."""
        ...

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        """Take the tokens drawn by a plan's structured samples; have the next masks made."""
        ...

    def awaited(self) -> list[tuple[int, int]]:
        """Slots and epochs of the sequences whose next mask is not there."""
        ...

    def forced(self) -> list[ForcedTokens]:
        """Take the forced tokens that have become known since the last call."""
        ...

    def look(self, plan: StepPlan) -> MaskStatus:
        """Say which of the masks that a plan needs are there.

        Of a sample with drafts that is the last row's; those before it allow a draft each.
        """
        ...

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        """Copy the masks of those of the plan's structured samples that are ready [G, V / 32]."""
        ...


def stamp(epoch: int, index: int) -> int:
    """Identify a mask of a slot: its owner's epoch and the output index. Above 0."""
    return epoch << 32 | index


class GrammarSettings(Settings):
    """The model's side of masks, and the limits of what a grammar may cost.

    Without a tokenizer.json in `folder`, or what one is made of, there are no grammars, only lists
    of tokens.
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
    """Tokens of sequences, each to be followed by the next mask."""

    rows_R4: Int32Array  # slot, epoch, output index, token


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


class MaskMemory:
    """Anonymous shared memory, seen by all processes under one file descriptor.

    The worker writes and the engine reads. Each of the worker's two processes writes a plane of its
    own, so that neither overwrites the other's masks.

    The memory itself does not say that a mask is there: a processor may see another's writes in
    another order (ARM's do), and a mask read half new, half old would allow forbidden tokens. So a
    mask is named in a pipe after it is written; pipes hand bytes over under a lock of the kernel,
    which orders memory on every processor. The row is written again only when the engine has
    ordered the next mask of its slot, and by then it has copied this one. A new worker starts when
    the end of the reports has shown that both processes of the old one are gone.

    Names have a pipe of their own, which wakes nothing: the engine reads it when it looks for
    masks. With one report for a batch of masks, a late one delayed all others: 64 streams lost 10
    to 17 % of a step of 1.2 ms.

    `thread_stamps[i]` is the stamp of the mask that thread i of the worker makes, 0 for none, and
    `thread_slots[i]` its slot: that sequence is at fault should the worker die.
    """

    def __init__(self, fds: tuple[int, int, int], num_slots: int, vocab_size: int) -> None:
        words = mask_words(vocab_size)
        self.fds: tuple[int, ...] = fds
        fd, self._names_out, self._names_in = fds
        size = _bytes(num_slots, words)
        self._map = mmap.mmap(fd, size)
        self.thread_slots: Int32Array = np.frombuffer(self._map, np.int32, NUM_THREADS)
        self.thread_stamps: Int64Array = np.frombuffer(self._map, np.int64, NUM_THREADS, 16)
        count = NUM_PLANES * num_slots
        self.masks_PNW: Int32Array = np.frombuffer(
            self._map, np.int32, count * words, _HEAD_BYTES
        ).reshape(NUM_PLANES, num_slots, words)

    @staticmethod
    def create(num_slots: int, vocab_size: int) -> MaskMemory:
        fd = shared_memory("slipstream-masks", _bytes(num_slots, mask_words(vocab_size)))
        names_out, names_in = os.pipe()
        os.set_blocking(names_out, False)
        return MaskMemory((fd, names_out, names_in), num_slots, vocab_size)

    def name(
        self, slot: int, plane: int, epoch: int, index: int, forced: Sequence[int] = ()
    ) -> None:
        """Report a mask as written, and the tokens before it that were the only ones.

        A pipe keeps what is this short in one piece.
        """
        name = _NAME.pack(slot, plane, epoch, index, len(forced))
        name += array("i", forced).tobytes().ljust(_FORCED_BYTES, b"\0") if forced else _NONE_FORCED
        os.write(self._names_in, name)

    def named(self) -> Int32Array:
        """Return slot, plane, epoch and output index of the masks named since the last call, and
        how many tokens before each were forced, and which [R, 5 + MOST_FORCED]."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._names_out, _MAX_NAMED_BYTES // _NAME_BYTES * _NAME_BYTES)
        return np.frombuffer(data, np.int32).reshape(-1, _NAME_INTS)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def _bytes(num_slots: int, words: int) -> int:
    return _HEAD_BYTES + NUM_PLANES * num_slots * 4 * words
